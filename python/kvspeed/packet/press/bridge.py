# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Presses of kvpress (https://github.com/NVIDIA/kvpress), where it is installed: any that gives scores.

kvpress 0.5.5 needs a transformers below 5.3, and importing it patches transformers' attention functions; so it is not
imported here. Whoever passes one of its presses has done that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvspeed.models import attention_modules, base_model, causal_lm
from kvspeed.packet.press.base import LayerKV, Press, check_ratio

__all__ = ["KvpressPress", "as_press"]


def as_press(press: Any, *, protect_soft: bool = True) -> Press:
    """`press` itself, or a press of kvpress made into one.

    Args:
        press: of `kvspeed.packet.press`, or a `kvpress.ScorerPress`.
        protect_soft: of a press of kvpress, whether an adapter's soft tokens stay; the others know it themselves.

    Raises:
        TypeError: it is neither.
        ValueError: it is a press of kvpress that does more than give scores (it changes keys, keeps other numbers of
            tokens in other layers, or only masks).
    """
    if isinstance(press, Press):
        return press
    if not any(kind.__module__.partition(".")[0] == "kvpress" for kind in type(press).__mro__):
        raise TypeError(
            f"press: expected a press of kvspeed.packet.press, or one of kvpress, got {type(press).__name__}; for "
            'names such as "cur-30" there is press_from_name'
        )
    scorers = [kind for kind in type(press).__mro__ if kind.__name__ == "ScorerPress"]
    if not scorers or type(press).compress is not scorers[0].compress:  # type: ignore[attr-defined]
        raise ValueError(
            f"press: {type(press).__name__} does more than give scores, and a packet keeps equally many tokens in "
            "every layer and head, unchanged: use a kvpress.ScorerPress that has no compress of its own"
        )
    return KvpressPress(press.compression_ratio, protect_soft, inner=press)


@dataclass(frozen=True)
class KvpressPress(Press):
    """A `kvpress.ScorerPress`, by whose scores the tokens of a packet are chosen.

    Attributes:
        inner: the press of kvpress.
    """

    inner: Any = None

    name: ClassVar[str] = "kvpress"
    needs_hidden: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.inner.compression_ratio)
        if self.ratio != self.inner.compression_ratio:
            raise ValueError(
                f"ratio: is {self.ratio}, and the press of kvpress has compression_ratio "
                f"{self.inner.compression_ratio}: use as_press, which takes it from there"
            )

    def describe(self) -> dict[str, Any]:
        from importlib.metadata import PackageNotFoundError, version

        try:
            release = version("kvpress")
        except PackageNotFoundError:
            release = "unknown"
        name = f"kvpress.{type(self.inner).__name__}"
        options = {"ratio": self.ratio, "protect_soft": self.protect_soft, "kvpress": release}
        return {"name": name, **options, **_options(self.inner)}

    def begin(self, model: nn.Module) -> None:
        inner: Any = causal_lm(model)
        self.inner.post_init_from_model(inner)
        rotary = getattr(base_model(model), "rotary_emb", None)
        for module in attention_modules(model):
            # As kvpress does; past nn.Module's own bookkeeping, so that it is no submodule and no part of the weights.
            module.__dict__.setdefault("rotary_emb", rotary)

    def scores(self, layer: LayerKV) -> Tensor:
        assert layer.hidden is not None and layer.arguments is not None
        given = dict(layer.arguments)
        given.setdefault("cache_position", torch.arange(layer.tokens, device=layer.keys.device))
        scores = self.inner.score(layer.module, layer.hidden, layer.keys[None], layer.values[None], None, given)
        expected = (1, *layer.keys.shape[:2])
        if not isinstance(scores, Tensor) or tuple(scores.shape) != expected:
            found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"press: {type(self.inner).__name__} gave scores {found} instead of {list(expected)}")
        return scores[0].float()


def _options(press: Any) -> dict[str, Any]:
    """Its fields, as far as they are JSON."""
    options: dict[str, Any] = {}
    for field in fields(press) if is_dataclass(press) else ():
        value = getattr(press, field.name, None)
        if field.name == "compression_ratio":
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            value = type(value).__name__
        options[f"option {field.name}"] = value
    return options
