# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`segment_attention` on plain CPU tensors.

The op runs once a layer and decoding step, so the call itself must be cheap. `_prepare` takes the arguments as they
are, and tests them without preparing a message; where a test fails, `_normalise` checks everything again slowly,
raises a precise error or brings the arguments to the plain form, and they are tried once more. Only what `_prepare`
has passed reaches the compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvspeed.ops import checks as check
from kvspeed.ops.native import _C, DTYPE_CODES, isa_variable
from kvspeed.segment import Segment

__all__ = ["run"]

_MAX_HEAD_DIM = 256
_LIMIT = check.INTEGER_LIMIT
_FLOAT32_MAX = check.FLOAT32_MAX
_Result = Tensor | tuple[Tensor, Tensor]


def run(*arguments: Any) -> _Result:
    """See `kvspeed.ops.segment_attention`; the arguments are the same, all positional."""
    try:
        prepared = _prepare(*arguments)
    except RuntimeError:  # tensors without strides or memory: sparse, wrapped
        prepared = None
    if prepared is None:
        arguments = _normalise(*arguments)  # under this name it keeps alive what the call points to
        prepared = _prepare(*arguments)
        if prepared is None:
            raise RuntimeError("segment_attention was given arguments that pass its checks but cannot be launched")
    call, out, lse = prepared
    if out.numel():
        _C.segment_attention(*call)
    return out if lse is None else (out, lse)


def _prepare(
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
) -> tuple[tuple[Any, ...], Tensor, Tensor | None] | None:
    """The compiled code's arguments, the output and the LSE; None where an argument is not in its plain form.

    None need not mean an error: a numpy integer, say, takes the other way.
    """
    if type(query) is not Tensor or not query.is_cpu or query.ndim != 4:
        return None
    dtype = query.dtype
    code = DTYPE_CODES.get(dtype)
    batch, heads, rows, head_dim = query.shape
    query_stride = query.stride()
    query_pointer = query.data_ptr()
    tracked = torch.is_grad_enabled()
    if (
        code is None
        or head_dim % 8
        or not 8 <= head_dim <= _MAX_HEAD_DIM
        or query_stride[3] != 1
        or (tracked and query.requires_grad)
        or (not query_pointer and batch * heads * rows)
        or type(tail_key) is not Tensor
        or tail_key.ndim != 4
    ):
        return None
    heads_kv = tail_key.shape[1]
    if not heads_kv or heads % heads_kv:
        return None

    # The positions that matter to a window, and the numbers. Comparisons with NaN are false.
    if window is None:
        window = 0
    elif type(window) is not int or not 1 <= window <= _LIMIT or tail_start is None:
        return None
    if tail_start is None:
        tail_start = 0
    if split_tokens is None:
        split_tokens = 0
    elif type(split_tokens) is not int or not 1 <= split_tokens <= _LIMIT:
        return None
    if scale is None:
        scale = head_dim**-0.5
    if (
        type(scale) is not float
        or not -_FLOAT32_MAX <= scale <= _FLOAT32_MAX
        or type(softcap) is not float
        or not 0.0 <= softcap <= _FLOAT32_MAX
        or type(interleaved) is not bool
        or type(return_lse) is not bool
    ):
        return None

    rotary_dim = frequencies = 0
    if inv_freq is not None:
        if not _is_vector(inv_freq, torch.float32, None, tracked):
            return None
        rotary_dim = 2 * inv_freq.shape[0]
        frequencies = inv_freq.data_ptr()
        if rotary_dim > head_dim:
            return None
    sink_pointer = 0
    if sinks is not None:
        if not _is_vector(sinks, torch.float32, heads, tracked):
            return None
        sink_pointer = sinks.data_ptr()

    sizes = (batch, heads_kv, head_dim)
    tail = _describe(tail_key, tail_value, 0, tail_start, tail_first, dtype, sizes, tracked)
    if tail is None or type(segments) not in (list, tuple):
        return None
    descriptors = []
    for segment in segments:
        if type(segment) is not Segment:
            return None
        offset = segment.offset
        descriptor = _describe(segment.key, segment.value, offset, segment.start, segment.first, dtype, sizes, tracked)
        if descriptor is None or (offset and inv_freq is None):
            return None
        descriptors.append(descriptor)

    out = torch.empty_like(query)
    out_stride = out.stride()
    if out_stride[3] != 1:
        out = check.empty_like(query)
        out_stride = out.stride()
    lse = torch.empty((batch, heads, rows), dtype=torch.float32) if return_lse else None
    call = (
        code,
        batch,
        heads,
        heads_kv,
        rows,
        head_dim,
        rotary_dim,
        interleaved,
        frequencies,
        query_pointer,
        query_stride[:3],
        descriptors,
        tail,
        0,
        scale,
        softcap,
        window,
        sink_pointer,
        out.data_ptr(),
        out_stride[:3],
        0 if lse is None else lse.data_ptr(),
        split_tokens,
        torch.get_num_threads(),
        isa_variable.get(),
        None,
    )
    return call, out, lse


