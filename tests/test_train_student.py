# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The student's forward against one dense masked forward and against served packets; its losses and gradients."""

from __future__ import annotations

import copy

import kvspeed
import pytest
import torch
from kvspeed.packet import PacketAdapter, build_packet, build_preamble
from kvspeed.packet.train.blocks import bfloat16_products, frozen, logits_of
from kvspeed.packet.train.contexts import contexts_of
from kvspeed.packet.train.student import Student
from kvspeed.packet.train.teacher import Answer
from kvspeed.rule import SpeedSpec
from kvspeed.samples import INSTRUCTION, document_text
from packet_tools import cached_logits, embed
from tiny_models import tiny_model
from train_tools import asked_model, dense_logits, random_answers, random_context, random_samples

SHAPES = {
    "usual": {},
    "no-preamble": {"preamble": 0},
    "one-document": {"documents": (3,)},
    "a-long-one": {"documents": (40, 2)},
    "one-question": {"queries": 1},
    "five-questions": {"queries": 5},
}


def student(model, *, soft=(3, 2), **options):
    adapter = PacketAdapter.for_model(model, *soft, seed=int(torch.randint(1000, ())))
    return Student(model, adapter, **options)


CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize("shape", SHAPES)
def test_one_masked_forward(shape):
    model, context = tiny_model("llama"), random_context(**SHAPES[shape])
    answers, taught = random_answers(context), student(model)
    for index, rows in enumerate(taught.logits(context, answers)):
        torch.testing.assert_close(rows, dense_logits(model, context, answers[index], index, taught.adapter), **CLOSE)


def test_every_architecture(architecture):
    model, context = tiny_model(architecture), random_context(documents=(30, 4, 9))
    answers, taught = random_answers(context), student(model)
    for index, rows in enumerate(taught.logits(context, answers)):
        torch.testing.assert_close(rows, dense_logits(model, context, answers[index], index, taught.adapter), **CLOSE)


def test_logits_are_the_models_own(architecture):
    model = tiny_model(architecture)
    embeds = embed(model, torch.randint(3, 512, (7,)))[None]
    with torch.no_grad():
        hidden = model.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        torch.testing.assert_close(logits_of(model, hidden), model(inputs_embeds=embeds, use_cache=False).logits)


@pytest.mark.parametrize("soft", [(0, 2), (3, 0), (8, 8)])
@pytest.mark.parametrize("k", [None, 4])
def test_is_what_packets_serve(soft, k):
    """Trained on one forward, served from stored packets: the same logits."""
    model, tokenizer = asked_model()
    sample = random_samples(1)[0]
    adapter = PacketAdapter.for_model(model, *soft)
    (context,) = contexts_of(tokenizer, [sample])
    (answer,) = random_answers(context)
    spec = SpeedSpec(k) if k is not None else None
    with frozen(model):
        (rows,) = Student(model, adapter, spec=spec).logits(context, [answer])
    kvspeed.patch_model(model, k)
    packets = [build_packet(model, tokenizer, document_text(text), adapter) for text in sample.documents]
    preamble = build_preamble(model, tokenizer, INSTRUCTION)
    cache = kvspeed.assemble(packets, model=model, preamble=preamble)
    served = cached_logits(model, cache, context.queries[0].question, answer.tokens)
    wanted = served[-len(answer.tokens) - 1 : -1]
    torch.testing.assert_close(rows.detach(), wanted, **CLOSE)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_speed_is_two_masks(architecture, k):
    """Layers < k under the block mask, the others under the rule of SPEED."""
    model, context = tiny_model(architecture), random_context(documents=(30, 5))
    answers, taught = random_answers(context), student(model, spec=SpeedSpec(k))
    length = sum(map(len, context.documents)) + 2 * taught.adapter.tokens + len(context.preamble)
    for index, rows in enumerate(taught.logits(context, answers)):
        prompt = length + len(context.queries[index].question)
        total = prompt + len(answers[index].tokens)
        upper = (k, kvspeed.speed_mask(prompt, total))
        wanted = dense_logits(model, context, answers[index], index, taught.adapter, upper=upper)
        torch.testing.assert_close(rows.detach(), wanted, **CLOSE)


def test_questions_do_not_see_each_other():
    model, context = tiny_model("qwen3"), random_context(queries=3)
    answers, taught = random_answers(context), student(model)
    together = taught.logits(context, answers)
    for index, query in enumerate(context.queries):
        alone = type(context)(context.preamble, context.documents, (query,))
        torch.testing.assert_close(taught.logits(alone, [answers[index]])[0], together[index], **CLOSE)


