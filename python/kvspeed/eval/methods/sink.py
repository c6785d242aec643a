# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Shared sink: each document is computed behind the preamble, whose KV is dropped; nothing is trained or recomputed.

The document's first tokens then need not serve as attention sinks of their own, since the preamble did, and the prompt
has that preamble once. It is done offline, so it costs nothing at the time of the question: the cheapest rival there is
(APE, arXiv:2502.05431, and CacheClip, arXiv:2510.10129, share prefixes in this way).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.methods.base import Block, Context, Method, Prepared

__all__ = ["Sink"]


class Sink(Method):
    """Documents that have each seen the preamble, put side by side."""

    name = "sink"

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        ids = tuple(context.document_ids(text) for text in documents)
        blocks = [context.alone(document, context.preamble_ids) for document in ids]
        preamble = context.preamble
        if preamble is not None:
            blocks.insert(0, Block.of(preamble))
        length = len(context.preamble_ids) + sum(map(len, ids))
        context.check_room(length + context.max_new_tokens)
        return Prepared(context, ids, blocks, length)

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        context = prepared.context
        slots = prepared.length + len(question) + context.max_new_tokens
        context.check_room(slots)
        cache = context.place(prepared.blocks, slots)
        return context.forward(question, cache), cache
