# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Scores of short answers, with SQuAD's normalisation; and two others, for comparison with published numbers.

An answer is compared with every accepted spelling and gets the best score. `contains` is the one for models that answer
in sentences; it compares whole words, so that "82" is not found in "1823". `string_match` is RULER's score, and
`corpus_f1` the one in the tables of the KV Packet paper (arXiv:2604.13226), which counts words over all questions, so
that one long answer lowers it for the whole set.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

__all__ = ["contains", "copied", "corpus_f1", "exact_match", "f1", "normalise", "string_match"]

_FENCE = re.compile(r"^```\w*\n|\n?```$")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces (as SQuAD's evaluation script)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: str | Sequence[str]) -> bool:
    """True when the whole prediction is one of the answers, after normalisation."""
    return normalise(prediction) in {normalise(answer) for answer in _accepted(answers)}


def copied(prediction: str, answers: str | Sequence[str]) -> bool:
    """True when the first line of the prediction is one of the answers to the letter: case and punctuation count.

    White space around and between words, quotes or backticks around the whole, and one last period do not count: they
    are how an answer is given, not what was copied.
    """
    lines = _FENCE.sub("", prediction.strip()).strip().splitlines()
    return bool(lines) and _bare(lines[0]) in {_bare(answer) for answer in _accepted(answers)}


def _bare(text: str) -> str:
    text = " ".join(text.split()).removesuffix(".")
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "`'\""
    return (text[1:-1] if quoted else text).removesuffix(".")


def contains(prediction: str, answers: str | Sequence[str]) -> bool:
    """True when one of the answers occurs in the prediction as a run of whole words, after normalisation."""
    words = normalise(prediction).split()
    return any(_has_run(words, normalise(answer).split()) for answer in _accepted(answers))


def f1(prediction: str, answers: str | Sequence[str]) -> float:
    """Word-overlap F1 in [0, 1], the best over the answers. Two empty sides score 1."""
    return max(_f1(normalise(prediction).split(), normalise(answer).split()) for answer in _accepted(answers))


def string_match(prediction: str, answers: str | Sequence[str]) -> float:
    """RULER's score for tasks with one answer: 1.0 when an accepted spelling is a substring, whatever the case."""
    return float(any(answer.lower() in prediction.lower() for answer in _accepted(answers)))


def corpus_f1(predictions: Sequence[str], answers: Sequence[str]) -> float:
    """F1 of word counts summed over all questions, words as lower case between white space, without "." at the end.

    That is how the paper's program prepares answers; all full stops at the end go, not one.

    Args:
        predictions: one a question.
        answers: the one expected answer of each.

    Raises:
        ValueError: there are none, or not as many answers as predictions.
    """
    if len(predictions) != len(answers) or not predictions:
        raise ValueError(f"predictions: got {len(predictions)} and {len(answers)} answers; give one answer for each")
    common = said = wanted = 0
    for prediction, answer in zip(predictions, answers, strict=True):
        one, other = Counter(_plain_words(prediction)), Counter(_plain_words(answer))
        common += (one & other).total()
        said += one.total()
        wanted += other.total()
    return 2 * common / (said + wanted) if common else 0.0


def _plain_words(text: str) -> list[str]:
    return text.lower().strip().rstrip(".").split()


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
