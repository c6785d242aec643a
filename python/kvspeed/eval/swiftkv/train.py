# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Training SwiftKV's weights as its authors do: the model itself is the teacher, and nothing else changes.

The loss is KL(teacher || student) of the answer's tokens at temperature 2, times 4, and the mean squared error of the
hidden states that go into the last layer. Layers below k are the teacher's own, so that they run once for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from kvspeed.eval.swiftkv.weights import SwiftKV
from kvspeed.install import patched
from kvspeed.models import base_model
from kvspeed.packet.build import max_positions
from kvspeed.packet.train.batches import batches, split
from kvspeed.packet.train.blocks import bfloat16_products, frozen, logits_of
from kvspeed.packet.train.contexts import contexts_of
from kvspeed.packet.train.report import StepRecord, TrainReport
from kvspeed.packet.train.request import end_ids
from kvspeed.samples import Sample, check_samples

__all__ = ["train_swiftkv"]


def train_swiftkv(
    model: nn.Module,
    tokenizer: Any,
    samples: Sequence[Sample],
    weights: SwiftKV,
    *,
    dev: float | Sequence[Sample] | None = 0.1,
    lr: float = 1e-3,
    warmup: float = 0.05,
    batch_size: int = 8,
    epochs: int = 1,
    steps: int | None = None,
    temperature: float = 2.0,
    hidden_weight: float = 1.0,
    looks: int = 5,
    dtype: Literal["bf16", "fp32"] | None = None,
    seed: int = 0,
    path: str | Path | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    progress: Callable[[str, int, int, StepRecord | None], None] | None = None,
) -> TrainReport:
    """Train `weights` in place on the samples' answers (`Sample.target`); the model stays as it is.

    AdamW without weight decay; the rate rises over `warmup` of the steps and falls linearly to zero.

    Args:
        model: a causal LM that kvspeed knows, in float32 or bfloat16, patched without a depth or not patched.
        tokenizer: its tokenizer.
        samples: questions about documents.
        weights: e.g. `SwiftKV.for_model(model, k)`. At the end it holds the best of the looks at the dev split.
        dev: as for `train_adapter`.
        lr: highest learning rate (the authors take 2e-4 over 1.5 million samples).
        warmup: share of the steps.
        batch_size: samples a step (rounded up to whole contexts).
        epochs: passes over the samples.
        steps: stop after this many; None: what `epochs` gives.
        temperature: of both distributions.
        hidden_weight: of the hidden states' error.
        looks: how often the dev split is looked at, the start aside.
        dtype: "bf16": the frozen layers' products in bfloat16, of a float32 model; None and "fp32": the model's own.
        seed: of the held-out share and the order.
        path: where the best weights are written after each look; None: nowhere.
        chat_template_kwargs: further arguments for the chat template.
        progress: called as (what, done, of how many, record) after each step ("train") and each look ("dev").

    Returns:
        What was done; losses are KL alone, in nats an answer token.

    Raises:
        ValueError: a number is out of range, a sample is longer than the model, or the loss is no number.
        OSError: `path` cannot be written.
    """
    for name, value in (("lr", lr), ("temperature", temperature), ("batch_size", batch_size), ("epochs", epochs)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}: got {value!r}, give a positive number")
    if hidden_weight < 0 or not 0 <= warmup < 1 or looks < 1:
        raise ValueError(
            f"hidden_weight, warmup, looks: got {hidden_weight}, {warmup}, {looks}; give 0 or more, 0 to 1, 1 or more"
        )
    if dtype not in (None, "bf16", "fp32"):
        raise ValueError(f'dtype: got {dtype!r}, choose "bf16", "fp32" or None')
    train, held = split(check_samples(samples), dev, seed)
    ends = end_ids(model, tokenizer)[:1]
    rows = [_rows(part, tokenizer, ends, chat_template_kwargs) for part in (train, held)]
    limit = max_positions(model)
    for name, ids, _ in [*rows[0].values(), *rows[1].values()]:
        if limit is not None and len(ids) > limit:
            raise ValueError(f"sample {name}: has {len(ids)} tokens and the model has {limit} positions; shorten it")
    contexts = contexts_of(tokenizer, train, chat_template_kwargs=chat_template_kwargs)
    plan = list(batches(contexts, batch_size, epochs, steps, seed))
    report = TrainReport("kl", len(train), len(held), planned_steps=len(plan))
    every = max(1, len(plan) // looks)
    optimizer = torch.optim.AdamW(weights.parameters(), lr=lr, weight_decay=0.0)
    ramp = max(1, round(warmup * len(plan)))
    best = {name: tensor.detach().clone() for name, tensor in weights.state_dict().items()}
    tell = progress or (lambda what, done, total, record: None)
    needed = [parameter.requires_grad for parameter in weights.parameters()]
    weights.requires_grad_(True)
    lesson = _Lesson(model, weights, temperature, hidden_weight)
    try:
        with ExitStack() as stack:
            stack.enter_context(patched(model, None, force=True))
            stack.enter_context(frozen(model))
            stack.enter_context(torch.enable_grad())
            if dtype == "bf16" and next(model.parameters()).dtype == torch.float32:
                stack.enter_context(bfloat16_products(model))
            for step in range(len(plan) + 1):
                if held and (step % every == 0 or step == len(plan)):
                    found = _look(lesson, list(rows[1].values()), batch_size)
                    report.records.append(StepRecord(step, "dev", found, 0.0, report.seconds))
                    report.first_dev = found if step == 0 else report.first_dev
                    if report.best_dev is None or found < report.best_dev:
                        report.best_dev, report.best_step = found, step
                        best = {name: tensor.detach().clone() for name, tensor in weights.state_dict().items()}
                        weights.trained = step > 0
                        if path is not None and step:
                            weights.save(path)
                    tell("dev", step, len(plan), report.records[-1])
                if step == len(plan):
                    break
                begin = time.perf_counter()
                rate = lr * min((step + 1) / ramp, (len(plan) - step) / max(1, len(plan) - ramp))
                optimizer.param_groups[0]["lr"] = rate
                batch = [rows[0][query.id] for index in plan[step] for query in contexts[index].queries]
                loss = lesson.backward(batch)
                if loss != loss:
                    raise ValueError(
                        f"the loss is no number after {step} steps; lower lr ({lr}). The best weights stay"
                    )
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                took = time.perf_counter() - begin
                report.steps, report.seconds = step + 1, report.seconds + took
                tokens = sum(len(ids) for _, ids, _ in batch)
                report.records.append(StepRecord(step + 1, "train", loss, rate, report.seconds, tokens / took))
                tell("train", step + 1, len(plan), report.records[-1])
    finally:
        if held:
            weights.load_state_dict(best)
        for parameter, before in zip(weights.parameters(), needed, strict=True):
            parameter.requires_grad_(before)
            parameter.grad = None
    if not held:
        weights.trained, report.best_step = True, report.steps
    if path is not None:
        weights.save(path)
    return report


Row = tuple[str, list[int], int]  # a sample's id, the ids of its prompt and answer, how many of these are answer


def _rows(samples: Sequence[Sample], tokenizer: Any, ends: list[int], kwargs: dict[str, Any] | None) -> dict[str, Row]:
    found = {}
    for context in contexts_of(tokenizer, samples, chat_template_kwargs=kwargs) if samples else []:
        before = [*context.preamble, *(token for ids in context.documents for token in ids)]
        for query in context.queries:
            answer = [*query.target, *ends]
            found[query.id] = (query.id, [*before, *query.question, *answer], len(answer))
    return found


def _look(lesson: _Lesson, rows: list[Row], batch_size: int) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(rows), batch_size):
            batch = rows[begin : begin + batch_size]
            answers = sum(answer for _, _, answer in batch)
            total += float(lesson.losses(batch)[0]) * answers
            count += answers
    return total / count


