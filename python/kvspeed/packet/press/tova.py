# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""TOVA (arXiv:2401.06104): what the last token looks at stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvspeed.packet.press.base import LayerKV, Press

__all__ = ["TOVAPress"]


@dataclass(frozen=True)
class TOVAPress(Press):
    """The attention weights of the last token, averaged over all query heads, so that every head keeps the same tokens.

    The last token itself always stays, as in kvpress.
    """

    name: ClassVar[str] = "tova"

    def scores(self, layer: LayerKV) -> Tensor:
        heads = layer.keys.shape[0]
        query = layer.query.float().view(heads, -1, layer.query.shape[-1])
        logits = query @ layer.keys.float().transpose(1, 2) * layer.scale  # [H_kv, group, T]
        if layer.softcap:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        if layer.window is not None:
            logits[..., : max(0, layer.tokens - layer.window)] = float("-inf")
        weights = torch.softmax(logits, -1).mean((0, 1))
        weights[-1] = 2.0  # above all weights
        return weights.expand(heads, -1)
