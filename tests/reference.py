# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the ops must compute, written as plainly as possible, in float64.

Each op has two versions here. `<op>` is the truth: float64, keys rotated (the kernels rotate the query), one big mask.
`<op>_torch` is what a careful PyTorch user gets in the tensors' own dtype; `accept` allows a kernel twice its error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvspeed.segment import Segment
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------------------
# Rotary embedding
# ----------------------------------------------------------------------------------------------------------------------


def rope_tables(offset: int | Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of `offset * inv_freq` in float64, from the model's own float32 frequencies."""
    angle = torch.as_tensor(offset, dtype=torch.float64)[..., None] * inv_freq.double()
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turns the first R dimensions of `x` `[..., D]`; cos and sin `[..., R/2]` broadcast against it."""
    half = cos.shape[-1]
    turned, kept = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    first, second = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((turned, kept), -1)


def rotate(x: Tensor, offset: int, inv_freq: Tensor, interleaved: bool = False) -> Tensor:
    """`x` `[L, ..., D]` turned by `offset` positions, in float64; `inv_freq` `[R/2]` or `[L, R/2]`."""
    cos, sin = rope_tables(offset, inv_freq)
    if inv_freq.ndim == 2:
        spread = (inv_freq.shape[0], *[1] * (x.ndim - 2), inv_freq.shape[1])
        cos, sin = cos.view(spread), sin.view(spread)
    return apply_rope(x.double(), cos, sin, interleaved)


def _rotate_float32(x: Tensor, offset: int, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """As a careful user turns keys: right tables, float32 arithmetic, one rounding to the keys' dtype."""
    cos, sin = rope_tables(offset, inv_freq)
    return apply_rope(x.float(), cos.float(), sin.float(), interleaved).to(x.dtype)


def rope_concat(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[int],
    inv_freq: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Keys `[L, H, sum T, D]` in float64, and the values in their own dtype, which must be met bit for bit."""
    turned = [rotate(key, offset, inv_freq, interleaved) for key, offset in zip(keys, offsets, strict=True)]
    return torch.cat(turned, 2), torch.cat(list(values), 2)


def rope_concat_torch(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[int],
    inv_freq: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same in the keys' dtype, as model code does it: float32 tables cast down, then two products and a sum."""
    turned = []
    for key, offset in zip(keys, offsets, strict=True):
        angle = torch.tensor(float(offset)) * inv_freq
        cos, sin = angle.cos().to(key.dtype), angle.sin().to(key.dtype)
        if inv_freq.ndim == 2:
            cos, sin = cos[:, None, None], sin[:, None, None]
        turned.append(apply_rope(key, cos, sin, interleaved))
    return torch.cat(turned, 2), torch.cat(list(values), 2)


# ----------------------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------------------


def _rows(tensor: Tensor, batch: int) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor[None].expand(batch, *tensor.shape)


def attention_mask(
    query: Tensor,
    segments: Sequence[Segment],
    tail_key: Tensor,
    *,
    window: int | None = None,
    tail_start: int | None = None,
    tail_first: Tensor | None = None,
) -> Tensor:
    """bool `[B, S_q, N]`: which query row sees which key, the segments' keys first, then the tail's."""
    batch, _, rows, _ = query.shape
    tail = tail_key.shape[2]
    row = torch.arange(rows)[:, None]
    parts, positions = [], []
    for segment in segments:
        index = torch.arange(segment.tokens)
        first = torch.zeros(batch, dtype=torch.int64) if segment.first is None else segment.first.long()
        parts.append((index >= first[:, None, None]).expand(batch, rows, -1))
        positions.append(segment.start + segment.offset + index)
    index = torch.arange(tail)
    first = torch.zeros(batch, dtype=torch.int64) if tail_first is None else tail_first.long()
    parts.append((index >= first[:, None, None]) & (index <= tail - rows + row))
    positions.append((tail_start or 0) + index)
    mask = torch.cat(parts, -1)
    if window is not None:
        key_position = torch.cat(positions)
        query_position = (tail_start or 0) + tail - rows + row
        mask = mask & (key_position <= query_position) & (key_position > query_position - window)
    return mask


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Eager attention in the dtype of `query` (softmax in float32 at least); value may have its own head size."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = (query @ key.transpose(-1, -2)) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide = wide.masked_fill(~mask[:, None], float("-inf"))
    if sinks is not None:
        column = sinks.to(wide.dtype)[None, :, None, None].expand(*wide.shape[:3], 1)
        wide = torch.cat((wide, column), -1)
    if wide.shape[-1] == 0:
        wide = torch.full((*wide.shape[:3], 1), float("-inf"), dtype=wide.dtype)
    lse = torch.logsumexp(wide, -1)
    weights = torch.exp(wide - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])[..., : key.shape[2]]
    return weights.to(query.dtype) @ value, lse


def segment_attention(
    query: Tensor,
    segments: Sequence[Segment],
    tail_key: Tensor,
    tail_value: Tensor,
    *,
    inv_freq: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    tail_start: int | None = None,
    tail_first: Tensor | None = None,
    sinks: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64, by rotating the keys to where they are used."""
    batch = query.shape[0]
    mask = attention_mask(query, segments, tail_key, window=window, tail_start=tail_start, tail_first=tail_first)
    keys = [_rows(segment.key, batch).double() for segment in segments]
    if inv_freq is not None:
        keys = [rotate(key, seg.offset, inv_freq, interleaved) for key, seg in zip(keys, segments, strict=True)]
    key = torch.cat([*keys, tail_key.double()], 2)
    value = torch.cat([*(_rows(segment.value, batch).double() for segment in segments), tail_value.double()], 2)
    seen = mask.any(1)[:, None, :, None]  # what nobody sees may hold anything, NaN too
    return _attend(query.double(), key.where(seen, 0.0), value.where(seen, 0.0), mask, scale, softcap, sinks)


def segment_attention_torch(
    query: Tensor,
    segments: Sequence[Segment],
    tail_key: Tensor,
    tail_value: Tensor,
    *,
    inv_freq: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    tail_start: int | None = None,
    tail_first: Tensor | None = None,
    sinks: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same in the query's dtype: keys rotated and rounded, as an eager model has them; float32 LSE."""
    batch = query.shape[0]
    mask = attention_mask(query, segments, tail_key, window=window, tail_start=tail_start, tail_first=tail_first)
    keys = [_rows(segment.key, batch) for segment in segments]
    if inv_freq is not None:
        keys = [
            _rotate_float32(key, seg.offset, inv_freq, interleaved) if seg.offset else key
            for key, seg in zip(keys, segments, strict=True)
        ]
    key = torch.cat([*keys, tail_key], 2)
    value = torch.cat([*(_rows(segment.value, batch) for segment in segments), tail_value], 2)
    seen = mask.any(1)[:, None, :, None]
    return _attend(query, key.where(seen, 0.0), value.where(seen, 0.0), mask, scale, softcap, sinks)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64."""
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(lse_a.double() - base), torch.exp(lse_b.double() - base)
    return out_a.double() * weight_a[..., None] + out_b.double() * weight_b[..., None], lse


def merge_states_torch(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float32, rounded to out_a's dtype at the end."""
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    return (out_a.float() * weight_a[..., None] + out_b.float() * weight_b[..., None]).to(out_a.dtype), lse


# ----------------------------------------------------------------------------------------------------------------------
# Acceptance
# ----------------------------------------------------------------------------------------------------------------------


def accept(
    got: Tensor, truth: Tensor, own: Tensor, what: str = "output", factor: float = 2.0, slack: float = 0.0
) -> None:
    """Asserts that `got` errs at most `factor` times as much as PyTorch's `own` result of the same dtype.

    One unit in the last place of the largest element (and `slack`) is added, so that a lucky `own` does not fail a
    kernel. Infinities must agree exactly, and NaN is never right.
    """
    assert got.shape == truth.shape, f"{what}: shape {list(got.shape)} instead of {list(truth.shape)}"
    assert not got.isnan().any(), f"{what}: {int(got.isnan().sum())} NaN"
    infinite = truth.isinf()
    assert torch.equal(got.isinf(), infinite), f"{what}: infinities in the wrong places"
    assert torch.equal(got[infinite].double(), truth[infinite]), f"{what}: infinities of the wrong sign"
    if got.numel() == 0 or infinite.all():
        return
    got, truth, own = got[~infinite], truth[~infinite], own[~infinite]
    slack = slack + torch.finfo(got.dtype).eps * truth.abs().max().item()
    error = (got.double() - truth).abs().max().item()
    allowed = factor * (own.double() - truth).abs().max().item() + slack
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g} ({got.dtype})"


def score_rounding(query: Tensor, segments: Sequence[Segment], tail_key: Tensor, scale: float | None = None) -> float:
    """What rounding the terms of the largest score to float32 may change in it: the floor of any float32 result."""
    keys = [_rows(segment.key, query.shape[0]) for segment in segments] + [tail_key]
    norm = max((key.nan_to_num().float().norm(dim=-1).max().item() for key in keys if key.numel()), default=0.0)
    scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)
    return 2**-24 * scale * norm * query.float().norm(dim=-1).max().item()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of bits: -0.0 differs from 0.0, and NaN equals the same NaN."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def ulps_of_row_maximum(a: Tensor, b: Tensor) -> float:
    """The largest difference along the last dimension, in units in the last place of that row's maximum."""
    if a.numel() == 0:
        return 0.0
    largest = torch.maximum(a.abs(), b.abs()).amax(-1, keepdim=True).double()
    ulp = torch.exp2(torch.floor(torch.log2(largest.clamp_min(1e-30)))) * torch.finfo(a.dtype).eps
    return float(((a.double() - b.double()).abs() / ulp).max())


def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
    """8-bit `[L, H, T, D]` times the scale `[L, H]` of its layer and head: exact numbers, one float32 product."""
    return stored.float() * scale[:, :, None, None]
