# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Models on other devices than the host, and on several, told by torch's meta device, whose tensors hold no data.

An operation over two devices fails there, and so does the host reading what such a device "computed". Copies to it are
counted, since on a GPU one from the host's memory makes the host wait for everything that is queued.
"""

from __future__ import annotations

from typing import Any

import kvspeed.ops
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from kvspeed import KVCache, Segment, devices, hooks, patch_model
from kvspeed.models import base_model, cache_argument
from kvspeed.packet.assemble import _layers_on
from kvspeed.speed import prompt_kv
from kvspeed.state import state_of
from packet_tools import random_packet
from tiny_models import tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

HOST, THERE = torch.device("cpu"), torch.device("meta")
LAYERS = 6


class Copies(TorchDispatchMode):
    """Counts copies from the host to the other device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name().startswith("aten::_to_copy") and args[0].device == HOST:
            self.count += torch.device(kwargs.get("device") or HOST) != HOST
        if func.name() == "aten::copy_":
            self.count += args[0].device != args[1].device
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Kernels for both devices, which look at where their tensors are; returns the devices of all calls."""
    calls: list[torch.device] = []

    def attend(query: Any, segments: Any, key: Any, value: Any, **options: Any) -> Any:
        held = [tensor for one in segments for tensor in (one.key, one.value)]
        optional = [options.get("tail_first"), options.get("tail_length")]
        for tensor in [key, value, *held, *(one for one in optional if one is not None)]:
            assert tensor.device == query.device
        assert options["inv_freq"] is None or options["inv_freq"].device == HOST
        calls.append(query.device)
        return torch.empty_like(query)

    autocast = torch.autocast  # transformers 4.57 turns it off for the device at hand, which has none
    monkeypatch.setattr(torch, "autocast", lambda device_type, **options: autocast("cpu", **options))
    monkeypatch.setattr("kvspeed.attention.covers", lambda query: True)
    monkeypatch.setattr(kvspeed.ops, "segment_attention", attend)
    return calls


def model_on(home: torch.device, upper: torch.device, k: int | None) -> Any:
    """A patched model with its lower half on `home`, the upper on `upper`, hooked up as `device_map` does it."""
    model = tiny_model("llama", layers=LAYERS)
    rope = state_of(patch_model(model)).rope  # read on the host
    base = model.model
    places = {base.embed_tokens: home, base.rotary_emb: home, base.norm: upper, model.lm_head: upper}
    places |= {layer: upper if 2 * index >= LAYERS else home for index, layer in enumerate(base.layers)}
    for module, device in places.items():
        module.to(device)
        if home != upper:
            add_hook_to_module(module, AlignDevicesHook(device, skip_keys=[cache_argument(base)]))
    patch_model(model, k)
    state_of(model)._rope = rope
    return model


@torch.no_grad()
def steps(model: Any, home: torch.device, kv: KVCache, tokens: int, batch: int = 1) -> list[int]:
    """A prompt's forward and three decoding steps; how many copies to the other device kvspeed made in each."""
    name, counts = cache_argument(base_model(model)), []
    kv.begin_turn(kv.get_seq_length() + tokens)
    for size in (tokens, 1, 1, 1):
        ids = torch.zeros(batch, size, dtype=torch.long, device=home)
        with Copies() as copies:
            logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: kv}).logits
        assert logits.device == model.lm_head.weight.device and logits.shape[:2] == (batch, 1)
        counts.append(copies.count)
    return counts


@pytest.mark.parametrize("k", [None, 2, 3, 5])
def test_a_decoding_step_reads_nothing_and_copies_nothing(kernels, k):
    model = model_on(THERE, THERE, k)
    kv = KVCache(model.config, spec=state_of(model).spec)
    prompt, *rest = steps(model, THERE, kv, 9)
    assert rest == [0, 0, 0]
    assert prompt <= (0 if k is None else 3)  # the deep columns, their order in storage, their mask
    assert len(kernels) >= 3 * LAYERS and set(kernels) == {THERE}


@pytest.mark.parametrize("k", [None, 2])
def test_padding_goes_to_a_device_once(monkeypatch, kernels, k):
    model = model_on(THERE, THERE, k)
    kv, padding = KVCache(model.config, spec=state_of(model).spec), torch.tensor([0, 4])
    monkeypatch.setattr(hooks, "_padding", lambda *args: (padding, True))
    _, first, *rest = steps(model, THERE, kv, 9, batch=2)
    assert first <= 1 and rest == [0, 0]


@pytest.mark.parametrize("k", [None, 2, 3, 5])
def test_each_layer_keeps_its_tokens_where_it_is(kernels, k):
    model = model_on(HOST, THERE, k)
    kv = KVCache(model.config, spec=state_of(model).spec)
    steps(model, HOST, kv, 9)
    for index, layer in enumerate(base_model(model).layers):
        assert kv.layer(index).keys.device == next(layer.parameters()).device
    assert set(kernels) == {HOST, THERE}


@pytest.mark.parametrize("k", [None, 4])
def test_packets_from_elsewhere_are_moved_once(kernels, k):
    model = model_on(HOST, THERE, k)
    packet = random_packet(layers=LAYERS, k=k, tokens=12)
    where = devices.layer_devices(model)
    with Copies() as copies:
        placed = _layers_on(packet, where[: packet.depth])
    assert copies.count == 2  # keys and values of the upper half
    assert [key.device for key, _ in placed] == where[: packet.depth]
    assert placed[0][0].data_ptr() == packet.keys.data_ptr()  # read where they lie
    kv = KVCache(model.config, spec=state_of(model).spec)
    kv.set_segments([[Segment(*layer, 0), Segment(*layer, 12)] for layer in placed], 24)
    if k is not None:
        kv.set_anchor(*[[key[None].to(THERE) for key in packet.anchor_keys]] * 2)
    steps(model, HOST, kv, 5)
    assert set(kernels) == {HOST, THERE}


@pytest.mark.parametrize("k", [None, 4])
def test_a_packets_tensors_come_together_where_the_model_begins(monkeypatch, k):
    monkeypatch.undo()
    model, ids = tiny_model("gemma3_text", layers=LAYERS), torch.randint(3, 500, (1, 40))
    wanted = prompt_kv(model, ids, k=k)
    monkeypatch.setattr("kvspeed.speed.prefill.layer_devices", lambda model: [HOST, THERE] * 3)
    for one, other in zip(prompt_kv(model, ids, k=k), wanted, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_offloaded_layers_are_where_they_run():
    model = tiny_model("llama", layers=2)
    layer = model.model.layers[1]
    add_hook_to_module(layer.mlp, AlignDevicesHook(execution_device=3, offload=False, place_submodules=False))
    layer.to("meta")
    assert devices.layer_devices(model) == [HOST, torch.device("cuda", 3)]


def test_what_is_there_already_is_not_moved():
    tensor = torch.ones(3)
    assert devices.to_device(tensor, HOST) is tensor
    assert devices.to_device(tensor, THERE).is_meta


def test_padding_is_made_once_and_anew_when_it_changes():
    kv, padding = KVCache(tiny_config("llama")), torch.tensor([0, 3, 5])
    first = kv.first(padding, HOST, 4)
    assert first.dtype == torch.int32 and first.tolist() == [0, 0, 1]
    assert kv.first(padding, HOST, 4) is first
    assert kv.first(padding, HOST).tolist() == [0, 3, 5]
    assert kv.first(padding.clone(), HOST, 4) is not first
