# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`rope_concat` against the float64 oracle: shapes, offsets, and what must be exact to the bit."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch
from backends import ops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import DTYPES, INTEGERS, OFFSETS, frequencies, packets, run
from poison import embed

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [2, 8, 46, 64, 80, 96, 112, 128, 256, 512])
def test_head_and_rotary_dims(head_dim, interleaved, dtype):
    for rotary_dim in sorted({0, 2, 16, 20, 32, 64, head_dim - 2, head_dim}):
        if rotary_dim <= head_dim:
            keys, values = packets([3, 1, 6], head_dim=head_dim, dtype=dtype)
            run(keys, values, [7, -2, 0], frequencies(rotary_dim), start=1, interleaved=interleaved)


@pytest.mark.every_isa
@pytest.mark.parametrize("head_dim", [1, 3, 7, 33])
def test_odd_head_dims(head_dim):
    keys, values = packets([2, 5], head_dim=head_dim)
    run(keys, values, [3, -9], frequencies(head_dim - 1))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_offsets(theta, interleaved, dtype):
    keys, values = packets([5] * len(OFFSETS), dtype=dtype)
    run(keys, values, OFFSETS, frequencies(64, theta), interleaved=interleaved)
    run(keys, values, [2**30, -(2**31), 2**31, 12345678, 3, 4, 5], frequencies(64, theta), interleaved=interleaved)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_survive(dtype):
    """-0.0, denormals, infinities and NaN payloads, quiet and signalling, where nothing is rotated."""
    integer = INTEGERS[dtype]
    bits = torch.iinfo(integer)
    shape = (3, 2, 37, 48)
    random_bits = torch.randint(bits.min, bits.max + 1, (2, *shape), dtype=torch.int64)
    key, value = random_bits.to(integer).view(dtype)
    key[0, 0, 0, :4] = torch.tensor([-0.0, 0.0, float("inf"), float("-inf")])
    inv_freq = frequencies(32)[None].repeat(3, 1)
    inv_freq[1] = 0  # a layer without rotary embedding
    out_keys, out_values = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    ops.rope_concat([key], [value], [0], inv_freq, out_keys, out_values)
    assert reference.same_bits(out_keys, key) and reference.same_bits(out_values, value)
    ops.rope_concat([key], [value], [991], inv_freq, out_keys, out_values)
    assert reference.same_bits(out_values, value)
    assert reference.same_bits(out_keys[1], key[1]), "the layer whose row is zero changed"
    assert reference.same_bits(out_keys[..., 32:], key[..., 32:]), "dimensions beyond R changed"
    assert not reference.same_bits(out_keys[0], key[0])


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_bits_beyond_the_rotary_dimensions_survive(interleaved, dtype):
    """Beside numbers that turn, wherever R ends: infinities and NaN neighbours must not leak, -0.0 must stay."""
    integer = INTEGERS[dtype]
    bits = torch.iinfo(integer)
    for head_dim, rotary_dim in ((64, 32), (64, 16), (128, 20), (80, 2), (96, 92), (256, 64)):
        key = torch.randint(bits.min, bits.max + 1, (2, 2, 21, head_dim), dtype=torch.int64).to(integer).view(dtype)
        key[:, :, ::3, rotary_dim:] = -0.0
        out = torch.empty_like(key)
        inv_freq = frequencies(rotary_dim)
        ops.rope_concat([key], [key], [77], inv_freq, out, torch.empty_like(key), interleaved=interleaved)
        assert reference.same_bits(out[..., rotary_dim:], key[..., rotary_dim:]), (head_dim, rotary_dim)


