# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Which GPU a call goes to, in which stream, over which memory; and what a GPU refuses.

Without a GPU a stand-in shows what the compiled code would be given: it notes it, and computes on the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import math
import threading
import weakref

import pytest
import reference
import torch
from backends import EmulatedGpu, cuda_usable, running
from kvspeed import _C, ops
from kvspeed.ops import attention, checks, device
from kvspeed.segment import Segment
from op_cases import Case, frequencies

needs_cuda = pytest.mark.skipif(not cuda_usable(), reason="needs a GPU that this build has kernels for")


class StandIn(EmulatedGpu):
    """A GPU that computes on the CPU. What was enqueued is in `calls`: (arguments, device tuple)."""

    def __init__(self, needed: int = 0) -> None:
        super().__init__(self)
        self.calls: list[tuple[tuple, tuple]] = []
        self.needed, self.current, self.in_capture, self.keeps, self.synchronised = needed, 7, False, True, 0

    def stream(self):
        return self.current

    def keeps_workspace(self):
        return self.keeps and not self.in_capture

    def capturing(self):
        return self.in_capture

    def synchronise(self):
        self.synchronised += 1

    # The module of this GPU.

    rope_row = staticmethod(_C.rope_row)

    def use_tensors(self, *arguments):
        """Nothing to prepare."""

    def attend(self, *arguments):
        """Asks for its workspace too, and then leaves the call to the other way, whose arguments are easier to read."""
        place = arguments[-2]
        return self.needed if place[4] < self.needed else None

    def _enqueue(self, function, arguments):
        *arguments, threads, isa, place = arguments
        assert (threads, isa) == (1, 0) and place[:2] == (1, 0)
        if place[4] < self.needed:
            return self.needed
        assert place[3] % 64 == 0 and (place[3] or not self.needed)
        ctypes.memset(place[3], 0xAA, place[4])  # it is there to be written
        self.calls.append((tuple(arguments), place))
        function(arguments)
        return 0

    def segment_attention(self, *arguments):
        def run(given):
            given[11] = [segment[:12] for segment in given[11]]
            given[12] = given[12][:12]
            _C.segment_attention(*given, 1, 0, None)

        return self._enqueue(run, arguments)

    def merge_states(self, *arguments):
        return self._enqueue(lambda given: _C.merge_states(*given, 1, 0, None), arguments)

    @property
    def segments(self):
        """The segments of the last call."""
        return self.calls[-1][0][11]


@pytest.fixture
def gpu():
    stand_in = StandIn()
    token = device.emulated.set(stand_in)
    yield stand_in
    device.emulated.reset(token)


def gpu_case(**options):
    return Case(**{"dtype": torch.bfloat16, **options})


def row_of(address, inv_freq):
    numbers = (ctypes.c_float * (2 * len(inv_freq))).from_address(address)
    return torch.tensor(list(numbers))


# ----------------------------------------------------------------------------------------------------------------------
# Calls
# ----------------------------------------------------------------------------------------------------------------------


def test_a_call_goes_to_the_gpu_of_its_tensors(gpu):
    case = gpu_case(rows=3)
    out, lse = case.run()
    (arguments, place) = gpu.calls.pop()
    assert place[:3] == (1, 0, 7) and arguments[9] == case.query.data_ptr() and not gpu.calls
    device.emulated.set(None)
    expected = case.run()
    assert reference.same_bits(out, expected[0]) and reference.same_bits(lse, expected[1]) and not gpu.calls
    device.emulated.set(gpu)
    ops.merge_states(out, lse, out, lse)
    assert len(gpu.calls) == 1


def test_nothing_is_enqueued_for_nothing(gpu):
    case = gpu_case(rows=0)
    out, _ = case.run()
    assert out.numel() == 0 and not gpu.calls


def test_rotation_rows_are_those_of_the_offsets(gpu):
    case = gpu_case(lengths=(3, 4, 5, 6))
    for segment, offset in zip(case.segments, (5, 0, -131071, 5), strict=True):
        segment.offset = offset
    case.run()
    rows = [segment[12] if len(segment) > 12 else 0 for segment in gpu.segments]
    assert rows[1] == 0 and rows[0] == rows[3] != rows[2]
    for offset, row in ((5, rows[0]), (-131071, rows[2])):
        angle = offset * case.inv_freq.double()
        torch.testing.assert_close(row_of(row, case.inv_freq), torch.cat((angle.cos(), angle.sin())).float())
    case.run()
    assert [segment[12] for segment in gpu.segments if len(segment) > 12] == [rows[0], rows[2], rows[3]]


