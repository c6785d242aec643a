# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets with removed tokens where the kernels cannot serve: a sliding window, weights, or a mask of any form.

The kernels never need to know which tokens were removed: keys are rotated for their own positions, and what is not
stored is not seen. A window does need it, since it asks for the position of every token, and in a packet with removed
tokens every head has tokens of its own. Here the survivors of a layer are put at their places among zeros, and a mask
for each head hides the zeros; the model's own attention does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvspeed import ops
from kvspeed.positions import MASKS, as_taken, visible_by_position
from kvspeed.rope import RopeSpec

if TYPE_CHECKING:
    from kvspeed.plan import Plan
    from kvspeed.segment_layer import SegmentLayer

__all__ = ["laid_out"]


def laid_out(
    plan: Plan,
    rope: RopeSpec,
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    window: int | None,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and mask of layer `index` for the model's own attention: segments first, then the tail.

    Args:
        plan: of the forward; its layer's segments have removed tokens.
        rope: the model's.
        index: the layer.
        query: `[B, H_q, Q, D]`.
        key: `[B, H_kv, T, D]`, the tail.
        value: the same.
        attention_mask: what transformers made for the layer, read where the rows hide more than left padding.
        window: the layer's sliding window, or None.
        implementation: the model's attention implementation.

    Returns:
        Keys and values `[B, H_kv, N, D]`, and a mask `[B or 1, H_q, Q, N]` that hides what was removed: bool, or for
        "eager" numbers to add.

    Raises:
        ValueError: the implementation does not take such a mask.
    """
    assert plan.cache is not None
    if implementation not in MASKS:
        raise ValueError(
            f"packets with removed tokens in a sliding-window layer, or beside a mask that is more than left padding, "
            f"need attn_implementation 'sdpa' or 'eager', and this model has {implementation!r}: load it with one of "
            "them, or use packets with all their tokens"
        )
    layer = plan.cache.layer(index)
    begin = 0
    if plan.plain_mask and window is not None:
        begin = max(0, layer.prefix - window + 1)  # no token after the packets sees what lies before
    keys, values, there = _dense(layer, rope, index, begin)
    rows, tail = key.shape[0], key.shape[2]
    if plan.plain_mask:
        seen = visible_by_position(plan.padding, layer.prefix, layer.start, query.shape[2], tail, window, begin).to(
            query.device
        )
    elif attention_mask is None:
        raise ValueError("attention_mask: hides more than left padding, and transformers made no mask of it")
    else:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    there = torch.cat([there, there.new_ones(there.shape[0], tail)], 1)
    heads = there.repeat_interleave(query.shape[1] // there.shape[0], 0)
    mask = as_taken(seen & heads[None, :, None], implementation, query.dtype)
    return (
        torch.cat([keys.expand(rows, -1, -1, -1), key], 2),
        torch.cat([values.expand(rows, -1, -1, -1), value], 2),
        mask,
    )


def _dense(layer: SegmentLayer, rope: RopeSpec, index: int, begin: int) -> tuple[Tensor, Tensor, Tensor]:
    """The segments of a layer at their positions from `begin` on, `[1, H_kv, prefix - begin, D]` twice, zeros where
    there is no token, and bool `[H_kv, prefix - begin]`: where there is one. Kept: segments do not change."""
    if layer.dense is not None and layer.dense[0] == begin:
        return layer.dense[1]
    first = layer.segments[0].key
    heads, length = first.shape[0], layer.prefix - begin
    shape = (1, heads, length + 1, first.shape[2])  # one more place, for all that lies before `begin`
    keys, values = first.new_zeros(shape), first.new_zeros(shape)
    there = torch.zeros(heads, length + 1, dtype=torch.bool, device=first.device)
    for segment, positions in zip(layer.segments, layer.survivors, strict=True):
        key, value = segment.key[None], segment.value[None]
        moved_key, moved_value = torch.empty_like(key), torch.empty_like(value)
        ops.rope_concat(
            [key],
            [value],
            [segment.offset],
            rope.layer(index),
            moved_key,
            moved_value,
            interleaved=rope.interleaved,
        )
        kept = torch.arange(key.shape[2]).expand(heads, -1) if positions is None else positions[index]
        place = kept.to(key.device, torch.long) + (segment.offset - begin)
        place = torch.where(place < 0, length, place)
        there.scatter_(1, place, True)
        rows = place[None, :, :, None].expand_as(key)
        keys.scatter_(2, rows, moved_key)
        values.scatter_(2, rows, moved_value)
    result = (keys[:, :, :length], values[:, :, :length], there[:, :length])
    layer.dense = (begin, result)
    return result
