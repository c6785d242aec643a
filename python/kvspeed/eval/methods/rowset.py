# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Causal attention of scattered rows: query i stands at position rows[i] and sees the keys 0 .. rows[i], no others.

A causal mask aligned at the bottom right, which several public programs use here, lets scattered rows see keys that
come after them. Here the mask is by absolute index; it is never formed for all pairs where rows are many: runs of
neighbouring rows need none, and the rest is masked block by block, over the keys up to the block's last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch.nn import functional

from kvspeed import ops
from kvspeed.ops.attention import covers

__all__ = ["RowSet"]

_SHORT_RUN = 8  # mean length of runs from which one kernel call a run pays
_CPU_BLOCK = (32, 256)  # rows that are masked together: few waste less on keys that they do not see
_GPU_BLOCK = 1024
_MASK_BYTES = 1 << 30  # masks up to this size are kept for the next layer; larger ones are made again
_PADDED = 1 / 4  # of a prompt: up to here, queries for the keys before a run are cheaper than a mask


class RowSet:
    """Positions of the rows that are computed, in rising order, none twice.

    Args:
        rows: a range, positions, or int64 `[n]`.
        device: where attention runs.

    Attributes:
        index: int64 `[n]` on the device.
    """

    def __init__(self, rows: Sequence[int] | torch.Tensor, device: torch.device) -> None:
        self._run = rows if isinstance(rows, range) and rows.step == 1 else None
        given = rows if isinstance(rows, torch.Tensor) else torch.tensor(list(rows), dtype=torch.long)
        self._host = given if given.device.type == "cpu" else None  # None: asking for a number would wait for the GPU
        self.index = given.to(device)
        self._masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = {}

    def __len__(self) -> int:
        return self.index.numel()

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring rows as `(first position, length)`, in order."""
        rows = self.index.cpu() if self._host is None else self._host
        if not rows.numel():
            return []
        breaks = (rows[1:] - rows[:-1] != 1).nonzero().flatten() + 1
        begins = [0, *breaks.tolist(), rows.numel()]
        return [(int(rows[a]), b - a) for a, b in pairwise(begins)]

    def pairs(self, window: int | None) -> int:
        """Pairs (row, key) that see each other when every position up to the last row holds a key."""
        seen = self.index + 1
        return int((seen if window is None else seen.clamp_max(window)).sum())

    def write(self, storage: torch.Tensor, new: torch.Tensor) -> None:
        """Put `new` `[1, H, n, D]` into `storage` `[1, H, capacity, D]` at the rows."""
        if self._run is not None:
            storage[:, :, self._run.start : self._run.stop] = new
        else:
            storage.index_copy_(2, self.index, new.to(storage.dtype))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attention of `query` `[1, H_q, n, D]` at the rows over `key`, `value` `[1, H_kv, T, D]`; `[1, H_q, n, D]`.

        Args:
            query: rotated at the rows' positions.
            key: of all positions; those after the last row are not read.
            value: the same shape.
            scale: of the scores.
            softcap: `softcap * tanh(score / softcap)` where positive.
            window: a query at p sees m where p - window < m <= p; None: all of the past.
        """
        if self._host is not None and len(self) >= _SHORT_RUN * len(self.runs):
            return self._by_runs(query, key, value, scale, softcap, window)
        return self._by_blocks(query, key, value, scale, softcap, window, 0, len(self))

    def _by_runs(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float,
        window: int | None,
    ) -> torch.Tensor:
        parts, done = [], 0
        for begin, count in self.runs:
            end = begin + count
            rows = query[:, :, done : done + count]
            if begin <= _PADDED * end and count > 64 and not softcap and window is None:
                parts.append(_padded(rows, key[:, :, :end], value[:, :, :end], scale))
            elif covers(rows):
                seen = {"softcap": softcap, "window": window, "tail_start": 0, "inv_freq": None}
                out = ops.segment_attention(rows, [], key[:, :, :end], value[:, :, :end], scale=scale, **seen)  # type: ignore[arg-type]
                parts.append(out)  # type: ignore[arg-type]
            else:
                parts.append(self._by_blocks(query, key, value, scale, softcap, window, done, done + count))
            done += count
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _by_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float,
        window: int | None,
        begin: int,
        end: int,
    ) -> torch.Tensor:
        least, most = _CPU_BLOCK
        size = _GPU_BLOCK if query.is_cuda else min(max((end - begin) // 16, least), most)
        out = torch.empty_like(query[:, :, begin:end])
        for first in range(begin, end, size):
            last = min(first + size, end)
            keys = key.shape[2] if self._host is None else int(self._host[last - 1]) + 1
            mask = self._mask(first, last, keys, window, query.dtype)
            out[:, :, first - begin : last - begin] = _masked(
                query[:, :, first:last], key[:, :, :keys], value[:, :, :keys], mask, scale, softcap
            )
        return out

    def _mask(self, first: int, last: int, keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive `[last - first, keys]`, made once for all layers where there is room."""
        found = self._masks.get((first, window, dtype))
        if found is None or found.shape != (last - first, keys):
            rows, columns = self.index[first:last, None], torch.arange(keys, device=self.index.device)
            seen = columns <= rows
            if window is not None:
                seen &= columns > rows - window
            found = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            if len(self) * keys * found.element_size() <= _MASK_BYTES:
                self._masks[first, window, dtype] = found
        return found


def _padded(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The last rows of a square causal attention; queries of zeros stand for the others."""
    before = key.shape[2] - rows.shape[2]
    query = functional.pad(rows, (0, 0, before, 0)) if before else rows
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out[:, :, before:]


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    if not softcap:
        if grouped and query.is_cuda:  # no fused kernel takes a mask and groups of heads
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
            grouped = False
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap) + mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value