def _describe(
    key: Tensor,
    value: Tensor,
    offset: int,
    start: int,
    first: Tensor | None,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    tracked: bool,
) -> tuple[int, ...] | None:
    """One segment as the compiled code takes it, or None where it is not in its plain form."""
    if type(key) is not Tensor or type(value) is not Tensor or key.dtype is not dtype or value.dtype is not dtype:
        return None
    shape = key.shape
    batch, heads_kv, head_dim = sizes
    if value.shape != shape or not key.is_cpu or not value.is_cpu:
        return None
    if len(shape) == 3:
        heads, tokens, dim = shape
        key_head, key_token, key_dim = key.stride()
        value_head, value_token, value_dim = value.stride()
        key_batch = value_batch = 0
    elif len(shape) == 4 and shape[0] == batch:
        _, heads, tokens, dim = shape
        key_batch, key_head, key_token, key_dim = key.stride()
        value_batch, value_head, value_token, value_dim = value.stride()
    else:
        return None
    key_pointer, value_pointer = key.data_ptr(), value.data_ptr()
    if (
        heads != heads_kv
        or dim != head_dim
        or key_dim != 1
        or value_dim != 1
        or not ((key_pointer and value_pointer) or not tokens or not batch)
        or type(offset) is not int
        or not -_LIMIT <= offset <= _LIMIT
        or type(start) is not int
        or not -_LIMIT <= start <= _LIMIT
        or (tracked and (key.requires_grad or value.requires_grad))
    ):
        return None
    padding = 0
    if first is not None:
        if not _is_vector(first, torch.int32, batch, tracked):
            return None
        padding = first.data_ptr()
    return (
        key_pointer,
        value_pointer,
        key_batch,
        key_head,
        key_token,
        value_batch,
        value_head,
        value_token,
        tokens,
        offset,
        start,
        padding,
    )


def _is_vector(value: Tensor, dtype: torch.dtype, size: int | None, tracked: bool) -> bool:
    """Whether `value` is a plain contiguous CPU vector of `dtype` (and of `size`)."""
    return (
        type(value) is Tensor
        and value.dtype is dtype
        and value.is_cpu
        and value.ndim == 1
        and (size is None or value.shape[0] == size)
        and value.is_contiguous()
        and not (tracked and value.requires_grad)
    )


def _normalise(
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
) -> tuple[Any, ...]:
    """Raises what is wrong with the arguments, or returns them in the form that `_prepare` takes."""
    query = check.shape("query", check.tensor("query", query), (None,) * 4, "[B, H_q, S_q, D]")
    batch, heads, _, head_dim = query.shape
    if head_dim % 8 or not 8 <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(
            f"query has a head dimension of {head_dim}; segment_attention takes multiples of 8 from 8 to "
            f"{_MAX_HEAD_DIM}: pad the head with zeros, or use torch's scaled_dot_product_attention on a copied cache"
        )
    check.head_stride("query", query)

    if tail_key is None or tail_value is None:
        raise TypeError("tail_key and tail_value must be tensors; where there is no tail give [B, H_kv, 0, D]")
    names = "[B, H_kv, T, D] with query's B and D"
    tail_key = check.tensor("tail_key", tail_key, query.dtype, "query")
    check.shape("tail_key", tail_key, (batch, None, None, head_dim), names)
    heads_kv = tail_key.shape[1]
    if not heads_kv or heads % heads_kv:
        raise ValueError(
            f"query has {heads} heads and tail_key has {heads_kv}; the number of query heads must be a multiple of the "
            "number of key heads"
        )
    tail_value = check.tensor("tail_value", tail_value, query.dtype, "query")
    check.shape("tail_value", tail_value, tuple(tail_key.shape), "shaped like tail_key")
    check.head_stride("tail_key", tail_key)
    check.head_stride("tail_value", tail_value)
    padding_names = "int32 [B], one number a row"
    tail_first = check.optional_vector("tail_first", tail_first, torch.int32, batch, padding_names)

    if isinstance(segments, (Tensor, Segment, str)) or not hasattr(segments, "__iter__"):
        raise TypeError(f"segments must be a list of kvspeed.Segment, got {type(segments).__name__}")
    segments = [
        _normalise_segment(f"segments[{i}]", segment, query.dtype, (batch, heads_kv, head_dim))
        for i, segment in enumerate(segments)
    ]
    if inv_freq is not None:
        inv_freq = check.inv_freq(inv_freq, head_dim)
    else:
        for i, segment in enumerate(segments):
            if segment.offset:
                raise ValueError(
                    f"inv_freq is None, but segments[{i}].offset is {segment.offset}; give this layer's float32 [R/2]"
                )

    if window is not None:
        window = check.integer("window", window, 1, low_reason=" (a query counts itself), or None for no window")
        if tail_start is None:
            raise ValueError("window is given without tail_start; give the position of the tail's token 0")
    if tail_start is not None:
        tail_start = check.integer("tail_start", tail_start, -_LIMIT)
    if split_tokens is not None:
        split_tokens = check.integer("split_tokens", split_tokens, 1, low_reason=", or None to let the library choose")
    if scale is not None:
        scale = check.finite("scale", scale)
    softcap = check.finite("softcap", softcap, 0.0)
    check.boolean("interleaved", interleaved)
    check.boolean("return_lse", return_lse)
    if sinks is not None:
        sinks = check.shape("sinks", check.tensor("sinks", sinks), (heads,), "[H_q], one logit a query head")
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
    )


def _normalise_segment(name: str, segment: Any, dtype: torch.dtype, sizes: tuple[int, int, int]) -> Segment:
    if not isinstance(segment, Segment):
        raise TypeError(f"{name} must be a kvspeed.Segment, got {type(segment).__name__}")
    batch, heads_kv, head_dim = sizes
    tensors = []
    for part in ("key", "value"):
        label = f"{name}.{part}"
        tensor = check.tensor(label, getattr(segment, part), dtype, "query")
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
    return Segment(
        key,
        value,
        check.integer(f"{name}.offset", segment.offset),
        start=check.integer(f"{name}.start", segment.start),
        first=check.optional_vector(f"{name}.first", segment.first, torch.int32, batch, "int32 [B], one number a row"),
    )


def _unit_head_stride(tensor: Tensor) -> Tensor:
    """An empty tensor may carry any stride along the head; `_prepare` wants 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
