# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SPEED, its ablations, SwiftKV and POP as methods of an evaluation: each against a decoder written out in float64."""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack

import pytest
import torch
from kvspeed import PacketAdapter, patch_model
from kvspeed.eval.answer import greedy
from kvspeed.eval.methods import SPEED_METHODS, Context, decode, get_method
from kvspeed.eval.methods.prompt import SharedPrompt
from kvspeed.eval.swiftkv import SwiftKV
from kvspeed.eval.upper import own_kv
from kvspeed.models import base_model
from kvspeed.rule import SpeedSpec, speed_mask
from kvspeed.tuned import remember_spec
from methods_oracle import Case, Oracle
from packet_tools import CHAT_TEMPLATE, embed, masked_logits, random_text, tiny_tokenizer
from tiny_models import ARCHITECTURES, random_ids, tiny_model

LAYERS = 6


def method_of(name: str):
    return get_method(name, SPEED_METHODS)


def case_of(architecture: str = "llama", **options) -> Case:
    model = tiny_model(architecture, layers=LAYERS, seed=random.randrange(10**6), max_position_embeddings=4096)
    case = Case(model, [random.randint(1, 9) for _ in range(random.randint(1, 3))], **options)
    patch_model(model, LAYERS)
    case.context = Context(model, case.tokenizer, **options)
    return case


def answered(method, context, prompt: list[int], answer: list[int], *, at_once: int = 1) -> torch.Tensor:
    """Logits [1 + answer, vocab] of a prompt and of an answer that is forced, some tokens a forward."""
    from kvspeed.models import cache_argument

    with method.serving(context), torch.no_grad():
        logits, cache = method.prefill(context, prompt)
        rows = [logits[None]]
        for begin in range(0, len(answer), at_once):
            given = {cache_argument(context.base): cache, "use_cache": True}
            rows.append(context.model(input_ids=torch.tensor([answer[begin : begin + at_once]]), **given).logits[0])
    return torch.cat(rows)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), atol=2e-3, rtol=1e-3)
    assert float((found.double() - wanted.double()).abs().max()) < 2e-3 * float(wanted.abs().max())


# ---- SPEED ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speed-3", {}),
        ("speed-3-noanchor", {"anchor_tokens": 0}),
        ("selfonly-3", {"upper_attention": "self"}),
        ("cut-3", {}),
        ("full", None),
        ("speed-6", None),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_speed_is_a_forward_with_its_mask(name, options, architecture):
    case = case_of(architecture)
    answer = random_ids(4, seed=random.randrange(1000), bos=False)[0].tolist()
    found = answered(method_of(name), case.context, case.prompt, answer)
    ids, n = [*case.prompt, *answer], len(case.prompt)
    plain = copy.deepcopy(case.model)
    from kvspeed import unpatch_model

    unpatch_model(plain).double()
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    upper = None if options is None else (3, speed_mask(n, len(ids), **options))
    wanted = masked_logits(plain, embed(plain, ids), causal, upper=upper)[n - 1 :]
    close(found, wanted)


def test_weights_say_what_they_were_tuned_for():
    case = case_of()
    remember_spec(case.model, SpeedSpec(4, anchor_tokens=3, boundary="keep"))
    spec = method_of("speed-3").spec(case.context)
    assert (spec.k, spec.anchor_tokens, spec.boundary) == (3, 3, "keep")
    assert method_of("speed-3-noanchor").spec(case.context).anchor_tokens == 0
    assert method_of("selfonly-4").spec(case.context).upper_attention == "self"
    assert method_of("full").spec(case.context) is None and method_of("speed-6").spec(case.context) is None


# ---- POP and SwiftKV -----------------------------------------------------------------------------------------------


