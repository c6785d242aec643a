# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tuning a model for SPEED: it learns to read its prompts in the first k layers alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from kvspeed.install import patched
from kvspeed.models import architecture, base_model, causal_lm
from kvspeed.packet.adapter import PacketAdapter
from kvspeed.packet.build import evaluating
from kvspeed.packet.train.processes import Processes
from kvspeed.packet.train.request import end_ids, folder_of
from kvspeed.rule import SpeedSpec
from kvspeed.speed.tuning.forward import Learner
from kvspeed.speed.tuning.items import digest, schedule
from kvspeed.speed.tuning.material import asked, items_of, sides
from kvspeed.speed.tuning.products import bfloat16_work
from kvspeed.speed.tuning.report import TuneReport
from kvspeed.speed.tuning.run import Event, Run
from kvspeed.speed.tuning.settings import Choices, check_room, spec_for
from kvspeed.speed.tuning.trained import Trained
from kvspeed.tuned import remember_spec

__all__ = ["tune"]


def tune(
    model: nn.Module,
    tokenizer: Any,
    data: Any,
    *,
    k: int | None = None,
    deep_layers: Iterable[int] | None = None,
    anchor_tokens: int = 1,
    boundary: str = "transient",
    upper_attention: str = "causal",
    method: Literal["lora", "full"] = "lora",
    rank: int = 16,
    alpha: float | None = None,
    loss: Literal["ce", "kl"] = "ce",
    labels: Literal["given", "model"] = "given",
    lr: float | None = None,
    warmup: int = 5,
    batch_size: int = 16,
    epochs: int = 1,
    steps: int | None = None,
    clip: float | None = 1.0,
    dev: Any = 0.05,
    patience: int | None = None,
    evaluate_every: int | None = None,
    adapter: PacketAdapter | None = None,
    adapter_lr: float = 5e-3,
    packet_share: float = 0.5,
    max_new_tokens: int = 64,
    max_tokens: int | None = None,
    top: int | None = 128,
    micro_tokens: int = 4096,
    gradient_checkpointing: bool = False,
    dtype: Literal["bf16", "fp32"] | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    teacher_folder: str | Path | None = None,
    resume: bool = True,
    checkpoint_every: int = 50,
    chat_template_kwargs: dict[str, Any] | None = None,
    progress: Event | None = None,
) -> TuneReport:
    """Tune `model`, in place, to be used with prompts computed in the first `k` layers (arXiv:2605.06105).

    Trained are the answers' tokens, with the visibility of `speed_mask` above k. No work is done for what SPEED leaves
    out: documents run through k - 1 layers and two projections, once for all neighbouring samples about them; a
    conversation's prompts run through k layers. The same data, seed and settings give the same weights on the same
    machine, and on any number of processes within rounding (`accelerate launch` or `torchrun`; each takes a part of
    every batch).

    At the end `model` holds the best weights (a LoRA is merged into them; one that the caller put on stays on), and its
    config says what it was tuned for, which `patch_model(model)` reads. After an error a LoRA is taken off again, all
    weights are the best so far, and `folder` has the last good state.

    Args:
        model: a causal LM that kvspeed knows, patched or not, bare or wrapped by PEFT (then its adapter is trained).
        tokenizer: its tokenizer.
        data: `kvspeed.Sample`s, conversations (`{"messages": [...]}`), or files of JSON Lines of either; mixed, too.
        k: depth, 1 .. L; None or L: no cut, the control that the same tuning without SPEED is.
        deep_layers: instead of `k`, any set of layers that prompts pass by, as `patch_model` takes it. Samples then run
            one sequence a question.
        anchor_tokens, boundary, upper_attention: as `patch_model` takes them.
        method: "lora": every linear layer of the decoder gets one (peft); "full": all weights, which must be float32.
        rank: of the LoRA.
        alpha: the LoRA's scale is alpha / rank; None: 2 x rank.
        loss: "ce": cross-entropy of the answers' tokens; "kl": KL(full depth || model), the full-depth model being
            `model` as it is given.
        labels: of samples: "given": their own answers; "model": what `model`, as it is given, writes at full depth.
        lr: highest learning rate; None: 1e-3 for LoRA, 2e-5 for all weights.
        warmup: steps over which the rate rises to `lr`; then it falls linearly to zero.
        batch_size: answers an optimizer step, rounded up to whole contexts; a conversation counts as one.
        epochs: passes over the data.
        steps: stop after this many steps; the schedule is laid out for them. None: what `epochs` gives.
        clip: the most of the gradient's norm; None: no bound.
        dev: for choosing the weights that are kept: a list like `data`, or the share of it to hold out (whole
            contexts, drawn by `seed`); None or 0: none, and the last step counts.
        patience: looks at the dev split without a better loss before the run ends; None: it runs to its end.
        evaluate_every: steps between looks; None: ten looks in all.
        adapter: packet adapter, trained in the same run for packets of depth k; changed in place. Needs samples.
        adapter_lr: its highest learning rate.
        packet_share: share of the contexts that stand in packets in a step, with an adapter.
        max_new_tokens: the most tokens of an answer that the model writes itself (`labels="model"`).
        max_tokens: conversations are cut off there; None: one longer than the model's positions is refused.
        top: how many of the teacher's probabilities are kept a token of samples, the rest counting as one; None: all.
        micro_tokens: the most tokens, padded, of conversations that run at once.
        gradient_checkpointing: keep no activations inside layers; samples then run one sequence a question (those in
            packets as without it).
        dtype: "bf16": products in bfloat16 (of frozen layers under LoRA, by autocast in "full"); None: the model's own.
        seed: of the LoRA's start, the held-out share, and the order.
        folder: for the tuned weights (best so far), `checkpoint.safetensors`, `curve.csv`, `curve.png`, `report.json`
            and `adapter.safetensors`; None: nothing is written. Needed with several processes.
        teacher_folder: where the model's own answers are kept; None: `folder`/teacher. Runs with other k may share it.
        resume: go on from the checkpoint in `folder`; another `lr` than there is allowed. False: start anew.
        checkpoint_every: steps between checkpoints, and one comes with every better look at the dev split.
        chat_template_kwargs: further arguments for the chat template.
        progress: called as (what, done, of how many, record) after each context of the teacher ("teacher"), each step
            ("train") and each look ("dev").

    Returns:
        What was done; `report.records` is the curve.

    Raises:
        TypeError, ValueError: an argument is out of range, the data hold no answer or are longer than the model, the
            model cannot be tuned, or the checkpoint belongs to another run: nothing is changed then. Or the loss became
            no number: the checkpoint holds the last good state.
        ImportError: peft or accelerate is missing.
        OSError: `folder` cannot be written; the last checkpoint stays.
    """
    rate = lr if lr is not None else (1e-3 if method == "lora" else 2e-5)
    choices = Choices(
        method=method, rank=rank, alpha=alpha, loss=loss, labels=labels, lr=rate, adapter_lr=adapter_lr,
        packet_share=packet_share, warmup=warmup, batch_size=batch_size, epochs=epochs, steps=steps, clip=clip,
        patience=patience, evaluate_every=evaluate_every, max_new_tokens=max_new_tokens, max_tokens=max_tokens,
        top=top, micro_tokens=micro_tokens, checkpoint_every=checkpoint_every, dtype=dtype, seed=seed,
        gradient_checkpointing=gradient_checkpointing,
    )  # fmt: skip
    architecture(model)
    if method == "lora":
        _check_rank(model, rank)
    spec = spec_for(model, k, deep_layers, anchor_tokens, boundary, upper_attention)
    if dtype == "fp32" and next(model.parameters()).dtype != torch.float32:
        raise ValueError("dtype: fp32 was asked for and the model is not float32; load it so, or leave dtype out")
    _check_adapter(model, adapter)
    end = end_ids(model, tokenizer)
    train_parts, held_parts = sides(data, dev, seed)
    items = items_of(model, tokenizer, train_parts, end, choices, chat_template_kwargs)
    held = items_of(model, tokenizer, held_parts, end, choices, chat_template_kwargs)
    if not items:
        raise ValueError("data: no answer is left within max_tokens; give more tokens, or other data")
    if adapter is not None and spec.gaps:
        raise ValueError("adapter: packets need a depth k; give k instead of deep_layers, or leave adapter out")
    if adapter is not None and not any(item.context is not None for item in items):
        raise ValueError("adapter: packets hold documents, and the data have none; give samples, or leave adapter out")
    check_room(model, [*items, *held], adapter, spec, max_new_tokens if labels == "model" else None)
    processes = Processes.here(model)
    place = folder_of(folder, processes)
    # LoRA changes the model's modules; whether it is patched now, and how, does not matter
    told = progress if processes.is_main else None
    begin = time.perf_counter()
    answers_in = Path(teacher_folder) if teacher_folder is not None else place / "teacher" if place else None
    everything = asked(
        [*items, *held], model, end, choices, answers_in, processes,
        lambda done, total: told("teacher", done, total, None) if told is not None else None,
    )  # fmt: skip
    items, held = everything[: len(items)], everything[len(items) :]
    plan = list(schedule(items, batch_size, epochs, steps, seed))
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    settings = _settings(choices, spec, digest(items, held), len(plan), adapter)
    report = TuneReport(
        loss,
        len(train_parts[0]) + len(train_parts[1]),
        len(held_parts[0]) + len(held_parts[1]),
        planned_steps=len(plan),
        method=method,
        speed=_fields(spec),
        layers=layers,
        teacher_seconds=time.perf_counter() - begin,
    )
    trained = Trained(model, method, rank=rank, alpha=alpha, seed=seed)
    done = False
    try:
        settings["model"] = trained.start
        report.trained_parameters = sum(weight.numel() for weight in trained.weights.values())
        if loss == "kl" and any(item.row is not None or gradient_checkpointing or spec.gaps for item in everything):
            trained.keep_original()
        run = Run(
            processes=processes,
            trained=trained,
            adapter=adapter,
            tokenizer=tokenizer,
            spec=spec,
            items=items,
            held=held,
            plan=plan,
            report=report,
            folder=place,
            settings=settings,
            choices=choices,
            progress=told,
        )
        depth = spec if spec.deep_layers(layers) else None
        learner = Learner(
            trained.model,
            depth,
            loss=loss,
            adapter=adapter,
            teacher=trained.original,
            micro_tokens=micro_tokens,
            by_rows=gradient_checkpointing,
        )
        with ExitStack() as stack:
            stack.enter_context(patched(trained.model, depth, force=True))
            stack.enter_context(_mode(trained.model, gradient_checkpointing))
            stack.enter_context(torch.enable_grad())
            with bfloat16_work(trained.model, method, dtype == "bf16"):
                run.train(learner, resume)
        run.write(final=True)
        done = True
        if adapter is not None:
            adapter.notes = {**adapter.notes, "training": run.notes()}
        return run.report
    finally:
        trained.close(merge=done)
        if done:
            remember_spec(model, spec)


