# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tasks as they are named on the command line: `biography`, `niah:depth=0.5:chunks=8`, `hotpotqa:path=dev.json`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvspeed.eval.tasks.arithmetic import arithmetic
from kvspeed.eval.tasks.biography import TooManyQuestions, biography
from kvspeed.eval.tasks.code import code
from kvspeed.eval.tasks.copying import copying
from kvspeed.eval.tasks.hotpotqa import hotpotqa
from kvspeed.eval.tasks.instruction import instruction
from kvspeed.eval.tasks.multihop import multihop
from kvspeed.eval.tasks.musique import musique
from kvspeed.eval.tasks.names import rng_of
from kvspeed.eval.tasks.niah import long, niah
from kvspeed.samples import Sample, read_samples

__all__ = ["ANSWER_TOKENS", "CATEGORIES", "GENERATED", "SKILLS", "TASKS", "TaskSpec", "split_specs"]

# name -> function of (count, *, seed, split, options of its own); these are questions whose answer stands in a document
GENERATED: dict[str, Callable[..., list[Sample]]] = {
    "biography": biography,
    "niah": niah,
    "niah-multikey": partial(niah, distractors=3),
    "multihop": multihop,
}


# and these ask for more than to find it
SKILLS: dict[str, Callable[..., list[Sample]]] = {
    "copying": copying,
    "arithmetic": arithmetic,
    "instruction": instruction,
    "code": code,
    "long": long,
}


def _from_file(count: int, *, seed: int = 0, split: str = "test", path: str) -> list[Sample]:
    """The first `count` samples of a file of ours; seed and split play no part."""
    return read_samples(Path(path).expanduser())[:count]


TASKS: dict[str, Callable[..., list[Sample]]] = {
    **GENERATED,
    **SKILLS,
    "hotpotqa": hotpotqa,
    "musique": musique,
    "samples": _from_file,
}

# the most tokens of an answer, where nothing else is asked for
ANSWER_TOKENS = {
    "biography": 16,
    "niah": 16,
    "niah-multikey": 16,
    "multihop": 24,
    "hotpotqa": 48,
    "musique": 48,
    "arithmetic": 16,
    "long": 16,
}
# what a task tests, for tables by category; others are document questions
CATEGORIES = {
    "copying": "copying",
    "arithmetic": "arithmetic",
    "instruction": "instructions",
    "code": "code",
    "long": "long context",
}
_METRICS = {"copying": "copied", "code": "copied", "arithmetic": "em", "long": "em"}  # else "f1"
_STEPS_TOKENS = 256

_OPTION = re.compile(r":(?=[a-z_]+=)")
_NEXT = re.compile(r",(?=\s*(?:" + "|".join(sorted(TASKS, key=len, reverse=True)) + r")(?:[:,]|$))")


