# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Running a prompt for its KV alone: to depth k, with the anchor's KV above, and no logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from kvspeed import ops
from kvspeed.cache import KVCache
from kvspeed.devices import layer_devices
from kvspeed.install import patched
from kvspeed.models import base_model
from kvspeed.rule import SpeedSpec
from kvspeed.state import state_of

__all__ = ["PromptKV", "prompt_kv"]


class PromptKV(NamedTuple):
    """The KV of one prompt, rotated for positions from 0.

    Attributes:
        keys: `[k, H_kv, T, D]`.
        values: the same shape.
        anchor_keys: `[L - k, H_kv, n, D]`, the first tokens in the layers >= k; None where k = L or there is no anchor.
        anchor_values: the same shape, or None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    anchor_keys: torch.Tensor | None
    anchor_values: torch.Tensor | None


@torch.no_grad()
def prompt_kv(
    model: nn.Module,
    input_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    k: int | None = None,
    *,
    anchor_tokens: int = 1,
    positions: torch.Tensor | None = None,
    observe: Callable[..., None] | None = None,
) -> PromptKV:
    """Run one prompt through the first `k` layers of `model` (all for None) and return its KV.

    Above k only the anchor tokens run. The model is patched for the call where it is not patched so already.

    Args:
        model: a causal LM that kvspeed knows, in evaluation mode.
        input_ids: int64 `[1, T]`; either this or
        inputs_embeds: `[1, T, hidden]`.
        k: depth, 1 .. L; None: all layers.
        anchor_tokens: first tokens whose KV above k is returned too.
        positions: int64 `[1, T]`, where the tokens stand; from 0 on for None.
        observe: called by the attention of each layer < k with `(module, query, key, value, scale, softcap, window)`.

    Raises:
        ValueError: not exactly one prompt of at least one token; a model in training mode (dropout would enter the KV).
    """
    given = [t for t in (input_ids, inputs_embeds) if t is not None]
    if len(given) != 1 or given[0].shape[0] != 1 or given[0].shape[1] == 0:
        raise ValueError("give exactly one of input_ids [1, T] and inputs_embeds [1, T, hidden], with T >= 1")
    if model.training:
        raise ValueError("the model is in training mode, so that dropout could enter the KV; call model.eval() first")
    base: Any = base_model(model)
    tokens, layers = given[0].shape[1], len(base.layers)
    spec = SpeedSpec(k, anchor_tokens) if k is not None and k < layers else None
    present = state_of(model)
    if spec is not None and present is not None and present.spec is not None:
        same = (present.spec.k, present.spec.anchor_tokens, present.spec.gaps) == (spec.k, spec.anchor_tokens, ())
        spec = present.spec if same else spec  # the rest of the rule says nothing about a prompt
    with patched(model, spec, force=True) as state:
        config: Any = state.config
        cache = KVCache(config, capacity=tokens, spec=spec)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (cache.depth, heads, tokens, size)
        weight = next(base.parameters())
        home, devices = given[0].device, set(layer_devices(model)[: cache.depth])
        keys, values = (ops.empty_huge(shape, weight.dtype, home) for _ in range(2))
        if devices == {home}:
            cache.set_storage(keys, values, 0)  # the layers write where the result shall be
        cache.observe = observe
        cache.begin_turn(tokens + 1)  # every token is prompt, and none of them the last one
        base(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=positions,
            use_cache=True,
            **{state.cache_name: cache},
        )
    if devices != {home}:  # a model on several devices: each layer's KV was kept on its own, and is brought together
        for index in range(cache.depth):
            key, value = cache.layer(index).view(tokens)
            keys[index].copy_(key[0])
            values[index].copy_(value[0])
    if spec is None or anchor_tokens == 0:
        return PromptKV(keys, values, None, None)
    deep = [cache.layer(index).view(min(anchor_tokens, tokens)) for index in range(spec.k, layers)]
    return PromptKV(
        keys,
        values,
        torch.cat([key.to(home) for key, _ in deep]),
        torch.cat([value.to(home) for _, value in deep]),
    )
