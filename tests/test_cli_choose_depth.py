# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed choose-depth`: the choice, its files, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import kvspeed
import pytest
import transformers
from cli_tools import refused, run, save_model
from kvspeed.cli.choose_depth import _samples
from kvspeed.eval.tasks import split_specs
from kvspeed.speed import trial
from kvspeed.speed.choice import DepthChoice, remembered_choice
from kvspeed.state import state_of

FEW = ("--tasks", "niah:chunks=1,copying", "--samples", "2", "--max-new-tokens", "2", "--confidence", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "llama", "llama", layers=6)


def test_chosen_written_and_used(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    result = run("choose-depth", "--model", folder, *FEW, "--k", "3,5", "--held-out", "1", "--json", path, "--save")
    assert result.exit_code == 0, result.stderr
    report = json.loads(path.read_text())
    assert set(report["by_task"]) == {"niah:chunks=1", "copying"} and report["k"] == max(report["by_task"].values())
    assert {one["task"] for one in report["held_out"]} == set(report["by_task"])
    assert all(one["samples"] == 1 for one in report["held_out"])
    # A random model answers nothing right at any depth, so that it loses nothing at the least.
    assert report["k"] == 3 and "k = 3 of 6" in result.stdout and "by task: niah:chunks=1 3, copying 3" in result.stdout
    assert "k = 3 of 6: niah:chunks=1, copying need 3 of 6 layers to lose at most 0.02 on average.\n" in result.stdout
    assert result.stderr.count("the score at full depth is 0") == 2 and "copying: the score" in result.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    choice = remembered_choice(model)
    assert choice == DepthChoice.from_dict({k: v for k, v in report.items() if k not in ("model", "held_out")})
    state = state_of(kvspeed.patch_model(model, "auto"))
    assert state is not None and state.spec == kvspeed.SpeedSpec(3)


def test_an_interrupted_run_asks_nothing_twice(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], int]] = []
    stop_after = [3]
    real = trial.answers_at

    def watched(model: object, ids: tuple[int, ...], depths: list[int], **rest: object) -> dict[int, list[int]]:
        if len(asked) >= stop_after[0]:
            raise KeyboardInterrupt
        found = real(model, ids, depths, **rest)  # type: ignore[arg-type]
        asked.extend((tuple(ids), k) for k in depths)
        return found

    monkeypatch.setattr(trial, "answers_at", watched)
    path = tmp_path / "choice.json"
    command = ("choose-depth", "--model", folder, *FEW, "--k", "3,5", "--held-out", "1", "--json", path)
    assert run(*command).exit_code != 0 and len(asked) >= 3 and not path.exists()
    stop_after[0] = 10**9
    assert run(*command).exit_code == 0 and len(asked) == len(set(asked))
    report, count = path.read_text(), len(asked)
    assert run(*command).exit_code == 0 and len(asked) == count and path.read_text() == report
    assert "its rule is" in refused(run(*command, "--anchor-tokens", "2"))
    assert run(*command, "--restart").exit_code == 0 and len(asked) == 2 * count and path.read_text() == report


def test_refusals(folder: Path, tmp_path: Path) -> None:
    before = (folder / "config.json").read_text()
    long = tmp_path / "long.jsonl"
    lines = [{"documents": [text], "question": "q", "answers": ["a"]} for text in ("a", "b", 17000 * "c")]
    long.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for arguments, says in (
        (("--confidence", "1"), "--confidence: is 1.0"),
        (("--k", "3,x"), "--k: got '3,x'"),
        (("--k", "9"), "depths: hold 9 and the model has 6 layers"),
        (("--budget", "1"), "budget: is 1.0"),
        (("--max-new-tokens", 16384), "and the model has 16384 positions"),
        (("--held-out", 1, "--tasks", f"samples:path={long}", "--samples", 2), "sample 'long-3' has 1"),
        (("--tasks", "poetry"), "there is no task 'poetry'"),
        (("--json", str(tmp_path / "none" / "a.json")), "--json: there is no folder"),
        (("--json", str(tmp_path)), "is a folder; give a file"),
        (("--confidence", "0.8"), "a larger budget, or --confidence 0 to go by the mean"),
    ):
        assert says in refused(run("choose-depth", "--model", folder, *FEW, *arguments))
    assert "--save: writes into a model's folder" in refused(run("choose-depth", *FEW, "--save"))
    assert (folder / "config.json").read_text() == before


def test_own_samples_keep_their_tasks_and_those_held_out_are_others(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    lines = [
        {"documents": ["w1."], "question": f"{task} {n}?", "answers": ["w2"], "task": task}
        for n in range(3)
        for task in ("law", "code")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen, others, by_name = _samples(split_specs(f"samples:path={path}"), 2, 1, 0)
    assert [(one.task, one.question) for one in chosen] == [
        (task, f"{task} {n}?") for task in ("law", "code") for n in range(2)
    ]
    assert [one.question for one in others] == ["law 2?", "code 2?"] and set(by_name) == {"law", "code"}
    own = ("--tasks", f"samples:path={path}", "--max-new-tokens", "2", "--confidence", "0", "--k", "3,6")
    result = run("choose-depth", "--model", folder, *own, "--samples", "2")
    assert result.exit_code == 0 and "by task: law 3, code 3" in result.stdout, result.stderr
    refusal = refused(run("choose-depth", "--model", folder, *own, "--samples", "3", "--held-out", "1"))
    assert "has 3 samples of 'law', and --samples 3 takes them all" in refusal
    twice = f"samples:path={path},samples:path={path}:shuffle=1"
    assert "'law' is there twice" in refused(run("choose-depth", "--model", folder, *own[2:], "--tasks", twice))
