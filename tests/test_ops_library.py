# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The ops under `torch.ops.kvspeed`: schemas, fakes, opcheck, torch.compile, dispatch modes."""

from __future__ import annotations

import contextlib

import pytest
import reference
import torch
from kvspeed import ops
from kvspeed.segment import Segment
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

INV_FREQ = 10000.0 ** (-torch.arange(0, 16, 2) / 16)


def concat_arguments(paged=False):
    keys = [torch.randn(2, 3, n, 16) for n in (3, 2)]
    shape = (2, 4, 2, 3, 16) if paged else (2, 3, 8, 16)
    table = torch.tensor([3, 0, 2, 1], dtype=torch.int32) if paged else None
    values = [torch.randn_like(key) for key in keys]
    return [keys, values, [1, -2], INV_FREQ, torch.zeros(shape), torch.zeros(shape), 1, False, table]


def attention_arguments(**options):
    query = torch.randn(2, 3, 4, 16).transpose(1, 2)
    keys, values = ([torch.randn(2, 5, 16), torch.randn(2, 2, 6, 16)] for _ in range(2))
    firsts = [None, torch.tensor([0, 2], dtype=torch.int32)]
    tail_key, tail_value = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 4, 16)
    return (query, keys, values, [3, 0], [0, 3], firsts, tail_key, tail_value, INV_FREQ), options


def test_schemas_name_what_is_written():
    schema = str(torch.ops.kvspeed.rope_concat.default._schema)
    assert "Tensor(a!) out_keys" in schema and "Tensor(b!) out_values" in schema and schema.endswith("-> ()")
    for name in ("segment_attention", "merge_states"):
        assert not getattr(torch.ops.kvspeed, name).default._schema.is_mutable


def paged_arguments():
    """A segment with pages, shared or a row's own, between two without."""
    query = torch.randn(2, 4, 3, 16)
    pool = torch.randn(6, 4, 2, 16)
    keys, values = ([torch.randn(2, 5, 16), pool, pool.clone(), torch.randn(2, 2, 6, 16)] for _ in range(2))
    tables = [None, torch.tensor([3, 1, 5]).int(), torch.tensor([[0, 2], [4, 1]]).int(), None]
    tail_key, tail_value = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 4, 16)
    arguments = (query, keys, values, [3, 0, 5, 1], [0] * 4, [None] * 4, tail_key, tail_value, INV_FREQ)
    tail_length = torch.tensor([4, 2], dtype=torch.int32)
    return arguments, {"page_tables": tables, "tokens": [-1, 9, -1, -1], "tail_length": tail_length, "return_lse": True}


@pytest.mark.parametrize("paged", [False, True])
def test_opcheck_rope_concat(paged):
    torch.library.opcheck(torch.ops.kvspeed.rope_concat, tuple(concat_arguments(paged)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_lse": True, "softcap": 5.0, "scale": 0.5, "sinks": torch.zeros(4)},
        {"window": 4, "tail_start": 9, "tail_first": torch.tensor([1, 0], dtype=torch.int32), "split_tokens": 8},
    ],
)
def test_opcheck_segment_attention(options):
    arguments, options = attention_arguments(**options)
    torch.library.opcheck(torch.ops.kvspeed.segment_attention, arguments, options)
    nothing = (arguments[0], [], [], [], [], [], *arguments[6:])
    torch.library.opcheck(torch.ops.kvspeed.segment_attention, nothing, options)


def test_opcheck_pages_and_lengths():
    arguments, options = paged_arguments()
    torch.library.opcheck(torch.ops.kvspeed.segment_attention, arguments, options)


def test_opcheck_merge_states():
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    other = out.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(torch.ops.kvspeed.merge_states, (out, lse, other, lse))


def test_the_library_and_the_functions_agree():
    arguments = concat_arguments(True)
    torch.ops.kvspeed.rope_concat(*arguments)
    copies = [*arguments[:4], torch.zeros_like(arguments[4]), torch.zeros_like(arguments[5])]
    ops.rope_concat(*copies, start=1, page_table=arguments[8])
    assert torch.equal(copies[4], arguments[4]) and torch.equal(copies[5], arguments[5]) and arguments[4].any()

    (query, keys, values, offsets, starts, firsts, *rest), _ = attention_arguments()
    segments = [
        Segment(k, v, offset, start=start, first=first)
        for k, v, offset, start, first in zip(keys, values, offsets, starts, firsts, strict=True)
    ]
    options = {"window": 9, "tail_start": 9, "softcap": 3.0, "return_lse": True}
    got = torch.ops.kvspeed.segment_attention(query, keys, values, offsets, starts, firsts, *rest, **options)
    expected = ops.segment_attention(query, segments, *rest[:2], inv_freq=rest[2], **options)
    assert all(reference.same_bits(a, b) for a, b in zip(got, expected, strict=True))
    out, lse = torch.ops.kvspeed.segment_attention(query, keys, values, offsets, starts, firsts, *rest)
    assert lse.numel() == 0 and out.shape == query.shape

    (query, keys, values, offsets, _, _, *rest), options = paged_arguments()
    segments = [
        Segment(key, value, offset, page_table=table, tokens=None if tokens < 0 else tokens)
        for key, value, offset, table, tokens in zip(
            keys, values, offsets, options["page_tables"], options["tokens"], strict=True
        )
    ]
    got = torch.ops.kvspeed.segment_attention(query, keys, values, offsets, [0] * 4, [None] * 4, *rest, **options)
    tail_length = options["tail_length"]
    options = {"inv_freq": rest[2], "tail_length": tail_length, "return_lse": True}
    direct = ops.segment_attention(query, segments, *rest[:2], **options)
    assert all(reference.same_bits(a, b) for a, b in zip(got, direct, strict=True))

    pair = torch.ops.kvspeed.merge_states(*expected, *expected)
    assert all(reference.same_bits(a, b) for a, b in zip(pair, ops.merge_states(*expected, *expected), strict=True))


