# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One turn of `generate` under SPEED: logits against the masked full-depth forward, on every architecture."""

from __future__ import annotations

from typing import Any

import kvspeed
import pytest
import torch
from speed_tools import (
    LAYERS,
    NEW,
    Answer,
    K,
    answer,
    close,
    conversation,
    decoder,
    fresh,
    ids_of,
    left_padded,
    oracle,
    plain,
    poison,  # noqa: F401
    rows_above,
    speedy,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"boundary": "keep"},
    "no-anchor": {"anchor_tokens": 0},
    "three-anchors": {"anchor_tokens": 3},
    "all-anchors": {"anchor_tokens": 50},
    "self": {"upper_attention": "self"},
    "self-keep-two": {"upper_attention": "self", "boundary": "keep", "anchor_tokens": 2},
    "keep-no-anchor": {"boundary": "keep", "anchor_tokens": 0},
}
FEW = ("default", "keep", "three-anchors")
# Chunked prefill of padded rows: transformers 4.57 gives the chunks wrong positions, patched or not.
CHUNKS: list[dict[str, Any]] = [{"prefill_chunk_size": 6}] if NEW else []
TINY = ("llama", "gemma2")  # for what does not depend on the architecture: the plainest, and the strangest


def check(
    model: torch.nn.Module, found: Answer, prompt: int, k: int = K, tolerance: float = 1e-4, **options: Any
) -> None:
    """Every row of an unpadded answer against the oracle."""
    for row, logits in zip(found.sequences, found.logits, strict=True):
        n = logits.shape[0]
        wanted = oracle(model, row, conversation((prompt, row.shape[0] - prompt)), k, **options)
        close(logits, wanted[prompt - 1 : prompt - 1 + n], tolerance)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_on_every_architecture(architecture: str, option: str) -> None:
    prompt = ids_of(37)  # longer than the tiny models' sliding window of 24
    found = answer(speedy(architecture, **OPTIONS[option]), prompt)
    check(plain(architecture), found, 37, **OPTIONS[option])


@pytest.mark.parametrize("k", [None, LAYERS])
def test_full_depth_is_the_unpatched_model(architecture: str, k: int | None) -> None:
    model = fresh(architecture)
    prompts, mask = left_padded([ids_of(31)[0], ids_of(9)[0], ids_of(1)[0]])
    wanted = answer(model, prompts, attention_mask=mask)
    kvspeed.patch_model(model, k)
    found = answer(model, prompts, attention_mask=mask)
    assert torch.equal(found.sequences, wanted.sequences)
    close(found.logits, wanted.logits)
    ids = ids_of(33)
    with torch.no_grad():
        close(model(ids).logits, plain(architecture)(ids).logits)  # a bare forward is allowed at full depth


@pytest.mark.parametrize("option", ["default", "keep", "no-anchor", "three-anchors", "self", "all-anchors"])
def test_a_left_padded_batch_is_its_rows_alone(architecture: str, option: str) -> None:
    options = OPTIONS[option]
    rows = [ids_of(n)[0] for n in (29, 17, 2, 1)]
    model = speedy(architecture, **options)
    prompts, mask = left_padded(rows)
    found = answer(model, prompts, attention_mask=mask, n=4)
    for i, row in enumerate(rows):
        sequence = torch.cat([row, found.sequences[i, prompts.shape[1] :]])
        wanted = oracle(plain(architecture), sequence, conversation((len(row), 4)), **options)
        close(found.logits[i], wanted[len(row) - 1 : -1])


