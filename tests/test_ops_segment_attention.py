# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`segment_attention` against the float64 oracle, which rotates the keys where the kernel rotates the query."""

from __future__ import annotations

import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvspeed import ops
from kvspeed.segment import Segment
from poison import embed, lazy_storage

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OFFSETS = [0, 1, -1, 4096, 65535, 131071, -131071]


@pytest.fixture(autouse=True)
def isa(request):
    """The instruction set of a test: the best, unless the test asks for every one."""
    with ops.cpu_isa(getattr(request, "param", "auto")):
        yield


every_isa = pytest.mark.parametrize("isa", ops.cpu_isas(), indirect=True)


def frequencies(rotary_dim: int, theta: float = 10000.0) -> torch.Tensor:
    return theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / max(rotary_dim, 1))


class Case:
    """Random inputs of one shape. Segments with `rows` have their own keys in each batch row, others share them."""

    def __init__(
        self,
        *,
        batch=2,
        heads=4,
        heads_kv=2,
        rows=1,
        head_dim=64,
        tail=5,
        lengths=(7, 9),
        dtype=torch.float32,
        size=1.0,
    ) -> None:
        self.batch, self.heads_kv, self.head_dim, self.dtype, self.size = batch, heads_kv, head_dim, dtype, size
        self.query = self.random(batch, heads, rows, head_dim)
        self.tail_key, self.tail_value = self.kv(tail), self.kv(tail)
        self.segments = [self.segment(n, 3 + 10 * i, shared=i % 2 == 0) for i, n in enumerate(lengths)]
        self.inv_freq = frequencies(head_dim)

    def random(self, *shape) -> torch.Tensor:
        return (self.size * torch.randn(shape)).to(self.dtype)

    def kv(self, tokens) -> torch.Tensor:
        return self.random(self.batch, self.heads_kv, tokens, self.head_dim)

    def segment(self, tokens, offset=0, *, shared=False, **options) -> Segment:
        shape = (self.heads_kv, tokens, self.head_dim) if shared else (self.batch, self.heads_kv, tokens, self.head_dim)
        return Segment(self.random(*shape), self.random(*shape), offset, **options)

    def run(self, **options):
        arguments = (self.query, self.segments, self.tail_key, self.tail_value)
        return ops.segment_attention(*arguments, inv_freq=self.inv_freq, return_lse=True, **options)

    def check(self, split_tokens=None, **options):
        """The op against truth and against PyTorch in the same dtype."""
        arguments = (self.query, self.segments, self.tail_key, self.tail_value)
        out, lse = self.run(split_tokens=split_tokens, **options)
        assert out.dtype == self.dtype and out.shape == self.query.shape and lse.dtype == torch.float32
        truth = reference.segment_attention(*arguments, inv_freq=self.inv_freq, **options)
        own = reference.segment_attention_torch(*arguments, inv_freq=self.inv_freq, **options)
        rounding = reference.score_rounding(self.query, self.segments, self.tail_key, options.get("scale"))
        reference.accept(out, truth[0], own[0], "output", slack=rounding * truth[0].abs().max().item())
        reference.accept(lse, truth[1], own[1], "lse", slack=rounding)
        return out, lse

    def errors(self):
        """The largest error of the output, and PyTorch's own."""
        arguments = (self.query, self.segments, self.tail_key, self.tail_value)
        truth, _ = reference.segment_attention(*arguments, inv_freq=self.inv_freq)
        own, _ = reference.segment_attention_torch(*arguments, inv_freq=self.inv_freq)
        return [(x.double() - truth).abs().max().item() for x in (self.run()[0], own)]