def test_the_library_refuses_with_the_same_sentences():
    arguments = concat_arguments()
    arguments[6] = 5
    with pytest.raises(IndexError, match="capacity"):
        torch.ops.kvspeed.rope_concat(*arguments)
    (query, keys, values, offsets, starts, firsts, *rest), _ = attention_arguments()
    with pytest.raises(ValueError, match="starts has 1 entries"):
        torch.ops.kvspeed.segment_attention(query, keys, values, offsets, starts[:1], firsts, *rest)
    with pytest.raises(ValueError, match="page_tables has 1 entries"):
        torch.ops.kvspeed.segment_attention(
            query, keys, values, offsets, starts, firsts, *rest, page_tables=[torch.zeros(1, dtype=torch.int32)]
        )
    with pytest.raises(ValueError, match=r"segments\[0\] has tokens=3 but no page_table"):
        torch.ops.kvspeed.segment_attention(query, keys, values, offsets, starts, firsts, *rest, tokens=[3, -1])
    with pytest.raises(ValueError, match="head dimension of 12"):
        torch.ops.kvspeed.segment_attention(query[..., :12], keys, values, offsets, starts, firsts, *rest)
    with pytest.raises(RuntimeError, match="query requires grad"):
        torch.ops.kvspeed.segment_attention(query.requires_grad_(), keys, values, offsets, starts, firsts, *rest)


