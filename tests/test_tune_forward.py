# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The loss and the gradients of tuning against masked full-depth forwards in float64, and the work that is saved."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed.install import patched
from kvspeed.packet import PacketAdapter
from kvspeed.packet.train.contexts import Context
from kvspeed.packet.train.teacher import Answer
from kvspeed.rule import SpeedSpec
from kvspeed.speed.tuning.forward import Learner
from kvspeed.speed.tuning.items import Item, item_rows, micro_batches
from kvspeed.speed.tuning.rows import Row
from kvspeed.speed.tuning.tune import _mode
from packet_tools import block_mask, masked_logits
from speed_tools import Token, masked, rule
from tiny_models import ARCHITECTURES, tiny_model
from train_tools import random_answers, random_context

LAYERS, K = 6, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"boundary": "keep"},
    "no-anchor": {"anchor_tokens": 0},
    "three-anchors": {"anchor_tokens": 3},
    "self": {"upper_attention": "self"},
    "self-no-anchor-keep": {"upper_attention": "self", "anchor_tokens": 0, "boundary": "keep"},
}


def double(architecture: str = "llama", **options: Any) -> Any:
    return tiny_model(architecture, layers=LAYERS, seed=int(torch.randint(1000, ())), dtype=torch.float64, **options)


def item_of(queries: int = 3, **shape: Any) -> Item:
    context = random_context(queries, **shape)
    return Item(context=context, answers=tuple(random_answers(context)))


def learned(model: Any, spec: SpeedSpec | None, items: Sequence[Item], **options: Any) -> float:
    """The summed loss; its gradient is in the model's weights."""
    model.requires_grad_(True)
    found = Learner(model, spec, **options).backward(items, 1.0)
    assert found.labels == sum(item.labels for item in items)
    assert found.answers == sum(item.size for item in items)
    return found.loss


def loss_of(logits: torch.Tensor, answer: Answer, loss: str) -> torch.Tensor:
    if loss == "ce":
        return torch.nn.functional.cross_entropy(logits, torch.tensor(answer.tokens), reduction="sum")
    log_p = answer.log_p.to(logits)
    return (log_p.exp() * (log_p - logits.log_softmax(-1))).sum()


def alone(model: Any, item: Item, spec: SpeedSpec | None, loss: str = "ce") -> torch.Tensor:
    """The loss by one full-depth forward a question, every layer under its mask."""
    context, total = item.context, torch.zeros((), dtype=torch.float64)
    prefix = [*context.preamble, *(token for ids in context.documents for token in ids)]
    for query, answer in zip(context.queries, item.answers, strict=True):
        ids = torch.tensor([[*prefix, *query.question, *answer.tokens]])
        prompt = ids.shape[1] - len(answer.tokens)
        if spec is None:
            logits = model(ids, use_cache=False).logits[0]
        else:
            seen = kvspeed.speed_mask(
                prompt,
                ids.shape[1],
                anchor_tokens=spec.anchor_tokens,
                boundary=spec.boundary,
                upper_attention=spec.upper_attention,
            )
            with masked(model, seen, spec.k):
                logits = model(ids, use_cache=False).logits[0]
        total = total + loss_of(logits[prompt - 1 : -1], answer, loss)
    return total


def alike(one: Any, two: Any, tolerance: float = 1e-6) -> None:
    """The same gradients in both models."""
    pairs = list(zip(one.named_parameters(), two.named_parameters(), strict=True))
    scale = max(weight.grad.abs().max().item() for _, (_, weight) in pairs if weight.grad is not None)
    assert scale > 1e-3
    for (name, found), (_, wanted) in pairs:
        zero = torch.zeros_like(found)
        error = ((zero if found.grad is None else found.grad) - (zero if wanted.grad is None else wanted.grad)).abs()
        assert error.max().item() <= tolerance * scale, f"{name}: gradients differ by {error.max():.3g} of {scale:.3g}"


