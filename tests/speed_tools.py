# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The oracle that SPEED is held to, and small helpers for its tests.

The oracle knows nothing of kvspeed: it runs every token of one unpadded sequence through every layer of an *unpatched*
model, and gives the layers from k on an explicit mask. The mask is drawn token by token from what each token is (a
`Token`), in plain loops, and sliding windows are cut out of it by position.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import kvspeed
import pytest
import torch
import transformers
from kvspeed import ops
from tiny_models import tiny_model

NEW = transformers.__version__ >= "5.23"  # the cache argument is called `cache`
CACHE = "cache" if NEW else "past_key_values"
LAYERS, K = 6, 4
TOLERANCE = 1e-4  # float32, logits of size ~4: rounding stays below 2e-5, a wrong mask is off by 0.1 or more


class Token(NamedTuple):
    """What a token of a conversation is to the layers >= k."""

    answer: bool  # generated, and in the cache before the next turn began
    boundary: bool = False  # the last prompt token of its turn
    turn: int = 0


def conversation(*turns: tuple[int, int]) -> list[Token]:
    """Each turn's `(prompt tokens, answer tokens)` -> its tokens; the last answer token goes into the next prompt."""
    tokens = []
    for turn, (prompt, answer) in enumerate(turns):
        tokens += [Token(False, i == prompt - 1, turn) for i in range(prompt)]
        tokens += [Token(True, False, turn)] * answer
    return tokens


def rule(
    tokens: list[Token],
    *,
    anchor_tokens: int = 1,
    boundary: str = "transient",
    upper_attention: str = "causal",
    turns: str = "keep",
) -> torch.Tensor:
    """bool `[T, T]`: who sees whom in layers >= k, from the words of the design, one pair of tokens at a time."""
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i, query in enumerate(tokens):
        for j, key in enumerate(tokens[: i + 1]):
            same_turn = turns == "keep" or key.turn == query.turn
            if i == j or j < anchor_tokens:
                seen[i, j] = True
            elif upper_attention == "self" or not same_turn:
                seen[i, j] = False
            elif key.answer:
                seen[i, j] = True
            elif key.boundary and boundary == "keep":
                seen[i, j] = query.answer or query.boundary
    return seen


def decoder(model: torch.nn.Module) -> Any:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.model


def windows(model: torch.nn.Module) -> list[int | None]:
    """The sliding window of each layer, from the configuration."""
    config = decoder(model).config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


