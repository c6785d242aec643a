# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Which caches SPEED takes, which it refuses (and in what words), and what is left when a forward fails."""

from __future__ import annotations

from typing import Any

import kvspeed
import pytest
import torch
from kvspeed import KVCache
from speed_tools import (
    CACHE,
    LAYERS,
    K,
    answer,
    close,
    conversation,
    fresh,
    ids_of,
    left_padded,
    oracle,
    plain,
    poison,  # noqa: F401
    speedy,
)
from tiny_models import tiny_model
from transformers import DynamicCache, GenerationConfig, StaticCache


def held(found: Any, turns: list[tuple[int, int]], architecture: str = "llama", **options: Any) -> None:
    n = turns[-1][1]
    wanted = oracle(plain(architecture), found.sequences[0], conversation(*turns), **options)
    close(found.logits[0], wanted[-n - 1 : -1])


def filled_dynamic(model: torch.nn.Module, length: int = 6) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids_of(length), use_cache=True, **{CACHE: cache})
    return cache


def static(model: torch.nn.Module) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=64)


# ---- an empty DynamicCache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("k", [K, None])
def test_an_empty_dynamic_cache_is_adopted(architecture: str, k: int | None) -> None:
    """The caller goes on holding it, and finds the KV in it."""
    model = speedy(architecture, k)
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        first = answer(model, ids_of(9), n=4, **{CACHE: cache})
        assert first.cache is cache and isinstance(cache, KVCache) and isinstance(cache, DynamicCache)
        assert cache.get_seq_length() == 12
        whole = torch.cat([first.sequences, ids_of(3)], 1)
        second = answer(model, whole, n=4, **{CACHE: cache})
        if k is not None:
            held(second, [(9, 3), (4, 4)], architecture)


# ---- caches that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static", "quantized", "sliding_window", "hybrid"])
def test_cache_implementations_are_refused(kind: str) -> None:
    """Asked for in the call, in a generation config, or by the model's own."""
    model = speedy("llama")
    ids = ids_of(9)
    with pytest.raises(ValueError, match=rf"cache_implementation is '{kind}'.*SPEED.*k=4"):
        model.generate(ids, max_new_tokens=2, cache_implementation=kind)
    if kind == "hybrid":
        return  # as a default of old checkpoints it means the dynamic cache
    try:
        config = GenerationConfig(max_new_tokens=2, cache_implementation=kind)
    except ValueError:  # this transformers does not know the kind
        return
    with pytest.raises(ValueError, match=rf"cache_implementation is '{kind}'"):
        model.generate(ids, config)
    model.generation_config.cache_implementation = kind
    with pytest.raises(ValueError, match=rf"cache_implementation is '{kind}'"):
        model.generate(ids, max_new_tokens=2)


def test_the_defaults_of_gemma_checkpoints() -> None:
    """`hybrid` in a checkpoint's generation config is no wish of the user's, and stays as it was."""
    model = speedy("gemma2")
    for kind in ("hybrid", "dynamic"):
        model.generation_config.cache_implementation = kind
        held(answer(model, ids_of(9), n=3), [(9, 3)], "gemma2")
    held(answer(model, ids_of(9), n=3, cache_implementation="dynamic"), [(9, 3)], "gemma2")


def test_caches_of_other_kinds_are_refused_by_name() -> None:
    model = speedy("llama")
    other = fresh("llama")

    class QuantizedCache(DynamicCache):
        """Stands in for transformers', which needs a package of its own."""

    for cache, says in (
        (static(other), "StaticCache"),
        (filled_dynamic(other), "DynamicCache that is not empty"),
        (QuantizedCache(), "QuantizedCache"),
        (tuple((torch.zeros(1, 2, 3, 16),) * 2 for _ in range(LAYERS)), "tuple"),
    ):
        with pytest.raises(ValueError, match=f"SPEED.*k=4.*{says}"):
            model.generate(ids_of(9), max_new_tokens=2, **{CACHE: cache})
        if says != "tuple":
            with pytest.raises(ValueError, match="SPEED"):
                model(ids_of(9), **{CACHE: cache})


