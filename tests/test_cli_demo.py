# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed demo`: the report's structure and numbers on a tiny model, and one run on the real one."""

from __future__ import annotations

import json

import pytest
from cli_tools import refused, run, save_model
from kvspeed import data

METHODS = ["full recompute", "plain re-offset concat", "packets", "SPEED", "packets + SPEED"]
FIELDS = {"method", "ttft_s", "time_per_token_s", "kv_bytes", "flops", "answers", "correct"}


@pytest.fixture
def short_documents(monkeypatch):
    """Two short documents and three questions, since a byte is a token for the tiny model."""
    documents = [data.Document("one", "The lamp is red."), data.Document("two", "Tea is a plant, Ümläut ½.")]
    questions = [data.Question("one", f"What is it, number {i}?", ("red", "crimson")) for i in range(3)]
    monkeypatch.setattr(data, "documents", lambda: documents)
    monkeypatch.setattr(data, "questions", lambda: questions)


def report_of(*arguments) -> dict:
    result = run("demo", *arguments, "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)  # and nothing else on stdout


def test_report_on_a_tiny_model(tmp_path, short_documents):
    model = save_model(tmp_path / "tiny")
    report = report_of("--model", model, "--k", 3, "--questions", 2, "--max-new-tokens", 4)
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == METHODS
    for row in rows.values():
        assert row.keys() >= FIELDS
        assert row["ttft_s"] > 0 and row["flops"] > row["flops_first_token"] > 0
        assert len(row["answers"]) == len(row["correct"]) == 2
        assert all(isinstance(text, str) for text in row["answers"])
        assert all(isinstance(mark, bool) for mark in row["correct"])
    assert (report["k"], report["layers"], report["model"]) == (3, 5, "tiny")
    assert "are untrained" in report["training"] and report["max_new_tokens"] == 4
    assert [entry["tokens"] for entry in report["documents"]] == [18, 30]
    assert len(report["questions"]) == 2 and report["questions"][0]["accepted"] == ["red", "crimson"]
    assert report["versions"].keys() == {"kvspeed", "python", "torch", "transformers"}

    full, concat, packets, speed, both = (rows[name] for name in METHODS)
    assert full["ttft_ratio"] == full["kv_ratio"] == full["flops_ratio"] == 1
    # packets hold the same tokens, plus 16 soft ones a document; SPEED stores them in 3 of 5 layers
    assert concat["prompt_tokens"] == full["prompt_tokens"] == speed["prompt_tokens"] == full["computed_tokens"]
    assert packets["prompt_tokens"] == both["prompt_tokens"] == full["prompt_tokens"] + 32
    assert concat["computed_tokens"] == packets["computed_tokens"] < full["computed_tokens"]
    assert concat["flops"] < 0.9 * full["flops"] and speed["flops"] < full["flops"]
    token = 2 * 2 * 16 * 4  # bytes of one token in one layer
    assert full["kv_bytes"] <= 5 * (full["prompt_tokens"] + 3) * token
    assert speed["kv_bytes"] < full["kv_bytes"] < packets["kv_bytes"]
    assert both["kv_bytes"] < packets["kv_bytes"]


def test_full_recompute_is_the_unpatched_model(tmp_path, short_documents):
    import torch
    from kvspeed.eval.compare import INSTRUCTION, SEPARATOR, document_text
    from kvspeed.packet import prompt_ids
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_model(tmp_path / "tiny")
    report = report_of("--model", folder, "--k", 5, "--questions", 3, "--max-new-tokens", 6)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), AutoTokenizer.from_pretrained(folder)
    rows = {row["method"]: row for row in report["rows"]}
    shallow = report_of("--model", folder, "--k", 1, "--questions", 3, "--max-new-tokens", 6)["rows"]
    assert shallow[3]["answers"] != shallow[0]["answers"]
    for index, question in enumerate(data.questions()):
        ids = prompt_ids(tokenizer, question.question, preamble=INSTRUCTION, separator=SEPARATOR)
        texts = [token for one in data.documents() for token in tokenizer(document_text(one.text))["input_ids"]]
        prompt = torch.tensor([[*ids.preamble, *texts, *ids.question]])
        new = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
        expected = " ".join(tokenizer.decode(new, skip_special_tokens=True).split())
        assert rows["full recompute"]["answers"][index] == shallow[0]["answers"][index] == expected
        assert rows["SPEED"]["answers"][index] == expected  # k = L computes the same
    assert rows["SPEED"]["flops"] == rows["full recompute"]["flops"]
    assert rows["packets"]["answers"] == rows["packets + SPEED"]["answers"]


