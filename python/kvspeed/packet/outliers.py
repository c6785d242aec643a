# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a few very large numbers do to the others of their head in int8: one scale serves all, and small ones become 0.

Some models have such numbers in their keys. A packet that lost a head to them looks like any other one.
"""

from __future__ import annotations

import torch

from kvspeed.packet.packet import Packet

__all__ = ["drowned_heads", "tell_drowned"]

_NAMED = 4  # layers that a message names one by one


def drowned_heads(exact: torch.Tensor, stored: torch.Tensor) -> dict[int, int]:
    """Number of heads by layer in which more than half of the numbers became zero in `stored`.

    That is where the median magnitude lies below half a step of the scale. Numbers that were zero already do not count:
    nothing was lost of them.
    """
    there = exact != 0
    lost = (there & (stored == 0)).sum(dim=(2, 3))
    heads = (2 * lost > there.sum(dim=(2, 3))).sum(dim=1).tolist()
    return {layer: count for layer, count in enumerate(heads) if count}


def tell_drowned(exact: Packet, small: Packet) -> str | None:
    """What reducing `exact` to the int8 packet `small` cost, in words; None where no head was lost."""
    told = []
    for name in ("keys", "values"):
        heads = drowned_heads(getattr(exact, name), getattr(small, name))
        layers = [f"layer {layer} ({heads[layer]} of {exact.keys.shape[1]} KV heads)" for layer in sorted(heads)]
        if layers:
            more = [f"{len(layers) - _NAMED} more layers"] if len(layers) > _NAMED else []
            told.append(f"the {name} of {', '.join([*layers[:_NAMED], *more])}")
    if not told:
        return None
    return (
        f"int8: a few very large numbers leave more than half of the others as zero in {' and '.join(told)}, since "
        "each head has one scale: compare answers, or keep this model's packets in fp8 or bf16"
    )
