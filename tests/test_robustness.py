# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Faults that a hostile reviewer found: masks that are more than left padding, failed calls, threads, odd files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed import Packet
from kvspeed.models import base_model, cache_argument
from kvspeed.packet import TensorFileError
from packet_tools import random_text, tiny_tokenizer
from tiny_models import random_ids, tiny_model
from transformers import DynamicCache

NAME = cache_argument(base_model(tiny_model("llama")))


def logits(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    out = model.generate(
        ids, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **kwargs
    )
    return torch.stack(out.logits, 1)


def packets_for(model: Any, count: int = 3) -> list[Packet]:
    return [kvspeed.build_packet(model, tiny_tokenizer(), random_text(6 + i, i)) for i in range(count)]


@pytest.mark.parametrize("k", [None, 3])
@torch.no_grad()
def test_padded_rows_token_by_token(k: int | None) -> None:
    """A one-token forward within the prompt is not a decode step: its mask still says who is padding."""
    model = kvspeed.patch_model(tiny_model("llama"), k)
    ids, mask = random_ids(8, batch=2), torch.ones(2, 8, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    want = logits(model, ids, attention_mask=mask, max_new_tokens=1)[:, 0]
    cache = kvspeed.KVCache(model.config, spec=model._kvspeed.spec)
    cache.begin_turn(8)
    for i in range(8):
        out = model(
            ids[:, i : i + 1], attention_mask=mask[:, : i + 1], position_ids=positions[:, i : i + 1], **{NAME: cache}
        )
    assert (out.logits[:, -1] - want).abs().max() < 1e-4


@torch.no_grad()
def test_a_hole_in_the_mask_of_a_one_token_turn() -> None:
    model = tiny_model("llama")
    ids = random_ids(8, batch=2)

    def two_turns() -> torch.Tensor:
        first = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
        mask = torch.ones_like(first.sequences)
        mask[0, 10:12] = 0
        return logits(model, first.sequences, attention_mask=mask, max_new_tokens=3, **{NAME: getattr(first, NAME)})

    want = two_turns()
    kvspeed.patch_model(model)
    assert (two_turns() - want).abs().max() < 1e-4
    kvspeed.patch_model(model, 3)
    with pytest.raises(ValueError, match="not left padding"):
        two_turns()


@pytest.mark.parametrize("where", [2, 22, "4d", "weights"])
@torch.no_grad()
def test_view_mode_honours_every_mask(where: int | str) -> None:
    model = kvspeed.patch_model(tiny_model("llama", attn_implementation="eager" if where == "weights" else None))
    packets = packets_for(model)
    length = sum(packet.length for packet in packets)
    ids = random_ids(5, bos=False)
    mask: Any = torch.ones(1, length + 5, dtype=torch.long)
    if isinstance(where, int):
        mask[0, where if where < length else length + 2] = 0
    elif where == "4d":
        mask = torch.ones(5, length + 5, dtype=torch.bool).tril(length)
        mask[:, 3] = False
        mask = mask[None, None]
    kwargs: dict[str, Any] = {"output_attentions": True} if where == "weights" else {}
    found = []
    for mode in ("view", "copy"):
        cache = kvspeed.assemble(packets, model=model, mode=mode)
        positions = torch.arange(length, length + 5)[None]
        out = model(ids, attention_mask=mask, position_ids=positions, **{NAME: cache}, **kwargs)
        found.append(out)
    assert (found[0].logits - found[1].logits).abs().max() < 1e-4
    if where == "weights":
        assert found[0].attentions[0].shape[-1] == length + 5


def test_use_cache_false_does_not_reach_packets() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    packets = packets_for(model)
    want = kvspeed.generate(model, tokenizer, "w300 w301", packets, max_new_tokens=6)
    model.generation_config.use_cache = False  # as training leaves it behind
    assert kvspeed.generate(model, tokenizer, "w300 w301", packets, max_new_tokens=6) == want
    with pytest.raises(TypeError, match="use_cache"):
        kvspeed.generate(model, tokenizer, "w300 w301", packets, use_cache=False)


def test_chunked_prefill_of_ragged_questions_over_packets() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    if NAME == "past_key_values":
        pytest.skip("transformers 4.57 itself computes chunks of padded rows wrongly")
    kvspeed.patch_model(model, 3)
    packets, questions = packets_for(model), ["w300 w301 w302 w303 w304", "w310"]
    want = kvspeed.generate(model, tokenizer, questions, packets, max_new_tokens=4)
    assert kvspeed.generate(model, tokenizer, questions, packets, max_new_tokens=4, prefill_chunk_size=2) == want


@pytest.mark.parametrize("turns", ["keep", "reset"])
def test_a_failed_generate_leaves_the_cache_alone(turns: str) -> None:
    model = kvspeed.patch_model(tiny_model("llama"), 3, turns=turns)
    first = model.generate(
        random_ids(8), max_new_tokens=6, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    cache = getattr(first, NAME)
    before = cache.deep_slots.copy(), cache.prompt_end, cache.max_batch_size, cache.kv_bytes()
    whole = torch.cat([first.sequences, random_ids(3, bos=False)], 1)
    with pytest.raises(ValueError, match="nonsense"):
        model.generate(whole, max_new_tokens=3, num_beams=3, nonsense=3, **{NAME: cache})
    assert (cache.deep_slots, cache.prompt_end, cache.max_batch_size, cache.kv_bytes()) == before
    model.generate(whole, max_new_tokens=3, do_sample=False, pad_token_id=0, **{NAME: cache})
    empty = DynamicCache()
    with pytest.raises(ValueError, match="nonsense"):
        model.generate(whole, max_new_tokens=3, nonsense=3, **{NAME: empty})
    assert type(empty) is DynamicCache and empty.get_seq_length() == 0


def test_early_exit_drafts_are_refused_before_anything_changes() -> None:
    model = kvspeed.patch_model(tiny_model("llama"))
    with pytest.raises(ValueError, match="assistant_early_exit"):
        model.generate(random_ids(10), max_new_tokens=8, assistant_early_exit=3)
    assert model.config.num_hidden_layers == 6


def test_threads_share_an_unpatched_model() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    packets = packets_for(model)
    want = kvspeed.generate(model, tokenizer, "w300 w301 w302", packets, max_new_tokens=6)
    problems: list[object] = []

    def ask() -> None:
        for _ in range(6):
            try:
                answer = kvspeed.generate(model, tokenizer, "w300 w301 w302", packets, max_new_tokens=6)
                if answer != want:
                    problems.append(answer)
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert "_kvspeed" not in base_model(model).__dict__


def test_keys_that_require_grad_take_the_models_own_attention() -> None:
    model = kvspeed.patch_model(tiny_model("llama"))
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.requires_grad_(True)
    model(random_ids(1), **{NAME: kvspeed.KVCache(model.config)}).logits.sum().backward()


@torch.no_grad()
def test_crop_never_drops_packets() -> None:
    model = kvspeed.patch_model(tiny_model("llama"))
    cache = kvspeed.assemble(packets_for(model), model=model)
    length = cache.get_seq_length()
    for crop in (-1, -length, -length - 5):
        with pytest.raises(ValueError, match="shared packets"):
            cache.crop(crop)
    assert cache.get_seq_length() == length


def test_files_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(TensorFileError, match="no regular file"):
            Packet.load(path)


def test_text_and_separator_that_are_no_text() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    with pytest.raises(ValueError, match="surrogate"):
        kvspeed.build_packet(model, tokenizer, "\ud800 a")
    with pytest.raises(TypeError, match="separator"):
        kvspeed.generate(model, tokenizer, "w300", packets_for(model), separator=3)


def test_a_huge_anchor_reserves_no_more_than_the_prompt() -> None:
    model = kvspeed.patch_model(tiny_model("llama"), 3, anchor_tokens=10**12)
    model.generate(random_ids(6), max_new_tokens=2, do_sample=False, pad_token_id=0)
