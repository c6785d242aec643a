# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Removing tokens at random: the control that every other press must beat."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvspeed.packet.press.base import LayerKV, Press

__all__ = ["RandomPress", "seeded"]


@dataclass(frozen=True)
class RandomPress(Press):
    """Every head of every layer keeps tokens of its own choice, all equally likely.

    Attributes:
        seed: the choice follows from it, the layer and the text, so that a packet that is built again is the same.
    """

    seed: int = 0

    name: ClassVar[str] = "random"

    def scores(self, layer: LayerKV) -> Tensor:
        return torch.rand(layer.keys.shape[:2], generator=seeded(self.seed, layer)).to(layer.keys.device)


def seeded(seed: int, layer: LayerKV) -> torch.Generator:
    """A generator on the CPU whose numbers follow from the seed, the layer and the text, on any device."""
    digest = hashlib.sha256(repr((seed, layer.index, layer.token_ids)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
