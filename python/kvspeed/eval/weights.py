# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Weights that one method of an evaluation uses instead of the run's model: tuned models, LoRAs, SwiftKV's own."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvspeed.eval.swiftkv import SwiftKV
from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import base_model
from kvspeed.packet import PacketAdapter
from kvspeed.patch import patch_model

__all__ = ["Weights", "load_weights"]

_SAME = {
    "model_type": "architecture",
    "num_hidden_layers": "number of layers",
    "hidden_size": "hidden size",
    "vocab_size": "size of the vocabulary",
}
_TRAINING = ("method", "tokens_per_second", "peak_memory_bytes", "trained_tokens", "seconds", "steps", "samples")


@dataclass(frozen=True)
class Weights:
    """What a method runs with.

    Attributes:
        model: patched without a depth; None: the run's own.
        swiftkv: SwiftKV's weights beside it.
        adapter: a packet adapter that was trained with the model.
        training: what its training took, for the report; {} where that is not known.
    """

    model: Any = None
    swiftkv: SwiftKV | None = None
    adapter: PacketAdapter | None = None
    training: dict[str, Any] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Of all of it."""
        parts = [model_fingerprint(self.model)] if self.model is not None else []
        parts += [part.fingerprint() for part in (self.swiftkv, self.adapter) if part is not None]
        return "+".join(part[:16] for part in parts)


def load_weights(path: str | Path, model: Any, *, dtype: Any = None) -> Weights:
    """Weights from a folder of `kvspeed tune-speed` (a model or a LoRA), or a file of `kvspeed eval train-swiftkv`.

    Args:
        path: the folder or file.
        model: the run's model, not patched; a LoRA is merged into a copy of it, or into the model that it names where
            it was made for another one.
        dtype: of a whole model; None: as saved.

    Raises:
        FileNotFoundError: there is no such folder or file, or it holds no weights.
        ValueError: they were made for another model.
    """
    path = Path(path)
    if path.is_file():
        return Weights(swiftkv=SwiftKV.load(path, model), training=_training(path.with_name(path.name + ".json")))
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no such folder or file of weights")
    from kvspeed.speed.tuning.trained import load_tuned

    tuned, _ = load_tuned(path, copy.deepcopy(model) if _is_lora_for(path, model) else None, dtype=dtype)
    _check_kind(path, tuned, model)
    device = next(model.parameters()).device
    tuned = tuned.to(device).eval()
    patch_model(tuned, len(base_model(tuned).layers))  # type: ignore[arg-type]
    soft = path / "adapter.safetensors"
    adapter = PacketAdapter.load(soft, tuned) if soft.is_file() else None
    return Weights(tuned, adapter=adapter, training=_training(path / "report.json"))


def _check_kind(path: Path, tuned: Any, model: Any) -> None:
    """Refuse a model that could be no tuned copy of the run's, whose tokens and depths it is asked with."""
    configs: list[Any] = [base_model(one).config for one in (tuned, model)]
    for name, words in _SAME.items():
        theirs, ours = (getattr(config, name, None) for config in configs)
        if theirs != ours:
            raise ValueError(
                f"{path}: holds a model with another {words} ({theirs}) than the run's own ({ours}); give weights that "
                "were tuned from this model"
            )


def _is_lora_for(folder: Path, model: Any) -> bool:
    """Whether the folder holds a LoRA that can be merged into `model`; one that says nothing of its model can."""
    if not (folder / "adapter_config.json").is_file():
        return False
    try:
        wanted = json.loads((folder / "kvspeed-lora.json").read_text(encoding="utf-8"))["base_fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return wanted == model_fingerprint(model)


def _training(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = found if isinstance(found, dict) else {}
    return {name: found[name] for name in _TRAINING if name in found and _fits(name, found[name])}


def _fits(name: str, value: Any) -> bool:
    """Whether a report can print what a file says of the training: a word for the method, else a number."""
    if name == "method":
        return isinstance(value, str)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
