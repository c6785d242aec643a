# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Questions that two documents answer together: one says where a person works, another says where that firm is.

Every sample has as many people as firms, each person at another firm, so that neither document alone gives the answer
and guessing among the firms is as good as chance.
"""

from __future__ import annotations

from random import Random

from kvspeed.eval.tasks.biography import HINT, check_count, check_questions, span
from kvspeed.eval.tasks.names import Names, check_split, rng_of
from kvspeed.samples import Sample

__all__ = ["multihop"]

STEPS = " Give the company, then the answer."

# what is asked of the firm -> (sentences of the firm's document, questions)
RELATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "town": (
        ("{firm} has its offices in {fact}.", "{firm} is based in {fact}.", "The seat of {firm} is {fact}."),
        (
            "In which town is the company of {name}?",
            "Where is the company that {name} works for based?",
            "Which town is the employer of {name} based in?",
        ),
    ),
    "chief": (
        ("{firm} is led by {fact}.", "The head of {firm} is {fact}.", "{firm} has {fact} as its director."),
        (
            "Who leads the company of {name}?",
            "Who is the head of the company that {name} works for?",
            "Who is the director of the employer of {name}?",
        ),
    ),
    "product": (
        ("{firm} makes {fact}.", "{firm} is known for its {fact}.", "The main product of {firm} is {fact}."),
        (
            "What does the company of {name} make?",
            "What is the main product of the company that {name} works for?",
            "What is the employer of {name} known for?",
        ),
    ),
}
_WORKS = (
    "{name} works for {firm}.",
    "{name} has a job at {firm}.",
    "{name} is employed by {firm}.",
    "The employer of {name} is {firm}.",
)
_ABOUT_PERSON = (
    "{He} likes {hobby}.",
    "In the evening {he} enjoys {hobby}.",
    "{His} hobby is {hobby}.",
    "{He} goes to work by {ride}.",
    "Most mornings {he} takes the {ride}.",
)
_ABOUT_FIRM = (
    "It was founded in {year}.",
    "It employs {staff} people.",
    "The firm began in {year} with a small workshop.",
    "About {staff} people work there.",
)
_HOBBIES = "chess,sailing,baking,cycling,fishing,gardening,knitting,hiking,pottery,singing,skating,tennis".split(",")
_RIDES = "bus,train,tram,ferry,bicycle".split(",")
_PRODUCTS = (
    "clocks,bicycles,violins,lamps,tents,boots,kettles,pumps,spoons,mirrors,carpets,cameras,ladders,engines,pencils,"
    "umbrellas,helmets,sofas,candles,gloves,scales,drums,knives,ropes,bricks,bottles,boats,chairs,pianos,stoves"
).split(",")


def multihop(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    pairs: int | tuple[int, int] = (2, 3),
    relations: tuple[str, ...] = ("town", "chief", "product"),
    steps: bool = True,
    questions_per_context: int = 1,
) -> list[Sample]:
    """`count` samples, each on its own people and firms.

    Args:
        count: how many.
        seed: another seed, other samples; sample i of a seed does not depend on `count`.
        split: "train", "dev" or "test"; no surname, firm or town is in two of them.
        pairs: people a sample, or the least and the most; there are twice as many documents, of 15 to 60 tokens.
        relations: what may be asked of a firm: of "town", "chief" and "product".
        steps: the question asks for the firm before the answer, as `Sample.reasoning` has it: small models need that.
        questions_per_context: this many samples in a row have the same documents (cheaper to train on).

    Raises:
        ValueError: an argument is out of range.
    """
    least, most = span("pairs", pairs)
    check_split(split)
    unknown = [name for name in relations if name not in RELATIONS]
    if unknown or not relations:
        raise ValueError(f"relations: got {list(relations)}, choose from {', '.join(RELATIONS)}")
    why = f"{least} pairs and {len(relations)} relations give"
    check_questions(questions_per_context, least * len(relations), why)
    samples: list[Sample] = []
    for index in range(-(-check_count(count) // questions_per_context)):
        samples += _context(index, seed, split, (least, most), relations, steps, questions_per_context)
    return samples[:count]


def _context(
    index: int,
    seed: int,
    split: str,
    pairs: tuple[int, int],
    relations: tuple[str, ...],
    steps: bool,
    questions: int,
) -> list[Sample]:
    rng = rng_of("multihop", split, seed, index)
    names = Names(rng, split)
    texts: list[tuple[str, str]] = []  # (person or firm, document)
    jobs: dict[str, tuple[str, dict[str, str]]] = {}  # person -> (firm, its facts)
    for _ in range(rng.randint(*pairs)):
        name, pronoun = names.person()
        firm = names.firm()
        facts = {"town": names.town(), "chief": names.person()[0], "product": names.one_of(_PRODUCTS)}
        jobs[name] = (firm, facts)
        texts += [(name, _person_text(rng, name, pronoun, firm)), (firm, _firm_text(rng, firm, facts, relations))]
    rng.shuffle(texts)
    order = [about for about, _ in texts]
    asked = [(name, what) for name in jobs for what in relations]
    samples = []
    for turn, (name, what) in enumerate(rng.sample(asked, questions)):
        firm, facts = jobs[name]
        samples.append(
            Sample(
                id=f"multihop-{split}-{seed}-{index * questions + turn:05d}",
                documents=tuple(text for _, text in texts),
                question=rng.choice(RELATIONS[what][1]).format(name=name) + (STEPS if steps else HINT),
                answers=(facts[what],),
                gold=(order.index(name), order.index(firm)),
                task="multihop",
                reasoning=f"{firm}." if steps else "",
            )
        )
    return samples


def _person_text(rng: Random, name: str, pronoun: str, firm: str) -> str:
    words = {"He": pronoun, "he": pronoun.lower(), "His": "Her" if pronoun == "She" else "His"}
    more = rng.choice(_ABOUT_PERSON).format(hobby=rng.choice(_HOBBIES), ride=rng.choice(_RIDES), **words)
    return f"{rng.choice(_WORKS).format(name=name, firm=firm)} {more}"


def _firm_text(rng: Random, firm: str, facts: dict[str, str], relations: tuple[str, ...]) -> str:
    sentences = [rng.choice(RELATIONS[what][0]).format(firm=firm, fact=facts[what]) for what in relations]
    rng.shuffle(sentences)
    more = rng.choice(_ABOUT_FIRM).format(year=rng.randint(1890, 2015), staff=rng.randint(20, 900))
    return " ".join([*sentences, more])
