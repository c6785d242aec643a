# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tasks that ask for more than to find an answer: what they promise, and how their answers are scored."""

from __future__ import annotations

import ast
import json
import random
import re
from itertools import pairwise

import pytest
from kvspeed import Sample, read_samples, write_samples
from kvspeed.check_forms import FORMS
from kvspeed.eval.checks import CHECKS, holds, satisfied
from kvspeed.eval.score import copied
from kvspeed.eval.tasks import SKILLS, TaskSpec, arithmetic, code, copying, instruction, long, split_specs
from kvspeed.samples import check_samples

SEED = random.randrange(10**6)


def right(sample: Sample, answer: str) -> bool:
    """The score that the task counts."""
    if sample.checks:
        return satisfied(answer, sample.checks)
    return copied(answer, sample.answers)


@pytest.mark.parametrize("name", SKILLS)
def test_samples_are_those_of_seed_split_and_number(name):
    made = check_samples(SKILLS[name](20, seed=SEED, split="dev"))
    assert SKILLS[name](7, seed=SEED, split="dev") == made[:7]
    assert all(sample.task == name and 0 <= sample.gold[0] < len(sample.documents) for sample in made)
    for other in (SKILLS[name](20, seed=SEED + 1, split="dev"), SKILLS[name](20, seed=SEED, split="train")):
        assert not {s.documents for s in other} & {s.documents for s in made}
    assert TaskSpec.parse(name).load(3, seed=SEED, split="dev") == made[:3]


@pytest.mark.parametrize("name", SKILLS)
def test_the_target_is_right_and_another_samples_is_not(name):
    made = SKILLS[name](60, seed=SEED, split="test")
    for sample, other in pairwise(made):
        assert right(sample, sample.target), (sample, SEED)
        if other.target != sample.target and (not sample.checks or other.checks[0] != sample.checks[0]):
            assert not right(sample, other.target), (sample, other, SEED)


@pytest.mark.parametrize("name", ["copying", "arithmetic", "instruction", "code"])
def test_questions_on_the_same_documents(name):
    made = check_samples(SKILLS[name](9, seed=SEED, documents=4, questions_per_context=4))
    assert [len({s.documents for s in made[i : i + 4]}) for i in (0, 4)] == [1, 1]
    assert made[0].documents != made[4].documents and len({s.question for s in made[:4]}) == 4
    with pytest.raises(ValueError, match="questions_per_context"):
        SKILLS[name](1, documents=1, questions_per_context=9)


def test_copied_strings_stand_in_the_gold_document_alone():
    for sample in copying(150, seed=SEED):
        assert [sample.answers[0] in text for text in sample.documents].count(True) >= 1
        assert sample.answers[0] in sample.documents[sample.gold[0]]
    for kind, form in (("uuid", r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), ("function", r"[a-z]+_[a-z]+_\w+")):
        assert all(re.fullmatch(form, s.answers[0]) for s in copying(20, seed=SEED, kinds=kind))
    for sample in copying(20, seed=SEED, kinds="argument"):
        ast.parse(f"def f{sample.answers[0]}: ...")
    assert len({s.answers[0][:1] for s in copying(30, seed=SEED)} & {"("}) == 1  # all kinds by default


def test_sums_are_right():
    for sample in arithmetic(200, seed=SEED):
        text = sample.documents[sample.gold[0]]
        a, b, price = (int(n) for n in re.findall(r"\d+", text)) if text[:2] != "At" else _priced(text)
        wanted = {"together": a + b, "more": abs(a - b), "coins": min(a, b) * price}
        kind = next(word for word in ("together", "coins", "more") if word in sample.question)
        assert sample.answers == (str(wanted[kind]),), (sample, SEED)


def _priced(text: str) -> tuple[int, int, int]:
    price, a, b = (int(n) for n in re.findall(r"\d+", text))
    return a, b, price


def test_no_pair_of_numbers_is_in_two_splits():
    def pairs(split: str) -> set[frozenset[str]]:
        texts = [s.documents[0] for s in arithmetic(300, seed=SEED, split=split)]
        return {
            frozenset(re.findall(r"\d+", t)[1:] if t.startswith("At") else re.findall(r"\d+", t)[:2]) for t in texts
        }

    assert not pairs("train") & pairs("test") and not pairs("dev") & pairs("test")


def test_lines_of_code_follow_from_the_documents():
    for sample in code(120, seed=SEED, questions_per_context=4):
        ast.parse(sample.answers[0])
        for text in sample.documents:
            ast.parse(text)
        words = re.findall(r"\w+", sample.answers[0].removeprefix("assert"))
        known = sample.documents[sample.gold[0]] + sample.question
        assert all(word in known or word == "self" for word in words), sample


