# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A3 against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from kvspeed.eval.methods.a3 import A3, _attention_received
from kvspeed.eval.methods.rows import Probe
from kvspeed.patch import patch_model
from methods_oracle import Case
from tiny_models import tiny_model


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("patched", [False, True])
def test_logits_and_choice_are_the_oracles(name, patched):
    model = tiny_model(name, layers=4, seed=torch.seed() % 1000)
    if patched:
        patch_model(model)
    case = Case(model, [17, 1, 30, 9], question=6)
    method = A3(25)
    prepared = method.prepare(case.context, case.documents)
    logits, cache = method.first_token(prepared, case.question)

    oracle, kv = case.oracle, case.kv()
    rows = prepared.done.__self__.layers[-1][0].tolist()
    documents, asked = case.document_rows(), case.asked()
    picked = [row for row in rows if row < case.length]
    assert rows[-len(asked) :] == asked and len(picked) == int(0.25 * len(documents) + 0.5)
    query, _, _ = oracle.project(0, oracle.embed(case.question))
    query, key = oracle.rotate(query, torch.tensor(asked)), oracle.rotate(kv[0][0][documents], torch.tensor(documents))
    key = key.repeat_interleave(oracle.heads // oracle.kv_heads, 1)
    scores = (torch.einsum("qhd,nhd->hqn", query, key) * oracle.size**-0.5).softmax(-1).sum((0, 1))
    worst = min(scores[row - documents[0]] for row in picked)
    best_left = max(scores[row - documents[0]] for row in documents if row not in picked)
    assert worst >= best_left - 1e-5
    found = oracle.run(kv, case.prompt, [rows] * 4)
    assert torch.allclose(logits.double(), found["logits"], atol=2e-4)
    assert cache.get_seq_length() == len(case.prompt)


def test_layer_0_of_the_cache_is_what_full_recompute_would_give():
    """What the method's saving rests on: without the rows that it does not run, layer 0 has the same KV."""
    case = Case(tiny_model("qwen3", layers=3), [11, 20])
    method = A3(20)
    prepared = method.prepare(case.context, case.documents)
    _, cache = method.first_token(prepared, case.question)
    _, key, value = case.oracle.project(0, case.oracle.embed(case.prompt))
    key = case.oracle.rotate(key, torch.arange(len(case.prompt)))
    for mine, exact in zip(cache.layer(0).view(len(case.prompt)), (key, value), strict=True):
        assert torch.allclose(mine[0].double(), exact.transpose(0, 1), atol=1e-4)


@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("window", [None, 4, 2])
def test_scores_are_those_of_the_definition(softcap, window):
    heads, kv_heads, asked, tokens = 4, 2, 3, 7
    query, key = torch.randn(1, heads, asked, 8), torch.randn(kv_heads, tokens, 8)
    wanted = torch.zeros(tokens, dtype=torch.float64)
    for head in range(heads):
        for place in range(asked):
            score = key[head * kv_heads // heads].double() @ query[0, head, place].double() * 0.3
            score = softcap * torch.tanh(score / softcap) if softcap else score
            seen = [m for m in range(tokens) if window is None or m > tokens + place - window]
            if seen:
                wanted[seen] += score[seen].softmax(0)
    found = _attention_received(Probe(query, key, key, 0.3, softcap, window), key)
    assert torch.allclose(found.double(), wanted, atol=1e-5)


def test_tokens_outside_the_window_of_layer_0_are_not_chosen():
    """The question does not see them there, so that no attention says anything of them."""
    case = Case(tiny_model("gemma2", layers=2), [30, 30, 30])
    window = case.context.shape.windows[0]
    method = A3(10)
    prepared = method.prepare(case.context, case.documents)
    method.first_token(prepared, case.question)
    rows = prepared.done.__self__.layers[-1][0].tolist()
    picked = [row for row in rows if row < case.length]
    assert len(picked) == int(0.1 * len(case.document_rows()) + 0.5) < window
    assert min(picked) > case.length - window


def test_all_tokens_is_full_recompute():
    case = Case(tiny_model("llama", layers=4), [12, 25])
    method = A3(100)
    logits, _ = method.first_token(method.prepare(case.context, case.documents), case.question)
    assert torch.allclose(logits, case.model(torch.tensor([case.prompt])).logits[0, -1], atol=1e-4)


def test_no_token_is_plain_concatenation():
    case = Case(tiny_model("llama", layers=4), [12, 25])
    method = A3(0)
    logits, _ = method.first_token(method.prepare(case.context, case.documents), case.question)
    found = case.oracle.run(case.kv(), case.prompt, [case.asked()] * 4)
    assert torch.allclose(logits.double(), found["logits"], atol=2e-4)


@pytest.mark.parametrize("documents", [0, 1])
def test_few_documents(documents):
    case = Case(tiny_model("llama", layers=2), [9][:documents])
    method = A3(50)
    logits, _ = method.first_token(method.prepare(case.context, case.documents), case.question)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("wrong", [-0.5, 100.5, False, None])
def test_a_wrong_percentage_is_refused(wrong):
    with pytest.raises(ValueError, match="percent"):
        A3(wrong)
