# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The testbed: its LoRA attached, written, merged; and, on the real model, that trained soft tokens repair packets."""

from __future__ import annotations

import pytest
import torch
from kvspeed import testbed
from kvspeed.eval.score import f1
from kvspeed.eval.tasks import biography
from kvspeed.packet import PacketAdapter
from kvspeed.packet.tensorfile import TensorFileError
from kvspeed.packet.train.contexts import contexts_of
from kvspeed.packet.train.student import context_kv
from kvspeed.packet.train.teacher import greedy_answers
from kvspeed.testbed.lora import attach_lora, lora_tensors, merge_lora, read_lora, set_lora, write_lora
from tiny_models import random_ids, tiny_model


def trained_lora(architecture="llama"):
    """A tiny model with an update that does something."""
    model = tiny_model(architecture)
    for weight in attach_lora(model, 4, alpha=8.0):
        with torch.no_grad():
            weight.copy_(0.2 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # qwen2 has biases
def test_merged_is_what_was_trained(architecture):
    model = trained_lora(architecture)
    ids = random_ids(12)
    with torch.no_grad():
        wanted = model(ids).logits
        merged = merge_lora(tiny_model(architecture), lora_tensors(model))
        torch.testing.assert_close(merged(ids).logits, wanted, atol=1e-4, rtol=1e-4)
        assert (wanted - tiny_model(architecture)(ids).logits).abs().max() > 0.1
    names = {name.rsplit(".", 1)[0] for name in lora_tensors(model)}
    assert len(names) == 6 * 7  # every linear layer of six decoder layers, the head not


def test_training_goes_on_from_an_update():
    model, ids = trained_lora(), random_ids(12)
    other = tiny_model("llama")
    attach_lora(other, 4, alpha=2.0, seed=3)  # another scale: B holds it
    set_lora(other, lora_tensors(model))
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_an_untrained_update_changes_nothing():
    model, ids = tiny_model("llama"), random_ids(9)
    with torch.no_grad():
        before = model(ids).logits
        trained = attach_lora(model, 4, alpha=8.0)
        torch.testing.assert_close(model(ids).logits, before)
    assert all(weight.requires_grad for weight in trained)
    assert sum(weight.requires_grad for weight in model.parameters()) == len(trained)


def test_file_and_refusals(tmp_path):
    tensors = lora_tensors(trained_lora())
    write_lora(tmp_path / "lora.safetensors", tensors, {"steps": 3})
    kept, notes = read_lora(tmp_path / "lora.safetensors")
    assert notes == {"steps": 3} and kept.keys() == tensors.keys()
    assert all(torch.equal(part, tensors[name].bfloat16()) for name, part in kept.items())
    other = tiny_model("llama", hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    before = {name: weight.clone() for name, weight in other.state_dict().items()}
    with pytest.raises(ValueError, match="use the model it was made for"):
        merge_lora(other, kept)
    assert all(torch.equal(weight, before[name]) for name, weight in other.state_dict().items())
    (tmp_path / "no").write_bytes(b"nothing")
    with pytest.raises(TensorFileError):
        read_lora(tmp_path / "no")


def test_without_its_files(monkeypatch, tmp_path):
    monkeypatch.setattr(testbed.resources, "files", lambda name: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the testbed's files are not in .*make_testbed\.py"):
        testbed.load_tuned()


def test_small_enough_for_the_wheel():
    sizes = [file.stat().st_size for file in testbed.testbed_folder().iterdir()]
    assert sum(sizes) < 16e6


def test_specialists_are_of_the_testbed(smollm2_dir):
    model, _, universal = testbed.load_testbed(progress=False)
    found = testbed.specialists()
    assert set(found) == {"biography", "multihop", "niah-multikey"}
    loaded = [PacketAdapter.load(path, model) for path in found.values()]
    assert len({one.fingerprint() for one in (*loaded, universal)}) == 4
    assert {one.tokens for one in loaded} == {universal.tokens}


@torch.no_grad()
def test_trained_soft_tokens_repair_packets(smollm2_dir):
    """Eighteen questions that no training saw: plain packets lose most answers, the adapter brings most back."""
    model, tokenizer, adapter = testbed.load_testbed(progress=False)
    assert not any(weight.requires_grad for weight in model.parameters())
    samples = biography(18, seed=3, split="test", documents=4, questions_per_context=6)
    by_id = {sample.id: sample for sample in samples}
    ways = {"full": None, "none": PacketAdapter.for_model(model, 0, 0), "packets": adapter}
    scores = dict.fromkeys(ways, 0.0)
    for context in contexts_of(tokenizer, samples):
        for name, soft in ways.items():
            past = context_kv(model, context, soft)
            written = greedy_answers(model, past, context.queries, frozenset([tokenizer.eos_token_id]), 16)
            for query, (tokens, _) in zip(context.queries, written, strict=True):
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                scores[name] += f1(text, by_id[query.id].answers) / len(samples)
    assert scores["full"] > 0.7, scores
    assert scores["packets"] > scores["none"] + 0.15, scores