def test_rotation_rows_follow_the_content_of_the_frequencies(gpu):
    case = gpu_case(lengths=(3,))
    case.run()
    row = gpu.segments[0][12]
    case.inv_freq = case.inv_freq.clone()  # another tensor, as each layer has its own
    case.run()
    assert gpu.segments[0][12] == row
    case.inv_freq.mul_(0.5)
    case.run()
    assert gpu.segments[0][12] != row
    angle = 3 * case.inv_freq.double()
    torch.testing.assert_close(
        row_of(gpu.segments[0][12], case.inv_freq), torch.cat((angle.cos(), angle.sin())).float()
    )
    case.inv_freq.numpy()[:] *= 2  # and where torch does not count the change
    case.run()
    assert gpu.segments[0][12] == row


def test_rotation_rows_are_forgotten_together(gpu, monkeypatch):
    monkeypatch.setattr(device, "_MAX_ROWS", 10)
    case = gpu_case(lengths=(3, 3))
    seen = set()
    for offset in range(1, 41, 2):
        case.segments[0].offset, case.segments[1].offset = offset, offset + 1
        case.check()
        seen.add(offset)
        held = sum(len(known.rows) for known in gpu._frequencies.values())
        assert held <= 10
    assert gpu.synchronised == 3
    monkeypatch.setattr(device, "_MAX_FREQUENCIES", 3)
    for theta in range(2, 10):
        case.inv_freq = frequencies(64, float(theta))
        case.check()
        assert len(gpu._frequencies) <= 3


def test_a_capture_brings_nothing_over_and_keeps_what_it_read(gpu, monkeypatch):
    case = gpu_case(lengths=(3, 4))
    case.segments[0].offset, case.segments[1].offset = 5, 6
    case.run()
    row = gpu.segments[0][12]
    case.segments[1].offset = 9
    gpu.in_capture = True
    case.run()
    assert gpu.segments[0][12] == row and gpu.segments[1][12] == 0  # the compiled code brings the second one over
    slab = next(iter(gpu._captured.values()))
    assert slab.data_ptr() <= row < slab.data_ptr() + 4 * slab.numel()
    gpu.in_capture = False
    alive = weakref.ref(slab)
    del slab
    monkeypatch.setattr(device, "_MAX_ROWS", 2)
    for offset in range(100, 110):
        case.segments[0].offset = offset
        case.run()
    gc.collect()
    assert alive() is not None and gpu.synchronised
    case.segments[0].offset = 5
    case.check()


def test_frequencies_are_not_needed_without_offsets(gpu):
    case = gpu_case(lengths=(3,))
    case.segments[0].offset = 0
    case.run()
    assert gpu.calls[-1][0][8] == 0 and not gpu._frequencies


# ----------------------------------------------------------------------------------------------------------------------
# Workspaces
# ----------------------------------------------------------------------------------------------------------------------


def workspace(gpu):
    """Address and size of the last call's."""
    return gpu.calls[-1][1][3:]


def test_a_stream_keeps_its_workspace(gpu):
    case = gpu_case()
    case.run()
    assert workspace(gpu) == (0, 0)
    gpu.needed = 1000
    case.run()
    first = workspace(gpu)
    assert first[0] and first[1] == 1024
    gpu.needed = 800
    case.run()
    assert workspace(gpu) == first
    gpu.needed = 1025
    case.run()
    assert workspace(gpu)[1] == 2048
    second = workspace(gpu)
    gpu.current = 8  # another stream
    case.run()
    assert workspace(gpu)[0] != second[0]
    gpu.current = 7
    case.run()
    assert workspace(gpu) == second


def test_a_thread_keeps_its_own_workspace(gpu):
    gpu.needed = 500
    case = gpu_case()
    case.run()
    mine = workspace(gpu)

    def work():
        device.emulated.set(gpu)
        case.run()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert workspace(gpu)[0] != mine[0]
    case.run()
    assert workspace(gpu) == mine


