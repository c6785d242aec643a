# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The runner on tiny models: the same answers however it gets them, and no answer lost or asked twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_tools import save_model
from kvspeed import PacketAdapter, Sample, patch_model, write_samples
from kvspeed.eval.answer import Answer, SharedFull, end_to_end, greedy
from kvspeed.eval.fields import ANSWER
from kvspeed.eval.journal import Journal
from kvspeed.eval.methods import Context, decode, get_method
from kvspeed.eval.report import markdown, read_report, report
from kvspeed.eval.runner import Plan, Runner, sample_digest
from kvspeed.eval.tasks import split_specs

ALL = ("full", "none", "nocache", "packet", "sink", "cacheblend-50", "epic-4", "a3-50", "samkv", "packet+cur-30")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_model(tmp_path_factory.mktemp("model"), layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return patch_model(model), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def samples(tmp_path) -> Path:
    """Questions of a few words (a byte is a token here), two on the same documents."""
    rng = random.Random()
    words = ["ash", "bo", "fox", "ink", "oak", "sea"]

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(least, most)))

    made = []
    for number in range(4):
        documents = tuple(text(3, 8) for _ in range(rng.randint(1, 3)))
        for turn in range(2):
            made.append(Sample(f"s{number}-{turn}", documents, text(2, 4), (text(1, 2),)))
    path = tmp_path / "questions.jsonl"
    write_samples(path, made)
    return path


def plan_of(path, *, methods=("full", "none", "packet"), **options) -> Plan:
    return Plan(tuple(split_specs(f"samples:path={path}")), methods, **{"max_new_tokens": 6, "timed": 1, **options})


def runner_of(tiny, plan, **options) -> Runner:
    model, tokenizer = tiny
    options.setdefault("adapters", {"": PacketAdapter.for_model(model, header=2, trailer=1)})
    return Runner(model, tokenizer, plan, model_name="tiny", **options)


def answers(runner) -> dict[tuple[str, str], list[int]]:
    return {
        (name, row["sample"]): row["token_ids"]
        for task in runner.plan.tasks
        for name, rows in runner.records(task).items()
        for row in rows
    }


# ---- one answer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_drafts_change_nothing(tiny, name, monkeypatch):
    model, tokenizer = tiny
    context = Context(model, tokenizer, adapter=PacketAdapter.for_model(model, header=2, trailer=1), max_new_tokens=12)
    method, documents = get_method(name), ("ash and fox stood by", "the sea was ink", "oak")
    for question in ("which fox?", "why the sea " * random.randint(1, 3)):
        ids = context.question_ids(question)
        prepared = method.prepare(context, documents)
        plain = decode(context, *method.first_token(prepared, ids), max_new_tokens=12)
        if random.random() < 0.7:
            monkeypatch.setattr(model.generation_config, "eos_token_id", random.choice(plain))
            plain = plain[: plain.index(model.generation_config.eos_token_id) + 1]
        cut = random.randint(1, len(plain))
        eos = min(context.eos, default=2)
        drafts = {
            "none": [],
            "right": [plain],
            "right and longer": [[*plain, 5, 6, 7, 8]],
            "right, then another": [[*plain[:cut], 299 - plain[cut - 1], 7], plain],
            "ends early": [[*plain[:cut], eos]],
            "wrong": [[(plain[0] + 1) % 300, 4]],
            "odd": [[], [plain[0]], plain[:cut]],
        }
        for what, given in drafts.items():
            logits, cache = method.first_token(method.prepare(context, documents), ids)
            assert greedy(context, logits, cache, given, max_new_tokens=12) == plain, (name, what)
        monkeypatch.undo()


def test_a_right_draft_takes_one_forward(tiny, monkeypatch):
    model, tokenizer = tiny
    context = Context(model, tokenizer, max_new_tokens=12)
    method, ids = get_method("none"), context.question_ids("which?")
    plain = decode(context, *method.first_token(method.prepare(context, ("ash",)), ids), max_new_tokens=12)
    logits, cache = method.first_token(method.prepare(context, ("ash",)), ids)
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    assert greedy(context, logits, cache, [plain], max_new_tokens=12) == plain
    assert len(calls) == (1 if len(plain) > 1 else 0)


