# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The rule of thumb for k, on curves drawn by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvspeed.speed.depth import Recommendation, recommend_depth


def curves(layers: int, peak: int, *, width: int = 3, **others: Any) -> dict[str, Any]:
    """A curvature with one bump around `peak`; content that is read everywhere, most sharply at layer 2."""
    curvature = [None] + [1.0 + max(0.0, 1 - abs(layer - peak) / width) for layer in range(1, layers)]
    entropy = [1.0 + (layer != min(2, layers - 1)) for layer in range(layers)]
    mass = [0.5 - 0.001 * layer for layer in range(layers)]
    return {"curvature": curvature, "content_entropy": entropy, "content_mass": mass, **others}


def test_the_papers_own_case() -> None:
    """32 layers with peaks at 17 to 19, counted from 1: k = 24."""
    found = recommend_depth({name: curves(32, peak - 1) for name, peak in (("qa", 17), ("reasoning", 19))}, 32)
    assert found.k == 24 and found.layers == 32
    assert [one.k for one in found.by_category.values()] == [22, 24]
    assert [one.curvature_peak for one in found.by_category.values()] == [16, 18]
    assert "rule of thumb" in found.reason and "layer 18 of 32" in found.reason and "5 layers" in found.reason
    assert "against it" not in found.reason and "scores on held-out tasks decide" in found.reason


@pytest.mark.parametrize("layers", [12, 24, 30, 36, 80])
def test_a_deeper_peak_never_gives_a_smaller_k(layers: int) -> None:
    last = 0
    for peak in range(1, layers):
        k = recommend_depth({"qa": curves(layers, peak)}, layers).k
        assert (layers + 1) // 2 <= k <= layers and k >= last
        last = k
    assert last == layers


def test_a_flat_peak_ends_where_it_ends() -> None:
    bump = curves(30, 15)
    bump["curvature"][10:21] = [2.0] * 11
    assert recommend_depth({"qa": bump}, 30).by_category["qa"].curvature_peak == 19
    bump["curvature"][24:26] = [1.97, 1.97]  # a second one, almost as high; smoothed it is lower
    assert recommend_depth({"qa": bump}, 30).by_category["qa"].curvature_peak == 19
    assert recommend_depth({"qa": bump}, 30, flat=0.5).k == 30


def test_the_last_layers_and_single_spikes_do_not_count() -> None:
    plain = recommend_depth({"qa": curves(30, 12)}, 30)
    spiky = curves(30, 12)
    spiky["curvature"][27:] = [9.0] * 3  # they turn to the vocabulary
    assert recommend_depth({"qa": spiky}, 30) == plain
    assert plain.k == 12 + 1 + 5
    assert recommend_depth({"qa": curves(30, 12)}, 30, slack=0.0, least=0.0).k == 13
    assert recommend_depth({"qa": curves(30, 2)}, 30).k == 15  # half of the layers at least
    assert "k = 15 is the least" in recommend_depth({"qa": curves(30, 2)}, 30).reason


def test_what_speaks_against_a_cut_is_said() -> None:
    late = curves(30, 12)
    late["content_entropy"][25], late["content_mass"][28] = 0.1, 0.9
    found = recommend_depth({"qa": curves(30, 12), "copying": late}, 30)
    one = found.by_category["copying"]
    assert (one.entropy_minimum, one.mass_peak) == (25, 28)
    assert "most sharply in copying" in found.reason and "look at the content most in copying" in found.reason
    assert one.content_above == pytest.approx(sum(late["content_mass"][18:]) / 12)
    assert one.content_below == pytest.approx(sum(late["content_mass"][:18]) / 18)


def test_prompts_without_content_and_few_layers() -> None:
    """No content: no entropy. One layer has no curvature, and so no cut."""
    empty = curves(30, 12, content_entropy=[None] * 30, content_mass=[None] * 30)
    assert recommend_depth({"qa": empty}, 30).by_category["qa"].entropy_minimum is None
    for layers in (1, 2):
        found = recommend_depth({"qa": curves(layers, 0)}, layers)
        assert found.k == layers and "too few" in found.reason
    for layers in range(3, 8):
        for _ in range(20):
            random_curves = {
                name: [random.random() if name != "curvature" or layer else None for layer in range(layers)]
                for name in ("curvature", "content_mass", "content_entropy")
            }
            assert isinstance(found := recommend_depth({"qa": random_curves}, layers), Recommendation)
            assert 1 <= found.k <= layers


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ({}, {}, "curves: got none"),
        ({"qa": curves(9, 4)}, {}, "of 'qa' has 9 numbers for 10 layers"),
        ({"qa": curves(10, 4)}, {"slack": -0.1}, "slack is -0.1"),
        ({"qa": curves(10, 4)}, {"least": 1.5}, "least is 1.5"),
        ({"qa": curves(10, 4)}, {"flat": float("nan")}, "flat is nan"),
    ],
)
def test_bad_input(given: Any, options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        recommend_depth(given, 10, **options)
