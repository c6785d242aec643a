# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""How a packet's keys were rotated: a JSON-able description of a `RopeSpec`, and the comparison of two.

The frequencies themselves are kept, not a hash of them: computed on another device they may differ in the last bit,
which is no reason to refuse a packet.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kvspeed.rope import RopeSpec

__all__ = ["describe_rotation", "rotation_difference", "validate_rotation"]

_TOLERANCE = 1e-5  # relative; other bases or scalings differ by far more in some frequency


def describe_rotation(spec: RopeSpec) -> dict[str, Any]:
    """`spec` as `{"rotary_dim", "interleaved", "layers", "frequencies", "row"}`.

    `frequencies` is a list of distinct rows of R/2 float32 values, `row[l]` the index of layer l's.
    """
    rows: list[list[float]] = []
    row: list[int] = []
    for layer in range(spec.layers):
        values = spec.layer(layer).to("cpu", torch.float32).tolist()
        if values not in rows:
            rows.append(values)
        row.append(rows.index(values))
    return {
        "rotary_dim": spec.rotary_dim,
        "interleaved": spec.interleaved,
        "layers": spec.layers,
        "frequencies": rows,
        "row": row,
    }


def rotation_difference(packet: dict[str, Any], model: dict[str, Any]) -> str | None:
    """In words, how a packet's rotation differs from the model's; None where keys may be moved by the model's."""
    for field, words in (
        ("layers", "{} layers"),
        ("rotary_dim", "{} rotated dimensions"),
        ("interleaved", "interleaved={}"),
    ):
        if packet[field] != model[field]:
            return f"{words.format(packet[field])} against {words.format(model[field])}"
    for layer in range(packet["layers"]):
        mine, other = (info["frequencies"][info["row"][layer]] for info in (packet, model))
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            if not math.isclose(a, b, rel_tol=_TOLERANCE):
                return f"frequency {index} of layer {layer} is {a:.6g} against {b:.6g}"
    return None


def validate_rotation(info: Any, layers: int, head_dim: int) -> None:
    """Raise ValueError unless `info` is what `describe_rotation` gives for a model of `layers` layers."""
    keys = {"rotary_dim", "interleaved", "layers", "frequencies", "row"}
    if not isinstance(info, dict) or set(info) != keys:
        raise ValueError(f"rope: expected a mapping with {', '.join(sorted(keys))}")
    rotary, rows, row = info["rotary_dim"], info["frequencies"], info["row"]
    if type(rotary) is not int or not 0 <= rotary <= head_dim or rotary % 2:
        raise ValueError(f"rope: rotary_dim {rotary!r} is no even number from 0 to the head dimension {head_dim}")
    if type(info["interleaved"]) is not bool:
        raise ValueError("rope: interleaved must be true or false")
    if type(info["layers"]) is not int or info["layers"] != layers:
        raise ValueError(f"rope: describes {info['layers']!r} layers, the packet is of a model with {layers}")
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == rotary // 2 for r in rows):
        raise ValueError(f"rope: every row of frequencies must have {rotary // 2} values")
    if not all(isinstance(value, float) and math.isfinite(value) for r in rows for value in r):
        raise ValueError("rope: frequencies must be finite numbers")
    if not isinstance(row, list) or len(row) != layers or not all(type(r) is int and 0 <= r < len(rows) for r in row):
        raise ValueError("rope: row must name one row of frequencies for each layer")
