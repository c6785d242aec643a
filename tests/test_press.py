# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The presses against slow definitions in float64, and what `build_packet` makes of their scores."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from kvspeed import patch_model
from kvspeed.fingerprint import model_fingerprint
from kvspeed.packet import PacketAdapter, build_packet, build_single
from kvspeed.packet.press import (
    PRESSES,
    CURPress,
    LayerKV,
    LeveragePress,
    Press,
    RandomPress,
    TOVAPress,
    as_press,
    press_from_name,
    press_name,
)
from kvspeed.packet.press.base import kept_tokens, survivors, unrotated
from kvspeed.packet.press.leverage import leverage
from packet_tools import random_text, tiny_tokenizer
from tiny_models import ARCHITECTURES, tiny_model


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(bos=True)


def layer_kv(heads=2, group=3, tokens=37, size=8, *, dtype=torch.float32, **changes):
    fields = dict(
        index=1,
        keys=torch.randn(heads, tokens, size).to(dtype),
        values=torch.randn(heads, tokens, size).to(dtype),
        query=torch.randn(heads * group, size).to(dtype),
        scale=size**-0.5,
        softcap=0.0,
        window=None,
        inv_freq=torch.rand(size // 2),
        interleaved=False,
        token_ids=tuple(range(tokens)),
        module=torch.nn.Identity(),
    )
    return LayerKV(**{**fields, **changes})


def slow_survivors(scores, kept, protected):
    chosen = []
    for head in scores.tolist():
        order = sorted(range(len(head)), key=lambda t: (-1 if protected[t] else 0, -head[t], t))
        chosen.append(sorted(order[:kept]))
    return torch.tensor(chosen, dtype=torch.int32)


@pytest.mark.parametrize("trial", range(20))
def test_survivors(trial):
    heads, tokens = int(torch.randint(1, 5, ())), int(torch.randint(1, 40, ()))
    scores = torch.randint(-3, 4, (heads, tokens)).float()  # many ties
    if trial % 3 == 0:
        scores[torch.rand(scores.shape) < 0.2] = float("inf")
        scores[torch.rand(scores.shape) < 0.2] = -float("inf")
    protected = torch.rand(tokens) < 0.3
    kept = int(torch.randint(max(1, int(protected.sum())), tokens + 1, ()))
    got = survivors(scores, kept, protected)
    assert got.dtype == torch.int32 and torch.equal(got, slow_survivors(scores, kept, protected))
    none = torch.zeros(tokens, dtype=torch.bool)
    assert torch.equal(survivors(scores, kept), slow_survivors(scores, kept, none))


def test_survivors_refuse():
    with pytest.raises(ValueError, match="NaN"):
        survivors(torch.tensor([[1.0, float("nan")]]), 1)
    with pytest.raises(ValueError, match="3 tokens are protected"):
        survivors(torch.rand(2, 5), 2, torch.tensor([True, True, True, False, False]))


@pytest.mark.parametrize(
    ("tokens", "ratio", "kept"), [(10, 0.0, 10), (10, 0.3, 7), (1, 0.9, 1), (10, 0.99, 1), (10, 0.25, 7), (3, 0.5, 1)]
)
def test_how_many_stay(tokens, ratio, kept):
    assert kept_tokens(tokens, ratio) == kept


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4, 0])
def test_unrotated_undoes_the_rotation(rotary, interleaved):
    before, inv_freq = torch.randn(3, 50, 8), torch.rand(rotary // 2)
    turned = before.double().clone()
    for position in range(50):
        for pair, frequency in enumerate(inv_freq.tolist()):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
            c, s = math.cos(position * frequency), math.sin(position * frequency)
            x, y = before[:, position, i].double(), before[:, position, j].double()
            turned[:, position, i], turned[:, position, j] = x * c - y * s, x * s + y * c
    torch.testing.assert_close(unrotated(turned.float(), inv_freq, interleaved), before, atol=2e-6, rtol=1e-5)


def test_tova():
    for softcap, window in ((0.0, None), (2.0, None), (0.0, 9), (2.0, 100)):
        layer = layer_kv(softcap=softcap, window=window)
        weights = []
        for head, query in enumerate(layer.query.double()):
            logits = layer.keys[head // 3].double() @ query * layer.scale
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            logits[: 37 - window if window and window < 37 else 0] = -float("inf")
            weights.append(torch.softmax(logits, 0))
        want = torch.stack(weights).mean(0)
        got = TOVAPress(0.5).scores(layer)
        assert got.shape == (2, 37) and torch.equal(got[0], got[1])
        torch.testing.assert_close(got[0, :-1].double(), want[:-1], atol=1e-6, rtol=1e-5)
        assert bool((got[:, -1] > got[:, :-1].max()).all())
        if window == 9:
            assert bool((got[0, :28] == 0).all()) and bool((got[0, 28:] > 0).all())


@pytest.mark.parametrize(("window", "sinks"), [(16, 4), (5, 0), (1, 2), (100, 40)])
def test_cur(window, sinks):
    layer = layer_kv()
    scores = torch.ones(2, 37, dtype=torch.float64)
    for head in range(2):
        for token in range(37):
            near = range(token // window * window, min(37, token // window * window + window))
            for side in (layer.keys, layer.values):
                norms = side[head].double().square().sum(-1)
                scores[head, token] *= norms[token] / norms[near.start : near.stop].sum()
    scores /= scores.sum(-1, keepdim=True)
    scores[:, :sinks] = 1
    got = CURPress(0.5, window=window, sinks=sinks).scores(layer)
    torch.testing.assert_close(got.double(), scores, atol=1e-6, rtol=1e-5)
    silent = CURPress(0.5).scores(layer_kv(keys=torch.zeros(2, 37, 8)))  # nothing to divide by
    assert bool(silent.isfinite().all())


@pytest.mark.parametrize(("tokens", "size", "width"), [(60, 8, 5), (6, 16, 48), (1, 8, 3), (40, 64, 48)])
def test_leverage(tokens, size, width):
    keys, sketch = torch.randn(2, tokens, size), torch.randn(2, size, width)
    rows = (keys.double() - keys.double().mean(1, keepdim=True)) @ sketch.double() / math.sqrt(width)
    gram = rows.transpose(1, 2) @ rows + 1e-2 * torch.eye(width, dtype=torch.float64)
    want = torch.einsum("hti,hij,htj->ht", rows, torch.linalg.inv(gram), rows).clamp_min(0)
    torch.testing.assert_close(leverage(keys, sketch).double(), want, atol=1e-6, rtol=1e-5)
    layer = layer_kv(tokens=tokens, size=size)
    scores = LeveragePress(0.5, sketch=width).scores(layer)
    assert scores.shape == (2, tokens) and bool(scores.isfinite().all())
    if tokens > 1:
        assert abs(float(scores.mean())) < 1e-2 and abs(float(scores.std()) - 1) < 1e-2


def test_draws_follow_from_seed_layer_and_text():
    layer = layer_kv()
    for press in (RandomPress(0.5), LeveragePress(0.5)):
        scores = press.scores(layer)
        torch.manual_seed(int(torch.randint(10**6, ())))
        assert torch.equal(press.scores(layer), scores)
        for other in (replace(layer, index=2), replace(layer, token_ids=(*layer.token_ids[:-1], 99))):
            assert not torch.equal(press.scores(other), scores)
        assert not torch.equal(replace(press, seed=1).scores(layer), scores)
    many = torch.stack([RandomPress(0.5, seed=seed).scores(layer) for seed in range(200)])
    kept = torch.stack([survivors(one, 18) for one in many]).long()
    share = torch.zeros(37).scatter_add_(0, kept.flatten(), torch.ones(kept.numel())) / 400
    assert bool(((share - 18 / 37).abs() < 0.15).all())  # six standard deviations


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packets_of_every_architecture(tokenizer, architecture):
    """Survivors are the whole packet's tokens, bit for bit, the adapter's among them; presses see the real queries."""
    model = tiny_model(architecture, layers=3)
    adapter = PacketAdapter.for_model(model, header=2, trailer=3)
    text = random_text(24, int(torch.randint(10**6, ())))
    whole = build_packet(model, tokenizer, text, adapter)
    before = model_fingerprint(model)
    for name in PRESSES:
        for protect in (True, False):
            press = press_from_name(f"{name}-60{'' if protect else '-whole'}")
            packet = build_packet(model, tokenizer, text, adapter, press=press)
            assert packet.press == press.describe() == json.loads(json.dumps(packet.press))
            assert packet.keys.shape == (3, 2, int(29 * (1 - 0.6)), whole.keys.shape[3]) and packet.length == 29
            rows = packet.positions.long()[..., None].expand_as(packet.keys)
            assert torch.equal(packet.keys, whole.keys.gather(2, rows))
            assert torch.equal(packet.values, whole.values.gather(2, rows))
            assert bool((packet.positions.diff(dim=-1) > 0).all())
            soft = {0, 1, 26, 27, 28}
            heads = packet.positions.flatten(0, 1).tolist()
            assert all(soft <= set(head) for head in heads) or not protect
    assert model_fingerprint(model) == before and not model.model.layers[0].self_attn._forward_pre_hooks


@dataclass(frozen=True)
class Looking(Press):
    """Notes what it is shown."""

    name: ClassVar[str] = "looking"
    needs_hidden: ClassVar[bool] = True
    seen: ClassVar[list] = []

    def scores(self, layer):
        self.seen.append(layer)
        return torch.arange(layer.tokens).expand(layer.keys.shape[0], -1)


@pytest.mark.parametrize("k", [None, 2])
def test_what_a_press_is_shown(tokenizer, k):
    model = patch_model(tiny_model("qwen3", layers=4), k)
    Looking.seen.clear()
    packet = build_packet(model, tokenizer, random_text(11, 3), press=Looking(0.5))
    whole = build_packet(model, tokenizer, random_text(11, 3))
    assert [layer.index for layer in Looking.seen] == list(range(k or 4))
    assert packet.positions[0, 0].tolist() == [6, 7, 8, 9, 10] and packet.k == k
    for layer in Looking.seen:
        assert torch.equal(layer.keys, whole.keys[layer.index]) and torch.equal(layer.values, whole.values[layer.index])
        attention = model.model.layers[layer.index].self_attn
        states = attention.q_norm(attention.q_proj(layer.hidden[0, -1]).view(4, 16))
        # the query of token 10, turned back by ten keys' worth of positions
        turned = unrotated(layer.query[:, None].expand(-1, 11, -1), layer.inv_freq, layer.interleaved)[:, 10]
        torch.testing.assert_close(turned, states, atol=1e-4, rtol=1e-4)
        before = attention.k_norm(attention.k_proj(layer.hidden[0]).view(11, 2, 16)).transpose(0, 1)
        torch.testing.assert_close(layer.unrotated_keys(), before, atol=1e-4, rtol=1e-4)
    if k:
        assert torch.equal(packet.anchor_keys, whole.anchor_keys)


def test_short_texts_keep_a_token_beside_their_adapter(tokenizer):
    model = tiny_model("llama", layers=2)
    adapter = PacketAdapter.for_model(model, header=8, trailer=8)
    for words in (1, 2, 5):
        packet = build_packet(model, tokenizer, random_text(words, words), adapter, press=CURPress(0.9))
        assert packet.keys.shape[2] == 17 and packet.length == 16 + words
        whole = build_packet(model, tokenizer, random_text(words, words), adapter, press=TOVAPress(0.9, False))
        assert whole.keys.shape[2] == max(1, int((16 + words) * (1 - 0.9)))
        alone = build_packet(model, tokenizer, random_text(words, words), press=RandomPress(0.9))
        assert alone.keys.shape[2] == 1


def test_half_precision(tokenizer):
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_model("llama", layers=2, dtype=dtype)
        for name in PRESSES:
            packet = build_packet(model, tokenizer, random_text(30, 1), press=press_from_name(f"{name}-50"))
            assert packet.keys.dtype == dtype and packet.keys.shape[2] == 15


def test_names():
    for name, press in (("cur-30", CURPress(0.3)), ("tova-12.5-whole", TOVAPress(0.125, protect_soft=False))):
        assert press_from_name(name) == press and press_name(press) == name
    for name in ("cur", "cur-", "cur-30%", "CUR-30", "cur--30", "cur-30-hole", "snapkv-30", "", None, 3):
        with pytest.raises(ValueError, match="names no press"):
            press_from_name(name)
    assert press_from_name("random-0") == RandomPress(0.0)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: CURPress(1.0), ValueError, "fraction of tokens to remove"),
        (lambda: CURPress(-0.1), ValueError, "fraction of tokens to remove"),
        (lambda: CURPress(float("nan")), ValueError, "fraction of tokens to remove"),
        (lambda: CURPress("0.3"), TypeError, "ratio: expected a number"),
        (lambda: CURPress(True), TypeError, "ratio: expected a number"),
        (lambda: CURPress(0.3, protect_soft=1), TypeError, "protect_soft"),
        (lambda: CURPress(0.3, sinks=-1), ValueError, "sinks"),
        (lambda: CURPress(0.3, window=0), ValueError, "window"),
        (lambda: LeveragePress(0.3, sketch=0), ValueError, "sketch"),
        (lambda: press_from_name("cur-100"), ValueError, "would remove everything"),
        (lambda: as_press("cur-30"), TypeError, "press_from_name"),
        (lambda: as_press(None), TypeError, "press: expected"),
    ],
)
def test_refusals(make, error, match):
    with pytest.raises(error, match=match):
        make()


