# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`segment_attention` on plain tensors, all on the CPU or all on one GPU.

The op runs once a layer and decoding step, so the call itself must be cheap. Where torch lets C++ read tensors, the
compiled code takes the arguments as they are (`_fast`), and what follows serves the calls that it does not take: those
that are not plain, or wrong, or in a CUDA graph's capture. Without that, `_prepare` takes the arguments as they
are, and tests them without preparing a message; where a test fails, `attention_checks.normalise` checks everything
again slowly, raises a precise error or brings the arguments to the plain form, and they are tried once more. Only what
`_prepare` has passed reaches the compiled code.

Segments of a `SegmentList` are read by `_fast` once; `_prepare` takes them for a list.

GPUs read pages, and lengths of the tail in memory, themselves; for the CPU `paged` brings both to the plain form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kvspeed.ops import checks as check
from kvspeed.ops import paged
from kvspeed.ops.attention_checks import GPU_DTYPES, GPU_HEAD_DIMS, MAX_HEAD_DIM, covers, normalise
from kvspeed.ops.device import Gpu, emulated, gpu_at, gpu_of
from kvspeed.ops.native import _C, DTYPE_CODES, isa_variable
from kvspeed.segment import Segment, SegmentList

__all__ = ["covers", "introduce", "run"]

_LIMIT = check.INTEGER_LIMIT
_FACTOR_LIMIT = check.FACTOR_LIMIT
_Result = Tensor | tuple[Tensor, Tensor]


def run(*arguments: Any) -> _Result:
    """See `kvspeed.ops.segment_attention`; the arguments are the same, all positional."""
    if forward_ad._current_level >= 0:  # where tensors may have tangents
        arguments = normalise(*arguments)
    if _reads_tensors:
        result = _fast(arguments)
        if result is not None:
            return result
    return run_in_python(*arguments)


def _make_lse(query: Tensor) -> Tensor:
    return torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


def introduce(module: Any) -> bool:
    """Shows the types to the compiled code; whether it can read tensors."""
    return module.use_tensors(Tensor, Segment, SegmentList, torch.empty_like, _make_lse)


_reads_tensors = introduce(_C)


def _fast(arguments: tuple[Any, ...]) -> _Result | None:
    """One call into the compiled code; None where it does not take the arguments, and has done nothing."""
    query = arguments[0]
    if type(query) is not Tensor:
        return None
    if not query.is_cpu:
        gpu = gpu_at(query.get_device()) if query.is_cuda else None
        return None if gpu is None else gpu.try_attend(arguments)
    gpu = emulated.get()
    if gpu is not None:
        return gpu.try_attend(arguments)
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    return _C.attend(*arguments, grad, threads, isa_variable.get(), None, None)


def run_in_python(*arguments: Any) -> _Result:
    """The same without reading tensors from C++."""
    if type(arguments[1]) is SegmentList:
        arguments = (arguments[0], list(arguments[1]), *arguments[2:])
    try:
        prepared = _prepare(*arguments)
    except RuntimeError:  # tensors without strides or memory: sparse, wrapped; or on a device without kernels
        prepared = None
    if prepared is None:
        arguments = normalise(*arguments)  # under this name it keeps alive what the call points to
        if paged.needed(*arguments):
            return paged.attend(run, *arguments)
        prepared = _prepare(*arguments)
        if prepared is None:
            raise RuntimeError("segment_attention was given arguments that pass its checks but cannot be launched")
    call, out, lse, gpu = prepared
    if not out.numel():
        pass
    elif gpu is None:
        _C.segment_attention(*call, torch.get_num_threads(), isa_variable.get(), None)
    else:
        gpu.launch(gpu.module.segment_attention, call)
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
    tail_length: Tensor | None,
) -> tuple[tuple[Any, ...], Tensor, Tensor | None, Gpu | None] | None:
    """The compiled code's arguments, the output, the LSE and the GPU; None where an argument is not in its plain form.

    None need not mean an error: a numpy integer, say, takes the other way.
    """
    if type(query) is not Tensor or query.ndim != 4:
        return None
    gpu = emulated.get() if query.is_cpu else gpu_of(query)
    where = -1 if gpu is None else gpu.where
    dtype = query.dtype
    code = DTYPE_CODES.get(dtype)
    batch, heads, query_tokens, head_dim = query.shape
    query_stride = query.stride()
    query_pointer = query.data_ptr()
    tracked = torch.is_grad_enabled()
    if (
        code is None
        or (gpu is None and (head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM or tail_length is not None))
        or (gpu is not None and (head_dim not in GPU_HEAD_DIMS or dtype not in GPU_DTYPES))
        or query_stride[3] != 1
        or (tracked and query.requires_grad)
        or query.is_neg()
        or (not query_pointer and batch * heads * query_tokens)
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
        or not -_FACTOR_LIMIT <= scale <= _FACTOR_LIMIT
        or type(softcap) is not float
        or not 0.0 <= softcap <= _FACTOR_LIMIT
        or type(interleaved) is not bool
        or type(return_lse) is not bool
    ):
        return None

    rotary_dim = frequencies = 0
    if inv_freq is not None:
        if not _is_vector(inv_freq, torch.float32, None, tracked, where) and (
            where < 0 or not _is_vector(inv_freq, torch.float32, None, tracked, -1)
        ):
            return None
        rotary_dim = 2 * inv_freq.shape[0]
        frequencies = inv_freq.data_ptr()
        if rotary_dim > head_dim:
            return None
    sink_pointer = 0
    if sinks is not None:
        if not _is_vector(sinks, torch.float32, heads, tracked, where):
            return None
        sink_pointer = sinks.data_ptr()
    length_pointer = 0
    if tail_length is not None:
        if not _is_vector(tail_length, torch.int32, batch, tracked, where):
            return None
        length_pointer = tail_length.data_ptr()

    sizes = (batch, heads_kv, head_dim)
    tail = _describe(tail_key, tail_value, 0, tail_start, tail_first, dtype, sizes, tracked, where)
    if tail is None or type(segments) not in (list, tuple):
        return None
    descriptors = []
    for segment in segments:
        if type(segment) is not Segment:
            return None
        offset = segment.offset
        if segment.page_table is not None or segment._length is not None:
            descriptor = None if gpu is None else _describe_pages(segment, dtype, sizes, tracked, where)
        else:
            descriptor = _describe(
                segment.key, segment.value, offset, segment.start, segment.first, dtype, sizes, tracked, where
            )
        if descriptor is None or (offset and inv_freq is None):
            return None
        descriptors.append(descriptor)
    if gpu is not None and inv_freq is not None:
        offsets = [descriptor[9] for descriptor in descriptors]
        if any(offsets):
            known = gpu.frequencies(inv_freq)
            frequencies = known.pointer
            rows = gpu.rows(known, offsets)
            for i, offset in enumerate(offsets):
                if offset:
                    descriptor = descriptors[i]
                    descriptors[i] = (*descriptor[:12], rows.get(offset, 0), *(descriptor[13:] or (0, 0, 0, 0)))
        else:
            frequencies = 0  # may point to the GPU's memory; without offsets nothing reads them

    out = torch.empty_like(query)
    out_stride = out.stride()
    if out_stride[3] != 1:
        out = check.empty_like(query)
        out_stride = out.stride()
    lse = torch.empty((batch, heads, query_tokens), dtype=torch.float32, device=query.device) if return_lse else None
    call = (
        code,
        batch,
        heads,
        heads_kv,
        query_tokens,
        head_dim,
        rotary_dim,
        interleaved,
        frequencies,
        query_pointer,
        query_stride[:3],
        descriptors,
        tail,
        length_pointer,
        scale,
        softcap,
        window,
        sink_pointer,
        out.data_ptr(),
        out_stride[:3],
        0 if lse is None else lse.data_ptr(),
        split_tokens,
    )
    return call, out, lse, gpu


