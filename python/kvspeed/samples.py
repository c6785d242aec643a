# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Questions about documents, the unit of training and evaluation, and the words that stand around them in a prompt.

A file of samples is JSON Lines, one sample a line:

    {"id": "a-1", "documents": ["Mira Ash ...", "..."], "question": "...", "answers": ["Norbridge"], "gold": [0]}

`gold` (the documents that hold the answer, by index), `task`, `reasoning` and `checks` may be left out, `answer` with
one string stands for `answers`, and a sample without `id` gets the file's name and its line as one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvspeed.atomic import replacing
from kvspeed.check_forms import check_form

__all__ = [
    "ANSWER_MARK",
    "INSTRUCTION",
    "SEPARATOR",
    "Sample",
    "check_samples",
    "distinct",
    "distinct_keys",
    "document_text",
    "read_samples",
    "read_text",
    "write_samples",
]

INSTRUCTION = "Read the documents and answer the question.\n\n"
SEPARATOR = "Question: "
ANSWER_MARK = "Answer:"

_KNOWN = {"id", "documents", "question", "answers", "answer", "gold", "task", "reasoning", "checks"}


def document_text(text: str) -> str:
    """A document as it stands in the prompt: without outer white space, ended by an empty line."""
    return text.strip() + "\n\n"


@dataclass(frozen=True)
class Sample:
    """A question, the documents that stand before it, and its accepted answers.

    Attributes:
        id: unique in a list of samples.
        documents: their texts, in the order of the prompt.
        question: what is asked, with a hint at the form of the answer where the task gives one.
        answers: the short answer, then accepted spellings of it.
        gold: indices of the documents that the answer needs; empty where that is not known.
        task: the task that it belongs to, or "".
        reasoning: what stands before the answer, where the question asks for steps; else "".
        checks: what must hold of an answer, as `kvspeed.eval.checks` reads it, where many wordings are right; `answers`
            are then examples.

    Raises:
        TypeError: a field is of another type.
        ValueError: there are no documents or no answers, a text is empty, a check is none, or `gold` names a document
            twice or one that is not there.
    """

    id: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...] = ()
    task: str = ""
    reasoning: str = ""
    checks: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """What a model is taught to write: the first answer, after reasoning and `ANSWER_MARK` where there is some."""
        return f"{self.reasoning} {ANSWER_MARK} {self.answers[0]}" if self.reasoning else self.answers[0]

    def prediction(self, text: str) -> str:
        """The answer in what a model wrote: with reasoning, what follows the last `ANSWER_MARK`, "" without one."""
        if not self.reasoning:
            return text.strip()
        _, mark, after = text.rpartition(ANSWER_MARK)
        return after.strip() if mark else ""

    def __post_init__(self) -> None:
        for name in ("id", "question", "task", "reasoning"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}: expected a string, got {type(getattr(self, name)).__name__}")
            _check_text(name, getattr(self, name))
        for name in ("documents", "answers", "gold", "checks"):
            object.__setattr__(self, name, _sequence(name, getattr(self, name)))
        if not self.id.strip():
            raise ValueError("id: is empty; give every sample a name of its own")
        for name in ("documents", "answers"):
            texts = getattr(self, name)
            if not texts:
                raise ValueError(f"{name}: there are none; a sample needs at least one")
            for number, text in enumerate(texts):
                if not isinstance(text, str):
                    raise TypeError(f"{name}[{number}]: expected a string, got {type(text).__name__}")
                if not text.strip():
                    raise ValueError(f"{name}[{number}]: is empty; leave it out or give it words")
                _check_text(f"{name}[{number}]", text)
        if not self.question.strip():
            raise ValueError("question: is empty; ask something")
        for number, check in enumerate(self.checks):
            if not isinstance(check, str):
                raise TypeError(f"checks[{number}]: expected a string, got {type(check).__name__}")
            _check_text(f"checks[{number}]", check)
            check_form(check)
        self._check_gold()

    def _check_gold(self) -> None:
        for index in self.gold:
            if not isinstance(index, int) or isinstance(index, bool):
                raise TypeError(f"gold: expected indices of documents, got {index!r}")
            if not 0 <= index < len(self.documents):
                raise ValueError(
                    f"gold: names document {index}, there are {len(self.documents)}; count from 0 to "
                    f"{len(self.documents) - 1}"
                )
        if len(set(self.gold)) != len(self.gold):
            raise ValueError(f"gold: names a document twice in {list(self.gold)}; name each once")


