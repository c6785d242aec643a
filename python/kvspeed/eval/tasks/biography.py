# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Biographies of invented people, one a document, and a question about one fact of one of them.

The kind of task that the KV Packet paper calls Biography: six attributes a person, a paraphrase drawn for each, and the
other documents are distractors. All words are ours. Unlike the paper's code, which puts the document with the answer
first, it stands anywhere.
"""

from __future__ import annotations

from random import Random

from kvspeed.eval.tasks.names import Names, check_split, rng_of
from kvspeed.samples import Sample

__all__ = ["FACTS", "HINT", "biography", "check_count", "person", "span"]

HINT = " Give only the answer."

# fact -> (paraphrases, questions); {who} is the name or the pronoun, {he} the pronoun in lower case
FACTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "born on": (
        ("{who} was born on {fact}.", "{who} came into the world on {fact}.", "The birthday of {who} is {fact}."),
        ("When was {name} born?", "What is the birth date of {name}?", "On which day was {name} born?"),
    ),
    "born in": (
        ("{He} comes from {fact}.", "{He} was born in {fact}.", "{His} home town is {fact}."),
        ("Where was {name} born?", "What is the home town of {name}?", "Which town does {name} come from?"),
    ),
    "lives in": (
        ("{He} now lives in {fact}.", "Today {he} lives in {fact}.", "{His} current home is in {fact}."),
        (
            "Where does {name} live now?",
            "In which town does {name} live today?",
            "Where is the current home of {name}?",
        ),
    ),
    "school": (
        ("{He} studied at {fact}.", "{His} degree is from {fact}.", "{He} graduated from {fact}."),
        ("Where did {name} study?", "Which school did {name} graduate from?", "Where is the degree of {name} from?"),
    ),
    "subject": (
        ("{His} subject was {fact}.", "{He} took a degree in {fact}.", "{His} major was {fact}."),
        ("What did {name} study?", "What was the major of {name}?", "Which subject did {name} take a degree in?"),
    ),
    "works for": (
        ("{He} works for {fact}.", "{His} employer is {fact}.", "{He} has a job at {fact}."),
        ("Which company does {name} work for?", "Who is the employer of {name}?", "Where does {name} have a job?"),
    ),
}
_SUBJECTS = (
    "history,law,physics,biology,chemistry,music,economics,geology,medicine,philosophy,mathematics,architecture,"
    "astronomy,psychology,nursing,painting,botany,education,statistics,linguistics,engineering,marketing,theology,"
    "sociology,accounting,forestry,geography,journalism"
).split(",")
_MONTHS = ("January,February,March,April,May,June,July,August,September,October,November,December").split(",")


def biography(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    documents: int | tuple[int, int] = (2, 7),
    facts: int = 6,
    questions_per_context: int = 1,
) -> list[Sample]:
    """`count` samples on invented people.

    Args:
        count: how many.
        seed: another seed, other samples; sample i of a seed does not depend on `count`.
        split: "train", "dev" or "test"; no surname, town, firm or school is in two of them.
        documents: people a sample, or the least and the most. A document has 47 to 61 tokens with six facts.
        facts: facts a person, 1 to 6.
        questions_per_context: this many samples in a row have the same documents (cheaper to train on).

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
        samples += _context(index, seed, split, least, most, facts, questions_per_context)
    return samples[:count]


def check_count(count: int) -> int:
    """`count`, if it is a number of samples."""
    if count < 1:
        raise ValueError(f"count: got {count}; ask for at least one sample")
    return count


class TooManyQuestions(ValueError):
    """A context answers at most `most` questions."""

    def __init__(self, given: int, most: int, why: str) -> None:
        super().__init__(f"questions_per_context: got {given}, {why} 1 to {most}")
        self.most = most


def check_questions(given: int, most: int, why: str) -> None:
    """Refuses more questions on a context than it can answer, or none.

    Raises:
        TooManyQuestions: saying `why`.
    """
    if not 1 <= given <= most:
        raise TooManyQuestions(given, most, why)


def span(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    """(least, most) of a number or a pair.

    Raises:
        ValueError: it is below one, the pair is the wrong way round, or it is neither.
    """
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(number, int) for number in pair):
        raise ValueError(f"{name}: got {value!r}; give a whole number or two, the least and the most")
    least, most = pair
    if not 1 <= least <= most:
        raise ValueError(f"{name}: got {least} to {most}; give at least 1, the smaller number first")
    return least, most


def _context(index: int, seed: int, split: str, least: int, most: int, facts: int, questions: int) -> list[Sample]:
    rng = rng_of("biography", split, seed, index)
    names = Names(rng, split)
    people = [person(rng, names, facts) for _ in range(rng.randint(least, most))]
    asked = [(number, fact) for number, (_, known, _) in enumerate(people) for fact in known]
    return [
        Sample(
            id=f"biography-{split}-{seed}-{index * questions + turn:05d}",
            documents=tuple(text for _, _, text in people),
            question=rng.choice(FACTS[fact][1]).format(name=people[gold][0]) + HINT,
            answers=(people[gold][1][fact],),
            gold=(gold,),
            task="biography",
        )
        for turn, (gold, fact) in enumerate(rng.sample(asked, questions))
    ]


def person(rng: Random, names: Names, facts: int) -> tuple[str, dict[str, str], str]:
    """(name, fact -> its value, the document)."""
    name, pronoun = names.person()
    words = {"name": name, "He": pronoun, "he": pronoun.lower(), "His": "Her" if pronoun == "She" else "His"}
    known = {
        "born on": f"{rng.randint(1, 28)} {rng.choice(_MONTHS)} {rng.randint(1931, 2001)}",
        "born in": names.town(),
        "lives in": names.town(),
        "school": names.school(),
        "subject": names.one_of(_SUBJECTS) if names.people <= len(_SUBJECTS) else rng.choice(_SUBJECTS),
        "works for": names.firm(),
    }
    # as many draws as there are facts, of which the first counts: a seed's samples are what they always were
    chosen, *_ = [rng.sample(sorted(known), facts) for _ in FACTS]
    kept = [fact for fact in FACTS if fact in chosen]
    sentences = []
    for number, fact in enumerate(kept):
        sentence = rng.choice(FACTS[fact][0])
        if number == 0 and "{who}" not in sentence:  # the first sentence names the person
            sentence = sentence.replace("{He}", "{name}").replace("{His}", "{name}'s").replace("{he}", "{name}")
        who = name if number == 0 else pronoun
        sentences.append(sentence.format(who=who, fact=known[fact], **words))
    return name, {fact: known[fact] for fact in kept}, " ".join(sentences)