class _Lesson:
    """One forward of the teacher, and the upper layers again with the student's weights."""

    def __init__(self, model: nn.Module, weights: SwiftKV, temperature: float, hidden_weight: float) -> None:
        self.model, self.weights = model, weights
        self.temperature, self.hidden_weight = temperature, hidden_weight
        self.stack: Any = base_model(model)

    def backward(self, rows: Sequence[Row]) -> float:
        """Adds the gradients of a batch; its KL, in nats an answer token."""
        divergence, error = self.losses(rows)
        (divergence * self.temperature**2 + self.hidden_weight * error).backward()
        return float(divergence.detach())

    def losses(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """(KL at the temperature, a mean over answer tokens; mean squared error of the hidden states)."""
        device = self.stack.embed_tokens.weight.device
        longest = max(len(ids) for _, ids, _ in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long, device=device)
        real = torch.zeros(len(rows), longest, dtype=torch.bool, device=device)
        predicts = torch.zeros_like(real)
        for row, (_, ids, answer) in enumerate(rows):  # on the right, where a causal mask never sees it
            tokens[row, : len(ids)] = torch.tensor(ids, device=device)
            real[row, : len(ids)] = True
            predicts[row, len(ids) - answer - 1 : len(ids) - 1] = True
        with torch.no_grad(), self._watched() as seen:
            taught = self.stack(input_ids=tokens, use_cache=False).last_hidden_state
        k, last = self.weights.k, self.weights.layers - 1
        hidden = seen[k][0]
        with self.weights.attached(self.model):
            for index in range(k, self.weights.layers):
                if index == last:
                    learned = hidden
                out = self.stack.layers[index](hidden, **seen[index][1])
                hidden = out[0] if isinstance(out, tuple) else out
        error = functional.mse_loss(learned[real].float(), seen[last][0][real].float())
        student = logits_of(self.model, self.stack.norm(hidden[predicts])).float() / self.temperature
        teacher = logits_of(self.model, taught[predicts]).float() / self.temperature
        divergence = functional.kl_div(
            student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        return divergence, error

    @contextmanager
    def _watched(self) -> Iterator[dict[int, tuple[torch.Tensor, dict[str, Any]]]]:
        """What the upper layers are given by the forward inside the block."""
        seen: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}

        def watch(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            seen[layer.self_attn.layer_idx] = (args[0] if args else kwargs["hidden_states"], rest)

        handles = [
            layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in self.stack.layers[self.weights.k :]
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()
