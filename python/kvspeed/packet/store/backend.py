# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A place for packets: names such as "recipe/id.packet.safetensors" in, bytes out. Two kinds: a folder, and a URL.

Names are made by the store from checked parts and never come from a file or a user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvspeed.packet.tensorfile import Encoded

__all__ = ["ENDING", "Backend", "Entry"]

ENDING = ".packet.safetensors"


@dataclass(frozen=True)
class Entry:
    """A packet's file.

    Attributes:
        name: below the store's root.
        size: in bytes.
        used: when it was last used, in nanoseconds since 1970; 0 where the place does not keep that.
    """

    name: str
    size: int
    used: int = 0

    @property
    def id(self) -> str:
        """The packet's name."""
        return self.name.rpartition("/")[2].removesuffix(ENDING)

    @property
    def folder(self) -> str:
        """The recipe's name."""
        return self.name.rpartition("/")[0]


class Backend(Protocol):
    """What a store needs of a place. Errors are `StoreError`s, and FileNotFoundError for what is not there."""

    place: str

    def read_small(self, name: str) -> bytes | None:
        """A small file whole, None where it is not there; nothing of what is no file."""

    def write_small(self, name: str, data: bytes) -> None:
        """Write a small file in one step."""

    def folders(self) -> list[str]:
        """Names of the folders below the root; none where there is no root yet."""

    def is_empty(self) -> bool:
        """Whether there is nothing at the root but hidden and unfinished files, or no root."""

    def entries(self, folder: str) -> Iterator[Entry]:
        """The packets of a folder."""

    def obstacles(self, folder: str) -> list[Entry]:
        """What has a packet's name in a folder and is no file, of size 0; reading it says what it is."""

    def entry(self, name: str) -> Entry | None:
        """One packet, None where it is not there, or is no file."""

    def write(self, name: str, encoded: Encoded) -> None:
        """Write a packet in one step: others see all of it or nothing."""

    def read(self, name: str) -> tuple[torch.Tensor, Any]:
        """`(data, identity)`: uint8 `[size]`, writable without effect on the file; what is equal for the same file, or
        None where every reading must be taken for another. TensorFileError for what is no file."""

    def read_start(self, name: str, count: int) -> bytes:
        """The first `count` bytes, or all where there are fewer. TensorFileError for what is no file."""

    def prefetch(self, names: list[str]) -> None:
        """These are about to be read."""

    def delete(self, name: str) -> bool:
        """Remove a packet, or what is in its place; whether it was there. NameTakenError where that must not go."""

    def touch(self, name: str) -> bool:
        """Note that a packet is used; False where it is certain that it is not there."""

    def claim(self, name: str, wait: bool) -> AbstractContextManager[bool]:
        """Keep other processes from making the same packet; yields False where another does and `wait` is False."""

    def litter(self, grace_s: float) -> list[Entry]:
        """Unfinished files whose writers are gone, and that are older than `grace_s` seconds."""

    def remove_litter(self, grace_s: float) -> list[Entry]:
        """Remove them; returns what was removed."""

    def remove_empty(self, folder: str) -> None:
        """Remove a folder that holds no packets."""
