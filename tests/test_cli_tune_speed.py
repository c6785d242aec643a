# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed tune-speed` on a tiny model: what it writes, that its folder is a model, and its refusals."""

from __future__ import annotations

import json

import pytest
from cli_tools import refused, run, save_model
from kvspeed.cli.common import load_model
from kvspeed.packet import PacketAdapter
from kvspeed.samples import write_samples
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
    assert "another speed" in refused(run(*command, "--k", 2))
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


def test_messages_and_tasks(tmp_path, model):
    file = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    command = ["tune-speed", "--model", model, "--data", file, "--tasks", "arithmetic", "--contexts", 2, "--dev", 0]
    result = run(*command, "--out", tmp_path / "out", *QUICK)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "2 of 2 steps on 13 samples" in result.stdout


def test_refusals(tmp_path, model, file):
    base = ["tune-speed", "--model", model, "--out", tmp_path / "out"]
    assert "no data; name a file of JSON Lines" in refused(run(*base))
    assert "--tasks: got 'trivia', choose from biography" in refused(run(*base, "--tasks", "trivia"))
    assert "there is no file" in refused(run(*base, "--data", tmp_path / "nowhere.jsonl"))
    for option, value in (("--method", "x"), ("--loss", "mse"), ("--labels", "x"), ("--boundary", "x")):
        assert f"{option}: got '{value}', choose" in refused(run(*base, "--data", file, option, value))
    assert "--out:" in refused(run("tune-speed", "--model", model, "--data", file, "--out", file))
    assert "--k: is 9" in refused(run(*base, "--data", file, "--k", 9))
    assert "give one of them" in refused(run(*base, "--data", file, "--adapter", file, "--new-adapter"))
    assert "is not a file" in refused(run(*base, "--data", file, "--adapter", tmp_path / "none"))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "wrong-1: has no answer to learn from" in refused(run(*base, "--data", wrong, "--dev", 0))
    assert not (tmp_path / "out").exists()
