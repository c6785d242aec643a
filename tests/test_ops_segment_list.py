# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Segments that are read once: the same results as those of a list, and what can change without being noticed."""

from __future__ import annotations

import copy
import gc
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch
from backends import emulator, is_gpu, small
from kvspeed import KVCache, SegmentList
from kvspeed.ops import attention, device
from kvspeed.segment import Segment
from op_cases import Case, frequencies
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.attention, pytest.mark.without("cuda")]


def prepared(case, **options):
    """The case with segments that stay."""
    twin = copy.copy(case)
    twin.segments = SegmentList(case.segments)
    return twin


def same(got, expected):
    return all(reference.same_bits(a, b) for a, b in zip(got, expected, strict=True))


def random_case():
    lengths = [random.randrange(0, 40) for _ in range(random.randrange(small(40, 6)))]
    case = Case(
        batch=random.randint(1, 3), heads=random.choice([2, 6]), rows=random.choice([1, 1, 3]), lengths=lengths, tail=4
    )
    for segment in case.segments:
        segment.offset = random.choice([0, 0, 5, -7, 70000])
        if random.random() < 0.3:
            segment.first = torch.randint(0, 9, (case.batch,), dtype=torch.int32)
    case.inv_freq = frequencies(random.choice([0, 2, 32, 64]))
    return case


def random_options(case):
    choice = random.choice
    return {
        "scale": choice([None, 0.3]),
        "softcap": choice([0.0, 2.0]),
        "window": choice([None, 7]),
        "tail_start": choice([30, -3]),
        "tail_first": choice([None, torch.randint(0, 4, (case.batch,), dtype=torch.int32)]),
        "sinks": choice([None, torch.randn(case.query.shape[1])]),
        "interleaved": choice([False, True]),
        "split_tokens": choice([None, 4]),
    }


def test_the_same_bits_as_a_list_at_every_call():
    for _ in range(small(30, 6)):
        case = random_case()
        twin = prepared(case)
        for _ in range(3):
            twin.query = case.query = torch.randn_like(case.query)
            tail = random.randrange(9)
            twin.tail_key, twin.tail_value = case.tail_key, case.tail_value = case.kv(tail), case.kv(tail)
            options = random_options(case)
            expected = case.run(**options)
            assert same(twin.run(**options), expected), options
            arguments = (case.query, twin.segments, case.tail_key, case.tail_value, case.inv_freq)
            order = ("scale", "softcap", "window", "tail_start", "tail_first", "sinks", "interleaved")
            rest = (*(options[name] for name in order), True, options["split_tokens"], None)
            assert same(attention.run_in_python(*arguments, *rest), expected)


def test_it_is_read_once():
    case = prepared(Case(lengths=(5, 9)))
    case.run()
    case.run()  # on a GPU the first call brought the rotation rows over
    read = case.segments._read
    assert read is not None or not attention._reads_tensors
    for _ in range(3):
        case.query = torch.randn_like(case.query)
        case.run(softcap=random.random(), interleaved=random.random() < 0.5)
        assert case.segments._read is read


def test_other_calls_have_it_read_again():
    """Another batch, other frequencies, gradients on or off: what was read for one does not serve the other."""
    case = Case(lengths=())
    case.segments = [case.segment(5, 3, shared=True), case.segment(9, -20, shared=True)]
    twin = prepared(case)
    for _ in range(12):
        if random.random() < 0.5:
            batch = random.randint(1, 4)
            case.batch = batch
            case.query, case.tail_key, case.tail_value = case.random(batch, 4, 2, 64), case.kv(3), case.kv(3)
        if random.random() < 0.5:
            case.inv_freq = random.choice((frequencies(64), frequencies(64, 500.0), frequencies(20), frequencies(0)))
        twin.query, twin.tail_key, twin.tail_value = case.query, case.tail_key, case.tail_value
        twin.inv_freq = case.inv_freq
        with torch.set_grad_enabled(random.random() < 0.5):
            assert same(twin.run(), case.run())
    changed = case.inv_freq = twin.inv_freq = frequencies(64)
    for _ in range(2):
        assert same(twin.run(), case.run())
        changed.numpy()[:] *= 3  # where torch does not count the change


