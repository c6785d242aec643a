# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the online part of a method computes, and the operations that follow from it.

Counted as `kvspeed.eval.flops` does: matrix products only, two operations a multiply-add, attention by the pairs that
see each other. Re-rotation of keys, norms, softmax and sorting are left out (below 1 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvspeed.eval.flops import ModelShape

__all__ = ["Work", "question_work", "visible_pairs"]


@dataclass(frozen=True)
class Work:
    """Tokens and pairs that were computed.

    Attributes:
        question: tokens of the question.
        rows: tokens that ran through each layer.
        pairs: (query, key) pairs that see each other, of each layer.
        extra: operations besides: probing queries, scores for a choice of tokens, second passes.
    """

    question: int
    rows: tuple[int, ...]
    pairs: tuple[int, ...]
    extra: int = 0

    def flops(self, shape: ModelShape) -> int:
        """Operations up to the logits of one token."""
        return sum(self.rows) * shape.token_layer + sum(self.pairs) * shape.pair + shape.logits + self.extra


def question_work(shape: ModelShape, past: int, question: int) -> Work:
    """`question` tokens after `past` tokens whose KV is there, in every layer."""
    rows = range(past, past + question)
    pairs = tuple(visible_pairs(rows, window) for window in shape.windows)
    return Work(question, (question,) * shape.layers, pairs)


def visible_pairs(rows: Sequence[int], window: int | None) -> int:
    """Pairs of causal attention for queries at the positions `rows` when every position before holds a key."""
    if isinstance(rows, range) and rows.step == 1 and window is None:
        return len(rows) * (rows.start + rows.stop + 1) // 2 if len(rows) else 0
    return sum(row + 1 if window is None else min(row + 1, window) for row in rows)
