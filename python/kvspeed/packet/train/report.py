# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a training run did: numbers, and its curve as CSV and PNG."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass, field
from pathlib import Path

from kvspeed.atomic import replacing

__all__ = ["StepRecord", "TrainReport"]

_COLUMNS = ("step", "loss", "dev_loss", "lr", "seconds", "tokens_per_s")


@dataclass(frozen=True)
class StepRecord:
    """One step of training, or one look at the dev split.

    Attributes:
        step: optimizer steps done.
        split: "train" or "dev".
        loss: nats an answer token.
        lr: learning rate of the step.
        seconds: of training so far, over all runs that were resumed; the teacher's are not in it.
        tokens_per_s: tokens of the step (prompts, soft tokens and answers) a second; 0 for "dev".
    """

    step: int
    split: str
    loss: float
    lr: float
    seconds: float
    tokens_per_s: float = 0.0


@dataclass
class TrainReport:
    """What `train_adapter` did.

    Attributes:
        loss: "kl" or "ce".
        samples: trained on.
        dev_samples: held out.
        steps: done in all, before the run was resumed included.
        planned_steps: that the schedule had.
        best_step: of the soft tokens that were kept: where the dev loss was least, or the last step without dev split.
        best_dev: dev loss there, nats an answer token; None without a dev split.
        first_dev: dev loss of the untrained soft tokens.
        stopped_early: whether the dev loss ended it.
        seconds: of training, teacher not included.
        teacher_seconds: for the teacher's answers in this run.
        records: the curve.
    """

    loss: str
    samples: int
    dev_samples: int
    steps: int = 0
    planned_steps: int = 0
    best_step: int = 0
    best_dev: float | None = None
    first_dev: float | None = None
    stopped_early: bool = False
    seconds: float = 0.0
    teacher_seconds: float = 0.0
    records: list[StepRecord] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.steps} of {self.planned_steps} steps on {self.samples} samples in {self.seconds:.0f} s"
        if self.first_dev is not None and self.best_dev is not None:
            text += f"; dev {self.loss} {self.first_dev:.4f} -> {self.best_dev:.4f} nats a token, step {self.best_step}"
        return text + (", stopped early" if self.stopped_early else "")

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the curve, a line a record; `loss` is empty where the dev split was looked at, else `dev_loss` is."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for one in self.records:
            losses = (f"{one.loss:.6f}", "") if one.split == "train" else ("", f"{one.loss:.6f}")
            writer.writerow([one.step, *losses, f"{one.lr:.6g}", f"{one.seconds:.2f}", f"{one.tokens_per_s:.1f}"])
        _replace(Path(path), text.getvalue().encode())

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve: every step's loss and the dev split's, on a logarithmic axis.

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError(
                "a curve is drawn with matplotlib, which is missing; pip install 'kvspeed[plots]' (or matplotlib)"
            ) from None
        figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for split, style in (("train", {"color": "0.7", "linewidth": 0.8}), ("dev", {"color": "C0", "marker": "o"})):
            points = [(one.step, one.loss) for one in self.records if one.split == split and one.loss > 0]
            if points:
                axes.plot(*zip(*points, strict=True), label=split, markersize=3, **style)
        if self.best_dev is not None:
            axes.axvline(self.best_step, color="C1", linewidth=0.8, linestyle="--", label="kept")
        axes.set_xlabel("step")
        axes.set_ylabel(f"{self.loss.upper()}, nats an answer token")
        if any(one.loss > 0 for one in self.records):
            axes.set_yscale("log")
            axes.legend(frameon=False)
        drawn = io.BytesIO()
        canvas.print_png(drawn)
        _replace(Path(path), drawn.getvalue())


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content)
