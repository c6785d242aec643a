# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Looking after a shelf: counting, checking and tidying all that lies there."""

from __future__ import annotations

from dataclasses import replace

from kvspeed.packet.store.backend import Entry
from kvspeed.packet.store.errors import DamagedPacketError, NameTakenError
from kvspeed.packet.store.progress import Progress, reporting
from kvspeed.packet.store.reports import Problem, StoreCheck, StoreStats, Tidied
from kvspeed.packet.store.shelf import Shelf
from kvspeed.packet.store.tiers import DiskTier, all_entries
from kvspeed.packet.tensorfile import TensorFileError

__all__ = ["check_all", "count", "tidy"]


def count(shelf: Shelf) -> StoreStats:
    """See `PacketStore.stats`."""
    mine, everything = list(shelf.catalogue.entries(shelf.recipe)), list(shelf.catalogue.entries(None))
    unfinished = shelf.backend.litter(0.0)
    copies = all_entries(shelf.copies.backend) if shelf.copies is not None else []
    return StoreStats(
        packets=len(mine),
        bytes=sum(entry.size for entry in mine),
        all_packets=len(everything),
        all_bytes=sum(entry.size for entry in everything),
        recipes=len({entry.folder for entry in everything}),
        unfinished=len(unfinished),
        unfinished_bytes=sum(entry.size for entry in unfinished),
        memory_packets=len(shelf.memory),
        memory_bytes=shelf.memory.bytes,
        cached_packets=len(copies),
        cached_bytes=sum(entry.size for entry in copies),
    )


def check_all(shelf: Shelf, rebuild: bool, remove: bool, progress: Progress) -> StoreCheck:
    """See `PacketStore.verify`."""
    entries = list(shelf.catalogue.entries(shelf.recipe))
    check = StoreCheck(len(entries), sum(entry.size for entry in entries))
    entries = sorted([*entries, *shelf.catalogue.obstacles(shelf.recipe)], key=lambda entry: entry.name)
    with reporting(progress, "checking", len(entries)) as report:
        for done, entry in enumerate(entries, 1):
            problem = _check(shelf, entry, rebuild, remove)
            if problem is not None:
                check.problems.append(problem)
            report(done)
    return check


def _check(shelf: Shelf, entry: Entry, rebuild: bool, remove: bool) -> Problem | None:
    try:
        shelf.check(entry.id, entry.name, shelf.reader.read(entry.name, verify=True))
        return None
    except FileNotFoundError:  # removed by another process since
        return None
    except TensorFileError as error:
        problem = Problem(entry.id, str(error))
        shelf.forget(entry.id)
        unmended = problem
        if rebuild:
            try:
                _, refused = shelf.rebuild(entry.id, error)
                if refused is None:
                    return replace(problem, done="rebuilt")
                unmended = replace(problem, reason=f"{error}; its packet could not be stored again ({refused})")
            except DamagedPacketError as why:
                unmended = replace(problem, reason=str(why))
        try:
            if remove:
                return replace(problem, done="removed") if _remove(shelf, entry) else None
            return unmended
        except NameTakenError as why:  # for people to look at; the other packets are checked all the same
            return replace(problem, reason=str(why))


def _remove(shelf: Shelf, entry: Entry) -> bool:
    """Remove a damaged packet; False where another process has removed it, or put a whole one in its place, since."""
    while True:
        seen = shelf.backend.entry(entry.name)
        try:
            shelf.check(entry.id, entry.name, shelf.reader.read(entry.name, verify=True))
            return False
        except FileNotFoundError:
            return False
        except TensorFileError:
            pass
        if shelf.backend.entry(entry.name) == seen:  # reading takes a while, in which it may have been rebuilt
            return shelf.remove(entry.id, entry.name)


def tidy(shelf: Shelf, limit: int | None, grace_s: float) -> Tidied:
    """See `PacketStore.gc`."""
    disk = DiskTier(shelf.backend, limit) if limit is not None else shelf.disk
    litter = shelf.backend.remove_litter(grace_s)
    evicted = disk.trim()
    for entry in evicted:
        shelf.forget(entry.id)
    if shelf.copies is not None:
        litter += shelf.copies.backend.remove_litter(grace_s)
        shelf.copies.trim()
    used = {entry.folder for entry in shelf.catalogue.entries(None)}
    empty = [name for name in shelf.catalogue.recipes() if name not in used]
    for name in empty:
        shelf.backend.remove_empty(name)
        shelf.catalogue.forget(name)
    shelf.counters.evicted += len(evicted)
    return Tidied(
        unfinished=len(litter),
        unfinished_bytes=sum(entry.size for entry in litter),
        evicted=len(evicted),
        evicted_bytes=sum(entry.size for entry in evicted),
        folders=len(empty),
    )
