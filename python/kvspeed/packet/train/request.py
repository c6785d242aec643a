# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What `train_adapter` is asked for, checked before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from kvspeed.models import base_model, causal_lm
from kvspeed.packet.adapter import PacketAdapter, check_seed
from kvspeed.packet.build import max_positions
from kvspeed.packet.train.contexts import Context
from kvspeed.packet.train.processes import Processes
from kvspeed.rule import SpeedSpec
from kvspeed.state import state_of

__all__ = ["check_numbers", "check_room", "depth_of", "end_ids", "folder_of"]


def check_numbers(
    loss: str,
    lr: float,
    warmup: int,
    seed: int,
    batch_size: int,
    epochs: int,
    steps: int | None,
    patience: int | None,
    evaluate_every: int | None,
    max_new_tokens: int,
    top: int | None,
    dtype: str | None,
    checkpoint_every: int,
) -> None:
    if loss not in ("kl", "ce"):
        raise ValueError(f'loss: got {loss!r}, choose "kl" or "ce"')
    if dtype not in (None, "bf16", "fp32"):
        raise ValueError(f'dtype: got {dtype!r}, choose "bf16", "fp32" or None')
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise TypeError(f"lr: expected a number, got {type(lr).__name__}")
    if not 0 < lr <= 10:
        raise ValueError(f"lr: got {lr!r}, give a number above 0 and up to 10")
    for name, number in (("warmup", warmup), ("seed", seed)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: expected an integer, got {type(number).__name__}")
    check_seed(seed)
    if warmup < 0:
        raise ValueError(f"warmup: got {warmup}, give 0 or more steps")
    for name, value, optional in (
        ("batch_size", batch_size, False),
        ("epochs", epochs, False),
        ("steps", steps, True),
        ("patience", patience, True),
        ("evaluate_every", evaluate_every, True),
        ("max_new_tokens", max_new_tokens, False),
        ("top", top, True),
        ("checkpoint_every", checkpoint_every, False),
    ):
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}: got {value}, give at least 1")


def depth_of(model: nn.Module, k: int | None) -> SpeedSpec | None:
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    if k is None:
        return None
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k: expected an integer or None, got {type(k).__name__}")
    if not 1 <= k <= layers:
        raise ValueError(f"k: is {k} and the model has {layers} layers; give 1 to {layers}, or None")
    if k == layers:
        return None
    state = state_of(model)
    if state is not None and state.spec is not None and state.spec.k == k and not state.spec.gaps:
        return state.spec  # with the rest of its rule
    return SpeedSpec(k)


def check_room(model: nn.Module, contexts: list[Context], adapter: PacketAdapter, new: int) -> None:
    limit = max_positions(model)
    for context in contexts:
        for query in context.queries:
            soft = adapter.tokens * len(context.documents)
            text = len(context.preamble) + sum(map(len, context.documents)) + len(query.question)
            if limit is not None and text + soft + new > limit:
                raise ValueError(
                    f"sample {query.id}: has {text} tokens, and with {soft} soft tokens and {new} of an answer more "
                    f"than the model's {limit} positions: shorten its documents, or use fewer"
                )


def end_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the generation config's, else the tokenizer's."""
    inner: Any = causal_lm(model)
    for config in (getattr(inner, "generation_config", None), tokenizer):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []


def folder_of(folder: str | Path | None, processes: Processes) -> Path | None:
    if folder is None:
        if processes.count > 1:
            raise ValueError("folder: several processes share the teacher's answers through a folder; give one")
        return None
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder: {path} is a file; give a folder")
    path.mkdir(parents=True, exist_ok=True)
    return path
