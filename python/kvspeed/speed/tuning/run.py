# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The loop of a tuning run: steps, looks at the dev split, checkpoints, and when to stop."""

from __future__ import annotations

import copy
import math
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from kvspeed.packet.adapter import PacketAdapter
from kvspeed.packet.train.processes import Processes
from kvspeed.packet.train.report import StepRecord
from kvspeed.rule import SpeedSpec
from kvspeed.speed.tuning.forward import Learner
from kvspeed.speed.tuning.items import Item
from kvspeed.speed.tuning.report import TuneRecord, TuneReport
from kvspeed.speed.tuning.settings import Choices
from kvspeed.speed.tuning.state import State
from kvspeed.speed.tuning.trained import Trained

__all__ = ["Event", "Run"]

Event = Callable[[str, int, int, StepRecord | None], None]

_PIECE = 1 << 24  # numbers of a gradient that processes add up at once


@dataclass
class Run:
    """One call of `tune`: everything that its steps need."""

    processes: Processes
    trained: Trained
    adapter: PacketAdapter | None
    tokenizer: Any
    spec: SpeedSpec
    items: list[Item]
    held: list[Item]
    plan: list[list[int]]
    report: TuneReport
    folder: Path | None
    settings: dict[str, Any]
    choices: Choices
    progress: Event | None

    def __post_init__(self) -> None:
        self.weights = dict(self.trained.weights)
        if self.adapter is not None:
            self.weights |= {"adapter.header": self.adapter.header, "adapter.trailer": self.adapter.trailer}
        self._flags = [(part, part.requires_grad) for part in self._soft()]
        self.evaluate_every = self.choices.evaluate_every or max(1, len(self.plan) // 10)
        self.best = self._copy()
        self.waited, self.whole, self.due = 0, True, False
        self.state = State(self.folder / "checkpoint.safetensors", self.settings) if self.folder is not None else None

    def train(self, learner: Learner, resume: bool) -> None:
        """Run to the end; then the weights are the best ones, also after an error.

        Raises:
            ValueError: the loss became no number; the last good state is in the checkpoint.
        """
        for part in self._soft():
            part.requires_grad_(True)
        choices = self.choices
        groups: list[dict[str, Any]] = [{"params": list(self.trained.weights.values()), "lr": choices.lr}]
        if self.adapter is not None:
            groups.append({"params": self._soft(), "lr": choices.adapter_lr})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        if self.state is not None and resume:
            seconds = self.report.teacher_seconds
            kept = self.state.restore(self.weights, self.optimizer)
            if kept is not None:
                self.best, self.report, self.waited = kept.best or self.best, kept.report, kept.waited
                self.report.teacher_seconds += seconds
                self.report.stopped = ""
        try:
            self._steps(learner)
        finally:
            if not self.held and self.whole and self.report.stopped != "not a number":
                self.best, self.report.best_step = self._copy(), self.report.steps
            self._put(self.best)
            for part, before in self._flags:
                part.requires_grad_(before)
                part.grad = None

    def _steps(self, learner: Learner) -> None:
        report = self.report
        try:
            while True:
                if self._look_is_due():
                    self._judge(self._look(learner))
                if report.steps == len(self.plan) or report.stopped_early:
                    break
                self._step(learner)
                self.due = report.steps % self.choices.checkpoint_every == 0
        except _NotANumber as error:  # the weights that gave it are worth nothing: the checkpoint stays as it is
            if self.folder is not None and self.processes.is_main:
                self._write_report()
            raise ValueError(str(error)) from None
        except KeyboardInterrupt:
            if self.whole:
                self._keep()
                if not self.held and report.steps:
                    self.write()
            raise
        self._keep()

    def _look_is_due(self) -> bool:
        """Whether the dev split was not looked at yet after this step, and should be (also right after a resume)."""
        report = self.report
        looked = any(one.split == "dev" and one.step == report.steps for one in report.records)
        due = report.steps % self.evaluate_every == 0 or report.steps == len(self.plan)
        return bool(self.held) and due and not looked

    def _judge(self, found: TuneRecord) -> None:
        """Keep the weights if they are the best so far, and see whether it is time to stop."""
        report, better = self.report, self.report.best_dev is None or found.loss < self.report.best_dev
        self.whole = False  # until the look counts: it is judged once, also by a run that was interrupted here
        report.records.append(found)
        if report.steps == 0:
            report.first_dev, report.first_exact = found.loss, found.exact
        if better:
            report.best_dev, report.best_exact, report.best_step = found.loss, found.exact, report.steps
            self.best, self.waited = self._copy(), 0
        else:
            self.waited += 1
        ended = report.steps == len(self.plan)
        patience = self.choices.patience
        report.stopped_early = patience is not None and self.waited >= patience and not ended
        report.stopped = "early" if report.stopped_early else ""
        self.whole = True
        if better and report.steps:
            self._keep()
            self.write()
        self._tell("dev", report.steps, len(self.plan), found)

    def _step(self, learner: Learner) -> None:
        report, begin, choices = self.report, time.perf_counter(), self.choices
        batch = [self._drawn(index) for index in self.plan[report.steps]]
        for weight in self.weights.values():
            weight.grad = None
        count = sum(item.labels for item in batch)
        mine = learner.backward(batch[self.processes.index :: self.processes.count], 1 / count)
        self._add_up()
        loss = self.processes.sum(mine.loss) / count
        exact = self.processes.sum(mine.exact) / self.processes.sum(mine.answers)
        norm = self._clip()
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._refuse("loss" if not math.isfinite(loss) else "gradient")
        if self.due:  # now that the weights are known to be good
            self._keep_good()
        share = _share(report.steps, len(self.plan), choices.warmup)
        for group, rate in zip(self.optimizer.param_groups, (choices.lr, choices.adapter_lr), strict=False):
            group["lr"] = rate * share
        self.whole = False  # until the step counts
        self.optimizer.step()
        took = time.perf_counter() - begin
        soft = self.adapter.tokens if self.adapter is not None else 0
        tokens = sum(one.tokens + soft * len(one.context.documents) * one.packets for one in batch if one.context)
        tokens += sum(one.tokens for one in batch if one.row)
        report.steps += 1
        report.seconds += took
        report.trained_tokens += tokens
        report.peak_memory_bytes = max(report.peak_memory_bytes, self._peak())
        rate = choices.lr * share
        record = TuneRecord(report.steps, "train", loss, rate, report.seconds, tokens / took, exact)
        report.records.append(record)
        self.whole = True
        self._tell("train", report.steps, len(self.plan), record)

    def _refuse(self, what: str) -> NoReturn:
        """End the run, since `what` is no number."""
        self.report.stopped = "not a number"
        kept = self.state is not None and self.state.path.is_file()
        where = "the checkpoint holds the last good state; " if kept else ""
        raise _NotANumber(
            f"the {what} is no number after {self.report.steps} steps: {where}lower lr ({self.choices.lr}), or train "
            "in float32"
        )

    def _drawn(self, index: int) -> Item:
        """An item of this step, in packets or not."""
        item = self.items[index]
        if self.adapter is None or item.context is None:
            return item
        share = self.choices.packet_share
        return replace(item, packets=random.Random(f"{self.choices.seed}/{self.report.steps}/{index}").random() < share)

    def _look(self, learner: Learner) -> TuneRecord:
        """Loss and right answers on the dev split, in packets and not where both are trained."""
        begin = time.perf_counter()
        items = list(self.held)
        if self.adapter is not None:
            share = self.choices.packet_share
            plain = [item for item in self.held if share < 1 or item.context is None]
            packed = [replace(item, packets=True) for item in self.held if item.context is not None and share > 0]
            items = plain + packed
        mine = learner.evaluate(items[self.processes.index :: self.processes.count])
        add = self.processes.sum
        loss, exact = add(mine.loss) / add(mine.labels), add(mine.exact) / add(mine.answers)
        if not math.isfinite(loss):
            self._refuse("loss on the dev split")
        self.report.seconds += time.perf_counter() - begin
        rate = self.report.records[-1].lr if self.report.records else 0.0
        return TuneRecord(self.report.steps, "dev", loss, rate, self.report.seconds, 0.0, exact)

    def _add_up(self) -> None:
        """Every weight's gradient becomes the sum over all processes."""
        if self.processes.count < 2:
            return
        weights = list(self.weights.values())
        for weight in weights:
            if weight.grad is None:  # this process had no item that reaches it
                weight.grad = torch.zeros_like(weight)
        begin = 0
        while begin < len(weights):
            end, held = begin, 0
            while end < len(weights) and (end == begin or held + weights[end].numel() <= _PIECE):
                held += weights[end].numel()
                end += 1
            flat = torch.cat([weight.grad.flatten() for weight in weights[begin:end] if weight.grad is not None])
            self.processes.add_up(flat)
            parts = flat.split([weight.numel() for weight in weights[begin:end]])
            for weight, part in zip(weights[begin:end], parts, strict=True):
                weight.grad = part.view_as(weight)
            begin = end

    def _clip(self) -> float:
        """Bounds the norm of the model's gradient; returns what it was, NaN where the soft tokens' is no number."""
        clip = self.choices.clip if self.choices.clip is not None else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained.weights.values(), clip))
        for part in self._soft():
            norm += 0 * float(part.grad.norm()) if part.grad is not None else 0.0  # 0 x infinity is NaN
        return norm

    def _soft(self) -> list[torch.nn.Parameter]:
        return [self.adapter.header, self.adapter.trailer] if self.adapter is not None else []

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self.weights.items()}

    @torch.no_grad()
    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    def _peak(self) -> int:
        device = next(iter(self.weights.values())).device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def _keep_good(self) -> None:
        """A checkpoint of weights that just gave a loss; without a dev split they are the best so far."""
        self.due = False
        if not self.held:
            self.best, self.report.best_step = self._copy(), self.report.steps
        self._keep()

    def _keep(self) -> None:
        if self.state is None or not self.processes.is_main:
            return
        best = self.best if self.held else {}
        self.state.save(self.weights, self.optimizer, best, self.report, self.waited)
        self._write_report()

    def write(self, *, final: bool = False) -> None:
        """The best weights so far, and what is known of them, into the folder. Call with the best ones in the model."""
        if self.folder is None or not self.processes.is_main:
            return
        notes = {"training": self.notes()}
        self.trained.save(self.folder, self.tokenizer, self.spec, notes)
        if self.adapter is not None:
            soft = copy.deepcopy(self.adapter)
            soft.notes = {**self.adapter.notes, **notes}
            soft.save(self.folder / "adapter.safetensors")
        self._write_report()
        if final:
            try:
                self.report.save_png(self.folder / "curve.png")
            except ImportError:
                pass  # a picture of what curve.csv says

    def _write_report(self) -> None:
        assert self.folder is not None
        self.report.save_csv(self.folder / "curve.csv")
        self.report.save_json(self.folder / "report.json")

    def notes(self) -> dict[str, Any]:
        """What the files say of the run."""
        report = self.report
        said = {**self.settings, "train": report.samples, "dev": report.dev_samples, "best_step": report.best_step}
        return {**said, "dev_loss": report.best_dev, "dev_exact": report.best_exact}

    def _tell(self, what: str, done: int, total: int, record: StepRecord | None) -> None:
        if self.progress is not None:
            self.progress(what, done, total, record)


class _NotANumber(Exception):
    pass


def _share(step: int, steps: int, warmup: int) -> float:
    """Of the highest rate: up over `warmup` steps, then down to zero at the end."""
    return min(1.0, (step + 1) / (warmup + 1)) * (1 - step / steps)
