# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Methods by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches

from kvspeed.eval.methods.a3 import A3
from kvspeed.eval.methods.base import Method
from kvspeed.eval.methods.block_attention import BlockAttention
from kvspeed.eval.methods.cacheblend import CacheBlend
from kvspeed.eval.methods.compressed import compressed_methods
from kvspeed.eval.methods.epic import Epic
from kvspeed.eval.methods.full import Full
from kvspeed.eval.methods.nocache import NoCache
from kvspeed.eval.methods.none import NoRecompute
from kvspeed.eval.methods.packet import PacketMethod
from kvspeed.eval.methods.samkv import SamKV
from kvspeed.eval.methods.sink import Sink

__all__ = ["METHODS", "get_method"]


def _epic_bos(tokens: int) -> Method:
    """As epic, each document cached behind a BoS of its own."""
    return Epic(tokens, bos=True)


def _samkv_large() -> Method:
    """SamKV with 64 + 128 anchors a document."""
    return SamKV(initial=64, local=128, block=64, name="samkv-large")


def _sink_cacheblend(percent: int) -> Method:
    """CacheBlend on documents that have seen the preamble."""
    return CacheBlend(percent, before="preamble")


def _sink_epic(tokens: int) -> Method:
    """EPIC on documents that have seen the preamble."""
    return Epic(tokens, before="preamble")


def _sink_a3(percent: int) -> Method:
    """A3 on documents that have seen the preamble."""
    return A3(percent, before="preamble")


# Name -> how to make it. A name that ends in "<n>" stands for one of each whole number, which its maker is given.
METHODS: dict[str, Callable[..., Method]] = {
    "full": Full,
    "none": NoRecompute,
    "nocache": NoCache,
    "packet": PacketMethod,
    "sink": Sink,
    "cacheblend-<n>": CacheBlend,
    "epic-<n>": Epic,
    "epic-bos-<n>": _epic_bos,
    "a3-<n>": A3,
    "samkv": SamKV,
    "samkv-large": _samkv_large,
    "block-attention": BlockAttention,
    "sink+cacheblend-<n>": _sink_cacheblend,
    "sink+epic-<n>": _sink_epic,
    "sink+a3-<n>": _sink_a3,
    **compressed_methods(),
}


def get_method(name: str) -> Method:
    """The method called `name`, e.g. "packet" or "cacheblend-10".

    Raises:
        ValueError: there is none of this name, or its number is out of range.
    """
    if not isinstance(name, str):
        raise TypeError(f"method: expected a name, got {type(name).__name__}")
    if name in METHODS and "<n>" not in name:
        return METHODS[name]()
    for pattern, make in METHODS.items():
        found = re.fullmatch(re.escape(pattern).replace("<n>", r"(\d{1,6})"), name)
        if "<n>" in pattern and found:
            method = make(int(found[1]))
            method.name = name
            return method
    near = get_close_matches(name, METHODS, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"method: {name!r} is not known{meant}; known are {', '.join(METHODS)} (<n>: a number)")
