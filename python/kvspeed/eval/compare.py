# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One model, one set of documents, the same questions: full recompute against packets, SPEED and both.

Every method sees the same tokens in the same order, [chat head and instruction][documents][question]; the methods take
turns on every question. Full recompute is the unpatched model with transformers' own `generate` and default cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from kvspeed.data import Document, Question
from kvspeed.eval.flops import ModelShape, decode_flops, prefill_flops
from kvspeed.eval.measure import Generation, interleaved, median_of, timed_generate
from kvspeed.eval.score import contains
from kvspeed.install import unpatch_model
from kvspeed.models import base_model
from kvspeed.packet import Packet, PacketAdapter, build_packet, generate, prompt_ids
from kvspeed.patch import patch_model
from kvspeed.samples import INSTRUCTION, SEPARATOR, document_text

__all__ = ["INSTRUCTION", "METHODS", "SEPARATOR", "Comparison", "MethodResult", "Tuned", "document_text"]

FULL, CONCAT, PACKETS, SPEED, BOTH = METHODS = (
    "full recompute",
    "plain re-offset concat",
    "packets",
    "SPEED",
    "packets + SPEED",
)


@dataclass(frozen=True)
class Tuned:
    """The same model, tuned for SPEED, and soft tokens for its packets; both unpatched."""

    model: Any
    adapter: PacketAdapter


@dataclass
class MethodResult:
    """What one method did with all questions. Times and bytes are medians over questions, FLOPs means.

    Attributes:
        flops: operations of an answer, prompt and steps.
        flops_first_token: of these, those to the first token.
        computed_tokens: prompt tokens computed for a question.
    """

    method: str
    ttft_s: float
    time_per_token_s: float | None
    kv_bytes: int
    flops: int
    flops_first_token: int
    prompt_tokens: int
    computed_tokens: int
    answers: list[str]
    correct: list[bool]

    def row(self, full: MethodResult) -> dict[str, Any]:
        """As plain data, with the ratios to `full`."""
        ratios = {
            "ttft_ratio": self.ttft_s / full.ttft_s,
            "time_per_token_ratio": (
                self.time_per_token_s / full.time_per_token_s
                if self.time_per_token_s is not None and full.time_per_token_s
                else None
            ),
            "kv_ratio": self.kv_bytes / full.kv_bytes,
            "flops_ratio": self.flops / full.flops,
        }
        return {**vars(self), **ratios}


