# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Answer-first layers: prompts pass by some layers in the middle, instead of all layers from a depth on."""

from __future__ import annotations

from dataclasses import replace

from kvspeed.eval.flops import prefill_flops
from kvspeed.eval.methods.base import Context
from kvspeed.eval.methods.speed import Speed
from kvspeed.rule import SpeedSpec
from kvspeed.tuned import remembered_spec

__all__ = ["AnswerFirst"]


class AnswerFirst(Speed):
    """Layers `first` .. `last` are run by anchors, answers and what predicts them only; prompts take all the others.

    Anchors and boundary are those the weights were tuned for. Layers up to the last one are SPEED at k = `first`.

    Args:
        first: the first such layer, from 1.
        last: the last one.
    """

    def __init__(self, first: int, last: int) -> None:
        if not 1 <= first <= last:
            raise ValueError(f"layers: are {first} to {last}; give the first, from 1, and then the last")
        super().__init__(None, name=f"answerfirst{first}to{last}")
        self.first, self.last = first, last

    def spec(self, context: Context) -> SpeedSpec:
        """The rule.

        Raises:
            ValueError: the model has fewer layers.
        """
        layers = context.shape.layers
        if self.last >= layers:
            raise ValueError(f"layers: go to {self.last}, and the model's are 0 to {layers - 1}")
        known = remembered_spec(context.model)
        kept = {} if known is None else {name: getattr(known, name) for name in ("anchor_tokens", "boundary")}
        if self.last == layers - 1:
            return SpeedSpec(self.first, **kept)
        return SpeedSpec(layers, gaps=tuple(range(self.first, self.last + 1)), **kept)

    def prefill_flops(self, context: Context, tokens: int) -> int:
        spec, shape = self.spec(context), context.shape
        deep = spec.deep_layers(shape.layers)
        order = [*(layer for layer in range(shape.layers) if layer not in deep), *deep]
        ordered = replace(shape, windows=tuple(shape.windows[layer] for layer in order))
        return prefill_flops(ordered, tokens, k=shape.layers - len(deep), anchor_tokens=spec.anchor_tokens)

    def prompt_bytes(self, context: Context, tokens: int) -> int:
        spec, layers = self.spec(context), context.shape.layers
        deep = len(spec.deep_layers(layers))
        return context.token_bytes // layers * ((layers - deep) * tokens + deep * min(tokens, spec.anchor_tokens))
