# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The ways of decoding that `generate` knows, under SPEED: beams, samples, chunks, assistants, embeddings, no cache."""

from __future__ import annotations

import threading
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed import KVCache, SpeedSpec
from speed_tools import (
    CACHE,
    LAYERS,
    NEW,
    K,
    answer,
    close,
    conversation,
    fresh,
    ids_of,
    left_padded,
    oracle,
    plain,
    poison,  # noqa: F401
    speedy,
)
from tiny_models import BOS, tiny_model
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"boundary": "keep"},
    "three-anchors": {"anchor_tokens": 3},
    "no-anchor": {"anchor_tokens": 0},
    "self": {"upper_attention": "self"},
}
options = pytest.mark.parametrize("option", OPTIONS)
tiny = pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text"])


def held(architecture: str, found: Any, prompt: int, option: str, tolerance: float = 1e-4, **settings: Any) -> None:
    for row, logits in zip(found.sequences, found.logits, strict=True):
        wanted = oracle(
            plain(architecture, **settings), row, conversation((prompt, len(row) - prompt)), **OPTIONS[option]
        )
        close(logits, wanted[prompt - 1 : -1], tolerance)


# ---- beams and samples ----------------------------------------------------------------------------------------------


def rescored(architecture: str, sequence: torch.Tensor, prompt: int, option: str) -> float:
    tokens = conversation((prompt, len(sequence) - prompt))
    logits = oracle(plain(architecture), sequence, tokens, **OPTIONS[option])[prompt - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, sequence[prompt:, None])
    return chosen.sum().item() / (len(sequence) - prompt)


