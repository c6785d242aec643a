# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Attention to the prompt, measured without weights, against the weights; and the probe inside real models."""

from __future__ import annotations

import itertools
import math
import random
import threading
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed.models import attention_modules
from kvspeed.speed.probe import PromptAttention, probing, prompt_attention, turning_angle
from kvspeed.state import state_of
from speed_tools import CACHE, LAYERS, answer, close, fresh, ids_of, plain, speedy
from torch.utils._python_dispatch import TorchDispatchMode


def by_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    query_start: int,
    prompt_end: int,
    anchor_tokens: int,
    scale: float,
    softcap: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> PromptAttention:
    """The same from the whole matrix of weights, one head and one token at a time, in float64."""
    heads, rows, length = query.shape[1], query.shape[2], key.shape[2]
    start = query_start + rows - length
    out = torch.full((4, heads, rows), math.nan, dtype=torch.float64)
    for h in range(heads):
        for s in range(rows):
            at = query_start + s
            x = key[0, h // (heads // key.shape[1])].double() @ query[0, h, s].double() * scale
            x = softcap * torch.tanh(x / softcap) if softcap else x
            place = [start + j for j in range(length)]
            seen = [p <= at and (window is None or p > at - window) for p in place]
            x = x.masked_fill(~torch.tensor(seen), -math.inf)
            x = torch.cat([x, sinks[h : h + 1].double()]) if sinks is not None else x
            weights = torch.softmax(x, 0)[:length].tolist()
            anchor = [
                w
                for w, p, v in zip(weights, place, seen, strict=True)
                if v and p < min(anchor_tokens, prompt_end) and p != at
            ]
            content = [
                w
                for w, p, v in zip(weights, place, seen, strict=True)
                if v and anchor_tokens <= p < prompt_end and p != at
            ]
            out[0, h, s], out[1, h, s] = sum(anchor) + sum(content), sum(content)
            for row, group in ((2, anchor + content), (3, content)):
                if group:
                    total = sum(group)
                    out[row, h, s] = -sum(w / total * math.log(w / total) for w in group if w > 0)
    return PromptAttention(*out)


def same(found: PromptAttention, wanted: PromptAttention, tolerance: float = 2e-5) -> None:
    for name in PromptAttention._fields:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=0, atol=tolerance, equal_nan=True)


