# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed eval` on a tiny model: files, going on after an interruption, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_tools import refused, run, save_model
from kvspeed import PacketAdapter


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@pytest.fixture(scope="module")
def adapter(model_dir) -> Path:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    PacketAdapter.for_model(model, header=2, trailer=2).save(model_dir / "adapter.safetensors")
    return model_dir / "adapter.safetensors"


TASKS = "biography:documents=2:facts=1,multihop:pairs=1"
SMALL = ["--tasks", TASKS, "--samples", 2, "--max-new-tokens", 4, "--timed", 1]


def evaluated(*arguments):
    result = run("eval", "packets", *SMALL, *arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def test_one_command_writes_json_markdown_and_plots(tmp_path, model_dir, adapter):
    pytest.importorskip("matplotlib")
    files = ["--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md", "--plots", tmp_path / "plots"]
    more = [
        "--adapter",
        adapter,
        "--adapter",
        f"bio={adapter}",
        "--methods",
        "full,packet,packet@bio",
        "--end-to-end",
        1,
    ]
    result = evaluated("--model", model_dir, *files, *more)
    assert "packet@bio" in result.stdout and "multihop:pairs=1" in result.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    assert [row["method"] for row in found["rows"]] == ["full", "packet", "packet@bio"] * 2
    full, packet, bio = found["rows"][:3]
    assert packet["f1_each"] == bio["f1_each"] and packet["flops"] < full["flops"]
    assert packet["ttft_questions"] == 1 and packet["end_to_end_questions"] == 1 and packet["end_to_end_s"] > 0
    assert set(found["adapters"]) == {"", "bio"} and found["command"][0] == "kvspeed"
    assert "| packet@bio |" in (tmp_path / "r.md").read_text()
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"f1-flops.png", "f1-ttft.png"}
    again = run("eval", "plot", tmp_path / "r.json", tmp_path / "again")
    assert again.exit_code == 0 and (tmp_path / "again" / "f1-flops.png").exists()


def test_the_same_command_goes_on_and_restart_does_not(tmp_path, model_dir):
    path = tmp_path / "r.json"
    given = ["--model", model_dir, "--json", path, "--methods"]
    evaluated(*given, "full,none")
    records = path.with_name("r.json.records")
    before = records.read_text()
    evaluated(*given, "full,none")
    assert records.read_text() == before
    first = json.loads(path.read_text())
    evaluated(*given, "full,none,nocache")
    assert records.read_text().startswith(before)
    more = json.loads(path.read_text())
    assert [row for row in more["rows"] if row["method"] != "nocache"] == first["rows"]
    evaluated(*given, "full", "--restart")
    assert len(records.read_text().splitlines()) == 1 + 4


def test_shards_then_a_report(tmp_path, model_dir):
    path = tmp_path / "r.json"
    given = ["--model", model_dir, "--json", path, "--methods", "nocache"]
    for index in range(2):
        result = evaluated(*given, "--shard", f"{index}/2")
        assert not path.exists() and "without --shard" in result.stderr
    evaluated(*given)
    assert [row["questions"] for row in json.loads(path.read_text())["rows"]] == [2, 2]
    assert len(path.with_name("r.json.records").read_text().splitlines()) == 1 + 4


def test_a_report_of_what_is_there(tmp_path, model_dir):
    path = tmp_path / "r.json"
    assert "there are no records" in refused(run("eval", "packets", "--report-only", "--json", path))
    given = ["--model", model_dir, "--json", path, "--methods"]
    evaluated(*given, "nocache")
    records = path.with_name("r.json.records").read_text()
    more = ["--samples", 3, *given, "full,nocache", "--report-only"]
    result = run("eval", "packets", "--tasks", TASKS, "--max-new-tokens", 4, *more)
    assert result.exit_code == 0, result.stderr
    assert [(row["method"], row["questions"]) for row in json.loads(path.read_text())["rows"]] == [("nocache", 2)] * 2
    assert path.with_name("r.json.records").read_text() == records
    report = path.read_text()
    words = refused(run("eval", "packets", "--tasks", "niah", *given, "full", "--report-only"))
    assert "none of the 4 answers in" in words and "is to these tasks" in words and path.read_text() == report


def test_samples_are_those_that_are_asked(tmp_path):
    from kvspeed import read_samples
    from kvspeed.eval.tasks import biography, multihop

    file = tmp_path / "s.jsonl"
    asked = ["--tasks", "biography:documents=2,multihop", "--samples", 4, "--seed", 3, "--questions-per-context", 2]
    assert run("eval", "samples", file, *asked).exit_code == 0
    options = {"seed": 3, "split": "train", "questions_per_context": 2}
    assert read_samples(file) == biography(4, documents=2, **options) + multihop(4, **options)
    assert "there is no task" in refused(run("eval", "samples", tmp_path / "t.jsonl", "--tasks", "x"))
    assert not (tmp_path / "t.jsonl").exists()


def test_the_list_needs_no_model():
    result = run("eval", "packets", "--list")
    assert result.exit_code == 0 and "multihop" in result.stdout and "cacheblend-<n>" in result.stdout


