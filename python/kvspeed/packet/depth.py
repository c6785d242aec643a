# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A packet built deep, for a request that goes less deep: nothing is computed again, and next to nothing copied.

The keys and values of a layer depend on the layers below alone, so that those of the layers below k are a part of any
packet built to more than k. Above k SPEED needs the anchor, the first tokens of the block that comes first: in a deeper
packet they lie among the others, and what they were computed from is the same, since an anchor sees anchors only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvspeed.packet.packet import Packet
from kvspeed.packet.quantise import restore

__all__ = ["to_depth"]


def to_depth(packet: Packet, k: int, anchor_tokens: int = 1) -> Packet:
    """`packet` with its first `k` layers alone, read where they lie; itself where it has no more.

    Of 8-bit packets the anchor is as exact as 8 bits are. Where a press removed an anchor's token in some layer and
    head, the result has no anchor, and can be used behind another block only.

    Args:
        packet: built to at least `k` layers.
        k: layers to keep, 1 .. its depth.
        anchor_tokens: tokens to keep in the layers above; no more than a packet with a k has.

    Raises:
        TypeError, ValueError: k or anchor_tokens is no number of those.
    """
    for name, value, least in (("k", k, 1), ("anchor_tokens", anchor_tokens, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}: is {value}; give at least {least}")
    if k > packet.depth:
        raise ValueError(
            f"k: is {k}, and {packet!r} holds {packet.depth} of {packet.layers} layers: build it anew, or ask for at "
            f"most {packet.depth}"
        )
    if k == packet.depth:
        return packet
    anchors = _anchors(packet, k, min(anchor_tokens, packet.length))
    first: dict[str, Any] = {
        name: tensor[:k] for name, tensor in packet.tensors().items() if not name.startswith("anchor_")
    }
    return replace(packet, k=k, anchor_keys=anchors[0], anchor_values=anchors[1], **first)


def _anchors(packet: Packet, k: int, count: int) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Keys and values of the first `count` tokens in the layers from k on, `[layers - k, H_kv, count, D]`."""
    above = (packet.anchor_keys, packet.anchor_values)
    if packet.k is not None:
        count = min(count, above[0].shape[2] if above[0] is not None else 0)
    if count == 0:
        return None, None
    at: torch.Tensor | None = None
    if packet.positions is not None:
        is_there = packet.positions[k:, :, None] == torch.arange(count, device=packet.device)[:, None]
        if not bool(is_there.any(-1).all()):
            return None, None
        at = is_there.to(torch.int8).argmax(-1)  # [layers, H_kv, count]
    found = []
    for numbers, scale, rest in (
        (packet.keys, packet.key_scale, above[0]),
        (packet.values, packet.value_scale, above[1]),
    ):
        part = numbers[k:]
        if at is None:
            part = part[:, :, :count]
        else:
            bits = part.view(torch.uint8) if part.dtype.itemsize == 1 else part  # torch gathers no float8
            part = bits.gather(2, at[..., None].expand(*at.shape, part.shape[3])).view(part.dtype)
        part = restore(part, None if scale is None else scale[k:], packet.dtype)
        found.append(part.clone() if rest is None else torch.cat([part, rest[:, :, :count]]))
    return found[0], found[1]