def test_shared_full_gives_the_logits_of_full(tiny):
    model, tokenizer = tiny
    context = Context(model, tokenizer)
    for question in ("which fox?", "why?"):
        ids, documents = context.question_ids(question), ("ash and fox", "the sea is ink")
        one, other = (
            method.first_token(method.prepare(context, documents), ids)[0]
            for method in (get_method("full"), SharedFull())
        )
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["full", "none", "packet", "sink", "packet+cur-30"])
def test_end_to_end_reads_files_and_takes_time(tiny, name):
    model, tokenizer = tiny
    context = Context(model, tokenizer, adapter=PacketAdapter.for_model(model, header=2, trailer=1))
    assert 0 < end_to_end(get_method(name), context, ("ash " * 20, "fox"), "which?") < 60


def test_an_answer_says_what_it_took(tiny):
    model, tokenizer = tiny
    context = Context(model, tokenizer, adapter=PacketAdapter.for_model(model, header=2, trailer=1))
    given = {name: Answer.of(get_method(name), context, ("ash " * 30,), "who?", max_new_tokens=3) for name in ALL}
    full, packet = given["full"], given["packet"]
    assert packet.prompt_tokens == full.prompt_tokens + 3 and packet.question_tokens == full.question_tokens
    assert packet.flops < full.flops / 2 and packet.kv_bytes > full.kv_bytes and full.stored_bytes == 0
    assert all(0 < answer.ttft_s <= answer.seconds for answer in given.values())


# ---- a run ---------------------------------------------------------------------------------------------------------


def test_methods_do_not_disturb_each_other(tiny, samples):
    together = runner_of(tiny, plan_of(samples, methods=ALL))
    together.run()
    found = answers(together)
    assert len(found) == 8 * len(ALL)
    order = list(ALL)
    random.shuffle(order)
    for name in order[:4]:
        alone = runner_of(tiny, plan_of(samples, methods=(name,), timed=8))
        alone.run()
        assert answers(alone) == {key: tokens for key, tokens in found.items() if key[0] == name}


def test_a_second_run_goes_on(tiny, samples, tmp_path):
    path = tmp_path / "r.records"
    plan = plan_of(samples, timed=0)

    class Stop(Exception):
        pass

    done = []

    def stop(what):
        done.append(what)
        if len(done) == stop_at:
            raise Stop

    stop_at = random.randint(1, 23)
    first = runner_of(tiny, plan, path=path)
    assert first.steps() == 24
    with pytest.raises(Stop):
        first.run(stop)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + stop_at
    path.write_text("\n".join(lines)[: -random.randint(1, 40)])  # killed in the middle of a line
    asked = Counter()
    second = runner_of(tiny, plan, path=path)
    original = second._record
    second._record = lambda task, number, sample, name, drafts: (
        asked.update([(sample.id, name)]) or original(task, number, sample, name, drafts)
    )
    second.run()
    assert len(asked) == 24 - stop_at + 1 and set(asked.values()) == {1}
    whole = runner_of(tiny, plan)
    whole.run()
    assert answers(runner_of(tiny, plan, path=path)) == answers(whole)
    more = runner_of(tiny, plan_of(samples, methods=("full", "none", "packet", "nocache"), timed=0), path=path)
    calls = []
    more.run(calls.append)
    assert len(calls) == 32 and sum("nocache" in call for call in calls) == 8


def test_timing_can_be_added_later(tiny, samples, tmp_path):
    path = tmp_path / "r.records"
    runner_of(tiny, plan_of(samples, timed=0), path=path).run()
    later = runner_of(tiny, plan_of(samples, timed=3, end_to_end=1), path=path)
    later.run()
    rows = later.records(later.plan.tasks[0])["packet"]
    assert [row["ttft_s"] is not None for row in rows] == [True] * 3 + [False] * 5
    assert [row["end_to_end_s"] is not None for row in rows] == [True] + [False] * 7
    assert len(rows) == 8


