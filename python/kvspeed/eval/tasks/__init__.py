# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tasks for training and evaluation, by name: generated ones, and readers of datasets' own files."""

from __future__ import annotations

from kvspeed.eval.tasks.arithmetic import arithmetic
from kvspeed.eval.tasks.biography import biography
from kvspeed.eval.tasks.code import code
from kvspeed.eval.tasks.copying import copying
from kvspeed.eval.tasks.hotpotqa import hotpotqa
from kvspeed.eval.tasks.instruction import instruction
from kvspeed.eval.tasks.multihop import multihop
from kvspeed.eval.tasks.musique import musique
from kvspeed.eval.tasks.niah import long, niah
from kvspeed.eval.tasks.spec import CATEGORIES, GENERATED, SKILLS, TASKS, TaskSpec, split_specs

__all__ = [
    "CATEGORIES",
    "GENERATED",
    "SKILLS",
    "TASKS",
    "TaskSpec",
    "arithmetic",
    "biography",
    "code",
    "copying",
    "hotpotqa",
    "instruction",
    "long",
    "multihop",
    "musique",
    "niah",
    "split_specs",
]
