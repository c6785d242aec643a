# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Presses by name: `cur-30` is CUR with 30 % of the tokens removed."""

from __future__ import annotations

import re

from kvspeed.packet.press.base import Press, percent
from kvspeed.packet.press.cur import CURPress
from kvspeed.packet.press.leverage import LeveragePress
from kvspeed.packet.press.random import RandomPress
from kvspeed.packet.press.tova import TOVAPress

__all__ = ["PRESSES", "press_from_name", "press_name"]

PRESSES: dict[str, type[Press]] = {press.name: press for press in (RandomPress, TOVAPress, CURPress, LeveragePress)}

_NAME = re.compile(r"([a-z]+)-(\d+(?:\.\d+)?)(-whole)?")


def press_from_name(name: str) -> Press:
    """The press of `random-30`, `tova-50`, `cur-10`, `leverage-20`: which one, and the percentage that it removes.

    With `-whole` after it, soft tokens are not protected.

    Raises:
        ValueError: there is no such press, or nothing would stay.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] not in PRESSES:
        known = ", ".join(f"{press}-30" for press in PRESSES)
        raise ValueError(
            f"press: {name!r} names no press; expected a name and a percentage to remove, such as {known}, and -whole "
            "after it where soft tokens need not stay"
        )
    if float(match[2]) >= 100:
        raise ValueError(f"press: {name!r} would remove everything; give a percentage below 100")
    return PRESSES[match[1]](float(match[2]) / 100, protect_soft=match[3] is None)


def press_name(press: Press) -> str:
    """The shortest name of `press`, for tables; options beyond ratio and protection are not in it."""
    return f"{press.name}-{percent(press.ratio)}{'' if press.protect_soft else '-whole'}"
