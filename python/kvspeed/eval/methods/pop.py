# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""POP (arXiv:2602.03295): deep layers are left out of the prefill and all run while decoding; nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.flops import prefill_flops
from kvspeed.eval.methods.base import Context
from kvspeed.eval.methods.prompt import PromptMethod
from kvspeed.eval.upper import UpperRows, own_kv
from kvspeed.install import patched

__all__ = ["Pop", "rows_flops"]


class Pop(PromptMethod):
    """Layers from k on are skipped for the prompt; each of them still projects its KV from the residual it is given.

    The last prompt token runs through all layers (the paper's boundary handling), so that the first token's logits and
    its KV are computed at full depth. The pruned layers are the last ones, as the paper finds; its gates only choose
    how many.

    Args:
        k: layers that the prompt runs through.
    """

    name = "pop"

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k: is {k}; at least one layer must see the prompt")
        self.k, self.name = k, f"{self.name}-{k}"
        self._rows = UpperRows(k, own_kv)

    @contextmanager
    def serving(self, context: Context) -> Iterator[None]:
        self.check(context)
        with patched(context.model, None, force=True), self._rows.installed(context.model):
            yield

    def check(self, context: Context) -> None:
        """Refuse a depth that the model does not have."""
        if self.k > context.shape.layers:
            raise ValueError(f"k: is {self.k} and the model has {context.shape.layers} layers")

    def empty_cache(self, context: Context, capacity: int) -> KVCache:
        return KVCache(context.base.config, capacity=capacity)

    def forward(self, context: Context, ids: Sequence[int], cache: KVCache, *, ends: bool = True) -> torch.Tensor:
        with self._rows.prompt(cache, ends=ends):
            return context.forward(ids, cache)

    def prefill_flops(self, context: Context, tokens: int) -> int:
        return rows_flops(context, self.k, tokens, range(self.k, context.shape.layers))

    def prompt_bytes(self, context: Context, tokens: int) -> int:
        return context.token_bytes * tokens


def rows_flops(context: Context, k: int, tokens: int, projecting: Sequence[int]) -> int:
    """Operations of a prompt that ends at depth k: k layers for all tokens; above, keys and values in the layers
    `projecting`, and the last token, which sees them all."""
    shape = context.shape
    above = shape.layers - k
    projected = 2 * shape.hidden * 2 * shape.kv_heads * shape.head_dim
    lower = prefill_flops(shape, tokens, k=k, anchor_tokens=0)  # its last token sees itself alone above k
    pairs = sum(min(tokens, window or tokens) - 1 for window in shape.windows[k:])
    less = (above - len(projecting)) * projected  # the last token projects nothing where layers share
    return lower + shape.pair * pairs + (tokens - 1) * len(projecting) * projected - less
