# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""CurDKV (arXiv:2509.15038): tokens whose keys and values are long among their neighbours' stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvspeed.packet.press.base import LayerKV, Press

__all__ = ["CURPress"]


@dataclass(frozen=True)
class CURPress(Press):
    """Approximate leverage of key times that of value: squared norms, each as its share of a window of tokens.

    Attributes:
        sinks: the first tokens, which stay (before them, protected tokens).
        window: tokens of a window. The last one may be shorter, which favours its tokens; kvpress does the same.
    """

    sinks: int = 4
    window: int = 16

    name: ClassVar[str] = "cur"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("sinks", 0), ("window", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: expected an integer from {least}, got {value!r}")

    def scores(self, layer: LayerKV) -> Tensor:
        scores = self._share(layer.keys) * self._share(layer.values)
        scores = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        scores[:, : self.sinks] = 1.0
        return scores

    def _share(self, tensor: Tensor) -> Tensor:
        """`[H_kv, T]`: the squared norm of each token as its share of its window."""
        norms = tensor.float().square().sum(-1)
        heads, tokens = norms.shape
        windows = functional.pad(norms, (0, -tokens % self.window)).view(heads, -1, self.window)
        shares = windows / windows.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return shares.view(heads, -1)[:, :tokens]