def test_it_is_a_copy():
    case = Case(lengths=(5, 9), tail=2)
    case.segments[0].first = torch.tensor([1, 2], dtype=torch.int32)
    given = case.segments
    expected = case.run()
    twin = prepared(case)
    for warm in (False, True):
        if warm:
            assert same(twin.run(), expected)
        for segment in given:
            for tensor in (segment.key, segment.value, segment.first):
                if tensor is not None:
                    tensor.data = torch.full((3,), 7.0).to(tensor.dtype)
                    tensor.resize_(1)
            segment.offset, segment.key, segment.first = 17, None, 3
        given.clear()
        out = twin.segments[0]
        out.offset, out.value = 99, None
        for segment in twin.segments:
            segment.key.data = torch.zeros(2)
            segment.key.requires_grad_()
        for _ in range(2):
            assert same(twin.run(), expected)
        given = [twin.segments[0], twin.segments[1]]


def test_what_is_written_into_the_memory_is_seen():
    case = Case(lengths=(5, 9))
    twin = prepared(case)
    twin.run()
    for _ in range(3):
        for segment in case.segments:
            segment.key.copy_(torch.randn(segment.key.shape))
            segment.value.mul_(1.5)
        assert same(twin.run(), case.run())


def test_it_keeps_the_memory():
    case = Case(lengths=(300, 500))
    expected = case.run()
    twin = prepared(case)
    twin.run()
    addresses = [tensor.data_ptr() for segment in case.segments for tensor in (segment.key, segment.value)]
    shapes = [segment.key.shape for segment in case.segments]
    case.segments = []
    gc.collect()
    for shape in shapes * 10:  # memory that was freed would be given out again
        assert torch.full(shape, torch.nan, dtype=case.dtype).data_ptr() not in addresses
    assert same(twin.run(), expected)


def test_it_lets_the_memory_go():
    case = Case(lengths=())
    segment = case.segment(9, 3)
    counts = sys.getrefcount(segment.key), sys.getrefcount(segment.value)
    case.segments = SegmentList.adopt([segment])
    for _ in range(20):
        case.run()
        case.inv_freq = case.inv_freq * 1.1  # read again
    now = sys.getrefcount(segment.key), sys.getrefcount(segment.value)
    assert now == counts
    before = sys.getrefcount(case.segments)
    for _ in range(5):
        case.run()
    after = sys.getrefcount(case.segments)
    assert after == before
    key = segment.key
    before = sys.getrefcount(key)
    del segment, case
    gc.collect()
    after = sys.getrefcount(key)
    assert after == before - 1


def test_gradients_are_refused_as_in_a_list():
    case = Case(lengths=(5, 9))
    case.segments[1].value.requires_grad_()
    twin = prepared(case)
    for _ in range(2):
        with torch.no_grad():
            assert same(twin.run(), case.run())
        with pytest.raises(RuntimeError, match=r"segments\[1\].value requires grad"):
            twin.run()


@pytest.mark.parametrize("part", ["key", "value"])
def test_negated_views_are_refused(part):
    case = Case(lengths=(5, 9))
    setattr(case.segments[1], part, torch._neg_view(getattr(case.segments[1], part)))
    twin = prepared(case)
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"segments\[1\].{part} is a lazily negated view; call .resolve_neg"):
            twin.run()


def test_parameters_are_plain():
    case = Case(lengths=(5, 9))
    given = case.segments[0].key = torch.nn.Parameter(case.segments[0].key)
    twin = prepared(case)
    with pytest.raises(RuntimeError, match=r"segments\[0\].key requires grad"):
        twin.run()
    with torch.no_grad():
        expected = twin.run()
        assert same(expected, case.run())
        given.data = torch.randn(given.shape).to(given.dtype)
        assert same(twin.run(), expected)
        given.data.resize_(1)
        assert same(twin.run(), expected)
        assert twin.segments._read is not None or not attention._reads_tensors
    assert twin.segments[0].key.requires_grad


def test_the_second_call_is_checked_too():
    case = Case(batch=2, lengths=(5, 9))
    for segment in case.segments:
        segment.offset = 4
    twin = prepared(case)
    expected = twin.run()
    other = torch.float16 if case.dtype != torch.float16 else torch.bfloat16

    def refuse(error, match, **changes):
        wrong = copy.copy(twin)
        wrong.__dict__.update(changes)
        with pytest.raises(error, match=match):
            wrong.run()
        assert same(twin.run(), expected)

    cast = {name: getattr(twin, name).to(other) for name in ("query", "tail_key", "tail_value")}
    refuse(TypeError, r"segments\[0\].key has dtype .*; it must be", **cast)
    refuse(ValueError, r"inv_freq is None, but segments\[0\].offset is 4", inv_freq=None)
    three = {"query": case.random(3, 4, 1, 64), "tail_key": case.random(3, 2, 5, 64)}
    refuse(ValueError, r"segments\[1\].key has shape", **three, tail_value=three["tail_key"])
    one_head = {"tail_key": case.random(2, 1, 5, 64), "tail_value": case.random(2, 1, 5, 64)}
    refuse(ValueError, r"segments\[0\].key has shape", **one_head)
    wide = {"query": case.random(2, 4, 1, 128), "tail_key": case.random(2, 2, 5, 128)}
    refuse(ValueError, r"segments\[0\].key has shape", **wide, tail_value=wide["tail_key"])


