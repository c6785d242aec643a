# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The attention function that patched models call, registered with transformers under the name "kvspeed".

It chooses, layer by layer, between three ways: `ops.segment_attention` where tokens are few or lie in segments, the
model's own attention (SDPA, eager, ...) for prefill and whatever the kernels do not cover, and a short masked attention
for the deep layers of SPEED whenever several columns run there at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvspeed import ops
from kvspeed.ops.attention import covers
from kvspeed.plan import DeepPlan, Plan
from kvspeed.positions import MASKS, as_taken, visible_by_position
from kvspeed.removed import laid_out
from kvspeed.rope import RopeSpec
from kvspeed.segment import Segment

__all__ = ["NAME", "register"]

NAME = "kvspeed"

# Up to this many query tokens the CPU kernel beats SDPA with an explicit mask over a long past; measured in bench/. On
# CUDA the kernel takes them all: with an explicit mask SDPA has no flash kernel, and the mask is B * S * T bytes.
# A prompt with nothing before it needs no mask and goes to SDPA on both.
_MAX_KERNEL_QUERIES = 64


def register() -> None:
    """Make `NAME` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer: query `[B, H_q, S, D]`, key and value `[B, H_kv, T, D]` -> `[B, S, H_q, D]`.

    `key` and `value` are what the cache's `update` returned: the tail, or the deep layers' keys of this forward.
    """
    plan: Plan | None = kwargs.pop("kvspeed_plan", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap") or 0.0
    if plan is not None:
        index: int = module.layer_idx  # type: ignore[assignment]
        if plan.deep is not None and plan.deep.spec.is_deep(index):
            out = _deep(plan, plan.deep, index, query, key, value, scale, softcap, window, dropout)
            return out.transpose(1, 2).contiguous(), None
        if plan.cache is not None and plan.cache.observe is not None:
            plan.cache.observe(module, query, key, value, scale, softcap, window)
        layer = plan.cache.layer(index) if plan.cache is not None else None
        segments = layer is not None and len(layer.segments) > 0
        few = query.shape[2] == 1 or (plan.past > 0 and (query.is_cuda or query.shape[2] <= _MAX_KERNEL_QUERIES))
        kernel = plan.kernels and _covered(query, key, value)
        if layer is not None and layer.survivors and (window is not None or not kernel):
            state: Any = module._kvspeed
            own_name = state.config._attn_implementation
            key, value, attention_mask = laid_out(
                plan, state.rope, index, query, key, value, attention_mask, window, own_name
            )
        elif segments and not kernel:
            key, value = _materialised(plan, module._kvspeed.rope, index, key, value)  # type: ignore[union-attr, arg-type]
        elif plan.cache is not None and kernel and (segments or few):
            inv_freq = module._kvspeed.inv_freq(index) if segments else None  # type: ignore[union-attr, operator]
            out = _segments(plan, index, query, key, value, inv_freq, scale, softcap, window)
            return out.transpose(1, 2).contiguous(), None
        if window is not None:
            attention_mask = _by_position(plan, module, query, key, attention_mask, window)
    own = _own_attention(module)
    return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _covered(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels take such tensors; where not, the model's own attention serves."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    return covers(query)


def _segments(
    plan: Plan,
    index: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inv_freq: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int | None,
) -> torch.Tensor:
    assert plan.cache is not None
    layer = plan.cache.layer(index)
    segments: Sequence[Segment] = layer.segments
    start = layer.prefix + layer.start
    first = plan.first(query.device, layer.start)
    copied = plan.cache.assembled - layer.prefix - layer.removed if first is not None else 0
    if copied:  # packets were copied to the tail's front; the rows' padding comes after them
        segments = [Segment(key[:, :, :copied], value[:, :, :copied])]
        key, value, start = key[:, :, copied:], value[:, :, copied:], copied
    attend = functools.partial(
        ops.segment_attention, inv_freq=inv_freq, scale=scale, softcap=softcap, window=window, tail_start=start
    )
    if window is None or plan.padding is None or not segments:
        return attend(  # type: ignore[return-value]
            query, segments, key, value, tail_first=first, **plan.tail(index, copied)
        )
    # Padding lies between the segments and the row's first token, so distances to the segments differ by row.
    rows = []
    for row, skip in enumerate((plan.padding - layer.start).clamp_min(0).tolist()):  # on the host: nothing waits
        skip = min(skip, key.shape[2])
        new = min(query.shape[2], key.shape[2] - skip)
        out = torch.zeros_like(query[row : row + 1])
        if new > 0:
            out[:, :, query.shape[2] - new :] = attend(  # type: ignore[assignment]
                query[row : row + 1, :, query.shape[2] - new :],
                [_one_row(segment, row) for segment in segments],
                key[row : row + 1, :, skip:],
                value[row : row + 1, :, skip:],
                **plan.tail(index, copied + skip, row),
            )
        rows.append(out)
    return torch.cat(rows)


def _materialised(
    plan: Plan, rope: RopeSpec, index: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's segments, moved to their positions, and its tail as one `[B, H_kv, T, D]`: what the model's own
    attention takes where a mask is more than left padding, weights are wanted, or the kernels have no such shape."""
    assert plan.cache is not None
    layer = plan.cache.layer(index)
    shared = [(s.key, s.value, s.offset) for s in layer.segments if s.key.ndim == 3 and s.first is None]
    if len(shared) < len(layer.segments) or sum(k.shape[1] for k, _, _ in shared) != layer.prefix:
        raise ValueError(
            "segments of single rows, or with padding, are read by the kernels alone, which take a 2-D attention_mask "
            "of left padding and give no weights; leave output_attentions out and pad on the left"
        )
    shape = (1, key.shape[1], layer.prefix, key.shape[3])
    keys, values = key.new_empty(shape), value.new_empty(shape)
    ops.rope_concat(
        [k[None] for k, _, _ in shared],
        [v[None] for _, v, _ in shared],
        [offset for _, _, offset in shared],
        rope.layer(index),
        keys,
        values,
        interleaved=rope.interleaved,
    )
    rows = key.shape[0]
    return torch.cat([keys.expand(rows, -1, -1, -1), key], 2), torch.cat([values.expand(rows, -1, -1, -1), value], 2)


def _by_position(
    plan: Plan, module: Any, query: torch.Tensor, key: torch.Tensor, given: torch.Tensor | None, window: int
) -> torch.Tensor | None:
    """The mask of a layer with a window where rows are padded behind packets; else the one that is `given`."""
    cache, layer = plan.cache, plan.cache.layer(module.layer_idx) if plan.cache is not None else None
    if cache is None or layer is None or not cache.assembled or plan.padding is None or not plan.plain_mask:
        return given
    if layer.survivors:  # `laid_out` made it
        return given
    name = module._kvspeed.config._attn_implementation
    if name not in MASKS:
        raise ValueError(
            "padded rows behind packets in a sliding-window layer need attn_implementation 'sdpa' or 'eager', and "
            f"this model has {name!r}: load it with one of them, or ask questions of different lengths one by one"
        )
    tail = key.shape[2] - cache.assembled
    kind = (window, layer.start, tail, query.device)
    if kind not in plan.masks:
        mask = visible_by_position(plan.padding, cache.assembled, layer.start, query.shape[2], tail, window)
        plan.masks[kind] = as_taken(mask.to(query.device), name, query.dtype)
    return plan.masks[kind]


def _one_row(segment: Segment, row: int) -> Segment:
    if segment.key.ndim == 3:
        return segment
    first = None if segment.first is None else segment.first[row : row + 1]
    rows = slice(row, row + 1)
    return Segment(segment.key[rows], segment.value[rows], segment.offset, start=segment.start, first=first)


def _deep(
    plan: Plan,
    deep: DeepPlan,
    index: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """The layers >= k: few keys (anchors and answers), and every column sees its own choice of them."""
    if query.shape[2] == 0:
        return query
    mask = deep.mask(window, query.device)
    if mask is None and plan.kernels and _covered(query, key, value):
        return ops.segment_attention(  # type: ignore[return-value]
            query, [], key, value, inv_freq=None, scale=scale, softcap=softcap, **plan.tail(index)
        )
    if not softcap:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = functional.dropout(torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype), dropout)
    return weights @ value


def _own_attention(module: nn.Module) -> Callable[..., Any]:
    """What the model would call unpatched."""
    name = module._kvspeed.config._attn_implementation  # type: ignore[union-attr]
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]
