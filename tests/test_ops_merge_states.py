# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`merge_states` against the float64 oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from backends import ops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import DTYPES
from poison import embed, lazy_storage

pytestmark = pytest.mark.usefixtures("backend")


def state(shape=(2, 3, 4, 64), dtype=torch.float32, spread=3.0):
    return torch.randn(shape).to(dtype), spread * torch.randn(shape[:3])


def check(out_a, lse_a, out_b, lse_b):
    out, lse = ops.merge_states(out_a, lse_a, out_b, lse_b)
    out_a, lse_a, out_b, lse_b = (x.cpu() for x in (out_a, lse_a, out_b, lse_b))
    assert out.dtype == out_a.dtype and lse.dtype == torch.float32 and lse.is_contiguous()
    truth, truth_lse = reference.merge_states(out_a, lse_a, out_b, lse_b)
    own, own_lse = reference.merge_states_torch(out_a, lse_a, out_b, lse_b)
    inputs = max((x.float().abs().max().item() for x in (out_a, out_b) if x.numel()), default=0.0)
    reference.accept(out, truth, own, "output", slack=2**-23 * inputs)  # the sum may cancel
    finite = [x[x.isfinite()].abs().max().item() for x in (lse_a, lse_b) if x.isfinite().any()]
    reference.accept(lse, truth_lse, own_lse, "lse", slack=2**-23 * max([1.0, *finite]))  # here too
    return out, lse


@pytest.mark.every_isa
@pytest.mark.parametrize(("dtype_a", "dtype_b"), itertools.product(DTYPES, DTYPES))
def test_dtypes(dtype_a, dtype_b):
    for head_dim in (1, 7, 8, 46, 64, 96, 128, 256, 512):
        shape = (2, 3, 4, head_dim)
        check(*state(shape, dtype_a), *state(shape, dtype_b))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_states(dtype):
    some, nothing = state(dtype=dtype), (torch.zeros(2, 3, 4, 64, dtype=dtype), torch.full((2, 3, 4), -math.inf))
    out, lse = check(*nothing, *nothing)
    assert (out == 0).all() and (lse == -math.inf).all()
    for pair in ((some, nothing), (nothing, some)):
        out, lse = check(*pair[0], *pair[1])
        assert torch.equal(out, some[0]) and torch.equal(lse, some[1])
    mixed = state(dtype=dtype)
    mixed[1][0, 1], mixed[1][:, :, 2] = -math.inf, -math.inf
    mixed[0][mixed[1] == -math.inf] = 0
    check(*mixed, *some)
    check(*some, *mixed)


@pytest.mark.every_isa
@pytest.mark.parametrize("level", [-1e5, -300.0, 0.0, 300.0, 1e5])
def test_extreme_lse(level):
    a, b = state(), state()
    check(a[0], a[1] + level, b[0], b[1] + level)
    out, lse = check(a[0], a[1] + level + 1000, b[0], b[1] + level)
    assert torch.equal(out, a[0]) and torch.equal(lse, a[1] + level + 1000)


def test_equal_states_are_kept():
    out_a, lse_a = state()
    out, lse = check(out_a, lse_a, out_a, lse_a)
    torch.testing.assert_close(out, out_a)
    torch.testing.assert_close(lse, lse_a + math.log(2))


@pytest.mark.every_isa
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, shift):
    a, b = state(dtype=dtype), state(dtype=dtype)
    compact = check(*a, *b)
    for order in itertools.permutations(range(3)):
        hostile = [embed(x, order=(*order, 3), shift=shift) for x in (a[0], b[0])]
        lse_a = embed(a[1][..., None].contiguous(), order=(*order, 3), shift=shift)[..., 0]
        lse_b = b[1].transpose(0, 2).contiguous().transpose(0, 2)
        out, lse = check(hostile[0], lse_a, hostile[1], lse_b)
        assert reference.same_bits(out, compact[0]) and reference.same_bits(lse, compact[1])


def test_strides_of_zero_and_beyond_32_bits():
    shape, elements = (2, 2, 2, 64), 2**32 + 2**30
    pool = lazy_storage(elements, torch.float32)
    far = elements - 2**20
    for strides in ((far, 4096, 64, 1), (2048, far, 64, 1), (4096, 2048, far, 1)):
        a, b = pool.as_strided(shape, strides, 1), pool.as_strided(shape, strides, 2**18)
        a.copy_(torch.randn(shape))
        b.copy_(torch.randn(shape))
        lse = pool.as_strided(shape[:3], strides[:3], 2**19)
        lse.copy_(torch.randn(shape[:3]))
        check(a, lse, b, torch.randn(shape[:3]))
    check(torch.randn(64).expand(shape), torch.randn(1).expand(shape[:3]), torch.randn(shape), torch.randn(shape[:3]))


def test_empty_shapes_and_layout_of_the_output():
    for shape in ((0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8)):
        out, lse = ops.merge_states(*state(shape), *state(shape))
        assert out.shape == shape and lse.shape == shape[:3]
    a, b = state((2, 4, 3, 8)), state((2, 3, 4, 8))
    assert check(a[0].transpose(1, 2), b[1], *b)[0].transpose(1, 2).is_contiguous()


def test_inputs_are_left_alone_and_runs_agree():
    inputs = (*state((4, 8, 50, 64), torch.bfloat16), *state((4, 8, 50, 64), torch.bfloat16))
    before = [x.clone() for x in inputs]
    first = check(*inputs)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            again = ops.merge_states(*inputs)
            assert reference.same_bits(first[0], again[0]) and reference.same_bits(first[1], again[1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


def test_merging_is_symmetric_and_associative():
    a, b, c = state(), state(), state()
    for one, other in (
        (ops.merge_states(*a, *b), ops.merge_states(*b, *a)),
        (ops.merge_states(*ops.merge_states(*a, *b), *c), ops.merge_states(*a, *ops.merge_states(*b, *c))),
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.every_isa
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything(data):
    shape = tuple(data.draw(st.tuples(*(st.integers(1, n) for n in (3, 5, 6, 140))), "shape"))
    dtypes = data.draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)), "dtypes")
    spread = data.draw(st.sampled_from([0.1, 10.0, 200.0]), "spread")
    a, b = state(shape, dtypes[0]), state(shape, dtypes[1], spread)
    order = (*data.draw(st.permutations(range(3)), "order"), 3)
    check(embed(a[0], order=order, shift=data.draw(st.integers(0, 7), "shift")), a[1], *b)
