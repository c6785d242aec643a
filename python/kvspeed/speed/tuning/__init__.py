# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tuning for SPEED: data, the gathered forward, LoRA and full training, and the loop around them."""

from kvspeed.speed.tuning.report import TuneRecord, TuneReport
from kvspeed.speed.tuning.rows import Conversation, dataset_messages, read_messages
from kvspeed.speed.tuning.trained import load_tuned
from kvspeed.speed.tuning.tune import tune

__all__ = ["Conversation", "TuneRecord", "TuneReport", "dataset_messages", "load_tuned", "read_messages", "tune"]
