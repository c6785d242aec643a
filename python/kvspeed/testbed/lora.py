# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A low-rank update (LoRA) of a model's linear layers: attached for training, written to one file, merged for use.

Small on purpose, so that the testbed needs no further package. Merging is done in float64 and rounded once, so that the
merged weights, and with them the model's fingerprint, are the same on every machine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from kvspeed.models import base_model
from kvspeed.packet.tensorfile import read_tensor_file, write_tensor_file

__all__ = [
    "LoraLinear",
    "attach_lora",
    "lora_tensors",
    "merge_lora",
    "peft_tensors",
    "read_lora",
    "set_lora",
    "write_lora",
]

FORMAT = "kvspeed.lora"
VERSION = 1


class LoraLinear(nn.Module):
    """A frozen linear layer plus `scale * B A`; the frozen product runs in `compute`, the rest in float32.

    Args:
        linear: the layer, without bias or with one.
        rank: rows of A.
        scale: of the update.
        compute: dtype of the frozen product (bfloat16 is twice as fast where the CPU has it).
        generator: A is drawn from it; B starts at zero, so that training starts at the model.
    """

    frozen: torch.Tensor

    def __init__(
        self, linear: nn.Linear, rank: int, scale: float, compute: torch.dtype, generator: torch.Generator
    ) -> None:
        super().__init__()
        bound = linear.in_features**-0.5
        self.a = nn.Parameter((torch.rand(rank, linear.in_features, generator=generator) * 2 - 1) * bound)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale, self.compute = scale, compute
        self.bias = linear.bias
        self.register_buffer("frozen", linear.weight.detach().to(compute), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x.to(self.compute), self.frozen).to(x.dtype)
        y = y + self.scale * nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return y if self.bias is None else y + self.bias


def attach_lora(
    model: nn.Module, rank: int, *, alpha: float, compute: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    """Replace every linear layer of the decoder by a `LoraLinear`, in place; everything else is frozen.

    Args:
        model: a causal LM.
        rank: of the update.
        alpha: the update is scaled by alpha / rank.
        compute: see `LoraLinear`.
        seed: of the initial A.

    Returns:
        The parameters to train.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    trained: list[nn.Parameter] = []
    for parent in list(base_model(model).layers.modules()):  # type: ignore[union-attr]
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                layer = LoraLinear(child, rank, alpha / rank, compute, generator)
                setattr(parent, name, layer)
                trained += [layer.a, layer.b]
    return trained


def lora_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """`{"<layer>.a": [rank, in], "<layer>.b": [out, rank]}` of an attached update, the scale multiplied into B."""
    found: dict[str, torch.Tensor] = {}
    for name, module in base_model(model).named_modules():
        if isinstance(module, LoraLinear):
            found[f"{name}.a"] = module.a.detach().clone()
            found[f"{name}.b"] = (module.b.detach() * module.scale).clone()
    return found


def peft_tensors(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """A LoRA that peft saved, as `lora_tensors` gives one: what `kvspeed tune-speed` wrote, to be shipped small.

    Raises:
        FileNotFoundError: there is no adapter in the folder.
        ValueError: it is no plain LoRA (other kinds, or ranks that differ between layers).
    """
    place = Path(folder)
    config = json.loads((place / "adapter_config.json").read_text(encoding="utf-8"))
    odd = [
        name
        for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
        if config.get(name)
    ]
    if config.get("peft_type") != "LORA" or odd:
        raise ValueError(f"{place} holds no plain LoRA ({', '.join(odd) or config.get('peft_type')})")
    scale, found = config["lora_alpha"] / config["r"], {}
    for name, tensor in load_file(place / "adapter_model.safetensors").items():
        layer, _, part = name.partition(".lora_")
        layer = layer[layer.index("layers.") :]
        found[f"{layer}.{part[0].lower()}"] = tensor * scale if part.startswith("B") else tensor
    return found


@torch.no_grad()
def set_lora(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Make an attached update of the same rank equal to `tensors`, as `lora_tensors` gives them."""
    for name, module in base_model(model).named_modules():
        if isinstance(module, LoraLinear):
            module.a.copy_(tensors[f"{name}.a"])
            module.b.copy_(tensors[f"{name}.b"] / module.scale)


def write_lora(path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], notes: dict[str, Any]) -> None:
    """Write an update, in bfloat16, and what is to be known of it; atomically."""
    write_tensor_file(path, FORMAT, VERSION, notes, {name: part.bfloat16() for name, part in tensors.items()})


def read_lora(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`(tensors, notes)` that `write_lora` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        TensorFileError: it is no such file, or is damaged.
    """
    notes, tensors = read_tensor_file(path, FORMAT, VERSION)
    return tensors, notes


@torch.no_grad()
def merge_lora(model: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Add an update to the weights of `model`, in place; returns `model`.

    Raises:
        ValueError: the update was made for another model; nothing is changed then.
    """
    base = base_model(model)
    modules = dict(base.named_modules())
    names = sorted({name.rsplit(".", 1)[0] for name in tensors})
    for name in names:
        module, a, b = modules.get(name), tensors.get(f"{name}.a"), tensors.get(f"{name}.b")
        fits = isinstance(module, nn.Linear) and a is not None and b is not None
        if not fits or (b.shape[0], a.shape[1]) != tuple(module.weight.shape) or a.shape[0] != b.shape[1]:  # type: ignore[union-attr]
            raise ValueError(
                f"this LoRA updates a layer {name} that {type(model).__name__} does not have in that shape: use the "
                "model it was made for"
            )
    for name in names:
        weight = modules[name].weight
        update = tensors[f"{name}.b"].double() @ tensors[f"{name}.a"].double()
        weight.copy_((weight.double() + update.to(weight.device)).to(weight.dtype))
    return model
