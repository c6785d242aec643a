# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Training packet adapters: the soft tokens learn to make packets answer as the model does under full attention."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from kvspeed.fingerprint import model_fingerprint
from kvspeed.install import patched
from kvspeed.models import architecture, base_model
from kvspeed.packet.adapter import PacketAdapter
from kvspeed.packet.train.batches import batches, digest, split
from kvspeed.packet.train.blocks import bfloat16_products, frozen
from kvspeed.packet.train.checkpoint import START, Checkpoint
from kvspeed.packet.train.contexts import Context, contexts_of
from kvspeed.packet.train.processes import Processes
from kvspeed.packet.train.report import StepRecord, TrainReport
from kvspeed.packet.train.request import check_numbers, check_room, depth_of, end_ids, folder_of
from kvspeed.packet.train.student import Student
from kvspeed.packet.train.teacher import Answer, Teacher
from kvspeed.samples import Sample, check_samples

__all__ = ["train_adapter"]

Event = Callable[[str, int, int, StepRecord | None], None]


def train_adapter(
    model: nn.Module,
    tokenizer: Any,
    samples: Sequence[Sample],
    adapter: PacketAdapter,
    *,
    dev: float | Sequence[Sample] | None = 0.1,
    loss: Literal["kl", "ce"] = "kl",
    lr: float = 5e-3,
    warmup: int = 5,
    batch_size: int = 16,
    epochs: int = 4,
    steps: int | None = None,
    patience: int | None = None,
    evaluate_every: int | None = None,
    max_new_tokens: int = 64,
    top: int | None = 128,
    k: int | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    recompute: bool = False,
    seed: int = 0,
    folder: str | Path | None = None,
    teacher_folder: str | Path | None = None,
    resume: bool = True,
    checkpoint_every: int = 10,
    chat_template_kwargs: dict[str, Any] | None = None,
    progress: Event | None = None,
) -> TrainReport:
    """Train `adapter` in place on `samples`; the model stays as it is.

    KV Packet (arXiv:2604.13226, section 3): the teacher is the frozen model under full attention, decoding greedily;
    the student is the same model with each document wrapped in the soft tokens and alone in its packet. The loss stands
    on the teacher's answer tokens only; AdamW without weight decay changes the soft tokens, the rate falling linearly
    to zero. Neighbouring samples about the same documents share one forward over them.

    The same samples, seed and settings give the same soft tokens on the same machine, and on any number of processes
    within rounding. Start several with `accelerate launch` or `torchrun`: each takes a part of every batch.

    Args:
        model: a causal LM that kvspeed knows, patched or not.
        tokenizer: its tokenizer.
        samples: questions about documents (`kvspeed.samples`).
        adapter: the soft tokens to train, e.g. `PacketAdapter.for_model(model)`. At the end it holds the best ones.
        dev: samples for early stopping: a list, or the share of `samples` to hold out (whole contexts, drawn by
            `seed`); None or 0: none, and the last step counts.
        loss: "kl": KL(teacher || student) over the vocabulary; "ce": cross-entropy of the teacher's tokens.
        lr: highest learning rate. 5e-3 suits hundreds of steps on a small model; the paper takes 5e-4 to 1e-3 for 4B to
            8B parameters.
        warmup: steps over which the rate rises to `lr`.
        batch_size: samples an optimizer step, gradients accumulated over them (rounded up to whole contexts).
        epochs: passes over the samples.
        steps: stop after this many steps; the schedule is laid out for them. None: what `epochs` gives.
        patience: looks at the dev split without a better loss before training ends; None: it runs to its end.
        evaluate_every: steps between looks; None: ten looks in all.
        max_new_tokens: the most tokens of a teacher's answer.
        top: how many of the teacher's probabilities are kept a token, the rest counting as one; None: all.
        k: SPEED depth at which the packets will be used. The teacher runs at full depth.
        dtype: "bf16": the frozen layers' products in bfloat16; None and "fp32": the model's own dtype, which must be
            float32 for "fp32". Soft tokens, optimizer and loss are float32 in any case.
        recompute: keep one document's activations at a time (a second forward in the backward pass); not with `k`.
        seed: of the held-out share and the order of samples.
        folder: for the checkpoint, `adapter.safetensors` (the best so far), `curve.csv` and `curve.png`; None: nothing
            is written. Needed with several processes.
        teacher_folder: where the teacher's answers are kept; None: `folder`/teacher, which another run may be given.
        resume: go on from the checkpoint in `folder`. False: start anew and overwrite it.
        checkpoint_every: steps between checkpoints.
        chat_template_kwargs: further arguments for the chat template.
        progress: called as (what, done, of how many, record) after each of the teacher's contexts ("teacher"), each
            step ("train") and each look ("dev").

    Returns:
        What was done; `report.records` is the curve.

    Raises:
        TypeError, ValueError: an argument is out of range, a sample cannot be tokenised or is longer than the model,
            the adapter belongs to another model, or the checkpoint to another run. Nothing is changed then.
        OSError: `folder` cannot be written; the last checkpoint stays.
    """
    check_numbers(
        loss,
        lr,
        warmup,
        seed,
        batch_size,
        epochs,
        steps,
        patience,
        evaluate_every,
        max_new_tokens,
        top,
        dtype,
        checkpoint_every,
    )
    architecture(model)
    if not isinstance(adapter, PacketAdapter):
        raise TypeError(f"adapter: expected a PacketAdapter, got {type(adapter).__name__}")
    adapter.check_model(model)
    if not adapter.tokens:
        raise ValueError("adapter: has no soft tokens, so there is nothing to train; give it a header or a trailer")
    if adapter.header.dtype != torch.float32:
        raise ValueError(
            f"adapter: is {adapter.header.dtype}, and small steps would be lost; train it as adapter.float()"
        )
    spec = depth_of(model, k)
    if recompute and spec is not None:
        raise ValueError("recompute: is not there under SPEED; leave out recompute or k")
    own = next(model.parameters()).dtype
    if dtype == "fp32" and own != torch.float32:
        raise ValueError(f"dtype: fp32 was asked for and the model is {own}; load it in float32, or leave dtype out")
    train, held = split(check_samples(samples), dev, seed)
    contexts = contexts_of(tokenizer, train, chat_template_kwargs=chat_template_kwargs)
    held_contexts = contexts_of(tokenizer, held, chat_template_kwargs=chat_template_kwargs) if held else []
    check_room(model, [*contexts, *held_contexts], adapter, max_new_tokens)
    processes = Processes.here(model)
    place = folder_of(folder, processes)
    plan = list(batches(contexts, batch_size, epochs, steps, seed))
    settings = {
        "samples": digest(train, held),
        "model": _name_of(model) if place is not None else "",  # reads all weights, for a checkpoint's sake only
        **dict(loss=loss, lr=lr, warmup=warmup, batch_size=batch_size, steps=len(plan), evaluate_every=evaluate_every),
        **dict(max_new_tokens=max_new_tokens, top=top, k=k, dtype=dtype, seed=seed, patience=patience),
        "soft tokens": [adapter.header.shape[0], adapter.trailer.shape[0]],
        "chat template": json.dumps(chat_template_kwargs or {}, sort_keys=True, default=str),
        START: adapter.fingerprint(),
    }
    run = _Run(
        processes=processes,
        adapter=adapter,
        contexts=contexts,
        held=held_contexts,
        plan=plan,
        report=TrainReport(loss, len(train), len(held), planned_steps=len(plan)),
        folder=place,
        settings=settings,
        lr=lr,
        warmup=warmup,
        patience=patience,
        evaluate_every=evaluate_every or max(1, len(plan) // 10),
        checkpoint_every=checkpoint_every,
        progress=progress if processes.is_main else None,
    )
    with ExitStack() as stack:
        stack.enter_context(patched(model, None, force=True))
        stack.enter_context(frozen(model))
        # autograd's mode is the caller's business otherwise
        stack.enter_context(torch.enable_grad())
        answers_in = Path(teacher_folder) if teacher_folder is not None else place / "teacher" if place else None
        teacher = Teacher(model, end_ids(model, tokenizer), max_new_tokens=max_new_tokens, top=top, folder=answers_in)
        run.ask(teacher)
        if dtype == "bf16" and own == torch.float32:
            stack.enter_context(bfloat16_products(model))
        run.train(Student(model, adapter, loss=loss, spec=spec, recompute=recompute), resume)
    adapter.notes = run.notes()
    run.write(final=True)
    return run.report


@dataclass
class _Run:
    """One call of `train_adapter`."""

    processes: Processes
    adapter: PacketAdapter
    contexts: list[Context]
    held: list[Context]
    plan: list[list[int]]
    report: TrainReport
    folder: Path | None
    settings: dict[str, Any]
    lr: float
    warmup: int
    patience: int | None
    evaluate_every: int
    checkpoint_every: int
    progress: Event | None

    def ask(self, teacher: Teacher) -> None:
        """The teacher's answers to all contexts, this process's share first; the others' are read from the folder."""
        begin = time.perf_counter()
        everything = [*self.contexts, *self.held]
        share = range(self.processes.index, len(everything), self.processes.count)
        self.answers: list[list[Answer]] = [[] for _ in everything]
        for done, index in enumerate(share, 1):
            self.answers[index] = teacher.answers(everything[index])
            self._tell("teacher", done, len(share), None)
        self.processes.wait()
        for index, found in enumerate(self.answers):
            if not found:
                self.answers[index] = teacher.answers(everything[index])
        self.report.teacher_seconds = time.perf_counter() - begin

    def train(self, student: Student, resume: bool) -> None:
        parts = [self.adapter.header, self.adapter.trailer]
        given = [part.requires_grad for part in parts]
        for part in parts:
            part.requires_grad_(True)
            part.grad = None
        optimizer = torch.optim.AdamW(parts, lr=self.lr, weight_decay=0.0)
        self.best, self.waited, self.whole, self.due = _copy(self.adapter), 0, True, False
        given_tokens = self.best
        self.checkpoint = Checkpoint(self.folder / "checkpoint.safetensors", self.settings) if self.folder else None
        teacher_seconds = self.report.teacher_seconds
        kept = self.checkpoint.restore(self.adapter, optimizer) if self.checkpoint is not None and resume else None
        if kept is not None:
            self.best, self.report, self.waited = kept
            self.report.teacher_seconds += teacher_seconds
        try:
            self._steps(student, optimizer)
        except Exception:
            self._put(given_tokens)  # so that the same call goes on from the checkpoint, or begins anew
            raise
        finally:
            for part, before in zip(parts, given, strict=True):
                part.requires_grad_(before)
                part.grad = None
        if not self.held:
            self.best, self.report.best_step = _copy(self.adapter), self.report.steps
        self._put(self.best)

    @torch.no_grad()
    def _put(self, tokens: dict[str, torch.Tensor]) -> None:
        for name, tensor in tokens.items():
            getattr(self.adapter, name).copy_(tensor)

    def _steps(self, student: Student, optimizer: torch.optim.Optimizer) -> None:
        report = self.report
        try:
            while True:
                if self._look_is_due():
                    self._judge(self._look(student))
                if report.steps == len(self.plan) or report.stopped_early:
                    break
                self._step(student, optimizer)
                self.due = report.steps % self.checkpoint_every == 0
        except KeyboardInterrupt:
            if self.whole:
                self._keep(optimizer)
            raise
        self._keep(optimizer)

    def _look_is_due(self) -> bool:
        """Whether the dev split was not looked at yet after this step, and should be (also right after a resume)."""
        report = self.report
        looked = any(one.split == "dev" and one.step == report.steps for one in report.records)
        due = report.steps % self.evaluate_every == 0 or report.steps == len(self.plan)
        return bool(self.held) and due and not looked

    def _judge(self, found: StepRecord) -> None:
        """Keep the soft tokens if they are the best so far, and see whether it is time to stop."""
        report = self.report
        self.whole = False  # until the look counts: it is judged once, also by a run that was interrupted here
        report.records.append(found)
        if report.steps == 0:
            report.first_dev = found.loss
        if report.best_dev is None or found.loss < report.best_dev:
            report.best_dev, report.best_step = found.loss, report.steps
            self.best, self.waited = _copy(self.adapter), 0
        else:
            self.waited += 1
        ended = report.steps == len(self.plan)
        report.stopped_early = self.patience is not None and self.waited >= self.patience and not ended
        self.whole = True
        self._tell("dev", report.steps, len(self.plan), found)

    def _step(self, student: Student, optimizer: torch.optim.Optimizer) -> None:
        report, begin = self.report, time.perf_counter()
        batch = self.plan[report.steps]
        parts = [self.adapter.header, self.adapter.trailer]
        for part in parts:
            part.grad = torch.zeros_like(part)
        count = sum(len(answer.tokens) for index in batch for answer in self.answers[index])
        total = 0.0
        for index in batch[self.processes.index :: self.processes.count]:
            total += student.backward(self.contexts[index], self.answers[index], 1 / count)
        for part in parts:
            self.processes.add_up(part.grad)
        rate = _rate(report.steps, len(self.plan), self.lr, self.warmup)
        optimizer.param_groups[0]["lr"] = rate
        loss = self.processes.sum(total) / count
        self._check_finite(loss, "loss")
        if self.due:  # now that the soft tokens are known to be good
            self.due = False
            self._keep(optimizer)
        self.whole = False  # until the step counts
        optimizer.step()
        took = time.perf_counter() - begin
        report.steps += 1
        report.seconds += took
        tokens = sum(self.contexts[index].tokens for index in batch) + count
        tokens += self.adapter.tokens * sum(len(self.contexts[index].documents) for index in batch)
        record = StepRecord(report.steps, "train", loss, rate, report.seconds, tokens / took)
        report.records.append(record)
        self.whole = True
        self._tell("train", report.steps, len(self.plan), record)

    def _look(self, student: Student) -> StepRecord:
        """Loss on the dev split."""
        begin, total, count = time.perf_counter(), 0.0, 0
        first = len(self.contexts)
        for index in range(self.processes.index, len(self.held), self.processes.count):
            loss, tokens = student.evaluate(self.held[index], self.answers[first + index])
            total, count = total + loss, count + tokens
        found = self.processes.sum(total) / self.processes.sum(count)
        self._check_finite(found, "loss on the dev split")  # nothing is less than a NaN: the first would stay the best
        self.report.seconds += time.perf_counter() - begin
        rate = self.report.records[-1].lr if self.report.records else 0.0
        return StepRecord(self.report.steps, "dev", found, rate, self.report.seconds)

    def _check_finite(self, loss: float, what: str) -> None:
        if not math.isfinite(loss):
            raise ValueError(
                f"the {what} is no number after {self.report.steps} steps: lower lr ({self.lr}), or train in float32"
            )

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        if self.checkpoint is None or not self.processes.is_main:
            return
        self.checkpoint.save(self.adapter, optimizer, self.best, self.report, self.waited)
        self.write()

    def notes(self) -> dict[str, Any]:
        """What the adapter's file says of the run, beside what it said before."""
        report = self.report
        said = {name: value for name, value in self.settings.items() if name not in ("model", "soft tokens", START)}
        said |= {"train_samples": report.samples, "dev_samples": report.dev_samples, "best_step": report.best_step}
        said |= {"dev_loss": report.best_dev, "dev_loss_untrained": report.first_dev}
        return {**self.adapter.notes, "training": said}

    def write(self, *, final: bool = False) -> None:
        """The curve, and the best soft tokens so far, into the folder."""
        if self.folder is None or not self.processes.is_main:
            return
        self.report.save_csv(self.folder / "curve.csv")
        best = copy.deepcopy(self.adapter)
        best.notes = self.notes()
        with torch.no_grad():
            for name, tensor in self.best.items():
                getattr(best, name).copy_(tensor)
        best.save(self.folder / "adapter.safetensors")
        if final:
            try:
                self.report.save_png(self.folder / "curve.png")
            except ImportError:
                pass  # a picture of what curve.csv says

    def _tell(self, what: str, done: int, total: int, record: StepRecord | None) -> None:
        if self.progress is not None:
            self.progress(what, done, total, record)


def _name_of(model: nn.Module) -> str:
    """The kind of a model and the beginning of its weights' fingerprint."""
    return f"{base_model(model).config.model_type} {model_fingerprint(model)[:16]}"  # type: ignore[union-attr]


def _rate(step: int, steps: int, lr: float, warmup: int) -> float:
    return lr * min(1.0, (step + 1) / (warmup + 1)) * (1 - step / steps)


def _copy(adapter: PacketAdapter) -> dict[str, torch.Tensor]:
    return {name: getattr(adapter, name).detach().clone() for name in ("header", "trailer")}