def test_where_the_question_looks(tmp_path, model_dir, adapter):
    pytest.importorskip("matplotlib")
    file = tmp_path / "sinks.png"
    task = ["--task", "biography:documents=2:facts=1", "--samples", 2]
    result = run("eval", "sinks", file, "--model", model_dir, "--adapter", adapter, *task)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert result.stdout.count("on soft tokens") == 3 and file.read_bytes()[:4] == b"\x89PNG"
    numbers = json.loads((tmp_path / "sinks.png.json").read_text())
    assert numbers["packets with adapter"]["soft_tokens"] > 0 and numbers["full attention"]["soft_tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "needles"], "tasks: there is no task 'needles'"),
        (["--tasks", "biography:size=2"], "biography has no option 'size'"),
        (["--methods", "full", "--tasks", "biography:documents=0"], "documents: got 0"),
        (["--methods", "ful"], "method: 'ful' is not known"),
        (["--methods", "full,full"], "full is given twice"),
        (["--methods", "packet"], "--methods: packet needs a trained adapter"),
        (["--methods", "packet@bio"], "packet@bio needs a trained adapter: give --adapter bio=FILE"),
        (["--methods", "packet", "--adapter", "missing.safetensors"], "missing.safetensors"),
        (["--methods", "packet", "--adapter", "a", "--adapter", "b"], "a and b have no name; write NAME=FILE"),
        (["--methods", "packet@x", "--adapter", "x=a", "--adapter", "x=b"], "--adapter: a and b have one name, x;"),
        (["--methods", "full", "--shard", "2/2"], "shard: got 2 of 2"),
        (["--methods", "full", "--shard", "half"], "--shard: got 'half'"),
        (["--methods", "full", "--shard", "²/3"], "--shard: got '²/3'"),
        (["--methods", "full", "--device", "tpu9"], "--device: got 'tpu9'"),
        (["--methods", "full", "--device", "cuda:77"], "--device: "),
        (["--methods", "full", "--split", "valid"], "split: got 'valid'"),
        (["--methods", "full", "--tasks", "musique:path=/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_refusals(model_dir, arguments, words):
    assert words in refused(run("eval", "packets", "--model", model_dir, "--samples", 1, *arguments))


def test_an_adapter_of_another_model(tmp_path, model_dir):
    PacketAdapter(128).save(tmp_path / "wide.safetensors")
    result = run(
        "eval", "packets", "--model", model_dir, "--methods", "packet", "--adapter", tmp_path / "wide.safetensors"
    )
    assert "hidden size 128" in refused(result)


def test_records_of_another_run(tmp_path, model_dir):
    path = tmp_path / "r.json"
    evaluated("--model", model_dir, "--json", path, "--methods", "nocache")
    other = save_model(tmp_path / "other", "qwen3", layers=2)
    words = refused(run("eval", "packets", *SMALL, "--model", other, "--json", path, "--methods", "nocache"))
    assert "belongs to another run" in words and "--restart" in words


def test_dropping_records_and_reporting_them_is_refused(tmp_path):
    records = tmp_path / "r.json.records"
    records.write_text("kept")
    words = refused(run("eval", "packets", "--json", tmp_path / "r.json", "--restart", "--report-only"))
    assert "--restart: drops the records that --report-only reports" in words and records.read_text() == "kept"
    words = refused(run("eval", "packets", "--json", tmp_path / "r.json", "--restart", "--shard", "1/2"))
    assert "--restart: drops what the other shards answer" in words and records.read_text() == "kept"


def test_a_report_that_is_none(tmp_path):
    (tmp_path / "r.json").write_text("{}")
    assert "is no report" in refused(run("eval", "plot", tmp_path / "r.json", tmp_path / "p"))
    assert not (tmp_path / "p").exists()


@pytest.fixture
def places(tmp_path) -> Path:
    """A folder in which stand what no report can be written to."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "b.json.records").mkdir()
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("option", "place", "words"),
    [
        ("--json", "folder", "folder is a folder; give a file"),
        ("--json", "", "is a folder; give a file"),
        ("--json", "b.json", "b.json.records is a folder"),
        ("--json", "pipe", "pipe is a pipe, a device or the like"),
        ("--json", "file/new/x", "file is a file; give another file"),
        ("--markdown", "folder", "folder is a folder; give a file"),
        ("--markdown", "file/x", "file is a file; give another file"),
        ("--plots", "file", "file is a file; give a folder"),
        ("--plots", "file/new/x", "file is a file; give a folder"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_a_model_is_looked_for(
    places, monkeypatch, option, place, words
):
    monkeypatch.chdir(places)
    before = sorted(places.iterdir())
    for command in ("packets", "speed"):
        told = refused(run("eval", command, "--model", places / "none", "--methods", "full", option, place))
        assert told.startswith(f"kvspeed: {option}: ") and words in told, told
    assert sorted(places.iterdir()) == before and (places / "pipe").is_fifo()


def test_a_place_for_a_file_is_checked_before_the_work(places):
    pytest.importorskip("matplotlib")
    training = ["train-swiftkv", "F", "--samples", "x", "--k", 1]
    for command in (["sinks", "F"], ["samples", "F", "--tasks", "x"], training):
        for place, words in (("folder", "is a folder"), ("pipe", "is a pipe"), ("file/x", "is a file")):
            arguments = [places / place if part == "F" else part for part in command]
            assert f"FILE: {places / place.partition('/')[0]} {words}" in refused(run("eval", *arguments))
