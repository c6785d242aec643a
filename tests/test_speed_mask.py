# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`speed_mask`: the written definition, against the paper's table and against plain loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kvspeed import SpeedSpec, speed_mask
from speed_tools import Token, conversation, rule


def drawn(text: str) -> torch.Tensor:
    return torch.tensor([[c == "x" for c in line.split()] for line in text.strip().splitlines()])


def test_the_papers_table() -> None:
    """BoS X X X | a a a: an answer token sees BoS, earlier answers and itself."""
    wanted = drawn("""
        x . . . . . .
        x x . . . . .
        x . x . . . .
        x . . x . . .
        x . . . x . .
        x . . . x x .
        x . . . x x x
    """)
    assert torch.equal(speed_mask(4, 7), wanted)


def test_boundary_keep() -> None:
    """Answer tokens see the last prompt token; prompt tokens do not, itself aside."""
    wanted = drawn("""
        x . . . . .
        x x . . . .
        x . x . . .
        x . . x . .
        x . . x x .
        x . . x x x
    """)
    assert torch.equal(speed_mask(4, 6, boundary="keep"), wanted)


def test_self_only() -> None:
    wanted = drawn("""
        x . . . .
        x x . . .
        x x x . .
        x x . x .
        x x . . x
    """)
    assert torch.equal(speed_mask(3, 5, anchor_tokens=2, upper_attention="self"), wanted)


def test_no_anchor() -> None:
    wanted = drawn("""
        x . . . .
        . x . . .
        . . x . .
        . . . x .
        . . . x x
    """)
    assert torch.equal(speed_mask(3, 5, anchor_tokens=0), wanted)


@pytest.mark.parametrize("boundary", ["transient", "keep"])
@pytest.mark.parametrize("upper_attention", ["causal", "self"])
def test_every_size_against_loops(boundary: str, upper_attention: str) -> None:
    """Prompts, answers and anchors of 0 to a few tokens, in every combination."""
    for prompt, answer, anchors in itertools.product(range(5), range(4), range(7)):
        options: dict[str, Any] = dict(anchor_tokens=anchors, boundary=boundary, upper_attention=upper_attention)
        found = speed_mask(prompt, prompt + answer, **options)
        assert found.dtype == torch.bool and found.shape == (prompt + answer, prompt + answer)
        wanted = rule(conversation((prompt, answer)), **options)
        assert torch.equal(found, wanted), (prompt, answer, options)
        assert not bool(found.triu(1).any()), "a token sees a later one"
        assert bool(found.diagonal().all()), "a token does not see itself"


def test_a_boundary_token_that_is_an_anchor_is_an_anchor() -> None:
    """With two prompt tokens and two anchors, transient and keep are the same thing."""
    assert torch.equal(speed_mask(2, 5, anchor_tokens=2), speed_mask(2, 5, anchor_tokens=2, boundary="keep"))
    assert bool(speed_mask(2, 5, anchor_tokens=2)[:, 1].any())


def test_anchors_beyond_the_prompt_make_it_causal() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for upper_attention in ("causal", "self"):
        assert torch.equal(speed_mask(3, 6, anchor_tokens=6, upper_attention=upper_attention), causal)
        assert torch.equal(speed_mask(3, 6, anchor_tokens=600, upper_attention=upper_attention), causal)


def test_all_answer_is_causal_and_nothing_is_nothing() -> None:
    assert torch.equal(speed_mask(0, 4, anchor_tokens=0), torch.ones(4, 4, dtype=torch.bool).tril())
    assert torch.equal(speed_mask(0, 4, boundary="keep"), torch.ones(4, 4, dtype=torch.bool).tril())
    assert speed_mask(0, 0).shape == (0, 0)


def test_it_does_not_depend_on_what_follows() -> None:
    """A longer answer adds rows and columns and changes none."""
    for boundary in ("transient", "keep"):
        long = speed_mask(5, 11, anchor_tokens=2, boundary=boundary)
        assert torch.equal(speed_mask(5, 8, anchor_tokens=2, boundary=boundary), long[:8, :8])


def test_the_oracles_rule_over_turns() -> None:
    """The oracle itself: the second turn of a conversation, drawn by hand (p q | a || r s | b)."""
    tokens = conversation((2, 1), (2, 1))
    assert tokens[1] == Token(False, True, 0) and tokens[4] == Token(False, True, 1)
    assert rule(tokens, boundary="keep")[4].tolist() == [True, True, True, False, True, False]
    assert rule(tokens, boundary="keep")[5].tolist() == [True, True, True, False, True, True]
    assert rule(tokens)[5].tolist() == [True, False, True, False, False, True]
    assert rule(tokens, turns="reset")[5].tolist() == [True, False, False, False, False, True]
    assert rule(tokens, boundary="keep", turns="reset")[5].tolist() == [True, False, False, False, True, True]


@pytest.mark.parametrize(
    ("args", "options", "error", "says"),
    [
        ((-1, 3), {}, ValueError, "prompt_length"),
        ((3, 2), {}, ValueError, "total_length is 2"),
        ((1.0, 3), {}, TypeError, "prompt_length"),
        ((True, 3), {}, TypeError, "prompt_length"),
        ((1, "3"), {}, TypeError, "total_length"),
        ((1, None), {}, TypeError, "total_length"),
        ((1, 3), {"anchor_tokens": -1}, ValueError, "anchor_tokens"),
        ((1, 3), {"anchor_tokens": 1.5}, TypeError, "anchor_tokens"),
        ((1, 3), {"anchor_tokens": False}, TypeError, "anchor_tokens"),
        ((1, 3), {"anchor_tokens": None}, TypeError, "anchor_tokens"),
        ((1, 3), {"boundary": "drop"}, ValueError, "boundary is 'drop'"),
        ((1, 3), {"boundary": None}, ValueError, "boundary"),
        ((1, 3), {"boundary": True}, ValueError, "boundary"),
        ((1, 3), {"boundary": ["keep"]}, ValueError, "boundary"),
        ((1, 3), {"upper_attention": "Causal"}, ValueError, "upper_attention"),
    ],
)
def test_bad_input(args: Any, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        speed_mask(*args, **options)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"k": 0}, ValueError, "k is 0"),
        ({"k": -3}, ValueError, "k is -3"),
        ({"k": 2.0}, TypeError, "k is 2.0"),
        ({"k": True}, TypeError, "k is True"),
        ({"k": None}, TypeError, "k is None"),
        ({"k": 2, "turns": "forget"}, ValueError, "turns is 'forget'"),
    ],
)
def test_bad_spec(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        SpeedSpec(**options)


def test_a_spec_is_a_value() -> None:
    assert SpeedSpec(3, 2) == SpeedSpec(3, anchor_tokens=2) != SpeedSpec(3)
    assert hash(SpeedSpec(3)) == hash(SpeedSpec(3))
    with pytest.raises(AttributeError):
        SpeedSpec(3).k = 4  # type: ignore[misc]