def test_a_capture_has_its_own_workspace(gpu):
    gpu.needed = 500
    case = gpu_case()
    case.run()
    kept = workspace(gpu)
    gpu.in_capture = True
    case.run()
    assert workspace(gpu)[0] != kept[0] and workspace(gpu)[1] == 500
    gpu.in_capture = False
    case.run()
    assert workspace(gpu) == kept


def test_many_streams_do_not_pile_up(gpu):
    gpu.needed = 100
    case = gpu_case()
    for stream in range(100):
        gpu.current = stream
        case.run()
        assert len(gpu._held()) <= device._MAX_STREAMS


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_what_a_gpu_does_not_take_is_refused(gpu):
    for head_dim in (64, 80, 96, 128, 256):
        with pytest.raises(TypeError, match=r"query has dtype float32; on a GPU .* bfloat16 and float16: cast"):
            Case(head_dim=head_dim, dtype=torch.float32).run()
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in range(1, 300):
            case = gpu_case(head_dim=head_dim, dtype=dtype, batch=1, heads=1, heads_kv=1, lengths=(), tail=1)
            case.inv_freq = None
            taken = head_dim in (64, 80, 96, 128, 256)
            assert attention.covers(case.query) == taken
            if not taken:
                with pytest.raises(
                    ValueError, match=f"head dimension of {head_dim}; on a GPU .* 64, 80, 96, 128, 256: pad"
                ):
                    case.run()
    assert not gpu.calls


def test_the_compiled_code_refuses_on_the_cpu_what_only_gpus_read():
    """Without kvspeed.ops before it: an embedder's view."""
    call: dict[str, list] = {}

    class Note(StandIn):
        def _enqueue(self, function, arguments):
            call["arguments"] = list(arguments[:-3])
            return 0

    case = gpu_case(rows=2, lengths=(), tail=3)
    key = torch.randn(4, 16, 2, 64).bfloat16()
    case.segments = [Segment(key, key, page_table=torch.tensor([2, 1], dtype=torch.int32))]
    token = device.emulated.set(Note())
    length = torch.tensor([3, 2], dtype=torch.int32)
    results = case.run(tail_length=length)  # the arguments point to both
    device.emulated.reset(token)
    arguments = call["arguments"]
    assert len(arguments[11][0]) == 17 and arguments[13] == length.data_ptr()
    with pytest.raises(RuntimeError, match="not supported"):  # a length in memory
        _C.segment_attention(*arguments, 1, 0, None)
    arguments[13] = 0
    with pytest.raises(RuntimeError, match="not supported"):  # pages
        _C.segment_attention(*arguments, 1, 0, None)
    arguments[11] = []
    assert _C.segment_attention(*arguments, 1, 0, None) == 0 and not results[0].isnan().any()
    if not _C.build_info()["cuda"]:
        with pytest.raises(RuntimeError, match="not supported by this build"):
            _C.segment_attention(*arguments, 1, 0, (1, 0, 0, 0, 0))


def test_the_compiled_code_refuses_numbers_that_overflow(gpu):
    """Without kvspeed.ops before it: an embedder's view."""
    case = gpu_case(rows=2, lengths=(), tail=3)
    results = case.run()  # the arguments point to both
    given = list(gpu.calls[-1][0])
    scale, softcap, split_tokens = 14, 15, 21
    for where, bad in (
        *((scale, bad) for bad in (3e38, -1.01e38, math.nan, math.inf)),
        *((softcap, bad) for bad in (3e38, 1.01e38, math.nan, -1.0)),
        *((split_tokens, bad) for bad in (2**40 + 1, 2**62, 2**63 - 1, -1)),
    ):
        wrong = list(given)
        wrong[where] = bad
        with pytest.raises(RuntimeError, match="cannot be right"):
            _C.segment_attention(*wrong, 1, 0, None)
    for where, good in ((scale, 1e38), (scale, -1e38), (softcap, 1e38), (split_tokens, 2**40)):
        right = list(given)
        right[where] = good
        assert _C.segment_attention(*right, 1, 0, None) == 0
    assert all(result.numel() for result in results)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: {"page_table": [0, 1]},
        lambda s: {"page_table": s.page_table[0]},
        lambda s: {"page_table": s.page_table.long()},
        lambda s: {"page_table": None, "tokens": 3},
        lambda s: {"page_table": None, "tokens": 3, "key": None},
        lambda s: {"page_table": None, "tokens": 3, "key": s.key[0, 0, 0], "value": s.key[0, 0, 0]},
        lambda s: {"key": [1], "value": [1]},
        lambda s: {"key": None},
        lambda s: {"key": s.key[0, 0, 0], "value": s.key[0, 0, 0]},
        lambda s: {"tokens": "3"},
        lambda s: {"tokens": 33},
        lambda s: {"key": s.key[..., :32]},
    ],
)
@pytest.mark.parametrize("tokens", [3, None])
def test_malformed_pages_are_refused_on_a_gpu_as_on_the_cpu(spoil, tokens):
    key = torch.randn(4, 16, 2, 64).bfloat16()
    good = Segment(key, key, page_table=torch.tensor([0, 1], dtype=torch.int32), tokens=tokens)
    fields = {"key": key, "value": key, "page_table": good.page_table, "tokens": tokens, **spoil(good)}
    case, messages = gpu_case(lengths=()), []
    case.segments = [Segment(fields.pop("key"), fields.pop("value"), **fields)]
    for backend in ("cpu", "simt"):
        with running(backend), pytest.raises((TypeError, ValueError, IndexError), match=r"segments\[0\]") as caught:
            case.run()
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


