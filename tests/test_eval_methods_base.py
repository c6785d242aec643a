# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The methods that recompute nothing or everything, against one masked forward; decoding and costs of all."""

from __future__ import annotations

import pytest
import torch
from kvspeed import PacketAdapter
from kvspeed.eval.methods import METHODS, Context, decode, get_method
from kvspeed.patch import patch_model, unpatch_model
from methods_oracle import Case
from packet_tools import CHAT_TEMPLATE, block_mask, embed, masked_logits, random_text, tiny_tokenizer
from tiny_models import tiny_model

NAMES = [name.replace("<n>", "30") for name in METHODS if not name.startswith(("packet+", "single+"))]


def first_token(name: str, case: Case) -> torch.Tensor:
    method = get_method(name)
    return method.first_token(method.prepare(case.context, case.documents), case.question)[0]


@pytest.mark.parametrize("mode", ["plain", "view", "copy"])
def test_each_against_its_mask(architecture, mode):
    model = tiny_model(architecture, seed=torch.seed() % 1000)
    adapter = PacketAdapter.for_model(model, header=2, trailer=3, seed=5)
    question, lengths = 3, [15, 1, 22]
    if mode != "plain":
        patch_model(model)
    context_mode = None if mode == "plain" else mode
    case = case_of(model, lengths, question, adapter=adapter, mode=context_mode)
    got = {name: first_token(name, case) for name in ("full", "none", "block-attention", "nocache", "packet", "sink")}
    sizes = [len(case.preamble), *(len(ids) for ids in case.ids), len(case.question)]

    causal = torch.ones(len(case.prompt), len(case.prompt), dtype=torch.bool).tril()
    unpatch_model(model)
    embeds = embed(model, case.prompt)
    close = dict(atol=2e-4, rtol=1e-3)
    assert torch.allclose(got["full"], masked_logits(model, embeds, causal)[-1], **close)
    assert torch.allclose(got["none"], masked_logits(model, embeds, block_mask(sizes))[-1], **close)
    assert torch.equal(got["none"], got["block-attention"])
    alone = [*case.preamble, *case.question]
    assert torch.allclose(got["nocache"], model(torch.tensor([alone])).logits[0, -1], **close)
    parts = [embed(model, case.preamble), *(adapter.wrap(embed(model, ids)) for ids in case.ids)]
    parts.append(embed(model, case.question))
    wrapped = block_mask([len(part) for part in parts])
    assert torch.allclose(got["packet"], masked_logits(model, torch.cat(parts).detach(), wrapped)[-1], **close)
    if architecture not in ("gemma2", "gemma3_text"):  # whose windows would hide the preamble by distance
        assert torch.allclose(got["sink"], sink_logits(model, case), **close)


def case_of(model, lengths, question, **kwargs) -> Case:
    """A Case of any architecture (the oracle of which is for two)."""
    case = Case.__new__(Case)
    case.model, case.context = model, Context(model, tiny_tokenizer(template=CHAT_TEMPLATE), **kwargs)
    seed = int(torch.randint(1, 10**6, ()))
    case.documents = [random_text(length, seed + index) for index, length in enumerate(lengths)]
    case.question = case.context.question_ids(random_text(question, seed - 1))
    case.preamble = case.context.preamble_ids
    case.ids = [case.context.document_ids(text) for text in case.documents]
    case.prompt = [*case.preamble, *(token for ids in case.ids for token in ids), *case.question]
    case.length = len(case.prompt) - len(case.question)
    return case


