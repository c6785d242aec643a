# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Completing one line of Python after files that decide it: a call, an attribute, a constant, an entry of a table.

Small on purpose: one line, one right answer, nothing to run.
"""

from __future__ import annotations

from random import Random

from kvspeed.eval.tasks.biography import check_count, check_questions, span
from kvspeed.eval.tasks.copying import function_name, parameters
from kvspeed.eval.tasks.names import check_split, rng_of
from kvspeed.samples import Sample

__all__ = ["code"]

HINT = "Write the next line of code and nothing else.\n"

_CLASSES = (
    "Account Basket Catalog Customer Delivery Invoice Ledger Member Order Parcel Report Route Session Ticket".split()
)
_FIELDS = (
    "amount author city colour count customer date discount height label owner price rank size status title".split()
)
_CONSTANTS = (
    "BATCH BUFFER CACHE CHUNK COLUMN DELAY LIMIT MARGIN OFFSET PAGE PORT QUEUE RETRY SCALE TIMEOUT WINDOW".split()
)


def code(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    documents: int | tuple[int, int] = (2, 4),
    questions_per_context: int = 1,
) -> list[Sample]:
    """`count` samples.

    Args:
        count: how many.
        seed: another seed, other samples; sample i of a seed does not depend on `count`.
        split: "train", "dev" or "test"; no function name is in two of them.
        documents: files a sample, or the least and the most.
        questions_per_context: this many samples in a row have the same documents.

    Raises:
        ValueError: an argument is out of range.
    """
    least, most = span("documents", documents)
    check_split(split)
    if most > len(_CLASSES):
        raise ValueError(f"documents: got {most}, give at most {len(_CLASSES)}")
    check_questions(questions_per_context, 4 * least, f"{least} files answer")
    samples: list[Sample] = []
    for index in range(-(-check_count(count) // questions_per_context)):
        rng = rng_of("code", split, seed, index)
        files = _files(rng, split, rng.randint(least, most))
        asked = [(gold, number) for gold in range(len(files)) for number in range(4)]
        for turn, (gold, number) in enumerate(rng.sample(asked, questions_per_context)):
            before, answer = files[gold][1][number]
            samples.append(
                Sample(
                    id=f"code-{split}-{seed}-{index * questions_per_context + turn:05d}",
                    documents=tuple(text for text, _ in files),
                    question=HINT + before,
                    answers=(answer,),
                    gold=(gold,),
                    task="code",
                )
            )
    return samples[:count]


def _files(rng: Random, split: str, count: int) -> list[tuple[str, list[tuple[str, str]]]]:
    """(text, four pieces of code with the line after each) of `count` files."""
    used: set[str] = set()
    constants = rng.sample(_CONSTANTS, count)
    return [
        _file(rng, split, used, name, constant)
        for name, constant in zip(rng.sample(_CLASSES, count), constants, strict=True)
    ]


def _file(rng: Random, split: str, used: set[str], name: str, constant: str) -> tuple[str, list[tuple[str, str]]]:
    fields = rng.sample(_FIELDS, 3)
    function, given = function_name(rng, split, used), parameters(rng, defaults=False)
    number = rng.randint(10, 9999)
    prices = {field: rng.randint(2, 99) for field in rng.sample(_FIELDS, 3)}
    table, entry = f"{name.upper()}_PRICES", rng.choice(list(prices))
    text = "\n".join(
        [
            f"# {name.lower()}.py",
            f"MAX_{constant} = {number}",
            f"{table} = {{{', '.join(f'{key!r}: {value}' for key, value in prices.items())}}}",
            f"class {name}:",
            f"    fields = {fields!r}",
            f"def {function}({given}):",
            "    ...",
        ]
    )
    return text, [
        (
            f"class {name}:\n    def __init__(self, {', '.join(fields)}):\n"
            f"        self.{fields[0]} = {fields[0]}\n        self.{fields[1]} = {fields[1]}",
            f"self.{fields[2]} = {fields[2]}",
        ),
        (f"# call {function} with its arguments", f"{function}({given})"),
        (f"# compare MAX_{constant} with its number, by assert", f"assert MAX_{constant} == {number}"),
        (
            f"# compare the price of {entry} in {table} with its number, by assert",
            f"assert {table}[{entry!r}] == {prices[entry]}",
        ),
    ]
