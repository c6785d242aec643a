# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The lm-evaluation-harness through a stub of it: likelihoods and texts are those of the method, request by request."""

from __future__ import annotations

import random
import sys
import types
from abc import ABC
from types import SimpleNamespace

import pytest
import torch
from kvspeed import patch_model, unpatch_model
from kvspeed.eval.harness import Answerer, evaluate, harness_model
from kvspeed.rule import speed_mask
from packet_tools import CHAT_TEMPLATE, embed, masked_logits, random_text, tiny_tokenizer
from tiny_models import tiny_model

LAYERS = 4


@pytest.fixture
def harness(monkeypatch):
    """lm_eval as far as it is used: an abstract LM, and `simple_evaluate`, which asks what the task holds."""

    class LM(ABC):  # noqa: B024
        def __init__(self) -> None:
            self.rank, self.world_size = 0, 1

    def simple_evaluate(model, tasks, **options):
        asked = [SimpleNamespace(args=("w200 w201", {"until": ["w9"], "max_gen_toks": 3}))]
        return {"tasks": tasks, "options": options, "said": model.generate_until(asked)}

    package, api, module = (types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"))
    module.LM, package.simple_evaluate = LM, simple_evaluate
    for one in (package, api, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)


def model_of(architecture: str = "llama"):
    return tiny_model(architecture, layers=LAYERS, seed=random.randrange(10**6))


def asked(*pairs):
    return [SimpleNamespace(args=pair) for pair in pairs]


def words(count: int) -> str:
    return random_text(count, random.randrange(10**6))


@pytest.mark.parametrize(
    ("method", "options"), [("full", None), ("speed-2", {}), ("speed-2-noanchor", {"anchor_tokens": 0})]
)
@pytest.mark.parametrize("bos", [False, True])
def test_likelihoods_are_those_of_one_masked_forward(harness, method, options, bos):
    model, tokenizer = model_of(), tiny_tokenizer(bos=bos)
    one, other, more = words(7), words(3), [words(2), words(3), words(1)]
    pairs = [(one, f" {more[0]}"), (one, f" {more[1]}"), (one + " ", more[2]), (other, f" {more[2]}"), ("", more[0])]
    found = harness_model(model, tokenizer, method).loglikelihood(asked(*pairs))
    unpatch_model(model).double()
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        prompt = tokenizer(context, add_special_tokens=bos)["input_ids"] if context else [1]
        answer = tokenizer(continuation, add_special_tokens=False)["input_ids"]
        ids, n = [*prompt, *answer], len(prompt)
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        upper = None if options is None else (2, speed_mask(n, len(ids), **options))
        rows = masked_logits(model, embed(model, ids), causal, upper=upper)[n - 1 : -1].log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(answer)[:, None]).sum()
        assert score == pytest.approx(float(wanted), rel=1e-4, abs=1e-3)
        assert greedy == (rows.argmax(-1).tolist() == answer)


def test_continuations_of_one_context_share_its_prefill(harness, monkeypatch):
    model, tokenizer = model_of(), tiny_tokenizer()
    answerer = Answerer(model, tokenizer, "speed-2")
    calls = []
    prefill = answerer.method.prefill
    monkeypatch.setattr(answerer.method, "prefill", lambda *args: calls.append(1) or prefill(*args))
    one, pairs = words(5), [words(2) for _ in range(4)]
    together = answerer.likelihoods([(one, f" {text}") for text in pairs])
    assert len(calls) == 1
    alone = [answerer.likelihoods([(one, f" {text}")])[0] for text in pairs]
    assert [pytest.approx(score, abs=1e-4) for score, _ in alone] == [score for score, _ in together]


@pytest.mark.parametrize("method", ["full", "speed-2", "selfonly-2", "swiftkv-2", "pop-2"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_every_method_answers(harness, method, architecture):
    model, tokenizer = model_of(architecture), tiny_tokenizer(template=CHAT_TEMPLATE)
    lm = harness_model(model, tokenizer, method)
    ((one, _), (two, _)) = lm.loglikelihood(asked(("w200 w201", " w202"), ("w200 w201", " w203 w204")))
    assert one < 0 and two < 0
    assert len(lm.generate_until(asked(("w200 w201", {"max_gen_toks": 4})))[0].split()) <= 4
    assert lm.loglikelihood_rolling(asked(("w200 w201 w202",)))[0] < 0


def test_texts_are_greedy_and_end_at_a_stop(harness):
    model, tokenizer = model_of(), tiny_tokenizer()
    lm = harness_model(model, tokenizer, "full")
    (text,) = lm.generate_until(asked(("w200 w201", {"max_gen_toks": 9})))
    ids = tokenizer("w200 w201", return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert text == tokenizer.decode(wanted[0, 2:], skip_special_tokens=True)
    stop = text.split()[4]
    (short,) = lm.generate_until(asked(("w200 w201", {"max_gen_toks": 9, "until": ["never", stop]})))
    assert short == text[: text.index(stop)]
    with pytest.raises(ValueError, match="do_sample"):
        lm.generate_until(asked(("w200", {"do_sample": True, "temperature": 0.7})))


def test_a_whole_text_has_no_prompt(harness):
    """All but the first token is answer, so that SPEED gives the full model's number; long texts go by windows."""
    model, tokenizer = model_of(), tiny_tokenizer()
    text = words(20)
    ids = [1, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    wanted = float(rows.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    for method in ("full", "speed-2"):
        assert harness_model(model, tokenizer, method).loglikelihood_rolling(asked((text,)))[0] == pytest.approx(
            wanted, rel=1e-4
        )
    answerer = Answerer(model, tokenizer, "full")
    answerer.limit = 8
    ids, total = ids[1:], 0.0
    for begin in range(0, 20, 7):
        part = ids[begin : begin + 7]
        before = [1] if begin == 0 else ids[max(0, begin + len(part) - 8) : begin]
        with torch.no_grad():
            rows = model(torch.tensor([[*before, *part]])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        total += float(rows.gather(1, torch.tensor(part)[:, None]).sum())
    assert answerer.rolling(text) == pytest.approx(total, rel=1e-4)


def test_one_call_evaluates(harness):
    found = evaluate(model_of(), tiny_tokenizer(), ("gsm8k",), method="pop-2", limit=3)
    assert found["tasks"] == ["gsm8k"] and found["options"] == {"limit": 3} and len(found["said"]) == 1


def test_a_chat_is_the_templates(harness):
    lm = harness_model(model_of(), tiny_tokenizer(template=CHAT_TEMPLATE), "full")
    assert lm.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>[user]hi</s>[assistant]"
    assert lm.chat_template(True) == CHAT_TEMPLATE and lm.chat_template(False) is None


def test_refusals(harness, monkeypatch):
    model, tokenizer = model_of(), tiny_tokenizer()
    for method, words_ in (("speed-9", "k: is 9"), ("sped", "not known"), ("packet", "has packets")):
        with pytest.raises(ValueError, match=words_):
            harness_model(model, tokenizer, method)
    with pytest.raises(ValueError, match="leaves no room"):
        Answerer(model, tokenizer, "full").generate("w200", {"max_gen_toks": 10**6})
    patch_model(model, 2)
    lm = harness_model(model, tokenizer, "full")  # a patch with a depth is taken off
    assert lm.loglikelihood(asked(("w200", " w201")))[0][0] < 0
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ImportError, match=r"pip install 'kvspeed\[harness\]'"):
        harness_model(model, tokenizer)
