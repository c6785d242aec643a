# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""KVzap (arXiv:2601.07891): a small network a layer says from the hidden states which tokens will be needed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from kvspeed.digest import tensor_digest
from kvspeed.packet.press.base import LayerKV, Press

__all__ = ["KVzapPress", "kvzap_press"]

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class KVzapPress(Press):
    """Scores of trained networks, one a layer: linear, or two layers with GELU between.

    Attributes:
        layers: of each layer its weights and biases in order, `[(weight, bias), ...]`; see `kvzap_press`.
        fingerprint: of all of them.
    """

    layers: tuple[tuple[tuple[Tensor, Tensor], ...], ...] = field(default=(), repr=False, compare=False)
    fingerprint: str = ""

    name: ClassVar[str] = "kvzap"
    needs_hidden: ClassVar[bool] = True

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ratio": self.ratio,
            "protect_soft": self.protect_soft,
            "fingerprint": self.fingerprint,
        }

    def scores(self, layer: LayerKV) -> Tensor:
        assert layer.hidden is not None
        heads, hidden = layer.keys.shape[0], layer.hidden.shape[-1]
        if layer.index >= len(self.layers):
            raise ValueError(f"press: these KVzap weights are for {len(self.layers)} layers, the model has more")
        network = self.layers[layer.index]
        made = (network[0][0].shape[1], network[-1][0].shape[0])
        if made != (hidden, heads):
            raise ValueError(
                f"press: these KVzap weights take hidden states of {made[0]} and score {made[1]} heads, and the model "
                f"has hidden states of {hidden} and {heads} KV heads: use the weights that were trained for it"
            )
        state = layer.hidden[0]
        for index, (weight, bias) in enumerate(network):
            state = functional.gelu(state) if index else state
            state = functional.linear(state, weight.to(state), bias.to(state))
        return state.float().T


def kvzap_press(folder: str | os.PathLike[str], ratio: float, *, protect_soft: bool = True) -> KVzapPress:
    """A press with the weights of `folder` (`config.json`, `model.safetensors`), as kvpress and its authors store them.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the weights are not those of KVzap, or damaged.
    """
    folder = Path(folder)
    for name in ("config.json", _WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: give the folder of KVzap weights, downloaded before")
    try:
        config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / _WEIGHTS, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} does not hold KVzap weights that can be read: {error}") from error
    config = config if isinstance(config, dict) else {}
    sizes = [config.get(name) for name in ("n_modules", "input_dim", "output_dim")]
    wide = config.get("hidden_dim")
    if not all(type(size) is int and size > 0 for size in [*sizes, *([] if wide is None else [wide])]):
        raise ValueError(f"{folder}/config.json does not describe KVzap weights: n_modules, input_dim, output_dim")
    count, given, heads = sizes
    shapes = [(heads, given)] if wide is None else [(wide, given), (heads, wide)]
    layers = []
    for layer in range(count):  # type: ignore[arg-type]
        names = [f"layers.{layer}"] if wide is None else [f"layers.{layer}.0", f"layers.{layer}.2"]
        parts = []
        for name, shape in zip(names, shapes, strict=True):
            weight, bias = tensors.pop(f"{name}.weight", None), tensors.pop(f"{name}.bias", None)
            if weight is None or bias is None or tuple(weight.shape) != shape or tuple(bias.shape) != shape[:1]:
                raise ValueError(f"{folder}/{_WEIGHTS}: {name} is missing, or not of shape {list(shape)}")
            parts.append((weight, bias))
        layers.append(tuple(parts))
    if tensors:
        raise ValueError(f"{folder}/{_WEIGHTS} holds more than KVzap weights: {', '.join(sorted(tensors)[:3])}")
    digest = b"".join(tensor_digest(t) for network in layers for pair in network for t in pair)
    return KVzapPress(ratio, protect_soft, layers=tuple(layers), fingerprint=hashlib.sha256(digest).hexdigest())
