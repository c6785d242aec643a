# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Pages, and lengths of the tail in memory: what GPUs read themselves, in the plain form that the CPU takes.

Pages that follow each other in memory become one run, and a run is a segment of its own. Where rows have their own
pages or lengths they are served one by one; a row's result does not depend on its neighbours anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvspeed.ops import checks as check
from kvspeed.ops.device import gpu_of
from kvspeed.segment import Segment

__all__ = ["attend", "needed", "normalise"]

_Result = Tensor | tuple[Tensor, Tensor]
# Where these are among the options, which follow the tail: inv_freq, scale, softcap, window, tail_start, ...
_TAIL_FIRST, _RETURN_LSE = 5, 8


def normalise(
    name: str, segment: Segment, query: Tensor, heads_kv: int, offset: int, start: int, first: Tensor | None
) -> Segment:
    """Raises what is wrong with a paged segment, or returns it in the form that the kernels take."""
    tensors = []
    for part in ("key", "value"):
        label = f"{name}.{part}"
        tensor = check.tensor(label, getattr(segment, part), query.dtype, "query")
        check.on_device(label, tensor, query.device, "query")
        names = "[pages, page_size, H_kv, D] with tail_key's H_kv and query's D, since there is a page_table"
        check.shape(label, tensor, (None, None, heads_kv, query.shape[-1]), names)
        check.head_stride(label, tensor)
        tensors.append(tensor if tensor.stride(-1) == 1 else tensor.contiguous())
    key, value = tensors
    check.shape(f"{name}.value", value, tuple(key.shape), f"shaped like {name}.key")

    label = f"{name}.page_table"
    table = check.tensor(label, segment.page_table, torch.int32)
    check.on_device(label, table, query.device, "query")
    if table.ndim != 1 and (table.ndim != 2 or table.shape[0] != query.shape[0]):
        raise ValueError(
            f"{label} has shape {list(table.shape)}; it must be [n], shared by all rows, or [B, n] with query's "
            f"B = {query.shape[0]}"
        )
    capacity = table.shape[-1] * key.shape[1]
    tokens = capacity
    if segment._length is not None:
        tokens = check.integer(f"{name}.tokens", segment._length, 0)
    if tokens > capacity:
        raise IndexError(
            f"{name}.tokens is {tokens}, but its page_table has {table.shape[-1]} pages of {key.shape[1]}, which hold "
            f"{capacity}; give a longer page_table or fewer tokens"
        )
    if table.shape[-1] > 1 and table.stride(-1) != 1:
        table = table.contiguous()
    return Segment(key, value, offset, start=start, first=first, page_table=table, tokens=tokens)


def needed(query: Tensor, segments: Sequence[Segment], *rest: Any) -> bool:
    """Whether a call has what only GPUs read, and is for the CPU; the arguments are `segment_attention`'s."""
    has_any = rest[-1] is not None or any(segment.page_table is not None for segment in segments)
    return has_any and gpu_of(query) is None


def attend(
    run: Callable[..., _Result],
    query: Tensor,
    segments: Sequence[Segment],
    tail_key: Tensor,
    tail_value: Tensor,
    *rest: Any,
) -> _Result:
    """`segment_attention` on the CPU; arguments as from its checks, all positional, `tail_length` the last."""
    *options, tail_length = rest
    batch, tail = query.shape[0], tail_key.shape[2]
    lengths = [tail] * batch if tail_length is None else tail_length.tolist()
    for row, length in enumerate(lengths):
        if not 0 <= length <= tail:
            raise ValueError(f"tail_length[{row}] is {length}; it must be from 0 to tail_key's {tail} tokens")
    for i, segment in enumerate(segments):
        if segment.page_table is not None:
            _check_entries(f"segments[{i}].page_table", segment)

    alike = len(set(lengths)) <= 1 and all(s.page_table is None or s.page_table.ndim == 1 for s in segments)
    if alike:
        length = lengths[0] if lengths else tail
        runs = [run_ for segment in segments for run_ in _runs(segment, None)]
        return run(query, runs, tail_key[:, :, :length], tail_value[:, :, :length], *options, None)

    return_lse = options[_RETURN_LSE]
    out = check.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        own = list(options)
        if own[_TAIL_FIRST] is not None:
            own[_TAIL_FIRST] = own[_TAIL_FIRST][one]
        result: Any = run(
            query[one],
            [run_ for segment in segments for run_ in _runs(segment, row)],
            tail_key[one, :, :length],
            tail_value[one, :, :length],
            *own,
            None,
        )
        if return_lse:
            out[one], lse[one] = result
        else:
            out[one] = result
    return (out, lse) if return_lse else out


def _check_entries(name: str, segment: Segment) -> None:
    """The entries of pages that hold tokens name pages that exist."""
    pages, page_size = segment.key.shape[:2]
    table: Any = segment.page_table
    if not segment.tokens:
        return
    used = table[..., : -(-segment.tokens // page_size)]
    wrong = ((used < 0) | (used >= pages)).nonzero()
    if wrong.numel():
        where = tuple(wrong[0].tolist())
        has = f"pages 0 to {pages - 1}" if pages else "no pages: give it some, or tokens=0"
        raise IndexError(
            f"{name}[{', '.join(map(str, where))}] is {int(used[where])}; {name.partition('.')[0]}.key has {has}"
        )


def _runs(segment: Segment, row: int | None) -> list[Segment]:
    """The segment without pages: one segment for each run of pages that follow each other in memory.

    Args:
        segment: with or without pages.
        row: the one row of the batch that is wanted; None for all, and then the pages are shared.
    """
    key, value, table = segment.key, segment.value, segment.page_table
    first = segment.first if segment.first is None or row is None else segment.first[row : row + 1]
    if table is None:
        if row is not None:
            key, value = key[row : row + 1], value[row : row + 1]
        return [Segment(key, value, segment.offset, start=segment.start, first=first)]
    _, page_size, heads, head_dim = key.shape
    if not segment.tokens:
        return []
    joined = all(x.stride(0) == page_size * x.stride(1) for x in (key, value))
    entries = (table if table.ndim == 1 else table[row or 0])[: -(-segment.tokens // page_size)].tolist()
    runs: list[tuple[int, int, int]] = []  # first page, pages, tokens before it
    for i, page in enumerate(entries):
        if joined and runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
        else:
            runs.append((page, 1, i * page_size))
    found = []
    for page, count, before in runs:
        tokens = min(count * page_size, segment.tokens - before)
        run_key, run_value = (
            x.as_strided(
                (heads, tokens, head_dim), (x.stride(2), x.stride(1), 1), x.storage_offset() + page * x.stride(0)
            )
            for x in (key, value)
        )
        padding = None if first is None else (first.long() - before).clamp_min(0).int()
        found.append(Segment(run_key, run_value, segment.offset, start=segment.start + before, first=padding))
    return found
