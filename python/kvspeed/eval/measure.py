# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Times and bytes of one generation, and how runs of several methods are put in turn.

TTFT is wall clock from the moment the question is asked to the first token being known: tokenising the question,
assembling a cache and the forward are inside, loading the model and building packets (done once, beforehand) are not.
Methods are compared interleaved, in one process, in an order that changes every round, and by medians: on a shared
machine that is what keeps a ratio honest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

__all__ = ["Generation", "TokenClock", "cache_bytes", "interleaved", "median_of", "timed_generate"]

T = TypeVar("T")


@dataclass
class Generation:
    """One answer and what it took.

    Attributes:
        token_ids: new tokens, EoS included where it came.
        ttft_s: seconds to the first of them.
        time_per_token_s: mean seconds of the others; None where there is only one.
        kv_bytes: bytes of keys and values stored at the end.
        prompt_tokens: positions of the prompt, packets included.
        computed_tokens: prompt tokens that were computed in this call.
    """

    token_ids: list[int]
    ttft_s: float
    time_per_token_s: float | None
    kv_bytes: int
    prompt_tokens: int
    computed_tokens: int
    text: str = ""


class TokenClock(StoppingCriteria):
    """Notes the time of every new token, after the device has finished it; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def timed_generate(
    model: Any, prompt: Callable[[], Sequence[int]], *, max_new_tokens: int, **generate_kwargs: Any
) -> Generation:
    """Greedy generation from a whole prompt by the model's own `generate` and the cache that it makes itself.

    Args:
        model: patched or not.
        prompt: gives the prompt's token ids; called inside the measured time.
        max_new_tokens: the most new tokens.
        **generate_kwargs: passed on.
    """
    clock = TokenClock()
    begin = time.perf_counter()
    ids = torch.tensor([list(prompt())], device=model.get_input_embeddings().weight.device)
    given = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **generate_kwargs}
    if given.get("pad_token_id") is None and getattr(model.generation_config, "pad_token_id", None) is None:
        given["pad_token_id"] = 0  # one row, never padded; saves a warning
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([clock]),
        **given,
    )
    cache = getattr(output, "cache", None)  # transformers 5.23 and later
    if cache is None:
        cache = output.past_key_values
    new = output.sequences[0, ids.shape[1] :].tolist()
    per_token = (clock.times[-1] - clock.times[0]) / (len(new) - 1) if len(new) > 1 else None
    return Generation(new, clock.times[0] - begin, per_token, cache_bytes(cache), ids.shape[1], ids.shape[1])


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a cache: `KVCache.kv_bytes()`, or the tensors of any cache of transformers.

    A cache that allocates ahead (StaticCache) counts with what it allocated.

    Raises:
        TypeError: it is no cache.
    """
    if hasattr(cache, "kv_bytes"):
        return int(cache.kv_bytes())
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise TypeError(f"cache: expected a cache of kvspeed or transformers, got {type(cache).__name__}")
    tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def interleaved(
    runs: Mapping[str, Callable[[int], T]], rounds: int, *, warmup: int = 1
) -> Iterator[tuple[str, int, T]]:
    """Runs every method once a round, each round beginning with another method.

    Args:
        runs: name -> function of the round's number.
        rounds: measured rounds.
        warmup: calls of every method with round 0 before, whose results are dropped.

    Yields:
        (name, round, result)
    """
    names = list(runs)
    for _ in range(warmup):
        for name in names:
            runs[name](0)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            yield name, number, runs[name](number)


def median_of(values: Sequence[float | None]) -> float | None:
    """The median of those that are not None; None without any."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
