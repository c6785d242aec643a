# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Conversations under SPEED: several turns on one cache, and taking tokens back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kvspeed import KVCache, SpeedSpec
from speed_tools import (
    CACHE,
    LAYERS,
    NEW,
    K,
    answer,
    close,
    conversation,
    ids_of,
    left_padded,
    oracle,
    plain,
    poison,  # noqa: F401
    speedy,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "boundary-keep": {"boundary": "keep"},
    "three-anchors": {"anchor_tokens": 3},
    "no-anchor": {"anchor_tokens": 0},
    "anchors-to-the-second-prompt": {"anchor_tokens": 19},
    "all-anchors": {"anchor_tokens": 90},
    "self": {"upper_attention": "self"},
    "keep-three": {"boundary": "keep", "anchor_tokens": 3},
}
options = pytest.mark.parametrize("option", OPTIONS)
turns = pytest.mark.parametrize("turns", ["keep", "reset"])
# Chunked prefill onto a filled cache: transformers 4.57 begins at its first token again.
CHUNKS: list[dict[str, Any]] = [{}, {"prefill_chunk_size": 4}] if NEW else [{}]


def talk(
    model: Any, prompt: torch.Tensor, news: list[int], n: int = 4, mask: torch.Tensor | None = None, **kwargs: Any
) -> list[Any]:
    """One answer to `prompt`, then one to each `news` more tokens, on one cache. Returns the answers."""
    found = [answer(model, prompt, attention_mask=mask, n=n, **({} if mask is None else kwargs))]
    for new in news:
        more = ids_of(new, batch=prompt.shape[0]) if new else torch.zeros(prompt.shape[0], 0, dtype=torch.long)
        whole = torch.cat([found[-1].sequences, more], 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], whole.shape[1] - mask.shape[1])], 1)
        found.append(answer(model, whole, attention_mask=mask, n=n, **{CACHE: found[-1].cache}, **kwargs))
    return found


def shape(prompt: int, news: list[int], n: int = 4) -> list[tuple[int, int]]:
    """A turn's last answer token is not cached when the next turn begins, so it is prompt of that one."""
    if not news:
        return [(prompt, n)]
    return [(prompt, n - 1), *[(1 + new, n - 1) for new in news[:-1]], (1 + news[-1], n)]


def held(
    architecture: str, found: Any, turn_shape: list[tuple[int, int]], *, skip: int = 0, row: int = 0, **opts: Any
) -> None:
    """The last turn's logits of a row (whose first `skip` slots are padding) against the oracle."""
    sequence = found.sequences[row, skip:]
    n = turn_shape[-1][1]
    wanted = oracle(plain(architecture), sequence, conversation(*turn_shape), **opts)
    close(found.logits[row], wanted[-n - 1 : -1])


@options
@turns
@pytest.mark.parametrize("architecture", ["smollm3", "gemma2", "gemma3_text"])
def test_a_second_turn(architecture: str, turns: str, option: str) -> None:
    opts = {**OPTIONS[option], "turns": turns}
    found = talk(speedy(architecture, **opts), ids_of(13), [9])
    held(architecture, found[0], shape(13, []), **opts)
    held(architecture, found[1], shape(13, [9]), **opts)


@options
@turns
def test_four_turns_some_of_them_empty(turns: str, option: str) -> None:
    """A turn without new tokens has one all the same: the last answer token."""
    opts = {**OPTIONS[option], "turns": turns}
    for chunks in CHUNKS:
        found = talk(speedy("llama", **opts), ids_of(7), [5, 0, 8], n=3, **chunks)
        for i in range(4):
            held("llama", found[i], shape(7, [5, 0, 8][:i], 3), **opts)


@pytest.mark.skipif(NEW, reason="transformers 5 chunks rightly")
def test_what_transformers_would_chunk_wrongly_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_mask covers"):
        talk(speedy("llama"), ids_of(7), [9], prefill_chunk_size=4)
    prompts, mask = left_padded([ids_of(9)[0], ids_of(4)[0]])
    with pytest.raises(ValueError, match="with padded rows"):
        answer(speedy("llama"), prompts, attention_mask=mask, prefill_chunk_size=4)


@options
def test_reset_is_encoding_afresh(option: str) -> None:
    """Not the logits alone: the caches of both are alike, layer by layer."""
    model = speedy("qwen3", **OPTIONS[option], turns="reset")
    found = talk(model, ids_of(13), [9])[1]
    afresh = answer(model, found.sequences[:, :26], n=4)
    close(found.logits, afresh.logits)
    assert found.cache.kv_bytes() == afresh.cache.kv_bytes()
    for one, two in zip(found.cache.layers, afresh.cache.layers, strict=True):
        close(one.keys, two.keys)
        close(one.values, two.values)


@options
@turns
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_turns_of_a_left_padded_batch(architecture: str, turns: str, option: str) -> None:
    opts = {**OPTIONS[option], "turns": turns}
    rows = [ids_of(n)[0] for n in (13, 6, 1)]
    prompts, mask = left_padded(rows)
    for news in ([6], [2, 5]):
        found = talk(speedy(architecture, **opts), prompts, news, mask=mask)
        for i, row in enumerate(rows):
            held(architecture, found[-1], shape(len(row), news), skip=13 - len(row), row=i, **opts)


