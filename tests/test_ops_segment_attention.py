# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`segment_attention` against the float64 oracle, which rotates the keys where the kernel rotates the query."""

from __future__ import annotations

import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch
from backends import attention_dtypes, attention_head_dims, ops, reschedule, small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvspeed.ops import attention
from kvspeed.segment import Segment
from op_cases import DTYPES, OFFSETS, Case, frequencies

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.attention]


def test_alone_returns_the_output_only():
    case = Case()
    out = ops.segment_attention(case.query, case.segments, case.tail_key, case.tail_value, inv_freq=case.inv_freq)
    assert isinstance(out, torch.Tensor) and reference.same_bits(out, case.run()[0])


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 80, 96, 112, 128, 192, 248, 256])
def test_head_dims(head_dim, dtype):
    for rows in (1, 3):
        Case(head_dim=head_dim, dtype=dtype, rows=rows, lengths=(33, 1, 70), tail=6).check()


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 71])
def test_groups(group, dtype):
    for heads_kv, rows in ((1, 1), (3, 2)):
        Case(heads=group * heads_kv, heads_kv=heads_kv, rows=rows, dtype=dtype, lengths=(65, 20)).check()


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 2, 16, 20, 32, 64])
def test_rotary_dims(rotary_dim, interleaved, dtype):
    for head_dim in (64, 80):
        case = Case(head_dim=head_dim, dtype=dtype, rows=2)
        case.inv_freq = frequencies(rotary_dim)
        case.check(interleaved=interleaved)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_offsets(interleaved, dtype):
    case = Case(lengths=(), dtype=dtype)
    case.segments = [case.segment(6, offset) for offset in OFFSETS]
    case.check(interleaved=interleaved)
    for offset in (*OFFSETS, 2**31, -(2**31)):
        case.segments = [case.segment(6, offset, shared=True)]
        case.check(interleaved=interleaved)


@pytest.mark.every_isa
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
    Case(
        lengths=lengths, tail=tail, dtype=random.choice(attention_dtypes()), heads=6, rows=random.choice([1, 4])
    ).check()


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_pytorchs(dtype):
    """Over many cases, where luck evens out, the kernel's errors are no larger than PyTorch's."""
    cases = [Case(heads=8, rows=2, lengths=(60, 20), dtype=dtype).errors() for _ in range(12)]
    mine, own = (sum(column) for column in zip(*cases, strict=True))
    assert mine <= 1.5 * own


def test_many_segments():
    case = Case(lengths=[random.randrange(12) for _ in range(small(150, 50))], dtype=torch.bfloat16)
    case.check()
    case.check(split_tokens=16)
    case.segments = tuple(case.segments)
    case.check()


def close(a, b):
    """Equal to a few roundings of the dtype, and of the weights where the kernel rounds those too."""
    torch.testing.assert_close(a, b, rtol=0, atol=8 * max(torch.finfo(a.dtype).eps, 1e-6))


def test_the_same_segment_many_times():
    case = Case(lengths=())
    segment = case.segment(11, 0, shared=True)
    case.segments = [Segment(segment.key, segment.value, offset) for offset in (0, 11, 22, 22)]
    out, lse = case.check()
    case.segments = case.segments[::-1]
    again, again_lse = case.check()
    close(out, again)
    close(lse, again_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_and_accurate(dtype):
    """Errors do not grow with the length: many pieces are merged."""
    case = Case(batch=1, heads=8, heads_kv=2, lengths=small((20000, 12345), (1500, 700)), tail=100, dtype=dtype)
    case.check()
    case.check(split_tokens=small(512, 128))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17])
