# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["parse_size", "show_size"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MOST = 2**63 - 1  # bytes that a file system counts


def parse_size(name: str, value: Any) -> int | None:
    """Bytes of 4096, "500MB", "2 GiB"; None stays None.

    Raises:
        TypeError, ValueError: it is no size; the message calls it `name`.
    """
    if value is None:
        return None
    if isinstance(value, str):
        shown = repr(value) if len(value) < 60 else f"a text of {len(value)} characters"
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value.lower())
        if match is None:
            raise ValueError(f"{name}: got {shown}; give a number of bytes, or one such as 500MB or 2GiB")
        wanted = float(match[1]) * _UNITS[match[2] or ""]  # infinite for hundreds of digits
        if wanted > _MOST:
            raise ValueError(f"{name}: got {shown}, more than any place holds (8 EiB); give less, or None for no limit")
        return round(wanted)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a number of bytes, a string such as '2GiB', or None; got {value!r}")
    if not 0 <= value <= _MOST:
        shown = str(value) if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
        raise ValueError(f"{name}: expected at least 0 and at most {_MOST} bytes, got {shown}; or None for no limit")
    return value


def show_size(count: float) -> str:
    """ "0 B", "1023 B", "1.5 KiB", "12 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
