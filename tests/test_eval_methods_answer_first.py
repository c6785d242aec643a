# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Answer-first layers as a method of an evaluation: its logits, KV and names."""

from __future__ import annotations

import random
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed.eval.flops import prefill_flops
from kvspeed.eval.methods import SPEED_METHODS, Context, get_method
from kvspeed.rule import SpeedSpec
from kvspeed.tuned import remember_spec
from packet_tools import CHAT_TEMPLATE, random_text, tiny_tokenizer
from speed_tools import LAYERS, answer, close, fresh, poison  # noqa: F401

TOKENIZER = tiny_tokenizer(template=CHAT_TEMPLATE)


def method_of(name: str) -> Any:
    return get_method(name, SPEED_METHODS)


def context_of(architecture: str = "llama", spec: SpeedSpec | None = None) -> Context:
    model = fresh(architecture)
    if spec is not None:
        remember_spec(model, spec)
    return Context(kvspeed.patch_model(model, LAYERS), TOKENIZER)


@pytest.mark.parametrize(("first", "last"), [(2, 3), (1, 4), (4, 5)])
def test_first_logits_and_kv(architecture: str, first: int, last: int) -> None:
    context, method = context_of(architecture), method_of(f"answerfirst{first}to{last}")
    ids = [context.preamble_ids[0], *(random.randrange(3, 500) for _ in range(random.randint(2, 30)))]
    with method.serving(context), torch.no_grad():
        logits, cache = method.prefill(context, ids)
    other = kvspeed.patch_model(fresh(architecture), deep_layers=range(first, last + 1))
    wanted = answer(other, torch.tensor([ids]), n=1)
    close(logits[None], wanted.logits[0])
    own = [cache.layer(layer).length for layer in range(LAYERS)]
    assert own == [1 if first <= layer <= last else len(ids) for layer in range(LAYERS)]
    assert method.prompt_bytes(context, len(ids)) == cache.kv_bytes()
    assert context.spec is None  # and the model is as before


def test_questions_that_share_their_documents() -> None:
    context, method = context_of(), method_of("answerfirst2to3")
    documents, found = [random_text(9, 1), random_text(7, 2)], []
    shared = method.shared(context)
    for asked in (method, shared):
        for question in ("w5 w6", "w9"):
            with asked.serving(context), torch.no_grad():
                prepared = asked.prepare(context, documents)
                found.append(asked.first_token(prepared, context.question_ids(question))[0])
    close(found[2], found[0])
    close(found[3], found[1])


def test_as_the_weights_were_tuned() -> None:
    context = context_of(spec=SpeedSpec(4, 3, "keep"))
    assert method_of("answerfirst2to3").spec(context) == SpeedSpec(LAYERS, 3, "keep", gaps=(2, 3))
    assert method_of("answerfirst3to5").spec(context) == SpeedSpec(3, 3, "keep")


def test_operations() -> None:
    """As many as SPEED needs with as many layers; the last layers alone are SPEED."""
    context = context_of("gemma2")
    assert method_of("answerfirst4to5").prefill_flops(context, 50) == method_of("speed-4").prefill_flops(context, 50)
    flops = [method_of(f"answerfirst{layer}to{layer}").prefill_flops(context, 50) for layer in (1, 2, 3)]
    assert flops[0] == flops[2] < prefill_flops(context.shape, 50)
    assert flops[1] > flops[0]  # layer 2 has a sliding window, layer 1 has none: passing that by saves more


@pytest.mark.parametrize("name", ["answerfirst0to2", "answerfirst3to2"])
def test_bad_names(name: str) -> None:
    with pytest.raises(ValueError, match="layers: are"):
        method_of(name)


def test_more_layers_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"go to 6, and the model's are 0 to 5"):
        method_of("answerfirst2to6").spec(context_of())
