# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Measuring: what is counted and in which order. No test looks at how long anything took."""

from __future__ import annotations

import pytest
import torch
import transformers
from kvspeed import patch_model
from kvspeed.eval.measure import cache_bytes, interleaved, median_of, timed_generate
from tiny_models import random_ids, tiny_model


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_unpatched_model_with_its_own_cache(name):
    model = tiny_model(name, layers=4)
    ids = random_ids(40)[0].tolist()
    result = timed_generate(model, lambda: ids, max_new_tokens=6)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, 40:].tolist()
    assert result.token_ids == expected and len(expected) == 6
    assert (result.prompt_tokens, result.computed_tokens) == (40, 40)
    assert result.ttft_s > 0 and result.time_per_token_s > 0
    stored = 45  # the last token is never fed back
    per_token = 2 * 2 * 16 * 4
    if name == "llama":
        assert result.kv_bytes == 4 * stored * per_token
    else:  # sliding layers keep window - 1 = 23 tokens, two of four
        assert 2 * (stored + 23) * per_token <= result.kv_bytes <= 4 * stored * per_token


def test_one_token_has_no_time_per_token():
    result = timed_generate(tiny_model("llama", layers=2), lambda: [1, 5, 6], max_new_tokens=1)
    assert len(result.token_ids) == 1 and result.time_per_token_s is None


def test_speed_stores_what_its_rule_says():
    model = patch_model(tiny_model("llama", layers=6), k=4)
    ids = random_ids(40)[0].tolist()
    result = timed_generate(model, lambda: ids, max_new_tokens=6)
    assert result.kv_bytes == (4 * 45 + 2 * (1 + 5)) * 2 * 2 * 16 * 4


def test_bytes_of_other_caches():
    config = tiny_model("llama", layers=3).config
    cache = transformers.DynamicCache()
    for layer in range(3):
        cache.update(torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16, dtype=torch.float32), layer)
    assert cache_bytes(cache) == 3 * 2 * 2 * 2 * 5 * 16 * 4
    assert cache_bytes(transformers.DynamicCache(config=config)) == 0
    with pytest.raises(TypeError, match="cache: expected a cache"):
        cache_bytes([1])


def test_methods_take_turns_and_warm_up():
    calls = []
    runs = {name: (lambda number, name=name: calls.append((name, number)) or name) for name in "abc"}
    results = list(interleaved(runs, 3, warmup=1))
    assert [name for name, _, _ in results] == list("abcbcacab")
    assert calls[:3] == [("a", 0), ("b", 0), ("c", 0)] and len(calls) == 12
    assert all(name == result for name, _, result in results)


def test_median_leaves_out_what_is_not_there():
    assert median_of([3.0, None, 1.0, 2.0]) == 2.0
    assert median_of([None]) is None and median_of([]) is None
