# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of whole models share: the model, a prompt of real text, timed generation, a report in ratios."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from kvspeed.data import documents
from kvspeed.eval.measure import cache_bytes
from kvspeed.smollm2 import load_smollm2
from timing import Comparison, Timing, run_delay_ns, save
from transformers import StoppingCriteria, StoppingCriteriaList

__all__ = ["Stamps", "Trial", "load_pair", "plain_generate", "prompt_of"]

NEVER = 49151  # as eos_token_id: a token that no answer contains, so that all runs have as many steps


def load_pair() -> tuple[Any, Any, Any]:
    """(model, the same model again, tokenizer): SmolLM2-135M-Instruct in float32, one to patch and one to leave alone.

    The second shares the first one's parameters, so that both read the same memory.
    """
    model, tokenizer = load_smollm2()
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return model, copy.deepcopy(model, shared), tokenizer


def prompt_of(tokenizer: Any, tokens: int) -> list[int]:
    """The first `tokens` ids of a chat about the documents that ship with kvspeed, said over and over."""
    ids: list[int] = tokenizer("\n\n".join(document.text for document in documents()))["input_ids"]
    head: list[int] = tokenizer("<|im_start|>user\n")["input_ids"]
    return (head + ids * (tokens // len(ids) + 1))[:tokens]


class Stamp(NamedTuple):
    """A moment: wall clock, CPU time of the process, nanoseconds its threads have waited for a processor so far."""

    wall: float
    cpu: float
    delay: int

    @classmethod
    def now(cls) -> Stamp:
        return cls(time.perf_counter(), time.process_time(), run_delay_ns())


class Stamps(StoppingCriteria):
    """Stamps the start, and every new token of a `generate` that is given this; stops nothing."""

    def __init__(self) -> None:
        self.taken = [Stamp.now()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.taken.append(Stamp.now())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass
class Trial:
    """What the methods of one case took: to the first token, for each later one, and in bytes of KV at the end."""

    case: str
    first: dict[str, Timing] = field(default_factory=dict)
    step: dict[str, Timing] = field(default_factory=dict)
    kv_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, method: str, stamps: list[Stamp], kv_bytes: int) -> None:
        """One generation: `stamps` are its start and its tokens."""
        add_sample(self.first.setdefault(method, Timing()), stamps[0], stamps[1])
        steps = self.step.setdefault(method, Timing())
        for before, after in itertools.pairwise(stamps[1:]):
            add_sample(steps, before, after)
        self.kv_bytes[method] = kv_bytes

    def report(self, name: str, base: str, **conditions: Any) -> None:
        """Print times and each method's ratio to `base`; keep them in bench/results."""
        print(f"\n{name}: {self.case}")
        first, step = (Comparison(timings, torch.get_num_threads()) for timings in (self.first, self.step))
        ratios = {}
        for method in self.first:
            parts = {"TTFT": first.ratio(method, base), "time per token": step.ratio(method, base)}
            parts["KV bytes"] = self.kv_bytes[method] / self.kv_bytes[base]
            ratios.update({f"{method}: {key}": value for key, value in parts.items()})
            clean = [f"{sum(t.clean)}/{len(t.clean)}" for t in (self.first[method], self.step[method])]
            print(
                f"  {method:<26} TTFT {1e3 * first.seconds(method):9.1f} ms {parts['TTFT']:6.3f}x   "
                f"per token {1e3 * step.seconds(method):7.2f} ms {parts['time per token']:6.3f}x   "
                f"KV {self.kv_bytes[method] / 2**20:6.1f} MiB {parts['KV bytes']:6.3f}x   clean {' '.join(clean)}"
            )
        case = {"case": self.case, **conditions}
        print("  saved in", save(name, first, case=case, ratios=ratios, steps=step.as_dict(), kv_bytes=self.kv_bytes))


def add_sample(timing: Timing, before: Stamp, after: Stamp) -> None:
    """One sample from two stamps; clean where threads waited less than 2 % of it."""
    wall = after.wall - before.wall
    timing.wall.append(wall)
    timing.cpu.append(after.cpu - before.cpu)
    timing.clean.append(after.delay - before.delay < 0.02e9 * wall)


@torch.no_grad()
def plain_generate(model: Any, ids: list[int], new_tokens: int) -> tuple[list[Stamp], int]:
    """Greedy generation by the model's own `generate` and the cache it makes: (stamps, KV bytes at the end)."""
    stamps = Stamps()
    prompt = torch.tensor([ids])
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=NEVER,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([stamps]),
    )
    cache = getattr(output, "cache", None)  # transformers 5.23 and later
    return stamps.taken, cache_bytes(cache if cache is not None else output.past_key_values)
