# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SPEED (arXiv:2605.06105) and its ablations; the full model is the same with all layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.flops import prefill_flops
from kvspeed.eval.methods.base import Context, Prepared
from kvspeed.eval.methods.packet import PacketMethod
from kvspeed.eval.methods.prompt import PromptMethod
from kvspeed.install import patched
from kvspeed.packet.assemble import lay_out
from kvspeed.rule import SpeedSpec
from kvspeed.tuned import remembered_spec

__all__ = ["FullModel", "PacketSpeed", "Speed", "spec_for"]


def spec_for(context: Context, k: int | None, **options: Any) -> SpeedSpec | None:
    """SPEED at depth `k` with the rule that the weights were tuned for, `options` in place of parts of it.

    Raises:
        ValueError: the model has fewer layers.
    """
    layers = context.shape.layers
    if k is None or k == layers:
        return None
    if k > layers:
        raise ValueError(f"k: is {k} and the model has {layers} layers; give 1 to {layers}")
    known = remembered_spec(context.model)
    kept = {} if known is None else {name: getattr(known, name) for name in ("anchor_tokens", "boundary", "turns")}
    return SpeedSpec(k, **{**kept, **options})


class Speed(PromptMethod):
    """Prompt tokens live in the first k layers; above, an answer sees the anchor and the answer so far.

    Args:
        k: the depth; None: all layers.
        anchor_tokens: None: as the weights were tuned, 1 where that is not known.
        upper_attention: "causal", or "self" for the paper's SelfOnly ablation.
        name: in tables.
    """

    name = "speed"

    def __init__(
        self,
        k: int | None,
        *,
        anchor_tokens: int | None = None,
        upper_attention: str | None = None,
        name: str | None = None,
    ) -> None:
        if k is not None and k < 1:
            raise ValueError(f"k: is {k}; at least one layer must see the prompt")
        self.k, self.name = k, name or (self.name if k is None else f"{self.name}-{k}")
        given = {"anchor_tokens": anchor_tokens, "upper_attention": upper_attention}
        self._options = {key: value for key, value in given.items() if value is not None}

    def spec(self, context: Context) -> SpeedSpec | None:
        """The rule; None where every layer takes every token."""
        return spec_for(context, self.k, **self._options)

    def serving(self, context: Context) -> AbstractContextManager[Any]:
        return patched(context.model, self.spec(context), force=True)

    def empty_cache(self, context: Context, capacity: int) -> KVCache:
        cache = KVCache(context.base.config, spec=self.spec(context))
        cache.reserve(capacity, context.max_new_tokens)
        return cache

    def forward(self, context: Context, ids: Sequence[int], cache: KVCache, *, ends: bool = True) -> torch.Tensor:
        return context.forward(ids, cache) if ends else context.forward_unread(ids, cache)

    def prefill_flops(self, context: Context, tokens: int) -> int:
        spec = self.spec(context)
        if spec is None:
            return prefill_flops(context.shape, tokens)
        return prefill_flops(context.shape, tokens, k=spec.k, anchor_tokens=spec.anchor_tokens)

    def prompt_bytes(self, context: Context, tokens: int) -> int:
        spec, layers = self.spec(context), context.shape.layers
        if spec is None:
            return context.token_bytes * tokens
        above = min(tokens, spec.anchor_tokens)  # the boundary token leaves nothing, or is the answer's first
        return context.token_bytes // layers * (spec.k * tokens + (layers - spec.k) * above)


class FullModel(Speed):
    """Every token in every layer: what the other methods are measured against."""

    name = "full"

    def __init__(self) -> None:
        super().__init__(None)


class PacketSpeed(PacketMethod):
    """Packets of depth k, used under SPEED: adapters and weights trained for each other.

    Args:
        k: the depth.
    """

    name = "packet+speed"

    def __init__(self, k: int) -> None:
        super().__init__(adapter=True, name=f"{self.name}-{k}")
        self.k = k

    def spec(self, context: Context) -> SpeedSpec | None:
        """The rule; None where every layer takes every token."""
        return spec_for(context, self.k)

    def serving(self, context: Context) -> AbstractContextManager[Any]:
        return patched(context.model, self.spec(context), force=True)

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        context = prepared.context
        slots = prepared.length + len(question) + context.max_new_tokens
        context.check_room(slots)
        cache = lay_out(prepared.extra["packets"], context.model, context.mode, slots)
        cache.begin_turn(prepared.length + len(question))
        return context.forward(question, cache), cache

    def kv_bytes(self, prepared: Prepared) -> int:
        """Every packet brings its first token's KV above k; that of the first one is used."""
        context, spec = prepared.context, self.spec(prepared.context)
        if spec is None:
            return super().kv_bytes(prepared)
        per_layer, above = context.token_bytes // context.shape.layers, context.shape.layers - spec.k
        return per_layer * (spec.k * prepared.length + above * min(spec.anchor_tokens, prepared.length))

    def flops(self, prepared: Prepared, question_tokens: int) -> int:
        shape, spec = prepared.context.shape, self.spec(prepared.context)
        if spec is None:
            return super().flops(prepared, question_tokens)
        return prefill_flops(shape, question_tokens, past=prepared.length, k=spec.k, anchor_tokens=spec.anchor_tokens)
