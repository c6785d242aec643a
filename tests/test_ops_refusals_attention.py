# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What `segment_attention` refuses, and what it takes besides the plain forms."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from kvspeed import ops
from kvspeed.segment import Segment, SegmentList
from op_refusals import (
    EIGHT_BITS,
    FLOATS,
    attention_arguments,
    attention_arguments_with,
    refuse_attention,
    set_item,
)
from torch.autograd import forward_ad


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
        for bad in (1.01e38, 3e38, -3e38):
            refuse_attention(ValueError, f"{name} is {bad:g}", "at most 1e+38", "finite", **{name: bad})
        largest = attention_arguments_with(**{name: 1e38}, query=torch.zeros(2, 4, 3, 16))
        assert not ops.segment_attention(**largest).isnan().any()
    refuse_attention(TypeError, "softcap", softcap=None)
    refuse_attention(ValueError, "softcap is -1.0", "0 for no cap", softcap=-1.0)
    for name in ("window", "split_tokens"):
        for bad in (True, 1.0, "1", torch.tensor(1)):
            refuse_attention(TypeError, name, "int", **{name: bad, "tail_start": 0})
        for bad in (0, -1):
            refuse_attention(ValueError, name, "None", **{name: bad, "tail_start": 0})
        refuse_attention(ValueError, name, "at most 2147483648, or None", **{name: 2**31 + 1, "tail_start": 0})
    refuse_attention(ValueError, "window", "tail_start", window=4)
    for bad in (True, 1.0, "1"):
        refuse_attention(TypeError, "tail_start", "int", tail_start=bad)
    refuse_attention(ValueError, "tail_start", "look where the number comes from", tail_start=2**31 + 1)
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


def test_attention_negated_views():
    """Those that torch makes itself; see csrc/argument_reader.h."""
    views = {
        "query": torch.randn(2, 4, 3, 16, dtype=torch.complex64).conj().imag,
        "tail_key": torch.randn(2, 2, 4, 16, dtype=torch.complex64).conj().imag,
        "sinks": torch.randn(4, dtype=torch.complex64).conj().imag,
        "inv_freq": torch.randn(8, dtype=torch.complex64).conj().imag,
    }
    for name, view in views.items():
        refuse_attention(TypeError, f"{name} is a lazily negated view", ".resolve_neg()", **{name: view})
    one = {name: torch.randn(1, 1, 3, 16) for name in ("query", "tail_key", "tail_value")}
    sinks = torch.randn(1, dtype=torch.complex64).conj().imag
    refuse_attention(TypeError, "sinks is a lazily negated view", **one, segments=[], sinks=sinks)


