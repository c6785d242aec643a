# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Methods by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from kvspeed.eval.methods.a3 import A3
from kvspeed.eval.methods.answer_first import AnswerFirst
from kvspeed.eval.methods.base import Method
from kvspeed.eval.methods.block_attention import BlockAttention
from kvspeed.eval.methods.cacheblend import CacheBlend
from kvspeed.eval.methods.compressed import compressed_methods
from kvspeed.eval.methods.epic import Epic
from kvspeed.eval.methods.full import Full
from kvspeed.eval.methods.nocache import NoCache
from kvspeed.eval.methods.none import NoRecompute
from kvspeed.eval.methods.packet import PacketMethod
from kvspeed.eval.methods.pop import Pop
from kvspeed.eval.methods.samkv import SamKV
from kvspeed.eval.methods.sink import Sink
from kvspeed.eval.methods.speed import FullModel, PacketSpeed, Speed
from kvspeed.eval.methods.swiftkv import SwiftKVMethod

__all__ = ["METHODS", "SPEED_METHODS", "get_method"]


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


def _no_anchor(k: int) -> Method:
    """Above the first k layers an answer sees nothing of the prompt, not even its first token."""
    return Speed(k, anchor_tokens=0)


def _self_only(k: int) -> Method:
    """Above the first k layers an answer token sees the anchor and itself, nothing of the answer before it."""
    return Speed(k, upper_attention="self")


def _cut(k: int) -> Method:
    """SPEED on a model that was never tuned for it."""
    return Speed(k)


def _swiftkv_shared(k: int, share: int) -> Method:
    """The same with one projected KV for each group of so many layers."""
    return SwiftKVMethod(k, share)


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


# Those of `kvspeed eval speed`: the whole prompt is computed for every question, by all but the packets.
SPEED_METHODS: dict[str, Callable[..., Method]] = {
    "full": FullModel,
    "speed-<n>": Speed,
    "speed-<n>-noanchor": _no_anchor,
    "selfonly-<n>": _self_only,
    "answerfirst<n>to<n>": AnswerFirst,
    "cut-<n>": _cut,
    "swiftkv-<n>": SwiftKVMethod,
    "swiftkv-<n>-share<n>": _swiftkv_shared,
    "pop-<n>": Pop,
    "packet": PacketMethod,
    "packet+speed-<n>": PacketSpeed,
}


def get_method(name: str, known: Mapping[str, Callable[..., Method]] = METHODS) -> Method:
    """The method called `name`, e.g. "packet" or "cacheblend-10".

    Args:
        name: of one of `known`.
        known: `METHODS`, or `SPEED_METHODS`.

    Raises:
        ValueError: there is none of this name, or its number is out of range.
    """
    if not isinstance(name, str):
        raise TypeError(f"method: expected a name, got {type(name).__name__}")
    if name in known and "<n>" not in name:
        return known[name]()
    for pattern, make in known.items():
        found = re.fullmatch(re.escape(pattern).replace("<n>", r"(\d{1,6})"), name)
        if "<n>" in pattern and found:
            method = make(*map(int, found.groups()))
            method.name = name
            return method
    near = get_close_matches(name, known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"method: {name!r} is not known{meant}; known are {', '.join(known)} (<n>: a number)")
