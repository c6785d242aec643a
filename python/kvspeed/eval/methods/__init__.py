# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""KV Packet and its rivals behind one interface; `get_method` makes one from its name."""

from __future__ import annotations

from kvspeed.eval.methods.base import Block, Context, Method, Prepared, decode
from kvspeed.eval.methods.registry import METHODS, SPEED_METHODS, get_method

__all__ = ["METHODS", "SPEED_METHODS", "Block", "Context", "Method", "Prepared", "decode", "get_method"]
