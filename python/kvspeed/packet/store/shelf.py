# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The packets of one store as they lie: read and checked, rebuilt where they are damaged, written, removed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable

import torch

from kvspeed.packet.file import encode_packet
from kvspeed.packet.packet import Packet
from kvspeed.packet.store.backend import ENDING, Backend
from kvspeed.packet.store.builder import Builder
from kvspeed.packet.store.catalogue import Catalogue
from kvspeed.packet.store.errors import DamagedPacketError, MissingPacketError, StoreError
from kvspeed.packet.store.fetch import Checksums, Reader
from kvspeed.packet.store.local import LocalBackend
from kvspeed.packet.store.recipe import Recipe
from kvspeed.packet.store.reports import Counters
from kvspeed.packet.store.rescue import check_head, text_in_head
from kvspeed.packet.store.tiers import DiskTier, MemoryTier
from kvspeed.packet.tensorfile import TensorFileError

__all__ = ["Shelf"]


class Shelf:
    """A place, its tiers, and the way its packets are made.

    Args:
        backend: where the packets are.
        disk: its limit.
        copies: where copies of a far place are kept, or None.
        memory: packets at hand.
        checksums: when they are compared, see `Reader`.
        builder: makes the packets; None where they are only looked at.
        device: where loaded packets are put; None leaves them where they are.
    """

    def __init__(
        self,
        backend: Backend,
        disk: DiskTier,
        copies: DiskTier | None,
        memory: MemoryTier,
        checksums: Checksums,
        builder: Builder | None,
        device: torch.device | str | None,
    ) -> None:
        self.backend, self.disk, self.copies, self.memory = backend, disk, copies, memory
        self.builder, self.device = builder, device
        self.recipe: Recipe | None = builder.recipe if builder is not None else None
        self.reader = Reader(backend, copies, checksums)
        self.catalogue = Catalogue(backend)
        self.building = threading.RLock()
        self.damaged: set[str] = set()  # found so by `is_whole`, to be replaced
        self.counters = Counters()

    def name(self, id: str) -> str:
        """Where the packet `id` is, or would be."""
        if self.recipe is not None:
            return f"{self.recipe.name}/{id}{ENDING}"
        entry = self.catalogue.find(id, None)
        return entry.name if entry is not None else f"{'0' * 16}/{id}{ENDING}"

    # ---- reading -----------------------------------------------------------------------------------------------

    def get(self, id: str) -> Packet:
        """The packet `id`, from memory or its file; see `PacketStore.__getitem__`."""
        packet = self.memory.get(id)
        if packet is not None:
            if self.reader.touch(self.name(id)):
                self.counters.hits += 1
                return packet
            self.forget(id)  # another process removed it
        packet = self._read(id)
        if self.device is not None:
            packet = packet.to(self.device)
        self.memory.put(id, packet)
        return packet

    def full(self, id: str, packet: Packet) -> Packet:
        """The packet in the model's dtype, kept at hand as well where it is stored in fewer bits."""
        if packet.compute_dtype is None:
            return packet
        whole = self.memory.get(_full_name(id))
        if whole is None:
            whole = packet.full()
            self.memory.put(_full_name(id), whole)
        return whole

    def prefetch(self, ids: Iterable[str]) -> None:
        """These are about to be got."""
        self.reader.prefetch([self.name(id) for id in dict.fromkeys(ids) if self.memory.get(id) is None])

    def _read(self, id: str) -> Packet:
        name = self.name(id)
        try:
            packet = self.reader.read(name)
            self.check(id, name, packet)
        except FileNotFoundError:
            raise MissingPacketError(self.catalogue.missing(id, self.recipe)) from None
        except TensorFileError as error:
            packet, refused = self.rebuild(id, error)
            unstored = f", and not stored ({refused})" if refused is not None else ""
            warnings.warn(f"{error}; it is rebuilt now from its text{unstored}", RuntimeWarning, stacklevel=4)
            return packet
        self.reader.touch(name)
        self.counters.loaded += 1
        return packet

    def check(self, id: str, name: str, packet: Packet) -> None:
        """Refuse a file that is a packet, but not the one of this name."""
        recipe = self.recipe if self.recipe is not None else self.catalogue.recipe(name.partition("/")[0])
        if recipe is None:
            return
        difference = recipe.difference(packet)
        if difference is None and recipe.id_of(packet.text, packet.token_ids) != id:
            difference = f"it holds {packet!r}"
        if difference is not None:
            raise TensorFileError(
                f"{self.backend.place.rstrip('/')}/{name} is another packet than its name says ({difference})"
            )

    # ---- writing and removing ----------------------------------------------------------------------------------

    def make(self, builder: Builder, text: str) -> Packet:
        """The packet of `text`, computed now."""
        packet = builder.make(text)
        self.counters.built += 1
        return packet

    def put(self, id: str, packet: Packet, keep: Iterable[str]) -> None:
        """Write a packet; others than those in `keep` may have to make room for it."""
        encoded = encode_packet(packet)
        name = self.name(id)
        self.counters.evicted += len(self.disk.make_room(encoded.size, frozenset(keep), replaced=name))
        self.reader.forget(name)
        self.backend.write(name, encoded)

    def remove(self, id: str, name: str) -> bool:
        """Remove a packet here and from all tiers; whether it was there."""
        self.forget(id)
        self.reader.forget(name)
        return self.backend.delete(name)

    def forget(self, id: str) -> None:
        """Let go what is in memory of a packet."""
        self.memory.drop(id)
        self.memory.drop(_full_name(id))

    # ---- damage ------------------------------------------------------------------------------------------------

    def is_whole(self, id: str) -> bool:
        """Whether the packet is there; a damaged one is named in a warning, and counts as missing.

        Raises:
            NameTakenError: something that must not be replaced is in its place.
            StoreError: the place cannot be read.
        """
        name = self.name(id)
        entry = self.backend.entry(name)
        try:
            if isinstance(self.backend, LocalBackend):
                self.check(id, name, self.reader.read(name))
            elif entry is not None:
                check_head(self.reader, self.recipe, id, entry)
            else:
                return False
        except FileNotFoundError:
            return False
        except TensorFileError as error:
            if entry is None and self.backend.entry(name) is None:  # no file, which writing one might not replace
                self.backend.delete(name)
            warnings.warn(f"{error}; it is rebuilt now", RuntimeWarning, stacklevel=5)
            self.damaged.add(id)
            self.counters.rebuilt += 1
            return False
        self.reader.touch(name)
        return True

    def rebuild(self, id: str, error: TensorFileError) -> tuple[Packet, StoreError | None]:
        """`(packet, why not stored)`: that of a damaged file, made anew from the text that the file still tells.

        It is stored again where that is possible, and can be used in any case.

        Raises:
            DamagedPacketError: it does not tell it, or this store has no model to make it with.
        """
        text = self._rescued_text(id)
        if text is None:
            raise DamagedPacketError(
                f"{error}; its text is lost with it: add the text again, or remove it with del store[{id!r}]"
            ) from error
        builder = self.builder
        if builder is None:
            raise DamagedPacketError(
                f"{error}; its text is whole, and a store that is opened with the model rebuilds it"
            ) from error
        if not builder.unchanged():
            raise DamagedPacketError(
                f"{error}; it cannot be rebuilt, since the model or the adapter changed since this store was opened"
            ) from error
        with self.building:
            packet = self.make(builder, text)
            try:
                self.put(id, packet, keep=[id])
            except StoreError as refused:  # full, read-only, or just now out of reach
                return packet, refused
            self.counters.rebuilt += 1
        return packet, None

    def _rescued_text(self, id: str) -> str | None:
        """The text in the head of a damaged file, if it is the one that the id was made from."""
        name = self.name(id)
        recipe = self.recipe if self.recipe is not None else self.catalogue.recipe(name.partition("/")[0])
        try:
            found = text_in_head(self.reader, recipe, id, name)
            if found is None or (self.builder is not None and self.builder.token_ids("text", found[0]) != found[1]):
                return None
        except (FileNotFoundError, TypeError, ValueError):
            return None
        return found[0]


def _full_name(id: str) -> str:
    """Under which memory keeps the packet in the model's dtype."""
    return f"{id} full"
