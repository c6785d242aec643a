# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""How an entry of `Sample.checks` is written, so that a wrong one is found where samples are read and not by an answer.

`kvspeed.eval.checks` says what each means.
"""

from __future__ import annotations

import re

__all__ = ["FORMS", "check_form"]

# name: (what its argument looks like, how the whole is written)
FORMS: dict[str, tuple[str, str]] = {
    "contains": (".*", "contains:TEXT"),
    "prefix": (".*", "prefix:TEXT"),
    "suffix": (".*", "suffix:TEXT"),
    "upper": (".*", "upper"),
    "lower": (".*", "lower"),
    "words": ("[0-9]+-[0-9]+", "words:A-B, such as words:5-12"),
    "items": ("[0-9]+:.+", "items:N:SEP, such as items:2: | "),
    "json": (".*", "json:KEY"),
}


def check_form(check: str) -> None:
    """Refuses what is no check.

    Raises:
        ValueError: there is no such check, or its argument is none.
    """
    name, _, argument = check.partition(":")
    if name not in FORMS:
        raise ValueError(f"checks: there is no check {name!r}; there are {', '.join(FORMS)}")
    pattern, form = FORMS[name]
    if not re.fullmatch(pattern, argument, re.DOTALL):
        raise ValueError(f"checks: {check} is not {form}")
