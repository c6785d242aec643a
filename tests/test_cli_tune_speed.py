# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed tune-speed` on a tiny model: what it writes, that its folder is a model, and its refusals."""

from __future__ import annotations

import json

import kvspeed
import pytest
from cli_tools import refused, run, save_model
from kvspeed.cli.common import load_model
from kvspeed.packet import PacketAdapter
from kvspeed.samples import write_samples
from kvspeed.speed import load_tuned
from kvspeed.speed.choice import remembered_choice, take_choice
from kvspeed.speed.tuning.run import Run
from kvspeed.state import state_of
from kvspeed.tuned import remembered_spec
from train_tools import random_samples

pytest.importorskip("peft")

QUICK = ["--steps", 2, "--batch-size", 3, "--rank", 2, "--k", 3]


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "tiny")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, random_samples(8, per_context=2, seed=3))
    return path


def test_tunes_goes_on_and_is_a_model(tmp_path, model, file):
    out = tmp_path / "out"
    command = ["tune-speed", "--model", model, "--data", file, "--dev", 0.25, "--out", out, *QUICK]
    result = run(*command, "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    report = json.loads(result.stdout)
    assert (
        report["steps"] == report["planned_steps"] == 2 and report["speed"]["k"] == 3 and report["folder"] == str(out)
    )
    again = run(*command)  # done already
    assert again.exit_code == 0 and "k = 3 of" in again.stdout and "2 of 2 steps on 6 samples" in again.stdout
    assert "step 2 of 2" in result.stderr and "step 2 of 2" not in again.stderr
    assert "done already: no step was taken" in again.stderr and "done already" not in result.stderr
    other = refused(run(*command, "--k", 2))
    assert "another speed" in other and "--no-resume" in other and "resume=False" not in other
    network, _, name = load_model(str(out), None)
    assert name == "out" and remembered_spec(network).k == 3
    # its folder may be tuned further, whole, for another rule, together with an adapter
    more = tmp_path / "more"
    options = [
        "--method",
        "full",
        "--lr",
        1e-4,
        "--anchor-tokens",
        0,
        "--self-only",
        "--boundary",
        "keep",
        "--new-adapter",
    ]
    result = run("tune-speed", "--model", out, "--data", file, "--dev", 0, "--out", more, *QUICK, *options)
    assert result.exit_code == 0, (result.stderr, result.exception)
    network, _, _ = load_model(str(more), None)
    spec = remembered_spec(network)
    assert (spec.k, spec.anchor_tokens, spec.boundary, spec.upper_attention) == (3, 0, "keep", "self")
    assert PacketAdapter.load(more / "adapter.safetensors", network).tokens == 16


def test_an_interrupted_run_says_what_it_left(tmp_path, model, file, monkeypatch):
    out = tmp_path / "out"
    command = ["tune-speed", "--model", model, "--data", file, "--dev", 0.25, "--out", out, *QUICK]
    step = Run._step

    def once(self, learner):
        if self.report.steps:
            raise KeyboardInterrupt
        step(self, learner)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_step", once)
        stopped = run(*command)
    assert stopped.exit_code == 130
    assert f"kept in {out}; the same command goes on from there" in " ".join(stopped.stderr.split("\n"))
    again = run(*command)
    assert again.exit_code == 0 and "2 of 2 steps" in again.stdout and "step 1 of 2" not in again.stderr


def test_messages_and_tasks(tmp_path, model):
    file = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    command = ["tune-speed", "--model", model, "--data", file, "--tasks", "arithmetic", "--contexts", 2, "--dev", 0]
    result = run(*command, "--out", tmp_path / "out", *QUICK)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "2 of 2 steps on 13 samples" in result.stdout


def test_files_of_one_name(tmp_path, model):
    """Samples without ids are named after their file, and files of several folders may have the same name."""
    files = []
    for part in ("a", "b", "dev"):
        (tmp_path / part).mkdir()
        files.append(tmp_path / part / "mine.jsonl")
        lines = [{"documents": [f"w1{n} w2."], "question": f"{part}?", "answers": [f"w3{n}"]} for n in range(2)]
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    a, b, dev = files
    command = ["tune-speed", "--model", model, "--data", a, "--data", b, "--dev-data", dev, "--out", tmp_path / "out"]
    result = run(*command, *QUICK)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "2 of 2 steps on 4 samples" in result.stdout


def test_refusals(tmp_path, model, file):
    base = ["tune-speed", "--model", model, "--out", tmp_path / "out"]
    assert "no data; name a file of JSON Lines" in refused(run(*base))
    assert "--tasks: got 'trivia', choose from biography" in refused(run(*base, "--tasks", "trivia"))
    assert "there is no file" in refused(run(*base, "--data", tmp_path / "nowhere.jsonl"))
    for option, value in (("--method", "x"), ("--loss", "mse"), ("--labels", "x"), ("--boundary", "x")):
        assert f"{option}: got '{value}', choose" in refused(run(*base, "--data", file, option, value))
    assert "--out:" in refused(run("tune-speed", "--model", model, "--data", file, "--out", file))
    inside = ["--model", tmp_path / "none", "--data", file, "--out", file / "x"]
    assert f"--out: {file} is a file; give a folder" in refused(run("tune-speed", *inside))
    assert f"--teacher: {file} is a file" in refused(run(*base, "--data", file, "--teacher", file))
    assert "rank: got 100000, and the model's hidden size is 64" in refused(
        run(*base, "--data", file, "--dev", 0, "--rank", 100000)
    )
    assert "--k: is 9" in refused(run(*base, "--data", file, "--k", 9))
    assert "give one of them" in refused(run(*base, "--data", file, "--adapter", file, "--new-adapter"))
    assert "is not a file" in refused(run(*base, "--data", file, "--adapter", tmp_path / "none"))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "wrong-1: has no answer to learn from" in refused(run(*base, "--data", wrong, "--dev", 0))
    wrong.write_text('\n{"documents": ["a"], "question": "b?", "answers": ["c"]}\n' + wrong.read_text())
    assert "wrong.jsonl: line 3 is a conversation and line 2 is none" in refused(run(*base, "--data", wrong))
    wrong.write_text('{"documents": ["a"], "question": "b?", "answers": ["c"], "messages": []}\n')
    assert "wrong.jsonl, line 1: has both messages and documents" in refused(run(*base, "--data", wrong))
    assert not (tmp_path / "out").exists()


def test_a_chosen_depth_lies_in_the_folder_of_a_lora(tmp_path, model, file):
    out = tmp_path / "out"
    done = run("tune-speed", "--model", model, "--data", file, "--dev", 0.25, "--out", out, *QUICK)
    assert done.exit_code == 0, (done.stderr, done.exception)
    few = ["--tasks", "niah:chunks=1", "--samples", 1, "--max-new-tokens", 2, "--confidence", 0, "--k", "2,3"]
    chosen = run("choose-depth", "--model", out, *few, "--save")
    assert chosen.exit_code == 0, (chosen.stderr, chosen.exception)
    network, _, _ = load_model(str(out), None)
    state = state_of(kvspeed.patch_model(network, "auto"))
    assert state is not None and state.spec.k == 2
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({name: one for name, one in config.items() if name != "kvspeed_auto"}))
    base, _, _ = load_model(str(model), None)
    base.config.kvspeed_auto = config["kvspeed_auto"]
    network, _ = load_tuned(out, base)  # what was chosen for a model's own weights is not chosen for tuned ones
    assert remembered_choice(network) is None
    (out / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is damaged"):
        take_choice(network, out)