def test_at_full_depth_other_caches_go_the_models_own_way() -> None:
    model, ids = fresh("llama"), ids_of(9)
    wanted = answer(model, ids, n=3)
    kvspeed.patch_model(model, None)
    close(answer(model, ids, n=3, cache_implementation="static").logits, wanted.logits)
    close(answer(model, ids, n=3, **{CACHE: static(model)}).logits, wanted.logits)
    cache = filled_dynamic(model)
    with torch.no_grad():
        out = model(ids, use_cache=True, **{CACHE: cache})
    assert cache.get_seq_length() == 15 and not isinstance(cache, KVCache) and torch.isfinite(out.logits).all()


@pytest.mark.parametrize(
    ("made", "used", "says"),
    [
        (dict(k=4), dict(k=3), ("k=4", "k=3")),
        (dict(k=4), dict(k=None), ("k=4", "all layers")),
        (dict(k=None), dict(k=4), ("all layers", "k=4")),
        (dict(k=4), dict(k=4, anchor_tokens=2), ("anchor_tokens=1", "anchor_tokens=2")),
        (dict(k=4), dict(k=4, boundary="keep"), ("boundary='transient'", "boundary='keep'")),
        (dict(k=4), dict(k=4, upper_attention="self"), ("upper_attention='causal'", "upper_attention='self'")),
        (dict(k=4), dict(k=4, turns="reset"), ("turns='keep'", "turns='reset'")),
    ],
)
def test_a_cache_made_under_another_patch(made: dict[str, Any], used: dict[str, Any], says: tuple[str, str]) -> None:
    """Both sides are named, nothing changes, and the cache goes on where it belongs."""
    model = fresh("llama")
    first = answer(kvspeed.patch_model(model, **made), ids_of(9), n=3)
    before = first.cache.kv_bytes(), first.cache.get_seq_length(), first.cache.prompt_end
    whole = torch.cat([first.sequences, ids_of(4)], 1)
    kvspeed.patch_model(model, **used)
    with pytest.raises(ValueError) as error:
        model.generate(whole, max_new_tokens=2, **{CACHE: first.cache})
    assert all(side in str(error.value) for side in says), error.value
    with pytest.raises(ValueError):
        model(whole[:, 11:], **{CACHE: first.cache})
    assert (first.cache.kv_bytes(), first.cache.get_seq_length(), first.cache.prompt_end) == before
    kvspeed.patch_model(model, **made)
    second = answer(model, whole, n=3, **{CACHE: first.cache})
    if made["k"] is not None:
        held(second, [(9, 2), (5, 3)])


def test_a_speed_cache_in_an_unpatched_model() -> None:
    model = speedy("llama")
    first = answer(model, ids_of(9), n=3)
    whole = torch.cat([first.sequences, ids_of(4)], 1)
    before = [layer.keys.clone() for layer in first.cache.layers]
    kvspeed.unpatch_model(model)
    for call in (
        lambda: model.generate(whole, max_new_tokens=2, **{CACHE: first.cache}),
        lambda: model(whole[:, 11:], use_cache=True, **{CACHE: first.cache}),
    ):
        with pytest.raises(RuntimeError, match="made under SPEED with k=4"):
            call()
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, first.cache.layers, strict=True))
    kvspeed.patch_model(model, K)
    held(answer(model, whole, n=3, **{CACHE: first.cache}), [(9, 2), (5, 3)])


def test_a_cache_of_another_model_or_batch() -> None:
    model = speedy("llama")
    shallow = kvspeed.patch_model(tiny_model("llama", layers=5), K)
    cache = answer(shallow, ids_of(9), n=3).cache
    with pytest.raises(ValueError, match="5 layers, the model 6"):
        answer(model, ids_of(15), n=3, **{CACHE: cache})
    cache = answer(model, ids_of(9, batch=2), n=3).cache
    lengths = [layer.length for layer in cache.layers]
    with pytest.raises(ValueError, match="holds 2 rows and the model was given 3"):
        answer(model, ids_of(15, batch=3), n=3, **{CACHE: cache})
    assert [layer.length for layer in cache.layers] == lengths


# ---- calls that say too little, or the wrong thing ------------------------------------------------------------------