def check(architecture: str, spec: SpeedSpec | None, item: Item, loss: str = "ce", **options: Any) -> None:
    model = double(architecture)
    reference = copy.deepcopy(model)
    found = learned(model, spec, [item], loss=loss, **options)
    wanted = alone(reference, item, spec, loss)
    assert found == pytest.approx(wanted.item(), rel=1e-6)
    wanted.backward()
    alike(model, reference)


@pytest.mark.parametrize("option", OPTIONS)
def test_one_pass_over_the_documents_is_one_masked_forward_a_question(option: str) -> None:
    check("llama", SpeedSpec(K, **OPTIONS[option]), item_of())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str) -> None:
    """Documents longer than the sliding windows; answers of several lengths."""
    check(architecture, SpeedSpec(K), item_of(documents=(30, 4)))


@pytest.mark.parametrize("k", [1, 3, 5, None])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_every_depth_and_loss(k: int | None, loss: str) -> None:
    check("qwen3", None if k is None else SpeedSpec(k), item_of(), loss)


@pytest.mark.parametrize("by_rows", [False, True])
def test_anchors_that_reach_into_the_question(by_rows: bool) -> None:
    """Nothing is shared then, and nothing is wrong."""
    check("llama", SpeedSpec(K, 9), item_of(preamble=2, documents=(3,)), by_rows=by_rows)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_contexts_as_rows_are_the_same(architecture: str) -> None:
    check(architecture, SpeedSpec(K, boundary="keep"), item_of(documents=(30, 4)), by_rows=True, micro_tokens=90)


@pytest.mark.parametrize("packets", [False, True])
def test_gradient_checkpointing(packets: bool) -> None:
    """The same loss and gradients: no dropout in what runs again, and contexts in packets keep their caches."""
    model, item = double(attention_dropout=0.5), item_of()
    item = Item(context=item.context, answers=item.answers, packets=packets)
    adapter = PacketAdapter.for_model(model, 2, 2).double() if packets else None
    reference, ran = copy.deepcopy(model), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: ran.append(1))
    with patched(model, SpeedSpec(K)), _mode(model, True):  # to the end of the backward pass
        found = learned(model, SpeedSpec(K), [item], by_rows=True, adapter=adapter)
        times = len(ran)
        assert Learner(model, SpeedSpec(K), by_rows=True, adapter=adapter).evaluate([item]).loss == found
    assert packets or times == 2, "nothing ran again"
    assert not any(part.training or getattr(part, "gradient_checkpointing", False) for part in model.modules())
    wanted = learned(reference, SpeedSpec(K), [item], adapter=adapter)
    assert found == pytest.approx(wanted, rel=1e-6)
    alike(model, reference)


# ---- conversations --------------------------------------------------------------------------------------------------


def row_of(text: str) -> Row:
    """One character a token: p prompt, a answer."""
    ids = torch.randint(3, 512, (len(text),)).tolist()
    return Row(text, tuple(ids), tuple(letter == "a" for letter in text))


ROWS = {
    "one": ["pppppaaaa"],
    "ragged": ["pppppppaaaa", "ppaaapa", "pa"],
    "several-turns": ["ppppaapppaaa", "paapaapaa", "ppppppppppppa"],
    "answer-first": ["aaappaa", "pppppppppa"],
}


def row_loss(model: Any, row: Row, spec: SpeedSpec | None) -> torch.Tensor:
    tokens, span = [], 0
    for place, is_answer in enumerate(row.answer):
        boundary = not is_answer and row.answer[place + 1 : place + 2] == (True,)
        span += boundary
        tokens.append(Token(is_answer, boundary, span))
    ids = torch.tensor([row.ids])
    if spec is None:
        logits = model(ids, use_cache=False).logits[0]
    else:
        opts = {name: getattr(spec, name) for name in ("anchor_tokens", "boundary", "upper_attention", "turns")}
        with masked(model, rule(tokens, **opts), spec.k):
            logits = model(ids, use_cache=False).logits[0]
    wanted = torch.tensor(row.answer[1:])
    return torch.nn.functional.cross_entropy(logits[:-1][wanted], ids[0, 1:][wanted], reduction="sum")


