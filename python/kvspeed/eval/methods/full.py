# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Full recompute: documents and question run through the model for every prompt; only the preamble's KV is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvspeed.eval.methods.base import Block, Context, Method, Prepared
from kvspeed.eval.methods.recompute import Recompute

__all__ = ["Full", "SharedFull"]


class Full(Recompute):
    """The whole prompt under full causal attention: the quality that the other methods are measured against."""

    name = "full"

    def __init__(self) -> None:
        super().__init__()

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        ids = tuple(context.document_ids(text) for text in documents)
        preamble = context.preamble
        blocks = [Block.of(preamble)] if preamble is not None else []
        return Prepared(context, ids, blocks, len(context.preamble_ids) + sum(map(len, ids)))

    def stored_bytes(self, prepared: Prepared) -> int:
        return 0

    def shared(self, context: Context) -> Method | None:
        return SharedFull()


class SharedFull(Full):
    """Full recompute with the documents' KV kept for further questions on the very same prompt.

    The answers are those of `Full` (to a rounding); its times and operations are not, so it serves only where nobody
    measures them.
    """

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        prepared = super().prepare(context, documents)
        ids = [token for document in prepared.documents for token in document]
        prepared.blocks.append(context.alone(ids, context.preamble_ids))
        return prepared

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, Any]:
        context = prepared.context
        slots = prepared.length + len(question) + context.max_new_tokens
        context.check_room(slots)
        cache = context.place(prepared.blocks, slots)
        return context.forward(question, cache), cache
