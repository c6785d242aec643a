# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Full recompute: documents and question run through the model for every prompt; only the preamble's KV is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.methods.base import Block, Context, Method, Prepared
from kvspeed.eval.methods.work import Work, question_work

__all__ = ["Full"]


class Full(Method):
    """The whole prompt under full causal attention: the quality that the other methods are measured against."""

    name = "full"

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        ids = tuple(context.document_ids(text) for text in documents)
        preamble = context.preamble
        blocks = [Block.of(preamble)] if preamble is not None else []
        return Prepared(context, ids, blocks, len(context.preamble_ids) + sum(map(len, ids)))

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        context = prepared.context
        slots = prepared.length + len(question) + context.max_new_tokens
        context.check_room(slots)
        cache = context.place(prepared.blocks, slots, "copy")
        ids = [token for document in prepared.documents for token in document]
        return context.forward([*ids, *question], cache), cache

    def expected_work(self, prepared: Prepared, question_tokens: int) -> Work:
        new = prepared.length - prepared.preamble + question_tokens
        work = question_work(prepared.context.shape, prepared.preamble, new)
        return Work(question_tokens, work.rows, work.pairs)

    def stored_bytes(self, prepared: Prepared) -> int:
        return 0
