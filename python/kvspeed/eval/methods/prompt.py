# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Methods that compute the whole prompt for every question: SPEED, its ablations and its rivals, and the full model.

They differ in which layers the prompt's tokens run through, and in what KV they leave there; see `Method` for what an
evaluation does with them. Documents are ids until the question comes, so that `first_token` is the whole prefill.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.methods.base import Context, Method, Prepared
from kvspeed.eval.methods.recompute import prompt_so_far

__all__ = ["PromptMethod", "SharedPrompt"]


class PromptMethod(Method):
    """A prefill of all tokens, inside `serving`."""

    shares = False

    @abstractmethod
    def empty_cache(self, context: Context, capacity: int) -> KVCache:
        """A cache for a prompt and its answer of `capacity` tokens together."""

    @abstractmethod
    def forward(self, context: Context, ids: Sequence[int], cache: KVCache, *, ends: bool = True) -> torch.Tensor:
        """Run prompt tokens after those in `cache`; logits `[vocab]` of the last one, where the prompt `ends` with it.

        Args:
            context: the model.
            ids: at least one.
            cache: from `empty_cache`; it grows.
            ends: False: more of the prompt follows, and what is returned means nothing.
        """

    @abstractmethod
    def prefill_flops(self, context: Context, tokens: int) -> int:
        """Operations from a prompt of `tokens` to the first logits."""

    @abstractmethod
    def prompt_bytes(self, context: Context, tokens: int) -> int:
        """Bytes of KV that a prompt of `tokens` leaves for its answer."""

    def prefill(self, context: Context, ids: Sequence[int], answer: int | None = None) -> tuple[torch.Tensor, KVCache]:
        """Logits `[vocab]` of the first answer token after the prompt `ids`, and the cache to go on with.

        Args:
            context: the model.
            ids: the whole prompt.
            answer: tokens of an answer to make room for; None: as many as the context makes room for.
        """
        room = len(ids) + (context.max_new_tokens if answer is None else answer)
        context.check_room(room)
        cache = self.empty_cache(context, room)
        cache.begin_turn(len(ids))
        return self.forward(context, ids, cache), cache

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        ids = tuple(context.document_ids(text) for text in documents)
        return Prepared(context, ids, [], len(context.preamble_ids) + sum(map(len, ids)))

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        return self.prefill(prepared.context, [*prompt_so_far(prepared), *question])

    def flops(self, prepared: Prepared, question_tokens: int) -> int:
        return self.prefill_flops(prepared.context, prepared.length + question_tokens)

    def kv_bytes(self, prepared: Prepared) -> int:
        return self.prompt_bytes(prepared.context, prepared.length)

    def stored_bytes(self, prepared: Prepared) -> int:
        return 0

    def shared(self, context: Context) -> Method | None:
        """For questions that nobody times: the documents' KV is kept for the next question about them."""
        return None if any(window is not None for window in context.shape.windows) else SharedPrompt(self)


class SharedPrompt(Method):
    """The answers of a `PromptMethod` (to a rounding) with the KV of preamble and documents kept between questions.

    Prompt tokens do not depend on what follows them, in any of these methods, so the same KV serves; the cache of the
    last question is cut back to the documents. Times and operations are the method's own only where nobody shares.
    """

    def __init__(self, method: PromptMethod) -> None:
        self.method, self.name = method, method.name

    def serving(self, context: Context) -> AbstractContextManager[Any]:
        return self.method.serving(context)

    def prepare(self, context: Context, documents: Sequence[str]) -> Prepared:
        return self.method.prepare(context, documents)

    def first_token(self, prepared: Prepared, question: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
        context, ids = prepared.context, prompt_so_far(prepared)
        room = prepared.length + len(question) + context.max_new_tokens
        context.check_room(room)
        if not ids:
            return self.method.prefill(context, question)
        cache = context.keep(("prompt", self.name, tuple(ids)), lambda: self._documents(context, ids, room))
        cache.crop(len(ids))
        cache.begin_turn(len(ids) + len(question))
        return self.method.forward(context, question, cache), cache

    def _documents(self, context: Context, ids: Sequence[int], room: int) -> KVCache:
        cache = self.method.empty_cache(context, room)
        cache.begin_turn(len(ids) + 1)  # the question follows
        self.method.forward(context, ids, cache, ends=False)
        return cache
