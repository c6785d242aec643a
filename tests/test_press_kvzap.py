# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""KVzap from files: what it scores, and the folders that it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from kvspeed.packet import build_packet
from kvspeed.packet.press import kvzap_press
from packet_tools import random_text, tiny_tokenizer
from safetensors.torch import save_file
from tiny_models import tiny_model


def write(folder, *, hidden=None, layers=3, wide=64, heads=2, config=None, change=None):
    folder.mkdir(exist_ok=True)
    sizes = [(wide, heads)] if hidden is None else [(wide, hidden), (hidden, heads)]
    tensors = {}
    for layer in range(layers):
        for index, (given, made) in enumerate(sizes):
            name = f"layers.{layer}" if hidden is None else f"layers.{layer}.{2 * index}"
            tensors |= {f"{name}.weight": torch.randn(made, given), f"{name}.bias": torch.randn(made)}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    described = {"n_modules": layers, "input_dim": wide, "output_dim": heads, "hidden_dim": hidden}
    (folder / "config.json").write_text(json.dumps(described) if config is None else config)
    return tensors


@pytest.mark.parametrize("hidden", [None, 24])
def test_scores(tmp_path, hidden):
    tensors = write(tmp_path, hidden=hidden)
    press = kvzap_press(tmp_path, 0.5)
    model, tokenizer = tiny_model("qwen3", layers=3), tiny_tokenizer()
    packet = build_packet(model, tokenizer, random_text(21, 1), press=press)
    states = []
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: states.append(kwargs["hidden_states"][0].double()), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    model(torch.tensor([list(packet.token_ids)]))
    for handle in handles:
        handle.remove()
    for layer, state in enumerate(states):
        for index in range(1 if hidden is None else 2):
            name = f"layers.{layer}" if hidden is None else f"layers.{layer}.{2 * index}"
            if index:
                state = torch.nn.functional.gelu(state)
            state = state @ tensors[f"{name}.weight"].double().T + tensors[f"{name}.bias"].double()
        want = state.T.topk(10).indices.sort().values.int()
        assert torch.equal(packet.positions[layer], want)
    assert packet.press == {"name": "kvzap", "ratio": 0.5, "protect_soft": True, "fingerprint": press.fingerprint}
    assert kvzap_press(tmp_path, 0.5) == press
    write(tmp_path, hidden=hidden)
    assert kvzap_press(tmp_path, 0.5) != press


def test_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        kvzap_press(tmp_path, 0.5)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        kvzap_press(tmp_path, 0.5)
    for config in ("[]", "{}", '{"n_modules": "3", "input_dim": 64, "output_dim": 2}'):
        write(tmp_path, config=config)
        with pytest.raises(ValueError, match="does not describe KVzap weights"):
            kvzap_press(tmp_path, 0.5)
    write(tmp_path, config="{")
    with pytest.raises(ValueError, match="that can be read"):
        kvzap_press(tmp_path, 0.5)
    write(tmp_path, change=lambda tensors: tensors.pop("layers.1.bias"))
    with pytest.raises(ValueError, match=r"layers\.1 is missing"):
        kvzap_press(tmp_path, 0.5)
    write(tmp_path, change=lambda tensors: tensors.update({"layers.2.weight": torch.randn(2, 63)}))
    with pytest.raises(ValueError, match=r"layers\.2 is missing, or not of shape \[2, 64\]"):
        kvzap_press(tmp_path, 0.5)
    write(tmp_path, change=lambda tensors: tensors.update({"other": torch.randn(2)}))
    with pytest.raises(ValueError, match="holds more than KVzap weights: other"):
        kvzap_press(tmp_path, 0.5)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="that can be read"):
        kvzap_press(tmp_path, 0.5)
    model, tokenizer = tiny_model("llama", layers=3), tiny_tokenizer()
    for options, match in ((dict(layers=2), "for 2 layers"), (dict(wide=32), "take hidden states of 32")):
        write(tmp_path, **options)
        with pytest.raises(ValueError, match=match):
            build_packet(model, tokenizer, "w200 w201", press=kvzap_press(tmp_path, 0.5))
