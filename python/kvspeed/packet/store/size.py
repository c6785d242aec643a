# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["parse_size", "show_size"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(name: str, value: Any) -> int | None:
    """Bytes of 4096, "500MB", "2 GiB"; None stays None.

    Raises:
        TypeError, ValueError: it is no size; the message calls it `name`.
    """
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value.lower())
        if match is None:
            raise ValueError(f"{name}: got {value!r}; give a number of bytes, or one such as 500MB or 2GiB")
        return round(float(match[1]) * _UNITS[match[2] or ""])
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a number of bytes, a string such as '2GiB', or None; got {value!r}")
    if value < 0:
        raise ValueError(f"{name}: expected at least 0 bytes, got {value}")
    return value


def show_size(count: float) -> str:
    """ "0 B", "1023 B", "1.5 KiB", "12 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
