# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""bench/gpu.py without a GPU: its whole flow on the emulator, and what it does when a stage goes wrong."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
NVCC = next(
    (str(p) for p in [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"] if p.is_file()),
    shutil.which("nvcc"),
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module bench/gpu.py; its neighbours can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("gpu")


def _dry_run(out: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    command = [sys.executable, "bench/gpu.py", "--dry-run", "--out", str(out), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=900)
    return done, json.loads(out.read_text())


def test_the_dry_run_goes_through_every_stage_on_the_emulator(bench: ModuleType, tmp_path: Path) -> None:
    from simt import build  # here the first build of the emulator has all the time it needs

    for name in ("gpu_wrappers", "gpu_ops"):
        build.program(name)
    build.build("simt_extension")
    done, found = _dry_run(tmp_path / "dry.json")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert found["dry_run"] and found["backend"] == "simt" and "meaningless" in found["meaning"]
    assert "meaningless" in done.stdout
    assert list(found["stages"]) == [stage.name for stage in bench.STAGES]
    stages = {name: stage["found"] for name, stage in found["stages"].items()}
    assert all(stage["status"] == "ok" for stage in found["stages"].values())
    for field in ("nvcc", "torch", "transformers", "python", "kvspeed", "commit", "card"):
        assert field in found["machine"]
    assert "all wrappers mean what the host says" in stages["wrappers"]["gpu_wrappers"]["output"]
    assert "the GPU agrees with the CPU" in stages["wrappers"]["gpu_ops"]["output"]
    assert stages["tests"]["pytest"]["counts"]["passed"] > 0
    # What was timed is right: the rivals' results are near, and the times are there, whatever they mean.
    for name, tolerance in (("rope_concat", 0.02), ("decode", 0.03), ("prefill", 0.03)):
        cases = [case for case in stages[name].values() if isinstance(case, dict)]
        assert len(cases) >= 2
        for case in cases:
            differences = case["difference"]
            differences = differences.values() if isinstance(differences, dict) else [differences]
            assert all(0 <= one < tolerance for one in differences), (name, case)
            assert case["times"]["kvspeed"]["seconds"] > 0 and case["bytes"] > 0 and len(case["faster_than"]) >= 1
    assert all(
        case["values_equal"] in (True, None) for case in stages["rope_concat"].values() if isinstance(case, dict)
    )
    for name in ("rope_concat", "decode", "prefill", "models"):  # it was the emulator that ran
        assert stages[name]["emulated_launches"] > 0
    models = stages["models"]
    names = " ".join(models)
    for method in ("unpatched", "SPEED k = 2", "SPEED k = 1", "packets, view", "packets, copy"):
        assert method in names
    plain = next(value for key, value in models.items() if key.endswith("unpatched"))
    for key, case in models.items():
        if not isinstance(case, dict):  # the number of launches
            continue
        if "eager" in case:
            assert all(
                math.isfinite(x) and x > 0 for x in (case["eager"]["ttft_seconds"], case["eager"]["token_seconds"])
            )
        if "SPEED" in key:
            assert case["kv_bytes"] < plain["kv_bytes"] * (1.2 if "packets" in key else 1) and "cuda graph" in case


def test_stages_that_go_wrong_are_recorded_with_what_they_found(bench: ModuleType, tmp_path: Path) -> None:
    options = argparse.Namespace(backend="cpu", dry_run=True)
    expected = {
        "fine": ("ok", {"answer": 42}, ""),
        "raising": ("failed", {"before": 1}, "this stage fails on purpose"),
        "crashing": ("failed", {"before": 1}, "exit status -6"),
    }
    for name, (status, found, error) in expected.items():
        result = bench.run_stage(bench.Stage(name, "bench_faults", 60, ""), options, 60, tmp_path)
        assert result["status"] == status and result["found"] == found
        assert error in result.get("error", "")


def test_a_stage_that_hangs_is_ended(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GRACE", 0.0)
    options = argparse.Namespace(backend="cpu", dry_run=True)
    result = bench.run_stage(bench.Stage("hanging", "bench_faults", 10, ""), options, 10, tmp_path)
    assert result["status"] == "timeout" and result["found"] == {"before": 1} and "about to hang" in result["error"]


def test_a_run_without_time_leaves_stages_out_and_still_writes(tmp_path: Path) -> None:
    done, found = _dry_run(tmp_path / "dry.json", "--minutes", "0.001", "--backend", "cpu")
    assert done.returncode == 1
    assert {stage["status"] for stage in found["stages"].values()} == {"left out"}
    assert not list(tmp_path.glob("*.partial"))


def test_budgets_fit_into_eight_minutes(bench: ModuleType) -> None:
    assert sum(stage.seconds for stage in bench.STAGES) <= bench.TOTAL == 480


def test_without_a_gpu_it_says_so_in_a_sentence(bench: ModuleType, monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "nvidia_smi", lambda fields: {})
    assert bench.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "shows no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_cases_beyond_the_time_are_left_out_and_failing_ones_recorded(bench: ModuleType, tmp_path: Path) -> None:
    from gpu_clock import Run, cases

    run = Run(True, "cpu", 30.0, tmp_path / "part.json")

    def broken(result: dict) -> None:
        result["half"] = 1
        raise RuntimeError("broken on purpose")

    work = {
        "a": (0.0, lambda result: result.update(x=1)),
        "b": (0.0, broken),
        "c": (1e6, broken),
        "d": (0.0, dict.clear),
    }
    cases(run, work)
    found = json.loads((tmp_path / "part.json").read_text())
    assert found["a"] == {"x": 1} and found["b"]["half"] == 1 and "broken on purpose" in found["b"]["error"]
    assert "left_out" in found["c"] and found["d"] == {}
    with pytest.raises(RuntimeError, match="1 cases failed: b"):
        run.raise_failures()


def test_the_self_test_covers_every_wrapper() -> None:
    header = (ROOT / "csrc" / "cuda" / "gpu.h").read_text()
    names = set(re.findall(r"^KVS_(?:HOST_)?DEVICE .*?(\w+)(?:<\w+>)?\(", header, flags=re.MULTILINE))
    assert len(names) > 35
    program = (ROOT / "tests" / "native" / "gpu_wrappers.cu").read_text()
    missing = sorted(name for name in names if not re.search(rf"\b{name}\b", program))
    assert not missing, f"tests/native/gpu_wrappers.cu checks no {', '.join(missing)}"


def test_the_self_test_passes_in_the_emulator() -> None:
    from simt import build

    for name in ("gpu_wrappers", "gpu_ops"):
        done = subprocess.run([str(build.program(name))], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{name}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("name", ["gpu_wrappers", "gpu_ops"])
def test_native_programs_compile_for_a_gpu(name: str, tmp_path: Path) -> None:
    words = [str(NVCC), "-std=c++20", "-gencode", "arch=compute_80,code=sm_80", "-Icsrc", "-Icsrc/include", "-Itests"]
    words += ["-c", f"tests/native/{name}.cu", "-o", str(tmp_path / "program.o")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_report_stands_what_is_missing(bench: ModuleType) -> None:
    from gpu_report import lines

    document = {
        "meaning": "m",
        "stages": {
            "a": {"status": "left out"},
            "b": {
                "status": "failed",
                "seconds": 1.0,
                "found": {"case": {"error": "E: x\ny"}, "other": {"left_out": "z"}},
            },
            "c": {"status": "ok", "seconds": 2.0, "found": {"number": 3, "empty": {}}},
        },
    }
    text = "\n".join(lines(document))
    assert "a: left out" in text and "case: FAILED, E: x" in text and "other: left out, z" in text