def test_a_bare_forward_is_refused_with_what_to_do() -> None:
    model = speedy("llama")
    for kwargs in ({}, {CACHE: DynamicCache()}, {CACHE: KVCache(model.config)}, {"use_cache": False}):
        with pytest.raises(ValueError, match=r"k=4 of 6.*generate.*labels.*begin_turn"):
            model(ids_of(9), **kwargs)
        with pytest.raises(ValueError, match="begin_turn"):
            model.model(ids_of(9), **kwargs)
    model.generate(ids_of(9), max_new_tokens=2)
    model.generate(ids_of(9), max_new_tokens=2, use_cache=False)
    with pytest.raises(ValueError, match="begin_turn"):  # the prompt's end of an earlier generate is not remembered
        model(ids_of(9))


def test_masks_that_are_no_left_padding() -> None:
    model = speedy("llama")
    ids = ids_of(8, batch=2)
    right = torch.ones(2, 8, dtype=torch.long)
    right[0, 6:] = 0
    holes = torch.ones(2, 8, dtype=torch.long)
    holes[1, 3] = 0
    for mask in (right, holes):
        for kwargs in ({}, {"use_cache": False}):
            with pytest.raises(ValueError, match="left"):
                model.generate(ids, attention_mask=mask, max_new_tokens=2, **kwargs)
    with pytest.raises(ValueError, match="2-D mask"):
        cache = KVCache(model.config)
        cache.begin_turn(8)
        model(ids, attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool), **{CACHE: cache})


def test_a_turn_needs_a_new_token() -> None:
    model = speedy("llama")
    first = answer(model, ids_of(9), n=3)
    for end in (0, 5, 11):
        with pytest.raises(ValueError, match=f"ends at token {end}.*seen 11"):
            first.cache.begin_turn(end)
        with pytest.raises(ValueError, match="at least one new token"):
            model.generate(first.sequences[:, :end], max_new_tokens=2, **{CACHE: first.cache})
    with pytest.raises(ValueError):
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2)


def test_a_mask_that_does_not_fit_the_cache() -> None:
    """The whole sequence given again beside a filled cache: its tokens would stand there twice."""
    model = speedy("llama")
    first = answer(model, ids_of(9), n=3)
    whole = torch.cat([first.sequences, ids_of(4)], 1)
    first.cache.begin_turn(16)
    with pytest.raises(ValueError, match=r"attention_mask.*16.*11.*16"):
        model(whole, attention_mask=torch.ones_like(whole), **{CACHE: first.cache})
    held(answer(model, whole, n=3, **{CACHE: first.cache}), [(9, 2), (5, 3)])


# ---- failures in the middle -----------------------------------------------------------------------------------------


class Stop(BaseException):
    """An interrupt: torch runs no hooks after it."""


@pytest.mark.parametrize("error", [RuntimeError, Stop])
@pytest.mark.parametrize("layer", [0, K - 1, K, LAYERS - 1])
@pytest.mark.parametrize("option", [{}, {"boundary": "keep", "anchor_tokens": 3}])
def test_a_forward_that_fails_leaves_the_cache_as_it_was(error: Any, layer: int, option: dict[str, Any]) -> None:
    """In the first forward of a turn, or a later one; alone, or padded."""
    for padded in (False, True):
        model = speedy("llama", **option)
        rows = [ids_of(9)[0], ids_of(4)[0]][: 1 + padded]
        prompts, mask = left_padded(rows)
        first = answer(model, prompts, attention_mask=mask, n=3)
        cache = first.cache
        bytes_before, length_before = cache.kv_bytes(), cache.get_seq_length()
        keys = [stored.keys.clone() for stored in cache.layers]
        calls = [0]

        def fail(*_: Any, calls: list[int] = calls) -> None:
            calls[0] += 1
            if calls[0] == 1:
                raise error("in the middle")

        handle = model.model.layers[layer].mlp.register_forward_hook(fail)
        whole = torch.cat([first.sequences, ids_of(4, batch=len(rows))], 1)
        longer = torch.cat([mask, mask.new_ones(len(rows), 7)], 1)
        with pytest.raises(error, match="in the middle"):
            answer(model, whole, attention_mask=longer, n=3, **{CACHE: cache})
        handle.remove()
        assert cache.kv_bytes() == bytes_before and cache.get_seq_length() == length_before
        assert all(torch.equal(a, stored.keys) for a, stored in zip(keys, cache.layers, strict=True))
        found = answer(model, whole, attention_mask=longer, n=3, **{CACHE: cache})
        for i, row in enumerate(rows):
            tokens = conversation((len(row), 2), (5, 3))
            wanted = oracle(plain("llama"), found.sequences[i, 9 - len(row) :], tokens, **option)
            close(found.logits[i], wanted[-4:-1])


