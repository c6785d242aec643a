# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A store of packets: texts in, packets out, each computed once for all processes that share the place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from kvspeed.cache import KVCache
from kvspeed.packet.adapter import PacketAdapter
from kvspeed.packet.assemble import assemble
from kvspeed.packet.packet import Packet
from kvspeed.packet.store.backend import Entry
from kvspeed.packet.store.builder import Builder
from kvspeed.packet.store.catalogue import MARK
from kvspeed.packet.store.errors import MissingPacketError, StoreError
from kvspeed.packet.store.fetch import Checksums
from kvspeed.packet.store.local import LocalBackend
from kvspeed.packet.store.places import open_backend
from kvspeed.packet.store.progress import Progress, reporting
from kvspeed.packet.store.recipe import Recipe, is_id
from kvspeed.packet.store.reports import StoreCheck, StoreStats, Tidied
from kvspeed.packet.store.shelf import Shelf
from kvspeed.packet.store.size import parse_size
from kvspeed.packet.store.tiers import DiskTier, MemoryTier
from kvspeed.packet.store.upkeep import check_all, count, tidy

__all__ = ["PacketStore"]

_AHEAD = 8  # packets that are asked for before they are read


class PacketStore:
    """Packets by content: the same text, made in the same way, has one id and is computed once.

    The id covers the text and its token ids, the weights (`kvspeed.fingerprint`), the adapter, header and trailer, the
    depth, the press and the dtypes. A store object sees the packets of its own way of making them (its recipe); those
    that others put into the same place are neither seen, nor used, nor touched, except that `disk_limit` counts all.

    A packet is written under a temporary name and moved to its own when it is whole; its checksum is compared when it
    is read for the first time (`checksums`). A damaged one is named in a warning and rebuilt from the text in it.
    Several processes may add, read and remove at the same time, and be killed at any time; on a folder they share the
    work of building instead of doing it twice.

    Args:
        path_or_url: a folder, made when the first packet is written, or a URL that fsspec knows (s3://bucket/folder,
            memory://name, ...).
        model: that makes and uses the packets, patched or not. None, and no tokenizer: a store that can be looked at,
            read, verified and tidied, not added to; it sees the packets of all recipes.
        tokenizer: its tokenizer.
        adapter: soft tokens around each text.
        k: layers to store; None: those the model is patched to.
        press: removes tokens; see `build_packet`.
        dtype: what keys and values are stored in: None (the model's), "bf16", "f16", "int8" or "fp8", the last two
            with a float32 scale a layer and KV head. Loaded packets keep it; mode "copy" turns them into the model's
            dtype on the way, mode "view" before.
        memory_limit: bytes of packets that are kept at hand after they were used, the least recently used go first.
            An integer, "2GiB", or None for no limit. Packets of a folder are mapped files, of which the system keeps in
            memory what it can.
        disk_limit: bytes of packet files, of all recipes, in the folder, or for a URL in `cache`; when a packet does
            not fit, the least recently used ones are removed. None: no limit.
        cache: for a URL: a folder that keeps copies of what was read.
        checksums: "once": a file is compared with its checksum when this object first reads it; "always"; "never".
        device: where loaded packets are put; None leaves them in mapped memory, from which `assemble` moves them.
        storage_options: for fsspec.

    Raises:
        TypeError, ValueError: an argument is wrong, does not fit the model, or the folder holds other things.
        StoreError: the place cannot be reached.
    """

    def __init__(
        self,
        path_or_url: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        tokenizer: Any = None,
        adapter: PacketAdapter | None = None,
        k: int | None = None,
        press: Any = None,
        dtype: str | torch.dtype | None = None,
        memory_limit: int | str | None = "1GiB",
        disk_limit: int | str | None = None,
        cache: str | os.PathLike[str] | None = None,
        checksums: Checksums = "once",
        device: torch.device | str | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        if (model is None) != (tokenizer is None):
            raise TypeError("model, tokenizer: give both, or neither for a store that is only looked at")
        if model is None and any(value is not None for value in (adapter, k, press, dtype)):
            raise TypeError("adapter, k, press, dtype: say how packets are made, which needs model and tokenizer")
        if device is not None:
            try:
                device = torch.device(device)
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"device: got {device!r} ({str(error).splitlines()[0]:.100})") from None
        builder = Builder(model, tokenizer, adapter, k, press, dtype) if model is not None else None
        limit = parse_size("disk_limit", disk_limit)
        memory = MemoryTier(parse_size("memory_limit", memory_limit))
        backend = open_backend(path_or_url, storage_options)
        local = isinstance(backend, LocalBackend)
        if cache is not None and local:
            raise ValueError("cache: is for URLs; packets in a folder are read where they lie")
        if limit is not None and not local and cache is None:
            raise ValueError("disk_limit: limits a folder, or the cache of a URL: give cache, the folder for copies")
        copies = DiskTier(LocalBackend(cache), limit) if cache is not None else None
        if copies is not None and copies.backend.read_small(MARK) is not None:
            raise ValueError(f"cache: {cache} is a packet store, and copies would push out its packets; give a folder")
        disk = DiskTier(backend, limit if local else None)
        self._shelf = Shelf(backend, disk, copies, memory, checksums, builder, device)
        self.recipe = self._shelf.recipe
        self.counters = self._shelf.counters

    def __repr__(self) -> str:
        made = f", {self.recipe}" if self.recipe is not None else ""
        return f"PacketStore({self.place!r}{made})"

    @property
    def place(self) -> str:
        """The folder or URL."""
        return self._shelf.backend.place

    # ---- adding ------------------------------------------------------------------------------------------------

    def id_of(self, text: str) -> str:
        """The id that the packet of `text` has in this store, whether it is there or not."""
        builder = self._need_builder("id_of")
        return builder.recipe.id_of(text, builder.token_ids("text", text))

    def add(self, texts: Iterable[str], *, progress: Progress = None) -> list[str]:
        """Compute and store the packets of `texts` that are not there yet.

        A packet appears when it is whole; what was done when the call is interrupted or fails stays, and the same call
        again goes on from there. A text that another process is at is left to it, and waited for in the end.

        Args:
            texts: documents, each tokenised without special tokens, as `build_packet` does.
            progress: True for a bar on stderr, or a function of (done, total).

        Returns:
            The ids, in the order of `texts`; equal texts have equal ids.

        Raises:
            TypeError, ValueError: a text is no string, empty, or longer than the model; or the model or the adapter
                changed since the store was opened. Nothing was done.
            StoreFullError, StoreReadOnlyError, StoreError: the place is full, read-only or out of reach; what was
                stored before stays.
        """
        builder = self._need_builder("add")
        wanted = builder.ids_of(texts)
        with self._shelf.building:
            if not builder.unchanged():
                raise ValueError(
                    "the model, its patch or the adapter changed since this store was opened: open the store anew, so "
                    "that its packets are told from the former ones"
                )
            self._add(dict(wanted), builder, progress)
        return [id for id, _ in wanted]

    def _add(self, wanted: dict[str, str], builder: Builder, progress: Progress) -> None:
        shelf, done = self._shelf, 0
        with reporting(progress, "packets", len(wanted)) as report:
            try:
                missing: dict[str, str] = {}
                for id, text in wanted.items():
                    if shelf.is_whole(id):
                        done += 1
                        report(done)
                    else:
                        missing[id] = text
                if missing:
                    shelf.catalogue.prepare(builder.recipe)
                for wait in (False, True):  # those that others are at come last
                    for id, text in list(missing.items()):
                        with shelf.backend.claim(shelf.name(id), wait) as claimed:
                            if not claimed:
                                continue
                            if shelf.backend.entry(shelf.name(id)) is None or id in shelf.damaged:
                                # again, as another process that tidies may have taken the folder for an empty one
                                shelf.catalogue.prepare(builder.recipe)
                                shelf.put(id, shelf.make(builder, text), keep=wanted)
                        shelf.damaged.discard(id)
                        del missing[id]
                        done += 1
                        report(done)
            except StoreError as error:
                told = f"{error} ({done} of {len(wanted)} packets are stored; the same call again goes on from there)"
                again = type(error)(told)
                again.errno = error.errno
                raise again from error

    # ---- reading -----------------------------------------------------------------------------------------------

    def __getitem__(self, id: str) -> Packet:
        """The packet `id`; its tensors are mapped from the file where that is on this machine.

        Raises:
            KeyError: it is not in the store, or was made by another recipe (the message says which).
            DamagedPacketError: its file is damaged and could not be rebuilt.
            StoreError: the place cannot be read.
        """
        return self._shelf.get(_checked_id(id))

    def load(self, ids: Sequence[str]) -> list[Packet]:
        """`[store[id] for id in ids]`, with what comes next fetched ahead."""
        ids = _checked_ids(ids)
        packets = []
        try:
            for start in range(0, len(ids), _AHEAD):
                self._shelf.prefetch(ids[start : start + _AHEAD])
                packets += [self._shelf.get(id) for id in ids[start : start + _AHEAD]]
        finally:
            self._shelf.prefetch([])  # what an error left would be read later as if it came from the place then
        return packets

    def assemble(
        self,
        ids: Sequence[str],
        *,
        preamble: Packet | None = None,
        mode: Literal["view", "copy"] = "view",
        capacity: int | None = None,
    ) -> KVCache:
        """A cache of [preamble][packet of ids[0]]...; see `kvspeed.assemble`, and `store[id]` for what is missing."""
        model = self._need_builder("assemble").model
        packets = self.load(ids)
        if mode == "view":
            packets = [self._shelf.full(id, packet) for id, packet in zip(ids, packets, strict=True)]
        return assemble(packets, model=model, preamble=preamble, mode=mode, capacity=capacity)

    # ---- what is there -----------------------------------------------------------------------------------------

    def __contains__(self, id: object) -> bool:
        return is_id(id) and self._shelf.catalogue.find(str(id), self.recipe) is not None

    def __len__(self) -> int:
        return sum(1 for _ in self.entries())

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(entry.id for entry in self.entries()))

    def __delitem__(self, id: str) -> None:
        """Remove a packet; whoever has it keeps it.

        Raises:
            KeyError: it is not there.
        """
        if not self._shelf.remove(_checked_id(id), self._shelf.name(id)):
            raise MissingPacketError(self._shelf.catalogue.missing(id, self.recipe))

    def remove(self, entry: Entry) -> bool:
        """Remove the file that `entries` named, and no other of the same id; whether it was there."""
        return self._shelf.remove(entry.id, entry.name)

    def entries(self) -> Iterator[Entry]:
        """The files of this store's packets (of all recipes without a model), with size and time of last use."""
        return self._shelf.catalogue.entries(self.recipe)

    def describe(self, id: str) -> dict[str, Any]:
        """What the file of a packet says besides its numbers, which are not read: text, token_ids, layers, k, ...

        Raises:
            KeyError: it is not there.
            TensorFileError: not even this part of the file is whole.
            StoreError: the place cannot be read.
        """
        try:
            return self._shelf.reader.description(self._shelf.name(_checked_id(id)))[0]
        except FileNotFoundError:
            raise MissingPacketError(self._shelf.catalogue.missing(id, self.recipe)) from None

    @property
    def exists(self) -> bool:
        """Whether there is a store at the place; it is made by the first packet that is added."""
        return self._shelf.catalogue.exists

    def recipes(self) -> dict[str, Recipe | None]:
        """How the packets of each folder are made; None where its description is missing or damaged."""
        return self._shelf.catalogue.recipes()

    def stats(self) -> StoreStats:
        """Numbers and bytes of packets on disk, in memory and in the cache."""
        return count(self._shelf)

    # ---- upkeep ------------------------------------------------------------------------------------------------

    def verify(self, *, rebuild: bool = False, remove: bool = False, progress: Progress = None) -> StoreCheck:
        """Read all of this store's packets whole, and compare them with their checksums and names.

        Args:
            rebuild: make damaged packets anew where their file still tells the text; needs the model.
            remove: remove the damaged ones that are not rebuilt.
            progress: as for `add`.

        Raises:
            TypeError: `rebuild` without a model.
            StoreError: the place cannot be read, or written where that is asked for.
        """
        if rebuild:
            self._need_builder("rebuild")
        return check_all(self._shelf, rebuild, remove, progress)

    def gc(self, *, limit: int | str | None = None, grace_s: float = 60.0) -> Tidied:
        """Tidy up: unfinished files of killed processes, packets beyond a limit, folders without packets.

        Args:
            limit: bytes that all packets together may take; the least recently used are removed first. None: the
                `disk_limit` of this store.
            grace_s: unfinished files that are younger than this many seconds stay.

        Raises:
            StoreError: the place cannot be read or written.
        """
        return tidy(self._shelf, parse_size("limit", limit), grace_s)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _need_builder(self, what: str) -> Builder:
        if self._shelf.builder is None:
            raise TypeError(f"{what}: this store was opened without a model; open it with model and tokenizer")
        return self._shelf.builder


def _checked_id(id: Any) -> str:
    if not is_id(id):
        raise MissingPacketError(f"{id!r:.60} is no packet's id: it has 32 hexadecimal digits, as store.add returns it")
    return id


def _checked_ids(ids: Any) -> list[str]:
    if isinstance(ids, (str, bytes)):
        raise TypeError("ids: expected several ids, got one: write [id]")
    if not isinstance(ids, Iterable):
        raise TypeError(f"ids: expected several ids, as store.add returns them, got {type(ids).__name__}")
    return [_checked_id(id) for id in ids]