@dataclass(frozen=True)
class Wrong(Press):
    name: ClassVar[str] = "wrong"
    kind: str = "shape"

    def scores(self, layer):
        if self.kind == "shape":
            return torch.rand(layer.tokens)
        return torch.full(layer.keys.shape[:2], float("nan"))


def test_wrong_presses_leave_the_model_as_it_was(tokenizer):
    model = tiny_model("llama", layers=2)
    for kind, match in (("shape", r"scores \[6\] for layer 0 instead of \[2, 6\]"), ("nan", "no numbers")):
        with pytest.raises(ValueError, match=match):
            build_packet(model, tokenizer, random_text(6, 1), press=Wrong(0.5, kind=kind))
    assert build_packet(model, tokenizer, random_text(6, 1)).length == 6
    assert "_kvspeed" not in model.model.__dict__


def test_the_single_cache_refuses(tokenizer):
    model = tiny_model("llama", layers=2)
    for texts in ((), "w200", None):
        with pytest.raises(TypeError, match="texts"):
            build_single(model, tokenizer, texts)
    with pytest.raises(ValueError, match=r"texts\[1\]"):
        build_single(model, tokenizer, ["w200", " "])
    with pytest.raises(TypeError, match="preamble"):
        build_single(model, tokenizer, ["w200"], preamble="w300")
