# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The teacher's answers against greedy `generate`, whatever the draft; and the folder that keeps them."""

from __future__ import annotations

import pytest
import torch
from kvspeed.packet.train.contexts import Context, Query, contexts_of
from kvspeed.packet.train.teacher import Teacher
from kvspeed.samples import Sample
from packet_tools import tiny_tokenizer
from tiny_models import tiny_model
from train_tools import random_context, random_samples


def greedy(model, context, index, ends, most):
    """What `generate` writes, and the logits of every step."""
    ids = [*context.preamble, *(token for text in context.documents for token in text)]
    ids = torch.tensor([[*ids, *context.queries[index].question]])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=most,
        eos_token_id=ends or None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.cat(out.logits)


def draft(context, targets):
    queries = [Query(q.id, q.question, tuple(t)) for q, t in zip(context.queries, targets, strict=True)]
    return Context(context.preamble, context.documents, tuple(queries))


@pytest.mark.parametrize("ends", [0, 1, 3])
@pytest.mark.parametrize("kind", ["wrong", "right", "half", "too-long", "too-short"])
def test_greedy_whatever_the_draft(kind, ends):
    """Half of the vocabulary ends an answer where there are three ends, so that answers are short and long."""
    model, context = tiny_model("llama"), random_context(queries=3)
    ends = [] if ends == 0 else [2] if ends == 1 else list(range(2, 90))
    most = 6
    wanted = [greedy(model, context, index, ends, most) for index in range(3)]
    said = [tokens for tokens, _ in wanted]
    bodies = [tokens[:-1] if tokens[-1] in ends else tokens for tokens in said]
    targets = {
        "wrong": [[7, 8]] * 3,
        "right": [body or [5] for body in bodies],
        "half": [[*body[: len(body) // 2], 9, 9] for body in bodies],
        "too-long": [[*body, 5, 6, 7, 8, 9, 10] for body in bodies],
        "too-short": [body[:1] or [5] for body in bodies],
    }[kind]
    teacher = Teacher(model, ends, max_new_tokens=most, top=None)
    for answer, (tokens, logits) in zip(teacher.answers(draft(context, targets)), wanted, strict=True):
        assert list(answer.tokens) == tokens
        torch.testing.assert_close(answer.log_p, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
        assert answer.ids is None


def test_top_entries_and_the_rest():
    model, context = tiny_model("qwen3"), random_context()
    full = Teacher(model, [2], max_new_tokens=4, top=None).answers(context)
    kept = Teacher(model, [2], max_new_tokens=4, top=10).answers(context)
    for one, other in zip(full, kept, strict=True):
        assert one.tokens == other.tokens and other.log_p.shape == (len(one.tokens), 11)
        values, ids = one.log_p.topk(10)
        torch.testing.assert_close(other.log_p[:, :10], values)
        assert torch.equal(other.ids.long(), ids)
        torch.testing.assert_close(other.log_p.exp().sum(-1), torch.ones(len(one.tokens)), atol=1e-5, rtol=0)
    assert Teacher(model, [2], max_new_tokens=4, top=10**6).top is None


class Counting:
    """Counts forwards of a model."""

    def __init__(self, model):
        self.forwards = 0
        self.handle = model.model.register_forward_hook(self._note)

    def _note(self, *_):
        self.forwards += 1


def same(one, other):
    return all(
        a.tokens == b.tokens and torch.equal(a.log_p, b.log_p) and torch.equal(a.ids, b.ids)
        for a, b in zip(one, other, strict=True)
    )


def test_kept_answers_are_read_back(tmp_path):
    model, context = tiny_model("llama"), random_context()
    counting = Counting(model)
    first = Teacher(model, [2], max_new_tokens=5, top=7, folder=tmp_path / "kept").answers(context)
    computed = counting.forwards
    teacher = Teacher(model, [2], max_new_tokens=5, top=7, folder=tmp_path / "kept")
    assert teacher.known(context)
    assert same(first, teacher.answers(context)) and counting.forwards == computed > 0


@pytest.mark.parametrize("change", ["model", "end", "most", "top", "question", "document"])
def test_kept_answers_are_not_taken_for_others(tmp_path, change):
    context = random_context()
    Teacher(tiny_model("llama"), [2], max_new_tokens=5, top=7, folder=tmp_path).answers(context)
    model = tiny_model("llama", seed=1 if change == "model" else 0)
    end, most, top = [3] if change == "end" else [2], 6 if change == "most" else 5, 8 if change == "top" else 7
    if change == "question":
        query = context.queries[0]
        other = Query(query.id, (*query.question, 5), query.target)
        context = Context(context.preamble, context.documents, (other, *context.queries[1:]))
    if change == "document":
        context = Context(context.preamble, context.documents[::-1], context.queries)
    assert not Teacher(model, end, max_new_tokens=most, top=top, folder=tmp_path).known(context)


@pytest.mark.parametrize("damage", ["truncated", "altered", "empty", "other"])
def test_damaged_answers_are_made_anew(tmp_path, damage):
    model, context = tiny_model("llama"), random_context()
    teacher = Teacher(model, [2], max_new_tokens=5, top=7, folder=tmp_path)
    first = teacher.answers(context)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    if damage == "altered":
        content = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    file.write_bytes({"truncated": content[:-20], "altered": content, "empty": b"", "other": b"hello" * 50}[damage])
    assert same(first, teacher.answers(context))
    assert same(first, Teacher(model, [2], max_new_tokens=5, top=7, folder=tmp_path).answers(context))


def test_contexts_keep_samples_about_the_same_documents_together():
    samples = random_samples(12, per_context=3)
    tokenizer = tiny_tokenizer()
    contexts = contexts_of(tokenizer, samples)
    assert [len(one.queries) for one in contexts] == [3] * 4
    assert [query.id for one in contexts for query in one.queries] == [sample.id for sample in samples]
    assert [len(one.queries) for one in contexts_of(tokenizer, samples, most_queries=2)] == [2, 1] * 4
    assert [len(one.queries) for one in contexts_of(tokenizer, samples[::3] + samples[1::3])] == [1] * 8


def test_a_sample_without_tokens_is_named():
    class Silent:
        chat_template = None
        bos_token_id = None

        def __call__(self, text, **_):
            return {"input_ids": [] if "silence" in text else [5]}

    samples = [Sample("one", ("a",), "b", ("c",)), Sample("two", ("a",), "b", ("silence",))]
    with pytest.raises(ValueError, match=r"^sample two: answers: the tokenizer gave no tokens"):
        contexts_of(Silent(), samples)