@contextlib.contextmanager
def masked(
    model: torch.nn.Module,
    mask: torch.Tensor,
    k: int = K,
    *,
    deep: list[int] | None = None,
    columns: torch.Tensor | None = None,
) -> Iterator[None]:
    """The layers >= k (or those named by `deep`) of an unpatched `model` use `mask`, bool `[T, T]` or `[B, T, T]`.

    Windows are cut out of it by position. Tokens that are not among `columns`, bool `[T]` or `[B, T]`, leave those
    layers as they came.
    """
    base = decoder(model)
    assert "_kvspeed" not in base.__dict__, "the oracle needs an unpatched model"
    mask = mask if mask.ndim == 3 else mask[None]
    place = torch.arange(mask.shape[-1])
    ran = []

    def hook(layer: torch.nn.Module, args: Any, kwargs: Any, index: int = 0, window: int | None = None) -> Any:
        ran.append(index)
        own = mask if window is None else mask & (place[:, None] - place[None, :] < window)
        own = own[:, None]
        if base.config._attn_implementation == "eager":
            dtype = (args[0] if args else kwargs["hidden_states"]).dtype
            own = torch.zeros(own.shape, dtype=dtype).masked_fill(~own, torch.finfo(dtype).min)
        return args, {**kwargs, "attention_mask": own}

    def put(layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = torch.where(columns[..., None], hidden, args[0] if args else kwargs["hidden_states"])
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handles = []
    for index, window in enumerate(windows(model)):
        if index not in deep if deep is not None else index < k:
            continue
        call = functools.partial(hook, index=index, window=window)
        handles.append(base.layers[index].register_forward_pre_hook(call, with_kwargs=True))
        if columns is not None:
            handles.append(base.layers[index].register_forward_hook(put, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert len(ran) >= (len(handles) if columns is None else len(handles) // 2), (
        "the oracle's mask reached too few layers"
    )


@torch.no_grad()
def oracle(model: torch.nn.Module, ids: torch.Tensor, tokens: list[Token], k: int = K, **options: Any) -> torch.Tensor:
    """Logits `[T, V]` (float32) of the sequence `ids` `[T]` under SPEED."""
    assert ids.ndim == 1 and len(tokens) == ids.shape[0]
    with masked(model, rule(tokens, **options), k):
        return model(ids[None], use_cache=False).logits[0].float()


@functools.cache
def plain(architecture: str, **options: Any) -> torch.nn.Module:
    """The unpatched model, shared by all tests: for reading only."""
    return tiny_model(architecture, layers=LAYERS, **options)


def fresh(architecture: str, **options: Any) -> torch.nn.Module:
    """A model of the test's own, with the weights of `plain`."""
    model = tiny_model(architecture, layers=LAYERS, **options)
    return model


def speedy(architecture: str, k: int | None = K, *, model: dict[str, Any] | None = None, **options: Any) -> Any:
    """A model of the test's own, patched."""
    return kvspeed.patch_model(fresh(architecture, **(model or {})), k, **options)


class Answer(NamedTuple):
    sequences: torch.Tensor  # [B, P + n]
    logits: torch.Tensor  # float32 [B, n, V]
    cache: Any
    output: Any


def answer(model: torch.nn.Module, *args: Any, n: int = 5, **kwargs: Any) -> Answer:
    """`generate`, greedy unless told otherwise, with the logits that chose the tokens.

    The padding token is none that can be generated: transformers would guess a mask from it in the next turn.
    """
    settings = dict(
        max_new_tokens=n, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=600
    )
    output = model.generate(*args, **{**settings, **kwargs})
    logits = torch.stack(output.logits, 1).float() if output.logits is not None else None
    return Answer(output.sequences, logits, cache_of(output), output)


def cache_of(output: Any) -> Any:
    return getattr(output, CACHE, None)


def left_padded(rows: list[torch.Tensor], pad: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[T_i]` -> ids and attention mask `[B, T]`. The padding is an ordinary token: looking at it shows."""
    width = max(row.shape[0] for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[0] :] = row
        mask[i, width - row.shape[0] :] = 1
    return ids, mask


def ids_of(length: int, seed: int = 0, batch: int | None = None) -> torch.Tensor:
    """Random tokens `[1, length]` (or `[batch, length]`), other ones in every run of the tests."""
    return torch.randint(3, 512, (batch or 1, length))


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal within `tolerance` of the largest wanted number (of 1, where all are smaller)."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} is not {tuple(wanted.shape)}"
    assert bool(torch.isfinite(found).all()), "logits are not finite"
    if not found.numel():
        return
    error = (found.float() - wanted.float()).abs().max().item()
    allowed = tolerance * max(1.0, wanted.float().abs().max().item())  # rounding grows with the numbers
    assert error <= allowed, f"differs by {error:.3g} (allowed {allowed:.3g})"


@contextlib.contextmanager
def rows_above(model: torch.nn.Module, k: int = K) -> Iterator[list[tuple[int, int]]]:
    """Records `(layer, rows)` of every MLP call in the layers >= k: the rows that really ran there."""
    counts: list[tuple[int, int]] = []
    handles = [
        layer.mlp.register_forward_pre_hook(
            lambda _, args, index=index: counts.append((index, args[0].shape[:-1].numel()))
        )
        for index, layer in list(enumerate(decoder(model).layers))[k:]
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare cache memory holds NaN, so that reading a slot nobody wrote shows in the logits."""

    def empty(shape: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(ops, "empty_huge", empty)
