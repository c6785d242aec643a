# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a method is to an evaluation: prepare documents once, then give the first token's logits and a cache.

Every method sees the same ids in the same order, [preamble][document 1]...[document N][question]; only soft tokens and
BoS tokens that a method puts around a document are its own. `prepare` is the offline part (packets, KV of each
document) and is not timed; `first_token` is what TTFT times, from KV in memory to the logits of the first answer token.
After it every method decodes alike (`decode`): the model itself, on the cache that `first_token` returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.flops import ModelShape
from kvspeed.eval.methods.context import Block, Context
from kvspeed.eval.methods.work import Work, question_work

__all__ = ["Block", "Context", "Method", "Prepared", "decode"]


@dataclass
class Prepared:
    """Documents as a method keeps them for one prompt.

    Attributes:
        context: where the model, its preamble and kept documents are.
        documents: ids of each document, without what a method adds.
        blocks: KV of preamble and documents, in order; empty for a method that keeps none of the documents.
        length: positions before the question, soft tokens included.
        extra: what a method needs besides.
        done: gives what the last `first_token` computed, where that depends on the question; None before it.
    """

    context: Context
    documents: tuple[tuple[int, ...], ...]
    blocks: list[Block]
    length: int
    extra: dict[str, Any] = field(default_factory=dict)
    done: Callable[[], Work] | None = None

    @property
    def preamble(self) -> int:
        """Positions of the preamble."""
        return len(self.context.preamble_ids)


class Method(ABC):
    """One way to answer from documents. Its options are fields; an instance keeps nothing of a prompt.

    Attributes:
        name: as it stands in tables and on the command line.
        shares: whether the KV of a document is the same in every prompt, so that it is stored once.
    """

    name: str
    shares = True

    def serving(self, context: Context) -> AbstractContextManager[Any]:
        """The model as this method needs it, inside the block: `prepare`, `first_token` and decoding belong there."""
        return nullcontext()

    def shared(self, context: Context) -> Method | None:
        """A method with the same answers that keeps more between questions on the same documents, for those that nobody
        times; None where there is none."""
        return None

    @abstractmethod
    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        """The offline part: everything that can be computed before the question is known.

        Args:
            context: the model; documents that it has seen are taken from what it keeps.
            documents: texts, in the order of the prompt; may be empty.

        Raises:
            ValueError: a document is empty, the prompt is longer than the model's positions, or the method needs
                something that the context has not (an adapter, a BoS token).
        """

    @abstractmethod
    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        """The online part: logits `[vocab]` of the first answer token, and the cache to go on with.

        Args:
            prepared: what `prepare` returned; it may be used for several questions.
            question: ids after the documents (`Context.question_ids`), at least one.
        """

    def work(self, prepared: Prepared, question_tokens: int) -> Work:
        """What `first_token` computes: rows and visible pairs of each layer.

        Where the rows depend on the question, those of the last `first_token` of `prepared` are counted, if it had as
        many question tokens; rows spread evenly before that.
        """
        done = prepared.done() if prepared.done is not None else None
        if done is not None and done.question == question_tokens:
            return done
        return self.expected_work(prepared, question_tokens)

    def expected_work(self, prepared: Prepared, question_tokens: int) -> Work:
        """As `work`, before any question was asked; here that of a question over a full cache."""
        return question_work(prepared.context.shape, prepared.length, question_tokens)

    def flops(self, prepared: Prepared, question_tokens: int) -> int:
        """Operations of the online part, as `kvspeed.eval.flops` counts them (visible pairs, matrix products)."""
        shape: ModelShape = prepared.context.shape
        return self.work(prepared, question_tokens).flops(shape)

    def kv_bytes(self, prepared: Prepared) -> int:
        """Bytes of the KV of preamble and documents that the answer's tokens attend to."""
        return prepared.context.token_bytes * prepared.length

    def stored_bytes(self, prepared: Prepared) -> int:
        """Bytes that are kept of the documents between prompts; the preamble, common to all methods, does not count."""
        return sum(block.bytes for block in prepared.blocks[1 if prepared.preamble else 0 :])

    def __repr__(self) -> str:
        return f"<method {self.name}>"


@torch.no_grad()
def decode(context: Context, logits: torch.Tensor, cache: KVCache, *, max_new_tokens: int) -> list[int]:
    """Greedy tokens from the first one's `logits` on, with EoS where it came; the same for all methods.

    Args:
        context: the model.
        logits: `[vocab]` of the first token, as `Method.first_token` gave it.
        cache: the cache that came with it; it grows.
        max_new_tokens: the most tokens.

    Raises:
        ValueError: `max_new_tokens` is not positive.
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected an integer from 1, got {max_new_tokens!r}")
    tokens = [int(logits.argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in context.eos:
        tokens.append(int(context.forward([tokens[-1]], cache).argmax()))
    return tokens
