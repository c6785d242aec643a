# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SwiftKV (arXiv:2410.03960), the rival that needs weights of its own: the weights, and their training."""

from __future__ import annotations

from kvspeed.eval.swiftkv.train import train_swiftkv
from kvspeed.eval.swiftkv.weights import GroupedCache, SwiftKV

__all__ = ["GroupedCache", "SwiftKV", "train_swiftkv"]
