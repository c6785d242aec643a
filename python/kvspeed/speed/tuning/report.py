# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a tuning run did: numbers, and its curve."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from kvspeed.atomic import replacing
from kvspeed.packet.train.report import StepRecord, TrainReport

__all__ = ["TuneRecord", "TuneReport"]

_COLUMNS = ("step", "loss", "dev_loss", "dev_exact", "lr", "seconds", "tokens_per_s")


@dataclass(frozen=True)
class TuneRecord(StepRecord):
    """One step, or one look at the dev split.

    Attributes:
        exact: share of answers that greedy decoding would write to the token (a conversation counts as one answer).
    """

    exact: float = 0.0


@dataclass
class TuneReport(TrainReport):
    """What `tune` did.

    Attributes:
        method: "lora" or "full".
        speed: the depth and rule, fields of `SpeedSpec`; k = L is the control.
        layers: L.
        trained_parameters: numbers that were trained.
        trained_tokens: that ran in training: documents once, questions and answers.
        best_exact: of the dev split where the weights were kept.
        first_exact: before training.
        peak_memory_bytes: the most memory: of the GPU while training, or of the whole process on the CPU.
        stopped: why it ended before its time: "", "early" (patience) or "not a number".
    """

    method: str = ""
    speed: dict[str, Any] = field(default_factory=dict)
    layers: int = 0
    trained_parameters: int = 0
    trained_tokens: int = 0
    best_exact: float | None = None
    first_exact: float | None = None
    peak_memory_bytes: int = 0
    stopped: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of training alone, the dev split left out; 0 where nothing was trained."""
        spent = sum(one.seconds for one in self._spans())
        return self.trained_tokens / spent if spent else 0.0

    def _spans(self) -> list[StepRecord]:
        """The steps, with the seconds of each alone."""
        found, before = [], 0.0
        for one in self.records:
            if one.split == "train":
                found.append(StepRecord(one.step, "train", one.loss, one.lr, one.seconds - before))
            before = one.seconds
        return found

    def __str__(self) -> str:
        depth = f"k = {self.speed.get('k')} of {self.layers}, {self.method}: "
        text = depth + super().__str__()
        if self.first_exact is not None and self.best_exact is not None:
            text += f"; dev answers right to the token {self.first_exact:.1%} -> {self.best_exact:.1%}"
        return text + f"; {self.tokens_per_second:.0f} tokens/s"

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for one in self.records:
            exact = getattr(one, "exact", 0.0)
            losses = (f"{one.loss:.6f}", "", "") if one.split == "train" else ("", f"{one.loss:.6f}", f"{exact:.4f}")
            writer.writerow([one.step, *losses, f"{one.lr:.6g}", f"{one.seconds:.2f}", f"{one.tokens_per_s:.1f}"])
        with replacing(path) as part:
            part.write_text(text.getvalue(), encoding="utf-8")

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Everything but the steps' records; the looks at the dev split are in it."""
        facts = asdict(self)
        facts["records"] = [record for record in facts["records"] if record["split"] == "dev"]
        facts["tokens_per_second"] = self.tokens_per_second
        with replacing(path) as part:
            part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