@pytest.mark.every_isa
def test_rounding_to_nearest_even():
    """Every bfloat16 and float16 result is the float32 result, rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        key = (torch.randn(1, 2, 300, 64) * torch.logspace(-6, 3, 300)[:, None]).to(dtype)
        half, full = torch.empty_like(key), torch.empty(key.shape)
        ops.rope_concat([key], [key], [17], frequencies(64), half, torch.empty_like(key))
        ops.rope_concat([key.float()], [key.float()], [17], frequencies(64), full, torch.empty_like(full))
        assert (half == full.to(dtype)).double().mean() > 0.9999


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_frequencies_per_layer(shared, dtype):
    keys, values = packets([4, 9], layers=4, dtype=dtype)
    rows = torch.stack([frequencies(64, theta) for theta in (1e4, 1e6, 5e5, 1e4)])
    rows[2] = 0
    if shared:
        rows = rows[:1].expand(4, -1)
    run(keys, values, [100, -3], rows)
    padded = torch.full((4, 50), float("nan"))
    padded[:, :32] = rows
    run(keys, values, [100, -3], padded[:, :32])  # a layer stride larger than R/2
    spread = torch.full((4, 64), float("nan"))
    spread[:, ::2] = rows
    run(keys, values, [100, -3], spread[:, ::2])  # a stride inside the row


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_packet_twice_and_permutations(dtype):
    keys, values = packets([6, 6, 6], dtype=dtype)
    keys[1], values[1] = keys[0], values[0]
    got_keys, got_values = run(keys, values, [0, 6, 12], frequencies(64))
    assert reference.same_bits(got_values[:, :, :6], got_values[:, :, 6:12])
    assert not torch.equal(got_keys[:, :, :6], got_keys[:, :, 6:12])
    keys, values = packets([3, 5, 2], dtype=dtype)
    for order in itertools.permutations(range(3)):
        run([keys[i] for i in order], [values[i] for i in order], [10 * i for i in order], frequencies(64))


@pytest.mark.parametrize("lengths", [[0], [1], [0, 0, 1, 0], [15, 16, 17], [4097], [1] * 70])
def test_lengths(lengths):
    keys, values = packets(lengths, heads=1)
    run(keys, values, [3 * i - 5 for i in range(len(lengths))], frequencies(64), start=2)


def test_nothing_to_do():
    out = torch.full((2, 2, 4, 8), 7.0)
    keys, values = packets([0, 0], head_dim=8, dtype=torch.float32)
    ops.rope_concat([], [], [], frequencies(8), out, out.clone())
    ops.rope_concat(keys, values, [1, 2], frequencies(8), out, out.clone(), start=4)
    none = torch.empty(0, 2, 4, 8)
    ops.rope_concat([none], [none], [1], frequencies(8), none.clone(), none.clone())
    none = torch.empty(2, 0, 4, 8)
    ops.rope_concat([none], [none], [1], frequencies(8), none.clone(), none.clone())
    assert (out == 7).all()


def shifted(key, offset, inv_freq):
    out = torch.empty_like(key)
    ops.rope_concat([key], [key], [offset], inv_freq, out, torch.empty_like(key))
    return out


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_shifts_form_a_group(dtype):
    inv_freq = frequencies(64)
    key = torch.randn(2, 2, 50, 64).to(dtype)
    tolerance = key.double().norm(dim=-1, keepdim=True) * torch.finfo(dtype).eps
    twice, once = shifted(shifted(key, 4000, inv_freq), -1234, inv_freq), shifted(key, 2766, inv_freq)
    assert ((twice.double() - once.double()).abs() <= 2 * tolerance).all()
    back = shifted(shifted(key, 131071, inv_freq), -131071, inv_freq)
    assert ((back.double() - key.double()).abs() <= 2 * tolerance).all()

    def pair_norms(x):
        return torch.hypot(x[..., :32].double(), x[..., 32:].double())

    assert ((pair_norms(once) - pair_norms(key)).abs() <= tolerance).all()


@pytest.mark.every_isa
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything(data):
    head_dim = data.draw(st.integers(1, 140), "head_dim")
    rotary_dim = 2 * data.draw(st.integers(0, head_dim // 2), "half of rotary_dim")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5), "lengths")
    layers, heads = data.draw(st.integers(1, 3), "layers"), data.draw(st.integers(1, 3), "heads")
    keys, values = packets(lengths, layers=layers, heads=heads, head_dim=head_dim, dtype=dtype)
    order = (*data.draw(st.permutations(range(3)), "order"), 3)
    gap, shift = data.draw(st.integers(0, 2), "gap"), data.draw(st.integers(0, 7), "shift")
    run(
        [embed(key, order=order, gap=gap, shift=shift) for key in keys],
        values,
        [data.draw(st.integers(-200000, 200000), "offset") for _ in lengths],
        frequencies(rotary_dim),
        start=data.draw(st.integers(0, 5), "start"),
        interleaved=data.draw(st.booleans(), "interleaved"),
        order=order,
        gap=gap,
        shift=shift,
    )
