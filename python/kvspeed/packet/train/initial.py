# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Where soft tokens may begin, other than at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvspeed.packet.adapter import PacketAdapter, input_embedding
from kvspeed.prompt import prompt_ids
from kvspeed.samples import INSTRUCTION

__all__ = ["begin_with_preamble"]


@torch.no_grad()
def begin_with_preamble(
    adapter: PacketAdapter, model: nn.Module, tokenizer: Any, *, instruction: str = INSTRUCTION
) -> PacketAdapter:
    """Set the header, in place, to the embeddings of the last tokens that stand before the documents in a prompt.

    A document in a packet then begins as it would right after the preamble; the trailer stays as it is. A header longer
    than the preamble keeps its first rows.

    Args:
        adapter: made for `model`.
        model: a causal LM.
        tokenizer: its tokenizer.
        instruction: what the preamble ends with.
    """
    ids = prompt_ids(tokenizer, "?", preamble=instruction).preamble
    count = min(len(ids), adapter.header.shape[0])
    if count:
        embedding = input_embedding(model)
        rows = embedding(torch.tensor(ids[-count:], device=embedding.weight.device))
        adapter.header[-count:] = rows.to(adapter.header.device, adapter.header.dtype)
    return adapter
