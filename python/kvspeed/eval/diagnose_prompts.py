# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Prompts by kind of task, for `kvspeed diagnose`: five kinds that are made up on the spot, or a file of one's own.

What a model does with its prompt in depth depends on the task, so a diagnosis needs prompts of each. The built-in kinds
need no download and are the same for the same seed:

- retrieval: one question about a record among many;
- copying: a list of identifiers to be repeated, letter by letter;
- arithmetic: sums told as a story;
- code: a function to be written after two examples;
- instruction: a text to be written under conditions that can be checked.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvspeed.prompt import encode, prompt_ids
from kvspeed.speed.diagnose import TokenPrompt

__all__ = ["CATEGORIES", "TextPrompt", "builtin_prompts", "read_prompts", "token_prompts"]

_FIRST = ("Ada", "Bruno", "Clara", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kaya", "Lionel")
_LAST = ("Arden", "Bell", "Costa", "Dahl", "Ekman", "Frost", "Grant", "Holm", "Ivers", "Jansen", "Koch", "Lund")
_CITIES = (
    "Bergen",
    "Cadiz",
    "Dresden",
    "Evora",
    "Florence",
    "Ghent",
    "Haifa",
    "Izmir",
    "Kyoto",
    "Lima",
    "Malmo",
    "Nice",
)
_JOBS = ("baker", "botanist", "carpenter", "dentist", "engineer", "glazier", "judge", "musician", "nurse", "painter")
_THINGS = ("apples", "books", "bricks", "candles", "coins", "eggs", "lamps", "nails", "pens", "stamps", "tickets")
_VERBS = ("load", "parse", "merge", "split", "count", "filter", "format", "check", "update", "render", "store", "find")
_NOUNS = (
    "rows",
    "users",
    "orders",
    "tokens",
    "blocks",
    "pages",
    "events",
    "paths",
    "labels",
    "totals",
    "items",
    "keys",
)
_TOPICS = ("a lighthouse", "an old tram", "the first snow", "a market square", "a mountain hut", "a lost umbrella")


@dataclass(frozen=True)
class TextPrompt:
    """One prompt in words.

    Attributes:
        id: a name, unique in a diagnosis.
        category: the kind of task.
        prompt: what the user says, without control tokens.
        answer: the answer to measure with; None: what the model says itself.
    """

    id: str
    category: str
    prompt: str
    answer: str | None = None


def builtin_prompts(
    categories: Sequence[str] | None = None, *, samples: int = 4, length: int = 300, seed: int = 0
) -> list[TextPrompt]:
    """Prompts of the built-in kinds, the same for the same arguments.

    Args:
        categories: which kinds, in this order; None: all.
        samples: prompts of each kind.
        length: how long they are, about, in words; what is told grows with it, the task does not.
        seed: other prompts.

    Raises:
        ValueError: another kind, one kind twice, or a number below 1.
    """
    chosen = list(CATEGORIES) if categories is None else list(categories)
    for name, value in (("samples", samples), ("length", length)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    for category in chosen:
        if category not in CATEGORIES:
            raise ValueError(f"category {category!r} is not built in; choose from {', '.join(CATEGORIES)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"categories are {chosen}; give at least one, and each once")
    found = []
    for category in chosen:
        for number in range(samples):
            rng = random.Random(f"{seed}/{category}/{number}/{length}")
            found.append(TextPrompt(f"{category}-{number}", category, CATEGORIES[category](rng, length)))
    return found


def read_prompts(path: str | Path) -> list[TextPrompt]:
    """Prompts from a JSONL file: an object a line with `category` and `prompt`, and optionally `answer` and `id`.

    With an answer the model is measured while it reads that answer, without one while it writes its own. A missing id
    becomes the category and the line's number. Empty lines do not count.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not as said above; file and line are named.
    """
    found: list[TextPrompt] = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_prompt(line, number, f"{path}, line {number}"))
            if any(one.id == found[-1].id for one in found[:-1]):
                raise ValueError(f"{path}, line {number}: id {found[-1].id!r} was there before; give each its own")
    if not found:
        raise ValueError(f'{path}: holds no prompts; give a line like {{"category": "qa", "prompt": "..."}} for each')
    return found


def token_prompts(
    tokenizer: Any, prompts: Iterable[TextPrompt], *, chat_template_kwargs: dict[str, Any] | None = None
) -> list[TokenPrompt]:
    """The prompts in tokens, as the user's turn of the tokenizer's chat template, up to where the answer begins.

    A tokenizer without template gives the text alone, after BoS where it puts one.

    Raises:
        ValueError: a prompt that gives no tokens, or an unusable template.
    """
    found = []
    for one in prompts:
        ids = prompt_ids(tokenizer, one.prompt, separator="", chat_template_kwargs=chat_template_kwargs)
        answer = encode(tokenizer, one.answer, f"answer of {one.id}") if one.answer is not None else None
        found.append(TokenPrompt(one.id, one.category, (*ids.preamble, *ids.question), answer))
    return found


def _prompt(line: str, number: int, where: str) -> TextPrompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON ({error}); give one object a line") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: is a JSON {type(entry).__name__}; give an object with category and prompt")
    for name in ("category", "prompt"):
        if not isinstance(entry.get(name), str) or not entry[name].strip():
            raise ValueError(f"{where}: {name} is {entry.get(name)!r}; it must be text that is not empty")
    answer = entry.get("answer")
    if answer is not None and (not isinstance(answer, str) or not answer.strip()):
        raise ValueError(f"{where}: answer is {answer!r}; it must be text that is not empty, or left out")
    name = entry.get("id", f"{entry['category']}-{number}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: id is {name!r}; it must be text that is not empty, or left out")
    return TextPrompt(name, entry["category"], entry["prompt"], answer)


# ---- the built-in kinds -------------------------------------------------------------------------------------------


def _retrieval(rng: random.Random, length: int) -> str:
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    rng.shuffle(names)
    people = names[: max(2, min(len(names), length // 20))]
    facts = [(name, rng.choice(_CITIES), rng.choice(_JOBS), rng.randrange(1940, 2010)) for name in people]
    told = [
        f"{name} was born in {year}, lives in {city} and works there as a {job}." for name, city, job, year in facts
    ]
    asked = rng.choice(facts)[0]
    question = rng.choice(("In which city does {} live?", "When was {} born?", "What does {} do for a living?"))
    return "\n".join(told) + f"\n\n{question.format(asked)} Answer in one sentence."


def _copying(rng: random.Random, length: int) -> str:
    makers: list[Callable[[], str]] = [
        lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
        lambda: f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}_{rng.randrange(10, 99)}(limit={rng.randrange(2, 500)})",
        lambda: f"/srv/{rng.choice(_NOUNS)}/{rng.choice(_VERBS)}-{rng.randrange(1000, 9999)}.json",
    ]
    lines = [rng.choice(makers)() for _ in range(max(3, length // 12))]
    first = rng.randrange(0, len(lines) - 2)
    listed = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    return f"{listed}\n\nRepeat lines {first + 1} to {first + 3} of this list exactly, and nothing else."


def _arithmetic(rng: random.Random, length: int) -> str:
    things = list(_THINGS)
    rng.shuffle(things)
    told, asked = [], rng.randrange(len(things))
    for number, thing in enumerate(things[: max(1, min(len(things), length // 25))]):
        a, b, c = rng.randrange(20, 400), rng.randrange(5, 90), rng.randrange(2, 9)
        told.append(f"{rng.choice(_FIRST)} has {a} {thing}, buys {c} boxes with {b} {thing} each and gives {c} away.")
        asked = number if rng.random() < 0.5 else asked
    question = things[min(asked, len(told) - 1)]
    return " ".join(told) + f" How many {question} are there in the end? Calculate step by step."


def _code(rng: random.Random, length: int) -> str:
    shown = []
    for _ in range(max(2, length // 30)):
        verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
        shown.append(
            f"def {verb}_{noun}({noun}, limit={rng.randrange(2, 99)}):\n"
            f'    """{verb.capitalize()} the {noun} below the limit."""\n'
            f"    return [one for one in {noun} if one < limit]\n"
        )
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    task = f"a function {verb}_longest_{noun}({noun}) that returns the {rng.randrange(2, 9)} longest of the {noun}"
    return "```python\n" + "\n".join(shown) + f"```\n\nIn the style of these functions write {task}."


def _instruction(rng: random.Random, length: int) -> str:
    rules = [
        f"Use exactly {rng.randrange(2, 5)} sentences.",
        f"Use the word {rng.choice(_THINGS)} once.",
        f"Mention {rng.choice(_CITIES)}.",
        f"Begin with the letter {rng.choice('ABDHMST')}.",
        "Do not use commas.",
        f"End with the word {rng.choice(_NOUNS)}.",
    ]
    rng.shuffle(rules)
    people = [f"{rng.choice(_FIRST)} is a {rng.choice(_JOBS)} in {rng.choice(_CITIES)}." for _ in range(length // 7)]
    about = f"Write a short text about {rng.choice(_TOPICS)} in which some of these people appear."
    return " ".join(people) + f"\n\n{about} " + " ".join(rules[: rng.randrange(3, 6)])


#: The built-in kinds of task.
CATEGORIES: dict[str, Callable[[random.Random, int], str]] = {
    "retrieval": _retrieval,
    "copying": _copying,
    "arithmetic": _arithmetic,
    "code": _code,
    "instruction": _instruction,
}