@pytest.mark.parametrize("batch", ROWS)
@pytest.mark.parametrize("option", ["default", "keep", "three-anchors", "self", "full-depth"])
def test_ragged_conversations(batch: str, option: str) -> None:
    spec = None if option == "full-depth" else SpeedSpec(K, **OPTIONS[option])
    items = [Item(row=row_of(text)) for text in ROWS[batch]]
    model = double()
    reference = copy.deepcopy(model)
    found = learned(model, spec, items, micro_tokens=23)  # two forwards
    wanted = torch.stack([row_loss(reference, item.row, spec) for item in items]).sum()
    assert found == pytest.approx(wanted.item(), rel=1e-6)
    wanted.backward()
    alike(model, reference)


def test_conversations_and_contexts_in_one_batch() -> None:
    items, spec = [item_of(2), Item(row=row_of("pppaapa")), Item(row=row_of("ppa"))], SpeedSpec(K)
    model = double()
    reference = copy.deepcopy(model)
    found = learned(model, spec, items)
    wanted = alone(reference, items[0], spec) + sum(row_loss(reference, item.row, spec) for item in items[1:])
    assert found == pytest.approx(wanted.item(), rel=1e-6)
    wanted.backward()
    alike(model, reference)


def test_distillation_of_conversations() -> None:
    """KL to the teacher's distribution at full depth, on the answers' tokens alone."""
    from contextlib import nullcontext

    model, teacher, spec = double(), double(), SpeedSpec(K)
    items = [Item(row=row_of("pppaapa")), Item(row=row_of("ppppppaaa"))]
    learner = Learner(model, spec, loss="kl", teacher=lambda: nullcontext(teacher))
    model.requires_grad_(True)
    found = learner.backward(items, 1.0)
    wanted = 0.0
    for item in items:
        logits, _, _ = learner.rows_logits(model, [item.row], spec)
        log_p = teacher(torch.tensor([item.row.ids])).logits[0, :-1][torch.tensor(item.row.answer[1:])].log_softmax(-1)
        wanted += (log_p.exp() * (log_p - logits.log_softmax(-1))).sum().item()
    assert found.loss == pytest.approx(wanted, rel=1e-6)
    same = Learner(model, None, loss="kl", teacher=lambda: nullcontext(model))
    assert abs(same.evaluate(items).loss) < 1e-6


def test_rows_of_like_length_run_together() -> None:
    rows = [row_of("p" * (length - 1) + "a") for length in (3, 30, 4, 29, 200, 5)]
    batches = micro_batches(rows, 64)
    assert [[len(row.ids) for row in batch] for batch in batches] == [[200], [30, 29], [5, 4, 3]]


# ---- packets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("k", [None, K])
def test_packets_and_weights_learn_together(architecture: str, k: int | None) -> None:
    """Weights and soft tokens get the gradient of one forward under a block mask, and the rule of SPEED above k."""
    model, item = double(architecture), item_of(documents=(30, 4))
    item = Item(context=item.context, answers=item.answers, packets=True)
    adapter = PacketAdapter.for_model(model, 3, 2).double()
    reference, soft = copy.deepcopy(model), copy.deepcopy(adapter)
    for part in (adapter.header, adapter.trailer, soft.header, soft.trailer):
        part.requires_grad_(True)
    spec = SpeedSpec(k) if k is not None else None
    found = learned(model, spec, [item], adapter=adapter)
    wanted = torch.zeros((), dtype=torch.float64)
    embed = reference.get_input_embeddings()
    for query, answer in zip(item.context.queries, item.answers, strict=True):
        blocks = [embed(torch.tensor(item.context.preamble))]
        blocks += [soft.wrap(embed(torch.tensor(ids))) for ids in item.context.documents]
        blocks.append(embed(torch.tensor([*query.question, *answer.tokens])))
        lengths = [len(block) for block in blocks]
        prompt = sum(lengths) - len(answer.tokens)
        upper = (k, kvspeed.speed_mask(prompt, sum(lengths))) if k is not None else None
        logits = masked_logits.__wrapped__(reference, torch.cat(blocks), block_mask(lengths), upper=upper)
        wanted = wanted + loss_of(logits[prompt - 1 : -1], answer, "ce")
    assert found == pytest.approx(wanted.item(), rel=1e-6)
    wanted.backward()
    alike(model, reference)
    for part, other in ((adapter.header, soft.header), (adapter.trailer, soft.trailer)):
        # transformers rounds its norms and angles to float32
        torch.testing.assert_close(part.grad, other.grad, rtol=0, atol=1e-5 * other.grad.abs().max().item())