class Comparison:
    """Packs the documents, then asks each question by each method.

    Args:
        model: an unpatched causal LM; it is left unpatched.
        tokenizer: its tokenizer.
        documents: what the prompt holds.
        k: SPEED depth, 1 .. L.
        adapter: trained soft tokens; None: untrained ones, from embedding statistics.
        header: untrained soft tokens before each document.
        trailer: the same after it.
        tuned: what the rows with SPEED run with, where weights were tuned for it.
        max_new_tokens: the most tokens of an answer.

    Raises:
        ValueError, TypeError: k is out of range, or the model is not supported.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        documents: Sequence[Document],
        *,
        k: int,
        adapter: PacketAdapter | None = None,
        header: int = 8,
        trailer: int = 8,
        max_new_tokens: int = 24,
        tuned: Tuned | None = None,
    ) -> None:
        for network in (model, *((tuned.model,) if tuned is not None else ())):
            patch_model(network, k)  # raises on a wrong k or an unknown model before anything is computed
            unpatch_model(network)
        self.model, self.tokenizer, self.documents = model, tokenizer, list(documents)
        self.k: int | None = k if k < len(base_model(model).layers) else None  # type: ignore[arg-type]
        self.max_new_tokens = max_new_tokens
        if adapter is None:
            adapter = PacketAdapter.for_model(model, header=header, trailer=trailer)
        self.adapter = adapter
        self.tuned = tuned if tuned is not None else Tuned(model, adapter)
        self.shape = ModelShape.of(model)
        self.packets: dict[str, list[Packet]] = {}
        self.build_s: dict[str, float] = {}

    def pack(self, advance: Callable[[str], None] = lambda what: None) -> None:
        """Builds the packets of all three packet methods; `advance` is called 3 x documents times."""
        plans: dict[str, tuple[Any, PacketAdapter | None, int | None]] = {
            CONCAT: (self.model, None, None),
            PACKETS: (self.model, self.adapter, None),
            BOTH: (self.tuned.model, self.tuned.adapter, self.k),
        }
        layers = len(base_model(self.model).layers)  # type: ignore[arg-type]
        for name, (model, adapter, k) in plans.items():
            begin = time.perf_counter()
            self.packets[name] = []
            for document in self.documents:
                text = document_text(document.text)
                self.packets[name].append(build_packet(model, self.tokenizer, text, adapter, k=k or layers))
                advance(document.name)
            self.build_s[name] = time.perf_counter() - begin

    def ask(
        self, questions: Sequence[Question], advance: Callable[[str], None] = lambda what: None
    ) -> list[MethodResult]:
        """Asks every question by every method in turn; `advance` is called methods x questions times."""
        if not questions:
            raise ValueError("questions: got none; ask at least one")
        if not self.packets:
            self.pack()
        found: dict[str, list[Generation]] = {name: [] for name in METHODS}
        runs = {name: lambda number, name=name: self._answer(name, questions[number].question) for name in METHODS}
        try:
            self._warm_up(questions[0].question)
            for name, _, result in interleaved(runs, len(questions), warmup=0):
                found[name].append(result)
                advance(name)
        finally:
            unpatch_model(self.model)
            unpatch_model(self.tuned.model)
        return [self._summary(name, found[name], questions) for name in METHODS]

    def _warm_up(self, question: str) -> None:
        """First calls are slow (threads, allocator, the preamble's packet); one document shows that as well as all."""
        first = self.documents[:1]
        for name in METHODS:
            self._answer(name, question, documents=len(first), max_new_tokens=2)

    def _answer(
        self, name: str, question: str, *, documents: int | None = None, max_new_tokens: int | None = None
    ) -> Generation:
        new = max_new_tokens or self.max_new_tokens
        model, k = (self.tuned.model, self.k) if name in (SPEED, BOTH) else (self.model, None)
        if name == FULL:
            unpatch_model(model)
        else:
            patch_model(model, k if k is not None else model.config.num_hidden_layers)
        if name in (FULL, SPEED):
            result = timed_generate(model, lambda: self._prompt(question, documents), max_new_tokens=new)
            result.text = self.tokenizer.decode(result.token_ids, skip_special_tokens=True)
            return result
        return self._answer_from_packets(model, question, self.packets[name][:documents], new)

    def _prompt(self, question: str, documents: int | None) -> list[int]:
        ids = prompt_ids(self.tokenizer, question, preamble=INSTRUCTION, separator=SEPARATOR)
        texts = [token for packet in self.packets[CONCAT][:documents] for token in packet.token_ids]
        return [*ids.preamble, *texts, *ids.question]

    def _answer_from_packets(self, model: Any, question: str, packets: list[Packet], new: int) -> Generation:
        answer, stats = generate(
            model,
            self.tokenizer,
            question,
            packets,
            preamble=INSTRUCTION,
            separator=SEPARATOR,
            max_new_tokens=new,
            return_stats=True,
        )
        computed, tokens = stats.question_tokens[0], stats.new_tokens[0]
        return Generation(
            [0] * tokens,  # only their number is known here
            stats.ttft_s,
            stats.time_per_token_s if tokens > 1 else None,
            stats.kv_bytes,
            stats.prefix_tokens + computed,
            computed,
            answer,
        )

    def _summary(self, name: str, found: list[Generation], questions: Sequence[Question]) -> MethodResult:
        k = self.k if name in (SPEED, BOTH) else None
        first = [
            prefill_flops(self.shape, one.computed_tokens, past=one.prompt_tokens - one.computed_tokens, k=k)
            for one in found
        ]
        steps = [decode_flops(self.shape, one.prompt_tokens, len(one.token_ids), k=k) for one in found]
        answers = [" ".join(one.text.split()) for one in found]
        return MethodResult(
            method=name,
            ttft_s=median(one.ttft_s for one in found),
            time_per_token_s=median_of([one.time_per_token_s for one in found]),
            kv_bytes=int(median(one.kv_bytes for one in found)),
            flops=round(mean(a + b for a, b in zip(first, steps, strict=True))),
            flops_first_token=round(mean(first)),
            prompt_tokens=int(median(one.prompt_tokens for one in found)),
            computed_tokens=int(median(one.computed_tokens for one in found)),
            answers=answers,
            correct=[contains(text, one.answers) for text, one in zip(answers, questions, strict=True)],
        )
