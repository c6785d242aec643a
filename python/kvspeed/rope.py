# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a model's rotary position embedding looks like to a kernel that shifts keys.

Only `inv_freq` matters for a shift: R(p + d) = R(d) R(p), and a model's `attention_scaling` (YaRN) multiplied cos and
sin once already, when the key was made. So the frequencies are read from the model's own modules, in float32, one row a
layer where layers differ; cos and sin of `offset * inv_freq` are built in float64 by the kernels' host side.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from kvspeed.models import architecture, base_model

__all__ = ["RopeSpec", "float32_rope_buffers", "rope_buffers"]

_REFUSED = {
    "dynamic": "dynamic NTK rescales its angles with the length of the sequence",
    "longrope": "LongRoPE switches its frequencies with the length of the sequence",
    "su": "LongRoPE (su) switches its frequencies with the length of the sequence",
    "mrope": "M-RoPE has three position axes",
}


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding of a model, as `ops.rope_concat` and `ops.segment_attention` take it.

    Attributes:
        inv_freq: float32, on the CPU: `[R/2]`, or `[L, R/2]` where layers differ. A zero row is a layer without RoPE.
        rotary_dim: R; dimensions from R on are not rotated.
        interleaved: False for pairs (i, i + R/2), True for pairs (2i, 2i + 1).
        layers: number of decoder layers, L.
        kinds: the transformers rope type(s), e.g. `("llama3",)`.
    """

    inv_freq: torch.Tensor
    rotary_dim: int
    interleaved: bool
    layers: int
    kinds: tuple[str, ...]

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.inv_freq) if self.inv_freq.ndim == 2 else ()

    @classmethod
    def from_model(cls, model: nn.Module) -> RopeSpec:
        """Read the rotary embedding of `model`.

        Raises:
            ValueError: its angles depend on more than the position (dynamic NTK, LongRoPE, M-RoPE), or the architecture
                is not known.
        """
        arch = architecture(model)
        base: Any = base_model(model)
        rows, kinds = [], []
        read: dict[tuple[int, str], torch.Tensor] = {}  # layers share buffers, and each reading waits for the device
        for index, layer in enumerate(base.layers):
            row, kind = _layer_row(base, layer, index, read)
            rows.append(row)
            kinds.append(kind)
        width = {row.numel() for row in rows}
        if len(width) != 1:
            raise ValueError(
                f"the layers of this model rotate different numbers of dimensions ({sorted(2 * w for w in width)}), "
                "which kvspeed does not support: all layers must share one rotary dimension"
            )
        same = all(torch.equal(row, rows[0]) for row in rows)
        return cls(
            inv_freq=(rows[0] if same else torch.stack(rows)).contiguous(),
            rotary_dim=2 * width.pop(),
            interleaved=arch.rope_pairing == "interleaved",
            layers=len(rows),
            kinds=tuple(sorted(set(kinds))),
        )

    def layer(self, index: int) -> torch.Tensor:
        """`inv_freq` of layer `index`: float32 `[R/2]`. The same tensor at each call: kernels keep tables by it."""
        return self.inv_freq if self.inv_freq.ndim == 1 else self._rows[index]

    def first(self, layers: int) -> torch.Tensor:
        """`inv_freq` of the first `layers` layers, as `ops.rope_concat` takes it."""
        return self.inv_freq if self.inv_freq.ndim == 1 else self.inv_freq[:layers]

    def describe(self) -> dict[str, Any]:
        """A JSON-able description; two models with equal descriptions shift keys alike."""
        return {
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "layers": self.layers,
            "kinds": list(self.kinds),
            "inv_freq_sha256": hashlib.sha256(self.inv_freq.numpy().tobytes()).hexdigest(),
        }


def float32_rope_buffers(base: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """The rotary buffers that a cast such as `model.bfloat16()` rounded, each with its value recomputed in float32.

    A frequency rounded to bfloat16 is off by up to 0.4 %: far positions turn into noise, in the model as in a shift.

    Returns:
        `(module, buffer name, float32 value)`, one entry a rounded buffer; empty for a model that is as it was loaded.
    """
    fresh: dict[nn.Module, dict[str, torch.Tensor]] = {}
    repairs = []
    for module, name in rope_buffers(base):
        buffer = getattr(module, name)
        if buffer.dtype != torch.float32:
            if module not in fresh:
                fresh[module] = dict(_fresh(module).named_buffers(recurse=False))
            repairs.append((module, name, fresh[module][name].float().to(buffer.device)))
    return repairs


def rope_buffers(base: nn.Module) -> list[tuple[nn.Module, str]]:
    """The buffers of a decoder stack that hold rotary frequencies, as `(module, buffer name)`."""
    return [
        (module, name)
        for module in _rotary_modules(base)
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]


def _rotary_modules(base: nn.Module) -> list[Any]:
    return [module for name, module in base.named_children() if name.startswith("rotary_emb")]


def _fresh(rotary: Any) -> Any:
    with torch.device("cpu"):
        return type(rotary)(config=rotary.config)


def _layer_row(
    base: Any, layer: nn.Module, index: int, read: dict[tuple[int, str], torch.Tensor]
) -> tuple[torch.Tensor, str]:
    """`inv_freq` (float32 [R/2]) and rope type of one layer."""
    layer_types = getattr(base.config, "layer_types", None)
    layer_type = layer_types[index] if layer_types else None
    rotary: Any = base.rotary_emb
    name = "inv_freq"
    if layer_type == "sliding_attention" and hasattr(base, "rotary_emb_local"):  # Gemma 3 before transformers 5
        rotary = base.rotary_emb_local
    elif layer_type is not None and hasattr(rotary, f"{layer_type}_inv_freq"):
        name = f"{layer_type}_inv_freq"
    kind = _kind(rotary, layer_type)
    if kind in _REFUSED:
        raise ValueError(
            f"this model's RoPE is {kind!r}, and {_REFUSED[kind]}, so that keys cannot be moved by one rotation; "
            "supported are default, linear, llama3, yarn and partial or proportional rotary"
        )
    row = read.get((id(rotary), name))
    if row is None:
        row = getattr(rotary, name)
        if row.dtype != torch.float32:
            row = getattr(_fresh(rotary), name)
        row = read[id(rotary), name] = row.detach().float().cpu()
    if not _uses_rope(base.config, layer, index):
        return torch.zeros_like(row), "none"
    return row.clone(), kind


def _kind(rotary: Any, layer_type: str | None) -> str:
    config = rotary.config
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if layer_type is not None and isinstance(parameters.get(layer_type), dict):
        parameters = parameters[layer_type]
    if any("mrope" in str(key) for key in parameters):
        return "mrope"
    kind = getattr(rotary, "rope_type", None)
    if isinstance(kind, dict):
        kind = kind.get(layer_type)
    return str(kind or parameters.get("rope_type") or parameters.get("type") or "default")


def _uses_rope(config: Any, layer: nn.Module, index: int) -> bool:
    no_rope_layers = getattr(config, "no_rope_layers", None)
    if no_rope_layers:
        return bool(no_rope_layers[index])
    return bool(getattr(layer.self_attn, "use_rope", True))