def test_packets_for_a_pool_without_pages():
    """The CPU refuses the entries; a GPU, which cannot look, drops the tokens."""
    key, pool = torch.randn(1, 2, 5, 64), torch.empty(1, 0, 16, 2, 64)
    options = {"page_table": torch.tensor([0], dtype=torch.int32)}
    arguments = ([key], [key], [3], frequencies(64), pool, pool.clone())
    with pytest.raises(IndexError, match=r"page_table\[0\] is 0; out_keys has no pages: give it some"):
        ops.rope_concat(*arguments, **options)
    with running("simt"):
        ops.rope_concat(*arguments, **options)


def test_covers_on_the_cpu():
    for head_dim, taken in ((8, True), (12, False), (64, True), (256, True), (264, False), (0, False)):
        assert attention.covers(torch.empty(1, 1, 1, head_dim)) == taken
    assert not attention.covers(torch.empty(1, 1, 1, 64, dtype=torch.float64))
    assert not attention.covers(torch.empty(1, 1, 1, 64, device="meta"))


def test_tensors_on_two_devices_are_named():
    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda:1")

    tensor = torch.zeros(2).as_subclass(Elsewhere)
    with pytest.raises(RuntimeError) as caught:
        checks.on_device("segments[1].key", tensor, torch.device("cuda:0"), "query")
    message = str(caught.value)
    assert "segments[1].key is on cuda:1 and query is on cuda:0" in message and "one device" in message
    assert ".to('cuda:0')" in message


def test_reasons_why_a_gpu_cannot_be_used(monkeypatch):
    class Module:
        count, message, supported, capability = 1, "", True, 90

        @classmethod
        def cuda_device_count(cls):
            return cls.count, cls.message

        @classmethod
        def cuda_device_supported(cls, index):
            return cls.supported, cls.capability

    info = {"cuda": True, "cuda_archs": ["80", "86", "80-ptx"], "isas": ["baseline"]}
    monkeypatch.setattr(device, "_C", Module)
    monkeypatch.setattr(device, "build_info", lambda: info)
    monkeypatch.setattr(device, "_gpus", {})
    assert device.cuda_refusal(0) is None and device._gpu(0).device == torch.device("cuda:0")
    assert "move the tensors to the CPU" in device.cuda_refusal(1)  # a second GPU that the runtime does not show

    def refusal():
        device._gpus.clear()
        return device.cuda_refusal(0)

    Module.supported = False
    for word in ("9.0", "80, 86, 80-ptx", "KVSPEED_CUDA_ARCHS=90", "CPU"):
        assert word in refusal()
    Module.count, Module.message = 0, "the NVIDIA driver is too old: it must be 580 or newer"
    assert Module.message in refusal()
    info["cuda"], Module.message = False, "this build has no CUDA kernels: no nvcc was found"
    for word in (Module.message, "baseline", "move the tensors to the CPU"):
        assert word in refusal()


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


def on_cuda(case, index=0):
    """The case's tensors on a GPU; the frequencies stay."""
    case.query, case.tail_key, case.tail_value = (x.cuda(index) for x in (case.query, case.tail_key, case.tail_value))
    case.segments = [Segment(s.key.cuda(index), s.value.cuda(index), s.offset) for s in case.segments]
    return case


