# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`segment_attention` where little or nothing is seen: masks, windows, padding, caps, sinks, extreme scores."""

from __future__ import annotations

import math
import random

import pytest
import reference
import torch
from backends import attention_dtype, attention_dtypes, ops
from kvspeed.segment import Segment
from op_cases import DTYPES, Case, frequencies

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.attention]


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_see(dtype):
    for lengths in ((), (0, 0)):
        case = Case(lengths=lengths, tail=0, rows=3, dtype=dtype)
        out, lse = case.check()
        assert (out == 0).all() and (lse == -math.inf).all()
        sinks = torch.tensor([0.5, -3.0, 1e4, -math.inf])
        out, lse = case.check(sinks=sinks)
        assert (out == 0).all() and torch.equal(lse, sinks[None, :, None].expand(2, 4, 3))


def test_empty_batches_heads_and_rows():
    for shape in ((0, 4, 2), (2, 0, 2), (2, 4, 0)):
        query = torch.empty(*shape, 64, dtype=attention_dtype())
        kv = torch.randn(shape[0], 2, 3, 64).to(query.dtype)
        out, lse = ops.segment_attention(query, [Segment(kv, kv)], kv, kv, inv_freq=None, return_lse=True)
        assert out.shape == query.shape and lse.shape == shape


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [-1e5, -3e4, 3e4, 1e5])
def test_extreme_scores(level, dtype):
    """Scores near +-1e5, where no finite stand-in for -inf is safe, and where float16 products overflow."""
    case = Case(dtype=dtype, rows=2)
    direction = torch.zeros(64, dtype=dtype)
    direction[63] = 1
    size = 300.0
    case.query = (case.query.float() + size * direction).to(dtype)
    for tensor in [segment.key for segment in case.segments] + [case.tail_key]:
        tensor.add_(direction * (math.copysign(size, level)))
    case.inv_freq = frequencies(32)
    scale = abs(level) / size**2
    arguments = (case.query, case.segments, case.tail_key, case.tail_value)
    out, lse = case.run(scale=scale)
    truth, truth_lse = reference.segment_attention(*arguments, inv_freq=case.inv_freq, scale=scale)
    assert (truth_lse.abs() > abs(level) / 2).all()
    # One float32 rounding of a score of this size is one relative error in its weight.
    weight_error = 16 * abs(level) * 2**-24
    tolerance = 4 * weight_error + torch.finfo(dtype).eps
    assert (out.double() - truth).abs().max() <= tolerance * case.tail_value.float().abs().max().clamp_min(4)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=2**-20, atol=0)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0, 50.0])
def test_softcap(softcap, dtype):
    """The cap comes before the mask: what is hidden stays hidden, however small the cap."""
    Case(dtype=dtype, size=2.0).check(softcap=softcap)
    Case(dtype=dtype, rows=9, tail=9, lengths=(), size=3.0).check(softcap=softcap, scale=1.0)
    Case(dtype=dtype, rows=4, tail=20).check(softcap=softcap, window=5, tail_start=100)


@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -0.3, 1e-3, 0.0625])
def test_scale(scale):
    for dtype in attention_dtypes():
        Case(dtype=dtype, rows=2).check(scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(dtype):
    sinks = torch.tensor([0.0, 3.0, -5.0, 40.0])
    case = Case(dtype=dtype, rows=3, tail=2)
    out, lse = case.check(sinks=sinks)
    case.check(sinks=sinks, softcap=2.0, scale=3.0)  # neither scaled nor capped
    with torch.no_grad():
        again = case.run(sinks=torch.nn.Parameter(sinks.to(torch.bfloat16)))
    assert reference.same_bits(again[0], out) and reference.same_bits(again[1], lse)


@pytest.mark.every_isa
@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 9, 16, 31, 1000, 2**31])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_windows(rows, window):
    """Segments partly, wholly and not at all within the window, with holes and at negative starts."""
    case = Case(rows=rows, tail=9, lengths=(), dtype=random.choice(attention_dtypes()))
    case.segments = [
        case.segment(4, 20, start=-20),  # positions 0 to 3
        case.segment(6, 0, start=4, shared=True),  # 4 to 9
        case.segment(5, -100, start=112),  # 12 to 16, after a hole
        case.segment(2, 0, start=500),  # beyond every query: never within a window
    ]
    case.check(window=window, tail_start=17)
    case.check(window=window, tail_start=17, tail_first=torch.tensor([0, 4], dtype=torch.int32))
    case.tail_key, case.tail_value = case.kv(0), case.kv(0)
    case.check(window=window, tail_start=17 + rows)


