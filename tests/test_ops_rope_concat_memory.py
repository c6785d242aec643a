# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`rope_concat` on hostile memory: layouts, alignment, huge strides, threads, pages."""

from __future__ import annotations

import itertools
import random

import pytest
import reference
import torch
from backends import on_cuda, ops
from op_cases import DTYPES, check_keys, frequencies, packets, run
from poison import UNUSED_PAGE, Embedded, embed, lazy_storage

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 3, 4])
def test_misaligned(shift, dtype):
    for head_dim in (46, 64, 128):
        keys, values = packets([3, 4], head_dim=head_dim, dtype=dtype)
        keys = [embed(key, gap=0, shift=shift) for key in keys]
        values = [embed(value, shift=5 - shift) for value in values]
        run(keys, values, [1, 2], frequencies(head_dim), shift=shift, gap=0)
        run(keys, values, [1, 2], frequencies(head_dim), shift=8 - shift)


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_orders_in_memory(order):
    """Heads before tokens and tokens before heads, layers innermost or outermost, in sources and outputs."""
    keys, values = packets([5, 2], layers=3)
    sources = [embed(key, order=(*random.sample(range(3), 3), 3)) for key in keys]
    run(sources, [embed(value, order=(2, 1, 0, 3)) for value in values], [4, 0], frequencies(64), order=(*order, 3))


def test_inputs_with_stride_zero():
    one = torch.randn(1, 1, 1, 64)
    keys = [one.expand(2, 3, 4, 64), torch.randn(1, 3, 5, 64).expand(2, 3, 5, 64)]
    run(keys, keys, [2, 9], frequencies(64))


def test_keys_and_values_packed_together():
    """K and V side by side in the last dimension, and interleaved in one storage, as engines keep them."""
    keys, values = packets([4, 3])
    packed = [embed(torch.cat(pair, -1)) for pair in zip(keys, values, strict=True)]
    source_keys, source_values = [p[..., :64] for p in packed], [p[..., 64:] for p in packed]
    run(source_keys, source_values, [5, -5], frequencies(64))

    both = torch.full((2, 2, 9, 128), float("nan"), dtype=torch.bfloat16)
    ops.rope_concat(source_keys, source_values, [5, -5], frequencies(64), both[..., :64], both[..., 64:], start=1)
    check_keys(both[:, :, 1:8, :64], keys, [5, -5], frequencies(64))
    assert torch.equal(both[:, :, 1:8, 64:], torch.cat(values, 2))
    assert both[:, :, [0, 8]].isnan().all()

    both = torch.full((2, 2, 2, 7, 64), float("nan"), dtype=torch.bfloat16)  # [layer, K or V, head, token, D]
    ops.rope_concat(source_keys, source_values, [5, -5], frequencies(64), both[:, 0], both[:, 1])
    check_keys(both[:, 0], keys, [5, -5], frequencies(64))
    assert torch.equal(both[:, 1], torch.cat(values, 2))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_beyond_32_bits(dtype):
    """Layer, head and token steps that do not fit in 32 bits, in sources and outputs, over lazily backed storage."""
    elements = 2**33 if dtype.itemsize == 2 else 2**32 + 2**30
    source, target = lazy_storage(elements, dtype), lazy_storage(elements, dtype)
    far = elements - 2**20
    for strides in ((far, 4096, 64, 1), (2048, far, 64, 1), (4096, 2048, far, 1)):
        shape = (2, 2, 2, 64)
        keys, values = (source.as_strided(shape, strides, start) for start in (0, 2**18 + 1))
        out_keys, out_values = (target.as_strided(shape, strides, start) for start in (1, 2**19))
        keys.copy_(torch.randn(shape))
        values.copy_(torch.randn(shape))
        out_keys.fill_(float("nan"))
        out_values.fill_(float("nan"))
        ops.rope_concat([keys], [values], [33], frequencies(64), out_keys, out_values)
        check_keys(out_keys, [keys], [33], frequencies(64))
        assert torch.equal(out_values.cpu(), values.cpu())


def test_a_large_copy_in_several_threads():
    """Large enough for the streaming stores; the result does not depend on the number of threads, nor on the run."""
    keys, values = packets([1000, 37, 2000], layers=3, heads=4, head_dim=128)
    first = run(keys, values, [0, 1000, 1037], frequencies(128), spare=1, gap=0)
    out_keys, out_values = torch.empty_like(first[0]), torch.empty_like(first[1])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            out_keys.fill_(float("nan"))
            ops.rope_concat(keys, values, [0, 1000, 1037], frequencies(128), out_keys, out_values)
            assert reference.same_bits(out_keys, first[0]) and reference.same_bits(out_values, first[1])
    finally:
        torch.set_num_threads(threads)


def test_sources_and_arguments_are_left_alone():
    keys, values = packets([4, 2])
    inv_freq = frequencies(64)
    before = [tensor.clone() for tensor in (*keys, *values, inv_freq)]
    lists = (list(keys), list(values), [4, 5])
    out = torch.empty(2, 2, 6, 64, dtype=torch.bfloat16)
    version = out._version
    ops.rope_concat(*lists, inv_freq, out, torch.empty_like(out))
    assert on_cuda() or out._version > version, "autograd would not notice the write"
    assert all(a is b for a, b in zip(lists[0] + lists[1], keys + values, strict=True)) and lists[2] == [4, 5]
    assert all(torch.equal(a, b) for a, b in zip(before, (*keys, *values, inv_freq), strict=True))


