# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Bootstrap confidence intervals of means, and of ratios of means on the same questions.

Questions about the same documents are no independent draws: whole groups of them are resampled together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["average_interval", "mean_interval", "ratio_interval"]

ROUNDS = 2000


def mean_interval(
    values: Sequence[float],
    groups: Sequence[object] | None = None,
    *,
    level: float = 0.95,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> tuple[float, float]:
    """(low, high) of the mean by the percentile bootstrap.

    Args:
        values: one a question.
        groups: one a question; equal ones are drawn together. None: each question alone.
        level: coverage, between 0 and 1.
        seed: the same seed, the same interval.
        rounds: resamples.

    Raises:
        ValueError: there are no values, or not as many groups, or no rounds.
    """
    sums, counts = _draws([values], groups, seed, rounds)
    return _bounds(sums[0] / counts, level)


def ratio_interval(
    values: Sequence[float],
    reference: Sequence[float],
    groups: Sequence[object] | None = None,
    *,
    level: float = 0.95,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> tuple[float, float]:
    """(low, high) of mean(values) / mean(reference), both on the same questions, which are drawn as pairs.

    Resamples where the reference is 0 throughout are left out; (nan, nan) when all are.

    Args:
        values: one a question.
        reference: one a question, in the same order.
        groups: as for `mean_interval`.
        level: coverage.
        seed: the same seed, the same interval.
        rounds: resamples.
    """
    if len(values) != len(reference):
        raise ValueError(f"reference: got {len(reference)} values for {len(values)} questions; give one for each")
    sums, _ = _draws([values, reference], groups, seed, rounds)
    good = sums[1] > 0
    if not good.any():
        return float("nan"), float("nan")
    return _bounds(sums[0][good] / sums[1][good], level)


def average_interval(
    parts: Sequence[tuple[Sequence[float], Sequence[object] | None]],
    *,
    level: float = 0.95,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> tuple[float, float]:
    """(low, high) of the average of several means, each part (a task, say) being resampled by itself.

    Args:
        parts: (values, groups) of each, as for `mean_interval`.
        level: coverage.
        seed: the same seed, the same interval.
        rounds: resamples.

    Raises:
        ValueError: there are no parts, or one has no values.
    """
    if not parts:
        raise ValueError("parts: got none; there is no interval of nothing")
    means = []
    for number, (values, groups) in enumerate(parts):
        sums, counts = _draws([values], groups, seed + 7919 * number, rounds)
        means.append(sums[0] / counts)
    return _bounds(np.mean(means, axis=0), level)


def _draws(
    columns: Sequence[Sequence[float]], groups: Sequence[object] | None, seed: int, rounds: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums [columns, rounds] and counts [rounds] of resampled groups."""
    number = len(columns[0])
    if not number:
        raise ValueError("values: got none; there is no interval of nothing")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}, give at least 1")
    if groups is not None and len(groups) != number:
        raise ValueError(f"groups: got {len(groups)} for {number} values; give one for each")
    index: dict[object, int] = {}
    member = [index.setdefault(group, len(index)) for group in (groups if groups is not None else range(number))]
    totals = np.zeros((len(columns) + 1, len(index)))
    for row, column in enumerate([*columns, [1.0] * number]):
        np.add.at(totals[row], member, np.asarray(column, dtype=np.float64))
    drawn = np.random.default_rng(seed).integers(0, len(index), size=(rounds, len(index)))
    summed = totals[:, drawn].sum(axis=-1)
    return summed[:-1], summed[-1]


def _bounds(values: NDArray[np.float64], level: float) -> tuple[float, float]:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level: got {level}, give a share between 0 and 1")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