@dataclass(frozen=True)
class TaskSpec:
    """A task and its options.

    Attributes:
        name: one of `TASKS`.
        options: keywords of its function.
        shuffle: seed of another order of each sample's documents; None keeps the task's.
        samples: at most so many questions of it, whatever is asked for (long prompts take long).
        text: as it was written; the name of the task's rows.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    shuffle: int | None = None
    text: str = ""
    samples: int | None = None

    @classmethod
    def parse(cls, text: str) -> TaskSpec:
        """From `name:key=value:...`; numbers, `2-7` for a pair, `a+b` for several names, true and false.

        Raises:
            ValueError: there is no such task, or it has no such option.
        """
        name, *parts = _OPTION.split(text.strip())
        if name not in TASKS:
            raise ValueError(f"tasks: there is no task {name!r}; there are {', '.join(TASKS)}")
        options: dict[str, Any] = {}
        for part in parts:
            key, _, value = part.partition("=")
            options[key] = value if key in ("path", "name", "config") else _value(value)
        shuffle, samples = options.pop("shuffle", None), options.pop("samples", None)
        if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
            raise ValueError(f"tasks: {name}: samples: got {samples!r}, give at least 1")
        if shuffle is not None and (isinstance(shuffle, bool) or not isinstance(shuffle, int)):
            raise ValueError(f"tasks: {text.strip()}: shuffle is the seed of an order, a whole number")
        parameters = inspect.signature(TASKS[name]).parameters
        allowed = set(parameters) - {"count", "seed", "split"}
        unknown = sorted(set(options) - allowed)
        if unknown:
            known = ", ".join(sorted(allowed | {"shuffle", "samples"}))
            raise ValueError(f"tasks: {name} has no option {unknown[0]!r}; it has {known}")
        for key, value in options.items():
            _check_kind(text.strip(), key, value, str(parameters[key].annotation))
        missing = [key for key in allowed if parameters[key].default is inspect.Parameter.empty and key not in options]
        if missing:
            raise ValueError(f"tasks: {name} needs {missing[0]}: write {name}:{missing[0]}=...")
        return cls(name, options, shuffle, text.strip(), samples)

    @property
    def answer_tokens(self) -> int:
        """The most tokens of an answer, where nothing else is asked for."""
        if self.options.get("steps") and self.name in ("hotpotqa", "musique"):
            return _STEPS_TOKENS
        return ANSWER_TOKENS.get(self.name, 48)

    @property
    def category(self) -> str:
        """What it tests: "documents", or one of `CATEGORIES`."""
        return CATEGORIES.get(self.name, "documents")

    @property
    def metric(self) -> str:
        """Which score of an answer counts where one number is wanted: "f1", "em" or "copied"; a sample with checks is
        scored by these."""
        return _METRICS.get(self.name, "f1")

    def load(self, count: int, *, seed: int = 0, split: str = "test", questions_per_context: int = 1) -> list[Sample]:
        """The samples, up to `questions_per_context` in a row on the same documents, where the options do not say it.

        A task that cannot have as many (`niah` has one needle to ask for) has as many as it can.

        Raises:
            ValueError, OSError, ImportError: as the task's function.
        """
        make, options = TASKS[self.name], dict(self.options)
        count = count if self.samples is None else min(count, self.samples)
        fixed = "questions_per_context" in options or "questions_per_context" not in inspect.signature(make).parameters
        if questions_per_context > 1 and not fixed:
            options["questions_per_context"] = questions_per_context
        try:
            try:
                samples = make(count, seed=seed, split=split, **options)
            except TooManyQuestions as error:
                if fixed or error.most < 1:
                    raise
                samples = make(count, seed=seed, split=split, **{**options, "questions_per_context": error.most})
        except (TypeError, ValueError) as error:
            raise ValueError(f"tasks: {self.text or self.name}: {error}") from error
        return samples if self.shuffle is None else [_shuffled(sample, self.shuffle) for sample in samples]


def split_specs(text: str) -> list[TaskSpec]:
    """Tasks separated by commas (commas inside options are left alone), each once.

    Raises:
        ValueError: there is none, one is written twice, or as `TaskSpec.parse`.
    """
    parts = [part for part in _NEXT.split(text.strip().strip(",")) if part.strip()]
    if not parts:
        raise ValueError(f"tasks: got none; choose from {', '.join(TASKS)}")
    specs = [TaskSpec.parse(part) for part in parts]
    texts = [spec.text for spec in specs]
    for one in texts:
        if texts.count(one) > 1:
            raise ValueError(f"tasks: {one} is given twice; name each once")
    return specs


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"\d+-\d+", text):
        least, _, most = text.partition("-")
        return int(least), int(most)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return tuple(text.split("+"))


# kinds of options, as their annotations name them: how they are written, and which values they are
_KINDS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("bool", "true or false", lambda value: isinstance(value, bool)),
    ("tuple[int, int]", "two numbers as 2-7", lambda value: isinstance(value, tuple) and isinstance(value[0], int)),
    ("tuple[str, ...]", "names as a+b", lambda value: isinstance(value, tuple) and isinstance(value[0], str)),
    ("float", "a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)),
    ("int", "a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    ("str", "text", lambda value: isinstance(value, str)),
)


def _check_kind(text: str, key: str, value: Any, annotation: str) -> None:
    """Refuses a value of another kind than the option's, such as `facts=a`."""
    fitting, rest = [], annotation
    for kind, words, fits in _KINDS:
        if kind in rest:
            rest = rest.replace(kind, "")
            fitting.append(words)
            if fits(value):
                return
    raise ValueError(f"tasks: {text}: {key} is {' or '.join(fitting)}")


def _shuffled(sample: Sample, seed: int) -> Sample:
    order = list(range(len(sample.documents)))
    rng_of("shuffle", seed, *sample.documents).shuffle(order)  # by the documents, so that equal ones stay equal
    return replace(
        sample,
        documents=tuple(sample.documents[index] for index in order),
        gold=tuple(sorted(order.index(index) for index in sample.gold)),
    )
