# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What `rope_concat` and `merge_states` refuse: the right exception, the argument named, nothing written."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from kvspeed import ops
from op_refusals import (
    EIGHT_BITS,
    FLOATS,
    attention_arguments,
    concat_arguments,
    refuse_attention,
    refuse_concat,
    refuse_merge,
    set_item,
)
from torch.autograd import forward_ad


def test_valid_arguments_pass():
    for paged in (False, True):
        arguments = concat_arguments(paged=paged)
        ops.rope_concat(**arguments)
        assert (arguments["out_keys"] != 7).any()
    ops.segment_attention(**attention_arguments())


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
        refuse_concat(ValueError, "offsets[0]", str(bad), "look where the number comes from", offsets=[bad, 1])
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


def test_transforms():
    """vmap and jvp give tensors without memory, dual tensors a derivative that would be lost."""
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    concat = concat_arguments()

    def merge(x):
        return ops.merge_states(out, lse, x, lse)

    def copy(x):
        return ops.rope_concat(**{**concat, "values": [x, concat["values"][1]]})

    for name, function, x in (("out_b", merge, out), ("values[0]", copy, concat["values"][0])):
        match = f"{re.escape(name)} is inside a transform of torch.func"
        with pytest.raises(RuntimeError, match=match):
            torch.vmap(function)(torch.stack((x, x)))
        with pytest.raises(RuntimeError, match=match):
            torch.func.jvp(function, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"{re.escape(name)} has a tangent"):
            function(forward_ad.make_dual(x, x))
    assert (concat["out_values"] == 7).all()