def test_packets_need_a_preamble_that_holds_the_anchors() -> None:
    model, item = double(), item_of(preamble=2)
    item = Item(context=item.context, answers=item.answers, packets=True)
    learner = Learner(model, SpeedSpec(K, 3), adapter=PacketAdapter.for_model(model, 3, 2).double())
    with pytest.raises(ValueError, match="anchor_tokens is 3 and the first block before the questions has 2 tokens"):
        learner.evaluate([item])


# ---- the work -------------------------------------------------------------------------------------------------------


def ran(model: Any, spec: SpeedSpec | None, item: Item) -> list[int]:
    """Tokens that each layer's MLP was given, in one pass with gradients."""
    rows = [0] * LAYERS
    handles = []
    for index, layer in enumerate(model.model.layers):

        def count(_: Any, args: Any, index: int = index) -> None:
            rows[index] += args[0].shape[:-1].numel()

        handles.append(layer.mlp.register_forward_pre_hook(count))
    Learner(model, spec).evaluate([item])
    for handle in handles:
        handle.remove()
    return rows


def test_documents_run_once_and_shallow() -> None:
    model = tiny_model("llama", layers=LAYERS)
    context = Context((5,) * 4, ((6,) * 50, (7,) * 46), random_context(3).queries)
    item = Item(context=context, answers=tuple(random_answers(context)))
    counts = [len(answer.tokens) for answer in item.answers]
    rows = sum(len(query.question) + count - 1 for query, count in zip(context.queries, counts, strict=True))
    answers = sum(counts)
    # the documents' last layer is left before its MLP; above, an anchor and the answers
    assert ran(model, SpeedSpec(K), item) == [100 + 1 + rows] * (K - 1) + [1 + rows] + [1 + answers] * (
        LAYERS - K - 1
    ) + [answers]
    assert ran(model, SpeedSpec(K, 0), item)[K:] == [answers] * (LAYERS - K)
    assert ran(model, None, item) == [100 + rows] * (LAYERS - 1) + [rows]


def test_exact_answers_are_those_that_greedy_decoding_writes() -> None:
    model, tokens = tiny_model("llama", layers=LAYERS), []
    context = random_context(2)
    prefix = [*context.preamble, *(token for ids in context.documents for token in ids)]
    kvspeed.patch_model(model, K)
    for query in context.queries:
        ids = torch.tensor([[*prefix, *query.question]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        tokens.append(out[0, ids.shape[1] :].tolist())
    wrong = [*tokens[1][:2], (tokens[1][2] + 1) % 512, tokens[1][3]]
    none = torch.zeros(0)
    item = Item(context=context, answers=(Answer(tuple(tokens[0]), none, None), Answer(tuple(wrong), none, None)))
    found = Learner(model, SpeedSpec(K)).evaluate([item])
    assert (found.exact, found.answers, found.labels) == (1, 2, 8)
    as_rows = Learner(model, SpeedSpec(K), by_rows=True).evaluate([item])
    assert (as_rows.exact, as_rows.loss) == (1, pytest.approx(found.loss, rel=1e-4))
    assert [row.answers for row in item_rows(item)] == [4, 4]
