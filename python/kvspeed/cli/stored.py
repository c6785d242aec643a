# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets of a store, as the command line names them: by the first digits of their ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvspeed.cli.common import Fault, counted, progress

if TYPE_CHECKING:
    from kvspeed.packet import Packet
    from kvspeed.packet.store import PacketStore
    from kvspeed.packet.store.backend import Entry

__all__ = ["chosen_entries", "is_store", "stored_packets"]

_SHORTEST = 4  # digits by which a packet may be named, where that is enough to tell it
_MARK = "kvspeed-store.json"


def is_store(place: str) -> bool:
    """Whether `place` is a URL, or a folder that `kvspeed store add` made."""
    return "://" in place or (Path(place) / _MARK).is_file()


def chosen_entries(opened: PacketStore, ids: list[str], recipe: str | None = None) -> list[Entry]:
    """The packets that are meant, in the order in which they are named, each once.

    Raises:
        Fault: some are not there, or are meant in more than one way; a sentence each.
    """
    entries = list(opened.entries())
    faults = []
    if recipe is not None:
        names = sorted({entry.folder for entry in entries if entry.folder.startswith(recipe)})
        if len(names) != 1 or not recipe:
            faults.append(f"--recipe: {recipe!r} is the beginning of {counted(len(names), 'recipe')}; see store ls")
        else:
            entries = [entry for entry in entries if entry.folder == names[0]]
    found = {entry.name: entry for entry in entries if not ids}
    for id in ids:
        meant = [entry for entry in entries if entry.id.startswith(id.lower())]
        if len(id) < _SHORTEST:
            faults.append(f"{id!r} is too short to name a packet; give at least {_SHORTEST} digits")
        elif len(meant) != 1:
            there = "" if recipe is None else f" of recipe {recipe}"
            faults.append(f"{id!r} is the beginning of {counted(len(meant), 'packet')}{there}; see kvspeed store ls")
        found |= {entry.name: entry for entry in meant[:1]}
    if faults:
        raise Fault(*faults)
    return list(found.values())


def stored_packets(place: str, ids: list[str], recipe: str | None) -> tuple[list[Path], list[Packet]]:
    """Names for messages and packets: those of `ids` and `recipe`, in that order; where neither is given, all by id.

    Raises:
        Fault: there is no store, no such packet, or `ids` is empty and the packets were made in different ways.
    """
    from kvspeed.packet.store import DamagedPacketError, PacketStore

    opened = PacketStore(place, memory_limit=0)
    entries = (
        chosen_entries(opened, ids, recipe)
        if ids or recipe is not None
        else sorted(opened.entries(), key=lambda entry: entry.id)
    )
    if not entries:
        raise Fault(f"--packets: {place} holds no packets; make some with kvspeed store add {place} FILES")
    ways = {entry.folder for entry in entries}
    if len(ways) > 1:
        raise Fault(
            f"--packets: these packets of {place} were made in {len(ways)} ways (see kvspeed store ls), which do not "
            "go together: name one way with --recipe, or its packets with --id"
        )
    packets = []
    with progress("reading packets", len(entries)) as advance:
        for entry in entries:
            try:
                packets.append(opened[entry.id])
            except DamagedPacketError as error:
                raise Fault(
                    f"{error}; kvspeed store verify {place} --rebuild does it, with --model, --adapter, ..."
                ) from error
            advance(entry.id[:8])
    return [Path(entry.id) for entry in entries], packets
