# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A3 (arXiv:2511.17560): recompute the document tokens that the question attends to most in layer 0.

A token's score is the attention it gets in layer 0 from all tokens of the question and all heads, softmax over the
documents' tokens; where that layer has a window, over those that a token of the question sees through it. Keys and
values of layer 0 do not depend on what comes before a token, so those of the cache are exact there, and only the chosen
tokens and the question need to run in any layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvspeed.eval.methods.base import Prepared
from kvspeed.eval.methods.choose import best_rows, check_percent, chosen_count, spread_rows
from kvspeed.eval.methods.recompute import Recompute
from kvspeed.eval.methods.rows import Before, Choice, Pass, Probe
from kvspeed.eval.methods.rowset import RowSet
from kvspeed.eval.methods.work import Work

__all__ = ["A3"]


class A3(Recompute):
    """The share of document tokens with the most attention from the question.

    Args:
        percent: of the documents' tokens that are recomputed.
        before: see `Recompute`.
    """

    name = "a3"

    def __init__(self, percent: int | float, *, before: str = "nothing") -> None:
        super().__init__(before=before)
        self.share = check_percent(percent)
        self.name = f"a3-{percent:g}"

    def choices(self, prepared: Prepared, question: int) -> Mapping[int, Choice]:
        tokens = prepared.length - prepared.preamble
        count = chosen_count(self.share, tokens)

        def choose(run: Pass, before: Before) -> torch.Tensor | None:
            if count == tokens:
                return None
            asked = torch.arange(tokens, tokens + question, device=before.hidden.device)
            if count == 0:
                return asked
            asking = before.probe(last=question)
            keys = run.stored(before.index)[0][0, :, prepared.preamble : prepared.length]
            run.extra += self._scoring(prepared, question)
            scores = _attention_received(asking, keys)
            return torch.cat([best_rows(scores, count), asked])

        return {0: choose}

    def _scoring(self, prepared: Prepared, question: int) -> int:
        shape = prepared.context.shape
        return 2 * shape.heads * shape.head_dim * question * (prepared.length - prepared.preamble)

    def expected_work(self, prepared: Prepared, question_tokens: int) -> Work:
        shape = prepared.context.shape
        tokens = prepared.length - prepared.preamble
        count = chosen_count(self.share, tokens)
        asked = range(prepared.length, prepared.length + question_tokens)
        rows = RowSet([*spread_rows(prepared, count), *asked], torch.device("cpu"))
        probe = 2 * question_tokens * shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
        extra = probe + self._scoring(prepared, question_tokens) if 0 < count < tokens else 0
        pairs = tuple(rows.pairs(window) for window in shape.windows)
        return Work(question_tokens, (len(rows),) * shape.layers, pairs, extra)


def _attention_received(asking: Probe, key: torch.Tensor) -> torch.Tensor:
    """Float32 `[n]`: softmax of the question's queries over `key` `[H_kv, n, D]`, the n tokens before it, summed."""
    query = asking.query[0]
    grouped = query.reshape(key.shape[0], -1, query.shape[2])  # a group of query heads shares its key head
    scores = (grouped @ key.transpose(1, 2)).float() * asking.scale
    if asking.softcap:
        scores = asking.softcap * torch.tanh(scores / asking.softcap)
    if asking.window is None:
        return torch.softmax(scores, -1).sum((0, 1))
    tokens, asked = key.shape[1], query.shape[1]
    places = torch.arange(tokens, tokens + asked, device=key.device).repeat(grouped.shape[1] // asked)
    hidden = torch.arange(tokens, device=key.device) <= places[:, None] - asking.window
    received = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return received.nan_to_num(0.0).sum((0, 1))  # a token that sees none of them gives nothing
