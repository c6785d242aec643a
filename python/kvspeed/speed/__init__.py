# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SPEED beyond the patch itself: running a prompt to depth k for its KV alone, choosing k, finding loops, tuning."""

from importlib import import_module
from typing import Any

from kvspeed.rule import SpeedSpec, speed_mask
from kvspeed.speed.anchors import template_anchor
from kvspeed.speed.loops import Loop, LoopDetector, LoopRates, LoopRule, LoopStopping, find_loop, loop_rates
from kvspeed.speed.prefill import PromptKV, prompt_kv

# On first use: tuning stands on packets, whose modules need those above.
_LATER = {
    "DepthChoice": "kvspeed.speed.choice",
    "TuneReport": "kvspeed.speed.tuning",
    "choose_depth": "kvspeed.speed.auto",
    "load_tuned": "kvspeed.speed.tuning",
    "read_messages": "kvspeed.speed.tuning",
    "remember_choice": "kvspeed.speed.choice",
    "tune": "kvspeed.speed.tuning",
}

__all__ = [
    "DepthChoice",
    "Loop",
    "LoopDetector",
    "LoopRates",
    "LoopRule",
    "LoopStopping",
    "PromptKV",
    "SpeedSpec",
    "TuneReport",
    "choose_depth",
    "find_loop",
    "load_tuned",
    "loop_rates",
    "prompt_kv",
    "read_messages",
    "remember_choice",
    "speed_mask",
    "template_anchor",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