def test_samples_that_were_renamed_or_say_the_same(tiny, tmp_path):
    """Records are found by what was asked: a report goes by the present names, whichever run made a record."""
    path, file = tmp_path / "r.records", tmp_path / "questions.jsonl"
    one, two = (Sample(f"s{n}", (f"ash {n} bo",), f"oak {n}", (f"sea {n}",)) for n in range(2))
    write_samples(file, [one, two])
    runner_of(tiny, plan_of(file, methods=("full",), timed=0), path=path).run()
    again = replace(one, id="s5")  # the same question on another line
    write_samples(file, [replace(two, id="s0"), replace(one, id="s1"), again])
    renamed = runner_of(tiny, plan_of(file, methods=("full", "none"), timed=0), path=path)
    renamed.run()
    fresh = runner_of(tiny, plan_of(file, methods=("full", "none"), timed=0))
    fresh.run()
    kept = ("method", "questions", "f1", "f1_each", "f1_of_full", "score", "score_interval", "corpus_f1")
    found, wanted = ([{name: row[name] for name in kept} for row in report(one)["rows"]] for one in (renamed, fresh))
    assert found == wanted and [row["questions"] for row in found] == [3, 3]
    for rows in renamed.records(renamed.plan.tasks[0]).values():
        assert [row["sample"] for row in rows] == ["s0", "s1", "s5"]


def test_shards_make_a_whole(tiny, samples, tmp_path):
    path = tmp_path / "r.records"
    parts = []
    for index in range(3):
        runner = runner_of(tiny, plan_of(samples, shard=(index, 3)), path=path)
        parts.append(runner.steps())
        runner.run()
    assert sum(parts) == 24 and all(steps % 6 == 0 for steps in parts)  # 2 questions on the same documents, 3 methods
    whole = runner_of(tiny, plan_of(samples), path=path)
    calls = []
    whole.run(calls.append)
    assert len(whole.journal) == 24
    fresh = runner_of(tiny, plan_of(samples))
    fresh.run()
    assert answers(whole) == answers(fresh)


def test_another_adapter_is_another_answer(tiny, samples, tmp_path):
    model, _ = tiny
    path = tmp_path / "r.records"
    adapters = {name: PacketAdapter.for_model(model, 2, 2, seed=seed) for name, seed in (("", 0), ("bio", 1))}
    methods = ("full", "packet", "packet@bio")
    runner = runner_of(tiny, plan_of(samples, methods=methods), adapters=adapters, path=path)
    runner.run()
    rows = runner.records(runner.plan.tasks[0])
    assert rows["packet"][0]["adapter"] != rows["packet@bio"][0]["adapter"] and rows["full"][0]["adapter"] is None
    adapters["bio"] = PacketAdapter.for_model(model, 2, 2, seed=7)
    again = runner_of(tiny, plan_of(samples, methods=methods), adapters=adapters, path=path)
    assert {name: len(found) for name, found in again.records(again.plan.tasks[0]).items()} == {
        "full": 8,
        "packet": 8,
        "packet@bio": 0,
    }
    with pytest.raises(ValueError, match="packet@niah needs an adapter named 'niah'; those given are bio"):
        runner_of(tiny, plan_of(samples, methods=("packet@niah",)), adapters=adapters)


def test_records_of_another_model_are_refused(tiny, samples, tmp_path):
    path = tmp_path / "r.records"
    runner_of(tiny, plan_of(samples, methods=("nocache",)), path=path).run()
    model, tokenizer = tiny
    before = path.read_bytes()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    try:
        with pytest.raises(ValueError, match="belongs to another run: its model is"):
            Runner(model, tokenizer, plan_of(samples, methods=("nocache",)), path=path, model_name="tiny")
    finally:
        with torch.no_grad():
            model.lm_head.weight[0, 0] -= 1
    assert path.read_bytes() == before


def test_a_prompt_that_does_not_fit_is_named(tiny, tmp_path):
    path = tmp_path / "long.jsonl"
    write_samples(path, [Sample("fits", ("a",), "b", ("c",)), Sample("too-long", ("word " * 4000,), "b", ("c",))])
    runner = runner_of(tiny, plan_of(path, methods=("none",)))
    with pytest.raises(ValueError, match="sample too-long, method none"):
        runner.run()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ()}, "methods: got none"),
        ({"methods": ("full", "full")}, "given twice"),
        ({"shard": (2, 2)}, "shard: got 2 of 2"),
        ({"samples": 0}, "samples: got 0"),
        ({"timed": -1}, "timed: got -1"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
    ],
)
def test_wrong_plans(samples, changes, words):
    with pytest.raises(ValueError, match=words):
        plan_of(samples, **changes)


