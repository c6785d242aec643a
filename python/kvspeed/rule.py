# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Who sees whom above depth k: the rule of SPEED, written down once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["SpeedSpec", "speed_mask"]


@dataclass(frozen=True)
class SpeedSpec:
    """How a model is patched: depth and visibility above it (arXiv:2605.06105).

    Attributes:
        k: prompt tokens are computed and cached in layers 0 .. k-1 only, `gaps` aside.
        anchor_tokens: the first tokens of the sequence, which run through and leave KV in every layer.
        boundary: "transient": the last prompt token, which predicts the first answer token, leaves nothing above k;
            "keep": later answer tokens see it.
        upper_attention: "causal": above k a token sees anchors, earlier answer tokens and itself; "self": anchors and
            itself (the paper's SelfOnly ablation).
        turns: "keep": earlier answers stay deep in later turns; "reset": they lose their KV above k.
        gaps: layers below k - 1 that are like those from k on, in order: a prompt token passes them by unchanged.
    """

    k: int
    anchor_tokens: int = 1
    boundary: str = "transient"
    upper_attention: str = "causal"
    turns: str = "keep"
    gaps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_int("k", self.k, 1)
        _check_int("anchor_tokens", self.anchor_tokens, 0)
        _check_choice("boundary", self.boundary, ("transient", "keep"))
        _check_choice("upper_attention", self.upper_attention, ("causal", "self"))
        _check_choice("turns", self.turns, ("keep", "reset"))
        if not isinstance(self.gaps, tuple) or not all(type(layer) is int for layer in self.gaps):
            raise TypeError(f"gaps are {self.gaps!r}; they must be a tuple of ints")
        if self.gaps != tuple(sorted(set(self.gaps))) or not all(0 < layer < self.k - 1 for layer in self.gaps):
            raise ValueError(f"gaps are {self.gaps}; they must be layers from 1 to k - 2 = {self.k - 2}, in order")
        if self.gaps and self.turns == "reset":
            raise ValueError(
                'turns is "reset", which must equal a conversation that is encoded afresh, while layers above a gap '
                'keep what earlier answers were in it; give turns="keep"'
            )

    def is_deep(self, layer: int) -> bool:
        """Whether only anchors, answers and what predicts them run in `layer`."""
        return layer >= self.k or layer in self.gaps

    def deep_layers(self, layers: int) -> list[int]:
        """Of a model with so many layers, those that are deep."""
        return [*self.gaps, *range(self.k, layers)]


def speed_mask(
    prompt_length: int,
    total_length: int,
    *,
    anchor_tokens: int = 1,
    boundary: str = "transient",
    upper_attention: str = "causal",
) -> torch.Tensor:
    """The visibility of SPEED in layers >= k, for one prompt and its answer.

    Row i may look at column j. Every token sees itself and the anchors before it; under `upper_attention="causal"` also
    the answer tokens before it, and under `boundary="keep"` answer tokens see the last prompt token. Rows of prompt
    tokens that are neither anchor nor last are never computed under SPEED; their rows here are what such a token would
    see, and no other row looks at them.

    Args:
        prompt_length: tokens of the prompt, >= 0; tokens from there on are answer.
        total_length: prompt and answer, >= prompt_length.
        anchor_tokens: the first tokens of the sequence that every token sees.
        boundary: "transient" or "keep".
        upper_attention: "causal" or "self".

    Returns:
        bool `[total_length, total_length]`, True where row i sees column j.

    Raises:
        TypeError, ValueError: an argument outside of what is said above.
    """
    _check_int("prompt_length", prompt_length, 0)
    _check_int("total_length", total_length, prompt_length, "prompt_length")
    _check_int("anchor_tokens", anchor_tokens, 0)
    _check_choice("boundary", boundary, ("transient", "keep"))
    _check_choice("upper_attention", upper_attention, ("causal", "self"))
    position = torch.arange(total_length)
    query, key = position[:, None], position[None, :]
    seen = key < anchor_tokens
    if upper_attention == "causal":
        seen = seen | (key >= prompt_length)
        if boundary == "keep":
            seen = seen | ((key == prompt_length - 1) & (query >= prompt_length))
    return (seen & (key <= query)) | (key == query)


def _check_int(name: str, value: object, least: int, least_name: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be an int")
    if value < least:
        bound = f"{least_name} = {least}" if least_name else str(least)
        raise ValueError(f"{name} is {value}; it must be at least {bound}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
