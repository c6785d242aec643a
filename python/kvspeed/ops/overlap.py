# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Do strided tensors share memory? Answered exactly, without touching the memory.

An element of a tensor lies at `sum(index[i] * stride[i])`. Two elements meet when a bounded integer equation has a
solution; the strides of real layouts (interleaved K and V, pages padded to a block, slices of one pool) make the
search short, because each stride is larger than all smaller ones together. Layouts for which it is not short run out
of budget and count as sharing.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["overlaps_itself", "share_memory"]

_BUDGET = 20_000


def _solvable(terms: list[tuple[int, int, int]], target: int, *, trivial: bool) -> bool:
    """Is there a c with `low <= c <= high` for each `(stride, low, high)` and `sum(c * stride) == target`?

    Args:
        terms: the strides, all positive, and the range of each coefficient.
        target: the sum that is looked for.
        trivial: whether all coefficients may be zero.
    """
    terms = sorted(terms, reverse=True)
    lows, highs = [0], [0]  # reach of the terms from i on, built from the last backwards
    for stride, low, high in reversed(terms):
        lows.append(lows[-1] + low * stride)
        highs.append(highs[-1] + high * stride)
    lows.reverse()
    highs.reverse()

    stack = [(0, target, trivial)]
    for _ in range(_BUDGET):
        if not stack:
            return False
        depth, rest, done = stack.pop()
        if depth == len(terms):
            if rest == 0 and done:
                return True
            continue
        stride, low, high = terms[depth]
        first = max(low, -((highs[depth + 1] - rest) // stride))
        last = min(high, (rest - lows[depth + 1]) // stride)
        last = min(last, first + _BUDGET)
        stack.extend((depth + 1, rest - c * stride, done or c != 0) for c in range(first, last + 1))
    return True


def _extents(tensor: Tensor) -> list[tuple[int, int]]:
    """`(stride in bytes, size)` of each dimension that spreads elements, and of the bytes of one element."""
    item = tensor.element_size()
    spread = [(stride * item, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return [*spread, (1, item)]


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two different indices of the tensor name the same memory."""
    if tensor.numel() == 0:
        return False
    extents = _extents(tensor)
    reach = 0
    for stride, size in sorted(extents):
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False  # every stride steps over all smaller ones: the usual layouts
    if any(stride == 0 for stride, _ in extents):
        return True
    return _solvable([(stride, 1 - size, size - 1) for stride, size in extents], 0, trivial=False)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether an element of `a` and one of `b` lie in the same memory."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    extents_a, extents_b = _extents(a), _extents(b)
    distance = b.data_ptr() - a.data_ptr()
    reach_a = sum(stride * (size - 1) for stride, size in extents_a)
    reach_b = sum(stride * (size - 1) for stride, size in extents_b)
    if distance > reach_a or -distance > reach_b:
        return False
    ranges: dict[int, tuple[int, int]] = {}
    for stride, size in extents_a:
        low, high = ranges.get(stride, (0, 0))
        ranges[stride] = (low, high + size - 1)
    for stride, size in extents_b:
        low, high = ranges.get(stride, (0, 0))
        ranges[stride] = (low - (size - 1), high)
    ranges.pop(0, None)
    return _solvable([(stride, low, high) for stride, (low, high) in ranges.items()], distance, trivial=True)
