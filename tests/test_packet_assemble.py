# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Assembled packets against one forward of the unpatched model under a block mask. Logits are compared, not tokens."""

from __future__ import annotations

import gc

import pytest
import torch
from kvspeed import KVCache, Segment, patch_model, speed_mask, unpatch_model
from kvspeed.install import patched
from kvspeed.packet import PacketAdapter, assemble, build_packet, build_preamble
from kvspeed.state import state_of
from packet_tools import (
    block_mask,
    cached_logits,
    changed,
    embed,
    masked_logits,
    packet_embeds,
    random_text,
    tiny_tokenizer,
)
from tiny_models import tiny_model

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
ATOL = 1e-4  # logits have a standard deviation of 1 to 4; float32 errors are 20 times smaller


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(bos=True)


def blocks(model, tokenizer, adapter=None, *, sizes=(7, 1, 30, 12), k=None, seed=0):
    preamble = build_preamble(model, tokenizer, random_text(4, seed + 100), k=k)
    packets = [build_packet(model, tokenizer, random_text(n, seed + n), adapter, k=k) for n in sizes]
    return preamble, packets


def expected(model, parts, question, answer, adapter=None, *, k=None, **options):
    """The oracle's logits of question and answer after the blocks `parts`."""
    lengths = [part.length for part in parts] + [len(question) + len(answer)]
    embeds = torch.cat([*(packet_embeds(model, p, adapter) for p in parts), embed(model, [*question, *answer])])
    upper = None
    if k is not None:
        upper = (k, speed_mask(sum(lengths) - len(answer), sum(lengths), **options))
    return masked_logits(model, embeds, block_mask(lengths), upper=upper)[-lengths[-1] :]


def ids(count, seed=0):
    return torch.randint(100, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(model, parts, adapter=None, mode="view", *, question=5, answer=4, **options):
    question, answer = ids(question), ids(answer, 1)
    has_preamble = parts[0] is not None
    cache = assemble(parts[1:], model=model, preamble=parts[0], mode=mode)
    parts = parts if has_preamble else parts[1:]
    assert cache.get_seq_length() == sum(part.length for part in parts)
    with patched(model) as state:
        got = cached_logits(model, cache, question, answer)
        k = state.spec.k if state.spec is not None else None
        options = {"anchor_tokens": state.spec.anchor_tokens} if k is not None else {}
        copy = type(model)(model.config).eval()
        copy.load_state_dict(model.state_dict())
    want = expected(copy, parts, question, answer, adapter, k=k, **options)
    if k is not None:  # only the last question token and the answer run above k
        got, want = got[-len(answer) - 1 :], want[len(question) - 1 :]
        assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=ATOL, rtol=1e-4)
    return got


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("soft", [None, (8, 8), (0, 3)])
def test_packets_equal_a_masked_forward(architecture, tokenizer, mode, soft):
    model = tiny_model(architecture, layers=4)
    adapter = PacketAdapter.for_model(model, *soft) if soft else None
    preamble, packets = blocks(model, tokenizer, adapter)
    check(model, [preamble, *packets], adapter, mode)


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_scalings(tokenizer, mode, rope):
    model = tiny_model("llama", layers=3, rope=ROPES[rope])
    preamble, packets = blocks(model, tokenizer, sizes=(20, 90, 11))
    check(model, [preamble, *packets], None, mode)


def test_copy_serves_an_unpatched_model(architecture, tokenizer):
    model = tiny_model(architecture, layers=4)
    adapter = PacketAdapter.for_model(model, 3, 2)
    preamble, packets = blocks(model, tokenizer, adapter)
    cache = assemble(packets, model=model, preamble=preamble, mode="copy")
    assert state_of(model) is None
    question, answer = ids(5), ids(4, 1)
    got = cached_logits(model, cache, question, answer)
    want = expected(model, [preamble, *packets], question, answer, adapter)
    torch.testing.assert_close(got, want, atol=ATOL, rtol=1e-4)


