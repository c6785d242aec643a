# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Statistical leverage of the keys (Compactor, arXiv:2507.08143): tokens whose keys no others resemble stay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvspeed.packet.press.base import LayerKV, Press
from kvspeed.packet.press.random import seeded

__all__ = ["LeveragePress", "leverage"]

_JITTER = 1e-2  # on the diagonal; kvpress has the same
_TRIES = 5


@dataclass(frozen=True)
class LeveragePress(Press):
    """Leverage scores of the keys before their rotation, centred, and sketched by a random matrix to fewer dimensions.

    They tell tokens apart where there are clearly more of them than dimensions of the sketch.

    Attributes:
        sketch: dimensions of the sketch.
        seed: of the random matrix, with the layer and the text.
    """

    sketch: int = 48
    seed: int = 0

    name: ClassVar[str] = "leverage"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.sketch) is not int or self.sketch < 1:
            raise ValueError(f"sketch: expected an integer from 1, got {self.sketch!r}")

    def scores(self, layer: LayerKV) -> Tensor:
        heads, _, size = layer.keys.shape
        sketch = torch.randn(heads, size, self.sketch, generator=seeded(self.seed, layer))
        scores = leverage(layer.unrotated_keys(), sketch.to(layer.keys.device))
        # z-scores of the whole layer, as kvpress gives them; the order within a head stays
        spread = scores.std() if scores.numel() > 1 else scores.new_zeros(())
        return (scores - scores.mean()) / spread.clamp_min(1e-6)


def leverage(keys: Tensor, sketch: Tensor) -> Tensor:
    """`x . (X^T X)^-1 x` of each row x of X, which is `keys` centred and multiplied by `sketch` / sqrt(its width).

    Args:
        keys: float32 `[H_kv, T, D]`, not rotated.
        sketch: float32 `[H_kv, D, S]`, standard normal numbers.

    Returns:
        float32 `[H_kv, T]`, none negative.
    """
    width = sketch.shape[-1]
    keys, sketch = keys.double(), sketch.double()  # few tokens have nearly equal scores, whose order float32 would draw
    rows = (keys - keys.mean(1, keepdim=True)) @ (sketch / math.sqrt(width))
    gram = rows.transpose(1, 2) @ rows
    factor = _cholesky((gram + gram.transpose(1, 2)) / 2)
    solved = torch.cholesky_solve(rows.transpose(1, 2), factor).transpose(1, 2)
    return (rows * solved).sum(-1).clamp_min(0).float()


def _cholesky(gram: Tensor) -> Tensor:
    """The lower factor of `gram` `[H_kv, S, S]` with just enough on its diagonal: it has no more rank than tokens."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    jitter = _JITTER
    for _ in range(_TRIES):
        factor, failed = torch.linalg.cholesky_ex(gram + jitter * identity)
        if not bool(failed.any()):
            return factor
        jitter *= 10
    raise ValueError(f"the keys' Gram matrix is not positive definite, even with {jitter / 10:g} on its diagonal")
