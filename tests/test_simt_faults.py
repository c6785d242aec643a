# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Faults planted into the real kernels: each of them must be noticed by the emulator or by the comparison with float64.

All are compiled at once, see tests/simt/faults.py; that the same program passes with none of them on shows that it is
the fault that is noticed. A text that no longer occurs exactly once fails here: adapt it to the kernel's new source.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("simt")))
# isort: off
from faults import Fault, plant
import build
# isort: on

KERNELS = ("segment_attention", "attention_d64", "rope_concat", "merge_states")

# Long enough that every warp's ring wraps; ragged, so that last tiles are partial.
DECODE = "attention d=64 b=2 h=8 hkv=2 s=1 seg=330:7,41:-5 tail=205"
DECODE_ROWS = "attention d=64 b=2 h=4 hkv=1 s=3 seg=330:7,41:-5 tail=205 first=1"
DECODE_SPLITS = f"{DECODE} split=96 sinks=1"
PREFILL = "attention d=64 b=1 h=4 hkv=2 s=45 seg=150:7,41:-5 tail=75"
PREFILL_PADDED = f"{PREFILL} first=1 b=3"
MERGE = "merge d=80 b=2 h=3 s=5"
ROPE = "rope d=80 r=64 layers=2 heads=3 seg=37:5,5:0,64:11 page=16 start=3"

