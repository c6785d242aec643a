# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets under SPEED with questions that are longer than the packets, or than what the kernels serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvspeed import assemble, build_packet, generate, patch_model
from kvspeed.state import state_of
from packet_tools import random_text, tiny_tokenizer
from tiny_models import random_ids, tiny_model

EXACT: dict[str, Any] = {"max_new_tokens": 3, "separator": ""}


def first_logits(model: Any, tokenizer: Any, question: Any, packets: Any, **options: Any) -> torch.Tensor:
    """float32 `[B, vocabulary]`: the logits of the first answer token."""
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, given, found: seen.append(found[:, -1].float().clone()))
    try:
        generate(model, tokenizer, question, packets, **{**EXACT, **options})
    finally:
        handle.remove()
    return seen[0]


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "llama"])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("tokens", [1, 64, 65, 100])
def test_view_is_copy_for_questions_of_any_length(architecture: str, k: int, tokens: int) -> None:
    """From 65 tokens on a CPU's prefill is torch's own, with transformers' mask: sliding layers ask for positions."""
    model, tokenizer = tiny_model(architecture, layers=6), tiny_tokenizer(bos=True)
    patch_model(model, k=k)
    packets, question = (
        [build_packet(model, tokenizer, random_text(40, seed)) for seed in range(2)],
        random_text(tokens, 7),
    )
    view, copy = (first_logits(model, tokenizer, question, packets, mode=mode) for mode in ("view", "copy"))
    torch.testing.assert_close(view, copy, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [12, 20])
def test_view_is_copy_where_no_kernel_takes_the_head_size(head_dim: int) -> None:
    settings = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "num_key_value_heads": 2}
    sliding = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    model, tokenizer = tiny_model("qwen2", layers=6, **settings, **sliding), tiny_tokenizer(bos=True)
    patch_model(model, k=4)
    packets = [build_packet(model, tokenizer, random_text(30, seed)) for seed in range(2)]
    view, copy = (first_logits(model, tokenizer, "w300 w301", packets, mode=mode) for mode in ("view", "copy"))
    torch.testing.assert_close(view, copy, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("anchor_tokens", [0, 1, 3])
@pytest.mark.parametrize("document", [3, 10])
def test_rows_are_padded_beyond_the_packets(mode: str, anchor_tokens: int, document: int) -> None:
    """A short question beside one that is longer than all packets: its padding is no anchor."""
    model, tokenizer = tiny_model("llama", layers=4), tiny_tokenizer(bos=True)
    patch_model(model, k=2, anchor_tokens=anchor_tokens)
    packets = [build_packet(model, tokenizer, random_text(document, 1))]
    questions = [random_text(count, 50 + count) for count in (2, 20, 11, 1)]
    options: dict[str, Any] = {"mode": mode, "preamble": False}
    together = first_logits(model, tokenizer, questions, packets, **options)
    answers = generate(model, tokenizer, questions, packets, **EXACT, **options)
    for row, question in enumerate(questions):
        alone = first_logits(model, tokenizer, question, packets, **options)[0]
        torch.testing.assert_close(together[row], alone, atol=2e-4, rtol=1e-4)
        assert answers[row] == generate(model, tokenizer, question, packets, **EXACT, **options)


@pytest.mark.parametrize(("architecture", "implementation"), [("gemma3_text", "sdpa"), ("gemma2", "eager")])
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize(("head_dim", "lengths"), [(16, (2, 100, 40)), (12, (2, 20, 1))])
def test_windows_go_by_position_in_padded_rows(
    architecture: str, mode: str, k: int | None, head_dim: int, lengths: tuple[int, ...], implementation: str
) -> None:
    """Behind packets a row's padding lies between them and its tokens; transformers' masks count it as distance."""
    model, tokenizer = tiny_model(architecture, layers=6, head_dim=head_dim), tiny_tokenizer(bos=True)
    model.set_attn_implementation(implementation)
    patch_model(model, k=k)
    packets = [build_packet(model, tokenizer, random_text(30, seed)) for seed in range(2)]
    questions = [random_text(count, 50 + count) for count in lengths]
    together = first_logits(model, tokenizer, questions, packets, mode=mode)
    for row, question in enumerate(questions):
        alone = first_logits(model, tokenizer, question, packets, mode=mode)[0]
        torch.testing.assert_close(together[row], alone, atol=2e-4, rtol=1e-4)


def asked(model: Any, cache: Any, rows: list[list[int]], steps: int = 2) -> torch.Tensor:
    """Logits `[B, steps, vocabulary]` of rows of ids behind what `cache` holds, through the model's `generate`."""
    before, width = list(cache.prefix_ids), max(map(len, rows))
    ids = torch.tensor([before + [7] * (width - len(row)) + row for row in rows])
    mask = torch.ones_like(ids)
    for index, row in enumerate(rows):
        mask[index, len(before) : len(before) + width - len(row)] = 0
    options = {"max_new_tokens": steps, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    given = {state_of(model).cache_name: cache, "pad_token_id": 600, "eos_token_id": 601}
    with torch.no_grad():
        return torch.stack(model.generate(ids, attention_mask=mask, **options, **given).logits, 1)


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("lengths", [(3, 3), (5, 2), (1, 30)])
def test_packets_are_asked_again_after_a_crop(mode: Any, k: int | None, lengths: tuple[int, ...]) -> None:
    """The rows of the first batch are gone, and their padding with them."""
    model = patch_model(tiny_model("llama", layers=4), k=k)
    packets = [build_packet(model, tiny_tokenizer(bos=True), random_text(10, 1))]
    first, second = (
        [random_ids(n, seed=n + 3 * i)[0].tolist() for i, n in enumerate(each)] for each in ((1, 20), lengths)
    )
    cache = assemble(packets, model=model, mode=mode)
    seen = cache.get_seq_length()
    asked(model, cache, first)
    cache.crop(seen)
    assert cache.padding is None
    fresh = asked(model, assemble(packets, model=model, mode=mode), second)
    torch.testing.assert_close(asked(model, cache, second), fresh, atol=2e-4, rtol=1e-4)
