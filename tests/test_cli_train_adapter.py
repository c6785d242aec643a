# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed train-adapter` on a tiny model: what it writes, that it goes on, and its refusals."""

from __future__ import annotations

import json

import pytest
from cli_tools import refused, run, save_model
from kvspeed.cli.train_adapter import generated
from kvspeed.packet import PacketAdapter
from kvspeed.samples import write_samples
from train_tools import random_samples

QUICK = ["--steps", 3, "--batch-size", 3, "--max-new-tokens", 2, "--dev", 0.25, "--header", 2, "--trailer", 1]


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "tiny")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, random_samples(8, per_context=2, seed=3))
    return path


def test_trains_and_goes_on(tmp_path, model, file):
    out = tmp_path / "out"
    command = ["train-adapter", "--model", model, "--samples", file, "--out", out, *QUICK]
    result = run(*command, "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    report = json.loads(result.stdout)
    assert report["steps"] == report["planned_steps"] == 3 and report["samples"] == 6 and report["dev_samples"] == 2
    assert len([one for one in report["records"] if one["split"] == "train"]) == 3
    adapter = PacketAdapter.load(out / "adapter.safetensors")
    assert (adapter.header.shape[0], adapter.trailer.shape[0]) == (2, 1)
    assert report["adapter"] == str(out / "adapter.safetensors") and (out / "curve.csv").is_file()
    again = run(*command)  # done already
    assert again.exit_code == 0 and "3 of 3 steps on 6 samples" in again.stdout
    assert "step 3 of 3" not in again.stderr and "step 3 of 3" in result.stderr
    assert "another lr" in refused(run(*command, "--lr", 0.3))
    fresh = run(*command, "--lr", 0.3, "--no-resume", "--loss", "ce", "--k", 3)
    assert fresh.exit_code == 0 and "step 3 of 3" in fresh.stderr
    # a further run may begin with what was trained
    more = ["--adapter", out / "adapter.safetensors", "--out", tmp_path / "more"]
    assert run(*command, *more).exit_code == 0
    assert (tmp_path / "more" / "adapter.safetensors").is_file()


def test_a_samples_file_and_tasks_together(tmp_path, model, file):
    options = ["--tasks", "multihop", "--contexts", 2, "--dev", 0, "--steps", 1, "--batch-size", 2]
    result = run(
        "train-adapter", "--model", model, "--samples", file, "--out", tmp_path / "out", "--max-new-tokens", 2, *options
    )
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "1 of 1 steps on 16 samples" in result.stdout


def test_generated_tasks_are_mixed_by_weight():
    samples = generated("biography=3, niah", 8, 3)
    tasks = [one.task for one in samples]
    assert tasks.count("biography") == 36 and tasks.count("niah") == 2
    assert "niah" in tasks[:25] and "niah" in tasks[25:]
    assert len({one.documents for one in samples}) == 8
    assert len({one.id for one in samples}) == len(samples)
    assert generated("biography=3, niah", 8, 3) == samples != generated("biography=3,niah", 8, 4)


def test_a_header_may_begin_as_the_preamble_ends(tmp_path, model, file):
    from kvspeed.packet.train.initial import begin_with_preamble
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    adapter = PacketAdapter.for_model(network, 3, 2)
    trailer = adapter.trailer.detach().clone()
    begin_with_preamble(adapter, network, tokenizer, instruction="abc")
    ids = tokenizer("abc", add_special_tokens=False)["input_ids"]
    assert adapter.header.equal(network.get_input_embeddings().weight[ids]) and adapter.trailer.equal(trailer)
    long = PacketAdapter.for_model(network, 400, 0)
    first = long.header[:50].detach().clone()
    begin_with_preamble(long, network, tokenizer, instruction="abc")
    assert long.header[:50].equal(first) and long.header[-3:].equal(adapter.header)
    command = ["train-adapter", "--model", model, "--samples", file, "--out", tmp_path / "out", *QUICK]
    assert run(*command, "--init", "preamble").exit_code == 0
    assert "--init: got 'zero'" in refused(run(*command, "--init", "zero"))


def test_refusals(tmp_path, model, file):
    base = ["train-adapter", "--model", model, "--out", tmp_path / "out"]
    assert "no samples; name a file of JSON Lines" in refused(run(*base))
    assert "choose from biography" in refused(run(*base, "--tasks", "biography,trivia"))
    assert "each once" in refused(run(*base, "--tasks", "niah,niah"))
    assert "no weight above 0" in refused(run(*base, "--tasks", "niah=x"))
    assert "names no task" in refused(run(*base, "--tasks", ","))
    assert "there is no file" in refused(run(*base, "--samples", tmp_path / "nowhere.jsonl"))
    assert "--loss: got 'mse', choose kl or ce" in refused(run(*base, "--samples", file, "--loss", "mse"))
    assert "--out:" in refused(run("train-adapter", "--model", model, "--samples", file, "--out", file))
    inside = ["--model", tmp_path / "none", "--samples", file, "--out", file / "x"]
    assert f"--out: {file} is a file; give a folder" in refused(run("train-adapter", *inside))
    seeded = run(*base, "--samples", file, "--seed", 99999999999999999999999)
    assert "seed: got 99999999999999999999999, give an integer of 64 bits" in refused(seeded)
    assert "--k: is 9" in refused(run(*base, "--samples", file, "--k", 9))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(file.read_text().splitlines()[0] + '\n{"documents": [], "question": "q", "answers": ["a"]}\n')
    assert "wrong.jsonl, line 2: documents: there are none" in refused(run(*base, "--samples", wrong))
    other = save_model(tmp_path / "other", hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    soft = tmp_path / "soft.safetensors"
    from transformers import AutoModelForCausalLM

    PacketAdapter.for_model(AutoModelForCausalLM.from_pretrained(other)).save(soft)
    assert "hidden size 32" in refused(run(*base, "--samples", file, "--adapter", soft))
    assert "is not a file" in refused(run(*base, "--samples", file, "--adapter", tmp_path / "none"))
    assert not (tmp_path / "out").exists()
    for option, value in (("--steps", 0), ("--batch-size", 0), ("--header", -1), ("--epochs", "x")):
        assert run(*base, "--samples", file, option, value).exit_code == 2