def upper_logits(oracle: Oracle, prompt: list[int], answer: list[int], k: int, swift: SwiftKV | None) -> torch.Tensor:
    """POP (no `swift`) or SwiftKV, all tokens at once with a mask: logits [1 + answer, vocab]."""
    ids, n = [*prompt, *answer], len(prompt)
    places = torch.arange(len(ids))
    causal = places[None] <= places[:, None]
    hidden = oracle.embed(ids)
    for layer in range(k):
        query, key, value = oracle.project(layer, hidden)
        attended = oracle.attend(oracle.rotate(query, places), oracle.rotate(key, places), value, causal)
        hidden = oracle.finish(layer, hidden, attended)
    source, rows = hidden, list(range(n - 1, len(ids)))
    weights = {} if swift is None else {name: t.double() for name, t in swift.state_dict().items()}
    if swift is not None:
        oracle.weights["norm_swiftkv"] = weights["norm.weight"]
        normed = oracle.norm(source, "norm_swiftkv")
    hidden = hidden[rows]
    for layer in range(k, oracle.layers):
        query, own_key, own_value = oracle.project(layer, hidden)
        if swift is None:
            _, key, value = oracle.project(layer, source)
            key[rows], value[rows] = own_key, own_value
        else:
            owner = swift.owner(layer)
            group = (owner - k) // swift.share
            shape = (len(ids), oracle.kv_heads, oracle.size)
            key = (normed @ weights[f"keys.{group}.weight"].T).view(shape)
            value = (normed @ weights[f"values.{group}.weight"].T).view(shape)
            name = f"model.layers.{layer}."
            own = oracle.norm(hidden, name + "input_layernorm.weight")
            query = (own @ weights[f"queries.{layer - k}.weight"].T).view(len(rows), oracle.heads, oracle.size)
            if f"{name}self_attn.q_norm.weight" in oracle.weights:
                query = oracle.norm(query, f"{name}self_attn.q_norm.weight")
                key = oracle.norm(key, f"model.layers.{owner}.self_attn.k_norm.weight")
        at = torch.tensor(rows)
        attended = oracle.attend(oracle.rotate(query, at), oracle.rotate(key, places), value, causal[rows])
        hidden = oracle.finish(layer, hidden, attended)
    return oracle.norm(hidden, "model.norm.weight") @ oracle.weights["lm_head.weight"].T


def shaken(model, k: int, share: int) -> SwiftKV:
    """SwiftKV's weights somewhere else than where they start."""
    weights = SwiftKV.for_model(model, k, share)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(0.2 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter))
    return weights.requires_grad_(False)


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_pop_is_what_it_says(architecture, k, at_once):
    case = case_of(architecture)
    answer = random_ids(5, seed=random.randrange(1000), bos=False)[0].tolist()
    found = answered(method_of(f"pop-{k}"), case.context, case.prompt, answer, at_once=at_once)
    close(found, upper_logits(case.oracle, case.prompt, answer, k, None))


@pytest.mark.parametrize(("k", "share"), [(3, 1), (3, 3), (2, 3), (1, 2), (5, 1)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_swiftkv_is_what_it_says(architecture, k, share):
    case = case_of(architecture)
    case.context.swiftkv = shaken(case.model, k, share)
    name = f"swiftkv-{k}" + (f"-share{share}" if share > 1 else "")
    answer = random_ids(5, seed=random.randrange(1000), bos=False)[0].tolist()
    before = {key: module for key, module in case.model.named_modules()}
    for at_once in (1, 2):
        found = answered(method_of(name), case.context, case.prompt, answer, at_once=at_once)
        close(found, upper_logits(case.oracle, case.prompt, answer, k, case.context.swiftkv))
    after = {key: module for key, module in case.model.named_modules()}
    assert before == after and list(before) == list(after)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_projected_kv_is_the_models_own(architecture):
    """Each layer's keys and values of its own input are those it caches."""
    from transformers import DynamicCache

    model = tiny_model(architecture, layers=LAYERS, seed=random.randrange(10**6))
    stack, given, cache = base_model(model), {}, DynamicCache()
    handles = [
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs, index=index: given.__setitem__(index, (args, kwargs)), with_kwargs=True
        )
        for index, layer in enumerate(stack.layers)
    ]
    from kvspeed.models import cache_argument

    ids = random_ids(11, seed=random.randrange(1000))
    with torch.no_grad():
        stack(input_ids=ids, use_cache=True, **{cache_argument(stack): cache})
        for index, layer in enumerate(stack.layers):
            args, kwargs = given[index]
            hidden = args[0] if args else kwargs["hidden_states"]
            key, value = own_kv(layer, hidden, kwargs["position_embeddings"])
            torch.testing.assert_close(key, cache.layers[index].keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(value, cache.layers[index].values, atol=1e-5, rtol=1e-5)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pop_in_every_architecture(architecture):
    """Against the unpatched model on a cache that was filled by hand: lower layers run, upper ones projected."""
    from kvspeed.models import cache_argument
    from transformers import DynamicCache

    k = 4
    model = tiny_model(architecture, layers=LAYERS, seed=random.randrange(10**6))
    ids = random_ids(40, seed=random.randrange(1000))[0].tolist()
    prompt, answer = ids[:37], ids[37:]
    stack = base_model(model)
    cache, given = DynamicCache(config=model.config), {}

    def watch(layer, args, kwargs):
        given[layer.self_attn.layer_idx] = (args[0] if args else kwargs["hidden_states"], kwargs["position_embeddings"])

    handles = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in stack.layers]
    name = cache_argument(stack)
    whole = DynamicCache(config=model.config)
    with torch.no_grad():
        stack(input_ids=torch.tensor([prompt[:-1]]), use_cache=True, **{name: whole})
        for handle in handles:
            handle.remove()
        for index, layer in enumerate(stack.layers):
            if index < k:
                cache.update(*own_kv(layer, given[index][0], given[index][1]), index)
            else:
                cache.update(*own_kv(layer, given[k][0], given[index][1]), index)
        wanted = torch.cat(
            [
                model(input_ids=torch.tensor([[token]]), use_cache=True, **{name: cache}).logits[0]
                for token in [prompt[-1], *answer]
            ]
        )
    patch_model(model, LAYERS)
    context = Context(model, tiny_tokenizer(template=CHAT_TEMPLATE))
    close(answered(method_of(f"pop-{k}"), context, prompt, answer), wanted)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("phi3", "olmo2")])
