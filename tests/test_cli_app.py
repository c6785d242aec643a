# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: version, help, `doctor`, and what is imported when."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import kvspeed
import pytest
import torch
import typer
from cli_tools import run
from kvspeed import ops
from kvspeed.cli.app import app
from kvspeed.cli.common import guarded, progress, stderr, stdout
from typer.main import get_command


def test_version_and_help():
    assert run("--version").stdout.strip() == f"kvspeed {kvspeed.__version__}"
    text = run("--help").stdout
    for command in ("demo", "doctor", "pack", "ask"):
        assert command in text
        help_of = run(command, "--help")
        assert help_of.exit_code == 0 and "--debug" in help_of.stdout
    assert run("fetch").exit_code == 2
    bare = run()
    assert bare.exit_code == 0 and "Usage" in bare.stdout and "doctor" in bare.stdout


def test_help_shows_all_words_of_an_option():
    """Words in square brackets are markup to rich, which leaves them out."""

    def options(command, name):
        for option in command.params:
            assert "[" not in (getattr(option, "help", None) or ""), (name, option.name)
        for below, one in getattr(command, "commands", {}).items():
            options(one, f"{name} {below}")

    options(get_command(app), "kvspeed")
    text = " ".join(run("tune-speed", "--help").stdout.replace("│", " ").split())
    assert "Default: 1e-3" in text


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["demo", "--help"], ["ask", "--help"]])
def test_version_and_help_do_not_import_torch(arguments):
    code = (
        "import sys\nfrom kvspeed.cli.app import app\n"
        f"try: app({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def pipe_without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        yield stream


def test_results_whose_reader_has_gone_are_no_fault(monkeypatch, pipe_without_reader):
    monkeypatch.setattr(sys, "stdout", pipe_without_reader)
    with pytest.raises(typer.Exit) as end:
        guarded(lambda: stdout().print("found"))()
    assert end.value.exit_code == 0


def test_work_goes_on_when_the_reader_of_notes_has_gone(monkeypatch, pipe_without_reader):
    monkeypatch.setattr(sys, "stderr", pipe_without_reader)

    def work():
        with progress("working", 2) as advance:
            for _ in range(2):
                advance("")
                stderr().print("note")
        return "done"

    assert guarded(work)() == "done"


def test_a_closed_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    stdout().print("found")


def test_python_m_kvspeed():
    found = subprocess.run([sys.executable, "-m", "kvspeed", "--version"], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == f"kvspeed {kvspeed.__version__}"


def test_doctor_checks_every_kernel_on_every_instruction_set():
    # in a process of its own, where no other test has loaded libraries
    result = subprocess.run([sys.executable, "-m", "kvspeed", "doctor", "--json"], capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout, result.stderr)
    report = json.loads(result.stdout)
    assert report["ok"] and report["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    build = report["build"]
    assert build["instruction_sets_available"] == ops.cpu_isas()
    assert build["instruction_set_in_use"] in build["instruction_sets_available"]
    if sys.platform == "linux":
        assert len(report["cpu"]["openmp_runtimes"]) == 1  # kvspeed uses torch's, see kvspeed.ops
    found = {(check["kernel"], check["isa"], check["dtype"]) for check in report["checks"]}
    kernels, dtypes = ("rope_concat", "segment_attention", "merge_states"), ("float32", "bfloat16", "float16")
    expected = {(a, b, c) for a in kernels for b in ops.cpu_isas() for c in dtypes}
    gpus = [f"cuda:{index}" for index, one in enumerate(report["devices"]) if not one["refused"]]
    expected |= {(a, b, c) for a in kernels for b in gpus for c in dtypes} - {
        ("segment_attention", gpu, "float32") for gpu in gpus
    }
    assert found == expected
    assert bool(build["cuda_architectures"]) == (build["backend"] == "cuda and cpu")
    assert gpus or build["cuda_note"], "nothing says why there is no GPU"
    assert all(check["ok"] and 0 <= check["error"] <= check["tolerance"] for check in report["checks"])


def test_doctor_for_people():
    result = run("doctor")
    assert result.exit_code == 0
    for word in (
        "versions",
        "optional",
        "instruction set",
        "CUDA architectures",
        "CUDA kernels",
        "CUDA devices",
        "thread",
        "checks passed",
    ):
        assert word in result.stdout


def broken_rope(keys, values, offsets, inv_freq, out_keys, out_values, *, start=0, **kwargs):
    """Right but for the sign of the angle."""
    ops_rope(keys, values, [-offset for offset in offsets], inv_freq, out_keys, out_values, start=start, **kwargs)


def broken_attention(query, segments, tail_key, tail_value, **kwargs):
    """Leaves out the last segment."""
    return ops_attention(query, segments[:-1], tail_key, tail_value, **kwargs)


def broken_merge(out_a, lse_a, out_b, lse_b):
    out, lse = ops_merge(out_a, lse_a, out_b, lse_b)
    return out * (1 + 1e-2), lse


def raising_merge(*arguments):
    raise RuntimeError("no such kernel")


ops_rope, ops_attention, ops_merge = ops.rope_concat, ops.segment_attention, ops.merge_states


@pytest.mark.parametrize(
    "name, broken",
    [
        ("rope_concat", broken_rope),
        ("segment_attention", broken_attention),
        ("merge_states", broken_merge),
        ("merge_states", raising_merge),
    ],
)
def test_doctor_finds_a_broken_kernel(monkeypatch, name, broken):
    monkeypatch.setattr(ops, name, broken)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    wrong = [check for check in report["checks"] if not check["ok"]]
    assert not report["ok"] and {check["kernel"] for check in wrong} == {name}
    assert len(wrong) == len([check for check in report["checks"] if check["kernel"] == name])
    plain = run("doctor")
    assert plain.exit_code == 1 and "FAILED" in plain.stdout


def test_doctor_without_the_extension_says_so():
    code = (
        "import sys; sys.modules['kvspeed._C'] = None\n"
        "from kvspeed.cli.app import app\n"
        "try: app(['doctor', '--json'])\nexcept SystemExit as end: assert end.code == 1, end.code\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    report = json.loads(found.stdout)
    assert not report["ok"] and "pip install" in report["fault"]


def test_an_unknown_instruction_set_in_the_environment_is_one_sentence():
    environment = {**os.environ, "KVSPEED_CPU_ISA": "sse9"}
    command = [sys.executable, "-m", "kvspeed", "doctor"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert found.stderr.startswith("kvspeed: ") and "KVSPEED_CPU_ISA" in found.stderr and "sse9" in found.stderr
