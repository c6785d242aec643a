# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SwiftKV (arXiv:2410.03960): prompts end at layer k, upper layers project their KV from its output by new weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.methods.base import Context
from kvspeed.eval.methods.pop import rows_flops
from kvspeed.eval.methods.prompt import PromptMethod
from kvspeed.eval.swiftkv.weights import SwiftKV
from kvspeed.install import patched

__all__ = ["SwiftKVMethod"]


class SwiftKVMethod(PromptMethod):
    """Its weights are the context's; without any, those before training, which show what it costs and no more.

    Args:
        k: layers that the prompt runs through.
        share: upper layers that use one layer's keys and values (AcrossKV).
    """

    name = "swiftkv"

    def __init__(self, k: int, share: int = 1) -> None:
        for what, value in (("k", k), ("share", share)):
            if value < 1:
                raise ValueError(f"{what}: is {value}; give at least 1")
        self.k, self.share = k, share
        self.name = f"{self.name}-{k}" + (f"-share{share}" if share > 1 else "")

    def weights(self, context: Context) -> SwiftKV:
        """The weights that serve here.

        Raises:
            ValueError: the context's are for another depth or group.
        """
        given: SwiftKV | None = context.swiftkv
        if given is None:
            return context.keep(
                ("swiftkv", self.k, self.share),
                lambda: SwiftKV.for_model(context.model, self.k, self.share).requires_grad_(False),
            )
        if (given.k, given.share) != (self.k, self.share):
            raise ValueError(
                f"{self.name}: the weights given are for k = {given.k} and share = {given.share}; name the method so"
            )
        return given

    @contextmanager
    def serving(self, context: Context) -> Iterator[None]:
        weights = self.weights(context)
        with patched(context.model, None, force=True), weights.attached(context.model):
            yield

    def empty_cache(self, context: Context, capacity: int) -> KVCache:
        return self.weights(context).cache(context.base.config, capacity)

    def forward(self, context: Context, ids: Sequence[int], cache: KVCache, *, ends: bool = True) -> torch.Tensor:
        with self.weights(context).rows.prompt(cache, ends=ends):
            return context.forward(ids, cache)

    def prefill_flops(self, context: Context, tokens: int) -> int:
        return rows_flops(context, self.k, tokens, range(self.k, context.shape.layers, self.share))

    def prompt_bytes(self, context: Context, tokens: int) -> int:
        held = self.k + len(range(self.k, context.shape.layers, self.share))
        return context.token_bytes // context.shape.layers * held * tokens