# The orders in memory in which engines keep [layer, page, token, head, D]: dimensions from the outermost.
PAGED_ORDERS = {
    "LBNHC": (0, 1, 2, 3, 4),
    "LBHNC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 3, 1, 2, 4),
    "BLHNC": (1, 0, 3, 2, 4),
    "BLNHC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 3, 0, 2, 4),
}


def run_paged(lengths, page_size, *, start=0, order=None, spare_pages=3, head_dim=64, dtype=torch.bfloat16, gap=1):
    keys, values = packets(lengths, head_dim=head_dim, dtype=dtype)
    offsets = [random.randrange(-50, 5000) for _ in lengths]
    total = sum(lengths)
    entries = -(-(start + total) // page_size)
    pages = entries + spare_pages
    table = torch.full((entries + 4,), UNUSED_PAGE, dtype=torch.int32)
    first = start // page_size
    used = torch.randperm(pages)[: entries - first].int()
    if total:
        table[first:entries] = used
        table[:first] = -123456
    shape = (2, pages, page_size, 2, head_dim)
    out_keys = Embedded(shape, dtype, order=order, gap=gap)
    out_values = Embedded(shape, dtype, order=order, gap=gap + 1, shift=1)
    inv_freq = frequencies(head_dim)
    ops.rope_concat(keys, values, offsets, inv_freq, out_keys.view, out_values.view, start=start, page_table=table)
    written = torch.zeros(shape, dtype=torch.bool)
    where = [(int(table[t // page_size]), t % page_size) for t in range(start, start + total)]
    for page, slot in where:
        written[:, page, slot] = True
    out_keys.check(written)
    out_values.check(written)
    if total:
        page, slot = (torch.tensor(x) for x in zip(*where, strict=True))
        got_keys = out_keys.view[:, page, slot].transpose(1, 2)
        got_values = out_values.view[:, page, slot].transpose(1, 2)
        assert reference.same_bits(got_values, torch.cat(values, 2)), "values changed"
        check_keys(got_keys, keys, offsets, inv_freq)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("order", PAGED_ORDERS.values(), ids=PAGED_ORDERS)
def test_pages(order, page_size):
    run_paged([page_size - 1, page_size, page_size + 1, 0, 1, 2, 1], page_size, order=order)
    run_paged([5, 1, 40], page_size, order=order, start=3 * page_size + page_size // 2)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [46, 96])
def test_pages_of_other_dtypes_and_sizes(head_dim, dtype):
    run_paged([3, 17, 30], 16, start=5, head_dim=head_dim, dtype=dtype, gap=0)


def test_pages_corners():
    run_paged([4097], 16, spare_pages=0)
    run_paged([], 16)
    run_paged([0], 16, start=40)
    run_paged([1], 256, start=255)
    run_paged([1, 1], 256, start=255)


def test_page_table_with_a_stride():
    keys, values = packets([20])
    table = torch.tensor([[3, 9], [0, 9], [2, 9], [UNUSED_PAGE, 9]], dtype=torch.int32)[:, 0]
    out = torch.full((2, 4, 8, 2, 64), float("nan"), dtype=torch.bfloat16)
    ops.rope_concat(keys, values, [0], frequencies(64), out, torch.empty_like(out), page_table=table)
    assert torch.equal(out[:, [3, 0, 2]].flatten(1, 2)[:, :20].transpose(1, 2), keys[0])
    assert out[:, 1].isnan().all()


def test_keys_and_values_of_one_page():
    """`[pages, 2, page_size, H, D]` split into views: the page step is twice what the page size suggests."""
    pool = torch.full((1, 6, 2, 4, 2, 64), float("nan"), dtype=torch.bfloat16)
    keys, values = packets([9], layers=1)
    table = torch.tensor([5, 0, 2], dtype=torch.int32)
    ops.rope_concat(keys, values, [3], frequencies(64), pool[:, :, 0], pool[:, :, 1], page_table=table)
    got = pool[:, table.long()].transpose(1, 2).flatten(2, 3)  # [layer, K or V, token, head, D]
    check_keys(got[:, 0, :9].transpose(1, 2), keys, [3], frequencies(64))
    assert torch.equal(got[:, 1, :9].transpose(1, 2), values[0])
    assert pool[:, [1, 3, 4]].isnan().all() and got[:, :, 9:].isnan().all()


def test_page_steps_beyond_32_bits():
    """Block-major pools: a page step of a million elements, and a page index that overflows 32 bits."""
    layers, heads, page_size, head_dim, pages, step = 2, 2, 16, 64, 4200, 1_039_680
    pool = lazy_storage(pages * step, torch.bfloat16)
    shape = (layers, pages, page_size, heads, head_dim)
    strides = (heads * page_size * head_dim * 2, step, head_dim, page_size * head_dim, 1)
    out_keys = pool.as_strided(shape, strides, 0)
    out_values = pool.as_strided(shape, strides, heads * page_size * head_dim)
    keys, values = packets([40])
    table = torch.tensor([4199, 2067, 3], dtype=torch.int32)
    ops.rope_concat(keys, values, [-7], frequencies(64), out_keys, out_values, page_table=table)
    used = table.long()
    got_keys, got_values = (out[:, used].flatten(1, 2)[:, :40].transpose(1, 2).cpu() for out in (out_keys, out_values))
    check_keys(got_keys, keys, [-7], frequencies(64))
    assert torch.equal(got_values, values[0])
    assert (pool[: 3 * step] == 0).all(), "pages that are not in the table were written"