def test_alone_returns_the_output_only():
    case = Case()
    out = ops.segment_attention(case.query, case.segments, case.tail_key, case.tail_value, inv_freq=case.inv_freq)
    assert isinstance(out, torch.Tensor) and reference.same_bits(out, case.run()[0])


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 80, 96, 112, 128, 192, 248, 256])
def test_head_dims(head_dim, dtype):
    for rows in (1, 3):
        Case(head_dim=head_dim, dtype=dtype, rows=rows, lengths=(33, 1, 70), tail=6).check()


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 71])
def test_groups(group, dtype):
    for heads_kv, rows in ((1, 1), (3, 2)):
        Case(heads=group * heads_kv, heads_kv=heads_kv, rows=rows, dtype=dtype, lengths=(65, 20)).check()


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 2, 16, 20, 32, 64])
def test_rotary_dims(rotary_dim, interleaved, dtype):
    for head_dim in (64, 80):
        case = Case(head_dim=head_dim, dtype=dtype, rows=2)
        case.inv_freq = frequencies(rotary_dim)
        case.check(interleaved=interleaved)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_offsets(interleaved, dtype):
    case = Case(lengths=(), dtype=dtype)
    case.segments = [case.segment(6, offset) for offset in OFFSETS]
    case.check(interleaved=interleaved)
    for offset in (*OFFSETS, 2**31, -(2**31)):
        case.segments = [case.segment(6, offset, shared=True)]
        case.check(interleaved=interleaved)


@every_isa
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 16, 17, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_rows_and_tails(rows, dtype):
    """Bottom-right causality, and tails that are empty, shorter than the query, equal, and longer."""
    for tail in sorted({0, 1, rows - 1, rows, rows + 1, rows + 33}):
        Case(batch=1, rows=rows, tail=tail, dtype=dtype, lengths=random.choice([(), (7, 9)])).check()


LENGTHS = [(), (0,), (1,), (0, 0, 3, 0), (15, 16, 17), (63, 64, 65), (127, 129, 255, 257), (4097,)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("tail", [0, 1, 130])
def test_lengths(tail, lengths):
    Case(lengths=lengths, tail=tail, dtype=random.choice(DTYPES), heads=6, rows=random.choice([1, 4])).check()


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_pytorchs(dtype):
    """Over many cases, where luck evens out, the kernel's errors are no larger than PyTorch's."""
    cases = [Case(heads=8, rows=2, lengths=(60, 20), dtype=dtype).errors() for _ in range(12)]
    mine, own = (sum(column) for column in zip(*cases, strict=True))
    assert mine <= 1.5 * own


def test_many_segments():
    case = Case(lengths=[random.randrange(12) for _ in range(150)], dtype=torch.bfloat16)
    case.check()
    case.check(split_tokens=16)
    case.segments = tuple(case.segments)
    case.check()


def test_the_same_segment_many_times():
    case = Case(lengths=())
    segment = case.segment(11, 0, shared=True)
    case.segments = [Segment(segment.key, segment.value, offset) for offset in (0, 11, 22, 22)]
    out, lse = case.check()
    case.segments = case.segments[::-1]
    again, again_lse = case.check()
    torch.testing.assert_close(out, again)
    torch.testing.assert_close(lse, again_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_and_accurate(dtype):
    """Errors do not grow with the length: many pieces are merged."""
    case = Case(batch=1, heads=8, heads_kv=2, lengths=(20000, 12345), tail=100, dtype=dtype)
    case.check()
    case.check(split_tokens=512)


# ----------------------------------------------------------------------------------------------------------------------
# Nothing to see, extreme scores, caps, sinks
# ----------------------------------------------------------------------------------------------------------------------


@every_isa
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
        query = torch.empty(*shape, 16)
        kv = torch.randn(shape[0], 2, 3, 16)
        out, lse = ops.segment_attention(query, [Segment(kv, kv)], kv, kv, inv_freq=None, return_lse=True)
        assert out.shape == query.shape and lse.shape == shape


@every_isa
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


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0, 50.0])
def test_softcap(softcap, dtype):
    """The cap comes before the mask: what is hidden stays hidden, however small the cap."""
    Case(dtype=dtype, size=2.0).check(softcap=softcap)
    Case(dtype=dtype, rows=9, tail=9, lengths=(), size=3.0).check(softcap=softcap, scale=1.0)
    Case(dtype=dtype, rows=4, tail=20).check(softcap=softcap, window=5, tail_start=100)


