# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed pack` and `kvspeed ask` on a tiny model: results, refusals, and what is left on disk after them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import kvspeed
import pytest
import torch
from cli_tools import refused, run, save_model
from kvspeed import Packet
from kvspeed.cli.texts import ENDING

FIRST, SECOND = "Ships need light.\nLamps give it.\n", "Tea is a drink. Ümläute: ½ 漢字"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny-a")


@pytest.fixture
def texts(tmp_path) -> list[Path]:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, text in zip(paths, (FIRST, SECOND), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def packets_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"))


def packed(texts, out, model_dir, *more) -> list[Path]:
    result = run("pack", *texts, "--out", out, "--model", model_dir, *more)
    assert result.exit_code == 0, result.stderr
    return packets_in(out)


def asked(*arguments) -> dict:
    result = run("ask", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("mode", ["view", "copy"])
def test_pack_then_ask_is_the_library_call(tmp_path, texts, model_dir, k, mode):
    import kvspeed
    from kvspeed.eval.compare import INSTRUCTION, SEPARATOR
    from transformers import AutoModelForCausalLM, AutoTokenizer

    depth = ["--k", k] if k else []
    files = packed(texts, tmp_path / "out", model_dir, *depth)
    assert [file.name[:2] for file in files] == ["a-", "b-"]
    assert [Packet.load(file).k for file in files] == [k, k]
    report = asked("What is tea?", "--packets", tmp_path / "out", "--model", model_dir, "--mode", mode)
    assert report["k"] == k and report["mode"] == mode and report["packets"] == [file.name for file in files]

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    kvspeed.patch_model(model, k)
    answer = kvspeed.generate(
        model,
        AutoTokenizer.from_pretrained(model_dir),
        "What is tea?",
        [Packet.load(file) for file in files],
        preamble=INSTRUCTION,
        separator=SEPARATOR,
    )
    assert report["answer"] == answer.strip()


def test_plain_output_is_the_answer_alone_on_stdout(tmp_path, texts, model_dir):
    packed(texts, tmp_path / "out", model_dir)
    arguments = ("ask", "Why?", "--packets", tmp_path / "out", "--model", model_dir, "--max-new-tokens", 5)
    result = run(*arguments)
    report = json.loads(run(*arguments, "--json").stdout)
    assert result.exit_code == 0 and result.stdout.strip() == report["answer"]
    assert "first token after" in result.stderr


def test_a_second_run_keeps_what_is_there(tmp_path, texts, model_dir):
    out = tmp_path / "out"
    before = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in packed(texts, out, model_dir)}
    result = run("pack", *texts, "--out", out, "--model", model_dir)
    assert result.exit_code == 0 and result.stdout.count("kept") == 2
    assert {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in packets_in(out)} == before


def test_a_run_after_an_interruption_makes_what_is_missing_or_damaged(tmp_path, texts, model_dir):
    out = tmp_path / "out"
    first, second = packed(texts, out, model_dir)
    whole = second.read_bytes()
    second.write_bytes(whole[:-7])
    inode = first.stat().st_ino
    result = run("pack", *texts, "--out", out, "--model", model_dir)
    assert result.exit_code == 0 and result.stdout.count("kept") == 1 and result.stdout.count("replaced") == 1
    assert second.read_bytes() == whole and first.stat().st_ino == inode
    assert len(list(out.iterdir())) == 2


def test_a_packet_under_anothers_name_is_replaced(tmp_path, texts, model_dir):
    first, second = packed(texts, tmp_path / "out", model_dir)
    second.replace(first)
    assert packed(texts, tmp_path / "out", model_dir) == [first, second]
    assert [Packet.load(file).text.strip() for file in (first, second)] == [FIRST.strip(), SECOND]


def test_another_depth_replaces_the_packets(tmp_path, texts, model_dir):
    out = tmp_path / "out"
    names = packed(texts, out, model_dir)
    result = run("pack", *texts, "--out", out, "--model", model_dir, "--k", 2)
    assert result.exit_code == 0 and result.stdout.count("replaced") == 2 and sorted(out.iterdir()) == sorted(names)
    assert "was not tuned for SPEED: with prompts of 2 of" in result.stderr
    assert [Packet.load(file).k for file in names] == [2, 2]


def test_packets_of_the_testbed_are_asked_there(tmp_path, model_dir, monkeypatch):
    """Without --model: the packets say whose they are."""
    from kvspeed import testbed
    from kvspeed.cli.common import load_model

    model, tokenizer, _ = load_model(str(model_dir), None)
    model.config._name_or_path = testbed.MODEL_NAME
    asked = []
    monkeypatch.setattr(testbed, "load_tuned", lambda **given: asked.append(given) or (model, tokenizer))
    out = tmp_path / "out"
    out.mkdir()
    kvspeed.build_packet(model, tokenizer, "One text.").save(out / "one.packet.safetensors")
    result = run("ask", "Who?", "--packets", out, "--max-new-tokens", 2)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert len(asked) == 1


def test_equal_names_in_two_folders_do_not_collide(tmp_path, model_dir):
    paths = []
    for folder, text in (("x", "one"), ("y", "two"), ("z", "one")):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "same.txt")
        paths[-1].write_text(text)
    files = packed(paths, tmp_path / "out", model_dir)
    assert {Packet.load(file).text.strip() for file in files} == {"one", "two"}