def test_a_first_forward_that_fails_binds_the_cache_to_nothing() -> None:
    model = speedy("llama")
    cache = KVCache(model.config)
    handle = model.model.layers[5].register_forward_hook(lambda *_: 1 / 0)
    prompts, mask = left_padded([ids_of(9)[0], ids_of(4)[0]])
    with pytest.raises(ZeroDivisionError):
        answer(model, prompts, attention_mask=mask, **{CACHE: cache})
    handle.remove()
    assert cache.get_seq_length() == 0 and cache.kv_bytes() == 0
    held(answer(model, ids_of(6), n=3, **{CACHE: cache}), [(6, 3)])


def test_an_interrupt_in_a_chunk_without_deep_columns() -> None:
    """The model has all its layers afterwards."""
    model = speedy("llama")

    def stop(*_: Any) -> None:
        raise Stop("now")

    handle = model.model.layers[2].register_forward_hook(stop)
    cache = KVCache(model.config)
    cache.begin_turn(20)
    ids = ids_of(20)
    with pytest.raises(Stop):
        model.model(ids[:, :1], **{CACHE: cache})
    handle.remove()
    found = answer(model, ids, n=3, prefill_chunk_size=3)
    held(found, [(20, 3)])
    handle = model.model.layers[2].register_forward_hook(stop)
    with pytest.raises(Stop):
        answer(model, ids, n=3, prefill_chunk_size=3)
    handle.remove()
    assert len(model.model.layers) == LAYERS
    held(answer(model, ids, n=3), [(20, 3)])
    kvspeed.unpatch_model(model)
    with torch.no_grad():
        close(model(ids).logits, plain("llama")(ids).logits)


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("anchor_tokens", [1, 3])
def test_padded_rows_driven_by_hand(reserved: bool, anchor_tokens: int) -> None:
    """The anchors are written first, and a storage that grows takes them along."""
    model = speedy("llama", anchor_tokens=anchor_tokens)
    ids, mask = left_padded([ids_of(9)[0], ids_of(4, seed=1)[0]])
    wanted = answer(model, ids, attention_mask=mask, n=1).logits[:, 0]
    cache = KVCache(model.config, spec=kvspeed.SpeedSpec(K, anchor_tokens=anchor_tokens))
    cache.begin_turn(ids.shape[1])
    if reserved:
        cache.reserve(32)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits[:, -1]
    close(found, wanted)


@pytest.mark.parametrize("anchor_tokens", [0, 1, 2, 4])
@pytest.mark.parametrize("target", [10, 19, 20, 21])
def test_a_crop_to_before_a_rows_first_token(anchor_tokens: int, target: int) -> None:
    """It begins anew with its next token, anchors included."""
    model = speedy("llama", anchor_tokens=anchor_tokens)
    long, short, new = ids_of(20)[0], ids_of(1, seed=1)[0], ids_of(15, seed=2, batch=2)
    ids, mask = left_padded([long, short])
    first = answer(model, ids, attention_mask=mask, n=4)
    first.cache.crop(target)
    kept, padding = first.sequences[:, :target], min(19, target)
    whole, both = torch.cat([kept, new], 1), torch.ones(2, target + 15, dtype=torch.long)
    both[1, :padding] = 0
    found = answer(model, whole, attention_mask=both, n=3, **{CACHE: first.cache}).logits
    answers = max(0, target - 20)
    for row, skip in enumerate((0, padding)):
        prompt = min(target, 20) - skip
        turns = [(prompt, answers), (15, 2)] if prompt else [(15, 2)]
        tokens = conversation(*turns)
        said = torch.cat([whole[row, skip:], found[row, :2].argmax(-1)])
        wanted = oracle(plain("llama"), said, tokens, anchor_tokens=anchor_tokens)
        close(found[row], wanted[-3:])
