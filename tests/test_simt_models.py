# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A model from end to end over the CUDA kernels, which the emulator runs, against the CPU's kernels.

Few layers and tokens: the emulator checks every access. Logits are compared along one given answer, so that a near tie
between two tokens cannot send the two ways apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import backends
import kvspeed
import pytest
import torch
from kvspeed import graph
from kvspeed.models import base_model, cache_argument
from kvspeed.ops.attention import covers
from kvspeed.packet import assemble, build_packet
from kvspeed.state import state_of
from packet_tools import cached_logits, random_text, tiny_tokenizer
from tiny_models import tiny_model

ANSWER = [150, 160, 170]
HEAD_DIM = 64


def model_of(k: int | None, name: str = "qwen3", **options: Any) -> Any:
    model = tiny_model(name, layers=3, head_dim=HEAD_DIM, dtype=torch.bfloat16, **options)
    return kvspeed.patch_model(model, k)


@pytest.fixture
def emulated() -> Iterator[None]:
    with backends.running("simt"):
        yield


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """bfloat16 through three layers: two orders of the same sums differ by a few roundings of the largest logit."""
    assert bool(torch.isfinite(found).all())
    error, largest = (found.float() - wanted.float()).abs().max(), wanted.float().abs().max()
    assert error <= 0.06 * largest, f"differs by {error:.3g} of {largest:.3g}"


def logits_after(model: Any, make_cache: Any, question: list[int]) -> torch.Tensor:
    return cached_logits(model, make_cache(), question, ANSWER)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_decoding(k, name):
    model = model_of(k, name)
    question = torch.randint(3, 500, (30,)).tolist()  # longer than Gemma's window

    def make_cache() -> Any:
        return kvspeed.KVCache(model.config, spec=state_of(model).spec)

    wanted = logits_after(model, make_cache, question)
    with backends.running("simt"):
        found = logits_after(model, make_cache, question)
    close(found, wanted)


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("mode", ["view", "copy"])
def test_packets(k, mode):
    model, tokenizer = model_of(k), tiny_tokenizer()
    packets = [build_packet(model, tokenizer, random_text(n, n)) for n in (70, 5)]  # more than one tile
    question = torch.randint(3, 500, (6,)).tolist()

    def make_cache() -> Any:
        return assemble([*packets, packets[0]], model=model, mode=mode)

    wanted = logits_after(model, make_cache, question)
    with backends.running("simt"):
        found = logits_after(model, make_cache, question)
    close(found, wanted)


@pytest.mark.parametrize("k", [None, 2])
def test_packets_built_over_the_kernels(emulated, k):
    model, tokenizer = model_of(k), tiny_tokenizer()
    packet = build_packet(model, tokenizer, random_text(9, 1))
    answers = [
        kvspeed.generate(
            model, tokenizer, ["w150 w160", "w170"], [packet, packet], mode=mode, max_new_tokens=4, cuda_graph=graphed
        )
        for mode, graphed in (("view", False), ("view", True), ("copy", True))
    ]
    assert all(isinstance(one, str) for answer in answers for one in answer)
    # Splits are planned for a step's capacity, so that sums are in another order: the first token is the same forward.
    assert [one.split()[:1] for one in answers[0]] == [one.split()[:1] for one in answers[1]]


@pytest.mark.parametrize("k", [None, 2])
def test_a_step_of_fixed_shape(k):
    """Along the tokens that the step chose, the CPU's logits have them on top, or within rounding of it."""
    model, (ids, new) = model_of(k), (torch.randint(3, 500, (2, 7)), 4)
    with backends.running("simt"):
        tokens = graph.generate(model, ids, max_new_tokens=new, capture=False)
    cache = kvspeed.KVCache(model.config, spec=state_of(model).spec)
    cache.begin_turn(ids.shape[1])
    name = cache_argument(base_model(model))
    pieces = [tokens[:, : ids.shape[1]], *tokens[:, ids.shape[1] : -1].split(1, 1)]
    with torch.no_grad():
        logits = [model(input_ids=piece, use_cache=True, **{name: cache}).logits[:, -1].float() for piece in pieces]
    for step, row in enumerate(logits):
        chosen = row.gather(1, tokens[:, ids.shape[1] + step, None])[:, 0]
        assert bool((row.max(1).values - chosen <= 0.06 * row.abs().max()).all())


def test_what_the_kernels_do_not_take_goes_to_the_models_own_attention(emulated):
    assert not covers(torch.empty(1, 1, 1, HEAD_DIM)) and not covers(torch.empty(1, 1, 1, 16, dtype=torch.bfloat16))
    tokenizer = tiny_tokenizer()
    for model in (tiny_model("llama", layers=2), tiny_model("llama", layers=2, dtype=torch.bfloat16)):
        packets = [build_packet(model, tokenizer, random_text(n, n)) for n in (9, 5)]
        answers = [
            kvspeed.generate(model, tokenizer, "w150", packets, mode=mode, max_new_tokens=3)
            for mode in ("view", "copy")
        ]
        assert answers[0] == answers[1]
        with pytest.raises(ValueError, match="leave cuda_graph out"):
            kvspeed.generate(model, tokenizer, "w150", packets, max_new_tokens=3, cuda_graph=True)