@pytest.mark.parametrize("option", FEW)
@pytest.mark.parametrize("architecture", TINY)
def test_padding_everywhere_changes_nothing(architecture: str, option: str) -> None:
    """No row is full: the batch was padded to a multiple of 8, as data collators do."""
    rows = [ids_of(n)[0] for n in (11, 3)]
    prompts, mask = left_padded([*rows, ids_of(16)[0]])
    prompts, mask = prompts[:2], mask[:2]
    for kwargs in ({}, {"use_cache": False}, *CHUNKS):
        found = answer(speedy(architecture, **OPTIONS[option]), prompts, attention_mask=mask, n=4, **kwargs)
        for i, row in enumerate(rows):
            sequence = torch.cat([row, found.sequences[i, 16:]])
            wanted = oracle(plain(architecture), sequence, conversation((len(row), 4)), **OPTIONS[option])
            close(found.logits[i], wanted[len(row) - 1 : -1])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_of_a_few_tokens(option: str, length: int) -> None:
    for architecture in TINY:
        found = answer(speedy(architecture, **OPTIONS[option]), ids_of(length))
        check(plain(architecture), found, length, **OPTIONS[option])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_depth(k: int) -> None:
    for architecture in ("smollm3", "gemma3_text"):
        check(plain(architecture), answer(speedy(architecture, k), ids_of(30)), 30, k)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("option", FEW)
def test_eager_and_sdpa(implementation: str, option: str) -> None:
    chosen = {"attn_implementation": implementation}
    for architecture in ("llama", "qwen3", "phi3", "gemma3_text"):
        found = answer(speedy(architecture, model=chosen, **OPTIONS[option]), ids_of(27), n=3)
        check(plain(architecture, **chosen), found, 27, **OPTIONS[option])


