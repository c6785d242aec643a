# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Prompts that end at depth k and leave KV in all layers: what SwiftKV and POP share.

Above k the prompt's tokens are not computed; each layer's keys and values of them are projected from the hidden state
that came out of layer k - 1. Only the prompt's last token, which predicts the first answer token, runs through all
layers. The model's own forward does it: a hook before each upper layer writes the projected rows into the layer's KV,
and lets the last row go on alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvspeed.cache import KVCache
from kvspeed.models import base_model

__all__ = ["UpperRows", "own_kv", "rotated_kv"]

# (layer, hidden state of layer k - 1 [1, T, hidden], its position embeddings) -> keys, values [1, H_kv, T, D]
Project = Callable[[nn.Module, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]


def rotated_kv(
    attention: Any, key: torch.Tensor, value: torch.Tensor, position_embeddings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Projected keys and values `[B, T, H_kv * D]` as a layer caches them: normed, rotated, `[B, H_kv, T, D]`.

    Args:
        attention: the layer's attention module.
        key: what its key projection gave.
        value: what its value projection gave.
        position_embeddings: (cos, sin) of the tokens, as the layer is given them.
    """
    size, norm = attention.head_dim, getattr(attention, "k_norm", None)
    whole = norm is not None and norm.weight.numel() == key.shape[-1]  # OLMo 2 norms all heads together
    if norm is not None and whole:
        key = norm(key)
    key, value = (t.view(*t.shape[:-1], -1, size) for t in (key, value))
    if norm is not None and not whole:
        key = norm(key)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if getattr(attention, "use_rope", True):  # SmolLM3 leaves some layers unrotated
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        key = rotate(key[:, :1], key, *position_embeddings)[1]
    return key, value


def own_kv(layer: Any, hidden: torch.Tensor, position_embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[B, H_kv, T, D]` that a decoder layer would cache for `hidden` `[B, T, hidden]`, and no more
    work than these take."""
    attention = layer.self_attn
    norm = getattr(layer, "input_layernorm", None)  # OLMo 2 norms what comes out of its blocks, not what goes in
    normed = hidden if norm is None else norm(hidden)
    if hasattr(attention, "qkv_proj"):  # Phi-3: one matrix, queries first
        projection = attention.qkv_proj
        first = attention.config.num_attention_heads * attention.head_dim
        bias = None if projection.bias is None else projection.bias[first:]
        key, value = nn.functional.linear(normed, projection.weight[first:], bias).chunk(2, -1)
    else:
        key, value = attention.k_proj(normed), attention.v_proj(normed)
    return rotated_kv(attention, key, value, position_embeddings)


class UpperRows:
    """The hooks, and what the forward that runs is.

    Attributes:
        k: the first layer that prompt tokens do not enter.
        hidden: output of layer k - 1 in the forward that runs, `[1, T, hidden]`.
    """

    def __init__(self, k: int, project: Project, keep: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden):
        self.k, self.project, self.keep = k, project, keep
        self.hidden: torch.Tensor = torch.empty(0)
        self._prompt: bool | None = None  # whether the last row goes on; None: every row does

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """The hooks on `model` inside the block."""
        layers: Any = base_model(model).layers
        handles = [layer.register_forward_pre_hook(self._before, with_kwargs=True) for layer in list(layers)[self.k :]]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def prompt(self, cache: KVCache, *, ends: bool) -> Iterator[None]:
        """The forward inside the block brings prompt tokens; `ends`: the last of them is the prompt's last."""
        self._prompt = ends
        try:
            yield
            if not ends:  # attention cannot take no tokens: one row went along for nothing, and its KV goes again
                for layer in {id(one): one for one in map(cache.layer, range(self.k, cache.num_layers))}.values():
                    layer.length -= 1
        finally:
            self._prompt = None
            self.hidden = torch.empty(0)

    def _before(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        index = layer.self_attn.layer_idx
        if index == self.k:
            self.hidden = self.keep(hidden)
        if self._prompt is None:
            return None
        kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        rows = self.hidden[:, :-1] if self._prompt else self.hidden
        given = kwargs["position_embeddings"]
        if rows.shape[1]:
            key, value = self.project(layer, rows, tuple(part[:, : rows.shape[1]] for part in given))
            if key.numel():
                kwargs["kvspeed_plan"].cache.layer(index).update(key, value)
        kwargs["position_embeddings"] = tuple(part[:, -1:] for part in given)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][:, -1:]
        kwargs["attention_mask"] = None  # one row sees every key
        return (hidden[:, -1:], *args[1:]), kwargs
