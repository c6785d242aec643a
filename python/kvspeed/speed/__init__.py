# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SPEED beyond the patch itself: running a prompt to depth k for its KV alone, choosing k, finding loops."""

from kvspeed.rule import SpeedSpec, speed_mask
from kvspeed.speed.anchors import template_anchor
from kvspeed.speed.loops import Loop, LoopDetector, LoopRates, LoopRule, LoopStopping, find_loop, loop_rates
from kvspeed.speed.prefill import PromptKV, prompt_kv

__all__ = [
    "Loop",
    "LoopDetector",
    "LoopRates",
    "LoopRule",
    "LoopStopping",
    "PromptKV",
    "SpeedSpec",
    "find_loop",
    "loop_rates",
    "prompt_kv",
    "speed_mask",
    "template_anchor",
]
