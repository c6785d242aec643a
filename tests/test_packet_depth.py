# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets built deep serve requests that go less deep: the same as if they had been built for those."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed import PacketAdapter, PacketStore
from kvspeed.packet import assemble, build_packet, build_preamble
from kvspeed.packet.packet import Packet
from kvspeed.packet.press import RandomPress
from kvspeed.packet.quantise import quantise
from packet_tools import CHAT_TEMPLATE, random_packet, random_text, tiny_tokenizer
from speed_tools import LAYERS, close, fresh, plain, poison, speedy  # noqa: F401
from tiny_models import tiny_model

TOKENIZER = tiny_tokenizer(template=CHAT_TEMPLATE)


def documents(count: int = 2) -> list[str]:
    return [random_text(random.randint(3, 20), random.randrange(10**6)) for _ in range(count)]


def same(found: Packet, wanted: Packet, exact: bool = True) -> None:
    for field in dataclasses.fields(Packet):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            assert one.shape == other.shape and one.dtype == other.dtype, field.name
            close(one, other) if not exact else torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        else:
            assert one == other, field.name


@pytest.mark.parametrize("deep", [None, 5])
def test_as_if_built_so(architecture: str, deep: int | None) -> None:
    """Keys, values and the anchor above, of all layers and of some; with more anchors than one."""
    text, anchors, k = documents(1)[0], random.randrange(3), random.randint(1, 4)
    model = kvspeed.patch_model(fresh(architecture), deep or LAYERS, anchor_tokens=anchors)
    built = build_packet(model, TOKENIZER, text)
    found = built.to_depth(k, anchors)
    same(found, build_packet(kvspeed.patch_model(model, k, anchor_tokens=anchors), TOKENIZER, text))
    assert found.keys.data_ptr() == built.keys.data_ptr()  # read where it lies


def test_its_own_depth_changes_nothing() -> None:
    for packet in (random_packet(), random_packet(k=2)):
        assert packet.to_depth(packet.depth, 3) is packet


def test_step_by_step_is_all_at_once() -> None:
    packet = random_packet(layers=6, tokens=9)
    once, twice = packet.to_depth(2, 3), packet.to_depth(4, 3).to_depth(2, 3)
    same(twice, once)
    assert packet.to_depth(4, 1).to_depth(2, 3).anchor_keys.shape[2] == 1  # type: ignore[union-attr]
    assert packet.to_depth(4, 0).to_depth(2, 3).anchor_keys is None
    assert packet.to_depth(2, 99).anchor_keys.shape[2] == packet.length  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_one_model_many_depths(architecture: str, mode: Any) -> None:
    """`kvspeed.generate(k=)` on packets of all layers: as by packets and patch of that depth."""
    anchors = random.randrange(3)
    model = kvspeed.patch_model(fresh(architecture), LAYERS, anchor_tokens=anchors)
    other = fresh(architecture)
    texts, question = documents(), documents(1)[0]
    deep = [build_packet(model, TOKENIZER, text) for text in texts]
    options: dict[str, Any] = {"max_new_tokens": 4, "mode": mode, "eos_token_id": 600}
    for k in random.sample(range(1, LAYERS + 1), 2):
        kvspeed.patch_model(other, k, anchor_tokens=anchors)
        own = [build_packet(other, TOKENIZER, text) for text in texts]
        wanted = kvspeed.generate(other, TOKENIZER, question, own, **options)
        assert kvspeed.generate(model, TOKENIZER, question, deep, k=k, **options) == wanted
        assert kvspeed.generate(other, TOKENIZER, question, deep, **options) == wanted  # the patch's depth, too


def test_logits_of_an_assembled_cache() -> None:
    deep = [build_packet(fresh("qwen3"), TOKENIZER, text) for text in documents(3)]
    model = speedy("qwen3", 3)
    own = [build_packet(model, TOKENIZER, packet.text) for packet in deep]
    ids = torch.randint(3, 500, (1, 7))
    logits = []
    for packets in (deep, own, [deep[0], own[1], deep[2]]):
        cache = assemble(packets, model=model)
        prefix = torch.tensor([cache.prefix_ids])
        output = model.generate(
            torch.cat([prefix, ids], 1),
            **{model._kvspeed.cache_name: cache},
            max_new_tokens=4,
            output_logits=True,
            return_dict_in_generate=True,
            do_sample=False,
            pad_token_id=600,
        )
        logits.append(torch.stack(output.logits))
    close(logits[0], logits[1])
    close(logits[2], logits[1])


def test_by_task_and_a_kept_preamble() -> None:
    model = kvspeed.patch_model(fresh("llama"), 5, k_by_task={"code": 2, "*": 3})
    deep = [build_packet(model, TOKENIZER, text, k=LAYERS) for text in documents()]
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": 600}
    for task, k in (("code", 2), ("poetry", 3), (None, 5), ("code", 2)):
        other = speedy("llama", k)
        own = [build_packet(other, TOKENIZER, packet.text) for packet in deep]
        wanted = kvspeed.generate(other, TOKENIZER, "w9 w8", own, **options)
        assert kvspeed.generate(model, TOKENIZER, "w9 w8", deep, task=task, **options) == wanted


def test_a_model_that_is_not_patched() -> None:
    model = fresh("llama")
    packets = [build_packet(model, TOKENIZER, text) for text in documents()]
    wanted = kvspeed.generate(speedy("llama", 3), TOKENIZER, "w9 w8", packets, max_new_tokens=5, eos_token_id=600)
    assert kvspeed.generate(model, TOKENIZER, "w9 w8", packets, k=3, max_new_tokens=5, eos_token_id=600) == wanted
    assert kvspeed.state.state_of(model) is None