FAULTS = [
    # Waits and barriers of the decode kernel.
    Fault(
        "a wait for keys that is too lax",
        "segment_decode.cuh",
        "token += kStep) { «gpu::copy_wait<2 * Shape::kRuns - 1>();»",
        "gpu::copy_wait<2 * Shape::kRuns>();",
        DECODE,
    ),
    Fault(
        "no wait for values",
        "segment_decode.cuh",
        "gpu::pack2<T>(s[1][2], s[1][3])}; «gpu::copy_wait<2 * Shape::kRuns - 1>();»",
        "",
        DECODE,
    ),
    Fault(
        "no barrier between the arrival of keys and their use",
        "segment_decode.cuh",
        "token += kStep) { gpu::copy_wait<2 * Shape::kRuns - 1>(); «gpu::sync_warp();»",
        "",
        DECODE,
    ),
    Fault(
        "keys loaded over those in use",
        "segment_decode.cuh",
        "«gpu::sync_warp();» load_keys(slot, token + Shape::kRuns * kStep);",
        "",
        DECODE,
    ),
    Fault(
        "values loaded over those in use",
        "segment_decode.cuh",
        "«gpu::sync_warp();» load_values(slot, token + Shape::kRuns * kStep);",
        "",
        DECODE,
    ),
    Fault(
        "the wrong stage of the ring",
        "segment_decode.cuh",
        "slot = «slot + 1 == Shape::kRuns ? 0 : slot + 1»;",
        "slot == 0 ? Shape::kRuns - 1 : slot - 1",
        DECODE,
    ),
    Fault(
        "no barrier before the warps' sums are joined",
        "segment_decode.cuh",
        "denominator; } } } «gpu::sync_block();»",
        "",
        DECODE,
    ),
    Fault(
        "no barrier between the segment's arrival and its use",
        "segment_decode.cuh",
        "load_segment(segment, p, index, thread); «gpu::sync_block();»",
        "",
        DECODE,
    ),
    Fault(
        "no barrier between the query's arrival and its use",
        "segment_decode.cuh",
        "warp * kRows, lane); «gpu::sync_block();» runs.attend",
        "",
        DECODE,
    ),
    Fault(
        "no barrier before the next segment's query",
        "segment_decode.cuh",
        "«gpu::sync_block();» } write_decoded",
        "",
        DECODE,
    ),
    # Fragments and addresses.
    Fault(
        "a wrong fragment of the keys",
        "segment_decode.cuh",
        "gpu::mma_m16n8k16<T>(s[1], kept[k], «b[2]», b[3]);",
        "b[1]",
        DECODE,
    ),
    Fault(
        "rows of the keys in the wrong order",
        "segment_decode.cuh",
        "keys(slot) + («lane_ % 8 + lane_ / 16 * 8») * kPitch<D>",
        "lane_ % 16",
        DECODE,
    ),
    Fault(
        "values not transposed the right way round",
        "segment_decode.cuh",
        "values(slot) + «lane_ % 16» * kPitch<D> + n * 16",
        "15 - lane_ % 16",
        DECODE,
    ),
    # Bounds and masks.
    Fault(
        "a tail that is read past its end",
        "segment_decode.cuh",
        "token_stride, 0, «range_.to - token», lane_);",
        "Shape::kKeys",
        DECODE,
    ),
    Fault(
        "a mask that is one key too long",
        "attention_state.cuh",
        "if (at < low || «at >= high») s[n][2 * r + e] = kMinusInfinity;",
        "at > high",
        DECODE,
    ),
    Fault(
        "causality off by one",
        "attention_load.cuh",
        "v.high_shift = clamp_to(«at + 1», -kMaxTokens, kMaxTokens);",
        "at",
        DECODE_ROWS,
    ),
    Fault(
        "a window off by one",
        "attention_load.cuh",
        "v.low_shift = clamp_to(«at - p.window + 1», -kMaxTokens, kMaxTokens);",
        "at - p.window",
        f"{DECODE_ROWS} window=77",
    ),
    Fault(
        "padding that is not hidden",
        "attention_load.cuh",
        "v.low = clamp_to(«first», 0, v.high);",
        "0",
        DECODE_ROWS,
    ),
    # Rotation and softmax.
    Fault(
        "the query turned the wrong way",
        "attention_query.cuh",
        "x = gpu::pack2<T>(«a.x * cos[0] + b.x * sin[0]», a.y",
        "a.x * cos[0] - b.x * sin[0]",
        DECODE,
    ),
    Fault(
        "interleaved pairs turned the wrong way",
        "attention_load.cuh",
        "x = «before * cos + y * sin»;",
        "before * cos - y * sin",
        f"{DECODE} interleaved=1",
    ),
    Fault(
        "sums not shrunk when the maximum grows",
        "segment_decode.cuh",
        "if («shrink[0] != 1 || shrink[1] != 1»)",
        "false",
        DECODE,
    ),
    Fault(
        "a row's lanes not joined",
        "attention_state.cuh",
        "return sum + «gpu::shuffle_xor(sum, 2)»;",
        "gpu::shuffle_xor(sum, 1)",
        DECODE,
    ),
    Fault(
        "a split that starts at another segment's units",
        "segment_decode.cuh",
        "begin = (first_planned(p, s) / p.split_units + «split - s.unit_begin») * p.split_units;",
        "split",
        DECODE_SPLITS,
    ),
    Fault(
        "splits counted from a segment's start where a window hides it",
        "segment_decode.cuh",
        "begin = («first_planned(p, s) / p.split_units» + split",
        "0",
        f"{DECODE_SPLITS} window=60",
    ),
    Fault(
        "prefill: tiles counted from a segment's start where a window hides it",
        "segment_prefill.cuh",
        "s.unit_begin - «first_planned(p_, s) / kKeys»;",
        "0",
        "attention d=64 b=1 h=4 hkv=2 s=45 seg=350:7,41:-5 tail=275 split=64 window=40",
    ),
    Fault(
        "base-2 and natural logarithms mixed up",
        "attention_state.cuh",
        "return {1.0f / sum, «maximum + gpu::log2_accurate(sum)»};",
        "(maximum + gpu::log2_accurate(sum)) * kLn2",
        DECODE_SPLITS,
    ),
    # Prefill.
    Fault(
        "prefill: no wait for the keys",
        "segment_prefill.cuh",
        "more;) { «gpu::copy_wait<0>();» gpu::sync_block();",
        "",
        PREFILL,
    ),
    Fault(
        "prefill: no barrier before the next values",
        "segment_prefill.cuh",
        "more;) { gpu::copy_wait<0>(); «gpu::sync_block();»",
        "",
        PREFILL,
    ),
    Fault(
        "prefill: no barrier before the next keys",
        "segment_prefill.cuh",
        "hide(); gpu::copy_wait<0>(); «gpu::sync_block();»",
        "",
        PREFILL,
    ),
    Fault(
        "prefill: no wait for the values",
        "segment_prefill.cuh",
        "hide(); «gpu::copy_wait<0>();» gpu::sync_block();",
        "",
        PREFILL,
    ),
    Fault(
        "prefill: a segment read before it has arrived",
        "segment_prefill.cuh",
        "«gpu::sync_block();» const DeviceSegment& s = block_.segment; const Visible seen",
        "",
        PREFILL,
    ),
    Fault(
        "prefill: a wrong fragment of the keys",
        "segment_prefill.cuh",
        "gpu::mma_m16n8k16<T>(score_[m][2 * n], a, b[0], «b[1]»);",
        "b[2]",
        PREFILL,
    ),
    Fault(
        "prefill: weights in the wrong order",
        "segment_prefill.cuh",
        "a[m][i] = weight_[m][2 * k + «i / 2»][i % 2];",
        "i % 2",
        PREFILL,
    ),
    Fault(
        "prefill: tiles of the causal tail cut short",
        "segment_prefill.cuh",
        "tile_end = min_of(«(to + kKeys - 1) / kKeys», end - before);",
        "to / kKeys",
        PREFILL,
    ),
    Fault(
        "prefill: a last tile that is read past its end",
        "attention_tile.cuh",
        "const bool ok = «row + r >= low && row + r < high»;",
        "row + r >= low",
        PREFILL,
    ),
    Fault(
        "prefill: rows beyond the last one written",
        "segment_prefill.cuh",
        "«if (row0 + row >= p_.rows) continue;»",
        "",
        PREFILL,
    ),
    Fault(
        "prefill: padding not hidden",
        "segment_prefill.cuh",
        "if («key < low || key + kKeys > high») {",
        "key + kKeys > high",
        PREFILL_PADDED,
    ),
    # rope_concat.
    Fault(
        "rope_concat: rows past the end of a unit",
        "rope_concat.cuh",
        "«row < u.end_row»",
        "true",
        ROPE,
    ),
    Fault(
        "rope_concat: another page's slot",
        "rope_concat.cuh",
        "int64_t{«slot - skip * h.page_size»} *",
        "slot",
        ROPE,
    ),
    Fault(
        "rope_concat: chunks paired with the wrong half",
        "rope_concat.cuh",
        "neighbours ? a + 1 : «a + pairs»;",
        "a + pairs + 1",
        ROPE,
    ),
    # Merging.
    Fault(
        "merge: the weights of the states swapped",
        "merge_states.cuh",
        "return {«lse_a < lse_b ? small_weight : large_weight», lse_a",
        "lse_a < lse_b ? large_weight : small_weight",
        MERGE,
    ),
    Fault(
        "merge: parts of a row counted too far",
        "merge_states.cuh",
        "index < «p.total»; index += step",
        "p.total + 1",
        MERGE,
    ),
    Fault(
        "merge: an empty state not left out",
        "merge_states.cuh",
        "if («high == minus_infinity») return",
        "false",
        MERGE,
    ),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """The program, and the faults that are not in it because their text was not found, with the reason."""
    folder = tmp_path_factory.mktemp("faults")
    problems = plant(FAULTS, build.CSRC, folder / "csrc")
    return build.program("driver", kernels=KERNELS, csrc=folder / "csrc", folder=folder / "build"), problems


def _run(program: Path, call: str, fault: int, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVSPEED_PLANTED": str(fault)}
    return subprocess.run([program, *call.split(), *words], stdout=subprocess.PIPE, text=True, env=environment)


def test_there_are_enough():
    assert len(FAULTS) >= 15 and len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("call", sorted({fault.call for fault in FAULTS}))
def test_nothing_is_noticed_without_a_fault(planted, call):
    done = _run(planted[0], call, 0, "seeds=2")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" ok ") == 6


@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1), ids=lambda number: FAULTS[number - 1].name)
def test_fault_is_noticed(planted, number):
    """Within three seeds, in one schedule at least; what was noticed is printed."""
    assert planted[1].get(number) is None
    done = _run(planted[0], FAULTS[number - 1].call, number, "seeds=3")
    noticed = [line for line in done.stdout.splitlines() if re.search(r"WRONG|runtime reported a failure", line)]
    print("\n".join(noticed))
    assert done.returncode == 1 and noticed, f"{FAULTS[number - 1].name} was not noticed:\n{done.stdout}"
