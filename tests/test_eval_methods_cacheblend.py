# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""CacheBlend against the float64 oracle: which tokens it chooses, and what comes of them."""

from __future__ import annotations

import pytest
import torch
from kvspeed.eval.methods.cacheblend import CacheBlend
from kvspeed.patch import patch_model
from methods_oracle import Case
from tiny_models import BOS, tiny_model


def chosen(prepared) -> list[int]:
    """Rows of the last layer of the last `first_token`."""
    return prepared.done.__self__.layers[-1][0].tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("deviation", ["kv", "k", "v"])
def test_logits_and_choice_are_the_oracles(name, patched, deviation):
    model = tiny_model(name, layers=4, seed=torch.seed() % 1000)
    if patched:
        patch_model(model)
    case = Case(model, [37, 1, 60, 29])  # more rows than are masked together
    method = CacheBlend(60, deviation=deviation)
    prepared = method.prepare(case.context, case.documents)
    logits, cache = method.first_token(prepared, case.question)

    kv, rows = case.kv(before=(BOS,)), chosen(prepared)
    documents, asked = case.document_rows(), case.asked()
    picked = [row for row in rows if row < case.length]
    assert rows[-len(asked) :] == asked and len(picked) == round(0.6 * len(documents))
    old = [part.clone() for part in kv[1]]
    everything = documents + asked
    found = case.oracle.run(kv, case.prompt, [everything, rows, rows, rows], written={1: everything})
    scores = 0
    for which, letter in enumerate("kv"):
        if letter in deviation:
            scores += (found["fresh"][1][which][: len(documents)] - old[which][documents]).square().sum((1, 2))
    assert rows == sorted(rows)
    worst = min(scores[row - documents[0]] for row in picked)
    best_left = max(scores[row - documents[0]] for row in documents if row not in picked)
    assert worst >= best_left - 1e-4 * best_left
    assert torch.allclose(logits.double(), found["logits"], atol=2e-4)

    following = case.context.forward([7], cache)  # the cache goes on
    longer = [tuple(torch.cat([part, part[:1] * float("nan")]) for part in layer) for layer in kv]
    after = case.oracle.run(longer, [*case.prompt, 7], [[len(case.prompt)]] * 4)
    assert torch.allclose(following.double(), after["logits"], atol=2e-4)


@pytest.mark.parametrize("percent", [0, 100])
def test_all_tokens_is_full_recompute_and_none_still_asks_the_whole_question(percent):
    case = Case(tiny_model("qwen3", layers=4), [12, 25])
    method = CacheBlend(percent)
    prepared = method.prepare(case.context, case.documents)
    logits, _ = method.first_token(prepared, case.question)
    if percent == 100:
        expected = case.model(torch.tensor([case.prompt])).logits[0, -1]
        assert torch.allclose(logits, expected, atol=1e-4)
    else:
        assert chosen(prepared) == case.asked()


@pytest.mark.parametrize("before", ["nothing", "preamble", "bos without one"])
def test_what_documents_are_computed_behind(before):
    case = Case(tiny_model("llama", layers=3), [12, 25])
    behind = case.preamble if before == "preamble" else ()
    case.tokenizer.bos_token = None  # Qwen's has none either
    method = CacheBlend(20, before=before.split()[0])
    prepared = method.prepare(case.context, case.documents)
    logits, _ = method.first_token(prepared, case.question)
    rows, everything = chosen(prepared), case.document_rows() + case.asked()
    kv = case.kv(before=behind)
    found = case.oracle.run(kv, case.prompt, [everything, rows, rows], written={1: everything})
    assert torch.allclose(logits.double(), found["logits"], atol=2e-4)


def test_a_model_of_one_layer_chooses_nothing():
    case = Case(tiny_model("llama", layers=1), [12, 5])
    method = CacheBlend(10)
    prepared = method.prepare(case.context, case.documents)
    logits, _ = method.first_token(prepared, case.question)
    assert torch.allclose(logits, case.model(torch.tensor([case.prompt])).logits[0, -1], atol=1e-4)
    assert method.work(prepared, len(case.question)) == method.expected_work(prepared, len(case.question))


@pytest.mark.parametrize("wrong", [-1, 101, True, "10"])
def test_a_wrong_percentage_is_refused(wrong):
    with pytest.raises(ValueError, match="percent"):
        CacheBlend(wrong)


def test_a_wrong_deviation_is_refused():
    with pytest.raises(ValueError, match="deviation"):
        CacheBlend(10, deviation="q")
    with pytest.raises(ValueError, match="before"):
        CacheBlend(10, before="sink")
