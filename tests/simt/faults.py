# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Plants faults into a copy of the kernels' sources.

A fault names a place by a piece of source text, in which «...» marks what is replaced; white space does not matter,
and the text must occur exactly once, so that a fault cannot silently miss. All faults of a copy are compiled together:
each replaced piece becomes a choice, made when the program runs, between itself and the fault.
"""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One planted fault: what it breaks, where, and a call of simt_driver that must notice."""

    name: str
    file: str  # in csrc/cuda
    place: str  # source text with «what is replaced»
    fault: str  # by what; "" drops a statement
    call: str  # the driver's words

    @property
    def statement(self) -> bool:
        return self.place[self.place.index("«") + 1 : self.place.index("»")].rstrip().endswith((";", "}"))


_SPACE = r"(?:\s|//[^\n]*)*"


def _pattern(text: str) -> str:
    """Tokens of the text, with any white space and comments between them."""
    return _SPACE.join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", text))


def _locate(source: str, fault: Fault) -> tuple[int, int]:
    before, rest = fault.place.split("«")
    marked, after = rest.split("»")
    pattern = _SPACE.join(f"({_pattern(part)})" for part in (before, marked, after))
    found = list(re.finditer(pattern, source))
    if len(found) != 1:
        raise ValueError(f"{fault.name}: the text must be in csrc/cuda/{fault.file} once, and is {len(found)} times")
    return found[0].span(2)


def plant(faults: list[Fault], csrc: Path, copy: Path) -> dict[int, str]:
    """Copy csrc and plant the faults; fault i is on where the program asks for number i + 1.

    Returns what could not be planted, by number, with the reason.
    """
    problems: dict[int, str] = {}
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(csrc, copy)
    for file in {fault.file for fault in faults}:
        path = copy / "cuda" / file
        source = path.read_text()
        places = []
        for number, fault in enumerate(faults, 1):
            if fault.file == file:
                try:
                    places.append((*_locate(source, fault), number, fault))
                except ValueError as error:
                    problems[number] = str(error)
        places.sort(key=lambda place: place[0], reverse=True)
        if any(later[0] < earlier[1] for later, earlier in itertools.pairwise(places)):
            raise ValueError(f"two faults in csrc/cuda/{file} replace the same text")
        for start, end, number, fault in places:
            on, old = f"::kvspeed::simt::planted({number})", source[start:end]
            new = (
                f"if ({on}) {{ {fault.fault} }} else {{ {old} }}"
                if fault.statement
                else f"({on} ? ({fault.fault}) : ({old}))"
            )
            source = source[:start] + new + source[end:]
        path.write_text(source)
    return problems