@options
@tiny
def test_beams_score_as_the_oracle_rescores_them(architecture: str, option: str) -> None:
    rows = [ids_of(19)[0], ids_of(6)[0]]
    prompts, mask = left_padded(rows)
    model = speedy(architecture, **OPTIONS[option])
    found = answer(model, prompts, attention_mask=mask, n=7, num_beams=4, num_return_sequences=3, output_scores=True)
    scores = found.output.sequences_scores.tolist()
    assert len(scores) == 6
    for i, score in enumerate(scores):
        prompt = len(rows[i // 3])
        sequence = torch.cat([rows[i // 3], found.sequences[i, 19:]])
        assert abs(score - rescored(architecture, sequence, prompt, option)) < 1e-4


def test_beams_at_full_depth_are_the_unpatched_beams() -> None:
    for architecture in ("qwen3", "gemma2"):
        model, prompt = fresh(architecture), ids_of(15)
        wanted = answer(model, prompt, n=8, num_beams=3, num_return_sequences=3, output_scores=True)
        found = answer(
            kvspeed.patch_model(model, None), prompt, n=8, num_beams=3, num_return_sequences=3, output_scores=True
        )
        assert torch.equal(found.sequences, wanted.sequences)
        close(found.output.sequences_scores, wanted.output.sequences_scores)


@options
def test_many_samples_of_one_prompt(option: str) -> None:
    found = answer(speedy("llama", **OPTIONS[option]), ids_of(14), n=5, do_sample=True, num_return_sequences=3)
    assert found.sequences.shape == (3, 19)
    assert not torch.equal(found.sequences[0], found.sequences[1])
    held("llama", found, 14, option)


def test_rows_that_end_early_do_not_disturb_the_others() -> None:
    model = speedy("llama")
    prompts = ids_of(12, batch=3)
    free = answer(model, prompts, n=8)
    stop = int(free.sequences[0, 13])  # row 0 says this second: it ends there, and is padded from then on
    found = answer(model, prompts, n=8, eos_token_id=stop, pad_token_id=0)
    for i in range(3):
        tokens = found.sequences[i, 12:].tolist()
        length = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert torch.equal(found.sequences[i, : 12 + length], free.sequences[i, : 12 + length])
        close(found.logits[i, :length], free.logits[i, :length])


# ---- chunks and candidates ------------------------------------------------------------------------------------------


@options
@tiny
@pytest.mark.parametrize("chunk", [1, 9, 28, 29])
def test_chunked_prefill(architecture: str, option: str, chunk: int) -> None:
    """Chunks of one token, an odd number, and all but the last token."""
    found = answer(speedy(architecture, **OPTIONS[option]), ids_of(29), n=3, prefill_chunk_size=chunk)
    held(architecture, found, 29, option)


def repetitive(length: int) -> torch.Tensor:
    return ids_of(5).repeat(1, length // 5 + 1)[:, :length]


@options
@tiny
def test_prompt_lookup(architecture: str, option: str) -> None:
    """Candidates come from the prompt and are verified several at once; the wrong ones are cropped again."""
    model = speedy(architecture, **OPTIONS[option])
    found = answer(
        model, repetitive(23), n=12, prompt_lookup_num_tokens=4, max_matching_ngram_size=1, eos_token_id=9999
    )
    held(architecture, found, 23, option)


class Copied(LogitsProcessor):
    """Makes the model answer with the prompt's own tokens, so that looked-up candidates are accepted."""

    def __init__(self, prompt: torch.Tensor) -> None:
        self.prompt = prompt[0]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        pushed = scores.clone()
        pushed[:, self.prompt[(input_ids.shape[1] - len(self.prompt)) % len(self.prompt)]] += 1000.0
        return pushed


@options
def test_prompt_lookup_with_accepted_candidates(option: str) -> None:
    prompt = ids_of(17)
    model = speedy("llama", **OPTIONS[option])
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    found = answer(
        model, prompt, n=16, prompt_lookup_num_tokens=5, max_matching_ngram_size=2, eos_token_id=9999,
        logits_processor=LogitsProcessorList([Copied(prompt)]),
    )  # fmt: skip
    assert len(calls) < 14, "no candidate was ever accepted, so this tests nothing"
    held("llama", found, 17, option)
    assert found.cache.get_seq_length() <= found.sequences.shape[1]


def draft(model: torch.nn.Module, noise: float = 0.0) -> torch.nn.Module:
    """An assistant: the same weights with a little noise, so that some candidates are right and some wrong."""
    other = fresh("llama")
    with torch.no_grad():
        for weight in other.parameters():
            weight += noise * weight.abs().mean() * torch.randn_like(weight)
    return other


@pytest.mark.parametrize("patched_assistant", [False, True], ids=["plain-assistant", "patched-assistant"])
@pytest.mark.parametrize("option", ["default", "keep", "three-anchors"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_an_assistant_model(option: str, patched_assistant: bool, noise: float) -> None:
    model = speedy("llama", **OPTIONS[option])
    assistant = draft(model, noise)
    if patched_assistant:
        kvspeed.patch_model(assistant, K, **OPTIONS[option])
    prompt = ids_of(21)
    found = answer(model, prompt, n=10, assistant_model=assistant)
    held("llama", found, 21, option)
    assert torch.equal(found.sequences, answer(model, prompt, n=10).sequences)


def test_a_patched_assistant_of_an_unpatched_model() -> None:
    model, assistant, prompt = fresh("llama"), speedy("llama", 2), ids_of(21)
    wanted = answer(model, prompt, n=10)
    found = answer(model, prompt, n=10, assistant_model=assistant)
    assert torch.equal(found.sequences, wanted.sequences)
    close(found.logits, wanted.logits)


# ---- without a cache, with embeddings, with arguments in odd places -------------------------------------------------


@options
@tiny
def test_without_a_cache(architecture: str, option: str) -> None:
    rows = [ids_of(n)[0] for n in (26, 9, 1)]
    prompts, mask = left_padded(rows)
    model = speedy(architecture, **OPTIONS[option])
    found = answer(model, prompts, attention_mask=mask, n=4, use_cache=False)
    assert found.cache is None
    for i, row in enumerate(rows):
        sequence = torch.cat([row, found.sequences[i, 26:]])
        wanted = oracle(plain(architecture), sequence, conversation((len(row), 4)), **OPTIONS[option])
        close(found.logits[i], wanted[len(row) - 1 : -1])


@options
@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_as_prompt(option: str, with_ids: bool) -> None:
    """With ids too (for the processors that read them), transformers still takes the embeddings for the prompt."""
    prompt = ids_of(18)
    model = speedy("llama", **OPTIONS[option])
    embeddings = model.get_input_embeddings()(prompt).detach()
    given = {"input_ids": prompt} if with_ids else {}
    found = answer(model, inputs_embeds=embeddings, n=5, **given)
    sequence = torch.cat([prompt[0], found.sequences[0, -5:]])
    wanted = oracle(plain("llama"), sequence, conversation((18, 5)), **OPTIONS[option])
    close(found.logits[0], wanted[17:-1])


def test_no_prompt_at_all_starts_with_bos() -> None:
    found = answer(speedy("llama"), n=4)
    assert found.sequences[0, 0] == BOS and found.sequences.shape == (1, 5)
    held("llama", found, 1, "default")


def test_arguments_by_every_name() -> None:
    model, prompt = speedy("llama"), ids_of(13)
    wanted = answer(model, prompt, n=4)
    config = GenerationConfig(
        max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=600
    )
    for args, kwargs in (
        ((), {"input_ids": prompt}),
        ((), {"inputs": prompt}),
        ((prompt, config), {}),
        ((prompt,), {"generation_config": config}),
        ((prompt,), {"max_length": 17, "max_new_tokens": None}),
    ):
        close(answer(model, *args, n=4, **kwargs).logits, wanted.logits)
    ids = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(ids, wanted.sequences)


def test_an_answer_longer_than_what_was_reserved() -> None:
    """The cache grows where nobody told it how long the answer will be."""
    model, prompt = speedy("llama", boundary="keep"), ids_of(5)
    cache = KVCache(model.config, spec=SpeedSpec(K, boundary="keep"), capacity=1)
    cache.begin_turn(5)
    ids, logits = prompt, []
    with torch.no_grad():
        for step in range(300):
            out = model(ids if step == 0 else ids[:, -1:], **{CACHE: cache}, use_cache=True)
            logits.append(out.logits[:, -1])
            ids = torch.cat([ids, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
    wanted = oracle(plain("llama"), ids[0], conversation((5, 300)), boundary="keep")
    close(torch.cat(logits), wanted[4:-1], 3e-4)
    assert cache.allocated_bytes() < 2 * cache.kv_bytes()


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_two_threads_generate_at_once(architecture: str) -> None:
    """One model, two threads, one of them prefilling in chunks that leave the deep layers nothing to do."""
    model = speedy(architecture)
    before = model.generation_config.to_dict()
    prompts = [ids_of(40), ids_of(33)]
    wanted = [answer(model, prompt, n=6).logits for prompt in prompts]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(6):
                chunks = {"prefill_chunk_size": 2} if i else {}
                close(answer(model, prompts[i], n=6, **chunks).logits, wanted[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert len(model.model.layers) == LAYERS
    assert model.generation_config.to_dict() == before


def test_a_longer_model_of_many_options_at_once() -> None:
    """Ten layers, llama3 scaling, three anchors, a kept boundary, padded beams in chunks."""
    settings: dict[str, Any] = dict(layers=10, seed=3, rope={
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    })  # fmt: skip
    model = kvspeed.patch_model(tiny_model("llama", **settings), 7, anchor_tokens=3, boundary="keep")
    rows = [ids_of(90)[0], ids_of(2)[0]]
    prompts, mask = left_padded(rows)
    chunks = {"prefill_chunk_size": 16} if NEW else {}
    found = answer(model, prompts, attention_mask=mask, n=6, num_beams=2, output_scores=True, **chunks)
    reference = tiny_model("llama", **settings)
    for i, row in enumerate(rows):
        sequence = torch.cat([row, found.sequences[i, 90:]])
        tokens = conversation((len(row), 6))
        logits = oracle(reference, sequence, tokens, 7, anchor_tokens=3, boundary="keep")[len(row) - 1 : -1]
        score = logits.log_softmax(-1).gather(1, sequence[len(row) :, None]).sum().item() / 6
        assert abs(score - found.output.sequences_scores[i].item()) < 1e-4