def test_threads_share_a_list():
    """Each with its own frequencies and batch, so that they also take turns in having it read."""
    case = Case(lengths=())
    case.segments = [case.segment(random.randrange(1, 30), 3 + i, shared=True) for i in range(small(12, 4))]
    shared = SegmentList(case.segments)
    jobs = []
    for i in range(6):
        one = Case(batch=1 + i % 2, lengths=(), dtype=case.dtype)
        one.inv_freq = frequencies(64, 100.0 * (1 + i % 3))
        one.segments = case.segments
        jobs.append((one, one.run()))
        one.segments = shared
    gpu = emulator() if is_gpu() else None

    def work(job):
        one, expected = job
        token = device.emulated.set(gpu)
        try:
            return all(same(one.run(), expected) for _ in range(small(60, 4)))
        finally:
            device.emulated.reset(token)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, jobs))


def test_rotation_rows_that_were_forgotten_are_found_again():
    if not is_gpu():
        pytest.skip("the CPU's rows belong to the list")
    case = Case(lengths=(5, 9))
    twin = prepared(case)
    expected = case.run()
    for _ in range(3):
        assert same(twin.run(), expected) and same(twin.run(), expected)
        read = twin.segments._read
        emulator()._forget_rows()
        emulator()._previous = []  # also the generation before is gone
        gc.collect()
        assert same(twin.run(), expected) and same(twin.run(), expected)
        assert twin.segments._read is not read or not attention._reads_tensors


def test_pages():
    key, value = (torch.randn(6, 16, 2, 64).to(torch.bfloat16) for _ in range(2))
    case = Case(lengths=(5,), dtype=torch.bfloat16)
    table = torch.tensor([[4, 2, 0], [1, 5, 3]], dtype=torch.int32)
    case.segments.append(Segment(key, value, 9, page_table=table, tokens=40))
    twin = prepared(case)
    for _ in range(3):
        assert same(twin.run(), case.run())


def test_modes_see_its_tensors():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    case = Case(lengths=(5, 9))
    twin, seen, expected = prepared(case), [], case.run()
    with Mode():
        assert same(twin.run(), expected)
    assert any("kvspeed.segment_attention" in name for name in seen)


def test_as_a_sequence():
    case = Case(lengths=(5, 9, 2))
    segments = SegmentList(case.segments)
    assert len(segments) == 3 and segments and not SegmentList() and segments[-1].offset == 23
    assert [s.offset for s in segments] == [s.offset for s in segments[0:3]] == [3, 13, 23]
    assert isinstance(segments[1], Segment) and segments[1].key.data_ptr() == case.segments[1].key.data_ptr()
    assert repr(segments).startswith("SegmentList([Segment(key=")
    with pytest.raises(IndexError):
        segments[3]
    with pytest.raises(TypeError, match=r"segments\[1\] must be a kvspeed.Segment, got int"):
        SegmentList([case.segments[0], 1])
    twin = prepared(case)
    expected = twin.run()
    twin.segments = copy.deepcopy(twin.segments)
    assert twin.segments[0].key.data_ptr() != case.segments[0].key.data_ptr()
    assert same(twin.run(), expected)


def test_caches_hold_such_lists():
    if is_gpu():
        pytest.skip("once is enough")
    config = tiny_model("llama").config
    cache = KVCache(config)
    case = Case(lengths=(5,))
    cache.set_segments([case.segments] * config.num_hidden_layers, 5)
    layer = cache.layer(0)
    assert type(layer.segments) is SegmentList and len(layer.segments) == 1
    cache.reorder_cache(torch.tensor([1, 0]))
    assert type(layer.segments) is SegmentList and len(layer.segments) == 1
    cache.reset()
    assert type(layer.segments) is SegmentList and not layer.segments
