# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: which of them are answers, files, data sets, and what is refused."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from kvspeed.speed.tuning.rows import Conversation, conversations_of, dataset_messages, read_messages, rows_of
from packet_tools import CHAT_TEMPLATE, tiny_tokenizer
from tiny_models import BOS, EOS

TURNS = (("system", "w100"), ("user", "w101 w102"), ("assistant", "w103"), ("user", "w104"), ("assistant", "w105 w106"))


def tokenizer_of(template: str | None = CHAT_TEMPLATE, **options):
    return tiny_tokenizer(template=template, **options)


def rows(tokenizer, *turns, **options):
    given = [Conversation(f"c{index}", one) for index, one in enumerate(turns)]
    return rows_of(tokenizer, given, [EOS], **{"max_tokens": 500, **options})


def test_answers_are_the_assistants_turns_up_to_their_end():
    tokenizer = tokenizer_of()
    (row,) = rows(tokenizer, TURNS)
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in TURNS], tokenize=False, add_generation_prompt=False
    )
    assert list(row.ids) == tokenizer(whole, add_special_tokens=False)["input_ids"]
    answers = [token for token, is_answer in zip(row.ids, row.answer, strict=True) if is_answer]
    assert answers == [*tokenizer("w103")["input_ids"], EOS, *tokenizer("w105 w106")["input_ids"], EOS]
    assert row.answers == 5 and row.ids[0] == BOS


def test_what_follows_the_last_answer_is_left_out():
    tokenizer = tokenizer_of()
    (row,) = rows(tokenizer, (*TURNS, ("user", "w107")))
    assert row == rows(tokenizer, TURNS)[0]
    # a template that writes a line's end after the end token: prompt of the next turn, nothing of the last
    spaced = CHAT_TEMPLATE.replace("'</s>' }}", "'</s> w300 ' }}")
    (row,) = rows(tokenizer_of(spaced), TURNS)
    after = tokenizer("w300")["input_ids"][0]
    assert row.ids[-1] == EOS and row.ids.count(after) == 4
    assert not any(is_answer for token, is_answer in zip(row.ids, row.answer, strict=True) if token == after)


def test_a_tokenizer_that_adds_bos_itself():
    template = CHAT_TEMPLATE.replace("{{ '<s>' }}", "")
    (row,) = rows(tokenizer_of(template, bos=True), TURNS)
    assert row.ids[0] == BOS and row.ids.count(BOS) == 1 and not row.answer[0]
    (row,) = rows(tokenizer_of(bos=True), TURNS)  # the template has it already
    assert row.ids.count(BOS) == 1


def test_an_answer_without_an_end_token_counts_whole():
    template = CHAT_TEMPLATE.replace(" + '</s>'", "")
    (row,) = rows(tokenizer_of(template), (("user", "w101"), ("assistant", "w103 w104")))
    assert row.answers == 2 and row.ids[-1] == tokenizer_of()("w104")["input_ids"][0]


def test_long_ones_are_refused_or_cut():
    tokenizer = tokenizer_of()
    short, long = (("user", "w101"), ("assistant", "w103")), (("user", "w101 " * 30), ("assistant", "w103"))
    with pytest.raises(ValueError, match="c1: has 36 tokens, more than 20"):
        rows(tokenizer, short, long, max_tokens=20)
    assert [row.id for row in rows(tokenizer, short, long, max_tokens=20, cut=True)] == ["c0"]
    (row,) = rows(tokenizer, long, max_tokens=35, cut=True)
    assert len(row.ids) == len(row.answer) == 35 and row.answers == 1


def test_refusals():
    with pytest.raises(ValueError, match="has no chat template"):
        rows(tokenizer_of(None), TURNS)
    with pytest.raises(ValueError, match=r"c1: has no answer to learn from"):
        rows(tokenizer_of(), TURNS, TURNS[:2])
    forgetful = (
        "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}[{{ m['role'] }}]{{ m['content'] }}</s>"
        "{% else %}[{{ m['role'] }}]</s>{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with pytest.raises(ValueError, match="c0: the chat template does not take its first messages, 0 of 1"):
        rows(tokenizer_of(), [("assistant", "w1")])
    with pytest.raises(ValueError, match="c1, message 3: the tokenizer gave no tokens"):
        rows(tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}"), TURNS, (*TURNS[:2], ("assistant", "")))
    with pytest.raises(ValueError, match=r"c0: the chat template does not take its first messages, 2 of 5 \(no system"):
        rows(tokenizer_of("{{ raise_exception('no system turn') }}"), TURNS)
    with pytest.raises(ValueError, match="c0: the chat template writes earlier turns anew once message 5 is there"):
        rows(tokenizer_of(forgetful), TURNS)


def test_files(tmp_path):
    path = tmp_path / "chat.jsonl"
    messages = [{"role": role, "content": content} for role, content in TURNS]
    path.write_text("\n" + json.dumps({"messages": messages, "source": "x"}) + "\n\n", encoding="utf-8")
    (one,) = read_messages(path)
    assert one == Conversation("chat-2", TURNS)
    for line, message in (
        ("{", "line 1: is no JSON"),
        ("[]", 'line 1: expected an object with "messages"'),
        ('{"messages": []}', r"line 1: messages is \[\]"),
        ('{"messages": [{"role": "user"}]}', "line 1: message 1 is"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "line 1: message 1 is"),
        ('{"messages": [{"role": "User", "content": "a"}]}', "line 1: message 1 is of 'User'; the roles are system"),
        ('{"messages": [], "messages": []}', "line 1: 'messages' is given twice"),
        ("", "holds no conversations"),
    ):
        path.write_text(line)
        with pytest.raises(ValueError, match=message):
            read_messages(path)
    path.write_bytes(b'{"messages": "\xff"}')
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_messages(path)
    assert conversations_of([{"messages": messages}, messages, one])[2] is one
    with pytest.raises(ValueError, match=r"data\[1\]: messages is 3"):
        conversations_of([one, 3])


def test_a_dataset(monkeypatch):
    class Data(list):
        column_names = ("messages",)

    def load_dataset(path, config, split):
        if path != "some/chats":
            raise FileNotFoundError("no such dataset")
        assert (config, split) == ("english", "dev")
        return Data({"messages": [{"role": role, "content": content} for role, content in TURNS]} for _ in range(5))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = dataset_messages("some/chats:english", "dev", limit=3)
    assert len(found) == 3 and found[2] == Conversation("some/chats-2", TURNS)
    with pytest.raises(ValueError, match="elsewhere: could not be read"):
        dataset_messages("elsewhere")
    monkeypatch.setattr(Data, "column_names", ("text",))
    with pytest.raises(ValueError, match="has no column \"messages\", it has 'text'"):
        dataset_messages("some/chats:english", "dev")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        dataset_messages("some/chats")
    assert torch.is_grad_enabled()