def test_a_packet_that_occurs_twice_stays_one() -> None:
    model = speedy("llama", 3)
    packet = build_packet(plain("llama"), TOKENIZER, documents(1)[0])
    cache = assemble([packet, packet], model=model)
    first, second = cache.layer(0).segments
    assert first.key.data_ptr() == second.key.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_fewer_bits(dtype: torch.dtype) -> None:
    packet = random_packet(layers=6, tokens=9)
    small = quantise(packet, dtype)
    found = small.to_depth(2, 2)
    same(found.full(), small.full().to_depth(2, 2))
    assert found.anchor_keys.dtype == packet.dtype  # type: ignore[union-attr]


def test_a_store_of_deep_packets(tmp_path: Path) -> None:
    model, texts = speedy("llama", 3), documents()
    store = PacketStore(tmp_path, model=model, tokenizer=TOKENIZER, k=LAYERS)
    ids = store.add(texts)
    packets = store.load(ids)
    assert packets[0].k is None
    wanted = [build_packet(model, TOKENIZER, text) for text in texts]
    for cache, other in ((store.assemble(ids), assemble(wanted, model=model)),):
        for layer in range(LAYERS):
            one, two = cache.layer(layer), other.layer(layer)
            assert len(one.segments) == len(two.segments) == (2 if layer < 3 else 0)
            if layer >= 3:
                close(one.keys, two.keys)


def test_soft_tokens() -> None:
    model = fresh("llama")
    adapter = PacketAdapter.for_model(model, header=3, trailer=2)
    text = documents(1)[0]
    deep, other = build_packet(model, TOKENIZER, text, adapter), speedy("llama", 2)
    same(deep.to_depth(2), build_packet(other, TOKENIZER, text, adapter))


def test_removed_tokens() -> None:
    """Layers below k keep what they kept. The anchor is there where every head kept it, and missing otherwise."""
    model, text = fresh("llama"), random_text(24, 5)
    pressed = build_packet(model, TOKENIZER, text, press=RandomPress(0.5, seed=3))
    found = pressed.to_depth(3)
    assert pressed.positions is not None and found.positions is not None
    assert torch.equal(found.positions, pressed.positions[:3])
    assert (found.anchor_keys is not None) == bool((pressed.positions[3:] == 0).any(-1).all())
    positions = pressed.positions.clone()
    for anchored in (False, True):
        positions[:, :, 0] = 0 if anchored else positions[:, :, 0].clamp_min(1)
        if bool((positions.sort(-1).values.diff(dim=-1) == 0).any()):
            continue
        changed = dataclasses.replace(pressed, positions=positions.clone())
        found = changed.to_depth(3)
        assert (found.anchor_keys is not None) == anchored
        if anchored:
            close(found.anchor_keys[:, :, 0], changed.keys[3:, :, 0])  # type: ignore[index]
            close(found.anchor_values[:, :, 0], changed.values[3:, :, 0])  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_removed_tokens_in_fewer_bits(dtype: torch.dtype) -> None:
    """The anchor is picked out of 8-bit numbers head by head."""
    packet = build_packet(fresh("llama"), TOKENIZER, random_text(24, 5), press=RandomPress(0.5, seed=3))
    positions = packet.positions.clone()  # type: ignore[union-attr]
    positions[:, :, 0] = 0
    positions[:, :, 1:] = torch.arange(1, positions.shape[2])
    small = quantise(dataclasses.replace(packet, positions=positions), dtype)
    found, wanted = small.to_depth(3), small.full().to_depth(3)
    assert found.anchor_keys is not None
    close(found.anchor_keys, wanted.anchor_keys)
    close(found.anchor_values, wanted.anchor_values)


def test_less_deep_ones_are_refused() -> None:
    text = documents(1)[0]
    packet = build_packet(speedy("llama", 3), TOKENIZER, text)
    for k, says in ((4, r"k=3 of 6 layers.*asked for k=4 of 6.*k=3 or less"), (LAYERS, "asked for all 6 layers")):
        model = speedy("llama", k)
        with pytest.raises(ValueError, match=says):
            assemble([packet], model=model)
        with pytest.raises(ValueError, match=says):
            kvspeed.generate(speedy("llama", 3), TOKENIZER, "w9", [packet], k=k)
    with pytest.raises(ValueError, match="holds 3 of 6 layers"):
        packet.to_depth(4)


def test_a_preamble_less_deep_than_the_request() -> None:
    model = speedy("llama", 2)
    preamble = build_preamble(model, TOKENIZER)
    packet = build_packet(model, TOKENIZER, documents(1)[0], k=LAYERS)
    with pytest.raises(ValueError, match=r"preamble.*k=2 of 6.*asked for k=4"):
        kvspeed.generate(model, TOKENIZER, "w9", [packet], preamble=preamble, k=4)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((0,), ValueError),
        ((-1,), ValueError),
        ((7,), ValueError),
        ((True,), TypeError),
        ((2.0,), TypeError),
        ((2, -1), ValueError),
        ((2, None), TypeError),
    ],
)
def test_bad_numbers(given: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        random_packet(layers=6).to_depth(*given)


def test_gaps_make_no_packets() -> None:
    model = kvspeed.patch_model(fresh("llama"), deep_layers=[1, 5])
    packet = build_packet(model, TOKENIZER, documents(1)[0], k=3)  # a depth of its own is fine
    same(packet, build_packet(speedy("llama", 3), TOKENIZER, packet.text))
    with pytest.raises(ValueError, match=r"gaps at layers \[1\]"):
        build_packet(model, TOKENIZER, packet.text)
    with pytest.raises(ValueError, match=r"leaves out the layers \[1\]"):
        assemble([build_packet(tiny_model("llama", layers=LAYERS), TOKENIZER, packet.text)], model=model)
