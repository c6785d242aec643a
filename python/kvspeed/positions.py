# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Masks by position, for the model's own attention in layers with a sliding window.

transformers makes its masks by slot. That is right as long as a row's padding comes before everything else; behind
packets it lies between them and the row's first token, so that distances to the packets differ by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MASKS", "as_taken", "visible_by_position"]

MASKS = ("sdpa", "eager")  # implementations of attention that take a mask of any form


def visible_by_position(
    padding: Tensor | None, prefix: int, start: int, queries: int, tail: int, window: int | None, begin: int = 0
) -> Tensor:
    """bool `[B or 1, 1, Q, N]` on the CPU: causal, windowed and without padding, by position.

    Args:
        padding: int64 `[B]`, between the prefix and each row's first token; None: none.
        prefix: positions of packets, which every row has.
        start: tail tokens that were forgotten.
        queries: the last tokens of the tail.
        tail: tokens after the prefix.
        window: of the layer, or None.
        begin: the prefix's keys before it are left out.
    """
    rows = padding if padding is not None else torch.zeros(1, dtype=torch.long)
    slots = prefix + start + torch.arange(tail)
    shifted = slots[None] - rows[:, None]
    before = torch.arange(begin, prefix).expand(rows.shape[0], -1)
    key = torch.cat([before, shifted], 1)
    real = torch.cat([torch.ones_like(before, dtype=torch.bool), shifted >= prefix], 1)
    query = shifted[:, tail - queries :, None]
    seen = (key[:, None] <= query) & real[:, None]
    if window is not None:
        seen &= key[:, None] > query - window
    alone = ~seen.any(-1, keepdim=True)  # padding: softmax needs one key
    own = torch.arange(key.shape[1])[None] == torch.arange(key.shape[1] - queries, key.shape[1])[:, None]
    return (seen | (alone & own[None]))[:, None]


def as_taken(mask: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """A bool `mask` as `implementation` takes it: "eager" adds numbers."""
    if implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
