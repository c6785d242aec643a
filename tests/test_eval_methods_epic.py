# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""EPIC against the float64 oracle, with and without a BoS for each document."""

from __future__ import annotations

import pytest
import torch
from kvspeed.eval.methods.epic import Epic
from kvspeed.patch import patch_model
from methods_oracle import Case
from tiny_models import BOS, tiny_model


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("tokens, last", [(1, 0), (4, 0), (4, 3), (0, 0), (10**6, 0)])
def test_logits_are_the_oracles(name, tokens, last):
    model = tiny_model(name, layers=4, seed=torch.seed() % 1000)
    if torch.rand(()) < 0.5:
        patch_model(model)
    case = Case(model, [17, 1, 30, 5])
    method = Epic(tokens, last=last)
    logits, _ = method.first_token(method.prepare(case.context, case.documents), case.question)
    rows, begin = [], len(case.preamble)
    for ids in case.ids:
        rows += [begin + i for i in range(len(ids)) if i < tokens or i >= len(ids) - last]
        begin += len(ids)
    rows += case.asked()
    found = case.oracle.run(case.kv(), case.prompt, [rows] * 4)
    assert torch.allclose(logits.double(), found["logits"], atol=2e-4)
    if tokens > 30:
        assert torch.allclose(logits, model(torch.tensor([case.prompt])).logits[0, -1], atol=1e-4)


def test_with_bos_each_document_brings_one_that_stays():
    model = tiny_model("llama", layers=4)
    case = Case(model, [17, 1, 30])
    method = Epic(3, bos=True)
    prepared = method.prepare(case.context, case.documents)
    logits, cache = method.first_token(prepared, case.question)
    ids = [(BOS, *one) for one in case.ids]
    assert prepared.documents == tuple(ids) and prepared.length == case.length + 3
    prompt = [*case.preamble, *(token for one in ids for token in one), *case.question]
    rows, begin = [], len(case.preamble)
    for one in ids:
        rows += range(begin, begin + min(3, len(one)))
        begin += len(one)
    rows += range(begin, len(prompt))
    found = case.oracle.run(case.kv(ids=ids), prompt, [rows] * 4)
    assert torch.allclose(logits.double(), found["logits"], atol=2e-4)
    assert cache.get_seq_length() == len(prompt)


def test_a_tokenizer_without_bos_is_named():
    case = Case(tiny_model("llama", layers=2), [4])
    case.tokenizer.bos_token = None
    with pytest.raises(ValueError, match=r"epic-bos-2: the tokenizer has no BoS.*epic-2"):
        Epic(2, bos=True).prepare(case.context, case.documents)


@pytest.mark.parametrize("arguments", [(-1, {}), (0, {"bos": True}), (True, {}), (2, {"last": -1})])
def test_wrong_counts_are_refused(arguments):
    with pytest.raises(ValueError, match="expected an integer"):
        Epic(arguments[0], **arguments[1])
