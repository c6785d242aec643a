# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""bench/gpu.py's stage for whole models: TTFT, time per token and KV bytes of an 8B model with random weights.

Random weights cost what trained ones do; what they answer means nothing. `unpatched` is transformers' own generate with
its own cache, and is also the full recompute that packets are compared with. TTFT is host time from the call to the
first token being known, assembling a cache of packets included; building the packets is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import kvspeed
import torch
from gpu_backend import active
from gpu_clock import Run, cases
from kvspeed.eval.measure import cache_bytes
from kvspeed.state import state_of
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList


@dataclass(frozen=True)
class Plan:
    """The model and what it is asked."""

    config: dict[str, Any]
    prompts: dict[str, int]  # name: tokens
    depths: tuple[int, ...]  # of SPEED, in order of importance
    packet_tokens: int  # of one packet
    question: int
    new_tokens: int


LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072 + 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
REAL = Plan(LLAMA_8B, {"4k": 4096, "32k": 32768, "128k": 131072}, (24, 16, 20, 28), 4096, 64, 16)
TINY = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DRY = Plan(TINY, {"24": 24}, (2, 1), 12, 3, 3)


class Numbers:
    """A tokenizer of texts that are ids, written out: "17 4 99"."""

    bos_token_id = None
    chat_template = None

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


class Stamps(StoppingCriteria):
    """When each token was there: events on a GPU, host time else. Given to `generate`, or called by hand."""

    def __init__(self, run: Run) -> None:
        self._cuda = run.backend == "cuda"
        self._taken: list[Any] = []
        self.begin = time.perf_counter()
        self.first: float | None = None
        self.mark()

    def mark(self, step: int = 0) -> None:
        if not self._cuda:
            self._taken.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._taken.append(event)
        if self.first is None and len(self._taken) == 2:
            if self._cuda:
                self._taken[1].synchronize()
            self.first = time.perf_counter() - self.begin

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.mark()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def steps(self) -> list[float]:
        """Seconds between tokens, from the second on."""
        if self._cuda:
            self._taken[-1].synchronize()
            return [a.elapsed_time(b) * 1e-3 for a, b in zip(self._taken[1:-1], self._taken[2:], strict=True)]
        return [b - a for a, b in zip(self._taken[1:-1], self._taken[2:], strict=True)]


@dataclass
class Outcome:
    """One generation: when its tokens came, the bytes of its KV, all ids, and the cache to go on from."""

    stamps: Stamps
    kv_bytes: int
    sequences: torch.Tensor
    cache: Any


@dataclass
class Bench:
    """The model, its prompts and packets, and how one method is timed."""

    run: Run
    plan: Plan
    model: Any = None
    packets: dict[tuple[int, int | None], list[kvspeed.Packet]] = field(default_factory=dict)
    first_seconds: dict[str, float] = field(default_factory=dict)  # unpatched TTFT by prompt

    def load(self) -> None:
        rope = {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3_ROPE}}
        names = LlamaConfig().to_dict()
        if "rope_parameters" not in names:  # transformers 4
            rope = {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}
        else:
            rope.pop("rope_theta")
        config = LlamaConfig(**self.plan.config, **({} if self.run.dry else rope), attn_implementation="sdpa")
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.run.device):
                self.model = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        self.model.generation_config.pad_token_id = 0
        self.model.generation_config.eos_token_id = None

    def ids(self, tokens: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * tokens + seed)
        ids = torch.randint(1, self.plan.config["vocab_size"], (1, tokens), generator=generator)
        return ids.to(self.run.device)

    def blocks(self, tokens: int, k: int | None) -> list[kvspeed.Packet]:
        """Packets of `tokens` in all, built once, for the model as it is patched now."""
        if (tokens, k) not in self.packets:
            self.packets.clear()  # 17 GB each at 128k
            one = self.plan.packet_tokens
            counts = [one] * (tokens // one) or [tokens]
            texts = [" ".join(map(str, self.ids(count, 1 + i)[0].tolist())) for i, count in enumerate(counts)]
            self.packets[tokens, k] = [kvspeed.build_packet(self.model, Numbers(), text) for text in texts]
        return self.packets[tokens, k]

    # One generation each.

    def eager(self, ids: torch.Tensor, cache: Any = None, stamps: Stamps | None = None) -> Outcome:
        stamps = stamps or Stamps(self.run)
        given = {} if cache is None else {state_of(self.model).cache_name: cache}  # type: ignore[union-attr]
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.plan.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([stamps]),
            **given,
        )
        kept = getattr(output, "cache", None)  # transformers 5.23 and later
        kept = output.past_key_values if kept is None else kept
        return Outcome(stamps, cache_bytes(kept), output.sequences, kept)

    def captured(self, ids: torch.Tensor, cache: Any, stamps: Stamps | None = None) -> Outcome:
        from kvspeed import graph  # here, so that the eager half of a case is kept where this fails

        stamps = stamps or Stamps(self.run)
        new = graph.generate(self.model, ids, max_new_tokens=self.plan.new_tokens, cache=cache, on_token=stamps.mark)
        return Outcome(stamps, cache_bytes(cache), new, cache)

    def over_packets(self, tokens: int, mode: str, how: Callable[..., Outcome]) -> Outcome:
        state = state_of(self.model)
        spec = None if state is None else state.spec
        blocks = self.blocks(tokens, None if spec is None else spec.k)
        self.run.sync()
        stamps = Stamps(self.run)
        capacity = sum(len(block.token_ids) for block in blocks) + self.plan.question + self.plan.new_tokens
        cache = kvspeed.assemble(blocks, model=self.model, mode=mode, capacity=capacity)  # type: ignore[arg-type]
        question = self.ids(self.plan.question, 777)
        prefix = torch.tensor([cache.prefix_ids], device=question.device)
        return how(torch.cat([prefix, question], 1), cache, stamps)

    def expected(self, tokens: int) -> float:
        """Seconds of an unpatched prefill, from the longest one so far; attention grows with the square."""
        if not self.first_seconds:
            return 0.0
        known = list(self.first_seconds)[-1]
        return self.first_seconds[known] * (tokens / self.plan.prompts[known]) ** 1.8