def test_view_refuses_an_unpatched_model(tokenizer):
    model = tiny_model("llama", layers=2)
    _, packets = blocks(model, tokenizer, sizes=(3,))
    cache = assemble(packets, model=model)
    with pytest.raises(RuntimeError, match="patch_model"):
        cached_logits(model, cache, ids(3), [])


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_one_packet_alone_equals_plain_prefill(architecture, tokenizer, mode):
    model = tiny_model(architecture, layers=4)
    packet = build_packet(model, tokenizer, random_text(40, 3))
    question = ids(6)
    with torch.no_grad():
        plain = model(torch.tensor([[*packet.token_ids, *question]])).logits[0, 40:]
    with patched(model):
        got = cached_logits(model, assemble([packet], model=model, mode=mode), question, [])
    torch.testing.assert_close(got, plain, atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("offset", [0, 1, 63, 1000, 4000])
def test_one_packet_at_an_offset_equals_a_forward_at_those_positions(architecture, tokenizer, offset):
    model = tiny_model(architecture, layers=3)
    packet = build_packet(model, tokenizer, random_text(20, 3))
    question = ids(4)
    embeds = embed(model, [*packet.token_ids, *question])
    want = masked_logits(model, embeds, block_mask([24]), first_position=offset)[20:]
    cache = KVCache(model.config)
    cache.set_segments([[Segment(*packet.layer(i), offset)] for i in range(3)], offset + 20)
    with patched(model):
        got = cached_logits(model, cache, question, [])
    torch.testing.assert_close(got, want, atol=5 * ATOL, rtol=1e-3)  # the model rounds its own angles at far positions


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize(("k", "anchors"), [(1, 1), (3, 1), (5, 1), (3, 4), (3, 0)])
def test_packets_under_speed_equal_a_masked_forward(tokenizer, mode, k, anchors):
    model = patch_model(tiny_model("llama", layers=6), k=k, anchor_tokens=anchors)
    adapter = PacketAdapter.for_model(model, 2, 3)
    preamble, packets = blocks(model, tokenizer, adapter)
    assert {block.k for block in (preamble, *packets)} == {k}
    check(model, [preamble, *packets], adapter, mode)
    check(model, [None, *packets], adapter, mode)


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_every_architecture_under_speed(architecture, tokenizer, mode):
    model = patch_model(tiny_model(architecture, layers=5), k=3)
    preamble, packets = blocks(model, tokenizer)
    check(model, [preamble, *packets], None, mode)


def test_packet_for_another_depth_than_the_patched_one(tokenizer):
    model = tiny_model("llama", layers=6)
    text = random_text(9, 1)
    whole, shallow = build_packet(model, tokenizer, text), build_packet(model, tokenizer, text, k=4)
    patch_model(model, k=2)
    again, patched_depth = build_packet(model, tokenizer, text, k=4), build_packet(model, tokenizer, text)
    assert build_packet(model, tokenizer, text, k=6).k is None
    assert (whole.k, shallow.k, again.k, patched_depth.k) == (None, 4, 4, 2)
    assert (shallow.depth, shallow.anchor_keys.shape[0]) == (4, 2)
    for packet in (shallow, again, patched_depth):
        torch.testing.assert_close(packet.keys, whole.keys[: packet.k], atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(packet.values, whole.values[: packet.k], atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(packet.anchor_keys[:, :, 0], whole.keys[packet.k :, :, 0], atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(packet.anchor_values[:, :, 0], whole.values[packet.k :, :, 0], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_order_and_repetition(tokenizer, mode):
    model = patch_model(tiny_model("llama", layers=3))
    preamble, (a, b, c) = blocks(model, tokenizer, sizes=(7, 9, 12))
    first = check(model, [preamble, a, b, c], None, mode)
    second = check(model, [preamble, c, a, b], None, mode)
    assert (first - second).abs().max() > 1e-2, "another order is another prompt"
    check(model, [preamble, a, a, b, a], None, mode)


def test_same_packet_twice_moves_keys_and_not_values(tokenizer):
    model = patch_model(tiny_model("llama", layers=3))
    packet = build_packet(model, tokenizer, random_text(8, 1))
    cache = assemble([packet, packet], model=model, mode="copy")
    for index, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys[0, :, :8], packet.keys[index]), "offset 0 is bit-exact"
        assert torch.equal(layer.values[0, :, :8], layer.values[0, :, 8:])
        assert not torch.isclose(layer.keys[0, :, :8], layer.keys[0, :, 8:]).all()
    view = assemble([packet, packet], model=model, mode="view")
    for index, layer in enumerate(view.layers):
        assert [segment.offset for segment in layer.segments] == [0, 8]
        for segment in layer.segments:
            assert segment.key.data_ptr() == packet.keys[index].data_ptr(), "nothing is copied"
            assert segment.value.data_ptr() == packet.values[index].data_ptr()


def test_accounting_and_survival_of_an_update(tokenizer):
    model = patch_model(tiny_model("llama", layers=3))
    adapter = PacketAdapter.for_model(model, 2, 1)
    preamble, packets = blocks(model, tokenizer, adapter, sizes=(4, 6))
    token = 2 * 3 * 2 * 16 * 4  # bytes: K and V, layers, heads, head_dim, float32
    for mode in ("view", "copy"):
        cache = assemble(packets, model=model, preamble=preamble, mode=mode, capacity=64)
        total = preamble.length + sum(p.length for p in packets)
        assert total == 5 + 7 + 9
        assert cache.get_seq_length() == len(cache.prefix_ids) == total
        assert cache.kv_bytes() == total * token
        assert cache.allocated_bytes() == (0 if mode == "view" else 64 * token)
        cached_logits(model, cache, ids(3), ids(2))
        assert cache.get_seq_length() == total + 5
        assert cache.kv_bytes() == (total + 5) * token
        assert cache.allocated_bytes() == ((64 - total) if mode == "view" else 64) * token
    twice = assemble([packets[0], packets[0]], model=model)
    assert twice.kv_bytes() in (packets[0].kv_bytes, 2 * packets[0].kv_bytes)


def test_prefix_ids_have_the_pad_id_for_soft_tokens(tokenizer):
    model = tiny_model("llama", layers=2)
    model.generation_config.pad_token_id = 7
    adapter = PacketAdapter.for_model(model, 2, 1)
    preamble, (packet,) = blocks(model, tokenizer, adapter, sizes=(3,))
    cache = assemble([packet], model=model, preamble=preamble)
    assert cache.prefix_ids == [*preamble.token_ids, 7, 7, *packet.token_ids, 7]


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("k", [None, 2])
def test_no_block_at_all_is_an_empty_cache(mode, k):
    model = patch_model(tiny_model("llama", layers=3), k=k)
    cache = assemble([], model=model, mode=mode)
    assert cache.get_seq_length() == 0 and cache.prefix_ids == []
    question = ids(6)
    got = cached_logits(model, cache, question, [])[-1]
    plain = unpatch_model(model)(torch.tensor([question])).logits[0, -1]
    if k is None:
        torch.testing.assert_close(got, plain, atol=ATOL, rtol=1e-4)


def test_only_a_preamble(tokenizer):
    model = patch_model(tiny_model("llama", layers=3))
    preamble = build_preamble(model, tokenizer, random_text(6, 1))
    check(model, [preamble])


def test_packets_may_come_from_a_generator_and_files(tokenizer, tmp_path):
    model = patch_model(tiny_model("llama", layers=3))
    preamble, packets = blocks(model, tokenizer)
    for index, packet in enumerate(packets):
        packet.save(tmp_path / f"{index}.safetensors")
    loaded = [type(p).load(tmp_path / f"{i}.safetensors") for i, p in enumerate(packets)]
    one = cached_logits(model, assemble((p for p in packets), model=model, preamble=preamble), ids(4), ids(2))
    two = cached_logits(model, assemble(iter(loaded), model=model, preamble=preamble), ids(4), ids(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tokenizer, dtype):
    model = patch_model(tiny_model("llama", layers=3, dtype=dtype))
    reference = tiny_model("llama", layers=3)
    reference.load_state_dict(model.state_dict())
    preamble, packets = blocks(model, tokenizer)
    question, answer = ids(5), ids(3, 1)
    want = expected(reference, [preamble, *packets], question, answer)
    spread = want.std()
    for mode in ("view", "copy"):
        cache = assemble(packets, model=model, preamble=preamble, mode=mode)
        got = cached_logits(model, cache, question, answer).float()
        # rounding of a whole model: wrong positions or masks give errors of the size of the spread itself
        assert (got - want).abs().max() < (0.25 if dtype == torch.bfloat16 else 0.05) * spread


def test_packets_with_removed_tokens(tokenizer):
    """Every head keeps tokens of its own; survivors stay at their positions, and the packet takes all of its places."""
    model = patch_model(tiny_model("llama", layers=3))
    packets, masks = [], []
    for index in range(2):
        packet = build_packet(model, tokenizer, random_text(10, index))
        kept = torch.rand(3, 2, 10).argsort(-1)[..., :4]  # in any order, as presses leave them
        rows = kept[..., None].expand(3, 2, 4, 16)
        masks.append(torch.zeros(3, 2, 10, dtype=torch.bool).scatter(2, kept, True))
        parts = {"keys": packet.keys.gather(2, rows), "values": packet.values.gather(2, rows)}
        packets.append(changed(packet, positions=kept.int(), press={"name": "random"}, **parts))
    question, answer = ids(4), ids(3, 1)
    total = 20 + 7
    per_layer = []
    for layer in range(3):
        seen = block_mask([10, 10, 7]).expand(4, total, total).clone()
        for head in range(4):  # two query heads share a KV head
            seen[head, 20:, :20] &= torch.cat([mask[layer, head // 2] for mask in masks])
        per_layer.append(seen)
    embeds = embed(model, [*packets[0].token_ids, *packets[1].token_ids, *question, *answer])
    want = masked_logits(tiny_model("llama", layers=3), embeds, per_layer)[20:]
    cache = assemble(packets, model=model)
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(cached_logits(model, cache, question, answer), want, atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_packets_may_go_once_the_cache_is_there(tokenizer, tmp_path, mode):
    model = patch_model(tiny_model("llama", layers=3))
    _, packets = blocks(model, tokenizer)
    want = cached_logits(model, assemble(packets, model=model, mode=mode), ids(4), ids(2))
    for index, packet in enumerate(packets):
        packet.save(tmp_path / str(index))
        packets[index] = type(packet).load(tmp_path / str(index))
    cache = assemble(packets, model=model, mode=mode)
    packets.clear()
    for file in tmp_path.iterdir():
        file.unlink()
    gc.collect()
    _rubbish = [torch.full((1000,), float("nan")) for _ in range(100)]
    assert torch.equal(cached_logits(model, cache, ids(4), ids(2)), want)


def test_rounded_frequencies_are_not_used(tokenizer):
    model = tiny_model("llama", layers=2)
    model.model.rotary_emb.bfloat16()
    packet = build_packet(model, tokenizer, random_text(5, 1))
    with pytest.raises(ValueError, match="rounded by a cast"):
        assemble([packet], model=model, mode="copy")
    clean = build_packet(tiny_model("llama", layers=2), tokenizer, random_text(5, 1))
    torch.testing.assert_close(packet.keys, clean.keys, atol=5e-5, rtol=1e-5)
    patch_model(model)
    check(model, [None, packet, packet], None, "copy")