SHAPES: dict[str, dict[str, Any]] = {
    "one-step": dict(rows=1, length=37, prompt=30),
    "the-boundary-token": dict(rows=1, length=30, prompt=30),
    "boundary-and-answer": dict(rows=6, length=35, prompt=30),
    "whole-prompt": dict(rows=12, length=12, prompt=9),
    "one-token": dict(rows=1, length=1, prompt=1),
    "one-prompt-token": dict(rows=3, length=3, prompt=1),
    "sliding-cache": dict(rows=4, length=20, prompt=30, missing=14, window=17),
    "window-beyond-the-prompt": dict(rows=2, length=40, prompt=12, window=9),
    "window-of-one": dict(rows=3, length=12, prompt=10, window=1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("anchors", [0, 1, 4, 50])
def test_against_the_weights(shape: str, anchors: int) -> None:
    """Chunks of every size, groups of heads, softcap, sinks, windows, strides."""
    values = {"missing": 0, "window": None, **SHAPES[shape]}
    rows, length = values["rows"], values["length"]
    for size, kv_heads, group in ((8, 2, 2), (16, 1, 3)):
        query = 2 * torch.randn(1, rows, kv_heads * group, size).transpose(1, 2)
        key = 2 * torch.randn(1, kv_heads, length + 3, size)[:, :, 3:]
        options: dict[str, Any] = dict(
            query_start=values["missing"] + length - rows,
            prompt_end=values["prompt"],
            anchor_tokens=anchors,
            scale=random.choice([0.3, 1.0, -0.5, 0.0]),
            softcap=random.choice([0.0, 3.0]),
            window=values["window"],
            sinks=random.choice([None, 2 * torch.randn(kv_heads * group)]),
        )
        wanted = by_weights(query, key, **options)
        for most in (1, rows * kv_heads * group * random.randrange(1, 12), 1 << 22):
            same(prompt_attention(query, key, **options, max_scores=most), wanted)


def test_very_sharp_and_very_low_attention() -> None:
    """Scores of hundreds: nothing overflows, and a prompt with a weight of 1e-80 still has its entropy."""
    query = torch.zeros(1, 1, 1, 8)
    query[..., 0] = 1.0
    key = torch.zeros(1, 1, 9, 8)
    key[0, 0, :, 0] = torch.tensor([0.0, 500.0, 500.0, 499.0, -800.0, 0.0, 700.0, 690.0, 0.0])
    options: dict[str, Any] = dict(query_start=8, prompt_end=6, anchor_tokens=1, scale=1.0)
    for most in (1, 2, 100):
        found = prompt_attention(query, key, **options, max_scores=most)
        p = torch.softmax(torch.tensor([500.0, 500.0, 499.0], dtype=torch.float64), 0)
        assert float(found.content_entropy) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)
        assert float(found.entropy) == pytest.approx(float(found.content_entropy), abs=1e-6)
        assert 0 < float(found.mass) < 1e-80 and float(found.mass) == float(found.content_mass)


def test_bad_shapes() -> None:
    for query in (torch.zeros(2, 1, 1, 8), torch.zeros(1, 1, 0, 8)):
        with pytest.raises(ValueError, match="query has shape"):
            prompt_attention(query, torch.zeros(1, 1, 4, 8), query_start=3, prompt_end=2)


def test_memory_does_not_grow_with_the_prompt() -> None:
    """No tensor that is made while a long prompt is measured is larger than a chunk."""
    query, key = torch.randn(1, 4, 8, 16).bfloat16(), torch.randn(1, 2, 20_000, 16).bfloat16()
    given, largest = {t.untyped_storage().data_ptr() for t in (query, key)}, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    options: dict[str, Any] = dict(query_start=19_992, prompt_end=19_990, softcap=5.0, window=19_000)
    with Watch():
        found = prompt_attention(query, key, **options, max_scores=1 << 14)
    assert (1 << 14) <= largest <= 4 * (1 << 14), largest
    same(found, prompt_attention(query, key, **options))


def test_angles() -> None:
    for angle in (0.0, 1e-7, 0.3, math.pi / 2, 3.0, math.pi):
        a = torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64)
        b = 0.1 * torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=torch.float64)
        assert float(turning_angle(a, b)) == pytest.approx(angle, abs=1e-12)
    assert turning_angle(torch.zeros(2, 3), torch.ones(2, 3)).isnan().all()


# ---- inside models -------------------------------------------------------------------------------------------------


def eager(architecture: str, **options: Any) -> Any:
    return fresh(architecture, attn_implementation="eager", **options)