@torch.no_grad()
def sink_logits(model, case: Case) -> torch.Tensor:
    """Each document behind a copy of the preamble that only it sees, at the distance it had; positions by hand."""
    ids, positions, block = [], [], []
    begin = len(case.preamble)
    for number, document in enumerate(case.ids, 1):
        ids += [*case.preamble, *document]
        positions += range(begin - len(case.preamble), begin + len(document))
        block += [-number] * len(case.preamble) + [number] * len(document)
        begin += len(document)
    ids, positions = [*case.preamble, *ids, *case.question], [*range(len(case.preamble)), *positions]
    block = torch.tensor([0] * len(case.preamble) + block + [99] * len(case.question))
    positions += range(begin, begin + len(case.question))
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    own = block[:, None].abs() == block[None].abs()
    asks = (block[:, None] == 99) & (block[None] >= 0)  # the copies of the preamble are dropped
    mask = torch.zeros(len(ids), len(ids)).masked_fill(~((own | asks) & causal), torch.finfo(torch.float32).min)
    given = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
    return model(**given, attention_mask=mask[None, None], use_cache=False).logits[0, -1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("patched", [False, True])
def test_decoding_goes_on_as_the_model_would_and_a_draft_can_be_taken_back(name, patched):
    model = tiny_model("qwen3", layers=4, seed=torch.seed() % 1000)
    if patched:
        patch_model(model)
    case = Case(model, [33, 26], adapter=PacketAdapter.for_model(model, 2, 2), max_new_tokens=8)
    method = get_method(name)
    assert method.name == name
    prepared = method.prepare(case.context, case.documents)
    logits, cache = method.first_token(prepared, case.question)
    end = cache.get_seq_length()
    tokens = decode(case.context, logits, cache, max_new_tokens=6)
    assert len(tokens) == 6 and tokens[0] == int(logits.argmax())
    cache.crop(end)
    greedy = [tokens[0]]
    for count in range(1, 6):  # each prefix of the answer in one forward
        following = case.context.forward(tokens[:count], cache)
        greedy.append(int(following.argmax()))
        cache.crop(end)
    assert greedy == tokens
    again, _ = method.first_token(prepared, case.question)  # nothing of the first answer is left in `prepared`
    assert torch.equal(again, logits)


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_those_of_what_ran(name):
    """Linear layers that really run, counted by hooks, are those of the formula, less attention."""
    model = tiny_model("llama", layers=4, seed=torch.seed() % 1000)
    case = Case(model, [33, 26], adapter=PacketAdapter.for_model(model, 2, 2))
    method = get_method(name)
    prepared = method.prepare(case.context, case.documents)
    expected = method.flops(prepared, len(case.question))
    done = 0

    def count(module, inputs, output):
        nonlocal done
        done += 2 * inputs[0].shape[:-1].numel() * module.weight.numel()

    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    method.first_token(prepared, case.question)
    for handle in handles:
        handle.remove()
    shape, work = case.context.shape, method.work(prepared, len(case.question))
    scoring = 0
    if "a3" in name:
        scoring = 2 * shape.heads * shape.head_dim * len(case.question) * sum(map(len, case.ids))
    assert done == work.flops(shape) - sum(work.pairs) * shape.pair - scoring
    assert method.flops(prepared, len(case.question)) == work.flops(shape)
    if not name.startswith("samkv"):  # of which only anchors are known before
        assert abs(expected - work.flops(shape)) < 0.1 * expected
    assert 0 < method.kv_bytes(prepared) and 0 <= method.stored_bytes(prepared)
    whole = case.context.token_bytes * case.length
    if name in ("full", "none", "sink", "cacheblend-30", "epic-30", "a3-30"):
        assert method.kv_bytes(prepared) == whole
    if name in ("full", "nocache"):
        assert method.stored_bytes(prepared) == 0
    elif not name.startswith("samkv"):
        assert method.stored_bytes(prepared) >= whole - case.context.token_bytes * len(case.preamble)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_longer_than_the_model_is_refused(name):
    model = tiny_model("llama", layers=2, max_position_embeddings=64)
    context = Context(model, tiny_tokenizer(), adapter=PacketAdapter.for_model(model, 1, 1), max_new_tokens=4)
    method = get_method(name)
    documents = ["w100 " * 30, "w101 " * 30]
    if name == "nocache":
        with pytest.raises(ValueError, match="positions, and the model has 64"):
            method.first_token(method.prepare(context, documents), range(100, 170))
        return
    with pytest.raises(ValueError, match=r"positions, and the model has 64|take .* positions"):
        method.first_token(method.prepare(context, documents), context.question_ids("w200"))


@pytest.mark.parametrize("name", NAMES)
def test_empty_documents_are_refused(name):
    model = tiny_model("llama", layers=2)
    context = Context(model, tiny_tokenizer(), adapter=PacketAdapter.for_model(model, 1, 1))
    if name != "nocache":
        with pytest.raises(ValueError, match="documents: expected texts that are not empty"):
            get_method(name).prepare(context, ["w100", "  "])


def test_end_of_answer_and_wrong_limits():
    case = Case(tiny_model("llama", layers=2), [5])
    method = get_method("full")
    logits, cache = method.first_token(method.prepare(case.context, case.documents), case.question)
    case.model.generation_config.eos_token_id = [int(logits.argmax()), 4]
    assert decode(case.context, logits, cache, max_new_tokens=5) == [int(logits.argmax())]
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="max_new_tokens"):
            decode(case.context, logits, cache, max_new_tokens=wrong)


def test_names():
    for wrong in ("packets", "epic-", "epic-x", "cacheblend-101", "", "epic-<n>"):
        with pytest.raises(ValueError, match=r"known are full|percent"):
            get_method(wrong)
    with pytest.raises(TypeError, match="expected a name"):
        get_method(None)
