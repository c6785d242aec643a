# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Methods of `kvspeed eval speed` as they are asked for: a family, and the depths it is wanted at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["expanded"]


def expanded(methods: Sequence[str], depths: Sequence[int], known: Mapping[str, Any]) -> tuple[str, ...]:
    """The methods' full names, each once: `speed-noanchor` at 20 and 22 is `speed-20-noanchor` and `speed-22-noanchor`.

    A name that has its depth, or needs none, stays. `@NAME` stays behind the name.

    Args:
        methods: families such as `speed`, `swiftkv-share2`, or full names.
        depths: of the families.
        known: patterns of full names, `SPEED_METHODS`.

    Raises:
        ValueError: a family is asked for and there are no depths.
    """
    families = {pattern.replace("-<n>", "", 1): pattern for pattern in known if "<n>" in pattern}
    found: dict[str, None] = {}
    for written in methods:
        name, at, source = written.partition("@")
        pattern = next((p for family, p in families.items() if _same(family, name)), None)
        if pattern is None or name in known:
            found[written] = None
            continue
        if not depths:
            raise ValueError(f"methods: {name} needs a depth: give --k, or write {pattern.replace('<n>', '22', 1)}")
        before = pattern.partition("-<n>")[0]
        for depth in depths:
            found[f"{before}-{depth}{name[len(before) :]}{at}{source}"] = None
    return tuple(found)


def _same(family: str, name: str) -> bool:
    """Whether `name` is of a family; `swiftkv-share<n>` has a number of its own."""
    before, number, after = family.partition("<n>")
    if not number:
        return family == name
    middle = name[len(before) : len(name) - len(after)]
    return name.startswith(before) and name.endswith(after) and middle.isdecimal()
