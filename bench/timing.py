# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The one timing module: interleaved samples, medians, ratios, JSON with machine and versions.

What is compared runs in turns within one process: A B C A B C ..., so that a machine that slows down slows all of them.
A sample is *clean* when the process's threads waited less than 2 % of it for a processor (Linux counts that in
/proc/self/task/*/schedstat). A name's time is the median of its clean samples; where fewer than three are clean it is
the lower octile of all samples, and the result says so (`clean` < 3). With one thread the CPU time is kept as well: it
does not see other processes' turns.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def run_delay_ns() -> int:
    """Nanoseconds for which this process's threads were ready to run and had no processor; 0 where unknown."""
    total = 0
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return 0
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/schedstat") as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return total


def _busy() -> tuple[int, int]:
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:]]
    return ticks[0] + ticks[1] + ticks[2], sum(ticks)


def wait_until_idle(seconds: float) -> bool:
    """Waits, at most `seconds`, for a quarter second in which the machine is less than 10 % busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            before = _busy()
            time.sleep(0.25)
            after = _busy()
        except OSError:
            return False
        if after[0] - before[0] < 0.1 * (after[1] - before[1]):
            return True
    return False


@dataclass
class Timing:
    """All samples of one name, in seconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    clean: list[bool] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of the clean samples, or the lower octile where there are fewer than three."""
        good = [wall for wall, clean in zip(self.wall, self.clean, strict=True) if clean]
        if len(good) >= 3:
            return statistics.median(good)
        return sorted(self.wall)[len(self.wall) // 8]

    @property
    def cpu_seconds(self) -> float:
        return statistics.median(self.cpu)


@dataclass
class Comparison:
    """What `interleave` measured: a `Timing` a name, in the order in which they ran."""

    timings: dict[str, Timing]
    threads: int

    def seconds(self, name: str) -> float:
        return self.timings[name].seconds

    def samples(self, name: str) -> list[float]:
        return list(self.timings[name].wall)

    def ratio(self, slow: str, fast: str) -> float:
        """How many times as long `slow` takes as `fast`."""
        return self.seconds(slow) / self.seconds(fast)

    def cpu_ratio(self, slow: str, fast: str) -> float:
        return self.timings[slow].cpu_seconds / self.timings[fast].cpu_seconds

    def clean_share(self) -> float:
        flags = [flag for timing in self.timings.values() for flag in timing.clean]
        return sum(flags) / len(flags)

    def table(self, reference: str, *, limit: str | None = None) -> str:
        """Lines of text, fastest first: time, times the reference's, share of the limit reached."""
        width = max(map(len, self.timings))
        lines = []
        for name, timing in sorted(self.timings.items(), key=lambda item: item[1].seconds):
            line = f"{name:{width}s} {1e3 * timing.seconds:10.3f} ms  {self.ratio(name, reference):7.2f}x {reference}"
            if limit is not None:
                line += f"  {self.ratio(limit, name):5.2f} of {limit}"
            if self.threads == 1:
                line += f"  (CPU {1e3 * timing.cpu_seconds:.3f} ms)"
            lines.append(line + f"  [{sum(timing.clean)} clean of {len(timing.clean)}]")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            name: {
                "seconds": timing.seconds,
                "cpu_seconds": timing.cpu_seconds,
                "samples": len(timing.wall),
                "clean": sum(timing.clean),
                "best": min(timing.wall),
            }
            for name, timing in self.timings.items()
        }


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    seconds: float = 60.0,
    warmup: int = 1,
    idle_wait: float = 0.5,
) -> Comparison:
    """Times the functions in turns.

    Args:
        functions: what to time, by name.
        rounds: turns; up to four times as many while a name has fewer than `rounds // 2` clean samples.
        seconds: no further turn begins after this time.
        warmup: turns that are not counted.
        idle_wait: seconds to wait, at most, before a turn for other processes to be quiet.
    """
    threads = torch.get_num_threads()
    comparison = Comparison({name: Timing() for name in functions}, threads)
    for _ in range(warmup):
        for function in functions.values():
            function()
    begin = time.monotonic()
    for turn in range(4 * rounds):
        enough = all(sum(t.clean) >= rounds // 2 for t in comparison.timings.values())
        if turn and ((turn >= rounds and enough) or time.monotonic() - begin > seconds):
            break
        wait_until_idle(idle_wait)
        for name, function in functions.items():
            delay, cpu, wall = run_delay_ns(), time.process_time(), time.perf_counter()
            function()
            wall = time.perf_counter() - wall
            cpu = time.process_time() - cpu
            delay = run_delay_ns() - delay
            timing = comparison.timings[name]
            timing.wall.append(wall)
            timing.cpu.append(cpu)
            timing.clean.append(delay < 0.02e9 * wall)
    return comparison


def machine() -> dict[str, Any]:
    """What a number cannot be read without: processor, cores, threads, load, versions, instruction set, commit."""
    import kvspeed
    from kvspeed import _C

    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    return {
        "processor": model,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "isa": _C.isa_name(_C.isa_best()),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "kvspeed": getattr(kvspeed, "__version__", _C.build_info()["version"]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def save(
    name: str, comparison: Comparison, *, case: Mapping[str, Any], ratios: Mapping[str, float], **more: Any
) -> Path:
    """Writes one comparison as `bench/results/NAME.json`, and returns its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "name": name,
        "case": dict(case),
        "ratios": {key: round(value, 4) for key, value in ratios.items()},
        "clean_share": round(comparison.clean_share(), 3),
        "times": comparison.as_dict(),
        "machine": machine(),
        **more,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


__all__ = ["RESULTS", "Comparison", "Timing", "interleave", "machine", "save", "wait_until_idle"]
