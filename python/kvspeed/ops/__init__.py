# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The three kernels as Python functions: `rope_concat`, `segment_attention`, `merge_states`.

Every argument is checked before the first write, and every message names the argument. The functions call the
compiled code directly; under `torch.compile`, fake tensors or a dispatch mode they go through `torch.ops.kvspeed`,
where the same operators are registered with mutation marks and fake implementations.

None of the ops has a backward. Where autograd is on and an input requires grad they raise, rather than lose gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvspeed.ops import attention, concat, library, merge
from kvspeed.ops.native import _C, build_info, cpu_isa, cpu_isas, current_isa
from kvspeed.segment import Segment

__all__ = [
    "build_info",
    "cpu_isa",
    "cpu_isas",
    "current_isa",
    "empty_huge",
    "merge_states",
    "rope_concat",
    "segment_attention",
]

_is_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_dispatch_stack


def rope_concat(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[int],
    inv_freq: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
    *,
    start: int = 0,
    interleaved: bool = False,
    page_table: Tensor | None = None,
    key_scale: Sequence[Tensor] | None = None,
    value_scale: Sequence[Tensor] | None = None,
) -> None:
    """Copies packets of keys and values, all layers at once, into one cache, turning the keys to their new positions.

    Values, keys whose offset is 0, and dimensions from R on are copied bit for bit. Key angles are
    `offset * inv_freq`, formed in float64; nothing is scaled, so keys of YaRN models stay right.

    Args:
        keys: one tensor a packet, `[L, H_kv, T_i, D]`, of out_keys's dtype, or all int8 or all float8_e4m3fn with
            scales; any strides, 1 along D.
        values: the same shapes and dtype; their strides are their own.
        offsets: one int a packet: the position it is used at minus the position its keys were rotated for.
        inv_freq: float32 `[R/2]`, or `[L, R/2]` where layers differ; R <= D. A zero row leaves that layer unrotated.
        out_keys: `[L, H_kv, S, D]`; with a page table `[L, pages, page_size, H_kv, D]`. float32, bfloat16 or float16.
            Written in place. It must overlap neither itself, nor `out_values`, nor a packet.
        out_values: the same shape and dtype.
        start: the index in the output, in tokens, where the first packet goes; the others follow it closely.
        interleaved: False where dimension i pairs with i + R/2 (Llama), True where 2i pairs with 2i + 1 (GPT-J).
        page_table: int32 `[n]`: token t lies in page `page_table[t // page_size]`. Entries of pages that are not
            written are never read; the others must be distinct and in range. A GPU's table is not looked at before the
            call is on its way: tokens of pages out of range are dropped there.
        key_scale: for 8-bit packets, float32 `[L, H_kv]` one a packet: each stored number stands for itself times the
            scale of its layer and head. Such keys are turned in float32 and rounded once.
        value_scale: the same for the values.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: wrong shapes, strides or values, pages used twice, outputs that overlap.
        IndexError: more tokens than the output holds, or a page out of range.
        RuntimeError: a device that this build has no kernels for, or an input that requires grad.
    """
    options = (start, interleaved, page_table, key_scale, value_scale)
    if _is_compiling() or library.must_dispatch(out_keys, out_values, inv_freq):
        torch.ops.kvspeed.rope_concat(list(keys), list(values), list(offsets), inv_freq, out_keys, out_values, *options)
    else:
        concat.run(keys, values, offsets, inv_freq, out_keys, out_values, *options)


