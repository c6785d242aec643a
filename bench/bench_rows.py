# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A further token of several rows at once, after a long prompt: where KV, and not the weights, is what is read.

    python -m pytest bench/bench_rows.py

SmolLM2-135M in float32, prompts of 8,000 tokens, 1 and 8 rows with KV of their own, both depths on the same kernels.
The weights are read once a step, for however many rows; KV is read for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvspeed import KVCache, SpeedSpec, patch_model
from models import load_pair, prompt_of
from timing import Comparison

TOKENS, K = 8000, 22


@pytest.fixture(scope="module")
def filled() -> dict[str, tuple[Any, Any, int]]:
    """By name: the model, its cache of the prompt, its layers."""
    full, fast, tokenizer = load_pair()
    layers = len(full.model.layers)
    ids = torch.tensor([prompt_of(tokenizer, TOKENS)])
    found = {}
    for name, model, k in ((f"SPEED k={K}", fast, K), ("full depth", full, layers)):
        patch_model(model, k=k)
        with torch.no_grad():
            cache = KVCache(model.config, capacity=TOKENS + 8, spec=SpeedSpec(k) if k < layers else None)
            cache.begin_turn(TOKENS)
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        found[name] = (model, cache, k)
    return found


@pytest.mark.parametrize("rows", [1, 8])
def test_step(compare: Callable[..., Comparison], filled: dict[str, tuple[Any, Any, int]], rows: int) -> None:
    def stepper(model: Any, cache: Any) -> Callable[[], object]:
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        token = torch.full((rows, 1), 17)

        @torch.no_grad()
        def step() -> None:
            model(token, past_key_values=cache, use_cache=True)
            cache.crop(-1)

        return step

    steps = {name: stepper(model, cache) for name, (model, cache, _) in filled.items()}
    compare(f"rows_{rows}", steps, case={"rows": rows, "prompt": TOKENS, "k": K}, rounds=15)