def check_samples(samples: Iterable[Sample]) -> list[Sample]:
    """The samples as a list.

    Raises:
        TypeError: one is no `Sample`.
        ValueError: there are none, or two have one id.
    """
    found = list(samples)
    if not found:
        raise ValueError("samples: got none; give at least one")
    seen: dict[str, int] = {}
    for number, sample in enumerate(found):
        if not isinstance(sample, Sample):
            raise TypeError(f"samples[{number}]: expected a kvspeed.Sample, got {type(sample).__name__}")
        if sample.id in seen:
            raise ValueError(
                f"samples[{number}]: has the id {sample.id!r} of samples[{seen[sample.id]}]; ids are unique"
            )
        seen[sample.id] = number
    return found


def distinct(samples: Iterable[Sample], others: Iterable[Sample] = ()) -> list[Sample]:
    """The samples; one that has the id of an earlier one (of another file) gets a number behind it."""
    seen, found = {sample.id for sample in others}, []
    for sample in samples:
        name, number = sample.id, 2
        while name in seen:
            name, number = f"{sample.id}#{number}", number + 1
        seen.add(name)
        found.append(sample if name == sample.id else replace(sample, id=name))
    return found


def read_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """The samples of a JSON Lines file, empty lines skipped.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a sample; the message names the file and the line.
    """
    path = Path(path)
    samples: list[Sample] = []
    first: dict[str, int] = {}
    for number, line in enumerate(read_text(path, "JSON Lines are expected").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            sample = _sample(json.loads(line, object_pairs_hook=distinct_keys), f"{path.stem}-{number}")
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: is no JSON ({error.msg} at character {error.pos + 1})") from None
        except RecursionError:
            raise ValueError(f"{where}: is nested too deeply to be a sample") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None
        if sample.id in first:
            raise ValueError(f"{where}: the id {sample.id!r} is that of line {first[sample.id]} too; ids are unique")
        first[sample.id] = number
        samples.append(sample)
    if not samples:
        raise ValueError(f"{path}: holds no samples; one JSON object a line is expected")
    return samples


def write_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Writes JSON Lines that `read_samples` reads back as they were; the file appears whole or not at all.

    Raises:
        TypeError, ValueError: as `check_samples`, before anything is written.
        OSError: the file cannot be written.
    """
    text = "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in check_samples(samples))
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def read_text(path: Path, expected: str) -> str:
    """A file as UTF-8, a byte order mark left out.

    Raises:
        OSError: it cannot be read.
        ValueError: it is other text; the message names the line, and what is `expected`.
    """
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: is not UTF-8 text (byte {error.start}); {expected}") from None


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of which nothing is dropped: for `json.loads(..., object_pairs_hook=)`, which keeps the last only.

    Raises:
        ValueError: a key is there twice.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice; give it once")
        found[key] = value
    return found


def _sample(entry: Any, default_id: str) -> Sample:
    if not isinstance(entry, dict):
        raise TypeError(f"expected a JSON object with documents, question and answers, got {type(entry).__name__}")
    unknown = sorted(set(entry) - _KNOWN)
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_KNOWN))}")
    if "answer" in entry and "answers" in entry:
        raise ValueError("both answer and answers are given; give one of them")
    answers: Any = [entry["answer"]] if "answer" in entry else entry.get("answers")
    for name, value in (("documents", entry.get("documents")), ("answers", answers)):
        if value is None:
            raise ValueError(f"{name}: is missing")
    if "question" not in entry:
        raise ValueError("question: is missing")
    return Sample(
        id=entry.get("id", default_id),
        documents=entry["documents"],
        question=entry["question"],
        answers=answers,
        gold=entry.get("gold", ()),
        task=entry.get("task", ""),
        reasoning=entry.get("reasoning", ""),
        checks=entry.get("checks", ()),
    )


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: character {error.start} is half of a surrogate pair; give whole characters"
        ) from None


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    """A tuple of a list or tuple; a string would become a tuple of its letters."""
    if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: expected a list, got {type(value).__name__}")
    return tuple(value)
