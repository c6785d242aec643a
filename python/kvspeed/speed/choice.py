# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The depth that was chosen for a model, what it was chosen by, and where it is kept: in the model's config.

`config.kvspeed_auto` holds it, with the fingerprint of the weights, so that a choice is never used for other weights;
transformers saves and loads it with the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from torch import nn

from kvspeed.models import causal_lm
from kvspeed.request import ANY_TASK
from kvspeed.rule import SpeedSpec
from kvspeed.tuned import read_object

__all__ = [
    "DepthChoice",
    "TaskDepth",
    "least_samples",
    "loss_bound",
    "remember_choice",
    "remembered_choice",
    "take_choice",
]

_FIELD = "kvspeed_auto"


@dataclass(frozen=True)
class TaskDepth:
    """One task measured at one depth.

    Attributes:
        task: its name.
        k: the depth.
        samples: how many there were.
        full: mean score at full depth, 0 .. 1.
        score: mean score at depth k.
        bound: what the loss `full - score` is at most, with the choice's confidence.
        kept: whether that is within the budget.
    """

    task: str
    k: int
    samples: int
    full: float
    score: float
    bound: float
    kept: bool


@dataclass(frozen=True)
class DepthChoice:
    """A depth for a model, and for each task.

    Attributes:
        k: the depth at which every task keeps the budget.
        by_task: the smallest depth found at which a task does.
        layers: L.
        budget: how much of the score a task may lose, 0 .. 1.
        confidence: with which the loss is within the budget; None: its mean is.
        rule: the rest of SPEED's rule, by name.
        fingerprint: of the weights.
        calibration: of the samples and how they were scored.
        measured: every task and depth that was tried.
        reason: why, in words.
    """

    k: int
    by_task: dict[str, int]
    layers: int
    budget: float
    confidence: float | None
    rule: dict[str, Any]
    fingerprint: str
    calibration: str
    measured: tuple[TaskDepth, ...]
    reason: str

    def k_by_task(self) -> dict[str, int]:
        """For `patch_model`: the depths by task, and `k` for tasks that were not measured."""
        return {**self.by_task, ANY_TASK: self.k}

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "measured": [asdict(one) for one in self.measured]}

    @classmethod
    def from_dict(cls, fields: Any) -> DepthChoice:
        """The choice that `as_dict` made a dictionary of.

        Raises:
            ValueError: it is none.
        """
        try:
            found = cls(**{**fields, "measured": tuple(TaskDepth(**one) for one in fields["measured"])})
            depths = [found.k, found.layers, *found.by_task.values()]
            if not all(type(k) is int and 1 <= k <= found.layers for k in depths):
                raise ValueError(f"depths {depths} of {found.layers} layers")
            if not all(isinstance(text, str) for text in (found.fingerprint, found.calibration, found.reason)):
                raise TypeError("fingerprint, calibration or reason is no string")
            SpeedSpec(**{**found.rule, "k": found.k})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"no chosen depth, or a damaged one ({type(error).__name__}: {error})") from None
        return found


def remember_choice(model: nn.Module, choice: DepthChoice | None) -> None:
    """Write `choice` into `model`'s config, where `patch_model(model, "auto")` finds it; None takes it out."""
    config: Any = causal_lm(model).config
    if choice is not None:
        setattr(config, _FIELD, choice.as_dict())
    elif hasattr(config, _FIELD):
        delattr(config, _FIELD)


def take_choice(model: nn.Module, folder: Path) -> None:
    """Put the choice of `folder`'s config.json, as `kvspeed choose-depth --save` wrote it, into `model`'s config.

    Where the file holds none, `model` keeps none: what its config says was chosen for the weights it had before.

    Raises:
        ValueError: the file is no JSON.
    """
    config: Any = causal_lm(model).config
    path = folder / "config.json"
    try:
        fields = read_object(path).get(_FIELD)
    except FileNotFoundError:
        fields = None
    if fields is not None:
        setattr(config, _FIELD, fields)
    elif hasattr(config, _FIELD):
        delattr(config, _FIELD)


def remembered_choice(model: nn.Module) -> DepthChoice | None:
    """What `remember_choice` wrote, None where nothing is there. Look at its fingerprint before you use it.

    Raises:
        ValueError: the config's entry is damaged.
    """
    fields = getattr(causal_lm(model).config, _FIELD, None)
    if fields is None:
        return None
    try:
        return DepthChoice.from_dict(fields)
    except ValueError as error:
        raise ValueError(f"config.{_FIELD} holds {error}; give a calibration set to choose again") from None


def loss_bound(lost: Sequence[float], confidence: float | None) -> float:
    """What the mean loss of a task is at most, from the losses of some samples, each -1 .. 1.

    The normal bound, but to the variance one sample that loses all and one that gains all are added: losses that
    happen to be all alike have a variance of zero, which would say that a few samples prove everything.

    Args:
        lost: at least one.
        confidence: of the bound, one-sided, 0 .. 1; None: the mean itself.
    """
    mean = sum(lost) / len(lost)
    if confidence is None:
        return mean
    variance = (sum(one * one for one in lost) + 2) / (len(lost) + 2) - mean * mean
    return mean + NormalDist().inv_cdf(confidence) * math.sqrt(max(variance, 0.0) / len(lost))


def least_samples(budget: float, confidence: float | None) -> int:
    """With how many samples a task that loses nothing is seen to keep the budget."""
    if confidence is None or confidence <= 0.5:
        return 1
    if budget <= 0:
        raise ValueError(
            "a budget of 0 cannot be shown to be kept with a confidence; give confidence=None, or a budget"
        )
    return max(1, math.ceil(math.sqrt(1 + 2 * (NormalDist().inv_cdf(confidence) / budget) ** 2) - 1))
