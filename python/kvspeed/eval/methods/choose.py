# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What methods share that choose a percentage of the documents' tokens."""

from __future__ import annotations

import torch

from kvspeed.eval.methods.base import Prepared

__all__ = ["best_rows", "check_percent", "chosen_count", "spread_rows"]


def check_percent(percent: int | float) -> float:
    """`percent` as a share from 0 to 1."""
    if isinstance(percent, bool) or not isinstance(percent, (int, float)) or not 0 <= percent <= 100:
        raise ValueError(f"percent: of the documents' tokens to recompute, expected 0 to 100, got {percent!r}")
    return percent / 100


def chosen_count(share: float, tokens: int) -> int:
    """How many of `tokens` document tokens are recomputed."""
    return min(int(share * tokens + 0.5), tokens)


def best_rows(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest of `scores` `[n]`, as rising int64 indices."""
    return scores.topk(count).indices.sort().values


def spread_rows(prepared: Prepared, count: int) -> list[int]:
    """`count` document tokens at even distances: what a choice costs before it was made."""
    tokens = prepared.length - prepared.preamble
    return [prepared.preamble + index * tokens // count for index in range(count)] if count else []