@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -0.3, 1e-3, 0.0625])
def test_scale(scale):
    for dtype in DTYPES:
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


# ----------------------------------------------------------------------------------------------------------------------
# Windows and padding
# ----------------------------------------------------------------------------------------------------------------------


@every_isa
@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 9, 16, 31, 1000, 2**31])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_windows(rows, window):
    """Segments partly, wholly and not at all within the window, with holes and at negative starts."""
    case = Case(rows=rows, tail=9, lengths=(), dtype=random.choice(DTYPES))
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
        torch.testing.assert_close(a, b)
    narrow = case.check(window=16, tail_start=16)
    assert not torch.allclose(wide[0][:, :, -1], narrow[0][:, :, -1])


@every_isa
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
        torch.testing.assert_close(case_row.check()[0][0], out[row])


def test_padding_beyond_the_segment():
    case = Case(lengths=(), tail=3)
    for first in ([-5, 100], [2**31 - 1, -(2**31)]):
        vector = torch.tensor(first, dtype=torch.int32)
        case.segments = [case.segment(6, 2, first=vector)]
        case.check(tail_first=vector)


@every_isa
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
    case.tail_key[:, :, 2:], case.tail_value[:, :, 2:] = 1e4, -1e30  # seen by the last two rows only
    out = case.run()
    assert reference.same_bits(out[0][:, :, :2], clean[0][:, :, :2])
    assert reference.same_bits(out[1][:, :, :2], clean[1][:, :, :2])


def test_visible_nan_is_not_hidden():
    for dtype in DTYPES:
        case = Case(dtype=dtype)
        case.segments[1].value[0, 0, 3, 7] = math.nan
        out, _ = case.run()
        expected = torch.zeros_like(out, dtype=torch.bool)
        expected[0, :2, :, 7] = True
        assert torch.equal(out.isnan(), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------------


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4])
def test_layouts_and_misalignment(shift, dtype):
    orders = [(*order, 3) for order in itertools.permutations(range(3))]
    for order in orders:
        case = Case(rows=3, heads=6, dtype=dtype, lengths=(20, 3), head_dim=random.choice([64, 80]))
        compact = case.run()
        case.query = embed(case.query, order=order, shift=shift)
        case.tail_key = embed(case.tail_key, order=random.choice(orders), gap=0, shift=shift)
        case.tail_value = embed(case.tail_value, order=random.choice(orders), shift=shift + 1)
        shared, own = case.segments
        case.segments = [
            Segment(embed(shared.key, order=(1, 0, 2), shift=shift), embed(shared.value, shift=shift), shared.offset),
            Segment(embed(own.key, order=random.choice(orders), shift=shift), embed(own.value, gap=0), own.offset),
        ]
        out = case.check()
        assert reference.same_bits(out[0], compact[0]) and reference.same_bits(out[1], compact[1])


def test_the_output_has_the_querys_layout():
    case = Case(rows=5)
    case.query = case.random(2, 5, 4, 64).transpose(1, 2)
    assert case.check()[0].transpose(1, 2).is_contiguous()
    case.query = case.random(1, 4, 1, 64).expand(2, 4, 5, 64)  # strides of zero: rows that are the same
    out = case.check()[0]
    assert out.is_contiguous() or out.stride(-1) == 1
    case.query = case.random(64).expand(2, 4, 5, 64)
    case.check()


