# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Reading packets' files: from a folder where they lie, from a URL by way of a folder that keeps copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvspeed.packet.file import FORMAT, VERSION, parse_packet
from kvspeed.packet.packet import Packet
from kvspeed.packet.store.backend import Backend
from kvspeed.packet.store.errors import NameTakenError, StoreError
from kvspeed.packet.store.tiers import DiskTier
from kvspeed.packet.tensorfile import TensorFileError, parse_description

__all__ = ["Checksums", "Reader"]

_USUAL_HEAD = 2**16  # bytes in which the heads of most packets end

Checksums = Literal["once", "always", "never"]


@dataclass(frozen=True)
class _Bytes:
    """A file that is there already, to be copied."""

    data: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.data)

    def pieces(self) -> Iterator[memoryview]:
        yield self.data.numpy().data


class Reader:
    """Reads and checks packets of `backend`.

    Checksums: a packet's bytes are compared with its checksum when this object first reads the file ("once"), whenever
    it does ("always"), or not ("never"; structure and description are checked all the same). "once" costs one pass
    over the bytes, in which they are brought into memory; the file (its inode, size and checksum) is remembered, and a
    file is never changed in place, so the next reading is as fast as mapping.

    Args:
        backend: where packets come from.
        cache: where copies are kept, for a backend that is far away; None: in memory only.
        checksums: see above.
    """

    def __init__(self, backend: Backend, cache: DiskTier | None, checksums: Checksums) -> None:
        if checksums not in ("once", "always", "never"):
            raise ValueError(f'checksums: expected "once", "always" or "never", got {checksums!r}')
        self.backend = backend
        self.cache = cache
        self.checksums = checksums
        self._verified: set[Any] = set()

    def read(self, name: str, *, verify: bool = False) -> Packet:
        """The packet at `name`.

        Args:
            verify: compare the checksum now, whatever `checksums` says, and of the original, not of a copy.

        Raises:
            FileNotFoundError: there is none.
            TensorFileError: the file is damaged.
            StoreError: the place cannot be read.
        """
        if self.cache is None or verify:
            return self._parse(self.backend, name, verify)
        try:
            return self._parse(self.cache.backend, name, False)
        except FileNotFoundError:
            pass
        except TensorFileError:  # a damaged copy is fetched anew, and stays where nothing can be removed
            with suppress(StoreError):
                self.forget(name)
        data, _ = self.backend.read(name)
        try:
            self.cache.make_room(len(data), (), replaced=name)
            self.cache.backend.write(name, _Bytes(data))  # type: ignore[arg-type]
            return self._parse(self.cache.backend, name, False)
        except (StoreError, FileNotFoundError):  # larger than the cache, a full disk, or evicted by another reader
            return parse_packet(data, self._source(self.backend, name), verify=self.checksums != "never")

    def prefetch(self, names: list[str]) -> None:
        """These are about to be read, in this order."""
        if self.cache is None:
            self.backend.prefetch(names)
            return
        here = [name for name in names if self.cache.backend.entry(name) is not None]
        self.cache.backend.prefetch(here)
        self.backend.prefetch([name for name in names if name not in here])

    def touch(self, name: str) -> bool:
        """Note that `name` is used; False where it is known to be gone."""
        if self.cache is not None:
            self.cache.backend.touch(name)
        return self.backend.touch(name)

    def forget(self, name: str) -> None:
        """Remove the copy of a packet that is removed, or replaced."""
        if self.cache is not None:
            with suppress(NameTakenError):  # what is in its place is not read as a copy either
                self.cache.backend.delete(name)

    def description(self, name: str) -> tuple[dict[str, Any], int]:
        """`(description, bytes that the file must have)` from the beginning of a file, damaged or not.

        Raises:
            FileNotFoundError, TensorFileError: it is not there, or not even its beginning is whole.
        """
        start = self.backend.read_start(name, _USUAL_HEAD)
        length = 8 + min(int.from_bytes(start[:8], "little"), 10**8)
        if length > len(start) == _USUAL_HEAD:
            start = self.backend.read_start(name, length)
        return parse_description(start, self._source(self.backend, name), FORMAT, VERSION)

    def _parse(self, backend: Backend, name: str, verify: bool) -> Packet:
        data, identity = backend.read(name)
        compared: list[str] = []

        def wanted(checksum: str) -> bool:
            # an inode is used again when its file is gone, so that alone is not the file's identity
            known = identity is not None and (identity, checksum) in self._verified
            if verify or self.checksums == "always" or (self.checksums == "once" and not known):
                compared.append(checksum)
            return bool(compared)

        packet = parse_packet(data, self._source(backend, name), verify=wanted)
        if identity is not None:
            self._verified.update((identity, checksum) for checksum in compared)
        return packet

    @staticmethod
    def _source(backend: Backend, name: str) -> str:
        return f"{backend.place.rstrip('/')}/{name}"
