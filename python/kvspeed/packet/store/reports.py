# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a store's upkeep reports: bytes, damage, and what was tidied away."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvspeed.packet.store.size import show_size

__all__ = ["Counters", "Problem", "StoreCheck", "StoreStats", "Tidied"]


@dataclass
class Counters:
    """What one `PacketStore` object did.

    Attributes:
        built: packets that it computed.
        loaded: packets that it read from files.
        hits: packets that were in memory.
        rebuilt: of those built, the ones that replaced damaged files.
        evicted: files that it removed to keep `disk_limit`.
    """

    built: int = 0
    loaded: int = 0
    hits: int = 0
    rebuilt: int = 0
    evicted: int = 0


@dataclass(frozen=True)
class StoreStats:
    """Bytes and numbers, exact at the moment of the call.

    Attributes:
        packets: this store's packets (of all recipes where it has no model).
        bytes: of their files.
        all_packets: packets of all recipes.
        all_bytes: of their files, which is what `disk_limit` limits.
        recipes: folders of packets.
        unfinished: files that processes left unfinished or are writing.
        unfinished_bytes: their bytes.
        memory_packets: packets at hand.
        memory_bytes: bytes of their tensors.
        cached_packets: copies in the cache of a URL.
        cached_bytes: bytes of the copies.
    """

    packets: int
    bytes: int
    all_packets: int
    all_bytes: int
    recipes: int
    unfinished: int
    unfinished_bytes: int
    memory_packets: int
    memory_bytes: int
    cached_packets: int
    cached_bytes: int


@dataclass(frozen=True)
class Problem:
    """A packet that is not what it should be.

    Attributes:
        id: its name.
        reason: what is wrong, with the file's place.
        done: "found", "rebuilt" or "removed".
    """

    id: str
    reason: str
    done: str = "found"


@dataclass(frozen=True)
class StoreCheck:
    """What `PacketStore.verify` found.

    Attributes:
        packets: files that were read whole.
        bytes: of these.
        problems: one a packet that is damaged.
    """

    packets: int
    bytes: int
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all packets are whole now."""
        return all(problem.done != "found" for problem in self.problems)

    def __str__(self) -> str:
        head = f"{self.packets} packets, {show_size(self.bytes)}: "
        if not self.problems:
            return head + "all whole"
        return head + "; ".join(f"{problem.id} {problem.done}: {problem.reason}" for problem in self.problems)


@dataclass(frozen=True)
class Tidied:
    """What `PacketStore.gc` removed.

    Attributes:
        unfinished: files that killed processes left.
        unfinished_bytes: their bytes.
        evicted: packets, the least recently used, beyond the limit.
        evicted_bytes: bytes of their files.
        folders: recipes without packets.
    """

    unfinished: int = 0
    unfinished_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    folders: int = 0