def test_an_unknown_method_is_refused_before_anything(tiny, samples, tmp_path):
    with pytest.raises(ValueError, match=r"'fulll' is not known \(did you mean full\?\); known are full"):
        runner_of(tiny, plan_of(samples, methods=("fulll",)), path=tmp_path / "r.records")
    assert not (tmp_path / "r.records").exists()


# ---- journal -------------------------------------------------------------------------------------------------------


def record(number: int, **more) -> dict:
    return {
        "task": "t",
        "digest": str(number),
        "method": "m",
        "adapter": None,
        "max_new_tokens": 3,
        "f1": 0.5,
        "em": 0.0,
        **more,
    }


SCORES = {name: ANSWER[name] for name in ("f1", "em")}


def append(path, first, count):
    journal = Journal(path, {"model": "x"}, SCORES)
    for number in range(first, first + count):
        journal.add(record(number, text="ü" * (number % 50)))


def test_processes_append_to_one_journal(tmp_path):
    path = tmp_path / "j"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=append, args=(path, 100 * index, 40)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(Journal(path, {"model": "x"}, SCORES)) == 120
    assert len(path.read_text().splitlines()) == 121


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_cut_off_line_costs_one_record(tmp_path, cut):
    path = tmp_path / "j"
    append(path, 0, 3)
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    journal = Journal(path, {"model": "x"}, SCORES)
    assert len(journal) == (3 if cut == 1 else 2)
    journal.add(record(7))
    again = Journal(path, {"model": "x"}, SCORES)
    assert again.get(**record(7)) == record(7) and len(again) == len(journal)


def test_a_cut_off_header_is_written_again(tmp_path):
    path = tmp_path / "j"
    append(path, 0, 1)
    path.write_bytes(path.read_bytes()[:9])
    journal = Journal(path, {"model": "y"})
    journal.add(record(1))
    assert len(Journal(path, {"model": "y"})) == 1
    with pytest.raises(ValueError, match="its model is 'y', and now it is 'x'"):
        Journal(path, {"model": "x"}, SCORES)


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    path = tmp_path / "j"
    path.write_text("notes\nof mine\n")
    with pytest.raises(ValueError, match="line 1: is no"):
        Journal(path, {"model": "x"}, SCORES)
    append(tmp_path / "k", 0, 2)
    with (tmp_path / "k").open("a") as file:
        file.write("what is this\n")
    append_more = tmp_path / "k"
    with append_more.open("a") as file:
        file.write(json.dumps(record(9)) + "\n")
    with pytest.raises(ValueError, match="line 4: is no record"):
        Journal(append_more, {"model": "x"}, SCORES)