def test_a_window_as_wide_as_the_prompt_hides_nothing():
    case = Case(rows=4, tail=4, lengths=())
    case.segments = [case.segment(8, 0, start=0), case.segment(8, 8, start=0)]
    wide = case.check(window=20, tail_start=16)
    for a, b in zip(wide, case.check(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=8 * max(torch.finfo(a.dtype).eps, 1e-6))
    narrow = case.check(window=16, tail_start=16)
    assert not torch.allclose(wide[0][:, :, -1], narrow[0][:, :, -1])


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding(dtype):
    """Padding may hold NaN; a row that is all padding gives 0 and -inf, and no NaN."""
    case = Case(batch=4, rows=3, tail=6, lengths=(), dtype=dtype)
    first = torch.tensor([0, 3, 9, 12], dtype=torch.int32)
    tail_first = torch.tensor([0, 5, 0, 6], dtype=torch.int32)
    shared, own = case.segment(12, 5, shared=True, first=first), case.segment(12, -8, first=first)
    case.segments = [shared, own]
    for row in range(4):
        for tensor in (own.key, own.value):
            tensor[row, :, : first[row]] = math.nan
        for tensor in (case.tail_key, case.tail_value):
            tensor[row, :, : tail_first[row]] = math.nan
    out, lse = case.run(tail_first=tail_first)
    assert not out.isnan().any() and not lse.isnan().any()
    assert (out[3] == 0).all() and (lse[3] == -math.inf).all()
    for tensor in (own.key, own.value, case.tail_key, case.tail_value):
        tensor.nan_to_num_(0.0)
    clean = case.check(tail_first=tail_first)
    assert reference.same_bits(out, clean[0]) and reference.same_bits(lse, clean[1])
    for row in range(4):  # a padded row equals the same row without the padding
        case_row = Case(batch=1, rows=3, dtype=dtype, lengths=())
        case_row.query = case.query[row : row + 1]
        f, t = int(first[row]), int(tail_first[row])
        case_row.segments = [
            Segment(shared.key[:, f:], shared.value[:, f:], 5),
            Segment(own.key[row : row + 1, :, f:], own.value[row : row + 1, :, f:], -8),
        ]
        case_row.tail_key, case_row.tail_value = (x[row : row + 1, :, t:] for x in (case.tail_key, case.tail_value))
        tolerance = 8 * max(torch.finfo(dtype).eps, 1e-6)
        torch.testing.assert_close(case_row.check()[0][0], out[row], rtol=0, atol=tolerance)


def test_padding_beyond_the_segment():
    case = Case(lengths=(), tail=3)
    for first in ([-5, 100], [2**31 - 1, -(2**31)]):
        vector = torch.tensor(first, dtype=torch.int32)
        case.segments = [case.segment(6, 2, first=vector)]
        case.check(tail_first=vector)


@pytest.mark.every_isa
def test_invisible_values_do_not_leak():
    """NaN and infinity in keys and values that causality or the window hides."""
    case = Case(rows=3, tail=8, lengths=())
    case.segments = [case.segment(6, 0, start=0)]
    clean = case.run(window=5, tail_start=6)  # queries at 11, 12, 13: they see 7 to 13
    for bad in (math.nan, math.inf, -math.inf):
        for tensor in (case.segments[0].key, case.segments[0].value):
            tensor.fill_(bad)
        for tensor in (case.tail_key, case.tail_value):
            tensor[:, :, 0] = bad
        out = case.run(window=5, tail_start=6)
        assert reference.same_bits(out[0], clean[0]) and reference.same_bits(out[1], clean[1])
    case = Case(rows=4, tail=4, lengths=())
    clean = case.run()
    case.tail_key[:, :, 2:], case.tail_value[:, :, 2:] = 1e4, -6e4  # seen by the last two rows only
    out = case.run()
    assert reference.same_bits(out[0][:, :, :2], clean[0][:, :, :2])
    assert reference.same_bits(out[1][:, :, :2], clean[1][:, :, :2])


def test_visible_nan_is_not_hidden():
    for dtype in attention_dtypes():
        case = Case(dtype=dtype)
        case.segments[1].value[0, 0, 3, 7] = math.nan
        out, _ = case.run()
        expected = torch.zeros_like(out, dtype=torch.bool)
        expected[0, :2, :, 7] = True
        assert torch.equal(out.isnan(), expected)
