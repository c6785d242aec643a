# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Documents and questions that ship with kvspeed: written for it, on real subjects, about 2,200 tokens in all.

The questions were chosen by one rule: SmolLM2-135M-Instruct answers them under full recompute, with all documents in
the prompt. What other methods make of them had no part in the choice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

__all__ = ["Document", "Question", "documents", "questions"]


@dataclass(frozen=True)
class Document:
    """One document; `name` is its file's name without the ending."""

    name: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question that one document answers.

    Attributes:
        document: name of that document.
        question: the question.
        answers: the short answer, then accepted spellings of it.
    """

    document: str
    question: str
    answers: tuple[str, ...]


def documents() -> list[Document]:
    """All documents, in the order in which the demo puts them into the prompt."""
    folder = resources.files(__name__) / "documents"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    return [Document(file.name.removesuffix(".txt"), file.read_text(encoding="utf-8").strip()) for file in files]


def questions() -> list[Question]:
    """All questions, in the order in which the demo asks them."""
    entries = json.loads((resources.files(__name__) / "questions.json").read_text(encoding="utf-8"))
    return [Question(entry["document"], entry["question"], tuple(entry["answers"])) for entry in entries]
