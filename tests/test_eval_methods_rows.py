# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Running rows again through every architecture's own modules, and leaving the model as it was."""

from __future__ import annotations

import pytest
import torch
from kvspeed.eval.methods import Block, Context
from kvspeed.eval.methods.rows import recompute
from kvspeed.patch import patch_model, unpatch_model
from kvspeed.state import state_of
from packet_tools import random_text, tiny_tokenizer
from tiny_models import tiny_model


def documents(context: Context, lengths: list[int]) -> tuple[list[int], list[Block]]:
    ids = [context.document_ids(random_text(length, 31 * index + length)) for index, length in enumerate(lengths)]
    return [token for one in ids for token in one], [context.alone(one) for one in ids]


def filled(context: Context, blocks: list[Block], slots: int):
    return context.place(blocks, slots, "copy")


@pytest.mark.parametrize("patched", [False, True])
def test_all_rows_give_the_models_own_logits(architecture, patched):
    """Whatever the cache held before; by runs, and by masked blocks where rows go on by a choice."""
    model = tiny_model(architecture, layers=6, seed=torch.seed() % 1000)
    if patched:
        patch_model(model)
    context = Context(model, tiny_tokenizer())
    prompt, blocks = documents(context, [40, 3, 60])
    ids = [*prompt, 300, 301, 302]
    expected = unpatched_logits(model, ids)
    everything = {2: lambda run, before: torch.arange(len(run.rows))}
    for choices in ({}, everything):
        cache = filled(context, blocks, 200)
        logits, counted = recompute(context, cache, ids, range(len(ids)), 3, choices)
        assert torch.allclose(logits, expected, atol=2e-4)
        assert counted.work().rows == (len(ids),) * 6
        assert cache.get_seq_length() == len(ids)
        after = context.forward([5, 6], cache)
        assert torch.allclose(after, unpatched_logits(model, [*ids, 5, 6]), atol=2e-4)


@torch.no_grad()
def unpatched_logits(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0, -1]


def test_fewer_rows_from_a_layer_on_equal_a_forward_that_hides_the_others(architecture):
    """The rows that stop at layer 2 keep the cache's KV above: the same as new KV of the others written by hand."""
    model = tiny_model(architecture, layers=4, seed=torch.seed() % 1000)
    context = Context(model, tiny_tokenizer())
    prompt, blocks = documents(context, [30, 25])
    ids = [*prompt, 300, 301]
    rows = list(range(len(ids)))
    picked = [*sorted({*torch.randperm(len(prompt))[:17].tolist(), 41}), *rows[-2:]]
    cache = filled(context, blocks, 100)
    before = [[part.clone() for part in cache.layer(layer).view(len(prompt))] for layer in range(4)]
    logits, counted = recompute(context, cache, ids, rows, 2, {2: lambda run, before: torch.tensor(picked)})
    work = counted.work()
    assert work.rows == (len(ids), len(ids), len(picked), len(picked))
    left = [row for row in range(len(prompt)) if row not in picked]
    for layer in (2, 3):
        for now, then in zip(cache.layer(layer).view(len(prompt)), before[layer], strict=True):
            assert torch.equal(now[:, :, left], then[:, :, left])
            assert torch.equal(now[:, :, picked[-3]], then[:, :, picked[-3]]) is False  # of the second block
    # the same rows in two steps, 2 + 1 + ... : choosing again changes nothing when all go on
    again = filled(context, blocks, 100)
    steps = {2: lambda run, before: torch.tensor(picked), 3: lambda run, before: torch.arange(len(picked))}
    assert torch.allclose(recompute(context, again, ids, rows, 2, steps)[0], logits, atol=1e-5)


def test_a_probe_shows_what_the_layer_then_stores(architecture):
    model = tiny_model(architecture, layers=3, seed=torch.seed() % 1000)
    context = Context(model, tiny_tokenizer())
    prompt, blocks = documents(context, [12, 9])
    ids = [*prompt, 300, 301, 302, 303]
    seen = {}

    def look(run, before):
        seen["all"], seen["last"] = before.probe(), before.probe(last=4)
        assert torch.equal(run.stored(before.index)[0][:, :, : len(prompt)], seen["old"])

    cache = filled(context, blocks, 60)
    seen["old"] = cache.layer(1).view(len(prompt))[0].clone()
    recompute(context, cache, ids, range(len(ids)), 4, {1: look})
    key, value = cache.layer(1).view(len(ids))
    assert torch.allclose(seen["all"].key, key, atol=1e-5) and torch.allclose(seen["all"].value, value, atol=1e-5)
    for part, last in zip(seen["all"][:3], seen["last"][:3], strict=True):
        assert torch.allclose(part[:, :, -4:], last, atol=1e-5)


@pytest.mark.parametrize("patched", [False, True])
def test_the_model_is_as_it_was_even_after_a_failure(patched):
    model = tiny_model("qwen3", layers=3)
    if patched:
        patch_model(model)
    context = Context(model, tiny_tokenizer())
    prompt, blocks = documents(context, [12])
    ids = [*prompt, 300]
    before = unpatched_logits(model, ids)
    hooks = [len(layer._forward_pre_hooks) for layer in model.model.layers]
    configs = [layer.self_attn.config for layer in model.model.layers]

    def fail(run, before):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        recompute(context, filled(context, blocks, 60), ids, range(len(ids)), 1, {1: fail})
    recompute(context, filled(context, blocks, 60), ids, range(len(ids)), 1)
    assert [len(layer._forward_pre_hooks) for layer in model.model.layers] == hooks
    assert all(layer.self_attn.config is config for layer, config in zip(model.model.layers, configs, strict=True))
    assert (state_of(model) is not None) == patched
    assert torch.equal(unpatched_logits(model, ids), before)
    unpatch_model(model)


def test_a_model_in_training_mode_computes_without_dropout_and_stays_in_it():
    model = tiny_model("llama", layers=2, attention_dropout=0.5).train()
    context = Context(model, tiny_tokenizer())
    prompt, blocks = documents(context, [12])
    ids = [*prompt, 300]
    one, other = (recompute(context, filled(context, blocks, 60), ids, range(len(ids)), 1)[0] for _ in range(2))
    assert torch.equal(one, other) and model.training


@pytest.mark.parametrize("rows", [range(0, 12), [0, 3, 5], [5, 12, 11], []])
def test_rows_that_do_not_end_with_the_question_are_refused(rows):
    context = Context(tiny_model("llama", layers=2), tiny_tokenizer())
    prompt, blocks = documents(context, [11])
    with pytest.raises(ValueError, match="rows: must end with the 2 tokens of the question"):
        recompute(context, filled(context, blocks, 30), [*prompt, 300, 301], rows, 2)