@pytest.mark.parametrize("option", FEW)
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("mistral", {"sliding_window": 8}),
        ("phi3", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5}),
        ("gemma2", {"sliding_window": 1}),
        ("gemma3_text", {"sliding_window": 3}),
    ],
)
def test_sliding_windows_compose_by_position(architecture: str, settings: dict[str, Any], option: str) -> None:
    """Windows shorter than the prompt and than the answer, in layers below and above k, padded rows too."""
    rows = [ids_of(n)[0] for n in (21, 6, 1)]
    prompts, mask = left_padded(rows)
    for kwargs in ({}, *CHUNKS):
        found = answer(
            speedy(architecture, model=settings, **OPTIONS[option]), prompts, attention_mask=mask, n=12, **kwargs
        )
        for i, row in enumerate(rows):
            sequence = torch.cat([row, found.sequences[i, 21:]])
            wanted = oracle(plain(architecture, **settings), sequence, conversation((len(row), 12)), **OPTIONS[option])
            close(found.logits[i], wanted[len(row) - 1 : -1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", FEW)
def test_half_precision(architecture: str, dtype: torch.dtype, option: str) -> None:
    """As near to the float32 oracle as the half-precision oracle is, twice over."""
    found = answer(speedy(architecture, model={"dtype": dtype}, **OPTIONS[option]), ids_of(37))
    tokens = conversation((37, found.sequences.shape[1] - 37))
    truth = oracle(_upcast(architecture, dtype), found.sequences[0], tokens, **OPTIONS[option])[36:-1]
    half = oracle(plain(architecture, dtype=dtype), found.sequences[0], tokens, **OPTIONS[option])[36:-1]
    allowed = (half - truth).square().mean().sqrt().item()
    error = (found.logits[0] - truth).square().mean().sqrt().item()
    assert error <= 2 * allowed + 1e-3, f"rms error {error:.3g}; the model's own is {allowed:.3g}"


def _upcast(architecture: str, dtype: torch.dtype) -> torch.nn.Module:
    """A float32 model with the weights as `dtype` rounded them."""
    model = fresh(architecture)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()
    return model


@pytest.mark.parametrize("option", OPTIONS)
def test_no_token_of_the_prompt_runs_above_k(option: str) -> None:
    options = OPTIONS[option]
    anchors = min(options.get("anchor_tokens", 1), 20)
    for kwargs, forwards in (({}, 1), ({"prefill_chunk_size": 7}, 3)):
        model = speedy("qwen3", **options)
        with rows_above(model) as counts:
            answer(model, ids_of(20), n=4, **kwargs)
        deep = anchors + (0 if anchors == 20 else 1) + 3
        for layer in range(K, LAYERS):
            rows = [n for index, n in counts if index == layer]
            assert sum(rows) == deep, (kwargs, layer, rows)
            assert min(rows) >= 1 and len(rows) <= forwards + 4


def test_no_row_of_a_padded_batch_runs_above_k() -> None:
    """Rows of a batch share their columns: an anchor each, the last token, then one a step."""
    model = speedy("llama")
    prompts, mask = left_padded([ids_of(20)[0], ids_of(5)[0]])
    with rows_above(model) as counts:
        answer(model, prompts, attention_mask=mask, n=4)
    assert [n for index, n in counts if index == K] == [4, 2, 2, 2]


@pytest.mark.parametrize("option", OPTIONS)
def test_lengths_and_bytes_of_every_layer(option: str) -> None:
    options = OPTIONS[option]
    prompt, new = 20, 6
    found = answer(speedy("llama", **options), ids_of(prompt), n=new)
    anchors = min(options.get("anchor_tokens", 1), prompt)
    kept = int(options.get("boundary") == "keep" and anchors < prompt)
    deep = anchors + kept + new - 1
    lengths = [layer.keys.shape[2] for layer in found.cache.layers]
    assert lengths == [prompt + new - 1] * K + [deep] * (LAYERS - K)
    assert [found.cache.get_seq_length(i) for i in range(LAYERS)] == lengths
    token = 2 * 2 * 16 * 4  # K and V, two heads, head dimension 16, four bytes
    assert found.cache.kv_bytes() == sum(lengths) * token
    assert found.cache.kv_bytes() <= found.cache.allocated_bytes()
    for layer in found.cache.layers:
        assert bool(torch.isfinite(layer.keys).all()) and bool(torch.isfinite(layer.values).all())


def test_the_anchors_kv_does_not_depend_on_the_prompt(architecture: str) -> None:
    """Rule 3; and its keys are those of the unpatched model at the anchor's own positions."""
    model = speedy(architecture, anchor_tokens=2)
    first, second = ids_of(30), ids_of(12)
    second[:, :2] = first[:, :2]
    one, two = answer(model, first, n=2).cache, answer(model, second, n=2).cache
    with torch.no_grad():
        own = plain(architecture)(first[:, :2], use_cache=True)
    own = own.cache if NEW else own.past_key_values
    for layer in range(K, LAYERS):
        close(one.layers[layer].keys[:, :, :2], two.layers[layer].keys[:, :, :2], 2e-5)
        close(one.layers[layer].values[:, :, :2], own.layers[layer].values, 2e-5)
        close(one.layers[layer].keys[:, :, :2], own.layers[layer].keys, 2e-5)


def test_positions_are_absolute(architecture: str) -> None:
    """A deep answer token's key is the one the oracle's forward makes at the token's place in the sequence."""
    prompt = ids_of(30)
    found = answer(speedy(architecture), prompt, n=4)
    projections: dict[int, torch.Tensor] = {}
    model = plain(architecture)
    handles = []
    for index, layer in enumerate(decoder(model).layers):
        if index >= K:
            handles.append(layer.register_forward_pre_hook(_keep_input(projections, index), with_kwargs=True))
    try:
        oracle(model, found.sequences[0, :-1], conversation((30, 3)))
    finally:
        for handle in handles:
            handle.remove()
    again = speedy(architecture)
    inputs: dict[int, torch.Tensor] = {}
    decoder(again).layers[K + 1].register_forward_pre_hook(_keep_input(inputs, K + 1), with_kwargs=True)
    cache = kvspeed.KVCache(again.config, spec=kvspeed.SpeedSpec(K))
    cache.begin_turn(30)
    with torch.no_grad():
        again(found.sequences[:, :-1], use_cache=True, **{"cache" if NEW else "past_key_values": cache})
    rows = torch.tensor([0, 29, 30, 31, 32])
    close(inputs[K + 1], projections[K + 1][:, rows])


def _keep_input(store: dict[int, torch.Tensor], index: int) -> Any:
    def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        store[index] = args[0] if args else kwargs["hidden_states"]

    return hook
