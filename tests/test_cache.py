# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""KVCache by itself: a drop-in for DynamicCache, with spare room, and layers that forget what no window reaches."""

from __future__ import annotations

import copy
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed import KVCache, Segment, SpeedSpec
from speed_tools import (
    CACHE,
    LAYERS,
    NEW,
    K,
    answer,
    close,
    conversation,
    decoder,
    fresh,
    ids_of,
    left_padded,
    oracle,
    plain,
    poison,  # noqa: F401
    speedy,
)
from transformers import Cache, DynamicCache

TOKEN = 2 * 2 * 16 * 4  # bytes of one token in one layer: K and V, two heads, head dimension 16, float32


@torch.no_grad()
def fed(model: torch.nn.Module, ids: torch.Tensor, cuts: list[int], cache: Any, **kwargs: Any) -> torch.Tensor:
    """Logits of all of `ids`, given in pieces that end at `cuts`."""
    parts, start = [], 0
    for end in cuts:
        mask = kwargs.get("attention_mask")
        now = {} if mask is None else {"attention_mask": mask[:, :end]}
        if "position_ids" in kwargs:
            now["position_ids"] = kwargs["position_ids"][:, start:end]
        parts.append(model(ids[:, start:end], use_cache=True, **{CACHE: cache}, **now).logits)
        start = end
    return torch.cat(parts, 1)


# ---- a drop-in for DynamicCache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("patched", [False, True])
def test_it_equals_a_dynamic_cache(architecture: str, patched: bool) -> None:
    """In generate, in forwards of several sizes, in padded batches; in a model that knows nothing of it too."""
    model = fresh(architecture)
    ids = ids_of(40)
    with torch.no_grad():
        whole = model(ids).logits
    prompts, mask = left_padded([ids_of(30)[0], ids_of(4)[0]])
    wanted = answer(model, prompts, attention_mask=mask)
    if patched:
        kvspeed.patch_model(model, None)
    cache = KVCache(model.config, capacity=3)
    assert isinstance(cache, DynamicCache) and isinstance(cache, Cache)
    close(fed(model, ids, [25, 26, 27, 33, 40], cache), whole)
    assert cache.get_seq_length() == 40 and [cache.get_seq_length(i) for i in range(LAYERS)] == [40] * LAYERS
    found = answer(model, prompts, attention_mask=mask, **{CACHE: KVCache(model.config)})
    close(found.logits, wanted.logits)
    assert isinstance(found.cache, KVCache)


@pytest.mark.parametrize("patched", [False, True])
def test_beams_and_lookup_like_a_dynamic_cache(patched: bool) -> None:
    model, prompt = fresh("qwen2"), ids_of(4).repeat(1, 4)
    kinds: list[dict[str, Any]] = [
        {"num_beams": 3, "num_return_sequences": 2, "output_scores": True},
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1, "eos_token_id": 9999},
    ]
    wanted = [answer(model, prompt, n=7, **kind) for kind in kinds]
    if patched:
        kvspeed.patch_model(model, None)
    for kind, right in zip(kinds, wanted, strict=True):
        found = answer(model, prompt, n=7, **{CACHE: KVCache(model.config)}, **kind)
        assert torch.equal(found.sequences, right.sequences)
    close(
        answer(model, prompt, n=7, **{CACHE: KVCache(model.config)}, **kinds[0]).output.sequences_scores,
        wanted[0].output.sequences_scores,
    )


def test_the_interface_of_transformers() -> None:
    model, ids = fresh("llama"), ids_of(9, batch=2)
    cache, other = KVCache(model.config), DynamicCache(config=model.config)
    fed(model, ids, [9], cache)
    fed(model, ids, [9], other)
    for name in ("is_compileable", "max_batch_size", "is_sliding"):
        if hasattr(other, name):
            assert getattr(cache, name) == getattr(other, name), name
    assert len(cache.layers) == len(other.layers) == LAYERS
    assert len(list(cache)) == LAYERS
    for one, two, part in zip(cache.layers, other.layers, list(cache), strict=True):
        close(one.keys, two.keys)
        close(one.values, two.values)
        assert torch.equal(part[0], one.keys) and torch.equal(part[1], one.values)
    assert cache.get_mask_sizes(4, 0) == (13, 0)
    assert "SegmentLayer" in repr(cache)
    fork = copy.deepcopy(cache)
    fork.crop(-4)
    assert fork.get_seq_length() == 5 and cache.get_seq_length() == 9


