# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""No documents at all: the preamble and the question, which shows what the model knows by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.methods.base import Block, Context, Method, Prepared

__all__ = ["NoCache"]


class NoCache(Method):
    """The question alone, behind the preamble."""

    name = "nocache"

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        preamble = context.preamble
        blocks = [Block.of(preamble)] if preamble is not None else []
        return Prepared(context, (), blocks, len(context.preamble_ids))

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        context = prepared.context
        slots = prepared.length + len(question) + context.max_new_tokens
        context.check_room(slots)
        cache = context.place(prepared.blocks, slots)
        return context.forward(question, cache), cache