def gradients(taught, context, answers, scale=0.5):
    for part in (taught.adapter.header, taught.adapter.trailer):
        part.grad = None
    with frozen(taught.model):
        loss = taught.backward(context, answers, scale)
    return loss, taught.adapter.header.grad.clone(), taught.adapter.trailer.grad.clone()


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_gradient_is_the_slope(loss):
    """Against the change of the dense loss when the soft tokens move a little, in float64."""
    model = tiny_model("llama", dtype=torch.float64)
    context = random_context()
    answers, taught = random_answers(context), student(model, loss=loss)
    taught.adapter.double()
    _, header, trailer = gradients(taught, context, answers, 1.0)
    for part, gradient in ((taught.adapter.header, header), (taught.adapter.trailer, trailer)):
        direction = torch.randn_like(part)
        found = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                part += step * direction
            total = 0.0
            for index, answer in enumerate(answers):
                rows = dense_logits(model, context, answer, index, taught.adapter)
                if loss == "kl":
                    log_p = answer.log_p
                    total += (log_p.exp() * (log_p - rows.log_softmax(-1))).sum().item()
                else:
                    total += torch.nn.functional.cross_entropy(
                        rows, torch.tensor(answer.tokens), reduction="sum"
                    ).item()
            found.append(total)
            with torch.no_grad():
                part -= step * direction
        slope = (found[0] - found[1]) / 2e-4
        # logits are kept in float32, so that the difference is only that good
        assert slope == pytest.approx((gradient * direction).sum().item(), rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("preamble", [0, 4])
def test_recomputing_documents_changes_nothing(preamble):
    model, context = tiny_model("llama"), random_context(preamble=preamble)
    answers, kept = random_answers(context), student(model)
    again = Student(model, kept.adapter, recompute=True)
    for one, other in zip(gradients(kept, context, answers), gradients(again, context, answers), strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), **CLOSE)


def test_weights_get_no_gradient_and_the_model_is_as_before():
    model = tiny_model("llama")
    model.train()
    model.model.layers[1].eval()
    model.model.norm.weight.requires_grad_(False)
    modes = [part.training for part in model.modules()]
    flags = [weight.requires_grad for weight in model.parameters()]
    context = random_context()
    gradients(student(model), context, random_answers(context))
    assert all(weight.grad is None for weight in model.parameters())
    assert [part.training for part in model.modules()] == modes
    assert [weight.requires_grad for weight in model.parameters()] == flags


def test_bfloat16_products_are_near_and_leave_nothing_behind():
    model, context = tiny_model("qwen2"), random_context()
    answers, taught = random_answers(context), student(model)
    before = copy.deepcopy(model.state_dict())
    exact = taught.logits(context, answers)
    with bfloat16_products(model):
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        near = Student(model, taught.adapter).logits(context, answers)
    assert 0 < max((a - b).abs().max().item() for a, b in zip(exact, near, strict=True)) < 0.5
    with pytest.raises(KeyError), bfloat16_products(model):
        raise KeyError
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for one, other in zip(exact, taught.logits(context, answers), strict=True):
        assert torch.equal(one, other)


def test_kl_of_kept_entries():
    """All entries: the KL. Fewer: less, by no more than the rest's share; nothing for the same distribution."""
    log_p = torch.log_softmax(3 * torch.randn(4, 50), -1)
    logits = torch.randn(4, 50)
    full = Answer((1, 2, 3, 4), log_p, None).divergence(logits).item()
    wanted = torch.nn.functional.kl_div(logits.log_softmax(-1), log_p, reduction="sum", log_target=True).item()
    assert full == pytest.approx(wanted, rel=1e-5)
    last = 0.0
    for top in (1, 5, 20, 49):
        kept, ids = log_p.topk(top)
        rest = torch.logsumexp(log_p.scatter(-1, ids, float("-inf")), -1, keepdim=True)
        answer = Answer((1, 2, 3, 4), torch.cat((kept, rest), -1), ids.int())
        found = answer.divergence(logits).item()
        assert last - 1e-4 <= found <= full + 1e-4
        assert answer.divergence(log_p + 3.0).item() == pytest.approx(0.0, abs=1e-4)
        last = found
    assert last == pytest.approx(full, rel=1e-3)
