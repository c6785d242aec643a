# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One prompt answered at several depths, for the price of one prefill.

The prompt is computed once, at full depth. A request at depth k reads the first k layers of that KV, and the anchor's
above: what it would have computed itself, so that the answers are those of `generate` at that depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from kvspeed.cache import KVCache
from kvspeed.devices import layer_devices
from kvspeed.greedy import token_ids
from kvspeed.models import causal_lm
from kvspeed.rule import SpeedSpec
from kvspeed.samples import Sample
from kvspeed.speed.choice import TaskDepth, loss_bound
from kvspeed.speed.prefill import PromptKV, prompt_kv
from kvspeed.state import asking, state_of

__all__ = ["Answers", "Score", "TaskTrial", "answers_at"]

Score = Callable[[Sample, str], float]  # 0 .. 1, of a sample and what the model wrote


class Answers(Protocol):
    """What a model wrote, kept somewhere, so that an interrupted choice asks nothing twice."""

    def get(self, sample: Sample, k: int) -> str | None:
        """Its answer at depth `k`, None where it was not asked."""

    def add(self, sample: Sample, k: int, text: str) -> None:
        """Keep an answer."""


_TOGETHER = 3  # depths that are tried with one prefill


@torch.no_grad()
def answers_at(
    model: nn.Module, ids: Sequence[int], depths: Iterable[int], *, rule: SpeedSpec, max_new_tokens: int
) -> dict[int, list[int]]:
    """Greedy answers of a patched `model` to the prompt `ids`, by depth; EoS is left out.

    Args:
        model: a causal LM in evaluation mode, patched in any way.
        ids: at least one token.
        depths: numbers from 1 to L; L is full depth.
        rule: the rest of SPEED's rule; its `k` and gaps do not count.
        max_new_tokens: the most tokens of an answer.

    Raises:
        ValueError: the model is not patched, or in training mode.
    """
    inner: Any = causal_lm(model)
    state = state_of(model)
    if state is None:
        raise ValueError("the model is not patched; call kvspeed.patch_model first")
    device = inner.get_input_embeddings().weight.device
    tokens = torch.tensor([list(ids)], device=device)
    ends, pad = token_ids(inner, {})
    shared: PromptKV | None = None
    # On several devices, or where the anchor reaches the last token, each depth computes the prompt itself.
    if len(ids) - 1 > rule.anchor_tokens and set(layer_devices(model)) == {device}:
        with asking(model, None):
            shared = prompt_kv(model, tokens[:, :-1])
    answers = {}
    for k in depths:
        spec = replace(rule, k=k, gaps=()) if k < state.layers else None
        with asking(model, spec):
            cache = KVCache(state.config, spec=spec)
            if shared is not None:
                _fill(cache, shared, len(ids) - 1)
            output = inner.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=pad,
                **{state.cache_name: cache},
            )
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        answer = sequence[0, len(ids) :].tolist()
        answers[k] = answer[: next((i for i, token in enumerate(answer) if token in ends), len(answer))]
    return answers


def _fill(cache: KVCache, prompt: PromptKV, length: int) -> None:
    """Let `cache` begin with the first layers of a prompt that was computed in all of them."""
    depth = cache.depth
    cache.set_storage(prompt.keys[:depth], prompt.values[:depth], length)
    if cache.spec is not None and cache.spec.anchor_tokens:
        count = cache.spec.anchor_tokens
        cache.set_anchor(
            [key[None, :, :count] for key in prompt.keys[depth:]],
            [value[None, :, :count] for value in prompt.values[depth:]],
        )


class TaskTrial:
    """The samples of one task, and their scores at the depths that were tried."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        task: str,
        samples: list[Sample],
        ids: dict[int, tuple[int, ...]],
        rule: SpeedSpec,
        layers: int,
        score: Score,
        max_new_tokens: int,
        each: Callable[[str], None] | None,
        answers: Answers | None,
    ) -> None:
        self.model, self.tokenizer, self.task, self.samples, self.ids = model, tokenizer, task, samples, ids
        self.rule, self.layers, self.score, self.max_new_tokens, self.each = rule, layers, score, max_new_tokens, each
        self.answers = answers
        self.scores: dict[int, list[float]] = {}
        self.measured: list[TaskDepth] = []

    def search(self, candidates: list[int], start: int, budget: float, confidence: float | None) -> int:
        """The least depth found that keeps the budget."""
        at = next(index for index, k in enumerate(candidates) if k >= min(start, self.layers))
        found = None
        for k in self._tried(candidates[at::-1]):
            if not self._keeps(k, budget, confidence):
                break
            found = k
        if found is None:
            found = next(k for k in self._tried(candidates[at + 1 :]) if self._keeps(k, budget, confidence))
        return found

    def _tried(self, depths: list[int]) -> Iterable[int]:
        """`depths` one by one, each with its scores there; several are measured with one prefill."""
        for first in range(0, len(depths), _TOGETHER):
            some = depths[first : first + _TOGETHER]
            self.measure(some)
            yield from some

    def measure(self, depths: list[int]) -> None:
        """Scores at `depths` and at full depth, where they are not there yet."""
        new = [k for k in dict.fromkeys([self.layers, *depths]) if k not in self.scores]
        if not new:
            return
        rows: dict[int, list[float]] = {k: [] for k in new}
        for number, sample in enumerate(self.samples, 1):
            for k, text in self._texts(sample, new).items():
                rows[k].append(self._checked(sample, text))
            if self.each is not None:
                self.each(f"{self.task} {number} of {len(self.samples)}, k = {', '.join(map(str, new))}")
        self.scores.update(rows)

    def _texts(self, sample: Sample, depths: list[int]) -> dict[int, str]:
        """What the model writes at each of `depths`."""
        kept = {k: self.answers.get(sample, k) for k in depths} if self.answers is not None else {}
        texts = {k: text for k, text in kept.items() if text is not None}
        missing = [k for k in depths if k not in texts]
        if missing:
            found = answers_at(
                self.model, self.ids[id(sample)], missing, rule=self.rule, max_new_tokens=self.max_new_tokens
            )
            for k, tokens in found.items():
                texts[k] = self.tokenizer.decode(tokens, skip_special_tokens=True)
                if self.answers is not None:
                    self.answers.add(sample, k, texts[k])
        return texts

    def _checked(self, sample: Sample, text: str) -> float:
        value = float(self.score(sample, text))
        if not 0 <= value <= 1:
            raise ValueError(f"score: gave {value} for sample {sample.id!r}; it must be between 0 and 1")
        return value

    def result(self, k: int, budget: float, confidence: float | None) -> TaskDepth:
        """What depth `k` costs, which was measured before."""
        full, scores = self.scores[self.layers], self.scores[k]
        bound = loss_bound([one - other for one, other in zip(full, scores, strict=True)], confidence)
        count = len(full)
        return TaskDepth(
            self.task, k, count, sum(full) / count, sum(scores) / count, bound, kept=bound <= budget + 1e-12
        )

    def _keeps(self, k: int, budget: float, confidence: float | None) -> bool:
        if k == self.layers:
            return True
        self.measured.append(self.result(k, budget, confidence))
        return self.measured[-1].kept