def test_swiftkv_before_training_at_the_last_layer(architecture):
    """With one upper layer, its input is layer k - 1's output: before training SwiftKV is the model itself."""
    model = patch_model(tiny_model(architecture, layers=3, seed=random.randrange(10**6)), 3)
    context = Context(model, tiny_tokenizer(template=CHAT_TEMPLATE))
    ids = random_ids(20, seed=random.randrange(1000))[0].tolist()
    full, swift, pop = (
        answered(method_of(name), context, ids[:16], ids[16:]) for name in ("full", "swiftkv-2", "pop-2")
    )
    close(swift, full)
    close(pop, full)


@pytest.mark.parametrize("architecture", ["phi3", "olmo2"])
def test_swiftkv_refuses_what_it_cannot_split(architecture):
    with pytest.raises(ValueError, match="SwiftKV is there for Llama"):
        SwiftKV.for_model(tiny_model(architecture, layers=3), 2)


def test_swiftkv_does_not_share_across_kinds_of_layers():
    SwiftKV.for_model(tiny_model("smollm3", layers=6), 3, 2)
    with pytest.raises(ValueError, match="share: 3 layers in a row"):
        SwiftKV.for_model(tiny_model("smollm3", layers=6), 3, 3)


# ---- what they have in common --------------------------------------------------------------------------------------

NAMES = (
    "full",
    "speed-3",
    "speed-3-noanchor",
    "selfonly-4",
    "swiftkv-3",
    "swiftkv-2-share2",
    "pop-3",
    "packet+speed-4",
)


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_those_of_the_cache(name):
    case = case_of()
    context = case.context
    context.adapter = PacketAdapter.for_model(case.model, header=2, trailer=1)
    method = method_of(name)
    with method.serving(context):
        prepared = method.prepare(context, case.documents)
        _, cache = method.first_token(prepared, case.question)
        per_token = context.token_bytes // LAYERS
        layers = {"speed-3": 3, "speed-3-noanchor": 3, "selfonly-4": 4, "swiftkv-2-share2": 4, "packet+speed-4": 4}
        question = per_token * layers.get(name, LAYERS) * len(case.question)
        assert method.kv_bytes(prepared) + question == cache.kv_bytes()


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("packet")])
def test_flops_are_those_that_torch_counts(name):
    from torch.utils.flop_counter import FlopCounterMode

    case = case_of()
    case.prompt = [*case.prompt, *random_ids(60, seed=1, bos=False)[0].tolist()]
    method = method_of(name)
    with method.serving(case.context), FlopCounterMode(display=False) as counter:
        method.prefill(case.context, case.prompt)
    counted = counter.get_total_flops()
    formula = method.prefill_flops(case.context, len(case.prompt))
    shape, n = case.context.shape, len(case.prompt)
    depth = {"full": LAYERS, "selfonly-4": 4, "swiftkv-2-share2": 2}.get(name, 3)
    # torch counts no attention here: neither the CPU's SDPA nor our kernel is known to it
    lower = depth * shape.pair * n * (n + 1) // 2
    upper = (LAYERS - depth) * shape.pair * n
    assert 0 <= formula - lower - counted <= upper, (counted, formula, lower)


