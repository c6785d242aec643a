# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Training: which tokens of a batch with labels run in the deep layers."""

from __future__ import annotations

import torch

from kvspeed.plan import DeepPlan, Keys
from kvspeed.rule import SpeedSpec

__all__ = ["labelled_rows"]


def labelled_rows(
    spec: SpeedSpec, labels: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[DeepPlan, torch.Tensor]:
    """Training: the deep columns of a batch with labels (-100 = prompt), and the labels of those columns.

    Deep are the anchors, the answer tokens (labelled), and each token that predicts one. Rows of a batch may differ in
    number; the shorter ones are filled up with columns that see themselves, are seen by none and carry no label. With
    `turns="reset"` an answer sees none of the answers before it, as in generation.

    Args:
        labels: int64 `[B, T]`, as transformers takes them (not shifted).
        attention_mask: `[B, T]` or None; 0 marks padding, on either side.

    Returns:
        The plan, and labels `[B, Q]` to be given to the loss instead.

    Raises:
        ValueError: no token has a label.
    """
    answer = labels != -100
    labels, answer = labels.cpu(), answer.cpu()
    real = torch.ones_like(answer) if attention_mask is None else attention_mask.cpu() != 0
    answer = answer & real
    learned = answer.clone()  # what a token right before it predicts; none does after padding or a hole in the mask
    learned[:, 0] = False
    learned[:, 1:] &= real[:, :-1]
    if not bool(learned.any()):
        raise ValueError(
            "labels hold no answer: every entry is -100, padding, or has no token before it; give at least one token "
            "its label"
        )
    slot = torch.arange(labels.shape[1])
    padding = torch.where(real, 0, 1).cumprod(1).sum(1, keepdim=True)  # leading zeros of the mask
    anchor = real & (slot - padding < spec.anchor_tokens)
    predictor = torch.zeros_like(answer)
    predictor[:, :-1] = answer[:, 1:] & real[:, :-1]
    deep = anchor | answer | predictor
    width = int(deep.sum(1).max())
    # Stable sort puts the deep slots first, in order.
    index = torch.sort((~deep).to(torch.int8), dim=1, stable=True).indices[:, :width]
    valid = deep.gather(1, index)
    kept = (answer | predictor if spec.boundary == "keep" else answer).gather(1, index)
    # Fillers have slots of their own, so that each sees itself alone.
    query_slot = torch.where(valid, index, -1 - torch.arange(width))
    if spec.turns == "reset":  # a span is its answer and the token that predicts the first of it
        begins = answer & ~torch.roll(answer, 1, 1)
        begins[:, 0] = answer[:, 0]
        span = (begins.cumsum(1) + (predictor & ~answer)).gather(1, index)
        kept = kept[:, None, :] & (span[:, :, None] == span[:, None, :])
    plan = DeepPlan(
        spec=spec,
        index=index,
        keys=lambda: Keys(query_slot, valid, kept),
        padding=padding,
        query_slot=query_slot,
        plain=False,
        valid=valid if spec.gaps else None,
    )
    return plan, torch.where(valid & learned.gather(1, index), labels.gather(1, index), -100)
