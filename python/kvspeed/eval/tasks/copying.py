# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Exact copying: ids, function names and arguments that must come out of the prompt to the letter.

The kind of question where a shallow prompt is at risk (methods that keep prompt tokens out of upper layers have been
seen to invent tool names): nothing can be guessed, and one wrong character is a wrong answer.
"""

from __future__ import annotations

import uuid
from random import Random

from kvspeed.eval.tasks.biography import check_count, check_questions, span
from kvspeed.eval.tasks.names import Names, check_split, in_split, rng_of
from kvspeed.samples import Sample

__all__ = ["KINDS", "copying", "function_name", "parameters"]

KINDS = ("uuid", "function", "argument")
HINT = " Copy it exactly."

_VERBS = (
    "add apply build check clean copy count draw fetch find load merge parse plot read render save sort split".split()
)
_NOUNS = (
    "account archive basket calendar catalog chart contract customer delivery email folder forecast graph image index "
    "invoice label ledger letter map member message order page parcel payment photo price queue receipt record report "
    "route sensor session signal stock survey table ticket token tour user vector video voucher weather"
).split()
_FORMS = (
    "all batch by_date by_id by_name daily draft first fresh from_disk from_url latest list monthly open v2 v3".split()
)
_PARAMETERS = (
    "path limit offset token user_id page_size order_by verbose timeout retries locale currency start end width height "
    "fields strict dry_run encoding depth ratio seed label unit region mode key"
).split()
_TICKETS = (
    "Ticket {id} was opened by {name} from {town}.",
    "{name} from {town} opened a ticket; its id is {id}.",
    "The ticket of {name} ({town}) has the id {id}.",
)
_DOES = (
    "Makes the {noun} of {firm} ready for {town}.",
    "Sends the {noun} from {town} to {firm}.",
    "Compares the {noun} of {firm} with the one from {town}.",
)


def copying(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    documents: int | tuple[int, int] = (2, 5),
    kinds: tuple[str, ...] | str = KINDS,
    questions_per_context: int = 1,
) -> list[Sample]:
    """`count` samples, each asking for one string of its documents.

    Args:
        count: how many.
        seed: another seed, other samples; sample i of a seed does not depend on `count`.
        split: "train", "dev" or "test"; no function name, person or town is in two of them.
        documents: tickets or functions a sample, or the least and the most.
        kinds: of "uuid" (the id of a ticket), "function" (a name, by what the function does) and "argument" (a
            function's parameters with their defaults), in turn.
        questions_per_context: this many samples in a row have the same documents.

    Raises:
        ValueError: an argument is out of range.
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kinds: got {kind!r}, choose from {', '.join(KINDS)}")
    if not kinds:
        raise ValueError(f"kinds: got none, choose from {', '.join(KINDS)}")
    least, most = span("documents", documents)
    check_split(split)
    check_questions(questions_per_context, least, f"{least} documents answer")
    samples: list[Sample] = []
    for index in range(-(-check_count(count) // questions_per_context)):
        rng = rng_of("copying", split, seed, index)
        entries = _entries(rng, split, kinds[index % len(kinds)], rng.randint(least, most))
        for turn, gold in enumerate(rng.sample(range(len(entries)), questions_per_context)):
            samples.append(
                Sample(
                    id=f"copying-{split}-{seed}-{index * questions_per_context + turn:05d}",
                    documents=tuple(text for text, _, _ in entries),
                    question=entries[gold][1] + HINT,
                    answers=(entries[gold][2],),
                    gold=(gold,),
                    task="copying",
                )
            )
    return samples[:count]


def _entries(rng: Random, split: str, kind: str, count: int) -> list[tuple[str, str, str]]:
    """(document, question, answer) of `count` tickets or functions."""
    names, used = Names(rng, split), set[str]()
    made = []
    for _ in range(count):
        if kind == "uuid":
            code = str(uuid.UUID(int=rng.getrandbits(128), version=4))
            name, town = names.person()[0], names.town()
            made.append(
                (
                    rng.choice(_TICKETS).format(id=code, name=name, town=town),
                    f"What is the id of the ticket of {name}?",
                    code,
                )
            )
            continue
        name, given = function_name(rng, split, used), parameters(rng)
        does = rng.choice(_DOES).format(noun=rng.choice(_NOUNS), firm=names.firm(), town=names.town())
        text = f"def {name}({given}):\n    # {does}"
        if kind == "function":
            made.append((text, f'Which function does this: "{does}"', name))
        else:
            made.append((text, f"What are the parameters of {name}, with their defaults?", f"({given})"))
    return made


def function_name(rng: Random, split: str, used: set[str]) -> str:
    """A function name of this split that is not in `used`, which it joins."""
    for _ in range(10_000):
        name = "_".join((rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_FORMS)))
        if name not in used and in_split(name, split):
            used.add(name)
            return name
    raise ValueError("more documents asked for than there are function names; ask for fewer")


def parameters(rng: Random, defaults: bool = True) -> str:
    """One to four parameters as Python writes them, those with defaults last."""
    chosen = rng.sample(_PARAMETERS, rng.randint(1, 4))
    plain = rng.randint(0, len(chosen)) if defaults else len(chosen)
    values = ("None", "True", "False", str(rng.randint(2, 900)), f'"{rng.choice(_NOUNS)}"', f"0.{rng.randint(1, 99)}")
    return ", ".join(name if number < plain else f"{name}={rng.choice(values)}" for number, name in enumerate(chosen))
