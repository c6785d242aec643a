# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Samples: what they refuse, and their files."""

from __future__ import annotations

import json
import random

import pytest
from kvspeed import Sample, read_samples, write_samples
from kvspeed.samples import check_samples, distinct, document_text

GOOD = {"id": "a", "documents": ["One.", "Two."], "question": "Which?", "answers": ["two"]}


def made(**changes) -> Sample:
    return Sample(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"documents": []}, ValueError, "documents: there are none"),
        ({"documents": ["One.", " \n"]}, ValueError, r"documents\[1\]: is empty"),
        ({"documents": "One."}, TypeError, "documents: expected a list"),
        ({"documents": ["One.", None]}, TypeError, r"documents\[1\]: expected a string"),
        ({"answers": []}, ValueError, "answers: there are none"),
        ({"answers": [""]}, ValueError, r"answers\[0\]: is empty"),
        ({"question": "  "}, ValueError, "question: is empty"),
        ({"id": ""}, ValueError, "id: is empty"),
        ({"id": 3}, TypeError, "id: expected a string"),
        ({"gold": [2]}, ValueError, "gold: names document 2, there are 2"),
        ({"gold": [-1]}, ValueError, "gold: names document -1"),
        ({"gold": [True]}, TypeError, "gold: expected indices"),
        ({"gold": [1, 1]}, ValueError, "twice"),
        ({"task": None}, TypeError, "task"),
    ],
)
def test_a_bad_sample_is_refused(changes, error, words):
    with pytest.raises(error, match=words):
        made(**changes)


def test_lists_become_tuples_and_a_sample_is_hashable():
    sample = made(gold=[1])
    assert sample.documents == ("One.", "Two.") and sample.gold == (1,)
    assert hash(sample) == hash(made(gold=(1,)))


def test_target_and_prediction():
    plain = made()
    assert plain.target == "two" and plain.prediction(" two\n") == "two"
    steps = made(reasoning="It is the second.")
    assert steps.target == "It is the second. Answer: two"
    assert steps.prediction(steps.target) == "two"
    assert steps.prediction("Answer: one? No. Answer:  two ") == "two"
    assert steps.prediction("two") == ""  # the paper counts an answer without the mark as none


def test_documents_end_with_an_empty_line():
    assert document_text("\n A b. ") == "A b.\n\n"


def test_ids_are_unique_in_a_list():
    with pytest.raises(ValueError, match=r"samples\[1\]: has the id 'a' of samples\[0\]"):
        check_samples([made(), made(question="Why?")])
    with pytest.raises(ValueError, match="got none"):
        check_samples([])
    with pytest.raises(TypeError, match=r"samples\[0\]"):
        check_samples([GOOD])


def test_files_come_back_as_they_were(tmp_path):
    rng = random.Random()
    letters = 'aZ9 \t"\\\n\u2028\u2029\x85é漢🥊\ufeff'

    def text() -> str:
        return "x" + "".join(rng.choice(letters) for _ in range(rng.randint(1, 30)))

    samples = [
        Sample(
            id=f"{number}",
            documents=tuple(text() for _ in range(rng.randint(1, 4))),
            question=text(),
            answers=(text(),),
            gold=(0,),
            task="t",
            reasoning=rng.choice(["", text()]),
        )
        for number in range(20)
    ]
    path = tmp_path / "s.jsonl"
    write_samples(path, samples)
    assert read_samples(path) == samples
    assert [file.name for file in tmp_path.iterdir()] == ["s.jsonl"]


def test_short_forms_of_a_line(tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text(
        "\ufeff"
        + json.dumps({"documents": ["d"], "question": "q", "answer": "x"})
        + "\r\n\n  \n"
        + json.dumps({"documents": ["d"], "question": "q", "answers": ["x", "y"]}),
        encoding="utf-8",
    )
    one, two = read_samples(path)
    assert (one.id, one.answers, two.id) == ("short-1", ("x",), "short-4")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 3: is no JSON"),
        ("[]", "line 3: expected a JSON object"),
        ('{"documents": ["d"], "question": "q"}', "line 3: answers: is missing"),
        ('{"question": "q", "answer": "x"}', "line 3: documents: is missing"),
        ('{"documents": ["d"], "answer": "x"}', "line 3: question: is missing"),
        ('{"documents": [], "question": "q", "answer": "x"}', "line 3: documents: there are none"),
        ('{"documents": "d", "question": "q", "answer": "x"}', "line 3: documents: expected a list"),
        ('{"documents": ["d"], "question": "q", "answer": "x", "answers": ["y"]}', "line 3: both answer and answers"),
        ('{"docs": ["d"], "question": "q", "answer": "x"}', "line 3: unknown field 'docs'"),
        ('{"documents": ["d"], "question": "q", "answer": "x", "checks": ["shout"]}', "line 3: checks: there is no"),
        ('{"documents": ["d"], "question": "q", "answer": "x", "checks": ["words:5"]}', "checks: words:5 is not"),
        ('{"documents": ["d"], "question": "q", "answer": "x", "answer": "y"}', "line 3: 'answer' is given twice"),
        (json.dumps(GOOD), "line 3: the id 'a' is that of line 1 too"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=words) as error:
        read_samples(path)
    assert str(path) in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_samples(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="holds no samples"):
        read_samples(tmp_path / "empty.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"id": "\xff"}')
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_samples(tmp_path / "bytes.jsonl")


def test_a_refused_list_leaves_the_file_alone(tmp_path):
    path = tmp_path / "s.jsonl"
    write_samples(path, [made()])
    before = path.read_bytes()
    with pytest.raises(ValueError):
        write_samples(path, [made(), made()])
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_what_no_file_can_hold_is_refused(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({**GOOD, "question": "half \ud800 a pair"}) + "\n")
    with pytest.raises(ValueError, match="line 1: question: character 5 is half of a surrogate pair"):
        read_samples(path)
    path.write_text(json.dumps({**GOOD, "checks": ["\ud800"]}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: checks\[0\]: character 0 is half of a surrogate pair"):
        read_samples(path)
    path.write_text(json.dumps(GOOD) + "\n" + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="line 2: is nested too deeply"):
        read_samples(path)
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n{\xff}\n")
    with pytest.raises(ValueError, match="line 3: is not UTF-8"):
        read_samples(path)


def test_ids_of_several_files_are_told_apart():
    one, two = Sample("a", ("x",), "q", ("y",)), Sample("b", ("x",), "q", ("y",))
    again = distinct([one, two, one, one], others=[two])
    assert [sample.id for sample in again] == ["a", "b#2", "a#2", "a#3"]
    assert again[0] is one and again[2].question == "q"