def test_table(tmp_path, short_documents):
    result = run("demo", "--model", save_model(tmp_path / "tiny"), "--questions", 1, "--max-new-tokens", 2)
    assert result.exit_code == 0, result.stderr
    for word in {word for method in METHODS for word in method.split()}:  # long names are wrapped
        assert word in result.stdout
    for word in ("TTFT", "per token", "KV", "FLOPs", "right", "are untrained", "SPEED to k = 4"):
        assert word in result.stdout
    assert "packets (untrained adapter) + SPEED" in result.stdout
    assert result.stdout.index("are untrained") < result.stdout.index("TTFT")
    answers = [line for line in result.stdout.splitlines() if line.startswith(("  1 ✓", "  1 ✗"))]
    assert len(answers) == len(METHODS)


@pytest.mark.parametrize("columns", [60, 80, 110, 200])
def test_table_is_as_wide_as_columns_says(tmp_path, short_documents, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    model = save_model(tmp_path / "tiny")
    result = run("demo", "--model", model, "--questions", 1, "--max-new-tokens", 2)
    assert result.exit_code == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= columns
    if columns >= 80:  # numbers are whole
        assert sum(line.endswith((" 0 of 1", " 1 of 1")) for line in lines) == len(METHODS)


def test_a_trained_adapter_is_used_and_named_so(tmp_path, short_documents):
    from kvspeed.packet import PacketAdapter
    from transformers import AutoModelForCausalLM

    model = save_model(tmp_path / "tiny")
    file = tmp_path / "soft.safetensors"
    PacketAdapter.for_model(AutoModelForCausalLM.from_pretrained(model), 3, 2, seed=8).save(file)
    report = report_of("--model", model, "--adapter", file, "--questions", 1, "--max-new-tokens", 2)
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["packets"]["prompt_tokens"] == rows["full recompute"]["prompt_tokens"] + 2 * 5
    assert report["adapter_trained"] and "was trained for this model" in report["training"]
    result = run("demo", "--model", model, "--adapter", file, "--questions", 1, "--max-new-tokens", 2)
    assert "untrained adapter" not in result.stdout and "packet adapter was trained" in result.stdout


def test_refusals(tmp_path, short_documents):
    model = save_model(tmp_path / "tiny")
    for k in (0, 6, -2):
        message = refused(run("demo", "--model", model, "--questions", 1, "--k", k))
        assert f"--k: is {k} and the model has 5 layers; give 1 to 5" in message
    assert "--questions" in refused(run("demo", "--model", model, "--questions", 4))
    assert "give --model with it" in refused(run("demo", "--adapter", model / "config.json"))
    assert "is not a file" in refused(run("demo", "--model", model, "--adapter", model))
    for wrong in (["--questions", 0], ["--k", "x"], ["--max-new-tokens", 0]):
        assert run("demo", *wrong).exit_code == 2
    small = save_model(tmp_path / "small", max_position_embeddings=64)
    assert "64" in refused(run("demo", "--model", small, "--k", 3, "--questions", 1))


def test_on_the_real_model(smollm2_dir):
    report = report_of("--model", "smollm2", "--questions", 1)
    assert (report["model"], report["layers"], report["k"]) == ("SmolLM2-135M-Instruct", 30, 24)
    assert 1800 <= sum(entry["tokens"] for entry in report["documents"]) <= 2600
    full, concat, packets, speed, both = report["rows"]
    assert full["correct"] == [True]
    assert "National Archaeological Museum" in full["answers"][0]
    # what can be counted is tested; times are only looked at loosely (0.03 and 0.8 were measured)
    assert 0.79 <= speed["kv_ratio"] <= 0.82 and speed["flops_ratio"] <= 0.85
    assert concat["kv_ratio"] == pytest.approx(1, abs=0.02) and concat["flops_ratio"] <= 0.06
    assert packets["kv_ratio"] <= 1.08 and both["kv_ratio"] <= 0.88 and both["flops_ratio"] <= 0.06
    assert concat["ttft_ratio"] < 0.5 and packets["ttft_ratio"] < 0.5 and both["ttft_ratio"] < 0.5


def test_on_the_testbed(smollm2_dir):
    """The default: invented people, a tuned model, a trained adapter."""
    report = report_of("--questions", 2)
    assert (report["model"], report["layers"], report["adapter_trained"]) == ("kvspeed-testbed", 30, True)
    assert len(report["documents"]) == 6 and len({one["name"] for one in report["documents"]}) == 6
    assert report["k"] == 22 and "the same model tuned to depth 22" in report["training"]
    full, concat, packets, speed, both = report["rows"]
    assert full["correct"] == speed["correct"] == [True, True]
    assert speed["kv_ratio"] == pytest.approx(22 / 30, abs=0.02)
    assert both["kv_ratio"] == pytest.approx(22 / 30 * packets["kv_ratio"], rel=0.03)
    soft = 6 * 16
    assert packets["prompt_tokens"] == concat["prompt_tokens"] + soft == full["prompt_tokens"] + soft
    assert packets["flops_ratio"] < 0.25 and packets["ttft_ratio"] < 0.8
