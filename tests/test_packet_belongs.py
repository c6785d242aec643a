# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets that do not belong to the model or to each other are refused, and the message names both sides."""

from __future__ import annotations

import copy

import pytest
import torch
from kvspeed import patch_model, unpatch_model
from kvspeed.fingerprint import model_fingerprint
from kvspeed.packet import PacketAdapter, assemble, build_packet, build_preamble
from packet_tools import changed, random_text, tiny_tokenizer
from tiny_models import tiny_model

TOKENIZER = tiny_tokenizer(bos=True)


@pytest.fixture
def model():
    return tiny_model("llama", layers=3)


def packet_of(model, adapter=None, seed=1, **options):
    return build_packet(model, TOKENIZER, random_text(5, seed), adapter, **options)


def refused(packets, model, *parts, preamble=None, error=ValueError, **options):
    for mode in ("view", "copy"):
        with pytest.raises(error) as caught:
            assemble(packets, model=model, preamble=preamble, mode=mode, **options)
        for part in parts:
            assert str(part) in str(caught.value), caught.value


def test_other_weights(model):
    other = tiny_model("llama", layers=3, seed=4)
    packet = packet_of(other)
    refused([packet_of(model), packet], model, "packet 1", model_fingerprint(other)[:16], model_fingerprint(model)[:16])
    refused([], model, "preamble", model_fingerprint(other)[:16], preamble=build_preamble(other, TOKENIZER))


def test_weights_changed_after_the_packet(model):
    packet = packet_of(model)
    before = model_fingerprint(model)
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.01)
    refused([packet], model, before[:16], model_fingerprint(model)[:16])


def test_merging_an_adapter_makes_packets_stale():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_model("llama", layers=3), config).eval()
    packet = packet_of(wrapped)
    assemble([packet], model=wrapped)
    with wrapped.disable_adapter():
        refused([packet], wrapped, packet.model_fingerprint[:16], model_fingerprint(wrapped)[:16])
    wrapped.merge_adapter()
    refused([packet], wrapped, packet.model_fingerprint[:16], model_fingerprint(wrapped)[:16])


def test_another_dtype(model):
    packet = packet_of(model)
    refused([packet], copy.deepcopy(model).to(torch.bfloat16), "packet 0", "torch.float32", "torch.bfloat16")


def test_another_depth(model):
    whole, two, preamble = packet_of(model), packet_of(model, k=2), build_preamble(model, TOKENIZER)
    refused([whole, two], model, "packet 1", "k=2 of 3 layers", "all 3 layers")
    patch_model(model, k=2)
    one = packet_of(model, k=1)
    refused([two, one], model, "packet 1", "k=1 of 3 layers", "k=2 of 3 layers")
    refused([two], model, "preamble", "k=1 of 3 layers", "k=2", preamble=build_preamble(model, TOKENIZER, k=1))
    assemble([two, whole], model=model, preamble=preamble)  # deeper ones have the layers that are asked for
    unpatch_model(model)
    refused([two], model, "k=2 of 3 layers", "all 3 layers")


def test_adapters(model):
    one, other = PacketAdapter.for_model(model, seed=1), PacketAdapter.for_model(model, seed=2)
    a, b, bare = packet_of(model, one), packet_of(model, other), packet_of(model)
    refused([a, a, b], model, "packet 2", one.fingerprint()[:16], other.fingerprint()[:16])
    refused([a, bare], model, "packet 1", "without an adapter", one.fingerprint()[:16])
    refused([bare, a], model, "packet 1", "without an adapter", one.fingerprint()[:16])
    refused([], model, "preamble", "build_preamble", preamble=a)
    assemble([a, a], model=model, preamble=build_preamble(model, TOKENIZER))


def test_other_rotation(model):
    packet = packet_of(model)
    rope = copy.deepcopy(packet.rope)
    rope["frequencies"][0][3] *= 1.001
    refused([changed(packet, rope=rope)], model, "packet 0", "frequency 3 of layer 0 is 0.0316544 against 0.0316228")
    rope["frequencies"][0][3] = packet.rope["frequencies"][0][3] * (1 + 1e-7)
    assemble([changed(packet, rope=rope)], model=model)  # a rounding, as another device gives
    refused(
        [changed(packet, rope={**packet.rope, "interleaved": True})], model, "interleaved=True", "interleaved=False"
    )
    short = {**packet.rope, "rotary_dim": 8, "frequencies": [packet.rope["frequencies"][0][:4]]}
    refused([changed(packet, rope=short)], model, "8 rotated dimensions", "16 rotated dimensions")


def test_forged_shapes(model):
    """A file may claim any fingerprint: shapes are compared with the model all the same."""
    packet = packet_of(model)
    one_head = changed(packet, keys=packet.keys[:, :1], values=packet.values[:, :1])
    refused([one_head], model, "1 KV heads", "2 KV heads")
    wide = torch.randn(3, 2, 5, 24)
    refused([changed(packet, keys=wide, values=wide)], model, "2 KV heads of 24", "2 KV heads of 16")


def test_positions(tiny_model=tiny_model):
    model = tiny_model("llama", layers=2, max_position_embeddings=12)
    packet = packet_of(model)
    refused([packet, packet, packet], model, "15 positions", "12")
    refused([packet], model, "capacity", "13", "12", capacity=13)
    refused([packet], model, "capacity", "4", "5 positions", capacity=4)
    assert assemble([packet, packet], model=model, capacity=12, mode="copy").allocated_bytes() > 0


def test_anchor(model):
    patch_model(model, k=2, anchor_tokens=4)
    packet = packet_of(model)
    short = build_preamble(model, TOKENIZER)
    refused([packet], model, "anchor_tokens=4", "holds 1 anchor", preamble=short)
    assemble([packet], model=model)
    without = changed(packet, anchor_keys=None, anchor_values=None)
    refused([without], model, "anchor_tokens=4", "holds 0 anchor")
    assemble([packet, without], model=model)


@pytest.mark.parametrize("packets", [None, 3, "abc", [None], [1], ["x"], [[]]])
def test_no_packets(model, packets):
    refused(packets, model, "packet", error=TypeError)


def test_other_refusals(model):
    packet = packet_of(model)
    refused(packet, model, "[packet]", error=TypeError)
    refused([packet], model, "preamble", preamble="text", error=TypeError)
    refused([packet], model, "capacity", capacity=1.5, error=TypeError)
    refused([packet], model, "capacity", capacity=True, error=TypeError)
    with pytest.raises(ValueError, match=r'mode: expected "view" or "copy"'):
        assemble([packet], model=model, mode="paged")


def test_removed_tokens(model):
    """Packets with and without all their tokens go together; windows ask where each token stands, which copies lose."""
    packet = packet_of(model)
    kept = torch.tensor([0, 2, 3], dtype=torch.int32).expand(3, 2, 3).contiguous()
    rows = kept.long()[..., None].expand(3, 2, 3, 16)
    small = changed(
        packet,
        keys=packet.keys.gather(2, rows),
        values=packet.values.gather(2, rows),
        positions=kept,
        press={"name": "test"},
    )
    for mode in ("view", "copy"):
        assert assemble([small, packet], model=model, mode=mode).get_seq_length() == 10
    windowed = tiny_model("gemma2", layers=3)
    other = packet_of(windowed)
    small = changed(
        other,
        keys=other.keys.gather(2, rows),
        values=other.values.gather(2, rows),
        positions=kept,
        press={"name": "test"},
    )
    assert assemble([small], model=windowed).get_seq_length() == 5
    with pytest.raises(ValueError, match="mode='view'"):
        assemble([small], model=windowed, mode="copy")
