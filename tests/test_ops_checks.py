# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the ops refuse: the right exception, a message that names the argument, and nothing written."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from kvspeed import ops
from kvspeed.ops import checks, native, overlap
from kvspeed.segment import Segment

FLOATS = [torch.float64, torch.int32, torch.complex64, torch.bool]
EIGHT_BITS = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]


def concat_arguments(dtype=torch.float32, paged=False):
    """Valid arguments of rope_concat, by name: two packets of 3 and 2 tokens, a capacity of 8."""
    shape = (2, 4, 2, 3, 16) if paged else (2, 3, 8, 16)
    return {
        "keys": [torch.randn(2, 3, n, 16, dtype=dtype) for n in (3, 2)],
        "values": [torch.randn(2, 3, n, 16, dtype=dtype) for n in (3, 2)],
        "offsets": [1, 2],
        "inv_freq": torch.rand(8),
        "out_keys": torch.full(shape, 7.0, dtype=dtype),
        "out_values": torch.full(shape, 7.0, dtype=dtype),
        "start": 1,
        "page_table": torch.tensor([3, 0, 2, 1], dtype=torch.int32) if paged else None,
    }


def refuse_concat(error, *words, paged=False, edit=None, **changes):
    arguments = concat_arguments(paged=paged)
    arguments.update(changes)
    if edit is not None:
        edit(arguments)
    with pytest.raises(error) as caught:
        ops.rope_concat(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
    for name in ("out_keys", "out_values"):
        out = arguments[name]
        if isinstance(out, torch.Tensor) and out.is_cpu and not out.is_sparse:
            assert (out.detach().float() == 7).all(), f"{name} was written"


def attention_arguments(dtype=torch.float32):
    def make(*shape):
        return torch.randn(shape).to(dtype)

    return {
        "query": make(2, 4, 3, 16),
        "segments": [Segment(make(2, 5, 16), make(2, 5, 16), 3), Segment(make(2, 2, 6, 16), make(2, 2, 6, 16), 0)],
        "tail_key": make(2, 2, 4, 16),
        "tail_value": make(2, 2, 4, 16),
        "inv_freq": torch.rand(8),
    }


def refuse_attention(error, *words, edit=None, **changes):
    arguments = attention_arguments()
    arguments.update(changes)
    if edit is not None:
        edit(arguments)
    with pytest.raises(error) as caught:
        ops.segment_attention(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def set_item(name, index, value):
    def edit(arguments):
        arguments[name][index] = value

    return edit


def test_valid_arguments_pass():
    for paged in (False, True):
        arguments = concat_arguments(paged=paged)
        ops.rope_concat(**arguments)
        assert (arguments["out_keys"] != 7).any()
    ops.segment_attention(**attention_arguments())


# ----------------------------------------------------------------------------------------------------------------------
# rope_concat
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keys", "values", "offsets"])
def test_concat_lists(name):
    given = concat_arguments()[name]
    refuse_concat(ValueError, "keys", "values", "offsets", "one entry a packet", **{name: given[:1]})
    refuse_concat(ValueError, "one entry a packet", **{name: [*given, given[0]]})
    refuse_concat(TypeError, name, "NoneType", **{name: None})
    refuse_concat(TypeError, name, **{name: 3})
    refuse_concat(TypeError, name, "Tensor", **{name: torch.tensor([1, 2])})
    refuse_concat(TypeError, name, "generator", **{name: (x for x in given)})


@pytest.mark.parametrize("name", ["keys", "values"])
def test_concat_packets(name):
    label = f"{name}[1]"
    good = concat_arguments()[name][1]
    refuse_concat(TypeError, label, "list", edit=set_item(name, 1, [1.0]))
    refuse_concat(TypeError, label, "NoneType", edit=set_item(name, 1, None))
    refuse_concat(TypeError, label, "bfloat16", "float32", "out_keys", edit=set_item(name, 1, good.bfloat16()))
    for dtype in FLOATS:
        refuse_concat(TypeError, label, str(dtype).removeprefix("torch."), edit=set_item(name, 1, good.to(dtype)))
    for dtype in EIGHT_BITS:
        words = ("key_scale", "value_scale", "dequantise")
        refuse_concat(TypeError, label, *words, edit=set_item(name, 1, good.to(dtype)))
    refuse_concat(ValueError, label, "3 dimensions", edit=set_item(name, 1, good[0]))
    refuse_concat(ValueError, label, edit=set_item(name, 1, good[:1]))
    refuse_concat(ValueError, label, edit=set_item(name, 1, good[:, :2]))
    refuse_concat(ValueError, label, edit=set_item(name, 1, good[..., :8]))
    refuse_concat(ValueError, "values[1]", "keys[1]", edit=set_item(name, 1, good[:, :, :1]))
    wide = torch.randn(2, 3, 2, 32)[..., ::2]
    refuse_concat(ValueError, label, "stride 2", "contiguous", edit=set_item(name, 1, wide))
    refuse_concat(ValueError, label, "stride 0", edit=set_item(name, 1, torch.randn(2, 3, 2, 1).expand(2, 3, 2, 16)))
    refuse_concat(TypeError, label, "sparse", "to_dense", edit=set_item(name, 1, good.to_sparse()))
    refuse_concat(RuntimeError, label, "meta", edit=set_item(name, 1, good.to("meta")))
    tracked = good.clone().requires_grad_()
    refuse_concat(RuntimeError, label, "requires grad", "no_grad", edit=set_item(name, 1, tracked))


@pytest.mark.parametrize("name", ["out_keys", "out_values"])
@pytest.mark.parametrize("paged", [False, True])
def test_concat_outputs(name, paged):
    good = concat_arguments(paged=paged)[name]
    refuse_concat(TypeError, name, "NoneType", paged=paged, **{name: None})
    refuse_concat(ValueError, name, "dimensions", paged=paged, **{name: good[0]})
    refuse_concat(ValueError, "must be", "[2, ", paged=paged, **{name: good[:, :, :, :2] if paged else good[:, :2]})
    refuse_concat(ValueError, paged=paged, **{name: good[..., :8]})
    refuse_concat(ValueError, paged=paged, **{name: good[:1]})
    refuse_concat(TypeError, "bfloat16", "float32", paged=paged, **{name: good.bfloat16()})
    refuse_concat(TypeError, name, "int8", paged=paged, **{name: good.to(torch.int8)})
    refuse_concat(TypeError, name, "sparse", paged=paged, **{name: good.to_sparse()})
    refuse_concat(RuntimeError, name, "meta", paged=paged, **{name: good.to("meta")})
    refuse_concat(RuntimeError, name, "requires grad", paged=paged, **{name: good.clone().requires_grad_()})
    refuse_concat(ValueError, name, "stride 2", paged=paged, **{name: good.repeat_interleave(2, -1)[..., ::2]})


def test_concat_of_other_dtypes_is_refused_as_a_whole():
    for dtype in (torch.float64, torch.int64):
        arguments = concat_arguments()
        for name in ("out_keys", "out_values"):
            arguments[name] = arguments[name].to(dtype)
        with pytest.raises(TypeError, match=r"out_keys has dtype .* float32, bfloat16 or float16"):
            ops.rope_concat(**arguments)


def test_concat_overlaps():
    def full(*shape):
        return torch.full(shape, 7.0)

    for name in ("out_keys", "out_values"):
        refuse_concat(ValueError, name, "overlaps itself", **{name: full(2, 3, 1, 16).expand(2, 3, 8, 16)})
        refuse_concat(ValueError, name, "overlaps itself", **{name: full(1, 3, 8, 16).expand(2, 3, 8, 16)})
        windows = full(2, 3, 150).as_strided((2, 3, 8, 16), (450, 150, 15, 1))
        refuse_concat(ValueError, name, "overlaps itself", **{name: windows})
    out = full(2, 3, 8, 16)
    refuse_concat(ValueError, "out_values overlaps out_keys", out_keys=out, out_values=out)
    both = full(2, 3, 9, 16)
    refuse_concat(ValueError, "out_values overlaps out_keys", out_keys=both[:, :, :8], out_values=both[:, :, 1:])
    for part in ("keys", "values"):
        for output in ("out_keys", "out_values"):
            pool = full(2, 3, 12, 16)
            sources = [torch.randn(2, 3, 3, 16), pool[:, :, 7:9]]
            refuse_concat(ValueError, output, f"{part}[1]", "share memory", **{part: sources, output: pool[:, :, :8]})
    # Side by side in one storage is no overlap.
    pool = torch.full((2, 2, 3, 20, 16), 7.0)
    arguments = concat_arguments()
    arguments["keys"] = [pool[:, 0, :, :3], pool[:, 1, :, 5:7]]
    arguments["out_keys"], arguments["out_values"] = pool[:, 0, :, 8:16], pool[:, 1, :, 8:16]
    ops.rope_concat(**arguments)
    assert (pool[:, 0, :, 8] == 7).all() and (pool[:, 1, :, 9] != 7).any() and (pool[:, :, :, 16:] == 7).all()


def test_concat_offsets_and_start():
    for bad in (True, 1.0, 1.5, "1", None, np.float32(1), torch.tensor(1), np.bool_(True)):
        refuse_concat(TypeError, "offsets[1]", "int", offsets=[1, bad])
        refuse_concat(TypeError, "start", "int", start=bad)
    for bad in (2**31 + 1, -(2**31) - 1, 10**30):
        refuse_concat(ValueError, "offsets[0]", str(bad), offsets=[bad, 1])
    refuse_concat(ValueError, "start", "-1", start=-1)
    refuse_concat(IndexError, "capacity", "out_keys holds 8", "5 tokens", start=4)
    refuse_concat(IndexError, "capacity", start=2**31)
    arguments = concat_arguments()
    arguments["offsets"] = [np.int64(1), np.int32(2)]
    arguments["start"] = np.int16(3)
    ops.rope_concat(**arguments)
    arguments["offsets"] = np.array([1, 2])
    ops.rope_concat(**arguments)


@pytest.mark.parametrize("refuse", [refuse_concat, refuse_attention])
def test_frequencies(refuse):
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64):
        refuse(TypeError, "inv_freq", "float32", inv_freq=torch.ones(8).to(dtype))
    refuse(TypeError, "inv_freq", "list", inv_freq=[1.0])
    refuse(ValueError, "inv_freq", "18", "16", inv_freq=torch.rand(9))
    refuse(ValueError, "inv_freq", inv_freq=torch.tensor(1.0))
    refuse(ValueError, "inv_freq", inv_freq=torch.rand(3, 8))
    refuse(ValueError, "inv_freq", inv_freq=torch.rand(2, 1, 8))
    refuse(RuntimeError, "inv_freq", "requires grad", inv_freq=torch.rand(8).requires_grad_())
    refuse(RuntimeError, "inv_freq", "meta", inv_freq=torch.rand(8, device="meta"))
    refuse(TypeError, "inv_freq", "sparse", inv_freq=torch.rand(8).to_sparse())
    for bad in (1, None, "no", np.bool_(True)):
        refuse(TypeError, "interleaved", "bool", interleaved=bad)


def test_frequencies_of_one_op_only():
    refuse_concat(TypeError, "inv_freq", "NoneType", inv_freq=None)
    refuse_attention(ValueError, "inv_freq", "one layer", inv_freq=torch.rand(2, 8))
    refuse_attention(ValueError, "inv_freq is None", "segments[0].offset is 3", inv_freq=None)


def test_page_tables():
    def table(*pages):
        return torch.tensor(pages, dtype=torch.int32)

    refuse_concat(TypeError, "page_table", "int64", "int32", paged=True, page_table=table(3, 0, 2, 1).long())
    refuse_concat(TypeError, "page_table", "list", paged=True, page_table=[3, 0, 2, 1])
    refuse_concat(ValueError, "page_table", "2 dimensions", paged=True, page_table=table(3, 0, 2, 1)[None])
    refuse_concat(RuntimeError, "page_table", "meta", paged=True, page_table=table(3, 0, 2, 1).to("meta"))
    refuse_concat(ValueError, "out_keys", "5 dimensions", paged=True, page_table=None)
    refuse_concat(ValueError, "out_keys", "4 dimensions", page_table=table(0))
    for bad in (4, -1, 2147480000, -(2**31)):
        refuse_concat(IndexError, f"page_table[2] is {bad}", "0 to 3", paged=True, page_table=table(3, 0, bad, 1))
        ops.rope_concat(**{**concat_arguments(paged=True), "page_table": table(3, 0, 2, bad)})  # not written, not read
        ops.rope_concat(**{**concat_arguments(paged=True), "page_table": table(bad, 3, 0, 2), "start": 2})
    refuse_concat(ValueError, "page_table[2] and page_table[0] are both 3", paged=True, page_table=table(3, 0, 3, 1))
    ops.rope_concat(**{**concat_arguments(paged=True), "page_table": table(3, 0, 2, 3)})
    refuse_concat(IndexError, "capacity", "2 pages of 2", paged=True, page_table=table(3, 0))
    refuse_concat(IndexError, "capacity", paged=True, page_table=table())
    empty = torch.full((2, 4, 0, 3, 16), 7.0)
    refuse_concat(IndexError, "capacity", paged=True, out_keys=empty, out_values=empty.clone())


# ----------------------------------------------------------------------------------------------------------------------
# segment_attention
# ----------------------------------------------------------------------------------------------------------------------


def set_segment(field, value, index=1):
    def edit(arguments):
        setattr(arguments["segments"][index], field, value)

    return edit


@pytest.mark.parametrize("name", ["query", "tail_key", "tail_value"])
def test_attention_tensors(name):
    good = attention_arguments()[name]
    refuse_attention(TypeError, name, **{name: None})
    refuse_attention(TypeError, name, "list", **{name: [1]})
    refuse_attention(TypeError, "bfloat16", "float32", **{name: good.bfloat16()})
    for dtype in FLOATS:
        refuse_attention(TypeError, name, str(dtype).removeprefix("torch."), **{name: good.to(dtype)})
    for dtype in EIGHT_BITS:
        refuse_attention(TypeError, name, "key_scale", **{name: good.to(dtype)})
    refuse_attention(ValueError, name, "3 dimensions", **{name: good[0]})
    refuse_attention(ValueError, name, "stride 2", **{name: good.repeat_interleave(2, -1)[..., ::2]})
    refuse_attention(TypeError, name, "sparse", **{name: good.to_sparse()})
    refuse_attention(RuntimeError, name, "meta", **{name: good.to("meta")})
    refuse_attention(RuntimeError, name, "requires grad", **{name: good.clone().requires_grad_()})
    with torch.no_grad():
        arguments = {**attention_arguments(), name: torch.nn.Parameter(good)}
        ops.segment_attention(**arguments)


def test_attention_shapes():
    arguments = attention_arguments()
    key, value = arguments["tail_key"], arguments["tail_value"]
    refuse_attention(ValueError, "tail_key", "query's B", tail_key=key[:1], tail_value=value[:1])
    refuse_attention(ValueError, "tail_value", "tail_key", tail_value=value[:, :, :3])
    refuse_attention(ValueError, "tail_key", tail_key=key[..., :8], tail_value=value[..., :8])
    refuse_attention(ValueError, "3 heads", "2", "multiple", query=torch.randn(2, 3, 3, 16))
    refuse_attention(ValueError, "4 heads", "0", tail_key=key[:, :0], tail_value=value[:, :0])
    for head_dim in (1, 4, 46, 12, 264, 512):
        refuse_attention(
            ValueError,
            f"head dimension of {head_dim}",
            "8 to 256",
            query=torch.randn(2, 4, 3, head_dim),
            tail_key=torch.randn(2, 2, 4, head_dim),
            tail_value=torch.randn(2, 2, 4, head_dim),
            segments=[],
        )


@pytest.mark.parametrize("part", ["key", "value"])
def test_attention_segments(part):
    label = f"segments[1].{part}"
    good = getattr(attention_arguments()["segments"][1], part)
    refuse_attention(TypeError, label, "NoneType", edit=set_segment(part, None))
    refuse_attention(TypeError, label, "bfloat16", "query", edit=set_segment(part, good.bfloat16()))
    for dtype in EIGHT_BITS:
        refuse_attention(TypeError, label, "value_scale", edit=set_segment(part, good.to(dtype)))
    refuse_attention(ValueError, label, "2 dimensions", edit=set_segment(part, good[0, 0]))
    refuse_attention(ValueError, label, edit=set_segment(part, good[:, :1]))
    refuse_attention(ValueError, label, edit=set_segment(part, good[..., :8]))
    refuse_attention(ValueError, label, f"{part}[0]", edit=set_segment(part, good[:1]))
    refuse_attention(ValueError, "segments[1].value", "tokens", edit=set_segment(part, good[:, :, :1]))
    refuse_attention(ValueError, label, "stride 2", edit=set_segment(part, good.repeat_interleave(2, -1)[..., ::2]))
    refuse_attention(TypeError, label, "sparse", edit=set_segment(part, good.to_sparse()))
    refuse_attention(RuntimeError, label, "meta", edit=set_segment(part, good.to("meta")))
    refuse_attention(RuntimeError, label, "requires grad", edit=set_segment(part, good.clone().requires_grad_()))


@pytest.mark.parametrize(
    "shape", [(3, 5, 16), (1, 5, 16), (2, 5, 8), (3, 2, 5, 16), (1, 2, 5, 16), (2, 4, 5, 16), (2, 5)]
)
def test_attention_segments_of_another_shape(shape):
    """Key and value agree with each other, but not with the tail and the query."""
    key = torch.randn(shape)
    refuse_attention(ValueError, "segments[1].key", str(list(shape)), segments=[attention_segment(), Segment(key, key)])


def attention_segment():
    return attention_arguments()["segments"][0]


def test_attention_segment_fields():
    for bad in (True, 1.0, "1", None, torch.tensor(1)):
        refuse_attention(TypeError, "segments[1].offset", "int", edit=set_segment("offset", bad))
        refuse_attention(TypeError, "segments[1].start", "int", edit=set_segment("start", bad))
    for bad in (2**31 + 1, -(2**31) - 1):
        refuse_attention(ValueError, "segments[1].offset", edit=set_segment("offset", bad))
        refuse_attention(ValueError, "segments[1].start", edit=set_segment("start", bad))
    good = attention_arguments()
    for offset in (np.int64(3), np.int32(3)):
        good["segments"][0].offset = offset
        ops.segment_attention(**good)

    def first(name, refuse):
        refuse(TypeError, "int64", "int32", torch.tensor([0, 1]))
        refuse(TypeError, "list", [0, 1])
        refuse(ValueError, "[2]", torch.zeros(3, dtype=torch.int32))
        refuse(ValueError, "dimensions", torch.zeros(2, 1, dtype=torch.int32))
        refuse(RuntimeError, "meta", torch.zeros(2, dtype=torch.int32, device="meta"))

    def of_segment(error, word, *rest):
        refuse_attention(error, "segments[1].first", word, edit=set_segment("first", rest[-1]))

    def of_tail(error, word, *rest):
        refuse_attention(error, "tail_first", word, tail_first=rest[-1])

    first("segments[1].first", of_segment)
    first("tail_first", of_tail)
    strided = torch.tensor([0, 9, 1, 9], dtype=torch.int32)[::2]
    expected = ops.segment_attention(**attention_arguments_with(tail_first=strided.clone()))
    assert torch.equal(expected, ops.segment_attention(**attention_arguments_with(tail_first=strided)))


_FIXED: dict[str, object] = {}


def attention_arguments_with(**changes):
    if not _FIXED:
        _FIXED.update(attention_arguments())
    return {**_FIXED, **changes}


def test_attention_lists_of_segments():
    key = torch.randn(2, 5, 16)
    refuse_attention(TypeError, "segments", "NoneType", segments=None)
    refuse_attention(TypeError, "segments", "Segment", segments=Segment(key, key))
    refuse_attention(TypeError, "segments", "Tensor", segments=key)
    refuse_attention(TypeError, "segments[0]", "tuple", segments=[(key, key, 0)])
    refuse_attention(TypeError, "segments[1]", "NoneType", edit=set_item("segments", 1, None))

    class Other(Segment):
        pass

    whole = ops.segment_attention(**attention_arguments_with(segments=[Segment(key, key, 2)]))
    for segments in ((Segment(key, key, 2),), [Other(key, key, 2)], iter([Segment(key, key, 2)])):
        assert torch.equal(whole, ops.segment_attention(**attention_arguments_with(segments=segments)))


def test_attention_numbers():
    for name in ("scale", "softcap"):
        for bad in (True, "1", torch.tensor(1.0), 1j):
            refuse_attention(TypeError, name, "float", **{name: bad})
        for bad in (math.nan, math.inf, -math.inf, 1e39):
            refuse_attention(ValueError, name, "finite", **{name: bad})
    refuse_attention(TypeError, "softcap", softcap=None)
    refuse_attention(ValueError, "softcap", "-1", softcap=-1.0)
    for name in ("window", "split_tokens"):
        for bad in (True, 1.0, "1", torch.tensor(1)):
            refuse_attention(TypeError, name, "int", **{name: bad, "tail_start": 0})
        for bad in (0, -1):
            refuse_attention(ValueError, name, "None", **{name: bad, "tail_start": 0})
        refuse_attention(ValueError, name, **{name: 2**31 + 1, "tail_start": 0})
    refuse_attention(ValueError, "window", "tail_start", window=4)
    for bad in (True, 1.0, "1"):
        refuse_attention(TypeError, "tail_start", "int", tail_start=bad)
    refuse_attention(ValueError, "tail_start", tail_start=2**31 + 1)
    for bad in (1, None, "yes"):
        refuse_attention(TypeError, "return_lse", "bool", return_lse=bad)
    plain = attention_arguments_with(scale=1.0, softcap=2.0, window=4, tail_start=9, split_tokens=8)
    same = ops.segment_attention(**plain)
    others = attention_arguments_with(
        scale=np.float32(1), softcap=2, window=np.int64(4), tail_start=np.int32(9), split_tokens=np.int64(8)
    )
    assert torch.equal(same, ops.segment_attention(**others))


def test_attention_sinks():
    refuse_attention(TypeError, "sinks", "list", sinks=[0.0])
    refuse_attention(TypeError, "sinks", "int64", sinks=torch.zeros(4, dtype=torch.int64))
    refuse_attention(ValueError, "sinks", "[4]", sinks=torch.zeros(2))
    refuse_attention(ValueError, "sinks", sinks=torch.zeros(2, 4))
    refuse_attention(RuntimeError, "sinks", "requires grad", sinks=torch.nn.Parameter(torch.zeros(4)))
    refuse_attention(RuntimeError, "sinks", "meta", sinks=torch.zeros(4, device="meta"))


# ----------------------------------------------------------------------------------------------------------------------
# merge_states
# ----------------------------------------------------------------------------------------------------------------------


def refuse_merge(error, *words, **changes):
    arguments = {
        "out_a": torch.randn(2, 3, 4, 8),
        "lse_a": torch.randn(2, 3, 4),
        "out_b": torch.randn(2, 3, 4, 8),
        "lse_b": torch.randn(2, 3, 4),
    }
    arguments.update(changes)
    with pytest.raises(error) as caught:
        ops.merge_states(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@pytest.mark.parametrize("name", ["out_a", "out_b", "lse_a", "lse_b"])
def test_merge(name):
    shape = (2, 3, 4, 8) if name.startswith("out") else (2, 3, 4)
    refuse_merge(TypeError, name, "NoneType", **{name: None})
    refuse_merge(TypeError, name, "float64", **{name: torch.randn(shape, dtype=torch.float64)})
    refuse_merge(TypeError, name, "int8", **{name: torch.zeros(shape, dtype=torch.int8)})
    refuse_merge(ValueError, name, "dimensions", **{name: torch.randn(shape)[0]})
    refuse_merge(ValueError, **{name: torch.randn(1, *shape[1:])})
    refuse_merge(TypeError, name, "sparse", **{name: torch.randn(shape).to_sparse()})
    refuse_merge(RuntimeError, name, "meta", **{name: torch.randn(shape, device="meta")})
    refuse_merge(RuntimeError, name, "requires grad", **{name: torch.randn(shape).requires_grad_()})
    if name.startswith("lse"):
        refuse_merge(TypeError, name, "bfloat16", "float32", **{name: torch.randn(shape).bfloat16()})
    else:
        refuse_merge(ValueError, name, "stride 2", **{name: torch.randn(2, 3, 4, 16)[..., ::2]})


# ----------------------------------------------------------------------------------------------------------------------
# Devices, instruction sets, the extension, helpers
# ----------------------------------------------------------------------------------------------------------------------


def test_another_device_is_a_sentence_that_names_what_is_built():
    elsewhere = types.SimpleNamespace(layout=torch.strided, device=torch.device("cuda:0"), dtype=torch.float32)

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return elsewhere.device

    tensor = torch.zeros(2).as_subclass(Elsewhere)
    with pytest.raises(RuntimeError) as caught:
        checks.tensor("query", tensor)
    message = str(caught.value)
    assert message.startswith("query is on cuda:0")
    if not native._C.build_info()["cuda"]:
        assert "CPU kernels only" in message and "KVSPEED_CUDA=ON" in message and "baseline" in message


def test_instruction_sets():
    before = ops.current_isa()
    assert before in ops.cpu_isas() and "baseline" in ops.cpu_isas()
    with ops.cpu_isa("baseline"):
        assert ops.current_isa() == "baseline"
        with ops.cpu_isa("auto"):
            assert ops.current_isa() == before
        with pytest.raises(ZeroDivisionError), ops.cpu_isa(before):
            raise ZeroDivisionError
        assert ops.current_isa() == "baseline"
    assert ops.current_isa() == before
    with pytest.raises(ValueError, match=r"sse9.*baseline"), ops.cpu_isa("sse9"):
        pass
    with pytest.raises(TypeError, match="string"), ops.cpu_isa(2):
        pass
    missing = [name for name in native.ISA_CODES if name != "auto" and name not in ops.cpu_isas()]
    for name in missing:
        with pytest.raises(RuntimeError, match=f"{name}.*available"), ops.cpu_isa(name):
            pass


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def test_the_environment_chooses_the_instruction_set():
    code = "from kvspeed import ops; print(ops.current_isa())"
    done = python(code, KVSPEED_CPU_ISA="baseline")
    assert done.stdout.split() == ["baseline"], done.stderr
    done = python(code, KVSPEED_CPU_ISA="sse9")
    assert done.returncode and "KVSPEED_CPU_ISA is 'sse9'" in done.stderr and "avx2" in done.stderr


def test_a_missing_extension_is_one_sentence():
    done = python("import sys; sys.modules['kvspeed._C'] = None\nimport kvspeed.ops")
    assert done.returncode
    assert "ImportError: kvspeed's compiled kernels (kvspeed._C) cannot be loaded" in done.stderr
    assert "pip install ." in done.stderr.strip().splitlines()[-1]


def test_importing_the_ops_imports_nothing_large_and_no_device():
    code = (
        "import sys, kvspeed.ops, torch\n"
        "print([name for name in ('transformers', 'peft', 'torch._dynamo', 'rich') if name in sys.modules])\n"
        "print(torch.cuda.is_initialized())"
    )
    done = python(code)
    before = python("import sys, torch\nprint([n for n in ('torch._dynamo',) if n in sys.modules])").stdout.split()[0]
    assert done.stdout.splitlines() == [before, "False"], done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is a call of Unix")
def test_the_ops_work_after_a_fork():
    code = (
        "import os, torch\nfrom kvspeed import ops\n"
        "x = torch.randn(4, 8, 64, 64)\n"
        "def use():\n"
        "    return ops.segment_attention(x[:, :, :1], [], x, x, inv_freq=None)\n"
        "expected = use()\n"
        "child = os.fork()\n"
        "torch.set_num_threads(1)\n"  # OpenMP's threads do not survive a fork, torch's rule too
        "same = torch.allclose(use(), expected)\n"
        "if child == 0:\n"
        "    os._exit(0 if same else 1)\n"
        "print(same, os.waitpid(child, 0)[1])"
    )
    done = python(code)
    assert done.stdout.split() == ["True", "0"], done.stdout + done.stderr


def test_empty_huge():
    for shape in ((3, 5), [0], (1024, 1024, 3), torch.Size([2])):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            tensor = ops.empty_huge(shape, dtype, "cpu")
            assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype and tensor.is_contiguous()
            tensor.fill_(3)
            assert (tensor == 3).all()
    assert ops.empty_huge((2, 2), device="meta").device.type == "meta"


def test_segments_are_light_and_readable():
    key = torch.randn(2, 5, 16)
    segment = Segment(key, key, 3, start=-3)
    assert segment.tokens == 5 and segment.first is None and not hasattr(segment, "__dict__")
    assert repr(segment) == "Segment(key=[2, 5, 16] torch.float32, offset=3, start=-3)"
    assert "first" in repr(Segment(key, key, first=torch.zeros(1, dtype=torch.int32)))
    assert "NoneType" in repr(Segment(None, None))


def test_overlaps_against_numpy():
    """The exact answers of numpy's solver, on random strided views."""
    base = torch.zeros(4000, dtype=torch.int16)
    generator = np.random.default_rng()

    def view():
        rank = generator.integers(1, 5)
        shape = generator.integers(1, 6, rank).tolist()
        stride = (generator.integers(0, 13, rank) * generator.choice([1, 1, 3, 10], rank)).tolist()
        return base.as_strided(shape, stride, int(generator.integers(0, 400)))

    found = set()
    for _ in range(1000):
        a, b = view(), view()
        shared = bool(np.shares_memory(a.numpy(), b.numpy()))
        assert overlap.share_memory(a, b) == shared, (a.shape, a.stride(), b.shape, b.stride())
        index = torch.arange(4000).as_strided(a.shape, a.stride()).flatten()
        itself = len(index.unique()) != len(index)
        assert overlap.overlaps_itself(a) == itself, (a.shape, a.stride())
        found |= {("pair", shared), ("self", itself)}
    assert len(found) == 4
    assert not overlap.share_memory(base[:10], base[10:]) and not overlap.share_memory(base[:0], base)
    odd = torch.zeros(9, dtype=torch.int8)[1:].view(torch.int8)
    assert overlap.share_memory(odd, odd[3:4])
