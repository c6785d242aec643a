# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Scores of answers, and the questions that ship with the package."""

from __future__ import annotations

import numpy as np
import pytest
from kvspeed import data
from kvspeed.eval.bootstrap import mean_interval, ratio_interval
from kvspeed.eval.score import contains, corpus_f1, exact_match, f1, normalise, string_match


def test_normalise_as_squad():
    assert normalise("  The  Bay of Fundy, in Canada. ") == "bay of fundy in canada"
    assert normalise("An apple; a pear and THE plum!") == "apple pear and plum"
    assert normalise("it's 1,000") == "its 1000"
    assert normalise("") == normalise("the") == ""


def test_exact_match_takes_any_spelling():
    assert exact_match("The Ancon.", ["Cristobal", "ancon"])
    assert not exact_match("the steamer Ancon", "Ancon")


def test_contains_compares_whole_words():
    assert contains("It was the steamer Ancon.", "Ancon")
    assert contains("on 15 August 1914, they say", ["August 15, 1914", "15 August 1914"])
    assert not contains("It opened in 1823.", "82")
    assert not contains("158.5762820000001", "82")
    assert not contains("1.2 million flowers", "2 million")
    assert not contains("August 1914, the 15th", "15 August 1914")
    assert not contains("", "Ancon") and not contains("Ancon", "the")


def test_f1():
    assert f1("Ancon", "Ancon") == 1.0
    assert f1("steamer Ancon", "Ancon") == pytest.approx(2 / 3)
    assert f1("nothing", "Ancon") == 0.0
    assert f1("the", "") == 1.0 and f1("", "Ancon") == 0.0
    assert f1("six dots", ["6 dots", "six"]) == pytest.approx(2 / 3)
    assert f1("a a b", "a b b") == pytest.approx(2 / 3)  # articles go: "b" against "b b"
    with pytest.raises(ValueError, match="answers"):
        f1("x", [])


def test_every_question_is_answered_by_its_document_and_no_other():
    documents = {document.name: document.text for document in data.documents()}
    assert 6 <= len(documents) <= 8 and 8 <= len(data.questions()) <= 10
    for question in data.questions():
        assert contains(documents[question.document], question.answers[0]), question
        others = [text for name, text in documents.items() if name != question.document]
        assert not any(contains(text, question.answers[0]) for text in others), question


def test_documents_are_clean_text():
    for document in data.documents():
        assert document.text == document.text.strip() and "\t" not in document.text and "\r" not in document.text
        assert 150 <= len(document.text.split()) <= 260


def test_string_match_is_a_substring_of_any_case():
    assert string_match("The number is 12345.", "12345") == 1.0
    assert string_match("NORTON, i think", ["x", "Norton"]) == 1.0
    assert string_match("nort on", "Norton") == 0.0


def test_corpus_f1_counts_words_over_all_questions():
    # common 1 + 1, said 2 + 4, expected 1 + 1
    assert corpus_f1(["red ball", "a very long blue."], ["red", "blue"]) == pytest.approx(2 * 2 / (6 + 2))
    assert corpus_f1(["", "x"], ["a", "b"]) == 0.0
    assert corpus_f1(["The A."], ["the a"]) == 1.0  # articles stay, the full stop goes
    assert corpus_f1(["a b..."], ["a b"]) == 1.0
    with pytest.raises(ValueError, match="one answer for each"):
        corpus_f1(["a"], ["a", "b"])


def test_intervals_cover_and_resample_groups_together():
    rng = np.random.default_rng()
    inside = 0
    for seed in range(200):
        values = rng.random(60) < 0.7
        low, high = mean_interval(values.tolist(), seed=seed, rounds=400)
        assert low <= values.mean() <= high
        inside += low <= 0.7 <= high
    assert 170 <= inside <= 200
    values = (rng.random(40) < 0.5).astype(float)
    values[:2] = 0.0, 1.0
    thrice = np.repeat(values, 3).tolist()
    alone, grouped = mean_interval(thrice), mean_interval(thrice, np.repeat(np.arange(40), 3).tolist())
    assert grouped[1] - grouped[0] > 1.4 * (alone[1] - alone[0])
    assert grouped == pytest.approx(mean_interval(values.tolist()))


def test_ratio_interval_pairs_the_questions():
    rng = np.random.default_rng()
    reference = rng.random(50)
    assert ratio_interval((0.5 * reference).tolist(), reference.tolist()) == pytest.approx((0.5, 0.5))
    low, high = ratio_interval([0.0, 1.0], [0.0, 0.0])
    assert low != low and high != high
    with pytest.raises(ValueError, match="reference"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="values: got none"):
        mean_interval([])
    with pytest.raises(ValueError, match="groups"):
        mean_interval([1.0], [1, 2])
    with pytest.raises(ValueError, match="level"):
        mean_interval([1.0], level=95)
    with pytest.raises(ValueError, match="rounds: got 0, give at least 1"):
        mean_interval([1.0], rounds=0)
