# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One run of keys and values in memory, and the number that says where it is used; and lists of them that stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

__all__ = ["Segment", "SegmentList"]


class Segment:
    """Keys and values where they lie, plus an offset.

    A prompt is a list of segments. They are read in place: `kvspeed.ops.segment_attention` rotates the query by minus
    the offset instead of rotating the keys, so one copy serves every request and every position.

    Making one only stores the fields; shapes, dtypes and ranges are checked by the op that reads it. Where the same
    segments are read again and again, as by every decoding step of a layer, give them as a `SegmentList`.

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


class SegmentList(Sequence[Segment]):
    """Segments that stay as they are, so that the kernels read and check them once, not at every call.

    It is a copy: what is done later to the list, to its segments, or to their tensors as objects (`t.data = x`,
    `t.resize_(...)`) does not change it, and it keeps the memory alive. The numbers are not copied: those that are
    written into that memory are seen. Only the memory itself must not be taken away
    (`t.untyped_storage().resize_(...)`, or a `resize_` that needs more of it).

    What it gives out, by index or in a loop, are copies too. As with a list of segments, shapes and dtypes are checked
    by the op that reads it.

    Raises:
        TypeError: something is not a Segment.
    """

    __slots__ = ("_read", "_segments")

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        given = list(segments)
        for i, segment in enumerate(given):
            if not isinstance(segment, Segment):
                raise TypeError(f"segments[{i}] must be a kvspeed.Segment, got {type(segment).__name__}")
        self._segments = tuple(map(_copy, given))
        self._read: Any = None  # what the compiled code has read of them

    @classmethod
    def adopt(cls, segments: Iterable[Segment]) -> SegmentList:
        """The same without a copy, of segments and tensors that nobody else has."""
        own = cls()
        own._segments = tuple(segments)
        return own

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return map(_copy, self._segments)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        if isinstance(index, slice):
            return [_copy(segment) for segment in self._segments[index]]
        return _copy(self._segments[index])

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentList, (list(self),)

    def __repr__(self) -> str:
        return f"SegmentList({list(self._segments)!r})"


def _copy(segment: Segment) -> Segment:
    return Segment(
        _alias(segment.key),
        _alias(segment.value),
        segment.offset,
        start=segment.start,
        first=None if segment.first is None else _alias(segment.first),
        page_table=None if segment.page_table is None else _alias(segment.page_table),
        tokens=segment._length,
    )


def _alias(tensor: Any) -> Any:
    """Another tensor over the same memory, which only its owner can turn to other memory; what is not plain stays."""
    if type(tensor) not in (Tensor, Parameter):
        return tensor
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return tensor  # for the op to refuse
    alias = tensor.detach()
    return alias.requires_grad_() if tensor.requires_grad else alias
