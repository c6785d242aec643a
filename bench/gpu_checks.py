# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""bench/gpu.py's stages before the timing: build, wrappers, tests, sanitizer."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_clock import Run

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "bench-gpu"
NATIVE = ("gpu_wrappers", "gpu_ops")  # programs in tests/native
SANITIZER = ("memcheck", "racecheck", "initcheck", "synccheck")
# A few of the tests of the ops for --dry-run; the whole of them runs in the test suite.
DRY_TESTS = ("tests/test_ops_merge_states.py", "--maxfail=1")


def command(
    run: Run, words: Sequence[str | Path], *, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str, float]:
    """Runs a program: (exit status, its output, seconds). One that takes too long counts as failed, with status 124."""
    begin = time.monotonic()
    limit = max(min(seconds, run.left() - 1), 1)
    try:
        found = subprocess.run(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return 124, text + f"\nended after {limit:.0f} s", time.monotonic() - begin
    return found.returncode, found.stdout, time.monotonic() - begin


def tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])[-3000:]


def nvcc() -> str:
    """Raises: RuntimeError: there is none."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    found = str(home) if home.is_file() else shutil.which("nvcc")
    if not found:
        raise RuntimeError("nvcc is neither in CUDA_HOME, /usr/local/cuda nor on the PATH")
    return found


# ---- build ---------------------------------------------------------------------------------------------------------


def build(run: Run) -> None:
    """The extension for this card, in place; with --dry-run the emulator's."""
    if run.backend != "cuda":
        _build_emulator(run)
        return
    words = [sys.executable, "setup.py", "build_ext", "--inplace"]
    code, output, seconds = command(run, words, seconds=run.seconds, environment={"KVSPEED_CUDA": "ON"})
    run.note("seconds", seconds)
    if code != 0:
        raise RuntimeError(f"the build ended with status {code}:\n{tail(output, 30)}")
    code, output, _ = command(run, [sys.executable, "-c", _LOADED], seconds=60)
    run.note("loaded", tail(output, 20))
    if code != 0:
        raise RuntimeError(f"the extension cannot be used:\n{tail(output)}")
    for path in (ROOT / "python" / "kvspeed").glob("_C*.so"):
        run.note("extension_bytes", path.stat().st_size)
    run.say(f"built in {seconds:.0f} s")


_LOADED = """
import torch
from kvspeed.ops.device import cuda_refusal
from kvspeed.ops.native import build_info
print(build_info())
refusal = cuda_refusal(0)
raise SystemExit(refusal or 0)
"""


def _build_emulator(run: Run) -> None:
    if run.backend == "simt":
        from gpu_backend import active

        begin = time.monotonic()
        with active(run):
            pass
        run.note("seconds", time.monotonic() - begin)
    from kvspeed.ops.native import build_info

    run.note("loaded", str(build_info()))


# ---- native programs -----------------------------------------------------------------------------------------------


def native_program(run: Run, name: str) -> Path:
    """Builds one of tests/native; for the emulator where that is the backend."""
    if run.backend == "simt":
        from simt.build import program as emulated  # of tests/

        return Path(emulated(name))
    WORK.mkdir(parents=True, exist_ok=True)
    program = WORK / name
    words: list[str | Path] = [nvcc(), "-std=c++20", "-O2", "-lineinfo", "-arch=native"]
    words += ["-Icsrc", "-Icsrc/include", "-Itests", f"tests/native/{name}.cu", "-o", program]
    if name == "gpu_ops":
        found = sorted(ROOT.glob("build/**/libkvspeed_core.a"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise RuntimeError("build/ has no libkvspeed_core.a: run the stage 'build' first")
        words += [found[-1], "-lgomp"]
    code, output, seconds = command(run, words, seconds=60)
    if code != 0:
        raise RuntimeError(f"{name} does not compile:\n{tail(output, 30)}")
    run.say(f"{name} compiled in {seconds:.1f} s")
    return program


def wrappers(run: Run) -> None:
    """Every wrapper of csrc/cuda/gpu.h, and then the three ops, against the host."""
    if run.backend == "cpu":
        run.note("left_out", "the CPU's kernels have no device wrappers")
        return
    failed = []
    for name in NATIVE:
        try:
            code, output, seconds = command(run, [native_program(run, name)], seconds=30)
        except RuntimeError as error:
            code, output, seconds = 1, str(error), 0.0
        run.note(name, {"status": code, "seconds": seconds, "output": tail(output, 60)})
        run.say(f"{name}: {tail(output, 1)}")
        if code != 0:
            failed.append(name)
    if failed:
        raise RuntimeError(f"not ok: {', '.join(failed)}")


def sanitizer(run: Run) -> None:
    """compute-sanitizer's four tools over tests/native/gpu_ops; the emulator's own checks with --dry-run."""
    if run.backend != "cuda":
        run.note("left_out", "compute-sanitizer needs a GPU; the emulator checks what it runs by itself")
        return
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).is_file():
        run.note("left_out", "compute-sanitizer is not installed")
        return
    failed = []
    program = native_program(run, "gpu_ops")
    for name in SANITIZER:
        words: list[str | Path] = [tool, "--tool", name, "--error-exitcode", "99", "--print-limit", "20", program, "1"]
        code, output, seconds = command(run, words, seconds=20)
        run.note(name, {"status": code, "seconds": seconds, "output": tail(output, 25)})
        run.say(f"{name}: status {code}, {tail(output, 1)}")
        if code != 0:
            failed.append(name)
    if failed:
        raise RuntimeError(f"not ok: {', '.join(failed)}")


# ---- tests ---------------------------------------------------------------------------------------------------------


def tests(run: Run) -> None:
    """The op tests on this backend. Where pytest-xdist is installed, in several processes."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    if run.dry:
        words += [*DRY_TESTS, "-k", f"{run.backend} and not anything"]
    else:
        words += ["-k", run.backend]
        words += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("test_ops_*.py"))]
        if importlib.util.find_spec("xdist") is not None:
            words += ["-n", str(min(8, os.cpu_count() or 1))]
    code, output, seconds = command(run, words, seconds=run.seconds, environment={"OMP_NUM_THREADS": "1"})
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", tail(output, 1))
    }
    result: dict[str, Any] = {"status": code, "seconds": seconds, "counts": counts}
    if code != 0:
        result["output"] = tail(output, 60)
    run.note("pytest", result)
    run.say(tail(output, 1))
    if code != 0:
        raise RuntimeError(f"pytest ended with status {code}: {tail(output, 3)}")
    if not counts.get("passed"):
        raise RuntimeError("no test ran")