def plain(case, **options):
    return ops.segment_attention(
        case.query, case.segments, case.tail_key, case.tail_value, inv_freq=case.inv_freq, **options
    )


@needs_cuda
def test_cuda_frequencies_on_the_gpu_are_read_again_when_they_change():
    case = on_cuda(gpu_case(rows=2))
    expected = plain(case)
    host = case.inv_freq
    case.inv_freq = host.cuda()
    assert reference.same_bits(plain(case), expected)
    copy = device.host_frequencies(case.inv_freq)
    assert device.host_frequencies(case.inv_freq) is copy and device.host_frequencies(case.inv_freq[:]) is copy
    case.inv_freq.mul_(2)
    changed = plain(case)
    case.inv_freq = host * 2
    assert reference.same_bits(plain(case), changed) and not torch.equal(changed, expected)


@needs_cuda
def test_cuda_devices_must_agree():
    case = on_cuda(gpu_case())
    case.tail_key = case.tail_key.cpu()
    with pytest.raises(RuntimeError, match="tail_key is on cpu and query is on cuda:0"):
        plain(case)
    case = on_cuda(gpu_case())
    case.segments[1].value = case.segments[1].value.cpu()
    with pytest.raises(RuntimeError, match=r"segments\[1\].value is on cpu and query is on cuda:0"):
        plain(case)


@needs_cuda
def test_cuda_streams_and_memory_that_is_freed_at_once():
    """In a side stream, sources freed right after the call, their memory overwritten; many times over."""
    stream = torch.cuda.Stream()
    case = gpu_case(lengths=(700, 300), tail=40)
    expected = plain(on_cuda(case))
    host = [x.cpu() for x in (case.query, case.tail_key, case.tail_value)]
    pairs = [(s.key.cpu(), s.value.cpu(), s.offset) for s in case.segments]
    torch.cuda.synchronize()
    results = []
    with torch.cuda.stream(stream):
        for _ in range(150):
            query, tail_key, tail_value = (x.cuda(non_blocking=True) for x in host)
            segments = [Segment(k.cuda(non_blocking=True), v.cuda(non_blocking=True), d) for k, v, d in pairs]
            results.append(ops.segment_attention(query, segments, tail_key, tail_value, inv_freq=case.inv_freq))
            shapes = [s.key.shape for s in segments]
            del query, tail_key, tail_value, segments
            for shape in shapes:
                torch.full(shape, math.nan, dtype=case.dtype, device="cuda")
    stream.synchronize()
    assert all(reference.same_bits(x, expected) for x in results)


@needs_cuda
def test_cuda_graphs_follow_lengths_and_content():
    """Captured once, replayed with other numbers in the same memory, also after the op was used elsewhere."""
    case = on_cuda(gpu_case(rows=1, lengths=(500, 90), tail=256))
    length = torch.tensor([3, 9], dtype=torch.int32, device="cuda")
    plain(case, tail_length=length)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plain(case, tail_length=length)
    for step in range(5):
        case.query.copy_(torch.randn(case.query.shape))
        case.tail_key.copy_(torch.randn(case.tail_key.shape))
        length.add_(40)
        graph.replay()
        other = on_cuda(gpu_case(lengths=(4000,), tail=9))
        plain(other)
        expected = plain(case, tail_length=length)
        graph.replay()
        assert reference.same_bits(out, expected), step


@needs_cuda
def test_cuda_frequencies_cannot_be_read_in_a_capture():
    case = on_cuda(gpu_case())
    case.inv_freq = case.inv_freq.cuda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="give it on the CPU, or call the op once before the capture"):
        with torch.cuda.graph(graph):
            plain(case)
    torch.cuda.synchronize()


@needs_cuda
def test_cuda_offsets_first_met_in_a_capture():
    case = on_cuda(gpu_case(rows=2))
    case.segments[0].offset = 12345
    expected = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plain(case)
    expected = plain(case)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=4 * torch.finfo(out.dtype).eps)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cuda_second_device():
    """The current device stays the first, and the work is done on the second."""
    case = gpu_case(rows=2)
    expected = plain(on_cuda(case))
    moved = plain(on_cuda(case, 1))
    assert moved.device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(moved.cpu(), expected.cpu())
