# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SPEED beyond the patch itself: running a prompt to depth k for its KV alone."""

from kvspeed.rule import SpeedSpec, speed_mask
from kvspeed.speed.prefill import PromptKV, prompt_kv

__all__ = ["PromptKV", "SpeedSpec", "prompt_kv", "speed_mask"]
