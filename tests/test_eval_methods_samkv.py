# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SamKV against the float64 oracle, its choice of blocks against loops, and the short prompt that it leaves."""

from __future__ import annotations

import pytest
import torch
from kvspeed.eval.methods import Context
from kvspeed.eval.methods.samkv import SamKV, blocks_to_keep, personalised
from kvspeed.patch import patch_model
from methods_oracle import Case
from packet_tools import tiny_tokenizer
from tiny_models import tiny_model

SMALL = dict(initial=2, local=2, block=6, stable=2)


def oracle_choice(case: Case, method: SamKV) -> tuple[list[list[int]], list[list[int]]]:
    """Anchors and kept tokens of each document, from the method's description, in float64 and loops."""
    oracle, asked = case.oracle, len(case.question)
    alone = [oracle.alone(ids) for ids in case.ids]
    anchors = [
        sorted({i for i in range(len(ids)) if i < method.initial or i >= len(ids) - method.local}) for ids in case.ids
    ]
    parts = [oracle.alone(case.preamble)[0]]
    ids, positions, begin, begins = list(case.preamble), list(range(len(case.preamble))), len(case.preamble), []
    for (kv, _), one, rows in zip(alone, case.ids, anchors, strict=True):
        parts.append([(key[rows], value[rows]) for key, value in kv])
        ids += [one[row] for row in rows]
        positions += [begin + row for row in rows]
        begins.append(begin)
        begin += len(one)
    rows = list(range(len(ids), len(ids) + asked))
    ids, positions = [*ids, *case.question], [*positions, *case.asked()]
    queries = oracle.run(oracle.joined(parts, asked), ids, [rows] * oracle.layers, positions=positions)["queries"]
    group = oracle.heads // oracle.kv_heads
    kept = [set(one) for one in anchors]
    layers = range(oracle.layers - method.stable, oracle.layers)
    generic = {layer: oracle.rotate(queries[layer], torch.tensor(case.asked())).mean(0) for layer in layers}
    asks, shares, scores = {}, {}, {}
    for layer in layers:
        for index, (_, own) in enumerate(alone):
            last = min(method.local, len(own[layer]))  # the last token stands right before the question
            asks[layer, index] = oracle.rotate(own[layer][-last:], torch.arange(case.length - last, case.length)).mean(
                0
            )
        for index, (kv, _) in enumerate(alone):
            others = torch.zeros_like(generic[layer])
            for other in range(len(alone)):
                if other != index:
                    cosine = torch.cosine_similarity(asks[layer, other], generic[layer], dim=-1)
                    others += cosine[:, None] * asks[layer, other] / (len(alone) - 1)
            personal = (generic[layer] + others).view(oracle.kv_heads, group, -1).mean(1)
            key = oracle.rotate(kv[layer][0], begins[index] + torch.arange(len(kv[layer][0])))
            middle = range(method.initial, len(key) - method.local)
            blocks = [middle[i : i + method.block] for i in range(0, len(middle), method.block)]
            scores[layer, index] = [float((key[list(one)].mean(0) * personal).sum()) for one in blocks]
            if blocks:
                own, found = float((key[anchors[index]].mean(0) * personal).sum()), scores[layer, index]
                inside = min(found) < own <= max(found)
                shares[layer, index] = (max(found) - own) / (max(found) - min(found)) if inside else 0.0
    for index in range(len(alone)):
        number = len(scores[layers[0], index])
        if number:
            count = int(sum(shares[layer, index] for layer in layers) / len(layers) * number)
            for layer in layers:
                order = sorted(range(number), key=lambda i: -scores[layer, index][i])
                for block in order[:count]:
                    begin = method.initial + block * method.block
                    kept[index] |= set(range(begin, min(begin + method.block, len(case.ids[index]) - method.local)))
    return anchors, [sorted(one) for one in kept]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("lengths", [[30, 41, 22], [50], [3, 1, 26, 5]])
