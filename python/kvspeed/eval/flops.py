# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of prefill, of a question over packets, and of decoding, by formula.

Counted are matrix products, two operations a multiply-add: projections, gated MLP, attention scores and their product
with the values, the LM head. Norms, rotations (also those of re-offset packets), activations and softmax are left out,
as FlopCounterMode of torch does; they are below 1 % here. Attention counts the pairs that see each other: the causal
half, a sliding window's width, and above depth k anchors and answers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ModelShape", "decode_flops", "prefill_flops"]


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder that its FLOPs follow from.

    Attributes:
        windows: one entry a layer, the sliding window or None.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """From a transformers model with gated MLPs (all that kvspeed supports), bare or wrapped by PEFT."""
        from kvspeed.models import base_model

        config: Any = base_model(model).config
        heads = config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            windows=_windows(config),
        )

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def token_layer(self) -> int:
        """FLOPs of one token in one layer without its attention: Q, K, V, O and the three MLP matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 2 * (attention + 3 * self.hidden * self.intermediate)

    @property
    def pair(self) -> int:
        """FLOPs of one query looking at one key, scores and values, all heads of one layer."""
        return 4 * self.heads * self.head_dim

    @property
    def logits(self) -> int:
        """FLOPs of the LM head for one token."""
        return 2 * self.hidden * self.vocab


def prefill_flops(
    shape: ModelShape,
    tokens: int,
    *,
    past: int = 0,
    k: int | None = None,
    anchor_tokens: int = 1,
    causal: bool = True,
) -> int:
    """FLOPs from `tokens` new prompt tokens to the first logits.

    Args:
        shape: the model.
        tokens: prompt tokens that are computed: the whole prompt, or the question where packets hold the rest.
        past: positions whose KV exists already (preamble and packets).
        k: SPEED depth: in layers from k on only the last prompt token runs (and the anchors, where they are new: `past`
            is less than `anchor_tokens`). None: every layer takes every token.
        anchor_tokens: anchors of SPEED.
        causal: False counts every pair of the attention matrix, as torch's FlopCounterMode does.
    """
    if tokens < 1 or past < 0:
        raise ValueError(f"tokens: expected at least 1 new token and past >= 0, got {tokens} and {past}")
    depth = shape.layers if k is None else k
    if not 1 <= depth <= shape.layers:
        raise ValueError(f"k: is {k} and the model has {shape.layers} layers; give 1 to {shape.layers}, or None")
    total = shape.logits
    for window in shape.windows[:depth]:
        pairs = _causal_pairs(past, tokens, window) if causal else tokens * (past + tokens)
        total += tokens * shape.token_layer + shape.pair * pairs
    new_anchors = min(max(anchor_tokens - past, 0), tokens)
    columns = new_anchors + (1 if past + tokens > anchor_tokens else 0)
    kept = min(anchor_tokens, past)
    for _ in shape.windows[depth:]:
        pairs = _causal_pairs(kept, columns, None) if causal else columns * (kept + columns)
        total += columns * shape.token_layer + shape.pair * pairs
    return total


def decode_flops(
    shape: ModelShape, prompt: int, new_tokens: int, *, k: int | None = None, anchor_tokens: int = 1
) -> int:
    """FLOPs of the answer's steps after the first token, which the prefill gave.

    Args:
        shape: the model.
        prompt: positions of the whole prompt, packets included.
        new_tokens: tokens of the answer; n tokens take n - 1 steps.
        k: SPEED depth, as for `prefill_flops` (boundary "transient").
        anchor_tokens: anchors of SPEED.
    """
    steps = max(new_tokens - 1, 0)
    depth = shape.layers if k is None else k
    total = steps * shape.logits + steps * shape.layers * shape.token_layer
    for layer, window in enumerate(shape.windows):
        past = prompt if layer < depth else min(anchor_tokens, prompt)
        total += shape.pair * _causal_pairs(past, steps, window if layer < depth else None)
    return total


def _causal_pairs(past: int, tokens: int, window: int | None) -> int:
    """Pairs (query, key) that see each other: query i of `tokens` sees past + i + 1 keys, at most `window` of them."""
    first, last = past + 1, past + tokens
    if window is None or last <= window:
        return tokens * (first + last) // 2
    growing = max(window - past, 0)  # queries that still see everything
    return growing * (first + window) // 2 + (tokens - growing) * window if growing else tokens * window


def _windows(config: Any) -> tuple[int | None, ...]:
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", None) is False:
        return (None,) * layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)
