# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Where bench/gpu.py's stages run, and how they take times: device events, a cold L2, rivals in turns.

Before every sample a buffer of several times the L2 is written, so that nothing of the last sample is left in the
cache. That write also keeps the device busy while the host enqueues the sample: what lies between the two events is the
device's time alone, unless the host needs longer than the write (many small launches), and then that is the truth too.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FLUSH_BYTES = 512 << 20  # the least; four times the L2 where that is more


def write_atomically(path: Path, document: Any) -> None:
    """JSON that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


@dataclass
class Run:
    """What a stage is given: where it runs, how long, and a place for what it finds.

    Attributes:
        dry: run on the CPU with tiny shapes; times mean nothing.
        backend: "cuda", "simt" (the emulator) or "cpu".
        seconds: of the stage, from its start.
        path: file of its results, rewritten at every `note`, so that a stage that is ended keeps what it had.
    """

    dry: bool
    backend: str
    seconds: float
    path: Path
    found: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.backend == "cuda" else "cpu")

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begin)

    def say(self, text: str) -> None:
        print(f"  {time.monotonic() - self.begin:6.1f} s  {text}", flush=True)

    def note(self, name: str, value: Any) -> None:
        self.found[name] = value
        write_atomically(self.path, self.found)

    @contextlib.contextmanager
    def case(self, name: str, *, least: float = 0.0) -> Iterator[dict[str, Any]]:
        """One case: what the body puts into the dict is kept; a failure is recorded and the next case goes on.

        Args:
            name: key in the results.
            least: seconds that the case needs; with fewer left it is left out, and says so.
        """
        result: dict[str, Any] = {}
        if self.left() < least:
            raise LeftOut(name)
        try:
            yield result
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[:2000]
            self.say(f"{name}: FAILED, {result['error'][:200]}")
            if self.backend == "cuda":
                torch.cuda.empty_cache()
        self.note(name, result)

    def raise_failures(self) -> None:
        """Raises RuntimeError with the names of the cases that failed, if any did."""
        failed = [name for name, result in self.found.items() if isinstance(result, dict) and "error" in result]
        if failed:
            raise RuntimeError(f"{len(failed)} cases failed: {'; '.join(failed)}")

    def sync(self) -> None:
        if self.backend == "cuda":
            torch.cuda.synchronize()


class LeftOut(Exception):
    """A case for which no time was left."""


def cases(run: Run, work: Mapping[str, tuple[float, Callable[[dict[str, Any]], None]]]) -> None:
    """Runs {name: (seconds it needs, function of its result)} in order, as far as the time reaches.

    `Run.raise_failures` says at the stage's end which of them failed.
    """
    for name, (least, function) in work.items():
        try:
            with run.case(name, least=least) as result:
                function(result)
        except LeftOut:
            run.say(f"{name}: left out, {run.left():.0f} s left of at least {least:.0f}")
            run.note(name, {"left_out": f"{run.left():.0f} s left, needs about {least:.0f}"})


@dataclass
class Times:
    """Samples of one contender, in seconds."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def as_dict(self) -> dict[str, Any]:
        ordered = sorted(self.samples)
        return {
            "seconds": self.median,
            "p10": ordered[len(ordered) // 10],
            "p90": ordered[(9 * len(ordered)) // 10],
            "samples": len(ordered),
        }


class Clock:
    """Takes samples on one backend."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.cuda = run.backend == "cuda"
        size = 1 << 16
        if self.cuda:
            size = max(FLUSH_BYTES, 4 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.uint8, device=run.device)

    def sample(self, function: Callable[[], object]) -> float:
        """Seconds of one call with a cold L2."""
        if not self.cuda:
            self._flush.zero_()
            begin = time.perf_counter()
            function()
            return time.perf_counter() - begin
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        before.record()
        function()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e-3

    def compare(
        self, functions: Mapping[str, Callable[[], object]], *, rounds: int = 50, seconds: float = 2.0, warmup: int = 3
    ) -> dict[str, Times]:
        """Samples in turns, each round beginning with another contender, at least 3 rounds within `seconds`."""
        if self.run.dry:
            rounds, warmup = 1, 0
        times = {name: Times() for name in functions}
        for _ in range(warmup):
            for function in functions.values():
                function()
        self.run.sync()
        order, begin = list(functions), time.monotonic()
        for turn in range(rounds):
            if turn >= 3 and (time.monotonic() - begin > seconds or self.run.left() < 1):
                break
            shift = turn % len(order)
            for name in order[shift:] + order[:shift]:
                times[name].samples.append(self.sample(functions[name]))
        return times

    def host_seconds(self, function: Callable[[], object], calls: int = 200) -> float:
        """Host time of one call that is enqueued behind others: what a layer costs before the device begins."""
        if self.run.dry:
            calls = 2
        function()
        self.run.sync()
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            best = min(best, (time.perf_counter() - begin) / calls)
            self.run.sync()
        return best

    def launches(self, function: Callable[[], object]) -> int | None:
        """Kernels that one call launches, by the profiler; None without a GPU."""
        if not self.cuda:
            return None
        from torch.profiler import ProfilerActivity, profile

        function()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            function()
            torch.cuda.synchronize()
        device = torch.autograd.DeviceType.CUDA
        return sum(e.count for e in found.key_averages() if e.device_type == device and "Memset" not in e.key)


def summary(times: Mapping[str, Times], own: str) -> dict[str, Any]:
    """All times, and every rival's over `own`'s (above 1: own is faster)."""
    return {
        "times": {name: found.as_dict() for name, found in times.items()},
        "faster_than": {name: found.median / times[own].median for name, found in times.items() if name != own},
    }
