# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What keeps the most recently used: packets in memory, files on a disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection

from kvspeed.packet.packet import Packet
from kvspeed.packet.store.backend import Backend, Entry
from kvspeed.packet.store.errors import StoreFullError
from kvspeed.packet.store.recipe import is_id, is_recipe_name
from kvspeed.packet.store.size import show_size

__all__ = ["DiskTier", "MemoryTier"]


class MemoryTier:
    """Loaded packets up to `limit` bytes, the least recently used are let go first. Safe under threads.

    A packet counts with all bytes of its tensors, mapped from a file or not. Whoever holds a packet keeps it.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.bytes = 0
        self._packets: OrderedDict[str, Packet] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._packets)

    def get(self, id: str) -> Packet | None:
        with self._lock:
            packet = self._packets.get(id)
            if packet is not None:
                self._packets.move_to_end(id)
            return packet

    def put(self, id: str, packet: Packet) -> None:
        size = tensor_bytes(packet)
        with self._lock:
            self._remove(id)
            if self.limit is not None and size > self.limit:
                return
            self._packets[id] = packet
            self.bytes += size
            while self.limit is not None and self.bytes > self.limit:
                self._remove(next(iter(self._packets)))

    def drop(self, id: str) -> None:
        with self._lock:
            self._remove(id)

    def clear(self) -> None:
        with self._lock:
            self._packets.clear()
            self.bytes = 0

    def _remove(self, id: str) -> None:
        packet = self._packets.pop(id, None)
        if packet is not None:
            self.bytes -= tensor_bytes(packet)


class DiskTier:
    """All packets of a place up to `limit` bytes of files, the least recently used are removed first.

    Several processes may share the place: each looks at what is there before it adds to it. Between the look and the
    write another may write too, so the limit may be passed by what processes write at the same moment, until the next
    write or `trim`.
    """

    def __init__(self, backend: Backend, limit: int | None) -> None:
        self.backend = backend
        self.limit = limit

    def make_room(self, size: int, keep: Collection[str], replaced: str | None = None) -> list[Entry]:
        """Remove packets until `size` more bytes fit; never those whose id is in `keep`. Returns what was removed.

        Args:
            size: of the file that is to be written.
            keep: ids.
            replaced: its name. A file that has it now makes room by being replaced, and is not removed before.

        Raises:
            StoreFullError: that does not suffice; then nothing is removed.
        """
        if self.limit is None:
            return []
        entries = [entry for entry in all_entries(self.backend) if entry.name != replaced]
        free = self.limit - sum(entry.size for entry in entries)
        chosen: list[Entry] = []
        for entry in sorted((e for e in entries if e.id not in keep), key=lambda e: (e.used, e.name)):
            if free >= size:
                break
            chosen.append(entry)
            free += entry.size
        if free < size:
            kept = sum(entry.size for entry in entries if entry.id in keep)
            raise StoreFullError(
                f"disk_limit: is {show_size(self.limit)}, of which packets of this very call take {show_size(kept)}, "
                f"and one more of {show_size(size)} does not fit into {self.backend.place}: raise the limit, or add "
                "fewer texts at a time. What was stored before is whole"
            )
        return [entry for entry in chosen if self.backend.delete(entry.name)]

    def trim(self) -> list[Entry]:
        """Remove the least recently used until the limit is kept."""
        if self.limit is None:
            return []
        entries = sorted(all_entries(self.backend), key=lambda e: (e.used, e.name))
        over = sum(entry.size for entry in entries) - self.limit
        removed = []
        for entry in entries:
            if over <= 0:
                break
            if self.backend.delete(entry.name):
                removed.append(entry)
            over -= entry.size
        return removed


def all_entries(backend: Backend) -> list[Entry]:
    """The packets of all recipes; what has no packet's name is left alone."""
    folders = [folder for folder in backend.folders() if is_recipe_name(folder)]
    return [entry for folder in folders for entry in backend.entries(folder) if is_id(entry.id)]


def tensor_bytes(packet: Packet) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.nbytes for tensor in packet.tensors().values())