def test_fake_tensors():
    with FakeTensorMode():
        query = torch.empty(2, 3, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
        kv = torch.empty(2, 2, 5, 16, dtype=torch.bfloat16)
        inv_freq = torch.empty(8)
        out, lse = ops.segment_attention(query, [Segment(kv, kv, 3)], kv, kv, inv_freq=inv_freq, return_lse=True)
        assert type(out).__name__ == "FakeTensor" and out.shape == query.shape and out.stride() == query.stride()
        assert out.dtype == torch.bfloat16 and lse.shape == (2, 4, 3) and lse.dtype == torch.float32
        assert ops.segment_attention(query, [], kv, kv, inv_freq=None).shape == query.shape
        merged, merged_lse = ops.merge_states(out, lse, out, lse)
        assert merged.shape == out.shape and merged.dtype == out.dtype and merged_lse.shape == lse.shape
        cache = torch.empty(3, 2, 9, 16)
        outputs = torch.empty_like(cache), torch.empty_like(cache)
        assert ops.rope_concat([cache], [cache], [1], inv_freq, *outputs) is None


def test_outside_a_mode_fake_tensors_still_take_the_library():
    with FakeTensorMode():
        query, kv = torch.empty(1, 2, 1, 16), torch.empty(1, 2, 3, 16)
    assert type(ops.segment_attention(query, [], kv, kv, inv_freq=None)).__name__ == "FakeTensor"
    with pytest.raises(TypeError, match="tail_key is a FakeTensor"):
        ops.segment_attention(torch.zeros(1, 2, 1, 16), [], kv, kv, inv_freq=None)


def test_modes_see_the_ops():
    """A profiler, a flop counter or any other mode is told of the calls."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
            seen.append(str(function))
            return function(*arguments, **(keywords or {}))

    (query, keys, values, _, _, _, tail_key, tail_value, inv_freq), _ = attention_arguments()
    plain = ops.segment_attention(query, [Segment(keys[0], values[0], 3)], tail_key, tail_value, inv_freq=inv_freq)
    with Watch():
        watched = ops.segment_attention(
            query, [Segment(keys[0], values[0], 3)], tail_key, tail_value, inv_freq=inv_freq
        )
        arguments = concat_arguments()
        ops.rope_concat(*arguments[:6])
    assert reference.same_bits(plain, watched) and arguments[4].any()
    assert "kvspeed.segment_attention.default" in seen and "kvspeed.rope_concat.default" in seen


def test_meta_tensors_have_shapes():
    (query, _, _, _, _, _, *rest), _ = attention_arguments(return_lse=True)
    meta = [x.to("meta") for x in rest]
    out, lse = torch.ops.kvspeed.segment_attention(query.to("meta"), [], [], [], [], [], *meta, return_lse=True)
    assert out.device.type == "meta" and out.shape == query.shape and lse.shape == (2, 4, 3)


@pytest.fixture
def compiled():
    """torch.compile without code generation: the graph is captured, functionalised, and run by its operators."""
    torch._dynamo.reset()
    yield lambda function, **options: torch.compile(function, fullgraph=True, backend="aot_eager", **options)
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_segment_attention(compiled, dynamic):
    def attend(query, key, value, first, tail_key, tail_value, offset):
        segments = [Segment(key, value, offset, start=2), Segment(key[0], value[0], 0, first=first)]
        out, lse = ops.segment_attention(
            query * 2, segments, tail_key, tail_value, inv_freq=INV_FREQ, window=20, tail_start=30, return_lse=True
        )
        out, lse = ops.merge_states(out, lse, out, lse)
        return ops.segment_attention(out, segments[:1], tail_key, tail_value, inv_freq=INV_FREQ) + 1, lse

    run = compiled(attend, dynamic=dynamic)
    for tokens, offset in ((5, 3), (9, 3), (11, 4)):
        query, (key, value), (tail_key, tail_value) = (
            torch.randn(2, 4, 2, 16),
            torch.randn(2, 2, 2, tokens, 16),
            torch.randn(2, 2, 2, 3, 16),
        )
        first = torch.tensor([0, 4], dtype=torch.int32)
        arguments = (query, key, value, first, tail_key, tail_value, offset)
        for got, expected in zip(run(*arguments), attend(*arguments), strict=True):
            torch.testing.assert_close(got, expected)


def test_compile_pages_and_lengths(compiled):
    def attend(query, pool, table, tail_key, tail_value, length):
        segments = [Segment(pool[0], pool[1], 4, page_table=table, tokens=13), Segment(tail_key, tail_value, 2)]
        return ops.segment_attention(
            query + 1, segments, tail_key, tail_value, inv_freq=INV_FREQ, tail_length=length, return_lse=True
        )

    run = compiled(attend)
    for table in (torch.tensor([3, 0, 5, 1]).int(), torch.tensor([[3, 0, 5, 1], [2, 2, 0, 4]]).int()):
        arguments = (
            torch.randn(2, 4, 2, 16),
            torch.randn(2, 6, 4, 2, 16),
            table,
            torch.randn(2, 2, 5, 16),
            torch.randn(2, 2, 5, 16),
            torch.tensor([5, 1], dtype=torch.int32),
        )
        for got, expected in zip(run(*arguments), attend(*arguments), strict=True):
            torch.testing.assert_close(got, expected)


def test_compile_rope_concat(compiled):
    """The written caches are returned and read in the same graph: the mutation must not be lost or reordered."""

    def assemble(keys, values, out_keys, out_values, table):
        out_keys.zero_()
        before = out_keys.sum()
        ops.rope_concat(keys, values, [4, 0], INV_FREQ, out_keys, out_values, start=1, page_table=table)
        after = out_keys.sum()
        out_values.mul_(2)
        return before, after

    run = compiled(assemble)
    for paged in (False, True):
        keys, values, _, _, out_keys, out_values, _, _, table = concat_arguments(paged)
        expected_keys, expected_values = out_keys.clone(), out_values.clone()
        expected = assemble(keys, values, expected_keys, expected_values, table)
        got = run(keys, values, out_keys, out_values, table)
        assert torch.equal(out_keys, expected_keys) and torch.equal(out_values, expected_values)
        assert got[0] == expected[0] == 0 and torch.allclose(got[1], expected[1]) and got[1] != 0


def test_inference_mode_and_inference_tensors():
    with torch.inference_mode():
        arguments = concat_arguments()
        ops.rope_concat(*arguments[:6])
        (query, keys, values, _, _, _, tail_key, tail_value, inv_freq), _ = attention_arguments()
        segments = [Segment(keys[0], values[0], 3)]
        inside = ops.segment_attention(query, segments, tail_key, tail_value, inv_freq=inv_freq)
    assert arguments[4].any() and arguments[4].is_inference()
    outside = ops.segment_attention(query, segments, tail_key, tail_value, inv_freq=inv_freq)
    assert reference.same_bits(inside, outside)
    ops.rope_concat(*arguments[:6])


def test_saved_tensors_notice_the_write():
    weight = torch.ones(2, 3, 8, 16, requires_grad=True)
    arguments = concat_arguments()
    product = weight * arguments[4]
    with torch.no_grad():
        ops.rope_concat(*arguments[:6])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_deterministic_mode_and_autocast_change_nothing():
    (query, keys, values, _, _, _, tail_key, tail_value, inv_freq), _ = attention_arguments()
    call = (query, [Segment(keys[0], values[0], 3)], tail_key, tail_value)
    plain = ops.segment_attention(*call, inv_freq=inv_freq)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        torch.use_deterministic_algorithms(True)
        stack.callback(torch.use_deterministic_algorithms, False)
        assert reference.same_bits(plain, ops.segment_attention(*call, inv_freq=inv_freq))