@turns
def test_the_mask_may_be_left_out_later(turns: str) -> None:
    """The cache remembers the padding of its rows."""
    model = speedy("llama", turns=turns, boundary="keep")
    prompts, mask = left_padded([ids_of(8)[0], ids_of(3)[0]])
    first = answer(model, prompts, attention_mask=mask, n=3)
    cache = first.cache
    cache.begin_turn(15)
    ids, logits = torch.cat([first.sequences, ids_of(4, batch=2)], 1), []
    positions = (torch.arange(18) - torch.tensor([[0], [5]])).clamp(min=0)
    with torch.no_grad():
        for _ in range(3):
            new = ids[:, cache.get_seq_length() :]
            seen = positions[:, ids.shape[1] - new.shape[1] : ids.shape[1]]
            out = model(new, position_ids=seen, use_cache=True, **{CACHE: cache})
            logits.append(out.logits[:, -1])
            ids = torch.cat([ids, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
    for row, (length, skip) in enumerate(((8, 0), (3, 5))):
        tokens = conversation((length, 2), (5, 3))
        wanted = oracle(plain("llama"), ids[row, skip:], tokens, boundary="keep", turns=turns)
        close(torch.stack(logits, 1)[row], wanted[-4:-1])


@turns
@pytest.mark.parametrize("option", ["default", "boundary-keep", "three-anchors"])
def test_beams_and_lookup_in_a_second_turn(turns: str, option: str) -> None:
    opts = {**OPTIONS[option], "turns": turns}
    model = speedy("llama", **opts)
    prompt = ids_of(4).repeat(1, 3)
    first = answer(model, prompt, n=4)
    whole = torch.cat([first.sequences, prompt], 1)
    fork = copy.deepcopy(first.cache)
    lookup = dict(prompt_lookup_num_tokens=3, max_matching_ngram_size=1, eos_token_id=9999)
    # transformers 5.24 by itself would append the whole prompt to the filled cache; generation.prepare_inputs mends it.
    looked = answer(model, whole, n=8, **lookup, **{CACHE: fork})
    held("llama", looked, [(12, 3), (13, 8)], **opts)
    beams = answer(model, whole, n=4, num_beams=3, output_scores=True, **{CACHE: first.cache})
    logits = oracle(plain("llama"), beams.sequences[0], conversation((12, 3), (13, 4)), **opts)[-5:-1]
    score = logits.log_softmax(-1).gather(1, beams.sequences[0, -4:, None]).sum().item() / 4
    assert abs(score - beams.output.sequences_scores[0].item()) < 1e-4


def test_lookup_in_a_second_turn_where_the_models_own_preparation_differs() -> None:
    """Phi-3's `prepare_inputs_for_generation` has arguments in another order than transformers' own."""
    model = speedy("phi3")
    prompt = ids_of(4).repeat(1, 3)
    first = answer(model, prompt, n=4)
    whole = torch.cat([first.sequences, prompt], 1)
    lookup = dict(prompt_lookup_num_tokens=3, max_matching_ngram_size=1, eos_token_id=9999)
    held("phi3", answer(model, whole, n=8, **lookup, **{CACHE: first.cache}), [(12, 3), (13, 8)])


def test_a_copied_cache_is_a_fork() -> None:
    """The recipe for a shared conversation: deepcopy the cache, go on twice."""
    model = speedy("llama", boundary="keep")
    first = answer(model, ids_of(11), n=3)
    fork = copy.deepcopy(first.cache)
    for cache in (first.cache, fork):
        whole = torch.cat([first.sequences, ids_of(6)], 1)
        found = answer(model, whole, n=4, **{CACHE: cache})
        held("llama", found, [(11, 2), (7, 4)], boundary="keep")


@pytest.mark.parametrize("outer", [torch.inference_mode, torch.no_grad])
def test_a_cache_made_in_inference_mode_goes_on_outside_of_it(outer: Any) -> None:
    model = speedy("llama")
    with outer():
        first = answer(model, ids_of(11), n=3)
    whole = torch.cat([first.sequences.clone(), ids_of(6)], 1)
    held("llama", answer(model, whole, n=4, **{CACHE: first.cache}), [(11, 2), (7, 4)])


def test_either_name_of_the_cache_argument() -> None:
    model = speedy("llama")
    for name in ("past_key_values", "cache") if NEW else ("past_key_values",):
        first = answer(model, ids_of(11), n=3)
        whole = torch.cat([first.sequences, ids_of(6)], 1)
        held("llama", answer(model, whole, n=4, **{name: first.cache}), [(11, 2), (7, 4)])


# ---- taking tokens back ---------------------------------------------------------------------------------------------


@options
@pytest.mark.parametrize("absolute", [False, True])
def test_crop_within_the_answer(option: str, absolute: bool) -> None:
    """Two answer tokens are taken back, others put in their place."""
    model = speedy("llama", **OPTIONS[option])
    first = answer(model, ids_of(10), n=6)
    cache = first.cache  # 15 tokens
    cache.crop(13 if absolute else -2)
    assert cache.get_seq_length() == 13
    whole = torch.cat([first.sequences[:, :13], ids_of(5)], 1)
    found = answer(model, whole, n=4, **{CACHE: cache})
    held("llama", found, [(10, 3), (5, 4)], **OPTIONS[option])


@options
def test_crop_into_the_prompt(option: str) -> None:
    """Everything above k but the anchors that remain is gone."""
    model = speedy("llama", **OPTIONS[option])
    first = answer(model, ids_of(10), n=6)
    first.cache.crop(-8)
    anchors = min(7, OPTIONS[option].get("anchor_tokens", 1))
    assert [layer.keys.shape[2] for layer in first.cache.layers] == [7] * K + [anchors] * (LAYERS - K)
    whole = torch.cat([first.sequences[:, :7], ids_of(6)], 1)
    held("llama", answer(model, whole, n=4, **{CACHE: first.cache}), [(13, 4)], **OPTIONS[option])


@pytest.mark.parametrize("option", ["default", "boundary-keep", "three-anchors", "all-anchors"])
def test_crop_of_a_padded_batch(option: str) -> None:
    model = speedy("llama", **OPTIONS[option])
    rows = [ids_of(9)[0], ids_of(4)[0]]
    prompts, mask = left_padded(rows)
    first = answer(model, prompts, attention_mask=mask, n=5)
    first.cache.crop(-2)  # 11 slots: the prompts, and two answer tokens
    whole = torch.cat([first.sequences[:, :11], ids_of(4, batch=2)], 1)
    mask = torch.cat([mask, mask.new_ones(2, 6)], 1)
    found = answer(model, whole, attention_mask=mask, n=3, **{CACHE: first.cache})
    for i, row in enumerate(rows):
        tokens = [(len(row), 2), (4, 3)]
        held("llama", found, tokens, skip=9 - len(row), row=i, **OPTIONS[option])


@pytest.mark.parametrize("how", ["crop", "reset"])
@pytest.mark.parametrize("option", ["default", "boundary-keep", "three-anchors"])
def test_an_emptied_cache_is_as_good_as_new(how: str, option: str) -> None:
    """Other rows, other padding, or none."""
    model = speedy("llama", **OPTIONS[option])
    prompts, mask = left_padded([ids_of(9)[0], ids_of(4)[0]])
    for batch in (2, 1, 3):
        cache = answer(model, prompts, attention_mask=mask, n=3).cache
        cache.crop(-cache.get_seq_length()) if how == "crop" else cache.reset()
        assert cache.get_seq_length() == 0 and cache.kv_bytes() == 0
        found = answer(model, ids_of(8, batch=batch), n=3, **{CACHE: cache})
        for i in range(batch):
            held("llama", found, [(8, 3)], row=i, **OPTIONS[option])


@options
@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_moved_copied_and_chosen(option: str, padded: bool) -> None:
    """reorder_cache, batch_repeat_interleave, batch_select_indices: each row goes on as itself."""
    model = speedy("llama", **OPTIONS[option])
    rows = [ids_of(n)[0] for n in ((9, 5, 2) if padded else (9, 9, 9))]
    prompts, mask = left_padded(rows)
    for change, order in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([0])), [0]),  # the row that has no padding
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ):
        first = answer(model, prompts, attention_mask=mask, n=3)
        change(first.cache)
        whole = torch.cat([first.sequences[order], ids_of(4, batch=len(order))], 1)
        longer = torch.cat([mask[order], mask.new_ones(len(order), 7)], 1)
        found = answer(model, whole, attention_mask=longer, n=3, **{CACHE: first.cache})
        for i, row in enumerate(order):
            tokens = [(len(rows[row]), 2), (5, 3)]
            held("llama", found, tokens, skip=9 - len(rows[row]), row=i, **OPTIONS[option])


# ---- driving the model by hand --------------------------------------------------------------------------------------


@options
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_loop_of_ones_own(architecture: str, option: str) -> None:
    """begin_turn, then forwards of any sizes: what is prompt is settled by position, never by a call's length."""
    model = speedy(architecture, **OPTIONS[option])
    spec = SpeedSpec(K, **OPTIONS[option])
    ids = ids_of(30)
    tokens = conversation((17, 13))
    wanted = oracle(plain(architecture), ids[0], tokens, **OPTIONS[option])
    for cuts in ((17, 30), (16, 17, 30), (1, 2, 17, 18, 30), (5, 20, 21, 30), (30,), tuple(range(1, 31))):
        cache = KVCache(model.config, spec=spec)
        cache.begin_turn(17)
        start, seen = 0, {}
        for end in cuts:
            with torch.no_grad():
                out = model(ids[:, start:end], use_cache=True, **{CACHE: cache})
            deep = min(end - start, max(end - 16, 0))  # the boundary and the answers are the last columns
            for i in range(deep):
                seen[end - deep + i] = out.logits[0, out.logits.shape[1] - deep + i]
            start = end
        assert sorted(seen) == list(range(16, 30))
        close(torch.stack([seen[i] for i in range(16, 30)]), wanted[16:])
