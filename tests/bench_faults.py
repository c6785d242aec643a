# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Stages that go wrong, for test_bench_gpu.py: bench/gpu.py runs each in a process of its own."""

from __future__ import annotations

import os
import time
from typing import Any


def fine(run: Any) -> None:
    run.note("answer", 42)


def raising(run: Any) -> None:
    run.note("before", 1)
    raise ValueError("this stage fails on purpose")


def crashing(run: Any) -> None:
    run.note("before", 1)
    os.abort()


def hanging(run: Any) -> None:
    run.note("before", 1)
    print("about to hang", flush=True)
    time.sleep(600)
