# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`rope_concat` of int8 and float8_e4m3fn packets with scales: exact values, one rounding, hostile memory, refusals."""

from __future__ import annotations

import itertools
import random

import pytest
import reference
import torch
from backends import ops
from op_cases import DTYPES, frequencies
from op_refusals import refuse_concat
from poison import Embedded

pytestmark = pytest.mark.usefixtures("backend")

STORED = [torch.int8, torch.float8_e4m3fn]


def embed8(values, *, order=(0, 1, 2, 3), gap=1, shift=0):
    """The same 8-bit values in a hostile layout, surrounded by the byte 0x7f, which is NaN as float8."""
    stride, step = [0] * 4, 1
    for dimension in reversed(order):
        stride[dimension] = step
        step *= values.shape[dimension] + (3 * gap if dimension == 3 else gap)
    bits = torch.full((step + shift + 64,), 0x7F, dtype=torch.uint8)
    view = bits.as_strided(values.shape, stride, shift)
    view.copy_(values.view(torch.uint8))
    return bits.view(values.dtype).as_strided(values.shape, stride, shift)


def numbers(stored, *shape):
    """Every finite 8-bit pattern may occur."""
    bits = torch.randint(0, 256, shape, dtype=torch.uint8)
    if stored is not torch.int8:
        bits[bits & 0x7F == 0x7F] = 0x35
    return bits.view(stored)


def make(lengths, stored, *, layers=2, heads=2, head_dim=64, **layout):
    """Packets, and scales with a stride between their numbers."""
    keys, values = ([embed8(numbers(stored, layers, heads, n, head_dim), **layout) for n in lengths] for _ in range(2))
    key_scale, value_scale = ([torch.rand(heads, layers, 3)[..., 1].T * 0.1 for _ in lengths] for _ in range(2))
    return keys, values, key_scale, value_scale


def run(packets, offsets, inv_freq, dtype, *, start=0, interleaved=False, order=None, shift=0, gap=1):
    """Checks a call against truth, and against the op itself on the same numbers as plain packets."""
    keys, values, key_scale, value_scale = packets
    plain_keys, plain_values = (
        [reference.dequantise(one, scale) for one, scale in zip(*pair, strict=True)]
        for pair in ((keys, key_scale), (values, value_scale))
    )
    total = sum(key.shape[2] for key in keys)
    layers, heads, _, head_dim = keys[0].shape
    shape = (layers, heads, start + total + 2, head_dim)
    outs = [Embedded(shape, dtype, order=order, gap=gap, shift=shift + i) for i in range(2)]
    options = {"start": start, "interleaved": interleaved}
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    ops.rope_concat(keys, values, offsets, inv_freq, outs[0].view, outs[1].view, **options, **scales)
    written = torch.zeros(shape, dtype=torch.bool)
    written[:, :, start : start + total] = True
    for out in outs:
        out.check(written)
    got_keys, got_values = (out.view[:, :, start : start + total] for out in outs)

    wide = [torch.empty(shape) for _ in range(2)]
    ops.rope_concat(plain_keys, plain_values, offsets, inv_freq, *wide, **options)
    wide_keys, wide_values = (out[:, :, start : start + total] for out in wide)
    assert reference.same_bits(got_keys, wide_keys.to(dtype)), "keys are not turned in float32 and rounded once"
    assert reference.same_bits(got_values, wide_values.to(dtype)), "values are not the product, rounded once"

    truth, _ = reference.rope_concat(plain_keys, plain_values, offsets, inv_freq, interleaved)
    size = torch.cat(plain_keys, 2).double().abs().amax(-1, keepdim=True)
    half_ulp = truth.abs() * torch.finfo(dtype).eps / 2
    assert ((got_keys.double() - truth).abs() <= half_ulp * (1 + 1e-6) + size * 2**-22 + 1e-7).all()
    assert reference.same_bits(got_values, torch.cat(plain_values, 2).to(dtype))


