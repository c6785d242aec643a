# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Scores of answers, and the questions that ship with the package."""

from __future__ import annotations

import pytest
from kvspeed import data
from kvspeed.eval.score import contains, exact_match, f1, normalise


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
