# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Operations by formula against torch's FlopCounterMode, while attention is computed row by row in matrix products."""

from __future__ import annotations

import pytest
import torch
from kvspeed import PacketAdapter
from kvspeed.eval.methods import get_method, rowset
from kvspeed.eval.methods.work import question_work, visible_pairs
from methods_oracle import Case
from tiny_models import tiny_model
from torch.utils.flop_counter import FlopCounterMode

NAMES = ("full", "none", "nocache", "packet", "sink", "cacheblend-20", "epic-4", "epic-bos-4", "a3-20", "samkv")


def products(query, key, value, *args, **kwargs):
    """Attention of which FlopCounterMode counts every pair that is visible, and no other."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    past = key.shape[2] - query.shape[2]
    rows = []
    for row in range(query.shape[2]):
        seen = slice(0, past + row + 1)
        weights = (query[:, :, row : row + 1] @ key[:, :, seen].transpose(2, 3) * query.shape[3] ** -0.5).softmax(-1)
        rows.append(weights @ value[:, :, seen])
    return torch.cat(rows, 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_is_the_flop_counter(name, monkeypatch):
    """Methods without recomputation ask the model, whose own sdpa is replaced alike."""
    monkeypatch.setattr(rowset, "_CPU_BLOCK", (1, 1))
    monkeypatch.setattr(rowset, "_SHORT_RUN", 10**9)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", products)
    model = tiny_model("qwen3", layers=3, seed=torch.seed() % 1000)
    case = Case(model, [60, 31, 44], adapter=PacketAdapter.for_model(model, 2, 2))
    method = get_method(name)
    prepared = method.prepare(case.context, case.documents)
    with FlopCounterMode(display=False) as counter:
        method.first_token(prepared, case.question)
    found = counter.get_total_flops() - method.flops(prepared, len(case.question))
    # angles are a [D/2, 1] x [1, rows] product, once a forward; nothing else may be left over
    most = 2 * (len(case.prompt) + 8) * case.context.shape.head_dim
    assert 0 <= found <= most


def test_pairs_agree_with_a_loop():
    for _ in range(50):
        begin, count, window = (int(torch.randint(0, most, ())) for most in (40, 30, 50))
        rows = range(begin, begin + count)
        assert visible_pairs(rows, None) == sum(row + 1 for row in rows)
        assert visible_pairs(rows, window + 1) == sum(min(row + 1, window + 1) for row in rows)
        picked = sorted(torch.randperm(100)[:count].tolist())
        assert visible_pairs(picked, None) == sum(row + 1 for row in picked)


def test_a_question_in_a_model_with_windows():
    model = tiny_model("gemma2", layers=4)
    from kvspeed.eval.flops import ModelShape, prefill_flops

    shape = ModelShape.of(model)
    assert question_work(shape, 50, 7).flops(shape) == prefill_flops(shape, 7, past=50)
