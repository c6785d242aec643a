# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One run of keys and values in memory, and the number that says where it is used."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Segment"]


class Segment:
    """Keys and values where they lie, plus an offset.

    A prompt is a list of segments. They are read in place: `kvspeed.ops.segment_attention` rotates the query by minus
    the offset instead of rotating the keys, so one copy serves every request and every position.

    A segment is made for each layer at each step, so making one only stores the fields; shapes, dtypes and ranges are
    checked by the op that reads it.

    Attributes:
        key: `[H_kv, T, D]`, shared by all rows of the batch, or `[B, H_kv, T, D]`. Any strides, stride 1 along D.
        value: the same shape and dtype; its strides are its own.
        offset: the position the segment is used at minus the position its keys were rotated for.
        start: the position token 0 was rotated for; only a sliding window asks for it.
        first: int32 `[B]` or None; tokens before `first[b]` are padding in row b, and invisible.
        page_table: int32 `[n]`, shared by all rows, or `[B, n]`; None where there are no pages. With it key and value
            are `[pages, page_size, H_kv, D]` (a layer of `rope_concat`'s paged output), and token t lies in page
            `page_table[t // page_size]`. Entries of pages beyond the last token are never read.
    """

    __slots__ = ("_length", "first", "key", "offset", "page_table", "start", "value")

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        offset: int = 0,
        *,
        start: int = 0,
        first: Tensor | None = None,
        page_table: Tensor | None = None,
        tokens: int | None = None,
    ) -> None:
        """`tokens`: how many a paged segment holds; None is as many as its pages. Without pages it must be None."""
        self.key = key
        self.value = value
        self.offset = offset
        self.start = start
        self.first = first
        self.page_table = page_table
        self._length = tokens

    @property
    def tokens(self) -> int:
        """How many tokens the segment holds, padding included."""
        if self.page_table is None:
            return self.key.shape[-2]
        return self.page_table.shape[-1] * self.key.shape[1] if self._length is None else self._length

    def __repr__(self) -> str:
        shape = list(self.key.shape) if isinstance(self.key, Tensor) else type(self.key).__name__
        dtype = self.key.dtype if isinstance(self.key, Tensor) else "?"
        padding = "" if self.first is None else ", first=..."
        paged = "" if self.page_table is None else f", page_table=..., tokens={self.tokens}"
        return f"Segment(key={shape} {dtype}, offset={self.offset}, start={self.start}{padding}{paged})"