def test_stride_zero_and_packed_keys():
    case = Case(lengths=())
    packed = embed(torch.cat((case.kv(9), case.kv(9)), -1))
    case.segments = [
        Segment(packed[..., :64], packed[..., 64:], 7),
        Segment(case.random(1, 1, 64).expand(2, 5, 64), case.random(1, 5, 64).expand(2, 5, 64), 2),
        Segment(case.random(2, 2, 1, 64).expand(2, 2, 5, 64), case.random(1, 2, 5, 64).expand(2, 2, 5, 64), 3),
    ]
    case.check()


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_beyond_32_bits(dtype):
    elements = 2**33 if dtype.itemsize == 2 else 2**32 + 2**30
    pool = lazy_storage(elements, dtype)
    far = elements - 2**20
    case = Case(dtype=dtype, lengths=(), tail=2)
    for strides in ((far, 4096, 64, 1), (2048, far, 64, 1), (4096, 2048, far, 1)):
        shape = (2, 2, 2, 64)
        views = [pool.as_strided(shape, strides, start) for start in (0, 2**17, 2**18, 2**19 + 1, 2**19 + 2**17)]
        for view in views:
            view.copy_(torch.randn(shape))
        case.segments = [Segment(views[0], views[1], 9), Segment(views[0][1], views[1][1], -9)]
        case.tail_key, case.tail_value = views[2], views[3]
        case.check()
        case.query = views[4].repeat(1, 2, 1, 1)[:, :, :1]
        case.query = views[4][:, :, :1]
        case.check()


# ----------------------------------------------------------------------------------------------------------------------
# Properties
# ----------------------------------------------------------------------------------------------------------------------


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split_tokens", [None, 1, 16, 64, 100, 4096])
def test_a_row_does_not_depend_on_its_batch(split_tokens, dtype):
    lengths = (70, 0, 3) if split_tokens == 1 else (700, 0, 3, 256)
    case = Case(batch=5, heads=6, lengths=lengths, tail=90, dtype=dtype)
    case.segments[1].first = case.segments[0].first = torch.tensor([0, 1, 2, 60, 0], dtype=torch.int32)
    tail_first = torch.tensor([0, 90, 13, 0, 1], dtype=torch.int32)
    together = case.check(split_tokens=split_tokens, tail_first=tail_first)
    whole = (case.query, case.segments, case.tail_key, case.tail_value)
    for row in range(5):
        one = slice(row, row + 1)
        case.batch, case.query, case.tail_key, case.tail_value = 1, whole[0][one], whole[2][one], whole[3][one]
        case.segments = [
            Segment(
                s.key if s.key.ndim == 3 else s.key[one],
                s.value if s.value.ndim == 3 else s.value[one],
                s.offset,
                first=None if s.first is None else s.first[one],
            )
            for s in whole[1]
        ]
        out, lse = case.run(split_tokens=split_tokens, tail_first=tail_first[one])
        assert reference.ulps_of_row_maximum(out[0], together[0][row]) <= 1
        if split_tokens is not None:
            assert reference.same_bits(out[0], together[0][row]) and reference.same_bits(lse[0], together[1][row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 6])
