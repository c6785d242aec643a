# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Invented people, places and firms for the generated tasks, put together from parts.

Every name belongs to one split only, by its own letters: an adapter or a model trained on "train" has never seen a
surname, town, firm or school of "test". Half the names of "train" begin with invented syllables, so that what trains on
them learns to copy any name, not a few hundred.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

__all__ = ["SPLITS", "Names", "check_split", "in_split", "rng_of"]

SPLITS = ("train", "dev", "test")
_SHARE = {"train": range(0, 6), "dev": range(6, 7), "test": range(7, 10)}  # of ten

_FEMALE = (
    "Alice Beth Clara Diana Emma Fiona Grace Hannah Irene Julia Karen Laura Maria Nina Olivia Paula Rachel Sarah "
    "Teresa Ursula Vera Wendy Yvonne Zoe Amelia Bridget Cecilia Daphne Edith Flora Gloria Helen Iris Joan"
).split()
_MALE = (
    "Adam Brian Carl David Edward Frank George Henry Ian James Kevin Louis Martin Nathan Oscar Peter Ralph Simon "
    "Thomas Victor Walter Albert Bruno Calvin Dennis Ernest Felix Gilbert Howard Isaac Jacob Leonard Marcus Neil"
).split()
_SURNAME = (
    "Ash Black Brook Carl Cross Dale East Fair Farn Gold Green Hart Hath Holl King Lang Mar Mill North Oak Pem Red "
    "Row Stan Stone Thorn Under Wake West White Win Wood".split(),
    "berg bury combe croft er field gate ham hurst ley man ridge ston strom well worth".split(),
)
_TOWN = (
    "Alder Amber Bel Birch Bright Cal Clear Cold Cor Crest Dun Elm Fern Glen Gray High Iron Kel Lake Lin Long Maple "
    "Mor Nor Pine Port River Rock Salt Shel Silver Spring Stock Summer Vel Wind".split(),
    "bay bridge brook burg dale ford harbor haven mont mouth point port shore side ton vale view ville".split(),
)
_FIRM = (
    "Apex Arbor Atlas Beacon Blue Bolt Cedar Circle Cobalt Comet Copper Crown Delta Eagle Echo Falcon Fox Harbor Helix "
    "Ivory Jade Lotus Lunar Meridian Nova Onyx Orbit Pearl Pioneer Prism Quartz Raven Sierra Solar Summit Titan Vertex "
    "Willow Zenith".split(),
    "Bank Books Designs Energy Engines Farms Films Foods Labs Lines Logistics Media Motors Optics Paper Partners Press "
    "Software Steel Studios Systems Textiles Tools Toys".split(),
)
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
_SCHOOL = (
    "Alden Barrow Bexley Carver Chandler Dalton Ellis Fenton Garner Halsey Jarvis Keller Lowell Mercer Norris Orton "
    "Porter Quincy Ramsey Selby Tilden Upton Vernon Warren Yates".split(),
    "Academy|City University|College|Institute|State University|Technical School|University".split("|"),
)


def check_split(split: str) -> str:
    """The split, if there is one of that name.

    Raises:
        ValueError: there is none.
    """
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, choose from {', '.join(SPLITS)}")
    return split


def in_split(text: str, split: str) -> bool:
    """Whether a name, or anything else that is written out, belongs to this split: by its own letters, to one only."""
    return zlib.crc32(text.encode()) % 10 in _SHARE[split]


def rng_of(*parts: object) -> random.Random:
    """A generator for these parts (task, split, seed, number), the same on every machine and Python."""
    return random.Random("/".join(str(part) for part in parts))


class Names:
    """Draws names of one split, none twice.

    Args:
        rng: draws come from it.
        split: "train", "dev" or "test".
    """

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, check_split(split)
        self._used: set[str] = set()
        self.people = 0  # drawn so far

    def person(self) -> tuple[str, str]:
        """(full name, pronoun "She" or "He"); surnames never repeat, first names only after 20 people."""
        female = self.rng.random() < 0.5
        pool = _FEMALE if female else _MALE
        self.people += 1
        first = self._fresh(lambda: self.rng.choice(pool)) if self.people <= 20 else self.rng.choice(pool)
        return f"{first} {self._joined(_SURNAME, '')}", "She" if female else "He"

    def town(self) -> str:
        return self._joined(_TOWN, "")

    def firm(self) -> str:
        return self._joined(_FIRM, " ")

    def school(self) -> str:
        return self._joined(_SCHOOL, " ")

    def one_of(self, choices: Sequence[str]) -> str:
        """One that was not drawn before, of any split."""
        return self._fresh(lambda: self.rng.choice(choices))

    def _joined(self, parts: tuple[list[str], list[str]], glue: str) -> str:
        return self._fresh(lambda: self._first(parts[0]) + glue + self.rng.choice(parts[1]), self._in_split)

    def _first(self, choices: list[str]) -> str:
        if self.split != "train" or self.rng.random() < 0.5:
            return self.rng.choice(choices)
        return "".join(self.rng.choice(_SYLLABLES) for _ in range(self.rng.randint(2, 3))).capitalize()

    def _in_split(self, name: str) -> bool:
        return in_split(name, self.split)

    def _fresh(self, draw: Callable[[], str], fits: Callable[[str], bool] = lambda name: True) -> str:
        for _ in range(10_000):
            name = draw()
            if name not in self._used and fits(name):
                self._used.add(name)
                return name
        raise ValueError("more documents asked for than there are invented names; ask for fewer")
