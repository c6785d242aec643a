# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The folder of a tuning run: what is saved, and how it comes back, damaged or on the wrong model too."""

from __future__ import annotations

import copy
import csv
import json
import os
from typing import Any

import pytest
import torch
from kvspeed.rule import SpeedSpec
from kvspeed.speed import load_tuned, tune
from kvspeed.tuned import remembered_spec
from train_tools import asked_model, random_samples, same, weights

pytest.importorskip("peft")

QUICK: dict[str, Any] = {"k": 4, "steps": 4, "batch_size": 4, "dev": None, "lr": 1e-2, "rank": 4}


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_folder_holds_the_best_weights(tmp_path, method):
    model, tokenizer = asked_model()
    start = copy.deepcopy(model)
    options = {**QUICK, "steps": 12, "lr": 3e-2 if method == "lora" else 3e-3, "method": method, "evaluate_every": 2}
    samples, held = random_samples(6, seed=5), random_samples(3, seed=6)
    held = [type(one)(f"dev-{one.id}", one.documents, one.question, one.answers) for one in held]
    report = tune(model, tokenizer, samples, **{**options, "dev": held}, folder=tmp_path / "run")
    looks = {one.step: one.loss for one in report.records if one.split == "dev"}
    assert report.best_dev == min(looks.values()) == looks[report.best_step] and len(looks) == 7
    loaded, settings = load_tuned(tmp_path / "run", start if method == "lora" else None)
    assert same(weights(loaded), weights(model)) and remembered_spec(loaded) == SpeedSpec(4)
    assert settings == {"k": 4, **{name: getattr(SpeedSpec(4), name) for name in settings if name != "k"}}
    rows = list(csv.DictReader((tmp_path / "run" / "curve.csv").read_text().splitlines()))
    assert len(rows) == len(report.records) == 19
    facts = json.loads((tmp_path / "run" / "report.json").read_text())
    assert facts["tokens_per_second"] == pytest.approx(report.tokens_per_second) and facts["tokens_per_second"] > 0
    assert facts["peak_memory_bytes"] > 1 << 20 and facts["trained_tokens"] == report.trained_tokens
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".")]
    again = tune(loaded, tokenizer, samples, **{**options, "dev": held, "steps": 1, "lr": 1e-9, "evaluate_every": 1})
    assert again.first_dev == pytest.approx(report.best_dev, rel=1e-4)


def test_a_lora_is_refused_on_other_weights(tmp_path):
    model, tokenizer = asked_model()
    tune(model, tokenizer, random_samples(4), **QUICK, folder=tmp_path)
    with pytest.raises(ValueError, match="was made for other weights than base_model has"):
        load_tuned(tmp_path, asked_model(seed=1)[0])
    with pytest.raises(FileNotFoundError, match="holds neither a model"):
        load_tuned(tmp_path / "teacher")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("kvspeed-lora.json", b"[1]", "kvspeed-lora.json is damaged"),
        ("kvspeed-lora.json", b"\xff\xfe", "kvspeed-lora.json is damaged"),
        ("adapter_config.json", b"[1]", "cannot be put on the model"),
        ("adapter_config.json", b"{", "cannot be put on the model"),
        ("adapter_model.safetensors", b"x" * 40, "cannot be put on the model"),
    ],
)
def test_a_damaged_lora_leaves_the_model_as_it_was(tmp_path, file, content, message):
    model, tokenizer = asked_model()
    tune(model, tokenizer, random_samples(4), **QUICK, folder=tmp_path)
    (tmp_path / file).write_bytes(content)
    start = asked_model()[0]
    names, before = [name for name, _ in start.named_modules()], weights(start)
    with pytest.raises(ValueError, match=message):
        load_tuned(tmp_path, start)
    assert [name for name, _ in start.named_modules()] == names and same(weights(start), before)
    assert all(weight.requires_grad for weight in start.parameters()) and not hasattr(start, "peft_config")
    if file == "adapter_config.json":
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            load_tuned(tmp_path)


def test_a_tokenizer_with_several_templates_is_saved_again_and_again(tmp_path):
    model, tokenizer = asked_model()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    options = {**QUICK, "dev": 0.25, "evaluate_every": 1}
    report = tune(model, tokenizer, random_samples(8), **options, folder=tmp_path)
    assert report.best_step is not None  # written at a better look, and at the end
    assert type(tokenizer).from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def test_a_lora_may_be_shipped_small(tmp_path):
    from kvspeed.testbed.lora import merge_lora, peft_tensors, read_lora, write_lora

    model, tokenizer = asked_model()
    tune(model, tokenizer, random_samples(4), **QUICK, alpha=7.0, folder=tmp_path)
    write_lora(tmp_path / "lora.safetensors", peft_tensors(tmp_path), {"k": 4})
    tensors, notes = read_lora(tmp_path / "lora.safetensors")
    again = merge_lora(asked_model()[0], tensors)
    assert notes == {"k": 4} and not same(weights(again), weights(asked_model()[0]))
    for name, weight in weights(again).items():
        torch.testing.assert_close(weight, weights(model)[name], atol=2e-3, rtol=0)  # bfloat16 update
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ValueError, match="holds no plain LoRA"):
        peft_tensors(tmp_path)


def test_a_lora_finds_the_models_that_kvspeed_ships(tmp_path, monkeypatch):
    from kvspeed import smollm2, testbed

    monkeypatch.setattr(testbed, "load_tuned", lambda **_: asked_model())
    monkeypatch.setattr(smollm2, "load_smollm2", lambda **_: asked_model(seed=1))
    for seed, name in enumerate((testbed.MODEL_NAME, smollm2.MODEL_NAME)):
        model, tokenizer = asked_model(seed=seed)
        model.config._name_or_path = name
        tune(model, tokenizer, random_samples(4), **{**QUICK, "steps": 1}, folder=tmp_path / name)
        assert same(weights(load_tuned(tmp_path / name)[0]), weights(model))
    nameless, tokenizer = asked_model()
    tune(nameless, tokenizer, random_samples(4), **{**QUICK, "steps": 1}, folder=tmp_path / "nameless")
    with pytest.raises(ValueError, match="does not say which model its LoRA is for; give base_model"):
        load_tuned(tmp_path / "nameless")


def test_a_lora_is_tuned_further(tmp_path):
    """The second one's model is the first one's folder, which is a LoRA itself."""
    start, tokenizer = asked_model()
    start.save_pretrained(tmp_path / "start")
    start.config._name_or_path = str(tmp_path / "start")
    tune(start, tokenizer, random_samples(4), **QUICK, folder=tmp_path / "first")
    model, _ = load_tuned(tmp_path / "first")
    tune(model, tokenizer, random_samples(4), **{**QUICK, "k": 5}, folder=tmp_path / "second")
    loaded, settings = load_tuned(tmp_path / "second")
    assert same(weights(loaded), weights(model)) and not same(weights(loaded), weights(start)) and settings["k"] == 5
    config = tmp_path / "second" / "adapter_config.json"
    entries = {**json.loads(config.read_text()), "base_model_name_or_path": str(tmp_path / "second")}
    config.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="names itself as the model that its LoRA is for; give base_model"):
        load_tuned(tmp_path / "second")
    for one, other in (("first", "second"), ("second", "first")):
        config = tmp_path / one / "adapter_config.json"
        entries = {**json.loads(config.read_text()), "base_model_name_or_path": str(tmp_path / other)}
        config.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"second names itself, by way of .*first, as the model that its LoRA is for"):
        load_tuned(tmp_path / "second")
