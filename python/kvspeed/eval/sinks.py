# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Where the question looks: attention of its tokens over all positions, for full attention and for packets.

The figure of both papers' kind: under full attention the first token of the prompt draws most attention (the sink);
documents computed alone each bring such a sink, and adapters move it onto their soft tokens. One dense forward a
method, so prompts of some hundred tokens are meant. Unlike the KV Packet paper's code, which averages logits over heads
and applies the softmax afterwards, these are the attention weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvspeed.models import base_model, causal_lm, max_positions
from kvspeed.packet import PacketAdapter, prompt_ids
from kvspeed.packet.adapter import input_embedding
from kvspeed.packet.build import evaluating
from kvspeed.prompt import encode
from kvspeed.samples import INSTRUCTION, SEPARATOR, Sample, document_text
from kvspeed.state import state_of

__all__ = ["Profile", "attention_profile"]


@dataclass(frozen=True)
class Profile:
    """Mean attention of the question's tokens.

    Attributes:
        shares: one a position of preamble, documents and question; they sum to 1.
        blocks: (begin, end) of the preamble and of each document with its soft tokens.
        soft: (header, trailer) soft tokens of a document.
    """

    shares: tuple[float, ...]
    blocks: tuple[tuple[int, int], ...]
    soft: tuple[int, int]

    def on_first_tokens(self) -> float:
        """Attention on the first token of each document (its header's, where it has one)."""
        return sum(self.shares[begin] for begin, end in self.blocks[1:] if end > begin)

    def on_soft_tokens(self) -> float:
        """Attention on all soft tokens."""
        header, trailer = self.soft
        return sum(
            sum(self.shares[begin : begin + header]) + sum(self.shares[end - trailer : end])
            for begin, end in self.blocks[1:]
        )


@torch.no_grad()
def attention_profile(
    model: Any,
    tokenizer: Any,
    sample: Sample,
    *,
    adapter: PacketAdapter | None = None,
    alone: bool = True,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Profile:
    """Attention weights, averaged over the question's tokens, heads and layers.

    Args:
        model: a causal LM without `patch_model` (whose attention tells no weights).
        tokenizer: its tokenizer.
        sample: documents and question.
        adapter: soft tokens around each document; None: none.
        alone: documents see neither the preamble nor each other, as packets; False: full causal attention.
        chat_template_kwargs: further arguments for the chat template.

    Raises:
        ValueError: the model is patched, or its attention does not return weights, or the prompt is longer than it.
    """
    if state_of(model) is not None:
        raise ValueError("the model is patched, and its attention tells no weights: call unpatch_model(model) before")
    around = prompt_ids(
        tokenizer,
        sample.question,
        preamble=INSTRUCTION,
        separator=SEPARATOR,
        chat_template_kwargs=chat_template_kwargs,
    )
    texts = [around.preamble, *_document_ids(tokenizer, sample), around.question]
    _check_room(model, sum(map(len, texts)) + (adapter.tokens * len(sample.documents) if adapter is not None else 0))
    embed = input_embedding(model)
    device = embed.weight.device
    parts, blocks, begin = [], [], 0
    for number, ids in enumerate(texts):
        part = embed(torch.tensor([list(ids)], dtype=torch.long, device=device))
        if adapter is not None and 0 < number <= len(sample.documents):
            part = adapter.wrap(part)
        parts.append(part)
        blocks.append((begin, begin + part.shape[1]))
        begin += part.shape[1]
    embeddings = torch.cat(parts, dim=1)
    question = slice(*blocks.pop())
    mask = _mask(blocks, question, begin, alone).to(device)
    bias = torch.zeros(mask.shape, dtype=embeddings.dtype, device=device)
    bias = bias.masked_fill(~mask, torch.finfo(embeddings.dtype).min)[None, None]
    with _eager(model), evaluating(model):
        output = base_model(model)(
            inputs_embeds=embeddings,
            attention_mask=bias,
            position_ids=torch.arange(begin, device=device)[None],
            output_attentions=True,
            use_cache=False,
        )
    weights = output.attentions
    if not weights or any(layer is None for layer in weights):
        raise ValueError("this model's attention returns no weights, so there is nothing to show")
    shares = torch.stack([layer[0, :, question].float().mean((0, 1)) for layer in weights]).mean(0)
    soft = (adapter.header.shape[0], adapter.trailer.shape[0]) if adapter is not None else (0, 0)
    return Profile(tuple(shares.tolist()), tuple(blocks), soft)


def _check_room(model: Any, length: int) -> None:
    limit = max_positions(model)
    if limit is not None and length > limit:
        raise ValueError(f"the prompt has {length} tokens, and the model has {limit} positions: use fewer documents")


def _document_ids(tokenizer: Any, sample: Sample) -> list[Sequence[int]]:
    return [encode(tokenizer, document_text(text), "document") for text in sample.documents]


def _mask(blocks: Sequence[tuple[int, int]], question: slice, length: int, alone: bool) -> torch.Tensor:
    """bool [length, length]: causal; where documents stand alone, blocks do not see each other but the question all."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if not alone:
        return causal
    mask = torch.zeros_like(causal)
    for begin, end in blocks:
        mask[begin:end, begin:end] = True
    mask[question] = True
    return mask & causal


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """The attention implementation that returns weights."""
    inner: Any = causal_lm(model)
    before = inner.config._attn_implementation
    inner.set_attn_implementation("eager")
    try:
        yield
    finally:
        inner.set_attn_implementation(before)
