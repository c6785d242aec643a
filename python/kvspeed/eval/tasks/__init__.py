# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tasks for training and evaluation, by name: generated ones, and readers of datasets' own files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvspeed.eval.tasks.biography import biography
from kvspeed.eval.tasks.multihop import multihop
from kvspeed.eval.tasks.niah import niah
from kvspeed.samples import Sample

__all__ = ["GENERATED", "biography", "multihop", "niah"]

# name -> function of (count, *, seed, split, options of its own)
GENERATED: dict[str, Callable[..., list[Sample]]] = {
    "biography": biography,
    "niah": niah,
    "niah-multikey": partial(niah, distractors=3),
    "multihop": multihop,
}