@pytest.mark.parametrize("padded", [False, True])
def test_crop_reorder_repeat_and_select(padded: bool) -> None:
    """Each against a DynamicCache that had the same done to it, by the next token's logits."""
    model = fresh("llama")
    lengths = (9, 5, 2) if padded else (9, 9, 9)
    prompts, mask = left_padded([ids_of(n)[0] for n in lengths])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    changes: list[tuple[Any, list[int], int]] = [
        (lambda c: c.crop(-3 if NEW or isinstance(c, KVCache) else 6), [0, 1, 2], 6),
        (lambda c: c.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0], 9),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], 9),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1], 9),
    ]
    for change, order, kept in changes:
        results = []
        for patched in (None, False, True):
            cache = DynamicCache(config=model.config) if patched is None else KVCache(model.config)
            kvspeed.patch_model(model, None) if patched else kvspeed.unpatch_model(model)
            fed(model, prompts, [9], cache, attention_mask=mask, position_ids=positions)
            change(cache)
            more = torch.arange(20, 22).expand(len(order), 2)
            longer = torch.cat([mask[order, :kept], mask.new_ones(len(order), 2)], 1)
            places = positions[order, kept - 1 : kept] + torch.arange(1, 3)
            with torch.no_grad():
                kwargs = {CACHE: cache, "attention_mask": longer, "position_ids": places}
                results.append(model(more, use_cache=True, **kwargs).logits)
            assert cache.get_seq_length() == kept + 2
        close(results[1], results[0])
        close(results[2], results[0])


# ---- room and accounting --------------------------------------------------------------------------------------------


def test_appending_does_not_move_what_is_there() -> None:
    model, ids = speedy("llama", None), ids_of(40)
    cache = KVCache(model.config, capacity=40)
    fed(model, ids, [10], cache)
    places = [layer._key.data_ptr() for layer in cache.layers]
    fed(model, torch.cat([ids[:, 10:]], 1), list(range(1, 31)), cache)
    assert [layer._key.data_ptr() for layer in cache.layers] == places
    assert cache.allocated_bytes() == cache.kv_bytes() == 40 * LAYERS * TOKEN
    fed(model, ids[:, :1], [1], cache)  # one more than reserved
    assert [layer._key.data_ptr() for layer in cache.layers] != places
    assert cache.kv_bytes() == 41 * LAYERS * TOKEN < cache.allocated_bytes()


def test_reserve_keeps_what_is_there() -> None:
    model, ids = speedy("llama", None), ids_of(30)
    cache = KVCache(model.config)
    first = fed(model, ids[:, :10], [10], cache)
    cache.reserve(500)
    assert cache.get_seq_length() == 10 and cache.kv_bytes() == 10 * LAYERS * TOKEN
    assert cache.allocated_bytes() == 500 * LAYERS * TOKEN
    cache.reserve(20)  # never shrinks
    assert cache.allocated_bytes() == 500 * LAYERS * TOKEN
    rest = fed(model, ids[:, 10:], [20], cache)
    with torch.no_grad():
        close(torch.cat([first, rest], 1), plain("llama")(ids).logits)


def test_generate_reserves_the_answer() -> None:
    """No growth in the middle of an answer, and no more than prompt and answer."""
    for k, deep in ((None, 0), (K, LAYERS - K)):
        found = answer(speedy("llama", k), ids_of(20), n=10)
        assert found.cache.kv_bytes() == (29 * (LAYERS - deep) + 10 * deep) * TOKEN
        assert found.cache.allocated_bytes() <= (30 * (LAYERS - deep) + 12 * deep) * TOKEN


def test_a_segment_counts_once() -> None:
    model = speedy("llama", None)
    key = torch.randn(2, 7, 16)
    cache = KVCache(model.config)
    cache.set_segments([[Segment(key, key.clone())] for _ in range(LAYERS)], 7)
    assert cache.get_seq_length() == 7 and cache.kv_bytes() == 7 * LAYERS * TOKEN and cache.allocated_bytes() == 0
    fed(model, ids_of(3, batch=4), [3], cache)
    assert cache.get_seq_length() == 10
    assert cache.kv_bytes() == (7 + 4 * 3) * LAYERS * TOKEN


# ---- windows --------------------------------------------------------------------------------------------------------

SLIDING: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 8}),
    ("gemma3_text", {"sliding_window": 5}),
    ("gemma2", {"sliding_window": 1}),
]


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize(("architecture", "settings"), SLIDING)
def test_layers_forget_what_their_window_has_passed(architecture: str, settings: dict[str, Any], patched: bool) -> None:
    """Logits stay those of a forward over everything, for pieces of 1 to 200 tokens; the bytes stay bounded."""
    model, ids = fresh(architecture, **settings), ids_of(700)
    with torch.no_grad():
        wanted = model(ids).logits
    if patched:
        kvspeed.patch_model(model, None)
    cache = KVCache(model.config)
    cuts = [1, 2, 150, 151, 300, 365, 429, 430, 630, *range(631, 701)]
    close(fed(model, ids, cuts, cache), wanted, 3e-4)
    window = settings["sliding_window"]
    for layer in cache.layers:
        assert layer.get_seq_length() == 700
        if layer.window is not None:
            assert window - 1 <= layer.keys.shape[2] <= 2 * (window + 64)
        else:
            assert layer.keys.shape[2] == 700


