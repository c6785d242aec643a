# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed diagnose`: table, JSON, plot, going on after an interruption, refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cli_tools import refused, run, save_model
from kvspeed.speed import diagnose as module
from kvspeed.speed.diagnose import Diagnosis

FEW = ("--samples", "2", "--length", "20", "--max-new-tokens", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "gemma2", "gemma2", layers=10)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of prompts in two kinds."""
    path = tmp_path / "prompts.jsonl"
    entries = [
        {"category": "law [1]", "prompt": "Who may vote?", "answer": "All."},
        {"category": "law [1]", "prompt": "Who may not?"},
        {"category": "law [1]", "prompt": "Who else?"},
        {"category": "talk", "prompt": "How are you?"},
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    return path


def test_the_table(folder: Path, written: Path) -> None:
    result = run("diagnose", "--model", folder, "--prompts", written, *FEW)
    assert result.exit_code == 0, result.stderr
    assert "gemma2: 10 layers, 3 prompts" in result.stdout  # two of the three of one kind
    assert "law [1]" in result.stdout and "talk" in result.stdout
    advice = " ".join(result.stdout.split())
    assert "rule of thumb" in advice and (
        "is the depth to try first" in advice or "Every layer should see the prompt" in advice
    )
    shown = run("diagnose", "--model", folder, "--prompts", written, *FEW, "--layers", "--categories", "talk")
    assert shown.exit_code == 0 and "curvature" in shown.stdout and "law" not in shown.stdout
    assert sum(line.split()[:1] == [str(layer)] for layer in range(10) for line in shown.stdout.splitlines()) >= 10


def test_built_in_prompts(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    result = run("diagnose", "--model", folder, "--json", path, "--categories", " code,copying", *FEW)
    assert result.exit_code == 0 and f"written  {path}" in result.stdout, result.stderr
    found = Diagnosis.load(path)
    assert [one.id for one in found.measured] == ["code-0", "code-1", "copying-0", "copying-1"]
    assert found.complete and found.model == "gemma2" and os.listdir(tmp_path) == ["found.json"]
    assert json.loads(path.read_text())["recommendation"]["reason"]


def test_the_plot(folder: Path, written: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    path = tmp_path / "found.png"
    result = run("diagnose", "--model", folder, "--prompts", written, "--plot", path, *FEW)
    assert result.exit_code == 0, result.stderr
    with Image.open(path) as image:
        assert image.format == "PNG" and min(image.size) > 500 and len(set(image.convert("L").tobytes())) > 20
    assert sorted(os.listdir(tmp_path)) == ["found.png", "prompts.jsonl"]


def test_without_matplotlib(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before the model is loaded."""
    original = importlib.util.find_spec
    find = lambda name, *args: None if name == "matplotlib" else original(name, *args)  # noqa: E731
    monkeypatch.setattr("kvspeed.eval.diagnose_plot.find_spec", find)
    says = refused(run("diagnose", "--model", folder / "missing", "--plot", tmp_path / "a.png"))
    assert "matplotlib" in says and "pip install" in says


def test_it_goes_on(folder: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    original, measured = module._measure, []

    def measure(*args: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(args[2].id)
        return original(*args)

    monkeypatch.setattr(module, "_measure", measure)
    command = ("diagnose", "--model", folder, "--prompts", written, "--json", path, *FEW)
    stopped = run(*command)
    assert stopped.exit_code == 130 and "interrupted" in stopped.stderr and measured == ["law [1]-1", "law [1]-2"]
    half = Diagnosis.load(path)
    assert not half.complete and len(half.measured) == 2
    measured.clear()
    again = run(*command)
    assert again.exit_code == 0 and measured == ["talk-4"], again.stderr
    whole = Diagnosis.load(path)
    assert whole.complete and whole.measured[:2] == half.measured
    assert run(*command).exit_code == 0 and measured == ["talk-4"] and Diagnosis.load(path) == whole
    says = refused(run(*command, "--anchor-tokens", "2"))
    assert "other settings (--anchor-tokens 1" in says and Diagnosis.load(path) == whole


def test_refusals(folder: Path, written: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "bad.jsonl").write_text("{}\n")
    missing = tmp_path / "nowhere" / "a"
    for arguments, says in (
        (("--json", tmp_path / "other.json"), "--json: .*is no diagnosis"),
        (("--json", tmp_path), "--json: .* is a folder"),
        (("--json", missing), "--json: there is no folder"),
        (("--plot", missing), "--plot: there is no folder"),
        (("--prompts", missing), "No such file"),
        (("--prompts", tmp_path / "bad.jsonl"), "line 1: category is None"),
        (("--prompts", written, "--categories", "talk,code"), "has no prompts of 'code'; it has law"),
        (("--categories", "poems"), "'poems' is not built in; choose from retrieval"),
        (("--categories", "code,,copying"), "--categories: got 'code,,copying'"),
        (("--categories", "code,code"), "each once"),
        (("--model", tmp_path), "has no config.json"),
        (("--model", folder, "--length", "40000"), "and the model has 16384"),
    ):
        assert re.search(says, refused(run("diagnose", *arguments))), says
    assert (tmp_path / "other.json").read_text() == '{"a": 1}'
    assert run("diagnose", "--samples", "0").exit_code == 2
