# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed store` on a tiny model: what each command does, says, and refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_tools import refused, run, save_model
from kvspeed.packet import PacketAdapter
from kvspeed.packet.store import PacketStore
from store_tools import damage, files

TEXTS = {
    "a.txt": "Ships need light.\n",
    "b.txt": "Tea is a drink. Ümläute: ½ [bold]漢字[/bold]",
    "c.txt": "Iron melts.",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny-a")


@pytest.fixture
def texts(tmp_path) -> list[Path]:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [tmp_path / name for name in TEXTS]


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "store"


def done(*arguments) -> str:
    result = run("store", *arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result.stdout


def added(place, texts, model_dir, *more) -> list[str]:
    report = json.loads(done("add", place, *texts, "--model", model_dir, "--json", *more))
    return [packet["id"] for packet in report["packets"]]


def test_add_is_the_library_call(place, texts, model_dir):
    from kvspeed.samples import document_text
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = added(place, texts, model_dir)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    store = PacketStore(place, model=model.eval(), tokenizer=tokenizer)
    documents = [document_text(text.strip()) for text in TEXTS.values()]
    assert ids == [store.id_of(document) for document in documents] and len(store) == 3
    assert store.add(documents) == ids and store.counters.built == 0
    assert [packet.text for packet in store.load(ids)] == documents


def test_add_again_keeps(place, texts, model_dir):
    first = done("add", place, *texts[:2], "--model", model_dir).splitlines()
    assert [line.split()[0] for line in first] == ["written", "written"]
    times = [path.stat().st_ino for path in files(place)]
    second = done("add", place, *texts, "--model", model_dir).splitlines()
    assert [line.split()[0] for line in second] == ["kept", "kept", "written"]
    assert second[0].split()[1:] == first[0].split()[1:] and second[0].endswith(str(texts[0]))
    assert set(times) <= {path.stat().st_ino for path in files(place)}


def test_ways_of_making_are_kept_apart(place, texts, model_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    soft = tmp_path / "soft.safetensors"
    PacketAdapter.for_model(AutoModelForCausalLM.from_pretrained(model_dir), 2, 3).save(soft)
    ways = ([], ["--k", 2], ["--adapter", soft], ["--press", "tova-50"], ["--storage", "int8"], ["--dtype", "bfloat16"])
    found = [added(place, texts[:1], model_dir, *way)[0] for way in ways]
    assert len(set(found)) == len(ways)
    report = json.loads(done("ls", place, "--json"))
    assert report["packets"] == len(ways) == len(report["recipes"])
    assert report["bytes"] == sum(path.stat().st_size for path in files(place))
    made = {kept["list"][0]["id"]: kept["made"] for kept in report["recipes"]}
    assert made[found[1]]["k"] == 2 and made[found[2]]["trailer"] == 3 and made[found[3]]["press"]["name"] == "tova"
    assert made[found[4]]["storage"] == "int8" and made[found[5]]["dtype"] == "bfloat16"
    text = done("ls", place)
    assert all(id in text for id in found) and "k=2 of 5 layers" in text and "int8 for float32" in text
    assert "press tova-50" in text
    summary = done("ls", place, "--recipes")
    assert "6 packets" in summary and found[0] not in summary


def test_list_shows_any_text(place, texts, model_dir):
    added(place, texts, model_dir)
    text = done("ls", place)
    assert "[bold]漢字[/bold]" in text and "3 packets" in text
    damage(files(place)[0], at=0.001)
    (files(place)[1].parent / ".x-1-1.tmp").write_bytes(b"x" * 2000)
    result = run("store", "ls", place)
    assert "damaged: see kvspeed store verify" in result.stdout and result.exit_code == 0
    assert "1 unfinished file, 1.95 KiB" in result.stderr


def test_remove(place, texts, model_dir):
    ids = added(place, texts, model_dir)
    added(place, texts[:2], model_dir, "--k", 2)
    assert "removed 1 packet" in done("rm", place, ids[0][:12].upper())
    assert len(PacketStore(place)) == 4 and ids[0] not in PacketStore(place)
    other = next(kept["name"] for kept in json.loads(done("ls", place, "--json"))["recipes"] if kept["made"]["k"])
    meant = next(entry for entry in PacketStore(place).entries() if entry.folder == other).id
    assert f"0 packets of recipe {other[:6]}" in refused(run("store", "rm", place, ids[1], "--recipe", other[:6]))
    assert "removed 1 packet" in done("rm", place, meant, "--recipe", other[:6])
    assert len(PacketStore(place)) == 3
    added(place, texts[:2], model_dir, "--k", 2)
    assert "removed 2 packets" in done("rm", place, "--recipe", other[:6])
    assert set(PacketStore(place)) == set(ids[1:]) and len(os.listdir(place)) == 2
    for wrong, message in (
        (["0" * 32], "is the beginning of 0 packets"),
        ([ids[1], "feedfeed"], "is the beginning of 0 packets"),
        ([ids[1][:3]], "too short"),
        ([""], "too short"),
        ([], "name the packets"),
        (["--recipe", "zz"], "is the beginning of 0 recipes"),
        (["--recipe", ""], "--recipe"),
    ):
        assert message in refused(run("store", "rm", place, *wrong))
    assert len(PacketStore(place)) == 2, "nothing is removed when something is wrong"


def test_verify(place, texts, model_dir):
    ids = added(place, texts, model_dir)
    assert "3 packets" in done("verify", place) and "all whole" in done("verify", place)
    path = next(path for path in files(place) if ids[1] in path.name)
    damage(path)
    result = run("store", "verify", place)
    assert result.exit_code == 1 and ids[1] in result.stdout and "1 packet damaged" in result.stdout
    assert result.stdout.splitlines()[0].startswith(f"found  {ids[1]}  {path}")
    report = json.loads(run("store", "verify", place, "--json").stdout)
    assert not report["ok"] and report["problems"][0]["id"] == ids[1]
    assert "rebuilt" in done("verify", place, "--rebuild", "--model", model_dir)
    assert "all whole" in done("verify", place)
    damage(path, at=0.001)
    assert "removed" in done("verify", place, "--remove") and len(PacketStore(place)) == 2
    assert "add --rebuild" in refused(run("store", "verify", place, "--model", model_dir))


def test_tidy(place, texts, model_dir):
    ids = added(place, texts, model_dir)
    _ = PacketStore(place)[ids[0]]
    (files(place)[0].parent / ".x-1-1.tmp").write_bytes(b"x" * 100)
    assert "removed 0 unfinished files" in done("gc", place)
    size = next(path.stat().st_size for path in files(place) if ids[0] in path.name)
    tidied = json.loads(done("gc", place, "--grace", 0, "--limit", size, "--json"))
    assert tidied["unfinished"] == 1 and tidied["unfinished_bytes"] == 100 and tidied["evicted"] == 2
    assert set(PacketStore(place)) == {ids[0]}
    assert "limit: got 'big'" in refused(run("store", "gc", place, "--limit", "big"))


def test_a_limit_while_adding(place, texts, model_dir):
    added(place, texts[:2], model_dir)
    size = sum(path.stat().st_size for path in files(place))
    added(place, texts[2:], model_dir, "--disk-limit", size)
    assert len(PacketStore(place)) < 3 and sum(path.stat().st_size for path in files(place)) <= size
    result = run("store", "add", place, *texts, "--model", model_dir, "--disk-limit", "20kB")
    assert "disk_limit: is 19.5 KiB" in refused(result) and "of 3 packets are stored" in result.stderr


def test_refusals(place, texts, model_dir, tmp_path):
    for command in ("ls", "verify", "gc"):
        assert "there is no packet store; make one with kvspeed store add" in refused(run("store", command, place))
    assert "there is no packet store" in refused(run("store", "rm", place, "0" * 32))
    assert not place.exists()
    letters = tmp_path
    assert "holds other things and is no packet store" in refused(run("store", "add", letters, texts[0]))
    for wrong, message in (
        (["--storage", "int4"], "--storage: got 'int4'"),
        (["--press", "cut-30"], "press: 'cut-30' names no press"),
        (["--adapter", tmp_path / "none"], "--adapter: "),
        (["--disk-limit", "many"], "disk_limit: got 'many'"),
        (["--k", 9], "--k: is 9"),
    ):
        assert message in refused(run("store", "add", place, texts[0], "--model", model_dir, *wrong))
    long = tmp_path / "long.txt"
    long.write_text("x" * 17000)
    assert "positions: split the text" in refused(run("store", "add", place, texts[0], long, "--model", model_dir))
    assert not place.exists()
    assert "cannot be opened" in refused(run("store", "add", "nosuch://x", texts[0]))


def test_ask_a_store(place, texts, model_dir, tmp_path):
    ids = added(place, texts, model_dir)
    assert run("pack", *texts[1:], "--out", tmp_path / "packed", "--model", model_dir).exit_code == 0

    def answer(*arguments) -> dict:
        result = run("ask", "What is tea?", "--packets", *arguments, "--model", model_dir, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    everything = answer(place)
    assert everything["packets"] == sorted(ids)
    two = answer(place, "--id", ids[1][:9], "--id", ids[2])
    assert two["packets"] == ids[1:] and two["prefix_tokens"] < everything["prefix_tokens"]
    assert two["answer"] == answer(tmp_path / "packed")["answer"]
    small = added(place, texts[1:], model_dir, "--storage", "int8")
    copies = [answer(place, "--id", small[0], "--id", small[1], "--mode", mode) for mode in ("copy", "view")]
    assert copies[0]["prefix_tokens"] == two["prefix_tokens"] == copies[1]["prefix_tokens"]
    recipes = {kept["made"]["storage"]: kept["name"] for kept in json.loads(done("ls", place, "--json"))["recipes"]}
    assert answer(place, "--recipe", recipes["int8"])["packets"] == small
    for wrong, message in (
        (["--packets", place], "were made in 2 ways"),
        (["--packets", place, "--recipe", "0123"], "is the beginning of 0 recipes"),
        (["--packets", place, "--id", "00000000"], "is the beginning of 0 packets"),
        (["--packets", tmp_path / "packed", "--id", ids[0]], "--id, --recipe: name packets of a store"),
        (["--packets", "memory://nothing-here"], "holds no packets"),
    ):
        assert message in refused(run("ask", "What?", *wrong, "--model", model_dir))