def _describe(
    key: Tensor,
    value: Tensor,
    offset: int,
    start: int,
    first: Tensor | None,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    tracked: bool,
    where: int,
) -> tuple[int, ...] | None:
    """One segment as the compiled code takes it, or None where it is not in its plain form."""
    if type(key) is not Tensor or type(value) is not Tensor or key.dtype is not dtype or value.dtype is not dtype:
        return None
    shape = key.shape
    batch, heads_kv, head_dim = sizes
    if value.shape != shape:
        return None
    if not (
        key.is_cpu and value.is_cpu
        if where < 0
        else key.is_cuda and value.is_cuda and key.get_device() == where == value.get_device()
    ):
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
        or key.is_neg()
        or value.is_neg()
    ):
        return None
    padding = 0
    if first is not None:
        if not _is_vector(first, torch.int32, batch, tracked, where):
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


def _describe_pages(
    segment: Segment, dtype: torch.dtype, sizes: tuple[int, int, int], tracked: bool, where: int
) -> tuple[int, ...] | None:
    """A paged segment as the compiled code takes it, its rotation row still missing; None where it is not plain."""
    key, value, table, tokens = segment.key, segment.value, segment.page_table, segment._length
    batch, heads_kv, head_dim = sizes
    if type(key) is not Tensor or type(value) is not Tensor or key.ndim != 4 or value.shape != key.shape:
        return None
    if type(table) is not Tensor or table.dtype is not torch.int32 or not 1 <= table.ndim <= 2:
        return None
    pages, page_size = key.shape[:2]
    entries = table.shape[-1]
    if tokens is None:
        tokens = entries * page_size
    if type(tokens) is not int or not (
        _is_at(table, where)
        and (table.ndim == 1 or table.shape[0] == batch)
        and (entries <= 1 or table.stride(-1) == 1)
        and 0 <= tokens <= entries * page_size
    ):
        return None
    # As one row of a batch: pages for rows, and the tokens of a page.
    described = _describe(
        key.transpose(1, 2),
        value.transpose(1, 2),
        segment.offset,
        segment.start,
        None,
        dtype,
        (pages, heads_kv, head_dim),
        tracked,
        where,
    )
    # Without pages no entry names one that exists, and every token is invisible.
    if described is None or (tokens and not ((described[0] or not pages) and table.data_ptr())):
        return None
    padding = 0
    if segment.first is not None:
        if not _is_vector(segment.first, torch.int32, batch, tracked, where):
            return None
        padding = segment.first.data_ptr()
    row_stride = table.stride(0) if table.ndim == 2 else 0
    if not tokens:  # nothing to read: an ordinary empty segment
        return (*described[:8], 0, *described[9:11], padding, 0, 0, 0, 0, 0)
    return (*described[:8], tokens, *described[9:11], padding, 0, table.data_ptr(), row_stride, page_size, pages)


def _is_at(value: Tensor, where: int) -> bool:
    """Whether the tensor is on the GPU of that index, or on the CPU for -1."""
    return value.is_cpu if where < 0 else value.is_cuda and value.get_device() == where


def _is_vector(value: Tensor, dtype: torch.dtype, size: int | None, tracked: bool, where: int) -> bool:
    """Whether `value` is a plain contiguous vector of `dtype` (and of `size`) in the right place."""
    return (
        type(value) is Tensor
        and value.dtype is dtype
        and (value.is_cpu if where < 0 else value.is_cuda and value.get_device() == where)
        and value.ndim == 1
        and (size is None or value.shape[0] == size)
        and value.is_contiguous()
        and not (tracked and value.requires_grad)
        and not value.is_neg()
    )
