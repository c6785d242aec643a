# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Fixtures of the benchmarks: threads, and `compare`, which times, prints, and saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from timing import Comparison, interleave, save


@pytest.fixture(autouse=True)
def threads() -> int:
    """KVSPEED_BENCH_THREADS, else all cores."""
    count = int(os.environ.get("KVSPEED_BENCH_THREADS", "0")) or os.cpu_count() or 1
    torch.set_num_threads(count)
    torch.manual_seed(0)
    return count


@pytest.fixture
def compare(benchmark: Any, capsys: pytest.CaptureFixture[str], threads: int) -> Callable[..., Comparison]:
    """`compare(name, functions, case=..., limit=...)`: interleaved times, printed, and saved in bench/results.

    The first function is kvspeed's; every ratio is the other's time over its time, except that of `limit`, which is the
    share of the limit that kvspeed reaches. pytest-benchmark times kvspeed's function once more for its report, with
    the ratios in its extra_info.
    """

    def run(
        name: str,
        functions: Mapping[str, Callable[[], object]],
        *,
        case: Mapping[str, Any],
        limit: str | None = None,
        rounds: int = 15,
        seconds: float = 90.0,
    ) -> Comparison:
        own = next(iter(functions))
        comparison = interleave(functions, rounds=rounds, seconds=seconds)
        ratios = {other: comparison.ratio(other, own) for other in functions if other != own}
        save(name, comparison, case={**case, "threads": threads}, ratios=ratios)
        with capsys.disabled():
            print(f"\n{name}  {dict(case)}  {threads} threads, {comparison.clean_share():.0%} of samples clean")
            print(comparison.table(own, limit=limit))
        benchmark.extra_info.update({key: round(value, 3) for key, value in ratios.items()})
        benchmark.pedantic(functions[own], rounds=5, warmup_rounds=1)
        return comparison

    return run