def models(run: Run) -> None:
    """Every method at every prompt length, the most telling first, as far as the time reaches."""
    plan = DRY if run.dry else REAL
    bench = Bench(run, plan)
    with active(run), torch.no_grad():
        bench.load()
        run.say(f"{sum(p.numel() for p in bench.model.parameters()) / 1e9:.2f} B parameters")
        bench.eager(bench.ids(min(plan.prompts.values()) // 2))  # libraries, allocator, code
        run.note("model", {**plan.config, "dtype": "bfloat16", "question": plan.question})
        for name, tokens in plan.prompts.items():
            cases(run, {f"{name}, unpatched": (bench.expected(tokens), partial(_plain, bench, name, tokens))})
            cases(run, _methods(bench, name, tokens))
        run.raise_failures()


def _methods(bench: Bench, name: str, tokens: int) -> dict[str, tuple[float, Callable[[dict[str, Any]], None]]]:
    """What is compared with the unpatched model, in order of importance, with the seconds that each needs."""
    plan, whole = bench.plan, bench.expected(tokens)
    first, *others = plan.depths
    building = 3.0 + whole / 2 if not bench.run.dry else 0.0
    work: dict[str, tuple[float, Callable[[dict[str, Any]], None]]] = {}

    def speed(k: int | None) -> None:
        share = (k or plan.config["num_hidden_layers"]) / plan.config["num_hidden_layers"]
        label = "patched, all layers" if k is None else f"SPEED k = {k}"
        work[f"{name}, {label}"] = (share * whole, partial(_prompt, bench, name, tokens, k, label))

    def packets(mode: str, k: int | None) -> None:
        label = f"packets, {mode}" + (f", SPEED k = {k}" if k else "")
        work[f"{name}, {label}"] = (building, partial(_packets, bench, name, tokens, mode, k, label))

    speed(first)
    packets("view", None)
    packets("copy", None)
    for k in others:
        speed(k)
    packets("view", first)
    speed(None)
    return work


def _rounds(bench: Bench, seconds: float) -> int:
    """More rounds where one is short, at least one."""
    return 1 if bench.run.dry else max(1, min(3, int(2.0 / max(seconds, 1e-3))))


def _record(
    bench: Bench,
    result: dict[str, Any],
    name: str,
    label: str,
    how: str,
    once: Callable[[], Outcome],
    ttft: bool = True,
) -> Outcome:
    """Times `once` some rounds, and keeps medians; the last round's outcome."""
    first: list[float] = []
    steps: list[float] = []
    outcome, rounds = once(), 1
    while True:
        first.append(outcome.stamps.first or float("nan"))
        steps += outcome.stamps.steps()[1:] if how == "cuda graph" else outcome.stamps.steps()  # the first one captures
        rounds = _rounds(bench, first[0]) if ttft else 1
        if len(first) >= rounds:
            break
        del outcome
        outcome = once()
    one: dict[str, Any] = {"token_seconds": median(steps)}
    if ttft:
        one |= {"ttft_seconds": median(first), "ttft_samples": first}
        if label != "unpatched" and name in bench.first_seconds:
            one["ttft_faster_than_unpatched"] = bench.first_seconds[name] / median(first)
    result[how], result["kv_bytes"] = one, outcome.kv_bytes
    text = f"TTFT {1e3 * median(first):.1f} ms, " if ttft else ""
    text += f"a token {1e3 * median(steps):.3f} ms, {outcome.kv_bytes / 1e9:.3f} GB"
    bench.run.say(f"{name}, {label}, {how}: {text}")
    return outcome


def _plain(bench: Bench, name: str, tokens: int, result: dict[str, Any]) -> None:
    if state_of(bench.model) is not None:
        kvspeed.unpatch_model(bench.model)
    ids = bench.ids(tokens)
    _record(bench, result, name, "unpatched", "eager", lambda: bench.eager(ids))
    bench.first_seconds[name] = result["eager"]["ttft_seconds"]


def _prompt(bench: Bench, name: str, tokens: int, k: int | None, label: str, result: dict[str, Any]) -> None:
    kvspeed.patch_model(bench.model, k=k)
    ids = bench.ids(tokens)
    outcome = _record(bench, result, name, label, "eager", lambda: bench.eager(ids))
    # The graph goes on where that ended: a second prefill of a long prompt would cost more than it tells.
    turn = partial(bench.captured, outcome.sequences, outcome.cache)
    _record(bench, result, name, label, "cuda graph", turn, ttft=False)


def _packets(
    bench: Bench, name: str, tokens: int, mode: str, k: int | None, label: str, result: dict[str, Any]
) -> None:
    kvspeed.patch_model(bench.model, k=k)
    begin = time.perf_counter()
    blocks = bench.blocks(tokens, k)
    bench.run.sync()
    result["build_seconds"] = time.perf_counter() - begin
    result["packets"] = len(blocks)
    for how, function in (("eager", bench.eager), ("cuda graph", bench.captured)):
        _record(bench, result, name, label, how, partial(bench.over_packets, tokens, mode, function))