def test_tokens_and_logits_are_the_oracles(name, patched, lengths):
    model = tiny_model(name, layers=4, seed=torch.seed() % 1000)
    if patched:
        patch_model(model)
    case = Case(model, lengths)
    method = SamKV(**SMALL)
    prepared = method.prepare(case.context, case.documents)
    logits, cache = method.first_token(prepared, case.question)

    _, kept = oracle_choice(case, method)
    begin, positions = len(case.preamble), []
    for ids, rows in zip(case.ids, kept, strict=True):
        positions += [begin + row for row in rows]
        begin += len(ids)
    assert prepared.extra["kept"] == positions
    kv = case.kv()
    places = [*range(len(case.preamble)), *positions, *case.asked()]
    short = [tuple(part[places] for part in layer) for layer in kv]
    rows = list(range(len(case.preamble), len(places)))
    ids = [case.prompt[place] for place in places]
    settings = dict(positions=places, theta=0.9, question=len(case.question))
    found = case.oracle.run(short, ids, [rows] * 4, **settings)
    assert torch.allclose(logits.double(), found["logits"], atol=2e-4)

    assert cache.get_seq_length() == len(case.prompt)  # positions go on where the whole prompt ends
    stored = len(places) - len(case.question)
    assert method.kv_bytes(prepared) == stored * case.context.token_bytes
    following = case.context.forward([7], cache)
    longer = [tuple(torch.cat([part, part[:1]]) for part in layer) for layer in short]
    after = case.oracle.run(longer, [*ids, 7], [[len(ids)]] * 4, positions=[*places, len(case.prompt)])
    assert torch.allclose(following.double(), after["logits"], atol=2e-4)


def test_documents_of_anchors_alone_are_recomputed_whole():
    """With everything kept and nothing of the old KV mixed in, it is full recompute."""
    case = Case(tiny_model("qwen3", layers=3), [9, 20, 1])
    method = SamKV(initial=64, local=128, block=64, theta=1.0)
    prepared = method.prepare(case.context, case.documents)
    logits, _ = method.first_token(prepared, case.question)
    assert torch.allclose(logits, case.model(torch.tensor([case.prompt])).logits[0, -1], atol=1e-4)


def test_without_documents_the_question_is_asked_alone():
    case = Case(tiny_model("llama", layers=3), [])
    method = SamKV(**SMALL)
    prepared = method.prepare(case.context, [])
    logits, _ = method.first_token(prepared, case.question)
    assert torch.allclose(logits, case.model(torch.tensor([case.prompt])).logits[0, -1], atol=1e-4)


def test_a_draft_can_be_verified_and_taken_back():
    case = Case(patch_model(tiny_model("llama", layers=4)), [40, 30])
    method = SamKV(**SMALL)
    _, cache = method.first_token(method.prepare(case.context, case.documents), case.question)
    end = cache.get_seq_length()
    first = case.context.forward([9, 11, 12], cache)
    cache.crop(end)
    assert torch.allclose(first, case.context.forward([9, 11, 12], cache), atol=1e-5)


def test_blocks_are_those_with_the_highest_scores_and_as_many_as_the_anchors_leave():
    layers, heads, blocks, size = 2, 3, 11, 8
    query, means = torch.randn(layers, 6, size), torch.randn(layers, heads, blocks, size)
    shared = query.view(layers, heads, 2, size).mean(2)
    scores = torch.einsum("lhd,lhbd->lb", shared, means)
    for place in (0.1, 0.5, 0.9):  # of the anchors' score between the best block and the worst
        target = scores.max(1).values - place * (scores.max(1).values - scores.min(1).values)
        anchor = (shared / shared.square().sum((1, 2), keepdim=True) * target[:, None, None]).unsqueeze(2)
        count = int(place * blocks + 1e-4)
        expected = {i for row in scores for i in row.topk(count).indices.tolist()}
        assert blocks_to_keep(query, means, anchor) == sorted(expected)
    outside = (shared / shared.square().sum((1, 2), keepdim=True) * (scores.max() + 1)).unsqueeze(2)
    assert blocks_to_keep(query, means, outside) == []


def test_a_document_alone_has_the_questions_own_query():
    generic, documents = torch.randn(2, 4, 8), torch.randn(2, 1, 4, 8)
    assert torch.allclose(personalised(generic, documents)[:, 0], generic)


def test_sliding_windows_are_refused():
    model = tiny_model("gemma2", layers=2)
    with pytest.raises(ValueError, match=r"samkv: drops tokens.*sliding windows"):
        SamKV().prepare(Context(model, tiny_tokenizer()), ["w100"])


@pytest.mark.parametrize("wrong", [{"initial": 0}, {"local": True}, {"block": 1.5}, {"theta": 1.1}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamKV(**wrong)