def test_odd_names_and_a_byte_order_mark(tmp_path, model_dir):
    odd = tmp_path / "we ird; ½ näme..txt"
    odd.write_bytes(b"\xef\xbb\xbfhello")
    dots = tmp_path / "...."
    dots.write_text("dots")
    files = packed([odd, dots], tmp_path / "out", model_dir)
    assert {Packet.load(file).text for file in files} == {"hello\n\n", "dots\n\n"}
    assert all(" " not in file.name and ";" not in file.name and not file.name.startswith(".") for file in files)


BAD = {
    "missing.txt": (None, "there is no such file"),
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b" \n\t \n", "is empty"),
    "binary.bin": (b"\x7fELF\x00\x01", "is a binary file"),
    "latin1.txt": ("caf\u00e9 au lait".encode("latin-1"), "is not UTF-8 text (byte 3 is 0xe9)"),
    "utf16.txt": ("hello".encode("utf-16"), "is UTF-16 text"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_refused_in_one_sentence_and_nothing_is_written(tmp_path, texts, model_dir, name):
    content, expected = BAD[name]
    bad = tmp_path / name
    if content is not None:
        bad.write_bytes(content)
    message = refused(run("pack", texts[0], bad, texts[1], "--out", tmp_path / "out", "--model", model_dir))
    assert expected in message and str(bad) in message
    assert not (tmp_path / "out").exists()


def test_each_bad_input_has_its_own_sentence(tmp_path, model_dir):
    (tmp_path / "empty.txt").write_bytes(b"")
    result = run("pack", tmp_path, tmp_path / "empty.txt", "--out", tmp_path / "out", "--model", model_dir)
    assert result.exit_code == 2
    assert [line.split(": ")[0] for line in result.stderr.splitlines()] == ["kvspeed", "kvspeed"]
    assert "is a folder" in result.stderr and "is empty" in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_input(tmp_path, texts, model_dir):
    texts[0].chmod(0)
    assert "cannot be read" in refused(run("pack", *texts, "--out", tmp_path / "out", "--model", model_dir))


def test_a_text_longer_than_the_model_is_refused_before_anything_is_written(tmp_path, texts):
    model_dir = save_model(tmp_path / "short", max_position_embeddings=64)
    texts[1].write_text("x" * 80)
    message = refused(run("pack", *texts, "--out", tmp_path / "out", "--model", model_dir))
    assert f"{texts[1]} is 82 tokens long and the model has 64 positions" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("k", [0, -1, 6, 1000])
def test_a_depth_out_of_range(tmp_path, texts, model_dir, k):
    message = refused(run("pack", *texts, "--out", tmp_path / "out", "--model", model_dir, "--k", k))
    assert str(k) in message and "5" in message
    assert not (tmp_path / "out").exists()


def test_out_is_a_file(tmp_path, texts, model_dir):
    for out in (texts[0], texts[0] / "x"):
        told = refused(run("pack", *texts, "--out", out, "--model", tmp_path / "none"))
        assert told == f"kvspeed: --out: {texts[0]} is a file; give a folder"
    assert texts[0].read_text() == FIRST


def test_models_that_cannot_be_had(tmp_path, texts):
    def message(model) -> str:
        return refused(run("pack", *texts, "--out", tmp_path / "out", "--model", model))

    assert "there is no folder" in message(tmp_path / "nowhere")
    assert "has no config.json" in message(tmp_path)
    assert "is a file" in message(texts[0])
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "'gpt2'" in message(unknown) and "Llama" in message(unknown)
    (unknown / "config.json").write_text("{")
    assert "--model" in message(unknown)
    (unknown / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    assert "could not be loaded" in message(unknown)
    assert "--dtype" in refused(run("pack", *texts, "--out", tmp_path / "out", "--dtype", "int4"))
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_here_is_looked_for_on_the_hub(tmp_path, texts, monkeypatch):
    import transformers

    def unreachable(*arguments, **settings):
        raise OSError("no connection")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    result = run("pack", *texts, "--out", tmp_path / "out", "--model", "no-such-owner/no-such-model")
    assert "no connection" in refused(result)
    assert result.stderr.splitlines()[0].endswith("looking for it on the hub")


def test_ask_refuses_packets_of_other_weights_naming_both_sides(tmp_path, texts, model_dir):
    out = tmp_path / "out"
    files = packed(texts, out, model_dir)
    other = save_model(tmp_path / "tiny-b", seed=1)
    message = refused(run("ask", "Why?", "--packets", out, "--model", other))
    assert files[0].name in message and "tiny-a" in message and "tiny-b" in message
    deeper = save_model(tmp_path / "tiny-c", layers=3)
    message = refused(run("ask", "Why?", "--packets", out, "--model", deeper))
    assert "tiny-a" in message and "tiny-c" in message


def test_ask_refuses_more_depth_than_there_is_naming_both(tmp_path, texts, model_dir):
    out = tmp_path / "out"
    packed(texts, out, model_dir, "--k", 3)
    message = refused(run("ask", "Why?", "--packets", out, "--model", model_dir, "--k", 4))
    assert "with k=3 of 5 layers" in message and "k=4" in message and "--k 3 or less" in message
    assert "k=5" in refused(run("ask", "Why?", "--packets", out, "--model", model_dir, "--k", 5))
    assert "give 1 to 5" in refused(run("ask", "Why?", "--packets", out, "--model", model_dir, "--k", 6))


def test_ask_less_deep_than_packed(tmp_path, texts, model_dir):
    """Packets of all layers, or of more than are asked for, answer as those that were packed so."""
    packed(texts, tmp_path / "two", model_dir, "--k", 2)
    wanted = asked("Why?", "--packets", tmp_path / "two", "--model", model_dir)["answer"]
    for depth in ([], ["--k", 4]):
        out = tmp_path / f"deep{len(depth)}"
        packed(texts, out, model_dir, *depth)
        report = asked("Why?", "--packets", out, "--model", model_dir, "--k", 2)
        assert report["answer"] == wanted and report["k"] == 2


def test_ask_refuses_what_it_cannot_use(tmp_path, texts, model_dir):
    out = tmp_path / "out"
    assert "does not exist" in refused(run("ask", "Why?", "--packets", out, "--model", model_dir))
    out.mkdir()
    assert "holds no packets" in refused(run("ask", "Why?", "--packets", out, "--model", model_dir))
    assert "is a file" in refused(run("ask", "Why?", "--packets", texts[0], "--model", model_dir))
    first, _ = packed(texts, out, model_dir)
    assert "is empty" in refused(run("ask", "  ", "--packets", out, "--model", model_dir))
    assert "--mode" in refused(run("ask", "Why?", "--packets", out, "--model", model_dir, "--mode", "paste"))
    content = bytearray(first.read_bytes())
    content[-5] ^= 1
    first.write_bytes(content)
    assert first.name in refused(run("ask", "Why?", "--packets", out, "--model", model_dir))
    first.write_bytes(content[:100])
    assert first.name in refused(run("ask", "Why?", "--packets", out, "--model", model_dir))


def test_packets_beyond_the_models_positions(tmp_path, texts):
    model_dir = save_model(tmp_path / "short", max_position_embeddings=100)
    out = tmp_path / "out"
    packed(texts, out, model_dir)
    message = refused(run("ask", "Why?", "--packets", out, "--model", model_dir))
    assert "100" in message and "positions" in message


def test_dtype_goes_into_the_packets_and_comes_back(tmp_path, texts, model_dir):
    out = tmp_path / "out"
    files = packed(texts, out, model_dir, "--dtype", "bfloat16")
    assert {Packet.load(file).dtype for file in files} == {torch.bfloat16}
    asked("Why?", "--packets", out, "--model", model_dir, "--max-new-tokens", 3)
    message = refused(run("ask", "Why?", "--packets", out, "--model", model_dir, "--dtype", "float32"))
    assert "was packed in bfloat16" in message and "pack anew with --dtype float32" in message


def test_adapter(tmp_path, texts, model_dir):
    from kvspeed import PacketAdapter
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    PacketAdapter.for_model(model, header=3, trailer=2).save(tmp_path / "adapter.safetensors")
    out = tmp_path / "out"
    plain = packed(texts[:1], out, model_dir)
    wrapped = packed(texts[:1], out, model_dir, "--adapter", tmp_path / "adapter.safetensors")
    assert wrapped == plain and Packet.load(wrapped[0]).header == 3
    asked("Why?", "--packets", out, "--model", model_dir, "--max-new-tokens", 3)
    message = refused(run("pack", *texts, "--out", out, "--model", model_dir, "--adapter", tmp_path / "no"))
    assert "--adapter" in message
    first, second = packed(texts[1:], out, model_dir)
    message = refused(run("ask", "Why?", "--packets", out, "--model", model_dir))
    assert f"{second.name} was packed without an adapter, and {first.name} with the adapter" in message


def test_debug_shows_the_traceback(tmp_path, texts, model_dir):
    result = run("ask", "Why?", "--packets", tmp_path / "no", "--model", model_dir, "--debug")
    assert result.exit_code == 2 and "Traceback" in result.stderr
