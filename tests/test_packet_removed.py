# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets with removed tokens in use, against one forward of the unpatched model with a mask for every head."""

from __future__ import annotations

import itertools

import pytest
import torch
from kvspeed import generate, patch_model, speed_mask, unpatch_model
from kvspeed.models import base_model, cache_argument
from kvspeed.packet import PacketAdapter, assemble, build_packet, build_preamble, build_single
from kvspeed.packet.press import RandomPress, press_from_name
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

ATOL = 1e-4  # logits have a standard deviation of 1 to 4; float32 errors are 20 times smaller
QUESTION, ANSWER = 5, 3


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(bos=True)


def ids(count, seed=0):
    return torch.randint(100, 512, (count,), generator=torch.Generator().manual_seed(77 + seed)).tolist()


def blocks(model, tokenizer, adapter=None, *, ratio=0.5, k=None, whole=False):
    """A preamble, and packets of which one lost tokens, one kept them and one occurs twice."""
    seed = int(torch.randint(10**6, ()))
    preamble = build_preamble(model, tokenizer, random_text(4, seed), k=k)
    press = RandomPress(ratio, protect_soft=not whole, seed=seed)
    packets = [build_packet(model, tokenizer, random_text(n, seed + n), adapter, k=k, press=press) for n in (13, 1, 30)]
    packets.insert(1, build_packet(model, tokenizer, random_text(6, seed + 6), adapter, k=k))
    return [preamble, *packets, packets[0]]


def shuffled(packet):
    """The packet with its survivors in another order, as other presses might leave them."""
    order = torch.rand(packet.positions.shape).argsort(-1)
    rows = order[..., None].expand_as(packet.keys)
    positions = packet.positions.gather(-1, order)
    return changed(packet, keys=packet.keys.gather(2, rows), values=packet.values.gather(2, rows), positions=positions)


def seen_by_questions(parts, heads, depth):
    """bool `[depth, H_q, prefix]`: which places of the packets hold a token of the head."""
    columns = []
    for part in parts:
        if part.positions is None:
            columns.append(torch.ones(depth, heads, part.length, dtype=torch.bool))
        else:
            there = torch.zeros(depth, part.keys.shape[1], part.length, dtype=torch.bool)
            there.scatter_(2, part.positions.long(), True)
            columns.append(there.repeat_interleave(heads // part.keys.shape[1], 1))
    return torch.cat(columns, 2)


def expected(model, parts, question, answer, adapter=None, *, k=None):
    """The oracle's logits of question and answer after the blocks `parts`: packets were computed whole, then cut."""
    config, layers = model.config, len(model.model.layers)
    lengths = [part.length for part in parts] + [len(question) + len(answer)]
    prefix, total = sum(lengths[:-1]), sum(lengths)
    there = seen_by_questions(parts, config.num_attention_heads, k or layers)
    masks = []
    near = torch.ones(total, total, dtype=torch.bool)
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):  # else the oracle adds it
        near = near.triu(1 - config.sliding_window)
    for layer in range(layers):
        mask = (block_mask(lengths) & near).expand(config.num_attention_heads, total, total).clone()
        mask[:, prefix:, :prefix] &= there[min(layer, len(there) - 1)][:, None]
        masks.append(mask)
    embeds = torch.cat([*(packet_embeds(model, p, adapter) for p in parts), embed(model, [*question, *answer])])
    upper = (k, speed_mask(total - len(answer), total)) if k is not None else None
    return masked_logits(model, embeds, masks, upper=upper)[prefix:]


def padded(model, tokens, mask, cache):
    """Logits of rows with left padding after a cache."""
    name = cache_argument(base_model(model))
    positions = (mask.cumsum(1) - 1)[:, -tokens.shape[1] :]
    given = dict(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True)
    return model(**given, **{name: cache}).logits


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "smollm3", "phi3"])
def test_equals_the_masked_model(tokenizer, architecture, k, mode):
    plain = tiny_model(architecture, layers=4)
    model = patch_model(tiny_model(architecture, layers=4), k)
    adapter = PacketAdapter.for_model(model, header=3, trailer=2)
    parts = blocks(model, tokenizer, adapter, k=k, whole=True)
    parts = [shuffled(part) if part.positions is not None else part for part in parts]
    question, answer = ids(QUESTION), ids(ANSWER, 1)
    want = expected(plain, parts, question, answer, adapter, k=k)
    cache = assemble(parts[1:], model=model, preamble=parts[0], mode=mode)
    length = sum(part.length for part in parts)
    assert cache.get_seq_length() == length == len(cache.prefix_ids)
    got = cached_logits(model, cache, question, answer)
    torch.testing.assert_close(got, want[-len(got) :], atol=ATOL, rtol=1e-4)
    stored = sum(part.keys.shape[2] for part in parts)
    assert stored < length and cache.layer(0).length == QUESTION + ANSWER + (stored if mode == "copy" else 0)