def segment_attention(
    query: Tensor,
    segments: Sequence[Segment],
    tail_key: Tensor,
    tail_value: Tensor,
    *,
    inv_freq: Tensor | None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    tail_start: int | None = None,
    tail_first: Tensor | None = None,
    sinks: Tensor | None = None,
    interleaved: bool = False,
    return_lse: bool = False,
    split_tokens: int | None = None,
    tail_length: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over segments where they lie, and over a causal tail.

    Scores are `scale * (q . k)`, then `softcap * tanh(score / softcap)` where softcap > 0, then the mask. Where a row
    sees nothing its output is 0 and its LSE -inf (or the sink).

    Args:
        query: `[B, H_q, S_q, D]`, rotated at its own positions; any strides, 1 along D; D a multiple of 8 up to 256.
        segments: what every query row sees in full (window and padding aside); may be empty. H_q must be a multiple
            of H_kv. A list is read and checked at every call, a `kvspeed.SegmentList` once.
        tail_key: `[B, H_kv, T, D]`, rotated at its own positions. Causal, aligned bottom-right: row i sees tail tokens
            up to `T - S_q + i`. T may be 0, or less than S_q.
        tail_value: the same shape and dtype.
        inv_freq: this layer's float32 `[R/2]`; None where all offsets are 0.
        scale: None is `1 / sqrt(D)`.
        softcap: 0 is none.
        window: W: a query at position p sees a key at m when `p - W < m <= p`. Positions are start + offset + index
            in a segment, `tail_start` + index in the tail. None is no window.
        tail_start: the position of the tail's token 0; required with a window.
        tail_first: int32 `[B]`: tail tokens before it are padding in that row.
        sinks: `[H_q]`: one logit a head, neither scaled nor capped, that joins the denominator and the LSE.
        interleaved: as in `rope_concat`.
        return_lse: also return the log-sum-exp (natural log) of the scores.
        split_tokens: tokens that one piece of work covers; None lets the library choose. A row's result is the same
            bits for the same value, whatever else is in the batch.
        tail_length: int32 `[B]` on the device of the tensors: how many tokens of the tail are there in each row, from
            0 to T; the rest is never read, and all that is said of T above holds for this number. The host does not
            read it on a GPU, so a captured CUDA graph follows a tail that grows.

    All tensors are on one device, where the work is done: on a GPU in torch's current stream of that GPU. `inv_freq`
    may be on the CPU always, and best is. GPUs take bfloat16 and float16, and head dimensions 64, 80, 96, 128 and 256.

    Returns:
        `[B, H_q, S_q, D]` with the query's dtype and memory layout; with `return_lse` also float32 `[B, H_q, S_q]`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `rope_concat`.
    """
    if _is_compiling() or _modes() or (type(query) is not Tensor and library.must_dispatch(query)):
        segments = list(segments)
        out, lse = torch.ops.kvspeed.segment_attention(
            query,
            [segment.key for segment in segments],
            [segment.value for segment in segments],
            [segment.offset for segment in segments],
            [segment.start for segment in segments],
            [segment.first for segment in segments],
            tail_key,
            tail_value,
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
            *_pages(segments),
            tail_length,
        )
        return (out, lse) if return_lse else out
    return attention.run(
        query,
        segments,
        tail_key,
        tail_value,
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


def _pages(segments: Sequence[Segment]) -> tuple[list[Tensor | None] | None, list[int] | None]:
    """The segments' page tables and lengths, as the library takes them."""
    if all(segment.page_table is None and segment._length is None for segment in segments):
        return None, None
    return (
        [segment.page_table for segment in segments],
        [-1 if segment._length is None else segment._length for segment in segments],
    )


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two attention results over disjoint sets of keys.

    `lse = log(exp(lse_a) + exp(lse_b))` and `out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)`; two empty
    states (both LSE -inf) give 0 and -inf. Sinks must have gone into one of the states only.

    Args:
        out_a: `[B, H, S, D]`, float32, bfloat16 or float16; any strides, 1 along D.
        lse_a: float32 `[B, H, S]`, natural log.
        out_b: the same shape as out_a; its dtype may differ.
        lse_b: float32 `[B, H, S]`.

    Returns:
        The output, with out_a's dtype and memory layout, and its float32 LSE `[B, H, S]`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `rope_concat`.
    """
    if _is_compiling() or library.must_dispatch(out_a, lse_a, out_b, lse_b):
        return torch.ops.kvspeed.merge_states(out_a, lse_a, out_b, lse_b)
    return merge.run(out_a, lse_a, out_b, lse_b)


def empty_huge(shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """`torch.empty`, whose memory the system is asked to back with huge pages.

    A large fresh tensor costs more in page faults than in copying; huge pages cut that several times. The content is
    undefined, as with `torch.empty`.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if tensor.device.type == "cpu" and type(tensor) is Tensor:
        _C.advise_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor
