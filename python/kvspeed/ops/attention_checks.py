# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What `segment_attention` accepts: `covers` says it of a query, `normalise` of all arguments, slowly and with reasons.

Calls in their plain form never come here; see `kvspeed.ops.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvspeed.ops import checks as check
from kvspeed.ops import paged
from kvspeed.ops.device import gpu_of
from kvspeed.ops.native import DTYPE_CODES
from kvspeed.segment import Segment

__all__ = ["GPU_DTYPES", "GPU_HEAD_DIMS", "MAX_HEAD_DIM", "covers", "normalise"]

MAX_HEAD_DIM = 256
GPU_HEAD_DIMS = (64, 80, 96, 128, 256)
GPU_DTYPES = (torch.bfloat16, torch.float16)
_LIMIT = check.INTEGER_LIMIT


def covers(query: Tensor) -> bool:
    """Whether the kernels of the query's device take its dtype and head dimension."""
    size = query.shape[-1]
    try:
        gpu = gpu_of(query)
    except RuntimeError:  # another device, or a GPU that this build cannot use
        return False
    if gpu is None:
        return query.dtype in DTYPE_CODES and size % 8 == 0 and 8 <= size <= MAX_HEAD_DIM
    return query.dtype in GPU_DTYPES and size in GPU_HEAD_DIMS


def normalise(
    query: Tensor,
    segments: Sequence[Segment],
    tail_key: Tensor,
    tail_value: Tensor,
    inv_freq: Tensor | None,
    scale: float | None,
    softcap: float,
    window: int | None,
    tail_start: int | None,
    tail_first: Tensor | None,
    sinks: Tensor | None,
    interleaved: bool,
    return_lse: bool,
    split_tokens: int | None,
    tail_length: Tensor | None,
) -> tuple[Any, ...]:
    """Raises what is wrong with the arguments, or returns them in the form that `kvspeed.ops.attention` passes on."""
    query = check.shape("query", check.tensor("query", query), (None,) * 4, "[B, H_q, S_q, D]")
    batch, heads, _, head_dim = query.shape
    device = query.device
    if gpu_of(query) is not None:
        _gpu_limits(query)
    elif head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"query has a head dimension of {head_dim}; segment_attention takes multiples of 8 from 8 to "
            f"{MAX_HEAD_DIM}: pad the head with zeros, or use torch's scaled_dot_product_attention on a copied cache"
        )
    check.head_stride("query", query)

    if tail_key is None or tail_value is None:
        raise TypeError("tail_key and tail_value must be tensors; where there is no tail give [B, H_kv, 0, D]")
    names = "[B, H_kv, T, D] with query's B and D"
    tail_key = _beside(query, "tail_key", tail_key, query.dtype, "query")
    check.shape("tail_key", tail_key, (batch, None, None, head_dim), names)
    heads_kv = tail_key.shape[1]
    if not heads_kv or heads % heads_kv:
        raise ValueError(
            f"query has {heads} heads and tail_key has {heads_kv}; the number of query heads must be a multiple of the "
            "number of key heads"
        )
    tail_value = _beside(query, "tail_value", tail_value, query.dtype, "query")
    check.shape("tail_value", tail_value, tuple(tail_key.shape), "shaped like tail_key")
    check.head_stride("tail_key", tail_key)
    check.head_stride("tail_value", tail_value)
    tail_first = _row_numbers(query, "tail_first", tail_first)
    tail_length = _row_numbers(query, "tail_length", tail_length)

    if isinstance(segments, (Tensor, Segment, str)) or not hasattr(segments, "__iter__"):
        raise TypeError(f"segments must be a list of kvspeed.Segment, got {type(segments).__name__}")
    segments = [_normalise_segment(f"segments[{i}]", segment, query, heads_kv) for i, segment in enumerate(segments)]
    if inv_freq is not None:
        inv_freq = check.inv_freq(inv_freq, head_dim)
        if not inv_freq.is_cpu:
            check.on_device("inv_freq", inv_freq, device, "query")
    else:
        for i, segment in enumerate(segments):
            if segment.offset:
                raise ValueError(
                    f"inv_freq is None, but segments[{i}].offset is {segment.offset}; give this layer's float32 [R/2]"
                )

    if window is not None:
        none = ", or None for no window"
        window = check.integer("window", window, 1, low_reason=f" (a query counts itself){none}", high_reason=none)
        if tail_start is None:
            raise ValueError("window is given without tail_start; give the position of the tail's token 0")
    if tail_start is not None:
        tail_start = check.integer("tail_start", tail_start, -_LIMIT)
    if split_tokens is not None:
        none = ", or None to let the library choose"
        split_tokens = check.integer("split_tokens", split_tokens, 1, low_reason=none, high_reason=none)
    if scale is not None:
        scale = check.finite("scale", scale)
    softcap = check.finite("softcap", softcap, 0.0, low_reason=", and 0 for no cap")
    check.boolean("interleaved", interleaved)
    check.boolean("return_lse", return_lse)
    if sinks is not None:
        sinks = check.shape("sinks", _beside(query, "sinks", sinks), (heads,), "[H_q], one logit a query head")
        sinks = sinks.to(torch.float32).contiguous()
    return (
        _unit_head_stride(query),
        segments,
        _unit_head_stride(tail_key),
        _unit_head_stride(tail_value),
        inv_freq,
        scale,
        softcap,
        window,
        tail_start,
        tail_first,
        sinks,
        interleaved,
        return_lse,
        split_tokens,
        tail_length,
    )


def _gpu_limits(query: Tensor) -> None:
    head_dim = query.shape[-1]
    if query.dtype not in GPU_DTYPES:
        raise TypeError(
            f"query has dtype {str(query.dtype).removeprefix('torch.')}; on a GPU segment_attention takes bfloat16 and "
            "float16: cast query, keys and values, or use torch's scaled_dot_product_attention on a copied cache"
        )
    if head_dim not in GPU_HEAD_DIMS:
        sizes = ", ".join(map(str, GPU_HEAD_DIMS))
        raise ValueError(
            f"query has a head dimension of {head_dim}; on a GPU segment_attention takes {sizes}: pad the head with "
            "zeros to the next of them, or use torch's scaled_dot_product_attention on a copied cache"
        )


def _beside(query: Tensor, name: str, value: Any, dtype: torch.dtype | None = None, dtype_of: str = "") -> Tensor:
    """A tensor that passes the general checks and is on the query's device."""
    return check.on_device(name, check.tensor(name, value, dtype, dtype_of), query.device, "query")


def _row_numbers(query: Tensor, name: str, value: Tensor | None) -> Tensor | None:
    """None, or int32 `[B]` on the query's device."""
    value = check.optional_vector(name, value, torch.int32, query.shape[0], "int32 [B], one number a row")
    return value if value is None else check.on_device(name, value, query.device, "query")


def _normalise_segment(name: str, segment: Any, query: Tensor, heads_kv: int) -> Segment:
    if not isinstance(segment, Segment):
        raise TypeError(f"{name} must be a kvspeed.Segment, got {type(segment).__name__}")
    batch, head_dim = query.shape[0], query.shape[-1]
    offset = check.integer(f"{name}.offset", segment.offset)
    start = check.integer(f"{name}.start", segment.start)
    first = _row_numbers(query, f"{name}.first", segment.first)
    if segment.page_table is not None:
        return paged.normalise(name, segment, query, heads_kv, offset, start, first)
    if segment._length is not None:
        raise ValueError(f"{name} has tokens={segment._length!r} but no page_table; slice key and value instead")
    tensors = []
    for part in ("key", "value"):
        label = f"{name}.{part}"
        tensor = _beside(query, label, getattr(segment, part), query.dtype, "query")
        if tensor.ndim == 4 and tensor.shape[0] == 1 != batch:
            raise ValueError(
                f"{label} has shape {list(tensor.shape)}, one row for a batch of {batch}; to share it between the rows "
                f"give [H_kv, T, D]: {part}[0]"
            )
        expected = (heads_kv, None, head_dim) if tensor.ndim == 3 else (batch, heads_kv, None, head_dim)
        check.shape(label, tensor, expected, "[H_kv, T, D] or [B, H_kv, T, D] with tail_key's H_kv and query's B and D")
        check.head_stride(label, tensor)
        tensors.append(_unit_head_stride(tensor if tensor.ndim == 4 else tensor.expand(batch, *tensor.shape)))
    key, value = tensors
    if key.shape != value.shape:
        raise ValueError(f"{name}.value has {value.shape[2]} tokens and {name}.key has {key.shape[2]}; they must agree")
    return Segment(key, value, offset, start=start, first=first)


def _unit_head_stride(tensor: Tensor) -> Tensor:
    """An empty tensor may carry any stride along the head; the kernels want 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
