# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Small sums about what people sold: the numbers stand in the documents, the answer does not."""

from __future__ import annotations

from random import Random

from kvspeed.eval.tasks.biography import HINT, check_count, check_questions, span
from kvspeed.eval.tasks.names import Names, check_split, in_split, rng_of
from kvspeed.samples import Sample

__all__ = ["arithmetic"]

_GOODS = "apples baskets books boots bowls candles chairs clocks combs cups eggs hats jars kites knives lamps".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_TEXT = (
    "{name} sold {a} {goods} on {first} and {b} on {second}. Each cost {price} coins.",
    "On {first} {name} sold {a} {goods}, and on {second} {b} more. One cost {price} coins.",
    "At {price} coins each, {name} sold {a} {goods} on {first} and {b} on {second}.",
)


def arithmetic(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    documents: int | tuple[int, int] = (1, 3),
    largest: int = 49,
    questions_per_context: int = 1,
) -> list[Sample]:
    """`count` samples: a sum, a difference or a product of two numbers of one person.

    Args:
        count: how many.
        seed: another seed, other samples; sample i of a seed does not depend on `count`.
        split: "train", "dev" or "test"; no person and no pair of numbers is in two of them.
        documents: people a sample, or the least and the most.
        largest: the most that is sold on a day, 20 to 10000; the least is 2.
        questions_per_context: this many samples in a row have the same documents.

    Raises:
        ValueError: an argument is out of range.
    """
    least, most = span("documents", documents)
    check_split(split)
    if not 20 <= largest <= 10_000:
        raise ValueError(f"largest: got {largest}, give 20 to 10000")
    check_questions(questions_per_context, 3 * least, f"{least} documents answer")
    samples: list[Sample] = []
    for index in range(-(-check_count(count) // questions_per_context)):
        rng = rng_of("arithmetic", split, seed, index)
        names = Names(rng, split)
        people = [_person(rng, names, largest) for _ in range(rng.randint(least, most))]
        asked = [(gold, number) for gold in range(len(people)) for number in range(3)]
        for turn, (gold, number) in enumerate(rng.sample(asked, questions_per_context)):
            text, answer = people[gold][1][number]
            samples.append(
                Sample(
                    id=f"arithmetic-{split}-{seed}-{index * questions_per_context + turn:05d}",
                    documents=tuple(document for document, _ in people),
                    question=text + HINT,
                    answers=(str(answer),),
                    gold=(gold,),
                    task="arithmetic",
                )
            )
    return samples[:count]


def _person(rng: Random, names: Names, largest: int) -> tuple[str, list[tuple[str, int]]]:
    """(document, three questions with their answers)."""
    name, _ = names.person()
    while True:
        a, b = rng.sample(range(2, largest + 1), 2)
        if in_split(f"{min(a, b)} {max(a, b)}", names.split):
            break
    goods, price = rng.choice(_GOODS), rng.randint(2, 9)
    first, second = rng.sample(_DAYS, 2)
    words = {"name": name, "goods": goods, "first": first, "second": second}
    most, few = (first, second) if a > b else (second, first)
    return rng.choice(_TEXT).format(a=a, b=b, price=price, **words), [
        (f"How many {goods} did {name} sell on both days together?", a + b),
        (f"How many more {goods} did {name} sell on {most} than on {few}?", abs(a - b)),
        (f"How many coins did {name} get for the {goods} of {few}?", min(a, b) * price),
    ]
