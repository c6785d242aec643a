# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The compressed methods of an evaluation: names, what they remove, and that nothing removed means nothing changed."""

from __future__ import annotations

import pytest
import torch
from kvspeed import patch_model
from kvspeed.eval.methods import get_method
from kvspeed.eval.methods.base import Context, decode
from kvspeed.packet import PacketAdapter
from kvspeed.packet.press import PRESSES
from packet_tools import CHAT_TEMPLATE, random_text, tiny_tokenizer
from tiny_models import tiny_model


@pytest.fixture(params=["view", "copy"])
def context(request):
    model = tiny_model("llama", layers=3)
    model = patch_model(model) if request.param == "view" else model
    adapter = PacketAdapter.for_model(model, header=3, trailer=2)
    tokenizer = tiny_tokenizer(template=CHAT_TEMPLATE)
    return Context(model, tokenizer, adapter=adapter, mode=request.param, max_new_tokens=4)


def run(context, name, documents, question):
    method = get_method(name)
    prepared = method.prepare(context, documents)
    logits, cache = method.first_token(prepared, context.question_ids(question))
    return method, prepared, logits, decode(context, logits, cache, max_new_tokens=4)


def test_nothing_removed_changes_nothing(context):
    documents = [random_text(n, n) for n in (9, 1, 20)]
    for press in PRESSES:
        for setup, plain in ((f"packet+{press}-0", "packet"), (f"packet+{press}-0-whole", "packet")):
            got, want = (run(context, name, documents, "w300 w301") for name in (setup, plain))
            torch.testing.assert_close(got[2], want[2], atol=1e-5, rtol=1e-5)
            assert got[3] == want[3]
        got, want = (run(context, name, documents, "w300 w301") for name in (f"single+{press}-0", "full"))
        torch.testing.assert_close(got[2], want[2], atol=1e-4, rtol=1e-4)
        assert got[3] == want[3] and got[1].length == want[1].length


@pytest.mark.parametrize("press", sorted(PRESSES))
def test_what_is_removed(context, press):
    documents = [random_text(n, n) for n in (15, 35)]
    token = context.token_bytes
    for setup in ("packet+{}-30", "packet+{}-30-whole", "single+{}-30"):
        method, prepared, logits, tokens = run(context, setup.format(press), documents, "w300 w301")
        assert method.name == setup.format(press) and bool(logits.isfinite().all()) and len(tokens) == 4
        lengths = [len(ids) for ids in prepared.documents]
        if setup.startswith("single"):
            kept = int(sum(lengths) * 0.7)
            assert prepared.length == prepared.preamble + sum(lengths)
        else:
            kept = sum(int((n + 5) * 0.7) for n in lengths)
            assert prepared.length == prepared.preamble + sum(lengths) + 10
        assert method.kv_bytes(prepared) == token * (prepared.preamble + kept)
        assert method.stored_bytes(prepared) == token * kept
        assert method.flops(prepared, 4) < get_method("packet").flops(prepared_all(context, documents), 4)


def prepared_all(context, documents):
    return get_method("packet").prepare(context, documents)


def test_no_documents(context):
    want = run(context, "nocache", [], "w300")[2]
    for name in ("packet+cur-30", "single+cur-30"):
        method, prepared, logits, _ = run(context, name, [], "w300")
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
        assert method.stored_bytes(prepared) == 0


@pytest.mark.parametrize(
    "name", ["packet+cur-100", "single+tova-200", "packet+snap-30", "packet+cur", "single+cur-30-whole"]
)
def test_refused_names(name):
    with pytest.raises(ValueError, match=r"ratio|not known"):
        get_method(name)
