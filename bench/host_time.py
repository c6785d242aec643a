# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What one `segment_attention` call costs the host, by the number of segments: read at every call, or once.

`cpu`: whole calls of the CPU's kernels on tensors so small that their own work hardly counts. `launch`: calls of the
CUDA path in the emulator, whose launches do nothing, so that checks, plan and parameters are what is left; on a GPU the
launches themselves come on top (1 or 2, 3 with more than 30 segments), and torch's allocator instead of malloc.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from kvspeed import Segment, SegmentList, ops
from kvspeed.ops import attention, device
from timing import Comparison, interleave

COUNTS = (0, 4, 16, 64)
CALLS = 300  # of a sample


class _HollowGpu(device.Gpu):
    """A GPU whose memory is the host's and whose launches do nothing."""

    def __init__(self) -> None:
        super().__init__(_hollow_module(), 0, torch.device("cpu"))
        attention.introduce(self.module)

    def stream(self) -> int:
        return 0

    def keeps_workspace(self) -> bool:
        return True

    def capturing(self) -> bool:
        return False

    def synchronise(self) -> None:
        pass


def _hollow_module() -> ModuleType:
    folder = Path(__file__).resolve().parents[1] / "tests" / "simt"
    sys.path.insert(0, str(folder))
    import build  # type: ignore[import-not-found]

    library = build.build("simt_extension", check="none") / "_simt.so"  # not instrumented: this is timed
    spec = importlib.util.spec_from_file_location("kvspeed._simt", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.simt_hollow(True)
    return module


def _segments(count: int, heads: int, tokens: int, head_dim: int) -> list[Segment]:
    """One buffer for all tokens: nothing is read here, or next to nothing."""
    kv = [torch.zeros(head_dim, dtype=torch.bfloat16) for _ in range(2 * count)]
    kv = [x.as_strided((heads, tokens, head_dim), (0, 0, 1)) for x in kv]
    return [Segment(kv[2 * i], kv[2 * i + 1], 100 * i + 1) for i in range(count)]


def _calls(gpu: device.Gpu | None, segments: Any, heads: int, heads_kv: int, head_dim: int) -> Callable[[], None]:
    query = torch.zeros(1, heads, 1, head_dim, dtype=torch.bfloat16)
    tail = torch.zeros(1, heads_kv, 1, head_dim, dtype=torch.bfloat16)
    inv_freq = torch.rand(head_dim // 2)

    def run() -> None:
        token = device.emulated.set(gpu)
        with torch.no_grad():
            for _ in range(CALLS):
                ops.segment_attention(query, segments, tail, tail, inv_freq=inv_freq, scale=0.1)
        device.emulated.reset(token)

    return run


def compare_calls(rounds: int) -> Comparison:
    """Samples of CALLS calls each, names like "cpu, 16 segments, read once"."""
    gpu = _HollowGpu()
    functions = {}
    for count in COUNTS:
        tiny, usual = _segments(count, 1, 1, 64), _segments(count, 8, 1024, 128)
        for how, kind in (("read at every call", list), ("read once", SegmentList)):
            functions[f"cpu, {count} segments, {how}"] = _calls(None, kind(tiny), 1, 1, 64)
            functions[f"launch, {count} segments, {how}"] = _calls(gpu, kind(usual), 32, 8, 128)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return interleave(functions, rounds=rounds)
    finally:
        torch.set_num_threads(threads)


def microseconds(comparison: Comparison) -> dict[str, float]:
    """Of one call, by name: typical (see timing.py), and in the best sample."""
    found = {}
    for name, timing in comparison.timings.items():
        found[name] = round(1e6 * timing.seconds / CALLS, 2)
        found[f"{name}, best"] = round(1e6 * min(timing.wall) / CALLS, 2)
    return found
