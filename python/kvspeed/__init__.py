# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""kvspeed: long prompts made cheap in PyTorch language models, by SPEED and KV packets.

Names are imported on first use, so that `import kvspeed` costs next to nothing and touches no device.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "KVCache": "kvspeed.cache",
    "Packet": "kvspeed.packet",
    "PacketAdapter": "kvspeed.packet",
    "PacketStore": "kvspeed.packet.store",
    "Sample": "kvspeed.samples",
    "Segment": "kvspeed.segment",
    "SegmentList": "kvspeed.segment",
    "SpeedSpec": "kvspeed.rule",
    "VerifyReport": "kvspeed.gate",
    "assemble": "kvspeed.packet",
    "at_depth": "kvspeed.state",
    "build_packet": "kvspeed.packet",
    "build_preamble": "kvspeed.packet",
    "generate": "kvspeed.packet",
    "patch_model": "kvspeed.patch",
    "read_samples": "kvspeed.samples",
    "speed_mask": "kvspeed.rule",
    "train_adapter": "kvspeed.packet.train",
    "unpatch_model": "kvspeed.install",
    "verify": "kvspeed.gate",
    "write_samples": "kvspeed.samples",
}

_MODULES = ("eval", "graph", "ops", "packet", "speed", "testbed")

__all__ = ["__version__", *_MODULES, *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"kvspeed.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvspeed' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    value = globals()[name] = getattr(import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
