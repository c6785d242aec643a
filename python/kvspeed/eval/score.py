# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Scores of short answers, with SQuAD's normalisation.

An answer is compared with every accepted spelling and gets the best score. `contains` is the one for models that answer
in sentences; it compares whole words, so that "82" is not found in "1823".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

__all__ = ["contains", "exact_match", "f1", "normalise"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces (as SQuAD's evaluation script)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: str | Sequence[str]) -> bool:
    """True when the whole prediction is one of the answers, after normalisation."""
    return normalise(prediction) in {normalise(answer) for answer in _accepted(answers)}


def contains(prediction: str, answers: str | Sequence[str]) -> bool:
    """True when one of the answers occurs in the prediction as a run of whole words, after normalisation."""
    words = normalise(prediction).split()
    return any(_has_run(words, normalise(answer).split()) for answer in _accepted(answers))


def f1(prediction: str, answers: str | Sequence[str]) -> float:
    """Word-overlap F1 in [0, 1], the best over the answers. Two empty sides score 1."""
    return max(_f1(normalise(prediction).split(), normalise(answer).split()) for answer in _accepted(answers))


def _accepted(answers: str | Sequence[str]) -> list[str]:
    accepted = [answers] if isinstance(answers, str) else list(answers)
    if not accepted:
        raise ValueError("answers: got none; give at least one accepted answer")
    return accepted


def _has_run(words: list[str], run: list[str]) -> bool:
    return bool(run) and any(words[i : i + len(run)] == run for i in range(len(words) - len(run) + 1))


def _f1(prediction: list[str], answer: list[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    common = sum((Counter(prediction) & Counter(answer)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(answer)
    return 2 * precision * recall / (precision + recall)