@torch.no_grad()
def by_outputs(model: Any, ids: torch.Tensor, prompt: int, anchors: int) -> dict[str, torch.Tensor]:
    """`[L, rows]` from the weights and hidden states that transformers gives out, for all tokens from the last of the
    prompt on."""
    last = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    out = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    handle.remove()
    hidden = [h[0, prompt - 1 :].double() for h in (*out.hidden_states[:-1], last[0])]
    change = [b - a for a, b in itertools.pairwise(hidden)]
    found: dict[str, list[torch.Tensor]] = {name: [] for name in (*PromptAttention._fields, "curvature")}
    for layer, weights in enumerate(out.attentions):
        w = weights[0, :, prompt - 1 :].double()  # [H, rows, T]
        w = w.clone()
        w[:, 0, prompt - 1] = 0.0  # the boundary token does not count as the prompt it looks at
        w[..., prompt:] = 0.0
        content = w.clone()
        content[..., :anchors] = 0.0
        for name, part in (("mass", w), ("content_mass", content)):
            found[name].append(part.sum(-1).mean(0))
        for name, part in (("entropy", w), ("content_entropy", content)):
            p = part / part.sum(-1, keepdim=True)
            found[name].append(-torch.xlogy(p, p).sum(-1).mean(0))
        if layer:
            a, b = change[layer - 1], change[layer]
            cosine = (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)
            found["curvature"].append(torch.arccos(cosine))
        else:
            found["curvature"].append(torch.full((w.shape[1],), math.nan, dtype=torch.float64))
    return {name: torch.stack(rows) for name, rows in found.items()}


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in found:
        assert found[name].shape == wanted[name].shape, name
        torch.testing.assert_close(
            found[name], wanted[name], rtol=0, atol=2e-4, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


@torch.no_grad()
@pytest.mark.parametrize("anchors", [0, 1, 3])
def test_in_every_architecture(architecture: str, anchors: int) -> None:
    """A prompt in two chunks, its last token and the answer measured in forwards of several lengths."""
    model, ids, prompt = fresh(architecture), ids_of(46), 39  # longer than the window of 24
    with probing(model, anchors) as recorder:
        recorder.begin(prompt)
        cache, seen = None, 0
        for end, measured in ((20, False), (38, False), (39, True), (40, True), (44, True), (46, True)):
            part = ids[:, seen:end]
            if measured:
                with recorder.measuring(seen):
                    out = model(part, use_cache=True, **_cache(cache))
            else:
                out = model(part, use_cache=True, **_cache(cache))
            cache, seen = out, end
        found = recorder.values()
    check(found, by_outputs(eager(architecture), ids, prompt, anchors))
    assert found["mass"].shape == (LAYERS, 8)
    windows = architecture in ("gemma2", "gemma3_text")
    assert bool((found["mass"] > 0).all()) and (windows or bool((found["mass"] > 0.1).any()))


def _cache(out: Any) -> dict[str, Any]:

    return {} if out is None else {CACHE: getattr(out, CACHE)}


@torch.no_grad()
def test_a_window_that_has_left_the_prompt_behind() -> None:
    """In sliding layers nothing of the prompt is seen then: no weight on it, and no entropy."""
    model, ids = fresh("gemma2"), ids_of(60)
    with probing(model) as recorder:
        recorder.begin(10)
        cache = model(ids[:, :50], use_cache=True)
        with recorder.measuring(50):
            model(ids[:, 50:], use_cache=True, **_cache(cache))
        found = recorder.values()
    assert bool((found["mass"][0::2] == 0).all()) and bool(found["entropy"][0::2].isnan().all())
    assert bool((found["mass"][1::2] > 0).all()) and bool(found["entropy"][1::2].isfinite().all())


@pytest.mark.parametrize("before", ["plain", "patched", "speed"])
def test_the_model_is_as_it_was(before: str) -> None:
    """Inside, logits are those of the full model; afterwards the patch is what it was, also after an error."""
    model = fresh("llama") if before == "plain" else speedy("llama", None if before == "patched" else 4)
    ids, prompt = ids_of(20), ids_of(15)
    first, state = answer(model, prompt), state_of(model)
    configs = [module.config for module in attention_modules(model)]
    with torch.no_grad(), probing(model):
        inside = model(ids).logits
    with pytest.raises(RuntimeError, match="enough"), probing(model):
        raise RuntimeError("enough")
    close(inside, plain("llama")(ids).logits.detach())
    assert state_of(model) is state or (before == "plain" and state_of(model) is None)
    assert all(not layer._forward_hooks for layer in model.model.layers)
    after = [module.config for module in attention_modules(model)]
    assert all(config._attn_implementation != "kvspeed_probe" for config in after)
    assert [c._attn_implementation for c in after] == [c._attn_implementation for c in configs]
    close(answer(model, prompt).logits, first.logits, 0.0)


def test_another_thread_is_not_measured() -> None:
    model, ids = kvspeed.patch_model(fresh("llama")), ids_of(8)
    with torch.no_grad(), probing(model) as recorder:
        recorder.begin(4)
        with recorder.measuring(0):
            thread = threading.Thread(target=lambda: model(ids))
            thread.start()
            thread.join()
            model(ids)
        assert recorder.values()["mass"].shape == (LAYERS, 8)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not known|no decoder layers"), probing(torch.nn.Linear(2, 2)):
        pass
