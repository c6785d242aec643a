# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Constraints on an answer that a program can check, where many wordings are right: `Sample.checks`.

Each is one string:

    contains:TEXT   the words of TEXT stand in the answer, whatever the case
    prefix:TEXT     the answer begins with TEXT
    suffix:TEXT     it ends with TEXT
    upper, lower    it has letters, and no small (capital) one
    words:A-B       it has A to B words
    items:N:SEP     it has N parts that are not empty, separated by SEP
    json:KEY        it is a JSON object with this one key

An answer is right when all of its checks hold (the strict score of instruction-following benchmarks).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from kvspeed.check_forms import check_form
from kvspeed.eval.score import contains

__all__ = ["CHECKS", "holds", "satisfied"]


def holds(check: str, answer: str) -> bool:
    """Whether `answer` meets one check.

    Raises:
        ValueError: there is no such check.
    """
    check_form(check)
    name, _, argument = check.partition(":")
    return CHECKS[name](answer.strip(), argument)


def satisfied(answer: str, checks: Sequence[str]) -> bool:
    """Whether `answer` meets all of them.

    Raises:
        ValueError: there are none, or one is not known.
    """
    if not checks:
        raise ValueError("checks: got none; a sample without checks is scored by its answers")
    return all([holds(check, answer) for check in checks])


def _words(answer: str, argument: str) -> bool:
    least, _, most = argument.partition("-")
    return int(least) <= len(answer.split()) <= int(most)


def _items(answer: str, argument: str) -> bool:
    number, _, separator = argument.partition(":")
    parts = [part.strip() for part in answer.split(separator)]
    return len(parts) == int(number) and all(parts)


def _json(answer: str, argument: str) -> bool:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and set(found) == {argument}


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "contains": lambda answer, argument: contains(answer, argument),
    "prefix": lambda answer, argument: answer.startswith(argument),
    "suffix": lambda answer, argument: answer.endswith(argument),
    "upper": lambda answer, _: answer.isupper(),
    "lower": lambda answer, _: answer.islower(),
    "words": _words,
    "items": _items,
    "json": _json,
}
