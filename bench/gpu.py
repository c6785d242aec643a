# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in one command and one JSON: build, check, sanitize, time.

    python bench/gpu.py                       # 8 minutes at most on an H200; writes bench/results/gpu-CARD.json
    python bench/gpu.py --only decode prefill
    python bench/gpu.py --dry-run             # the same flow on the emulator, with tiny shapes; times mean nothing

Needs nvcc, a C++20 compiler, torch, transformers, pytest, and what the build needs (setuptools, pybind11, cmake,
ninja): `pip install '.[test]'` brings all but the compilers. No network. Nothing is installed: the extension is built
in place.

Each stage runs in a process of its own with a budget of seconds: a crash, a hang or a device error in one is recorded,
and the others go on, but for a failed build. Results are written after every stage, whole or not at all.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TOTAL = 480.0  # seconds of the whole run
PATIENCE = 6.0  # times as long for everything in a dry run, whose emulator may have to be built first
GRACE = 5.0  # seconds that a stage gets beyond its budget: it keeps its own time
MODULES = ("torch", "transformers", "pytest", "hypothesis", "setuptools", "pybind11")
PROGRAMS = ("cmake", "ninja")


@dataclass(frozen=True)
class Stage:
    """One part of the run: `module.function(run)`, and how long it may take."""

    name: str
    module: str
    seconds: float
    about: str


STAGES = (
    Stage("build", "gpu_checks", 100, "compile the extension for this card"),
    Stage("wrappers", "gpu_checks", 20, "every device wrapper against host arithmetic"),
    Stage("tests", "gpu_checks", 100, "the tests of the ops on this backend"),
    Stage("sanitizer", "gpu_checks", 40, "compute-sanitizer over small shapes"),
    Stage("rope_concat", "gpu_rope_concat", 15, "against a device copy, and torch"),
    Stage("decode", "gpu_attention", 25, "against the copy's rate, and torch's flash attention"),
    Stage("prefill", "gpu_attention", 25, "against torch's flash attention"),
    Stage("models", "gpu_models", 150, "an 8B model: TTFT, time per token, KV bytes"),
)


def missing() -> list[str]:
    """What the stages need and this Python does not have."""
    beside = str(Path(sys.executable).parent)  # where pip puts cmake and ninja
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return [
        *(name for name in MODULES if importlib.util.find_spec(name) is None),
        *(name for name in PROGRAMS if shutil.which(name, path=path) is None),
    ]


def machine() -> dict[str, Any]:
    """Card, driver, versions and commit; what cannot be had is left empty."""
    versions = {}
    for name in ("torch", "transformers", "numpy"):
        try:
            versions[name] = importlib.import_module("importlib.metadata").version(name)
        except Exception:
            versions[name] = ""
    return {
        "card": nvidia_smi(
            "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"
        ),
        "nvcc": _first_line(["nvcc", "--version"], last=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "kvspeed": (ROOT / "pyproject.toml").read_text(encoding="utf-8").split('version = "', 1)[1].split('"', 1)[0],
        "commit": _first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "changed_files": len(_lines(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])),
    }


