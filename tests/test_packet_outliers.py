# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Numbers far above the others of their head: what int8 makes of these is said, once."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from kvspeed.packet.outliers import drowned_heads, tell_drowned
from kvspeed.packet.quantise import quantise
from packet_tools import changed, random_packet
from store_tools import open_store, some_texts


def with_outliers(packet, places, name="keys", size=1000.0):
    """One number of `size` in each `(layer, head)`."""
    numbers = getattr(packet, name).clone()
    for layer, head in places:
        numbers[layer, head, random.randrange(numbers.shape[2]), random.randrange(numbers.shape[3])] = size
    return changed(packet, **{name: numbers})


def test_heads_are_counted_as_the_median_says():
    exact = random_packet(layers=5, heads=3, tokens=31)
    spread = torch.rand(5, 3, 1, 1) * 300
    exact = with_outliers(changed(exact, keys=exact.keys * 3), [(n, h) for n in range(5) for h in range(3)])
    exact = changed(exact, keys=exact.keys.clamp(-1000, 1000) * torch.where(exact.keys > 900, spread, 1.0))
    small = quantise(exact, torch.int8)
    half_a_step = small.key_scale / 2
    median = exact.keys.abs().flatten(2).sort(-1).values[..., exact.keys[0, 0].numel() // 2]
    expected = (median < half_a_step).sum(1).tolist()
    assert drowned_heads(exact.keys, small.keys) == {n: count for n, count in enumerate(expected) if count}


def test_nothing_is_said_of_what_is_not_lost():
    for packet in (
        random_packet(),
        random_packet(dtype=torch.bfloat16, k=2),
        with_outliers(random_packet(), [(0, 0)], size=30.0),
        changed(random_packet(), keys=torch.zeros(4, 2, 5, 16)),
        with_outliers(changed(random_packet(), keys=torch.zeros(4, 2, 5, 16)), [(1, 1)]),  # its zeros are exact
    ):
        assert tell_drowned(packet, quantise(packet, torch.int8)) is None


def test_layers_and_heads_are_named():
    packet = random_packet(layers=8, heads=2, tokens=20)
    keys = with_outliers(packet, [(1, 0), (1, 1), (3, 1)])
    told = tell_drowned(keys, quantise(keys, torch.int8))
    assert "in the keys of layer 1 (2 of 2 KV heads), layer 3 (1 of 2 KV heads), since" in told
    both = with_outliers(keys, [(0, 0)], name="values")
    told = tell_drowned(both, quantise(both, torch.int8))
    assert "layer 3 (1 of 2 KV heads) and the values of layer 0 (1 of 2 KV heads), since" in told
    many = with_outliers(packet, [(layer, 0) for layer in range(8)])
    assert "layer 3 (1 of 2 KV heads), 4 more layers, since" in tell_drowned(many, quantise(many, torch.int8))


def test_a_store_says_it_once(tmp_path, monkeypatch):
    from kvspeed.packet.store import builder

    real = builder.build_packet
    monkeypatch.setattr(builder, "build_packet", lambda *a, **b: with_outliers(real(*a, **b), [(2, 1)]))
    store = open_store(tmp_path, dtype="int8")
    with pytest.warns(
        RuntimeWarning, match=r"int8: .* in the keys of layer 2 \(1 of 2 KV heads\), .*fp8 or bf16"
    ) as said:
        store.add(some_texts(3))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.add(some_texts(1))
        for dtype in ("fp8", "bf16", None):
            open_store(tmp_path, dtype=dtype).add(some_texts(1))
