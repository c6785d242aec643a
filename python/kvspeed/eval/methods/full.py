# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Full recompute: documents and question run through the model for every prompt; only the preamble's KV is there."""

from __future__ import annotations

from collections.abc import Sequence

from kvspeed.eval.methods.base import Block, Context, Prepared
from kvspeed.eval.methods.recompute import Recompute

__all__ = ["Full"]


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
