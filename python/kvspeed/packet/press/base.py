# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a press is: scores for the tokens of one layer, of which the best stay.

A press looks at a packet while it is built, one layer at a time, and gives every KV head a score for every token. Each
head keeps the tokens with the highest scores, as many in every head and layer. They keep the position that their keys
were rotated for, so nothing is rotated again, and the places of the others stay empty.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["LayerKV", "Press", "kept_tokens", "survivors", "unrotated"]


@dataclass(frozen=True)
class LayerKV:
    """One layer of a packet that is being built, as a press sees it. Nothing in it may be written to.

    Attributes:
        index: the layer.
        keys: `[H_kv, T, D]`, rotated for positions 0 to T - 1.
        values: `[H_kv, T, D]`.
        query: `[H_q, D]`, the last token's query, rotated for position T - 1.
        scale: what the layer multiplies q . k with.
        softcap: what it caps the product at (`softcap * tanh(x / softcap)`); 0 where it does not.
        window: how many tokens a query sees, itself counted; None for all.
        inv_freq: float32 `[R/2]`, the layer's rotary frequencies.
        interleaved: whether pairs are (2i, 2i + 1) rather than (i, i + R/2).
        token_ids: the text's tokens, from which a press that draws numbers may seed them.
        module: the attention module.
        hidden: `[1, T, hidden]`, what went into the module, for presses that ask for it (`needs_hidden`).
        arguments: the other keywords that the module was called with, for the same.
    """

    index: int
    keys: Tensor
    values: Tensor
    query: Tensor
    scale: float
    softcap: float
    window: int | None
    inv_freq: Tensor
    interleaved: bool
    token_ids: tuple[int, ...]
    module: nn.Module
    hidden: Tensor | None = None
    arguments: dict[str, Any] | None = None

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def unrotated_keys(self) -> Tensor:
        """The keys as they were before they were rotated, float32 `[H_kv, T, D]`; see `unrotated`."""
        return unrotated(self.keys, self.inv_freq, self.interleaved)


@dataclass(frozen=True)
class Press(ABC):
    """A way to choose the tokens that are removed from a packet.

    Attributes:
        ratio: the fraction of the tokens that is removed, 0 <= ratio < 1; soft tokens count.
        protect_soft: whether the adapter's header and trailer stay whatever their scores are. They are among the tokens
            that are counted: protecting them takes more of the text.
    """

    ratio: float
    protect_soft: bool = True

    name: ClassVar[str] = ""  # in file names, tables and messages
    needs_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not isinstance(self.protect_soft, bool):
            raise TypeError(f"protect_soft: expected True or False, got {self.protect_soft!r}")

    @abstractmethod
    def scores(self, layer: LayerKV) -> Tensor:
        """Float32 `[H_kv, T]`, the more the better; no NaN."""

    def describe(self) -> dict[str, Any]:
        """All that decides which tokens stay, as JSON: a packet records it, and a store finds packets by it."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **options}

    def begin(self, model: nn.Module) -> None:  # noqa: B027 (most presses need nothing)
        """Called before the first layer of each packet."""


def check_ratio(ratio: Any) -> None:
    """Raise unless `ratio` is a fraction that may be removed."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"ratio: expected a number, got {type(ratio).__name__}")
    if not 0 <= ratio < 1:  # a NaN is not
        raise ValueError(f"ratio: is the fraction of tokens to remove, from 0 to below 1; got {ratio!r}")


def kept_tokens(tokens: int, ratio: float) -> int:
    """How many of `tokens` stay when the fraction `ratio` is removed: at least one (as kvpress rounds)."""
    return max(1, int(tokens * (1 - ratio)))


def survivors(scores: Tensor, kept: int, protected: Tensor | None = None) -> Tensor:
    """The positions of the `kept` best tokens of each head, ascending: int32 `[H_kv, kept]`.

    Of equal scores the earlier token stays, so that the choice is the same on every device.

    Args:
        scores: `[H_kv, T]`.
        kept: 1 .. T.
        protected: bool `[T]`, tokens that stay whatever their score is.

    Raises:
        ValueError: a score is no number, or more tokens are protected than stay.
    """
    scores = scores.float()
    if bool(scores.isnan().any()):
        raise ValueError("the press gave scores that are no numbers (NaN), by which nothing can be chosen")
    if protected is not None:
        if int(protected.sum()) > kept:
            raise ValueError(f"{int(protected.sum())} tokens are protected, and only {kept} are to stay")
        # a class of their own, since a press may give +inf itself
        order = scores.argsort(dim=-1, descending=True, stable=True)
        first = protected.to(scores.device)[order].to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, first)
    else:
        order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[:, :kept].sort(-1).values.to(torch.int32)


def unrotated(keys: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """`keys` `[H_kv, T, D]`, rotated for positions 0 to T - 1, turned back to position 0: float32, the same shape.

    Angles are those of float64. A model's `attention_scaling` (YaRN) stays in.
    """
    half = inv_freq.shape[0]
    position = torch.arange(keys.shape[1], dtype=torch.float64)
    angle = position[:, None] * inv_freq.cpu().double()[None]
    cos, sin = (table.to(device=keys.device, dtype=torch.float32) for table in (angle.cos(), angle.sin()))
    turned = keys.float().clone()
    if interleaved:
        one, two = turned[..., 0 : 2 * half : 2], turned[..., 1 : 2 * half : 2]
    else:
        one, two = turned[..., :half], turned[..., half : 2 * half]
    new_one, new_two = one * cos + two * sin, two * cos - one * sin
    one.copy_(new_one)
    two.copy_(new_two)
    return turned


def percent(ratio: float) -> str:
    """The ratio as names have it: 30 for 0.3."""
    return f"{100 * ratio:.6g}" if math.isfinite(ratio) else str(ratio)
