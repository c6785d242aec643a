# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`segment_attention` over paged segments, and over tails whose length lies in memory."""

from __future__ import annotations

import math
import random

import pytest
import reference
import torch
from backends import attention_dtype, is_gpu, ops, small
from kvspeed.segment import Segment
from op_cases import DTYPES, Case, accept_attention
from poison import UNUSED_PAGE, Embedded

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.attention]

# Orders in memory of [page, token, head, D], from the outermost dimension.
ORDERS = {"BNHC": (0, 1, 2, 3), "BHNC": (0, 2, 1, 3), "HBNC": (2, 0, 1, 3)}


def pages_of(case, tokens, page_size, offset=0, *, rows=False, order=None, spare=3, start=0, first=None, gap=1):
    """A paged segment of random numbers, NaN in all that is not read, and the same without pages.

    `rows`: each row of the batch has pages of its own.
    """
    entries, batch = -(-tokens // page_size), case.batch if rows else 1
    pages = entries * batch + spare
    shape = (pages, page_size, case.heads_kv, case.head_dim)
    key, value = Embedded(shape, case.dtype, order=order, gap=gap), Embedded(shape, case.dtype, order=order, gap=0)
    used = torch.randperm(pages)[: entries * batch].view(batch, entries)
    table = torch.full((batch, entries + 2), UNUSED_PAGE, dtype=torch.int32)
    table[:, :entries] = used.int()
    table[:, -1] = -123456
    dense_key, dense_value = (case.random(batch, case.heads_kv, tokens, case.head_dim) for _ in range(2))
    for row in range(batch):
        for t in range(tokens):
            page, slot = used[row, t // page_size], t % page_size
            key.view[page, slot] = dense_key[row, :, t]
            value.view[page, slot] = dense_value[row, :, t]
    options = {"start": start, "first": first}
    paged = Segment(key.view, value.view, offset, page_table=table if rows else table[0], tokens=tokens, **options)
    if not rows:
        dense_key, dense_value = dense_key[0], dense_value[0]
    return paged, Segment(dense_key, dense_value, offset, **options)


def check(case, paged, dense, **options):
    """The op over pages, against truth without them."""
    case.segments = paged
    out, lse = case.run(**options)
    case.segments = dense
    arguments = (case.query, dense, case.tail_key, case.tail_value)
    options.pop("split_tokens", None)
    truth = reference.segment_attention(*arguments, inv_freq=case.inv_freq, **options)
    own = reference.segment_attention_torch(*arguments, inv_freq=case.inv_freq, **options)
    accept_attention((out, lse), truth, own, arguments)
    return out, lse


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 256])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_pages(order, page_size, rows):
    for queries in (1, 20):
        case = Case(lengths=(), rows=queries)
        lengths = (page_size - 1, page_size + 1, 70)
        pairs = [pages_of(case, n, page_size, 5 * i, rows=rows, order=order) for i, n in enumerate(lengths)]
        check(case, *zip(*pairs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim, dtype):
    case = Case(lengths=(), head_dim=head_dim, dtype=dtype, rows=2, heads=6)
    check(case, *zip(pages_of(case, 90, 16, 4), pages_of(case, 33, 16, 0, rows=True), strict=True))


def test_pages_beside_other_segments_with_padding_and_a_window():
    case = Case(batch=3, rows=3, lengths=(9, 5), tail=6)
    others = case.segments
    first = torch.tensor([0, 20, 41], dtype=torch.int32)
    pairs = [pages_of(case, 40, 16, 3, rows=rows, start=7, first=first) for rows in (False, True)]
    paged = [others[0], pairs[0][0], others[1], pairs[1][0]]
    dense = [others[0], pairs[0][1], others[1], pairs[1][1]]
    check(case, paged, dense, split_tokens=16)
    check(case, paged, dense, window=25, tail_start=55, softcap=4.0, sinks=torch.randn(4))


def test_pages_that_follow_each_other():
    """Where pages lie in order they read like one run, and give its bits."""
    case = Case(lengths=(), rows=2)
    key, value = (case.random(8, 16, 2, 64) for _ in range(2))
    table = torch.arange(2, 7, dtype=torch.int32)
    case.segments = [Segment(key, value, 9, page_table=table, tokens=75)]
    out, lse = case.run()
    flat = [x[2:7].flatten(0, 1)[:75].transpose(0, 1) for x in (key, value)]
    case.segments = [Segment(*flat, 9)]
    expected = case.run()
    assert reference.same_bits(out, expected[0]) and reference.same_bits(lse, expected[1])


def test_lengths_of_paged_segments():
    case = Case(lengths=(), rows=2)
    paged, dense = pages_of(case, 48, 16, 3)
    assert paged.tokens == 48
    paged.page_table = paged.page_table[:3]
    check(case, [Segment(paged.key, paged.value, 3, page_table=paged.page_table)], [dense])  # all that the pages hold
    for tokens in (0, 1, 16, 17):
        short = Segment(paged.key, paged.value, 3, page_table=paged.page_table, tokens=tokens)
        check(case, [short], [Segment(dense.key[:, :tokens], dense.value[:, :tokens], 3)])
    nothing = torch.empty(0, dtype=torch.int32)
    check(
        case, [Segment(paged.key, paged.value, 3, page_table=nothing)], [Segment(dense.key[:, :0], dense.value[:, :0])]
    )


def test_a_layer_of_rope_concats_pages():
    """Assembled into pages by one op, read from there by the other, against the packets in place."""
    case = Case(batch=1, lengths=(), rows=2)
    packets = [case.segment(n, offset, shared=True) for n, offset in ((20, 4), (31, -2), (5, 0))]
    keys, values = [s.key[None] for s in packets], [s.value[None] for s in packets]
    table = torch.tensor([5, 1, 0, 6], dtype=torch.int32)
    out_keys, out_values = (torch.full((1, 8, 16, 2, 64), math.nan, dtype=case.dtype) for _ in range(2))
    offsets = [s.offset for s in packets]
    ops.rope_concat(keys, values, offsets, case.inv_freq, out_keys, out_values, page_table=table)
    case.segments = [Segment(out_keys[0], out_values[0], page_table=table, tokens=56)]
    out, lse = case.run()
    case.segments = packets
    expected = case.run()
    tolerance = 20 * max(torch.finfo(case.dtype).eps, 1e-6)
    torch.testing.assert_close(out, expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=tolerance)


def test_pages_out_of_range():
    """The CPU refuses them before it computes; a GPU, which reads the table later, hides their tokens."""
    case = Case(lengths=(), rows=2, tail=3)
    paged, dense = pages_of(case, 48, 16, 3)
    for bad in (-1, paged.key.shape[0], UNUSED_PAGE, -(2**31)):
        table = paged.page_table.clone()
        table[1] = bad
        segment = Segment(paged.key, paged.value, 3, page_table=table, tokens=48)
        if is_gpu():
            hidden = [Segment(dense.key[:, i], dense.value[:, i], 3) for i in (slice(16), slice(32, None))]
            check(case, [segment], hidden)
            continue
        case.segments = [segment]
        with pytest.raises(
            IndexError, match=rf"segments\[0\].page_table\[1\] is {bad}; segments\[0\].key has pages 0 to"
        ):
            case.run()


@pytest.mark.parametrize("rows", [1, 20])
def test_pools_without_pages(rows):
    """Every entry is out of range then: as above."""
    case = Case(lengths=(9,), rows=rows, tail=3)
    others, pool = case.segments, torch.empty(0, 16, 2, 64, dtype=case.dtype)
    table = torch.tensor([0, 1], dtype=torch.int32)
    check(case, [*others, Segment(pool, pool, 3, page_table=table, tokens=0)], others)
    for given in (table, table.repeat(2, 1)):
        paged = [*others, Segment(pool, pool, 3, page_table=given, tokens=20)]
        if is_gpu():
            check(case, paged, others)
            continue
        case.segments = paged
        with pytest.raises(IndexError, match=r"segments\[1\].page_table\[.*\] is 0; .*has no pages: give it some"):
            case.run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_lengths_of_the_tail_in_memory(rows, dtype):
    """What lies behind a row's length is never read: it may be NaN. The row equals the same tail cut there."""
    capacity = small(300, 90)
    lengths = [0, 1, rows, rows + 5, capacity - 1, capacity]
    case = Case(batch=len(lengths), rows=rows, tail=capacity, lengths=(13, 30), dtype=dtype)
    for row, length in enumerate(lengths):
        case.tail_key[row, :, length:] = case.tail_value[row, :, length:] = math.nan
    for options in ({}, {"window": 9, "tail_start": 44}, {"split_tokens": 32, "sinks": torch.randn(4)}):
        out, lse = case.run(tail_length=torch.tensor(lengths, dtype=torch.int32), **options)
        for row, length in enumerate(lengths):
            one = Case(batch=1, rows=rows, tail=0, lengths=(), dtype=dtype)
            one.query = case.query[row : row + 1]
            one.tail_key, one.tail_value = (x[row : row + 1, :, :length] for x in (case.tail_key, case.tail_value))
            one.segments = [
                Segment(*(x if x.ndim == 3 else x[row : row + 1] for x in (s.key, s.value)), s.offset)
                for s in case.segments
            ]
            truth, truth_lse = one.check(**options)
            tolerance = 8 * max(torch.finfo(dtype).eps, 1e-6)
            torch.testing.assert_close(out[row], truth[0], rtol=0, atol=tolerance)
            torch.testing.assert_close(lse[row], truth_lse[0], rtol=0, atol=tolerance)


def test_lengths_of_the_tail_that_agree():
    case = Case(rows=2, tail=40)
    whole = case.run()
    full = case.run(tail_length=torch.full((2,), 40, dtype=torch.int32))
    case.tail_key, case.tail_value = (
        torch.cat((x, torch.full_like(x, math.nan)), 2) for x in (case.tail_key, case.tail_value)
    )
    padded = case.run(tail_length=torch.full((2,), 40, dtype=torch.int32), tail_first=torch.zeros(2, dtype=torch.int32))
    tolerance = 8 * max(torch.finfo(case.dtype).eps, 1e-6)
    for other in (full, padded):
        for a, b in zip(whole, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_lengths_and_padding_of_the_tail():
    case = Case(batch=3, rows=2, tail=20, lengths=(6,))
    lengths, first = [20, 11, 5], [3, 11, 0]
    out, lse = case.run(
        tail_length=torch.tensor(lengths, dtype=torch.int32), tail_first=torch.tensor(first, dtype=torch.int32)
    )
    whole = (case.query, case.tail_key, case.tail_value)
    shared = case.segments[0]
    assert shared.key.ndim == 3
    for row in range(3):
        case.query = whole[0][row : row + 1]
        case.tail_key, case.tail_value = (x[row : row + 1, :, : lengths[row]] for x in whole[1:])
        expected = case.check(tail_first=torch.tensor(first[row : row + 1], dtype=torch.int32))
        tolerance = 8 * max(torch.finfo(case.dtype).eps, 1e-6)
        torch.testing.assert_close(out[row], expected[0][0], rtol=0, atol=tolerance)
        torch.testing.assert_close(lse[row], expected[1][0], rtol=0, atol=tolerance)


def test_pages_and_lengths_together_at_random():
    for _ in range(small(10, 4)):
        case = Case(
            batch=random.randrange(1, 4),
            heads=6,
            rows=random.choice([1, 5]),
            tail=random.randrange(1, 40),
            lengths=(),
            dtype=attention_dtype(),
        )
        size = random.choice([1, 8, 16, 100])
        pairs = [pages_of(case, random.randrange(1, 60), size, i, rows=random.random() < 0.5) for i in range(3)]
        length = random.randrange(case.tail_key.shape[2] + 1)
        case.segments = [paged for paged, _ in pairs]
        out, lse = case.run(tail_length=torch.full((case.batch,), length, dtype=torch.int32))
        case.segments = [dense for _, dense in pairs]
        case.tail_key, case.tail_value = case.tail_key[:, :, :length], case.tail_value[:, :, :length]
        expected = case.check()
        tolerance = 8 * max(torch.finfo(case.dtype).eps, 1e-6)
        torch.testing.assert_close(out, expected[0], rtol=0, atol=tolerance)
        torch.testing.assert_close(lse, expected[1], rtol=0, atol=tolerance)
