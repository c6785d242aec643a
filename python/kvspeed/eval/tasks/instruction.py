# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Following instructions: a question about a document, and a form for the answer that a program can check.

Right is an answer that holds the fact and keeps the form, whatever else it says (see `kvspeed.eval.checks`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from kvspeed.eval.tasks.biography import FACTS, check_count, check_questions, person, span
from kvspeed.eval.tasks.names import Names, check_split, rng_of
from kvspeed.samples import Sample

__all__ = ["instruction"]

_OPENERS = {
    "train": ("Dear reader,", "Well,", "To be short:", "Good question.", "As asked:"),
    "dev": ("My answer:", "In brief:"),
    "test": ("Here you are:", "Gladly,", "Of course:"),
}
_ENDINGS = {
    "train": ("Thank you.", "That is all.", "(end)", "Good luck!"),
    "dev": ("(done)", "Goodbye."),
    "test": ("Over and out.", "(stop)", "Cheers!"),
}
_KEYS = {
    "train": ("answer", "value", "result", "found"),
    "dev": ("reply", "output"),
    "test": ("fact", "response", "detail"),
}


class _Form(NamedTuple):
    """How an answer shall look: in words, as a function of the fact, and as checks."""

    words: str
    shape: Callable[[str], str]
    checks: tuple[str, ...]


def instruction(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    documents: int | tuple[int, int] = (1, 3),
    facts: int = 4,
    questions_per_context: int = 1,
) -> list[Sample]:
    """`count` samples about invented people, each with a form for the answer.

    Args:
        count: how many.
        seed: another seed, other samples; sample i of a seed does not depend on `count`.
        split: "train", "dev" or "test"; no surname, town, firm, opening, ending or key is in two of them.
        documents: people a sample, or the least and the most.
        facts: facts a person, 1 to 6.
        questions_per_context: this many samples in a row have the same documents.

    Raises:
        ValueError: an argument is out of range.
    """
    least, most = span("documents", documents)
    check_split(split)
    if not 1 <= facts <= len(FACTS):
        raise ValueError(f"facts: got {facts}, a person has 1 to {len(FACTS)}")
    check_questions(questions_per_context, least * facts, f"{least} documents of {facts} facts answer")
    samples: list[Sample] = []
    for index in range(-(-check_count(count) // questions_per_context)):
        rng = rng_of("instruction", split, seed, index)
        names = Names(rng, split)
        people = [person(rng, names, facts) for _ in range(rng.randint(least, most))]
        asked = [(number, fact) for number, (_, known, _) in enumerate(people) for fact in known]
        for turn, (gold, fact) in enumerate(rng.sample(asked, questions_per_context)):
            name, known, _ = people[gold]
            form = rng.choice(_forms(rng, split))
            samples.append(
                Sample(
                    id=f"instruction-{split}-{seed}-{index * questions_per_context + turn:05d}",
                    documents=tuple(text for _, _, text in people),
                    question=f"{rng.choice(FACTS[fact][1]).format(name=name)} {form.words}",
                    answers=(form.shape(known[fact]),),
                    gold=(gold,),
                    task="instruction",
                    checks=(f"contains:{known[fact]}", *form.checks),
                )
            )
    return samples[:count]


def _forms(rng: Random, split: str) -> list[_Form]:
    opener, ending, key = (rng.choice(pool[split]) for pool in (_OPENERS, _ENDINGS, _KEYS))
    forms = [
        _Form(f"Begin the answer with: {opener}", lambda fact: f"{opener} {fact}", (f"prefix:{opener}",)),
        _Form(f"End the answer with: {ending}", lambda fact: f"{fact}. {ending}", (f"suffix:{ending}",)),
        _Form(
            f'Answer in JSON, with the one key "{key}".',
            lambda fact: json.dumps({key: fact}, ensure_ascii=False),
            (f"json:{key}",),
        ),
        _Form(
            "Answer in one sentence of 5 to 12 words that ends with a period.",
            lambda fact: f"The answer to this is {fact}.",
            ("words:5-12", "suffix:."),
        ),
    ]
    cases: list[tuple[str, Callable[[str], str], tuple[str, ...]]] = [
        ("", str, ()),
        ("Use capital letters only.", str.upper, ("upper",)),
        ("Use small letters only.", str.lower, ("lower",)),
    ]
    for words, change, checks in cases:
        frames = [
            _Form("Give only the answer.", change, checks),
            _Form("Put the answer in square brackets.", _framed(change), ("prefix:[", "suffix:]", *checks)),
            _Form("Write the answer twice, with ' | ' between.", _twice(change), ("items:2:|", *checks)),
        ]
        for frame in frames:
            if frame.checks:
                forms.append(frame._replace(words=f"{frame.words} {words}".strip()))
    return forms


def _framed(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda fact: f"[{change(fact)}]"


def _twice(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda fact: f"{change(fact)} | {change(fact)}"
