# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What `tune` is asked for, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kvspeed.models import base_model
from kvspeed.packet.adapter import PacketAdapter, check_seed
from kvspeed.packet.build import max_positions
from kvspeed.rule import SpeedSpec
from kvspeed.speed.tuning.items import Item

__all__ = ["Choices", "check_room", "spec_for"]

_CHOICES = {
    "method": ("lora", "full"),
    "loss": ("ce", "kl"),
    "labels": ("given", "model"),
    "dtype": (None, "bf16", "fp32"),
}


@dataclass(frozen=True)
class Choices:
    """The settings of a run that are numbers or words; see `tune`."""

    method: str
    rank: int
    alpha: float | None
    loss: str
    labels: str
    lr: float
    adapter_lr: float
    packet_share: float
    warmup: int
    batch_size: int
    epochs: int
    steps: int | None
    clip: float | None
    patience: int | None
    evaluate_every: int | None
    max_new_tokens: int
    max_tokens: int | None
    top: int | None
    micro_tokens: int
    checkpoint_every: int
    dtype: str | None
    seed: int
    gradient_checkpointing: bool

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: got {value!r}, choose from {', '.join(map(repr, allowed))}")
        for name, optional, least in (
            ("rank", False, 1),
            ("warmup", False, 0),
            ("batch_size", False, 1),
            ("epochs", False, 1),
            ("steps", True, 1),
            ("patience", True, 1),
            ("evaluate_every", True, 1),
            ("max_new_tokens", False, 1),
            ("max_tokens", True, 2),
            ("top", True, 1),
            ("micro_tokens", False, 1),
            ("checkpoint_every", False, 1),
        ):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name}: got {value}, give at least {least}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed: expected an integer, got {type(self.seed).__name__}")
        check_seed(self.seed)
        for name in ("lr", "adapter_lr", "alpha", "clip", "packet_share"):
            value = getattr(self, name)
            if value is None and name in ("alpha", "clip"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
            if name != "packet_share" and not 0 < value < float("inf"):
                raise ValueError(f"{name}: got {value!r}, give a positive number")
        if not 0 <= self.packet_share <= 1:
            raise ValueError(f"packet_share: got {self.packet_share!r}, give a share between 0 and 1")


def spec_for(
    model: nn.Module,
    k: int | None,
    deep_layers: Iterable[int] | None,
    anchor_tokens: int,
    boundary: str,
    upper_attention: str,
) -> SpeedSpec:
    """The rule to tune for; k = L where neither `k` nor `deep_layers` says anything.

    Raises:
        TypeError, ValueError: an argument is out of range, or the model's upper layers share KV.
    """
    base: Any = base_model(model)
    layers = len(base.layers)
    shared = getattr(base.config, "num_kv_shared_layers", 0)
    if shared:
        raise ValueError(
            f"the model's last {shared} layers share the KV of lower ones, so that there is nothing to leave out above "
            "k; tune a model whose layers have KV of their own"
        )
    gaps: tuple[int, ...] = ()
    if deep_layers is not None:
        deep = sorted(set(deep_layers))
        if k is not None:
            raise ValueError(f"k is {k} and deep_layers were given too; they say the same thing, so give one of them")
        if any(isinstance(layer, bool) or not isinstance(layer, int) or not 1 <= layer < layers for layer in deep):
            raise ValueError(f"deep_layers are {deep}; give layers from 1 to {layers - 1} (layer 0 sees every prompt)")
        k = max(layer for layer in range(layers) if layer not in deep) + 1
        gaps = tuple(layer for layer in deep if layer < k)
    spec = SpeedSpec(layers if k is None else k, anchor_tokens, boundary, upper_attention, gaps=gaps)
    if spec.k > layers:
        raise ValueError(f"k is {k} and the model has {layers} layers; give 1 to {layers}, or None for all")
    return spec


def check_room(
    model: nn.Module, items: list[Item], adapter: PacketAdapter | None, spec: SpeedSpec, new: int | None = None
) -> None:
    """Refuse items that the model has no room for, or whose preamble cannot hold the anchors of packets.

    Args:
        new: the most tokens of answers that are not there yet; None: they are the items' own.
    """
    limit = max_positions(model)
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    for item in items:
        context = item.context
        if context is None:
            continue
        soft = adapter.tokens * len(context.documents) if adapter is not None else 0
        before = len(context.preamble) + sum(map(len, context.documents)) + soft
        for query, answer in zip(context.queries, item.answers, strict=True):
            total = before + len(query.question) + (len(answer.tokens) if new is None else new)
            if limit is not None and total > limit:
                raise ValueError(
                    f"sample {query.id}: has {total} tokens with its answer, more than the model's {limit} positions: "
                    "shorten its documents, or use fewer" + ("" if new is None else f"; max_new_tokens is {new}")
                )
        if adapter is not None and spec.k < layers and len(context.preamble) < spec.anchor_tokens:
            raise ValueError(
                f"anchor_tokens is {spec.anchor_tokens} and the preamble before packets has {len(context.preamble)} "
                "tokens; give fewer anchors"
            )
