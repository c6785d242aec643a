# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`segment_attention` on hostile memory: layouts, alignment, strides of zero and beyond 32 bits."""

from __future__ import annotations

import itertools
import random

import pytest
import reference
import torch
from kvspeed.segment import Segment
from op_cases import DTYPES, Case
from poison import embed, lazy_storage

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.attention]


@pytest.mark.every_isa
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


@pytest.mark.every_isa
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