def test_many_question_tokens_and_rows(tokenizer):
    """More tokens than the kernel takes on a CPU, and left padding after what was copied or read in place."""
    plain = tiny_model("llama", layers=3)
    model = patch_model(tiny_model("llama", layers=3))
    parts = blocks(model, tokenizer)
    long, short = ids(80), ids(9, 1)
    rows = [expected(plain, parts, question, [])[-1] for question in (long, short)]
    length = sum(part.length for part in parts)
    tokens = torch.tensor([long, [0] * 71 + short])
    mask = torch.cat([torch.ones(2, length, dtype=torch.long), (tokens != 0).long()], 1)
    for mode, grad in itertools.product(("view", "copy"), (False, True)):  # where gradients are wanted, no kernel runs
        cache = assemble(parts[1:], model=model, preamble=parts[0], mode=mode)
        with torch.set_grad_enabled(grad):
            got = padded(model, tokens, mask, cache)
        for row, want in enumerate(rows):
            torch.testing.assert_close(got[row, -1], want, atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2])
def test_copies_serve_the_unpatched_model(tokenizer, rows):
    """transformers' own code on the copied cache: positions count what was removed, masks and lengths what is there."""
    model = patch_model(tiny_model("llama", layers=3))
    parts = blocks(model, tokenizer)
    question, answer = ids(QUESTION), ids(ANSWER, 1)
    want = expected(tiny_model("llama", layers=3), parts, question, answer)
    cache = assemble(parts[1:], model=model, preamble=parts[0], mode="copy")
    unpatch_model(model)
    if rows == 2:
        cache.batch_repeat_interleave(2)
    name = cache_argument(base_model(model))
    pieces = [question, *([token] for token in answer)]
    found = [model(input_ids=torch.tensor([piece] * rows), use_cache=True, **{name: cache}).logits for piece in pieces]
    for row in torch.cat(found, 1):
        torch.testing.assert_close(row, want, atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("k", [None, 2])
def test_generate_in_both_modes(tokenizer, k):
    model = patch_model(tiny_model("llama", layers=4), k)
    tokenizer = tiny_tokenizer(bos=True, template=None)
    parts = blocks(model, tokenizer, k=k)
    questions = [random_text(5, 1), random_text(11, 2)]
    answers = {
        mode: generate(model, tokenizer, questions, parts[1:], preamble=parts[0], mode=mode, max_new_tokens=6)
        for mode in ("view", "copy")
    }
    alone = [generate(model, tokenizer, q, parts[1:], preamble=parts[0], max_new_tokens=6) for q in questions]
    assert answers["view"] == answers["copy"] == alone and all(alone)
    for mode in ("view", "copy"):
        options = dict(mode=mode, max_new_tokens=6, cuda_graph=True)
        assert generate(model, tokenizer, questions, parts[1:], preamble=parts[0], **options) == alone
    if k is None:
        unpatch_model(model)
        copied = generate(model, tokenizer, questions, parts[1:], preamble=parts[0], mode="copy", max_new_tokens=6)
        assert copied == alone


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "mistral"])
def test_sliding_windows(tokenizer, architecture, attention):
    if (architecture, attention) == ("gemma2", "sdpa"):
        pytest.skip("transformers has no softcap in sdpa")
    options = {"sliding_window": 24} if architecture == "mistral" else {}
    plain = tiny_model(architecture, layers=4, attn_implementation="eager", **options)
    model = patch_model(tiny_model(architecture, layers=4, attn_implementation=attention, **options))
    adapter = PacketAdapter.for_model(model, header=2, trailer=1)
    parts = blocks(model, tokenizer, adapter)
    question, answer = ids(30), ids(ANSWER, 1)  # the question alone is longer than the window
    want = expected(plain, parts, question, answer, adapter)
    cache = assemble(parts[1:], model=model, preamble=parts[0])
    got = cached_logits(model, cache, question, answer)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="mode: 'copy' leaves no gaps"):
        assemble(parts[1:], model=model, mode="copy")
    with pytest.raises(ValueError, match="leave cuda_graph out"):
        generate(model, tokenizer, "w200", parts[1:], preamble=parts[0], max_new_tokens=3, cuda_graph=True)