@pytest.mark.parametrize("option", [{}, {"boundary": "keep", "anchor_tokens": 3}])
@pytest.mark.parametrize(("architecture", "settings"), SLIDING)
def test_forgetting_under_speed_with_padding_and_turns(
    architecture: str, settings: dict[str, Any], option: dict[str, Any]
) -> None:
    rows = [ids_of(260)[0], ids_of(40)[0], ids_of(3)[0]]
    prompts, mask = left_padded(rows)
    model = speedy(architecture, model=settings, **option)
    first = answer(model, prompts, attention_mask=mask, n=5)
    whole = torch.cat([first.sequences, ids_of(150, batch=3)], 1)
    longer = torch.cat([mask, mask.new_ones(3, 155)], 1)
    second = answer(model, whole, attention_mask=longer, n=5, **{CACHE: first.cache})
    for i, row in enumerate(rows):
        sequence = second.sequences[i, 260 - len(row) :]
        tokens = conversation((len(row), 4), (151, 5))
        wanted = oracle(plain(architecture, **settings), sequence, tokens, **option)
        close(first.logits[i], wanted[len(row) - 1 : len(row) + 4], 2e-4)
        close(second.logits[i], wanted[-6:-1], 2e-4)


@pytest.mark.parametrize("candidates", [5, 100])
def test_forgetting_leaves_room_for_candidates_to_be_taken_back(candidates: int) -> None:
    """Assisted decoding crops after each forward, by up to the number of its candidates."""
    settings = {"sliding_window": 8}
    prompt = ids_of(80).repeat(1, 3)
    model = speedy("mistral", model=settings)
    lookup = {"prompt_lookup_num_tokens": candidates, "max_matching_ngram_size": 1, "eos_token_id": 9999}
    found = answer(model, prompt, n=30, **lookup)
    wanted = oracle(plain("mistral", **settings), found.sequences[0], conversation((240, 30)))
    close(found.logits[0], wanted[239:-1], 2e-4)


def test_a_failure_after_forgetting() -> None:
    """Going back is exact even where the forward made layers forget."""
    settings = {"sliding_window": 8}
    model, ids = speedy("mistral", None, model=settings), ids_of(420)
    cache = KVCache(model.config)
    parts = [fed(model, ids[:, :140], [140], cache)]
    handle = decoder(model).layers[3].mlp.register_forward_hook(lambda *_: 1 / 0)
    for size in (1, 5, 200):
        with pytest.raises(ZeroDivisionError):
            fed(model, ids[:, 140 : 140 + size], [size], cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [140] * LAYERS
    handle.remove()
    parts.append(fed(model, ids[:, 140:], [10, 210, 280], cache))
    with torch.no_grad():
        close(torch.cat(parts, 1), plain("mistral", **settings)(ids).logits, 2e-4)


def test_crop_beyond_what_was_forgotten() -> None:
    model = speedy("mistral", None, model={"sliding_window": 8})
    cache, ids = KVCache(model.config), ids_of(400)
    fed(model, ids, [300, 301, 400], cache)
    before = [(layer.start, layer.length) for layer in cache.layers]
    with pytest.raises(ValueError, match="forgotten its first"):
        cache.crop(-390)
    assert [(layer.start, layer.length) for layer in cache.layers] == before
    cache.crop(-20)
    with torch.no_grad():
        close(fed(model, ids[:, 380:], [20], cache), model(ids).logits[:, -20:], 2e-4)


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_filling_it_wrongly() -> None:
    config = plain("llama").config
    key = torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match=r"per_layer has 2 layers.*4"):
        KVCache(config, spec=SpeedSpec(4)).set_segments([[Segment(key, key)]] * 2, 5)
    with pytest.raises(ValueError, match=r"6 and 6 layers.*4"):
        KVCache(config, spec=SpeedSpec(4)).set_storage(torch.zeros(6, 2, 9, 16), torch.zeros(6, 2, 9, 16), 3)
    with pytest.raises(ValueError, match="no SPEED depth"):
        KVCache(config).set_anchor(torch.zeros(2, 1, 2, 1, 16), torch.zeros(2, 1, 2, 1, 16))
    with pytest.raises(ValueError, match=r"keys have 3 layers.*2"):
        KVCache(config, spec=SpeedSpec(4)).set_anchor(torch.zeros(3, 1, 2, 1, 16), torch.zeros(3, 1, 2, 1, 16))
    cache = answer(speedy("llama", None), ids_of(5), n=2).cache
    with pytest.raises(ValueError, match="needs an empty cache"):
        cache.set_segments([[Segment(key, key)]] * LAYERS, 5)


def test_segments_in_an_unpatched_model() -> None:
    model = fresh("llama")
    cache = KVCache(model.config)
    key = torch.randn(2, 5, 16)
    cache.set_segments([[Segment(key, key)] for _ in range(LAYERS)], 5)
    with pytest.raises(RuntimeError, match=r"view.*patch_model"):
        fed(model, ids_of(3), [3], cache)
    with pytest.raises(ValueError, match="first 5 lie in shared packets"):
        cache.crop(-2)
    assert cache.get_seq_length() == 5


def test_a_spec_of_full_depth_is_none() -> None:
    assert KVCache(plain("llama").config, spec=SpeedSpec(LAYERS)).spec is None
    assert KVCache(plain("llama").config, spec=SpeedSpec(K)).depth == K