def test_buckets_grow_with_the_tokens():
    words = [
        sum(len(text.split()) for text in long(3, seed=SEED, tokens=tokens)[0].documents) for tokens in (200, 800, 3200)
    ]
    assert 3 < words[1] / words[0] < 5 and 3.5 < words[2] / words[1] < 4.5
    with pytest.raises(ValueError, match="tokens, chunk_tokens: got 10"):
        long(1, tokens=10)


# ---- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "answer", "is_right"),
    [
        ("load_x_v2", "load_x_v2", True),
        (" `load_x_v2`.", "load_x_v2", True),
        ("load_x_v2\nand more", "load_x_v2", True),
        ("```python\nself.a  = a\n```", "self.a = a", True),
        ("Load_x_v2", "load_x_v2", False),
        ("loadxv2", "load_x_v2", False),
        ("load_x_v2()", "load_x_v2", False),
        ("", "load_x_v2", False),
        ("(a, b=1)", "(a, b=2)", False),
    ],
)
def test_a_copy_is_one_to_the_letter(said, answer, is_right):
    assert copied(said, answer) is is_right
    assert copied(said, ("x", answer)) is is_right


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ("contains:Iron Bay", "it is IRON bay", "Iron and Bay"),
        ("prefix:Well,", "Well, yes", "well, yes"),
        ("suffix:(end)", "yes (end)\n", "(end) yes"),
        ("upper", "A 12 B.", "12"),
        ("lower", "a 12", "A"),
        ("words:2-3", "one two three", "one"),
        ("items:2:|", "a | b", "a | "),
        ("items:2: | ", "a | b", "a | b | c"),
        ("json:town", '{"town": "X"}', '{"town": "X", "y": 1}'),
        ("json:town", ' {"town": null} ', "town: X"),
    ],
)
def test_checks(check, good, bad):
    assert holds(check, good) and not holds(check, bad)
    assert satisfied(good, [check]) and not satisfied(bad, [check, "words:0-99"])


def test_wrong_checks():
    with pytest.raises(ValueError, match="no check 'shout'; there are contains"):
        holds("shout", "x")
    assert set(FORMS) == set(CHECKS)
    for check in ("words:5", "words:²-3", "items:x", "items:2", "items:²:|"):
        with pytest.raises(ValueError, match="checks: "):
            holds(check, "x")
    with pytest.raises(ValueError, match="got none"):
        satisfied("x", ())
    with pytest.raises(TypeError, match=r"checks\[1\]: expected a string, got int"):
        Sample("a", ("b",), "c", ("d",), checks=("upper", 3))


def test_checks_survive_a_file(tmp_path):
    made = instruction(5, seed=SEED)
    write_samples(tmp_path / "s.jsonl", made)
    assert read_samples(tmp_path / "s.jsonl") == made
    assert json.loads((tmp_path / "s.jsonl").read_text().splitlines()[0])["checks"][0].startswith("contains:")


def test_a_task_may_ask_for_fewer():
    few, all_of = split_specs("long:tokens=200:samples=2,copying")
    assert len(few.load(9)) == 2 and len(all_of.load(9)) == 9
    assert (few.category, all_of.category, few.metric, all_of.metric) == ("long context", "copying", "em", "copied")
    assert TaskSpec.parse("niah").category == "documents" and TaskSpec.parse("niah").metric == "f1"
    with pytest.raises(ValueError, match="samples: got 0"):
        TaskSpec.parse("niah:samples=0")


def test_tasks_share_documents_as_far_as_they_can():
    for text, most in (("copying", 2), ("copying:documents=5", 4), ("niah", 1), ("arithmetic", 3), ("biography", 4)):
        made = TaskSpec.parse(text).load(8, seed=SEED, questions_per_context=4)
        runs = [sum(other.documents == sample.documents for other in made) for sample in made]
        assert max(runs) == most, text
    made = TaskSpec.parse("copying:questions_per_context=1").load(8, questions_per_context=4)
    assert len({sample.documents for sample in made}) == 8
    with pytest.raises(ValueError, match="niah:questions_per_context=2: questions_per_context: got 2"):
        TaskSpec.parse("niah:questions_per_context=2").load(1)
    with pytest.raises(ValueError, match="documents: got 0"):
        TaskSpec.parse("copying:documents=0").load(1, questions_per_context=3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: copying(1, kinds="uid"), "kinds: got 'uid', choose from uuid"),
        (lambda: copying(1, kinds=()), "kinds: got none"),
        (lambda: copying(1, split="x"), "split: got 'x'"),
        (lambda: copying(0), "count: got 0"),
        (lambda: arithmetic(1, largest=3), "largest: got 3"),
        (lambda: code(1, documents=99), "documents: got 99"),
        (lambda: instruction(1, facts=0), "facts: got 0"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
