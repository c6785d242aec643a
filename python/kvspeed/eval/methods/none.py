# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Plain concatenation: KV of each document computed alone, moved to its position, nothing trained or recomputed."""

from __future__ import annotations

from kvspeed.eval.methods.packet import PacketMethod

__all__ = ["NoRecompute"]


class NoRecompute(PacketMethod):
    """Packets without soft tokens: what a method with adapters or recomputation must repair."""

    name = "none"

    def __init__(self) -> None:
        super().__init__(adapter=False)