@pytest.mark.parametrize(
    "line", ['{"foo": 1}', json.dumps(record(9, f1=9.0)), json.dumps(record(9, task=[1])), "[" * 100_000 + "]"]
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    append(tmp_path / "k", 0, 2)
    with (tmp_path / "k").open("a") as file:
        file.write(line + "\n" + json.dumps(record(8)) + "\n")
    with pytest.raises(ValueError, match="k, line 4: is no record"):
        Journal(tmp_path / "k", {"model": "x"}, SCORES)


@pytest.mark.parametrize(
    "change",
    [
        {"group": None},
        {"token_ids": "1 2"},
        {"token_ids": ["x"]},
        {"prediction": 3},
        {"ttft_s": "x"},
        {"end_to_end_s": True},
        {"flops": float("nan")},
        {"contains": 2},
    ],
)
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_record_that_no_report_can_be_made_of_is_named(tiny, samples, tmp_path, change, is_missing):
    path, plan = tmp_path / "r.records", plan_of(samples, samples=1, methods=("none",), timed=0)
    runner_of(tiny, plan, path=path).run()
    header, line = path.read_text().splitlines()
    found = {**json.loads(line), **change}
    if is_missing:
        found.pop(*change)
    path.write_text(f"{header}\n{json.dumps(found)}\n")
    with pytest.raises(ValueError, match=r"r\.records, line 2: is no record"):
        runner_of(tiny, plan, path=path)


@pytest.mark.parametrize(
    "damage", [lambda text: text[1:], lambda text: "\n" + text, lambda text: text.replace("}", "", 1)]
)
def test_a_damaged_header_is_not_passed_over(tmp_path, damage):
    append(tmp_path / "k", 0, 3)
    (tmp_path / "k").write_text(damage((tmp_path / "k").read_text()))
    with pytest.raises(ValueError, match="k, line 1: is no header"):
        Journal(tmp_path / "k", {"model": "another"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_journal_that_cannot_be_written(tmp_path):
    path = tmp_path / "j"
    append(path, 0, 1)
    path.chmod(0o400)
    with pytest.raises(PermissionError):
        append(path, 1, 1)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "j"
    append(path, 0, 2)
    write = os.write

    def half(file, data):
        if len(data) > 20:
            write(file, data[:20])
            raise OSError(28, "No space left on device")
        return write(file, data)

    journal = Journal(path, {"model": "x"}, SCORES)
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        journal.add(record(5))
    monkeypatch.undo()
    again = Journal(path, {"model": "x"}, SCORES)
    assert len(again) == 2 and again.get(**record(5)) is None
    again.add(record(5))
    assert len(Journal(path, {"model": "x"}, SCORES)) == 3


# ---- report --------------------------------------------------------------------------------------------------------


def test_a_report_says_what_the_records_say(tiny, samples, tmp_path, monkeypatch):
    runner = runner_of(tiny, plan_of(samples, timed=2))
    runner.run()
    records = runner.records(runner.plan.tasks[0])
    for position, row in enumerate(records["full"]):
        row["f1"] = [1.0, 0.5, 1.0, 0.0, 1.0, 1.0, 0.5, 0.0][position]
    for position, row in enumerate(records["none"]):
        row["f1"] = [0.5, 0.5, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0][position]
    monkeypatch.setattr(runner, "records", lambda task: records)
    found = report(runner, command=["kvspeed", "eval"])
    json.dumps(found, allow_nan=False)
    full, none, packet = found["rows"]
    assert full["f1"] == 0.625 and full["f1_of_full"] == 1.0 and full["f1_of_full_interval"] == (1.0, 1.0)
    assert none["f1"] == 0.3125 and none["f1_of_full"] == 0.5 and none["questions"] == 8 and none["contexts"] == 4
    assert none["f1_interval"][0] <= 0.3125 <= none["f1_interval"][1]
    assert full["ttft_questions"] == 2 and full["ttft_speedup"] == 1.0 and packet["end_to_end_s"] is None
    assert none["f1_each"] == [0.5, 0.5, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(found))
    table = markdown(read_report(path))
    assert "| full | 0.625 [" in table and "| none | 0.312 [" in table and "(questions: 8; " in table


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "is no report"),
        ('{"kind": "kvspeed.eval.packets"}', "is no report"),
        ('{"kind": "kvspeed.eval.packets", "version": 99, "rows": []}', "version 99"),
        ('{"kind": "kvspeed.eval.packets", "version": 1, "rows": [{}]}', "r.json: entry 1 of its rows lacks task"),
        ('{"kind": "kvspeed.eval.packets", "version": 1, "rows": [1]}', "entry 1 of its rows lacks fields"),
        ('{"kind": "kvspeed.eval.speed", "version": 1, "rows": []}', "entry 1 of its averages lacks fields"),
        ('{"kind": "kvspeed.eval.speed", "version": 1, "rows": [], "averages": [{"method": "a"}]}', "lacks category"),
    ],
)
def test_a_file_that_is_no_report(tmp_path, text, words):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_report(path)


def test_digests_are_of_the_content():
    sample = Sample("a", ("d",), "q", ("x",))
    assert sample_digest(sample) == sample_digest(Sample("b", ("d",), "q", ("x",)))
    assert sample_digest(sample) != sample_digest(Sample("a", ("d",), "q", ("y",)))
