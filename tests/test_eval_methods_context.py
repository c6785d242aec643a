# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a context computes once, what it drops when there is too much, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from kvspeed import PacketAdapter, unpatch_model
from kvspeed.eval.methods import Block, Context
from kvspeed.patch import patch_model
from packet_tools import CHAT_TEMPLATE, random_packet, random_text, tiny_tokenizer
from tiny_models import tiny_model


def context(**kwargs) -> Context:
    return Context(tiny_model("llama", layers=2), tiny_tokenizer(template=CHAT_TEMPLATE), **kwargs)


def test_ids_are_those_of_a_prompt():
    one = context()
    assert one.tokenizer.decode(one.preamble_ids).startswith("<s> [user]")
    assert len(one.preamble_ids) == len("<s> [user] Read the documents and answer the question.".split())
    assert len(context(instruction="w9 ").preamble_ids) == 3
    assert one.tokenizer.decode(one.question_ids("w200")).endswith("[assistant]")
    assert one.document_ids("  w100 w101\n") == tuple(one.tokenizer("w100 w101")["input_ids"])


def test_documents_are_computed_once_and_the_oldest_go_first():
    texts = [random_text(20, seed) for seed in range(4)]
    one = context()
    size = one.packet(texts[0]).kv_bytes
    assert one.packet(texts[0]) is one.packet(texts[0])
    small = Context(one.model, one.tokenizer, memory=3 * size)
    kept = [small.packet(text) for text in texts[:3]]
    assert small.packet(texts[0]) is kept[0]
    small.packet(texts[3])  # drops the second
    assert small.packet(texts[0]) is kept[0] and small.packet(texts[2]) is kept[2]
    assert small.packet(texts[1]) is not kept[1]
    tiny = Context(one.model, one.tokenizer, memory=0)
    assert tiny.packet(texts[0]).length == 20


def test_kv_behind_a_prefix_is_that_of_one_forward():
    one = context()
    before, ids = one.document_ids(random_text(7, 1)), one.document_ids(random_text(9, 2))
    block = one.alone(ids, before)
    whole = one.alone((*before, *ids))
    assert block.start == 7 and block.length == 9
    assert torch.allclose(block.keys, whole.keys[:, :, 7:], atol=1e-5)
    assert block.keys.is_contiguous() and not block.keys.untyped_storage().nbytes() > 2 * block.bytes


@pytest.mark.parametrize("mode", ["view", "copy"])
def test_blocks_are_placed_from_where_they_were_computed(mode):
    """A block that was computed behind a prefix, put where it was, and elsewhere."""
    one = context()
    patch_model(one.model)
    one = Context(one.model, one.tokenizer, mode=mode)
    before, ids = one.document_ids(random_text(7, 1)), one.document_ids(random_text(9, 2))
    blocks = [one.alone(before), one.alone(ids, before)]
    cache = one.place(blocks, 40)
    expected = one.model(torch.tensor([[*before, *ids, 50, 51]])).logits[0, -1]
    assert torch.allclose(one.forward([50, 51], cache), expected, atol=1e-4)
    unpatch_model(one.model)


def test_an_adapter_is_asked_for_where_it_is_needed():
    with pytest.raises(ValueError, match="needs a packet adapter, and the context has none"):
        context().packet("w100", adapter=True)
    other = PacketAdapter.for_model(tiny_model("llama", layers=3), 1, 1)
    with pytest.raises(ValueError, match="adapter"):
        context(adapter=other)


def test_models_and_modes_that_do_not_fit_are_refused():
    model, tokenizer = tiny_model("llama", layers=3), tiny_tokenizer()
    with pytest.raises(ValueError, match='"view" reads documents in place, which needs the patch'):
        Context(model, tokenizer, mode="view")
    with pytest.raises(ValueError, match="mode: expected"):
        Context(model, tokenizer, mode="paged")
    patch_model(model, 2)
    with pytest.raises(ValueError, match="patched with k=2"):
        Context(model, tokenizer)
    rounded = tiny_model("llama", layers=2).bfloat16()
    with pytest.raises(ValueError, match="rotary frequencies were rounded"):
        Context(rounded, tokenizer)
    assert Context(patch_model(rounded), tokenizer).mode == "view"


def test_a_packet_with_removed_tokens_is_no_block():
    with pytest.raises(ValueError, match="tokens removed"):
        Block.of(random_packet(kept=3))


@pytest.mark.parametrize("wrong", ["", " \n", None, 5])
def test_what_is_no_document_is_refused(wrong):
    with pytest.raises(ValueError, match="documents: expected texts"):
        context().document_ids(wrong)
