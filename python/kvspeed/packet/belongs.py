# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Whether packets belong to a model and to each other; every refusal names both sides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import architecture, base_model, causal_lm
from kvspeed.packet.build import rope_of
from kvspeed.packet.packet import Packet
from kvspeed.packet.rotation import describe_rotation, rotation_difference
from kvspeed.state import state_of

__all__ = ["check_blocks"]


def check_blocks(packets: Iterable[Packet], preamble: Packet | None, model: nn.Module) -> list[Packet]:
    """The blocks in order, [preamble] + packets, after it was checked that `model` may use them together.

    Under SPEED a block that was built deeper than the model is asked for gives its first layers.

    Raises:
        TypeError: something is no packet.
        ValueError: another model made a block, or the same with other weights, less deep, in another dtype or RoPE;
            packets have different adapters; the preamble has one.
    """
    architecture(model)
    if isinstance(packets, Packet):
        raise TypeError("packets: expected a sequence of packets, got one Packet: write [packet]")
    try:
        documents = list(packets)
    except TypeError:
        raise TypeError(f"packets: expected a sequence of packets, got {type(packets).__name__}") from None
    named = [(f"packet {index}", packet) for index, packet in enumerate(documents)]
    if preamble is not None:
        named.insert(0, ("preamble", preamble))
    for name, block in named:
        if not isinstance(block, Packet):
            raise TypeError(f"{name}: expected a Packet, got {type(block).__name__}")
    if not named:
        return []
    if preamble is not None and preamble.adapter_fingerprint is not None:
        raise ValueError(
            f"preamble: {preamble!r} is wrapped in soft tokens, and the preamble must not be: make it with "
            "build_preamble"
        )
    target = _Target(model)
    fitting: dict[int, Packet] = {}  # a block that occurs twice stays one
    for name, block in named:
        if id(block) not in fitting:
            fitting[id(block)] = target.fit(name, block)
    _check_one_adapter(documents)
    return [fitting[id(block)] for _, block in named]


class _Target:
    """What a packet must have to be used with a model as it is now."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = base_model(model).config
        state = state_of(model)
        self.name = getattr(config, "_name_or_path", "") or type(causal_lm(model)).__name__
        self.fingerprint = model_fingerprint(model)
        self.layers: int = config.num_hidden_layers
        spec = state.spec if state is not None else None
        self.k = spec.k if spec is not None else None
        self.anchors = spec.anchor_tokens if spec is not None else 0
        self.dtype: torch.dtype = base_model(model).dtype  # type: ignore[assignment]
        self.rope = describe_rotation(rope_of(model))
        heads = config.num_attention_heads
        self.heads = getattr(config, "num_key_value_heads", None) or heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads

    def fit(self, name: str, block: Packet) -> Packet:
        """The block at the model's depth; one that was built deeper gives its first layers."""
        self._check(name, block)
        return block if self.k is None else block.to_depth(self.k, self.anchors)

    def _check(self, name: str, block: Packet) -> None:
        what = f"{name}: {block!r}"
        if block.dtype != self.dtype:
            raise ValueError(
                f"{what} holds {block.dtype}, and the model {self.name} computes in {self.dtype}: build it anew"
            )
        if block.model_fingerprint != self.fingerprint:
            raise ValueError(
                f"{what} was made with weights {block.model_fingerprint[:16]} of {block.model_name or 'a model'}, and "
                f"the model {self.name} now has weights {self.fingerprint[:16]} (other weights, another adapter, a "
                "merge or a cast): take the model that it was made with, or build it anew with this one"
            )
        if block.rope != self.rope:
            difference = rotation_difference(block.rope, self.rope)
            if difference is not None:
                raise ValueError(f"{what} has other rotary positions than the model {self.name}: {difference}")
        shape = (block.layers, block.keys.shape[1], block.keys.shape[3])
        if shape != (self.layers, self.heads, self.head_dim):
            raise ValueError(
                f"{what} has {shape[0]} layers, {shape[1]} KV heads of {shape[2]}, and the model {self.name} has "
                f"{self.layers} layers, {self.heads} KV heads of {self.head_dim}: build it anew with this model"
            )
        if block.depth < (self.layers if self.k is None else self.k):
            raise ValueError(
                f"{what} was built to {_depth(block.k, block.layers)}, and the model is asked for "
                f"{_depth(self.k, self.layers)}: build it anew, or ask for k={block.depth} or less"
            )


def _check_one_adapter(documents: list[Packet]) -> None:
    for index, packet in enumerate(documents):
        if packet.adapter_fingerprint != documents[0].adapter_fingerprint:
            raise ValueError(
                f"packet {index}: {packet!r} was built {_adapter(packet)}, and packet 0 {_adapter(documents[0])}: "
                "packets that are used together must share one adapter"
            )


def _adapter(packet: Packet) -> str:
    fingerprint = packet.adapter_fingerprint
    return "without an adapter" if fingerprint is None else f"with adapter {fingerprint[:16]}"


def _depth(k: int | None, layers: int) -> str:
    return f"all {layers} layers" if k is None else f"k={k} of {layers} layers"