def nvidia_smi(fields: str) -> dict[str, str]:
    """What nvidia-smi says of the first card; {} where there is none."""
    lines = _lines(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"])
    return dict(zip(fields.split(","), (part.strip() for part in lines[0].split(",")), strict=False)) if lines else {}


def _lines(command: Sequence[str]) -> list[str]:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return found.stdout.strip().splitlines() if found.returncode == 0 else []


def _first_line(command: Sequence[str], *, last: bool = False) -> str:
    lines = _lines(command)
    return (lines[-1] if last else lines[0]) if lines else ""


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def run_stage(stage: Stage, options: argparse.Namespace, seconds: float, folder: Path) -> dict[str, Any]:
    """Runs one stage as a process; what it wrote down, and how it ended."""
    part = folder / f"{stage.name}.json"
    part.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "gpu.py"), "--stage", f"{stage.module}:{stage.name}", "--part", str(part)]
    command += [
        "--seconds",
        f"{seconds:.1f}",
        "--backend",
        options.backend,
        *(["--dry-run"] if options.dry_run else []),
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not options.dry_run:  # built in place
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]).rstrip(
            ":"
        )
    environment.setdefault("HF_HUB_OFFLINE", "1")
    clocks = nvidia_smi("clocks.sm,clocks.mem,temperature.gpu,power.draw")
    begin, status, error = time.monotonic(), "ok", ""
    log = folder / f"{stage.name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            status, error = "timeout", f"ended after {seconds + GRACE:.0f} s"
            _end(process)
        else:
            if code != 0:
                status, error = "failed", f"exit status {code}"
    text = log.read_text(errors="replace")
    if status != "ok":
        error += "; " + " | ".join(_telling(text))[-1500:]
    try:
        found = json.loads(part.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return {
        "status": status,
        "seconds": round(time.monotonic() - begin, 1),
        "budget": round(seconds, 1),
        **({"error": error} if error else {}),
        "clocks_before": clocks,
        "clocks_after": nvidia_smi("clocks.sm,clocks.mem,temperature.gpu,power.draw"),
        "found": found,
    }


def _telling(text: str) -> list[str]:
    """The lines of a log that say why: the first error in it, which the last one often hides, and the end."""
    lines = [line.strip() for line in text.strip().splitlines()]
    first = next((line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|.*\berror:", line)), None)
    return [*([first] if first is not None and first not in lines[-6:] else []), *lines[-6:]]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the stage's process group: asked first, then not asked."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(5)
            return
        except subprocess.TimeoutExpired:
            continue


def inside(options: argparse.Namespace) -> int:
    """The process of one stage."""
    sys.path.insert(0, str(HERE))
    sys.path.insert(0, str(ROOT / "tests"))
    from gpu_clock import Run

    module, function = options.stage.split(":")
    run = Run(options.dry_run, options.backend, options.seconds, Path(options.part))
    getattr(importlib.import_module(module), function)(run)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the emulator; times mean nothing")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=TOTAL / 60, help="of the whole run (default: %(default)g)")
    parser.add_argument("--out", type=Path, help="the JSON (default: bench/results/gpu-CARD.json)")
    parser.add_argument("--backend", choices=("cuda", "simt", "cpu"), help=argparse.SUPPRESS)
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # the process of one stage: module:function
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.backend = options.backend or ("simt" if options.dry_run else "cuda")
    if options.stage:
        return inside(options)

    begin = time.monotonic()
    about = machine()
    if not options.dry_run and options.backend == "cuda" and not about["card"]:
        print("nvidia-smi shows no GPU; run this where there is one, or with --dry-run", file=sys.stderr)
        return 2
    if lacking := missing():
        print(f"not installed: {', '.join(lacking)}; pip install '.[test]' brings them", file=sys.stderr)
        return 2
    card = "dry-run" if options.dry_run else about["card"].get("name", "unknown").lower().replace(" ", "-")
    out = options.out or HERE / "results" / f"gpu-{card}.json"
    out = out.resolve()
    folder = out.parent / f"{out.stem}-logs"
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "meaning": "dry run: every time in here is meaningless"
        if options.dry_run
        else "measured on the card named here",
        "dry_run": options.dry_run,
        "backend": options.backend,
        "command": " ".join(sys.argv),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": about,
        "stages": {},
    }
    sys.path.insert(0, str(HERE))
    from gpu_clock import write_atomically

    bad = []
    for stage in STAGES:
        if options.only and stage.name not in options.only:
            continue
        patience = PATIENCE if options.dry_run else 1.0
        left = patience * 60 * options.minutes - (time.monotonic() - begin)
        budget = min(patience * stage.seconds, left)
        print(f"{stage.name}: {stage.about} ({budget:.0f} s at most)", flush=True)
        if left < 5:
            result: dict[str, Any] = {"status": "left out", "error": f"no time left of {options.minutes:g} minutes"}
        elif bad[:1] == ["build"]:
            result = {"status": "left out", "error": "the build failed"}
        else:
            result = run_stage(stage, options, budget, folder)
        document["stages"][stage.name] = result
        document["seconds"] = round(time.monotonic() - begin, 1)
        write_atomically(out, document)
        print(
            f"{stage.name}: {result['status']} in {result.get('seconds', 0)} s  {result.get('error', '')}", flush=True
        )
        if result["status"] != "ok":
            bad.append(stage.name)
    from gpu_report import lines

    print("\n".join(["", *lines(document)]))
    print(f"\n{out}" + (f"; not ok: {', '.join(bad)}" if bad else "") + f"; {document['seconds']} s")
    if not bad:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
