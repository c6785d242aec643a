# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One prompt answered at several depths, for the price of one prefill.

The prompt is computed once, at full depth. A request at depth k reads the first k layers of that KV, and the anchor's
above: what it would have computed itself, so that the answers are those of `generate` at that depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kvspeed.cache import KVCache
from kvspeed.devices import layer_devices
from kvspeed.greedy import token_ids
from kvspeed.models import causal_lm
from kvspeed.rule import SpeedSpec
from kvspeed.speed.prefill import PromptKV, prompt_kv
from kvspeed.state import asking, state_of

__all__ = ["answers_at"]


@torch.no_grad()
def answers_at(
    model: nn.Module, ids: Sequence[int], depths: Iterable[int], *, rule: SpeedSpec, max_new_tokens: int
) -> dict[int, list[int]]:
    """Greedy answers of a patched `model` to the prompt `ids`, by depth; EoS is left out.

    Args:
        model: a causal LM in evaluation mode, patched in any way.
        ids: at least one token.
        depths: numbers from 1 to L; L is full depth.
        rule: the rest of SPEED's rule; its `k` and gaps do not count.
        max_new_tokens: the most tokens of an answer.

    Raises:
        ValueError: the model is not patched, or in training mode.
    """
    inner: Any = causal_lm(model)
    state = state_of(model)
    if state is None:
        raise ValueError("the model is not patched; call kvspeed.patch_model first")
    device = inner.get_input_embeddings().weight.device
    tokens = torch.tensor([list(ids)], device=device)
    ends, pad = token_ids(inner, {})
    shared: PromptKV | None = None
    # On several devices, or where the anchor reaches the last token, each depth computes the prompt itself.
    if len(ids) - 1 > rule.anchor_tokens and set(layer_devices(model)) == {device}:
        with asking(model, None):
            shared = prompt_kv(model, tokens[:, :-1])
    answers = {}
    for k in depths:
        spec = replace(rule, k=k, gaps=()) if k < state.layers else None
        with asking(model, spec):
            cache = KVCache(state.config, spec=spec)
            if shared is not None:
                _fill(cache, shared, len(ids) - 1)
            output = inner.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=pad,
                **{state.cache_name: cache},
            )
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        answer = sequence[0, len(ids) :].tolist()
        answers[k] = answer[: next((i for i, token in enumerate(answer) if token in ends), len(answer))]
    return answers


def _fill(cache: KVCache, prompt: PromptKV, length: int) -> None:
    """Let `cache` begin with the first layers of a prompt that was computed in all of them."""
    depth = cache.depth
    cache.set_storage(prompt.keys[:depth], prompt.values[:depth], length)
    if cache.spec is not None and cache.spec.anchor_tokens:
        count = cache.spec.anchor_tokens
        cache.set_anchor(
            [key[None, :, :count] for key in prompt.keys[depth:]],
            [value[None, :, :count] for value in prompt.values[depth:]],
        )
