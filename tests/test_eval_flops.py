# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""FLOPs by formula against torch's FlopCounterMode, and against sums written out pair by pair."""

from __future__ import annotations

import random

import pytest
import torch
from kvspeed.eval.flops import ModelShape, decode_flops, prefill_flops
from tiny_models import random_ids, tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode


def counted(model: torch.nn.Module, **inputs) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "olmo2", "granite", "gemma2", "gemma3_text", "smollm3"])
def test_prefill_equals_the_flop_counter(name):
    model = tiny_model(name, layers=4, attn_implementation="eager")
    shape = ModelShape.of(model)
    for tokens in (1, 37):
        found = counted(model, input_ids=random_ids(tokens), logits_to_keep=1)
        rotary = found - prefill_flops(shape, tokens, causal=False)
        # eager models form angles with a [D/2, 1] x [1, T] product, once a kind of layer; nothing else may be left over
        assert 0 <= rotary <= 2 * tokens * shape.head_dim


def test_a_question_over_a_cache_equals_the_flop_counter():
    model = tiny_model("llama", layers=4, attn_implementation="eager")
    shape = ModelShape.of(model)
    first = model(input_ids=random_ids(50))
    cache = getattr(first, "cache", None) or first.past_key_values
    name = "cache" if hasattr(first, "cache") else "past_key_values"
    found = counted(model, input_ids=random_ids(9, bos=False), logits_to_keep=1, **{name: cache})
    rotary = found - prefill_flops(shape, 9, past=50, causal=False)
    assert 0 <= rotary <= 2 * 9 * shape.head_dim


@pytest.mark.parametrize("past", [0, 30])
def test_prefill_to_depth_k_does_only_the_work_of_the_formula(past):
    """The linear layers that really run under SPEED, counted by hooks, are those of the formula."""
    from kvspeed import KVCache, patch_model
    from kvspeed.state import state_of

    model = patch_model(tiny_model("llama", layers=6), k=4)
    shape, state = ModelShape.of(model), state_of(model)
    cache = KVCache(model.config, spec=state.spec)
    done = 0

    def count(module, inputs, output):
        nonlocal done
        done += 2 * inputs[0].shape[:-1].numel() * module.weight.numel()

    with torch.no_grad():
        if past:
            cache.begin_turn(past)
            model(input_ids=random_ids(past), **{state.cache_name: cache})
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(count)
        cache.begin_turn(past + 25)
        model(input_ids=random_ids(25, bos=not past), logits_to_keep=1, **{state.cache_name: cache})
    formula = prefill_flops(shape, 25, past=past, k=4)
    pairs = 4 * sum(past + i + 1 for i in range(25)) + 2 * (2 if past else 3)
    assert done == formula - shape.pair * pairs


def test_pairs_agree_with_a_loop():
    rng = random.Random(random.random())
    for _ in range(200):
        layers, window = rng.randint(1, 4), rng.choice([None, 1, 2, 7, 20, 1000])
        shape = ModelShape(8, 16, 2, 1, 4, 11, tuple(rng.choice([None, window]) for _ in range(layers)))
        past, tokens = rng.randint(0, 40), rng.randint(1, 40)
        loop = shape.logits + layers * tokens * shape.token_layer
        for width in shape.windows:
            loop += shape.pair * sum(min(past + i + 1, width or 10**9) for i in range(tokens))
        assert prefill_flops(shape, tokens, past=past) == loop
        assert prefill_flops(shape, tokens, past=past, k=layers) == loop
        steps = decode_flops(shape, past + tokens, 6)
        alone = sum(prefill_flops(shape, 1, past=past + tokens + i) for i in range(5))
        assert steps == alone


def test_decoding_under_speed_sees_the_anchor_and_earlier_answers():
    shape = ModelShape(8, 16, 2, 1, 4, 11, (None,) * 6)
    steps = decode_flops(shape, 1000, 5, k=4)
    pairs = 4 * sum(1000 + i + 1 for i in range(4)) + 2 * sum(1 + i + 1 for i in range(4))
    assert steps == 4 * (shape.logits + 6 * shape.token_layer) + shape.pair * pairs
    assert decode_flops(shape, 1000, 1, k=4) == decode_flops(shape, 1000, 0) == 0


def test_depth_out_of_range_is_refused():
    shape = ModelShape(8, 16, 2, 1, 4, 11, (None,) * 6)
    for k in (0, 7, -1):
        with pytest.raises(ValueError, match=f"k: is {k} and the model has 6 layers"):
            prefill_flops(shape, 5, k=k)
    with pytest.raises(ValueError, match="tokens"):
        prefill_flops(shape, 0)


def test_sliding_windows_come_from_the_configuration():
    class Holder(torch.nn.Module):
        pass

    model = tiny_model("gemma3_text", layers=6)
    assert ModelShape.of(model).windows == (24, 24, None, 24, 24, None)
    config = tiny_config("qwen2", layers=3)
    assert getattr(config, "use_sliding_window", False) is False
    assert ModelShape.of(tiny_model("qwen2", layers=3)).windows == (None, None, None)
