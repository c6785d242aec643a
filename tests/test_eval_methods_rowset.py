# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Attention of scattered rows against a dense float64 one with a mask by absolute index."""

from __future__ import annotations

import pytest
import torch
from kvspeed.eval.methods import rowset
from kvspeed.eval.methods.rowset import RowSet

CPU = torch.device("cpu")


def dense(rows, query, key, value, *, scale, softcap=0.0, window=None):
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, columns = torch.tensor(rows)[:, None], torch.arange(key.shape[2])
    seen = columns <= at
    if window is not None:
        seen &= columns > at - window
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


def states(rows: int, tokens: int, heads=(6, 2), size=16, dtype=torch.float32):
    query = torch.randn(1, heads[0], rows, size).to(dtype)
    key, value = (torch.randn(1, heads[1], tokens + 5, size).to(dtype)[:, :, :tokens] for _ in range(2))
    return query, key, value


def scattered(tokens: int, share: float) -> list[int]:
    return sorted(set(torch.randperm(tokens)[: max(int(share * tokens), 1)].tolist()) | {tokens - 1})


KINDS = {
    "scattered": lambda: scattered(150, 0.1),
    "dense": lambda: scattered(150, 0.9),
    "runs": lambda: [*range(0, 9), *range(30, 47), *range(140, 150)],
    "one": lambda: [149],
    "first": lambda: [0],
    "long run": lambda: range(10, 150),
    "long run, late": lambda: range(70, 150),
    "all": lambda: list(range(150)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap, window", [(0.0, None), (5.0, None), (0.0, 13), (5.0, 13)])
def test_attention_is_the_dense_one(kind, softcap, window):
    rows = KINDS[kind]()
    query, key, value = states(len(rows), 150)
    settings = dict(scale=0.3, softcap=softcap, window=window)
    out = RowSet(rows, CPU).attend(query, key, value, **settings)
    assert torch.allclose(out.double(), dense(rows, query, key, value, **settings), atol=2e-5)


@pytest.mark.parametrize("heads, size", [((4, 4), 16), ((8, 1), 64), ((3, 3), 20)])  # the last: no kernel takes it
@pytest.mark.parametrize("kind", ["runs", "dense", "long run"])
def test_other_shapes(heads, size, kind):
    rows = KINDS[kind]()
    query, key, value = states(len(rows), 150, heads, size)
    out = RowSet(rows, CPU).attend(query, key, value, scale=0.2)
    assert torch.allclose(out.double(), dense(rows, query, key, value, scale=0.2), atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind):
    rows = KINDS[kind]()
    query, key, value = states(len(rows), 150, dtype=torch.bfloat16)
    out = RowSet(rows, CPU).attend(query, key, value, scale=0.25)
    assert (out.double() - dense(rows, query, key, value, scale=0.25)).abs().max() < 0.03


@pytest.mark.parametrize("kind", ["scattered", "runs", "dense"])
def test_keys_after_the_last_row_are_never_read(kind):
    rows = KINDS[kind]()[:-12]
    query, key, value = states(len(rows), 150)
    expected = RowSet(rows, CPU).attend(query, key, value, scale=0.3)
    key[:, :, rows[-1] + 1 :], value[:, :, rows[-1] + 1 :] = float("nan"), float("nan")
    assert torch.equal(RowSet(rows, CPU).attend(query, key, value, scale=0.3), expected)


def test_a_tensor_of_rows_is_the_same_as_a_list(monkeypatch):
    monkeypatch.setattr(rowset, "_CPU_BLOCK", (4, 7))  # several blocks, the last one short
    rows = scattered(150, 0.4)
    query, key, value = states(len(rows), 150)
    out = RowSet(torch.tensor(rows), CPU).attend(query, key, value, scale=0.3)
    assert torch.allclose(out.double(), dense(rows, query, key, value, scale=0.3), atol=2e-5)


@pytest.mark.parametrize("kind", ["scattered", "dense", "one"])
@pytest.mark.parametrize("kept", [True, False])
def test_rows_that_only_the_device_knows(kind, kept, monkeypatch):
    """As on a GPU after a choice there: nothing asks for a number, and all keys are masked; masks kept or not."""
    monkeypatch.setattr(rowset, "_MASK_BYTES", 1 << 30 if kept else 0)
    monkeypatch.setattr(rowset, "_CPU_BLOCK", (16, 16))
    rows = KINDS[kind]()
    query, key, value = states(len(rows), 150)
    one = RowSet(torch.tensor(rows), CPU)
    one._host = None
    for _ in range(2):
        out = one.attend(query, key, value, scale=0.3)
        assert torch.allclose(out.double(), dense(rows, query, key, value, scale=0.3), atol=2e-5)
    assert bool(one._masks) == kept


def test_runs_pairs_and_writing():
    rows = [2, 3, 4, 9, 11, 12]
    one = RowSet(rows, CPU)
    assert one.runs == [(2, 3), (9, 1), (11, 2)] and len(one) == 6
    assert one.pairs(None) == sum(row + 1 for row in rows)
    assert one.pairs(4) == sum(min(row + 1, 4) for row in rows)
    assert RowSet(range(3, 8), CPU).runs == [(3, 5)]
    for given, at in ((rows, rows), (range(3, 8), list(range(3, 8)))):
        storage, new = torch.zeros(1, 2, 20, 4), torch.randn(1, 2, len(at), 4)
        RowSet(given, CPU).write(storage, new)
        assert torch.equal(storage[:, :, at], new)
        others = [row for row in range(20) if row not in at]
        assert not storage[:, :, others].any()
