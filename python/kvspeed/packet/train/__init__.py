# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Training of packet adapters: teacher, student, and the loop around them."""

from kvspeed.packet.train.loop import train_adapter
from kvspeed.packet.train.report import StepRecord, TrainReport

__all__ = ["StepRecord", "TrainReport", "train_adapter"]