def test_sliding_windows_and_padded_rows(tokenizer):
    plain = tiny_model("gemma3_text", layers=3, attn_implementation="eager")
    model = patch_model(tiny_model("gemma3_text", layers=3))
    parts = blocks(model, tokenizer)
    long, short = ids(40), ids(3, 1)
    rows = [expected(plain, parts, question, [])[-1] for question in (long, short)]
    tokens = torch.tensor([long, [0] * 37 + short])
    mask = torch.cat([torch.ones(2, sum(p.length for p in parts), dtype=torch.long), (tokens != 0).long()], 1)
    cache = assemble(parts[1:], model=model, preamble=parts[0])
    got = padded(model, tokens, mask, cache)
    for row, want in enumerate(rows):
        torch.testing.assert_close(got[row, -1], want, atol=2e-4, rtol=1e-4)


def test_masks_that_hide_packets(tokenizer):
    """A mask over the packets themselves leaves the kernels; what it hides and what was removed are both unseen."""
    for attention in ("sdpa", "eager"):
        plain = tiny_model("llama", layers=3, attn_implementation="eager")
        model = patch_model(tiny_model("llama", layers=3, attn_implementation=attention))
        parts = blocks(model, tokenizer)
        length = sum(part.length for part in parts)
        hidden = torch.randint(0, length, (12,))
        question = ids(QUESTION)
        mask = torch.ones(1, length + QUESTION, dtype=torch.long)
        mask[:, hidden] = 0
        there = seen_by_questions(parts, 4, 3)
        total = length + QUESTION
        masks = []
        for layer in range(3):
            seen = block_mask([*(p.length for p in parts), QUESTION]).expand(4, total, total).clone()
            seen[:, length:, :length] &= there[layer][:, None]
            seen[:, length:, hidden] = False
            masks.append(seen)
        embeds = torch.cat([*(packet_embeds(model, p) for p in parts), embed(model, question)])
        want = masked_logits(plain, embeds, masks)[length:]
        cache = assemble(parts[1:], model=model, preamble=parts[0])
        name = cache_argument(base_model(model))
        got = model(input_ids=torch.tensor([question]), attention_mask=mask, use_cache=True, **{name: cache}).logits[0]
        torch.testing.assert_close(got, want, atol=ATOL, rtol=1e-4)


def test_the_single_cache(tokenizer):
    """One causal block of everything; its preamble stays whole, and as many text tokens go as from packets."""
    plain = tiny_model("llama", layers=3)
    model = patch_model(tiny_model("llama", layers=3))
    preamble = build_preamble(model, tokenizer, random_text(9, 1))
    texts = [random_text(n, n) for n in (12, 20, 8)]
    whole = build_single(model, tokenizer, texts, preamble=preamble)
    assert whole.positions is None and whole.length == preamble.length + 40
    assert whole.token_ids == preamble.token_ids + sum((build_packet(model, tokenizer, t).token_ids for t in texts), ())
    for name in ("random-30", "cur-50", "tova-10", "leverage-90"):
        block = build_single(model, tokenizer, texts, preamble=preamble, press=press_from_name(name))
        kept = int(40 * (1 - block.press["ratio"]))
        assert block.keys.shape[2] == preamble.length + kept and block.press["protected"] == preamble.length
        head = torch.arange(preamble.length, dtype=torch.int32)
        assert torch.equal(block.positions[..., : preamble.length], head.expand(3, 2, -1))
        question, answer = ids(QUESTION), ids(ANSWER, 1)
        want = expected(plain, [block], question, answer)
        for mode in ("view", "copy"):
            cache = assemble([], model=model, preamble=block, mode=mode)
            torch.testing.assert_close(cached_logits(model, cache, question, answer), want, atol=ATOL, rtol=1e-4)