@pytest.mark.parametrize("name", NAMES)
def test_shared_documents_change_no_answer(name):
    case = case_of(max_new_tokens=8)
    context, method = case.context, method_of(name)
    context.adapter = PacketAdapter.for_model(case.model, header=2, trailer=1)
    shared = method.shared(context)
    if name.startswith("packet"):
        assert shared is None
        return
    assert isinstance(shared, SharedPrompt)
    for turn in range(3):
        question = context.question_ids(random_text(random.randint(1, 5), random.randrange(10**6)))
        with method.serving(context):
            plain = decode(
                context, *method.first_token(method.prepare(context, case.documents), question), max_new_tokens=8
            )
        with shared.serving(context):
            logits, cache = shared.first_token(shared.prepare(context, case.documents), question)
            drafts = [plain, [*plain[: turn + 1], 7, 8]]
            assert greedy(context, logits, cache, drafts[turn % 2 :], max_new_tokens=8) == plain, name


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_afterwards_what_it_was(name):
    case = case_of()
    case.context.adapter = PacketAdapter.for_model(case.model, header=2, trailer=1)
    before = answered(method_of("full"), case.context, case.prompt, [5, 6])
    method = method_of(name)
    with pytest.raises(ZeroDivisionError), method.serving(case.context):
        method.first_token(method.prepare(case.context, case.documents), case.question)
        raise ZeroDivisionError
    assert torch.equal(answered(method_of("full"), case.context, case.prompt, [5, 6]), before)
    assert case.context.spec is None and not any(layer._forward_pre_hooks for layer in case.context.base.layers)


def test_packets_of_depth_k_are_packets_under_speed():
    """`packet+speed` is what `kvspeed.generate` gives on the model patched to k."""
    from kvspeed import assemble, build_packet
    from kvspeed.packet import build_preamble
    from kvspeed.samples import document_text

    case = case_of(max_new_tokens=6)
    context = case.context
    context.adapter = PacketAdapter.for_model(case.model, header=2, trailer=1)
    method = method_of("packet+speed-4")
    with method.serving(context):
        found = decode(
            context, *method.first_token(method.prepare(context, case.documents), case.question), max_new_tokens=6
        )
    plain = get_method("packet")
    with_all = decode(
        context, *plain.first_token(plain.prepare(context, case.documents), case.question), max_new_tokens=6
    )
    patch_model(case.model, 4)
    packets = [build_packet(case.model, case.tokenizer, document_text(t), context.adapter) for t in case.documents]
    preamble = build_preamble(case.model, case.tokenizer, case.preamble)
    cache = assemble(packets, model=case.model, preamble=preamble)
    ids = torch.tensor([[*cache.prefix_ids, *case.question]])
    wanted = case.model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=6, do_sample=False
    )
    assert found == wanted[0, ids.shape[1] :].tolist()
    assert len(with_all) == 6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("speed-0", "k: is 0"),
        ("pop-0", "k: is 0"),
        ("swiftkv-0", "k: is 0"),
        ("swiftkv-3-share0", "share: is 0"),
        ("speed", r"'speed' is not known \(did you mean speed-<n>\?\); known are full, speed-<n>"),
    ],
)
def test_wrong_names(name, words):
    with pytest.raises(ValueError, match=words):
        method_of(name)


@pytest.mark.parametrize("name", ["speed-7", "pop-7", "swiftkv-6", "packet+speed-9"])
def test_too_deep(name):
    case = case_of()
    method = method_of(name)
    with ExitStack() as stack, pytest.raises(ValueError, match=r"k: is \d"):
        stack.enter_context(method.serving(case.context))


def test_swiftkv_weights_for_another_depth():
    case = case_of()
    case.context.swiftkv = SwiftKV.for_model(case.model, 4)
    with pytest.raises(ValueError, match="weights given are for k = 4 and share = 1"):
        method_of("swiftkv-3").serving(case.context).__enter__()