def test_runs_and_threads_give_the_same_bits(rows, dtype):
    case = Case(heads=8, rows=rows, lengths=(1000, 500), tail=300, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(case.run(split_tokens=128))
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert reference.same_bits(out, results[0][0]) and reference.same_bits(lse, results[0][1])


def test_calls_from_several_threads_at_once():
    """The interpreter lock is released during a call; scratch memory must not be shared."""
    cases = [Case(lengths=(300 + 10 * i, 50), heads=8, rows=1 + i % 3, tail=20 + i) for i in range(8)]
    expected = [case.run() for case in cases]
    keys, values = [torch.randn(3, 2, 200, 64)], [torch.randn(3, 2, 200, 64)]
    outputs = [(torch.empty(3, 2, 200, 64), torch.empty(3, 2, 200, 64)) for _ in range(8)]

    def work(i):
        results = [cases[i].run() for _ in range(20)]
        ops.rope_concat(keys, values, [5], cases[i].inv_freq, *outputs[i])
        return results

    with ThreadPoolExecutor(4) as pool:
        for results, (out, lse) in zip(pool.map(work, range(8)), expected, strict=True):
            assert all(reference.same_bits(o, out) and reference.same_bits(s, lse) for o, s in results)
    for out_keys, out_values in outputs:
        assert reference.same_bits(out_keys, outputs[0][0]) and reference.same_bits(out_values, values[0])


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split_tokens", [1, 2, 7, 16, 33, 64, 128, 1000])
def test_splits(split_tokens, dtype):
    case = Case(rows=2, lengths=(130, 1, 64, 65), tail=70, dtype=dtype)
    case.segments[0].first = torch.tensor([129, 130], dtype=torch.int32)
    case.check(split_tokens=split_tokens)
    case.check(split_tokens=split_tokens, window=90, tail_start=200, sinks=torch.randn(4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_equals_copied(dtype):
    """Segments read where they lie, against rope_concat followed by plain attention over the copy."""
    case = Case(batch=1, lengths=(40, 7, 100), dtype=dtype)
    for segment in case.segments:
        segment.key, segment.value = (x if x.ndim == 4 else x[None] for x in (segment.key, segment.value))
    view, view_lse = case.check()
    keys, values = ([getattr(s, part) for s in case.segments] for part in ("key", "value"))
    out_keys, out_values = case.kv(147), case.kv(147)
    ops.rope_concat(keys, values, [s.offset for s in case.segments], case.inv_freq, out_keys, out_values)
    case.segments = [Segment(out_keys, out_values)]
    copy, copy_lse = case.check()
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(view, copy, rtol=0, atol=tolerance)
    torch.testing.assert_close(view_lse, copy_lse, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_parts_are_the_whole(dtype):
    case = Case(rows=2, lengths=(50, 60, 70), dtype=dtype)
    whole, whole_lse = case.check()
    segments, tail = case.segments, (case.tail_key, case.tail_value)
    case.segments = segments[:2]
    case.tail_key, case.tail_value = case.kv(0), case.kv(0)
    left = case.run()
    case.segments, (case.tail_key, case.tail_value) = segments[2:], tail
    merged, merged_lse = ops.merge_states(*left, *case.run())
    torch.testing.assert_close(merged, whole, rtol=0, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(merged_lse, whole_lse)


def test_no_offsets_need_no_frequencies():
    case = Case(lengths=())
    case.segments = [case.segment(9)]
    out, _ = case.check()
    case.inv_freq = None
    assert reference.same_bits(case.check()[0], out)
    segment = case.segments[0]
    key = torch.cat((segment.key, case.tail_key), 2)
    value = torch.cat((segment.value, case.tail_value), 2)
    expected = torch.nn.functional.scaled_dot_product_attention(case.query, key, value, enable_gqa=True)
    torch.testing.assert_close(out, expected)


@every_isa
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything(data):
    draw = data.draw
    heads_kv = draw(st.integers(1, 3), "heads_kv")
    case = Case(
        batch=draw(st.integers(1, 3), "batch"),
        heads=heads_kv * draw(st.integers(1, 9), "group"),
        heads_kv=heads_kv,
        rows=draw(st.integers(1, 12), "rows"),
        head_dim=8 * draw(st.integers(1, 32), "head_dim / 8"),
        tail=draw(st.integers(0, 40), "tail"),
        lengths=draw(st.lists(st.integers(0, 150), max_size=4), "lengths"),
        dtype=draw(st.sampled_from(DTYPES), "dtype"),
    )
    case.inv_freq = frequencies(2 * draw(st.integers(0, case.head_dim // 2), "half of rotary_dim"))
    padding = st.lists(st.integers(-1, 160), min_size=case.batch, max_size=case.batch)
    for segment in case.segments:
        segment.offset = draw(st.integers(-(10**5), 10**5), "offset")
        segment.start = draw(st.integers(0, 300), "position") - segment.offset
        if draw(st.booleans(), "padded"):
            segment.first = torch.tensor(draw(padding, "first"), dtype=torch.int32)
    options = {
        "interleaved": draw(st.booleans(), "interleaved"),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0]), "softcap"),
        "split_tokens": draw(st.sampled_from([None, 8, 50]), "split_tokens"),
        "tail_start": draw(st.integers(0, 300), "tail_start"),
        "window": draw(st.one_of(st.none(), st.integers(1, 200)), "window"),
    }
    if draw(st.booleans(), "sinks"):
        options["sinks"] = torch.randn(case.query.shape[1])
    if draw(st.booleans(), "tail padded"):
        options["tail_first"] = torch.tensor(draw(padding, "tail_first"), dtype=torch.int32)
    case.check(**options)