def test_turns_crops_and_rows(tokenizer):
    """What happens to any cache must work on one that lacks tokens: going back, more rows, a second turn."""
    plain = tiny_model("llama", layers=3)
    model = patch_model(tiny_model("llama", layers=3))
    parts = blocks(model, tokenizer)
    length = sum(part.length for part in parts)
    question, answer, wrong = ids(QUESTION), ids(ANSWER, 1), ids(4, 2)
    want = expected(plain, parts, question, answer)
    for mode in ("view", "copy"):
        cache = assemble(parts[1:], model=model, preamble=parts[0], mode=mode)
        cached_logits(model, cache, wrong, ids(2, 3))
        cache.crop(length)
        assert cache.get_seq_length() == length
        torch.testing.assert_close(cached_logits(model, cache, question, answer), want, atol=ATOL, rtol=1e-4)
        with pytest.raises(ValueError, match="cannot crop"):
            cache.crop(length - 1)
        cache.crop(-(QUESTION + ANSWER))
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        name = cache_argument(base_model(model))
        got = model(input_ids=torch.tensor([question] * 3), use_cache=True, **{name: cache}).logits
        for row in got:
            torch.testing.assert_close(row, want[:QUESTION], atol=ATOL, rtol=1e-4)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(
            cached_logits(model, cache, question, answer), cached_logits(model, _new(model), question, answer)
        )


def _new(model):
    return assemble([], model=model)


def test_files_keep_the_survivors(tokenizer, tmp_path):
    model = patch_model(tiny_model("llama", layers=3), 2)
    packet = blocks(model, tokenizer, k=2)[1]
    packet.save(tmp_path / "packet")
    loaded = type(packet).load(tmp_path / "packet")
    assert torch.equal(loaded.positions, packet.positions) and loaded.press == packet.press
    assert torch.equal(loaded.keys, packet.keys) and loaded.length == packet.length
    doubled = packet.positions.clone()
    doubled[1, 1, 0] = doubled[1, 1, 2]
    with pytest.raises(ValueError, match="same position"):
        changed(packet, positions=doubled)


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_the_kernels_of_gpus(tokenizer, mode):
    """The CUDA kernels, run by the emulator, on what presses leave."""
    from backends import running

    options = dict(layers=2, head_dim=64, dtype=torch.bfloat16)
    model = patch_model(tiny_model("qwen3", **options))
    parts = blocks(model, tokenizer)
    question, answer = ids(QUESTION), ids(ANSWER, 1)
    want = cached_logits(model, assemble(parts[1:], model=model, preamble=parts[0], mode=mode), question, answer)
    with running("simt"):
        cache = assemble(parts[1:], model=model, preamble=parts[0], mode=mode)
        got = cached_logits(model, cache, question, answer)
    assert (got.float() - want.float()).abs().max() < 0.1 * want.float().std()
    assert not torch.equal(got, want)  # the emulator did run


@pytest.mark.parametrize("storage", ["int8", "fp8", "bf16"])
def test_fewer_tokens_in_fewer_bits(tokenizer, storage, tmp_path):
    """Removing tokens and storing what is left in fewer bits go together, in both modes and through a file."""
    from kvspeed.packet.quantise import quantise, storage_dtype

    plain = tiny_model("llama", layers=3)
    model = patch_model(tiny_model("llama", layers=3))
    parts = blocks(model, tokenizer)
    small = [quantise(part, storage_dtype(storage)) for part in parts]
    for index, part in enumerate(small):
        part.save(tmp_path / str(index))
    small = [type(part).load(tmp_path / str(index)) for index, part in enumerate(small)]
    question, answer = ids(QUESTION), ids(ANSWER, 1)
    want = expected(plain, parts, question, answer)
    found = [
        cached_logits(model, assemble(small[1:], model=model, preamble=small[0], mode=mode), question, answer)
        for mode in ("view", "copy")
    ]
    torch.testing.assert_close(found[0], found[1], atol=ATOL, rtol=1e-4)
    error = (found[0] - want).abs().mean() / want.std()
    assert 0 < error < 0.2  # wrong positions or scales give errors of the size of the spread itself
