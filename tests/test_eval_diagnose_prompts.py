# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Prompts by kind of task: the built-in ones, files, and their tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_tools import save_tokenizer
from kvspeed.eval.diagnose_prompts import CATEGORIES, TextPrompt, builtin_prompts, read_prompts, token_prompts
from kvspeed.prompt import prompt_ids
from transformers import AutoTokenizer


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("length", [1, 40, 300, 3000])
def test_built_in_prompts(category: str, length: int) -> None:
    found = builtin_prompts([category], samples=3, length=length, seed=5)
    assert found == builtin_prompts([category], samples=3, length=length, seed=5)
    assert builtin_prompts([category], samples=1, length=length, seed=5) == found[:1]
    assert [one.id for one in found] == [f"{category}-{number}" for number in range(3)]
    assert len({one.prompt for one in found}) == 3
    assert {one.prompt for one in found}.isdisjoint(
        one.prompt for one in builtin_prompts([category], samples=3, length=length, seed=6)
    )
    for one in found:
        words = len(re.findall(r"\w+", one.prompt))
        assert words < 30 + 2.5 * length + 80 and (length != 300 or words > 80)


def test_a_question_can_be_answered_from_its_prompt() -> None:
    for one in builtin_prompts(["retrieval"], samples=20, length=100):
        facts, question = one.prompt.split("\n\n")
        name = next(name for name in re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", question))
        assert len(re.findall(rf"^{name} was born in \d+, lives in \w+", facts, re.M)) == 1
    for one in builtin_prompts(["copying"], samples=20, length=100):
        first, last = map(int, re.findall(r"Repeat lines (\d+) to (\d+)", one.prompt)[0])
        assert f"\n{last}. " in "\n" + one.prompt and last == first + 2 and first >= 1


def test_all_kinds_in_order() -> None:
    assert [one.category for one in builtin_prompts(samples=1)] == list(CATEGORIES)
    assert [one.category for one in builtin_prompts(["code", "copying"], samples=1)] == ["code", "copying"]
    for wrong, says in (
        (["codes"], "'codes' is not built in; choose from"),
        ([], "at least one"),
        (["code"] * 2, "once"),
    ):
        with pytest.raises(ValueError, match=says):
            builtin_prompts(wrong)
    for name in ("samples", "length"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            builtin_prompts(**{name: 0})


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    entries = [
        {"category": "qa", "prompt": "Who? \u2028 Ähm"},
        {"category": "law", "prompt": "What?", "answer": "That.", "id": "first", "more": 3},
    ]
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    path.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    assert read_prompts(path) == [
        TextPrompt("qa-1", "qa", "Who? \u2028 Ähm"),
        TextPrompt("first", "law", "What?", "That."),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ("{}", "line 1: category is None"),
        ('{"category": "a", "prompt": "b"}\n[1]', "line 2: is a JSON list"),
        ('{"category": "a", "prompt": "b"}\n{"category"', "line 2: is not JSON"),
        ('{"category": "a", "prompt": " "}', "line 1: prompt is ' '"),
        ('{"category": 3, "prompt": "b"}', "line 1: category is 3"),
        ('{"category": "a", "prompt": "b", "answer": ""}', "line 1: answer is ''"),
        ('{"category": "a", "prompt": "b", "id": 7}', "line 1: id is 7"),
        (
            '{"category": "a", "prompt": "b", "id": "x"}\n{"category": "a", "prompt": "b", "id": "x"}',
            "line 2: id 'x' was",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=says) as error:
        read_prompts(path)
    assert str(path) in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(tmp_path / "binary")


def test_tokens_are_those_of_the_users_turn(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    plain, answered = token_prompts(
        tokenizer, [TextPrompt("a", "qa", "Who is it?"), TextPrompt("b", "qa", "Who?", "Ada.")]
    )
    assert tokenizer.decode(plain.ids) == "<s>user\nWho is it?</s>\n<s>assistant\n" and plain.answer is None
    asked = prompt_ids(tokenizer, "Who is it?", separator="")
    assert plain.ids == asked.preamble + asked.question and (plain.id, plain.category) == ("a", "qa")
    assert answered.answer is not None and tokenizer.decode(answered.answer) == "Ada."
    assert len({one.digest() for one in (plain, answered)}) == 2
    tokenizer.chat_template = None
    assert tokenizer.decode(token_prompts(tokenizer, [TextPrompt("a", "qa", "Who?")])[0].ids) == "Who?"
