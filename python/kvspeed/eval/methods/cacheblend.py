# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""CacheBlend (arXiv:2405.16444): recompute the tokens whose KV differs most from what it would be in the whole prompt.

Layer 0 runs for all tokens. That gives fresh keys and values of layer 1 for all of them; those document tokens whose
fresh KV is farthest from the cached one go on, with the whole question, through layer 1 and all above, and overwrite
their KV there. Public implementations make this one choice too (the paper describes a gradual one), with the faults
that are avoided here: a causal mask aligned at the bottom right (see `RowSet`), and a question of which one token only
is sure to be computed. The fresh KV of layer 1 is kept for all tokens: it is there, and it is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvspeed.eval.methods.base import Prepared
from kvspeed.eval.methods.choose import best_rows, check_percent, chosen_count, spread_rows
from kvspeed.eval.methods.recompute import Recompute
from kvspeed.eval.methods.rows import Before, Choice, Pass
from kvspeed.eval.methods.rowset import RowSet
from kvspeed.eval.methods.work import Work, visible_pairs

__all__ = ["CacheBlend"]

CHECK_LAYER = 1


class CacheBlend(Recompute):
    """The share of document tokens with the largest deviation.

    Args:
        percent: of the documents' tokens that are recomputed in all layers.
        deviation: squared distance of "kv" (keys plus values), "v" (the paper's program) or "k" (LMCache).
        before: see `Recompute`; the paper's program computes each chunk behind a BoS.
    """

    name = "cacheblend"

    def __init__(self, percent: int | float, *, deviation: str = "kv", before: str = "bos") -> None:
        super().__init__(before=before)
        if deviation not in ("k", "v", "kv"):
            raise ValueError(f'deviation: expected "kv", "k" or "v", got {deviation!r}')
        self.share, self.deviation = check_percent(percent), deviation
        self.name = f"cacheblend-{percent:g}"

    def choices(self, prepared: Prepared, question: int) -> Mapping[int, Choice]:
        tokens = prepared.length - prepared.preamble
        count = chosen_count(self.share, tokens)

        def choose(run: Pass, before: Before) -> torch.Tensor | None:
            if count == tokens:
                return None
            fresh = before.probe()
            scores = torch.zeros(tokens, device=fresh.key.device)
            for old, new, name in zip(run.stored(before.index), (fresh.key, fresh.value), "kv", strict=True):
                if name in self.deviation:
                    distance = new[0, :, :tokens].float() - old[0, :, prepared.preamble : prepared.length].float()
                    scores += distance.square_().sum((0, 2))
                run.rows.write(old, new)
            asked = torch.arange(tokens, tokens + question, device=scores.device)
            return torch.cat([best_rows(scores, count), asked])

        return {CHECK_LAYER: choose}

    def expected_work(self, prepared: Prepared, question_tokens: int) -> Work:
        shape = prepared.context.shape
        tokens = prepared.length - prepared.preamble
        count = chosen_count(self.share, tokens)
        everything = self.rows(prepared, question_tokens)
        asked = range(prepared.length, prepared.length + question_tokens)
        fewer = RowSet([*spread_rows(prepared, count), *asked], torch.device("cpu"))
        rows = [len(everything) if layer < CHECK_LAYER else len(fewer) for layer in range(shape.layers)]
        pairs = [
            visible_pairs(everything, window) if layer < CHECK_LAYER else fewer.pairs(window)
            for layer, window in enumerate(shape.windows)
        ]
        probe = 2 * len(everything) * shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
        extra = probe if shape.layers > CHECK_LAYER and count < tokens else 0
        return Work(question_tokens, tuple(rows), tuple(pairs), extra)