@pytest.mark.every_isa
@pytest.mark.parametrize("stored", STORED)
def test_every_stored_number_is_exact(stored):
    """All 256 of them, NaN too, by a scale of one and by others, as keys at offset 0 and as values."""
    one = torch.arange(256, dtype=torch.uint8).view(1, 1, 4, 64).view(stored)
    for scale in (1.0, 0.0123, -3.5, 2.0**100, 2.0**-140):
        scales = [torch.full((1, 1), scale)]
        out_keys, out_values = torch.empty(1, 1, 4, 64), torch.empty(1, 1, 4, 64)
        ops.rope_concat([one], [one], [0], frequencies(64), out_keys, out_values, key_scale=scales, value_scale=scales)
        expected = one.float() * torch.tensor(scale)
        for out in (out_keys, out_values):
            assert torch.equal(out.isnan(), expected.isnan())
            known = ~expected.isnan()
            assert reference.same_bits(out[known], expected[known])


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("interleaved", [False, True])
def test_head_and_rotary_dims(interleaved, stored, dtype):
    for head_dim in (1, 2, 8, 24, 46, 64, 80, 128, 256):
        for rotary_dim in sorted({0, 2, 20, 32, head_dim // 2 * 2}):
            if rotary_dim <= head_dim:
                packets = make([3, 1, 6], stored, head_dim=head_dim, gap=0)
                run(packets, [7, -2, 0], frequencies(rotary_dim), dtype, start=1, interleaved=interleaved)


@pytest.mark.parametrize("stored", STORED)
def test_hostile_layouts(stored):
    for order in itertools.permutations(range(3)):
        shift = random.randrange(9)
        packets = make([5, 0, 40], stored, order=(*order, 3), gap=random.randrange(2), shift=shift)
        dtype = random.choice(DTYPES)
        run(packets, [4096, 3, -131071], frequencies(64), dtype, order=(*order, 3), shift=random.randrange(8))


@pytest.mark.parametrize("stored", STORED)
def test_shared_scales_many_packets_and_layers_that_do_not_turn(stored):
    keys, values, *_ = make([2] * 70, stored, layers=3, heads=2)
    scale = torch.tensor(0.25).expand(3, 2)
    rows = torch.stack([frequencies(64), torch.zeros(32), frequencies(64, 1e6)])
    packets = (keys, values, [scale] * 70, [scale] * 70)
    run(packets, [5 * i - 20 for i in range(70)], rows, torch.bfloat16)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages(dtype, stored):
    keys, values, key_scale, value_scale = make([9, 20], stored)
    table = torch.tensor([7, 4, 0, 6, 2], dtype=torch.int32)
    outs = [Embedded((2, 8, 8, 2, 64), dtype, gap=i) for i in range(2)]
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    ops.rope_concat(
        keys, values, [3, 0], frequencies(64), outs[0].view, outs[1].view, start=5, page_table=table, **scales
    )
    flat = [torch.empty(2, 2, 34, 64, dtype=dtype) for _ in range(2)]
    ops.rope_concat(keys, values, [3, 0], frequencies(64), *flat, start=5, **scales)
    for out, expected in zip(outs, flat, strict=True):
        got = out.view[:, table.long()].flatten(1, 2).transpose(1, 2)
        assert reference.same_bits(got[:, :, 5:34], expected[:, :, 5:])
        out.check()


@pytest.mark.without("simt", "cuda")
def test_refusals():
    def given(keys, values, key_scale="scales", value_scale="scales"):
        scales = [torch.ones(2, 3), torch.ones(2, 3)]
        return {
            "keys": [torch.zeros(2, 3, n, 16).to(keys) for n in (3, 2)],
            "values": [torch.zeros(2, 3, n, 16).to(values) for n in (3, 2)],
            "key_scale": scales if isinstance(key_scale, str) else key_scale,
            "value_scale": scales if isinstance(value_scale, str) else value_scale,
        }

    int8, fp8 = torch.int8, torch.float8_e4m3fn
    refuse_concat(TypeError, "keys[0]", "int8", "key_scale", **given(int8, int8, None, None))
    refuse_concat(TypeError, "keys[0]", "float8_e4m3fn", "value_scale", **given(fp8, fp8, None, None))
    refuse_concat(ValueError, "key_scale is missing", **given(int8, int8, None))
    refuse_concat(ValueError, "value_scale is missing", **given(int8, int8, value_scale=None))
    refuse_concat(ValueError, "key_scale", "float32", "leave them out", **given(torch.float32, torch.float32))
    refuse_concat(TypeError, "values[0]", "float8_e4m3fn", "int8", **given(int8, fp8))
    refuse_concat(TypeError, "values[0]", "float32", "int8", **given(int8, torch.float32))
    for other in (torch.uint8, torch.float8_e5m2, torch.bfloat16):
        refuse_concat(TypeError, "keys[0]", str(other)[6:], "int8 or float8_e4m3fn", **given(other, other))
    one = torch.ones(2, 3)
    refuse_concat(TypeError, "key_scale must be a list", "Tensor", **given(int8, int8, one))
    refuse_concat(ValueError, "value_scale has 1 entries", **given(int8, int8, value_scale=[one]))
    refuse_concat(TypeError, "key_scale[1]", "float64", **given(int8, int8, [one, one.double()]))
    refuse_concat(ValueError, "key_scale[1]", "[2, 3]", "[L, H_kv]", **given(int8, int8, [one, one.T]))
    refuse_concat(ValueError, "value_scale[0]", **given(int8, int8, value_scale=[one[:, :1], one]))
    out = torch.full((2, 3, 8, 16), 7.0)
    refuse_concat(
        ValueError, "out_keys overlaps key_scale[0]", **given(int8, int8, [out[:, :, 0, 0], one]), out_keys=out
    )


@pytest.mark.without("simt", "cuda")
def test_opcheck():
    keys, values, key_scale, value_scale = make([3, 2], torch.int8)
    outs = [torch.zeros(2, 2, 5, 64) for _ in range(2)]
    arguments = (keys, values, [1, 2], frequencies(64), *outs, 0, False, None, key_scale, value_scale)
    torch.library.opcheck(torch.ops.kvspeed.rope_concat, arguments)