def test_attention_transforms():
    """vmap and jvp give tensors without memory, dual tensors a derivative that would be lost."""
    arguments = attention_arguments()
    segment = arguments["segments"][1]

    def of(name):
        return lambda x: ops.segment_attention(**{**arguments, name: x})

    def of_segment(kind):
        return lambda x: ops.segment_attention(**{**arguments, "segments": kind([Segment(x, segment.value)])})

    for label, function, x in (
        ("query", of("query"), arguments["query"]),
        ("tail_value", of("tail_value"), arguments["tail_value"]),
        ("segments[0].key", of_segment(list), segment.key),
        ("segments[0].key", of_segment(SegmentList), segment.key),
    ):
        match = rf"{re.escape(label)} is inside a transform of torch.func .*call it outside"
        with pytest.raises(RuntimeError, match=match):
            torch.vmap(function)(torch.stack((x, x)))
        with pytest.raises(RuntimeError, match=match):
            torch.func.jvp(function, (x,), (x,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            with pytest.raises(RuntimeError, match=rf"{re.escape(label)} has a tangent"):
                function(dual)
            with torch.inference_mode():
                function(dual)
            function(x)


def paged(**changes):
    """An edit that puts a valid paged segment, or one with a spoilt field, in the place of the second segment."""

    def edit(arguments):
        fields = {
            "key": torch.randn(5, 4, 2, 16),
            "value": torch.randn(5, 4, 2, 16),
            "offset": 3,
            "page_table": torch.tensor([2, 0, 4], dtype=torch.int32),
            "tokens": 11,
            **changes,
        }
        arguments["segments"][1] = Segment(fields.pop("key"), fields.pop("value"), fields.pop("offset"), **fields)

    return edit


def test_attention_pages():
    arguments = attention_arguments()
    paged()(arguments)
    ops.segment_attention(**arguments)
    good = arguments["segments"][1]
    table = good.page_table
    label = "segments[1].page_table"
    refuse_attention(TypeError, label, "int64", "int32", edit=paged(page_table=table.long()))
    refuse_attention(TypeError, label, "list", edit=paged(page_table=[2, 0, 4]))
    refuse_attention(ValueError, label, "[3, 3]", "[B, n]", "B = 2", edit=paged(page_table=table.expand(3, 3)))
    refuse_attention(ValueError, label, "[n]", edit=paged(page_table=table[0]))
    refuse_attention(ValueError, label, "[n]", edit=paged(page_table=table[None, None]))
    refuse_attention(RuntimeError, label, "meta", edit=paged(page_table=table.to("meta")))
    for part in ("key", "value"):
        label, whole = f"segments[1].{part}", getattr(good, part)
        refuse_attention(TypeError, label, "NoneType", edit=paged(**{part: None}))
        refuse_attention(TypeError, label, "bfloat16", "query", edit=paged(**{part: whole.bfloat16()}))
        refuse_attention(ValueError, label, "3 dimensions", "page_size", edit=paged(**{part: whole[0]}))
        refuse_attention(ValueError, label, edit=paged(**{part: whole[:, :, :1]}))
        refuse_attention(ValueError, label, edit=paged(**{part: whole[..., :8]}))
        refuse_attention(ValueError, label, "stride 2", edit=paged(**{part: whole.repeat_interleave(2, -1)[..., ::2]}))
        refuse_attention(RuntimeError, label, "requires grad", edit=paged(**{part: whole.clone().requires_grad_()}))
    refuse_attention(ValueError, "segments[1].value", "segments[1].key", edit=paged(value=good.value[:4]))
    refuse_attention(ValueError, "segments[1].value", "segments[1].key", edit=paged(value=good.value[:, :3]))
    for bad in (True, 1.0, "1", torch.tensor(3)):
        refuse_attention(TypeError, "segments[1].tokens", "int", edit=paged(tokens=bad))
    refuse_attention(ValueError, "segments[1].tokens", "-1", edit=paged(tokens=-1))
    refuse_attention(IndexError, "segments[1].tokens is 13", "3 pages of 4", "12", edit=paged(tokens=13))
    refuse_attention(TypeError, "segments[1].offset", edit=paged(offset=1.5))
    refuse_attention(TypeError, "segments[1].first", edit=paged(first=[0, 1]))
    key = attention_segment().key
    refuse_attention(ValueError, "segments[0]", "page_table", segments=[Segment(key, key, 3, tokens=4)])
    for entry, bad in ((0, 5), (1, -1), (2, 2**31 - 1)):
        wrong = table.clone()
        wrong[entry] = bad
        words = (f"segments[1].page_table[{entry}] is {bad}", "pages 0 to 4")
        refuse_attention(IndexError, *words, edit=paged(page_table=wrong))
    rows = torch.stack((table, table))
    rows[1, 2] = 7
    refuse_attention(IndexError, "segments[1].page_table[1, 2] is 7", edit=paged(page_table=rows))
    paged(page_table=rows, tokens=8)(arguments)  # its page is not read
    paged(page_table=torch.tensor([[2, 9], [0, 9], [4, 9]], dtype=torch.int32)[:, 0])(arguments)
    strided = ops.segment_attention(**arguments)
    arguments["segments"][1] = Segment(
        *(getattr(arguments["segments"][1], n) for n in ("key", "value", "offset")),
        page_table=table,
        tokens=np.int64(11),
    )
    assert torch.equal(strided, ops.segment_attention(**arguments))


def test_attention_lengths_of_the_tail():
    def lengths(*numbers):
        return torch.tensor(numbers, dtype=torch.int32)

    refuse_attention(TypeError, "tail_length", "int64", "int32", tail_length=lengths(4, 2).long())
    refuse_attention(TypeError, "tail_length", "list", tail_length=[4, 2])
    refuse_attention(TypeError, "tail_length", "int", tail_length=4)
    refuse_attention(ValueError, "tail_length", "[2]", tail_length=lengths(4, 2, 1))
    refuse_attention(ValueError, "tail_length", "dimensions", tail_length=lengths(4, 2)[None])
    refuse_attention(RuntimeError, "tail_length", "meta", tail_length=lengths(4, 2).to("meta"))
    refuse_attention(ValueError, "tail_length[1] is 5", "0 to tail_key's 4", tail_length=lengths(4, 5))
    refuse_attention(ValueError, "tail_length[0] is -1", tail_length=lengths(-1, 2))