def test_rounding_does_not_add_up_over_a_split(rows, dtype):
    """All logits are one large number whose product with log2(e) is not exact: each tile has the same error to make."""
    tokens = small(32768, 8192)
    query, key = torch.zeros(1, 1, rows, 64), torch.zeros(1, 1, tokens, 64)
    factor = torch.tensor(0.125) * torch.tensor(math.log2(math.e))
    numbers = torch.arange(80, 125)
    exact = 8.0 * numbers.double() * factor.double()
    query[..., 0], key[..., 0] = 8.0, float(numbers[(exact - exact.float().double()).abs().argmax()])
    value = (torch.arange(tokens) < tokens // 2).float()[None, None, :, None].expand(1, 1, tokens, 64)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype).contiguous()
    empty = key[:, :, :0]
    out, lse = ops.segment_attention(
        query, [Segment(key, value)], empty, empty, inv_freq=None, return_lse=True, split_tokens=tokens
    )
    logit = float(query[0, 0, 0, 0]) * float(key[0, 0, 0, 0]) / 8
    assert (lse.double() - logit - math.log(tokens)).abs().max() < 4e-5
    assert (out.double() - 0.5).abs().max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_large_tiles_do_not_depend_on_their_batch(dtype):
    """On GPUs many rows together take other blocks than a few: with `split_tokens` given, the same bits come out."""
    case = Case(batch=8, heads=1, heads_kv=1, rows=130, lengths=(100,), tail=130, head_dim=64, dtype=dtype)
    together = case.run(split_tokens=4096)
    whole = (case.query, case.segments, case.tail_key, case.tail_value)
    for row in (0, 3):
        one = slice(row, row + 1)
        case.batch, case.query, case.tail_key, case.tail_value = 1, whole[0][one], whole[2][one], whole[3][one]
        case.segments = [
            Segment(s.key if s.key.ndim == 3 else s.key[one], s.value if s.value.ndim == 3 else s.value[one], s.offset)
            for s in whole[1]
        ]
        out, lse = case.run(split_tokens=4096)
        assert reference.same_bits(out[0], together[0][row]) and reference.same_bits(lse[0], together[1][row])


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split_tokens", [None, 1, 16, 64, 100, 4096])
def test_a_row_does_not_depend_on_its_batch(split_tokens, dtype):
    lengths = (70, 0, 3) if split_tokens == 1 else (700, 0, 3, 256)
    lengths, tail = small((lengths, 90), ((7, 0, 3) if split_tokens == 1 else (140, 0, 3, 70), 20))
    case = Case(batch=5, heads=6, lengths=lengths, tail=tail, dtype=dtype)
    case.segments[1].first = case.segments[0].first = torch.tensor([0, 1, 2, 60, 0], dtype=torch.int32)
    tail_first = torch.tensor([0, tail, 13, 0, 1], dtype=torch.int32)
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
    case = Case(heads=8, rows=rows, lengths=small((1000, 500), (150, 70)), tail=small(300, 60), dtype=dtype)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(case.run(split_tokens=small(128, 64)))
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert reference.same_bits(out, results[0][0]) and reference.same_bits(lse, results[0][1])


@pytest.mark.without("simt")
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


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split_tokens", [1, 2, 7, 16, 33, 64, 128, 1000])
def test_splits(split_tokens, dtype):
    lengths, tail = (130, 1, 64, 65), 70
    if split_tokens < 16:
        lengths, tail = small((lengths, tail), ((13, 1, 8), 9))
    case = Case(rows=2, lengths=lengths, tail=tail, dtype=dtype)
    case.segments[0].first = torch.tensor([lengths[0] - 1, lengths[0]], dtype=torch.int32)
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
    close(merged_lse, whole_lse)


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
    close(out, expected)


@pytest.mark.without("cuda")
def test_both_ways_into_the_compiled_code():
    """Through Python and past it: the same bits."""
    assert attention._reads_tensors or torch.__version__ < "2.10"
    for _ in range(small(40, 8)):
        case = Case(
            heads=random.choice([2, 6]), rows=random.choice([1, 3]), tail=random.randrange(9), lengths=(5, 9, 0)
        )
        case.segments[0].first = torch.tensor([1, 3], dtype=torch.int32)
        choice = random.choice
        options = (
            choice([None, 0.3]),
            choice([0.0, 2.0]),
            choice([None, 7]),
            choice([30, -3]),
            choice([None, torch.tensor([0, 2], dtype=torch.int32)]),
            choice([None, torch.randn(case.query.shape[1])]),
            choice([False, True]),
            choice([False, True]),
            choice([None, 4]),
            None,
        )
        arguments = (case.query, case.segments, case.tail_key, case.tail_value, case.inv_freq, *options)
        attention.run(*arguments)  # on a GPU rotation rows are brought over by the other way
        fast = attention._fast(arguments)
        assert fast is not None or not attention._reads_tensors
        results = [attention.run(*arguments) if fast is None else fast, attention.run_in_python(*arguments)]
        pairs = [result if isinstance(result, tuple) else (result,) for result in results]
        assert all(reference.same_bits(a, b) for a, b in zip(*pairs, strict=True)), options
        assert pairs[0][0].stride() == pairs[1][0].stride()


@pytest.mark.without("cuda")
def test_nothing_is_leaked():
    case = Case(lengths=(5, 6))
    first = torch.zeros(2, dtype=torch.int32)
    case.segments[0].first = first
    things = [case.query, case.tail_key, case.segments[0], case.segments[0].key, case.segments, case.inv_freq, first]
    case.run()
    for bad in (None, 3):  # also where a call is refused
        counts = [sys.getrefcount(thing) for thing in things]
        for _ in range(20):
            case.run()
            with pytest.raises(TypeError):
                case.run(softcap=bad if bad is None else "1")
        assert [sys.getrefcount(thing) for thing in things] == counts


@pytest.mark.every_isa
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything(data):
    check_anything(data.draw)


@pytest.mark.without("cpu", "cuda")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 10**9))
def test_anything_in_any_order(data, seed):
    """Many more in the emulator, each with another order of blocks, warps and lanes."""
    reschedule(seed)
    check_anything(data.draw)


def check_anything(draw):
    heads_kv = draw(st.integers(1, 3), "heads_kv")
    case = Case(
        batch=draw(st.integers(1, 3), "batch"),
        heads=heads_kv * draw(st.integers(1, 9), "group"),
        heads_kv=heads_kv,
        rows=draw(st.integers(1, 12), "rows"),
        head_dim=draw(st.sampled_from(attention_head_dims()), "head_dim"),
        tail=draw(st.integers(0, 40), "tail"),
        lengths=draw(st.lists(st.integers(0, 150), max_size=4), "lengths"),
        dtype=draw(st.sampled_from(attention_dtypes()), "dtype"),
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
