# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Hostile memory: tensors embedded in NaN, canaries around outputs, storage larger than the machine."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import backends
import torch
from torch import Tensor

# What an unused entry of a page table holds: far outside, and close to wrapping in 32 bits.
UNUSED_PAGE = 2147480000

_CANARY = {
    torch.float32: (torch.int32, 0x7FC0BEEF),
    torch.bfloat16: (torch.int16, 0x7FCB),
    torch.float16: (torch.int16, 0x7ECB),
}


class Embedded:
    """A tensor of a given shape and order in memory, inside a larger storage filled with NaN canaries.

    Attributes:
        view: the tensor, NaN at first; dimensions lie in memory in `order`, with gaps between them.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        order: Sequence[int] | None = None,
        gap: int = 1,
        shift: int = 0,
    ) -> None:
        """Args:
        order: the dimensions from the outermost in memory to the innermost; the last one must stay innermost.
        gap: how many extra entries each inner dimension gets; `gap * 3` elements follow each head.
        shift: elements before the first one, which misalign it.
        """
        order = list(range(len(shape))) if order is None else list(order)
        stride, step = [0] * len(shape), 1
        for dimension in reversed(order):
            stride[dimension] = step
            step *= shape[dimension] + (3 * gap if dimension == len(shape) - 1 else gap)
        integer, pattern = _CANARY[dtype]
        self._bits = torch.full((step + shift + 64,), pattern, dtype=integer)
        self._outside = torch.ones(step + shift + 64, dtype=torch.bool)
        self._outside.as_strided(shape, stride, shift).fill_(False)
        self._pattern = pattern
        self.view = self._bits.view(dtype).as_strided(shape, stride, shift)

    def check(self, written: Tensor | None = None) -> None:
        """Asserts that nothing outside the view changed, nor inside where `written` (bool, its shape) is False."""
        assert (self._bits[self._outside] == self._pattern).all(), "memory outside the tensor was written"
        if written is not None:
            bits = self._bits.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
            assert (bits[~written] == self._pattern).all(), "memory beyond the tokens was written"


def embed(values: Tensor, *, order: Sequence[int] | None = None, gap: int = 1, shift: int = 0) -> Tensor:
    """The same values in a hostile layout, surrounded by NaN."""
    held = Embedded(values.shape, values.dtype, order=order, gap=gap, shift=shift)
    held.view.copy_(values)
    return held.view


def lazy_storage(elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros that may be far larger than the memory: pages come to exist where they are touched.

    On a GPU there is no such thing; it has the memory, and the tensor lies there.
    """
    if backends.on_cuda():
        return torch.zeros(elements, dtype=dtype, device=backends.CUDA)
    size = elements * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
