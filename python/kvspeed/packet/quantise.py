# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets in fewer bits: a smaller float, or int8 and float8_e4m3fn with one float32 scale a layer and KV head.

The scale maps the largest magnitude of a layer and head onto the largest number of the format (127, 448); keys and
values are then rounded to the nearest. `kvspeed.ops.rope_concat` multiplies by the scale on the way (mode "copy"); to
be read in place (mode "view") a packet is made full first. Anchors, a few tokens, keep the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvspeed.packet.packet import Packet

__all__ = ["STORAGE_NAMES", "full", "one_scaled_dtype", "quantise", "restore", "storage_dtype"]

#: What a storage dtype may be called.
STORAGE_NAMES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "f16": torch.float16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def storage_dtype(value: Any) -> torch.dtype | None:
    """A dtype, or one of `STORAGE_NAMES`, as a dtype; None stays None, which is the model's own.

    Raises:
        ValueError: nothing that packets are kept in.
    """
    found = STORAGE_NAMES.get(value) if isinstance(value, str) else value
    if value is None or (isinstance(found, torch.dtype) and found in STORAGE_NAMES.values()):
        return found
    raise ValueError(f"dtype: got {value!r}; packets are kept as bf16, f16, f32, int8 or fp8, or None as they are")


def quantise(packet: Packet, dtype: torch.dtype) -> Packet:
    """`packet` with keys and values kept as `dtype`; itself where they are, and where `dtype` holds no fewer bits.

    Raises:
        ValueError: `packet` is reduced already, to another dtype; or its numbers do not fit, being NaN, infinite or
            beyond the range of `dtype`.
    """
    if packet.keys.dtype == dtype:
        return packet
    if packet.compute_dtype is not None:
        raise ValueError(
            f"{packet!r} is kept in {packet.keys.dtype} already; reduce the packet that the model made, not this one"
        )
    if dtype.itemsize >= packet.keys.dtype.itemsize and dtype not in _LARGEST:
        return packet
    keys, key_scale = _reduce("keys", packet, packet.keys, dtype)
    values, value_scale = _reduce("values", packet, packet.values, dtype)
    return replace(
        packet,
        keys=keys,
        values=values,
        compute_dtype=packet.keys.dtype,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def full(packet: Packet) -> Packet:
    """See `Packet.full`."""
    if packet.compute_dtype is None:
        return packet
    return replace(
        packet,
        keys=restore(packet.keys, packet.key_scale, packet.dtype),
        values=restore(packet.values, packet.value_scale, packet.dtype),
        compute_dtype=None,
        key_scale=None,
        value_scale=None,
    )


def one_scaled_dtype(packets: Sequence[Packet]) -> bool:
    """Whether all packets are of one 8-bit dtype, which `rope_concat` takes as they are."""
    return len({packet.keys.dtype for packet in packets}) == 1 and packets[0].keys.dtype in _LARGEST


def _reduce(
    name: str, packet: Packet, numbers: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if dtype not in _LARGEST:
        smaller = numbers.to(dtype)
        if not torch.equal(torch.isfinite(smaller), torch.isfinite(numbers)):
            raise ValueError(f"{name} of {packet!r} go beyond the range of {dtype}: keep the store in another dtype")
        return smaller, None
    largest = numbers.abs().amax(dim=(2, 3)).float()
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(f"{name} of {packet!r} hold NaN or infinity, which {dtype} cannot: do not reduce this packet")
    scale = largest / _LARGEST[dtype]
    # a head of zeros, or of numbers too small for a scale of full precision, keeps its zeros under a scale of 1
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
    scaled = (numbers.float() / scale[..., None, None]).clamp_(-_LARGEST[dtype], _LARGEST[dtype])
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale


def restore(numbers: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Stored numbers `[layers, H_kv, T, D]`, with their scale `[layers, H_kv]` where they have one, in `dtype`."""
    if scale is None:
        return numbers.to(dtype)
    return (numbers.float() * scale[..., None, None]).to(dtype)