@contextmanager
def _mode(model: nn.Module, checkpointing: bool) -> Iterator[None]:
    """Eval mode (no dropout), with checkpointing enabled or not; `Learner` lets it work."""
    inner: Any = causal_lm(model)
    enabled = checkpointing and not any(getattr(part, "gradient_checkpointing", False) for part in inner.modules())
    with evaluating(model):
        if enabled:
            inner.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield
        finally:
            if enabled:
                inner.gradient_checkpointing_disable()


def _check_rank(model: nn.Module, rank: int) -> None:
    width: int = base_model(model).config.hidden_size  # type: ignore[union-attr,assignment]
    if rank > width:
        raise ValueError(f"rank: got {rank}, and the model's hidden size is {width}; give at most that")


def _check_adapter(model: nn.Module, adapter: PacketAdapter | None) -> None:
    if adapter is None:
        return
    if not isinstance(adapter, PacketAdapter):
        raise TypeError(f"adapter: expected a PacketAdapter or None, got {type(adapter).__name__}")
    adapter.check_model(model)
    if not adapter.tokens:
        raise ValueError("adapter: has no soft tokens to train; give it a header or a trailer, or leave adapter out")
    if adapter.header.dtype != torch.float32:
        raise ValueError(f"adapter: is {adapter.header.dtype}, and small steps would be lost; train adapter.float()")


def _settings(
    choices: Choices, spec: SpeedSpec, data: str, steps: int, adapter: PacketAdapter | None
) -> dict[str, Any]:
    """What decides how the run goes on from a checkpoint."""
    left_out = ("lr", "adapter_lr", "checkpoint_every", "epochs", "micro_tokens", "gradient_checkpointing")
    said = {name: value for name, value in asdict(choices).items() if name not in left_out}
    soft = [adapter.header.shape[0], adapter.trailer.shape[0]] if adapter is not None else None
    return {**said, "data": data, "speed": _fields(spec), "steps": steps, "soft_tokens": soft}


def _fields(spec: SpeedSpec) -> dict[str, Any]:
    """As JSON gives them back."""
    return json.loads(json.dumps(asdict(spec)))
