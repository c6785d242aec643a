# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""patch_model and unpatch_model: what they take, what they refuse, and that nothing is left behind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import kvspeed
import numpy as np
import pytest
import torch
import transformers
from kvspeed import SpeedSpec
from kvspeed.install import patched
from kvspeed.state import state_of
from speed_tools import (
    CACHE,
    LAYERS,
    K,
    answer,
    close,
    conversation,
    decoder,
    fresh,
    ids_of,
    oracle,
    plain,
    poison,  # noqa: F401
    speedy,
)
from tiny_models import tiny_config, tiny_model
from torch import nn

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
)


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a patch could change, its weights aside."""
    found: dict[str, Any] = {"config": model.config.to_dict(), "generation": model.generation_config.to_dict()}
    for name, module in model.named_modules():
        found[name] = (
            type(module),
            sorted(key for key in module.__dict__ if not key.startswith("_is_full_backward")),
            [len(getattr(module, hooks)) for hooks in HOOKS],
            id(module.__dict__.get("config")),
            [(key, buffer.dtype, id(buffer)) for key, buffer in module.named_buffers(recurse=False)],
        )
    return found


def speeds(model: Any, architecture: str = "llama", k: int = K, **options: Any) -> None:
    """The model generates under SPEED as the oracle says."""
    found = answer(model, ids_of(12), n=3)
    wanted = oracle(plain(architecture), found.sequences[0], conversation((12, 3)), k, **options)
    close(found.logits[0], wanted[11:-1])


def is_plain(model: Any, architecture: str = "llama") -> None:
    ids = ids_of(12)
    with torch.no_grad():
        close(model(ids).logits, plain(architecture)(ids).logits)
    assert torch.equal(answer(model, ids).sequences, answer(plain(architecture), ids).sequences)


# ---- unpatching -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, K])
def test_unpatching_leaves_no_trace(architecture: str, k: int | None) -> None:
    model = fresh(architecture)
    before = traces(model)
    assert kvspeed.patch_model(model, k) is model
    assert traces(model) != before
    answer(model, ids_of(6), n=2)
    assert kvspeed.unpatch_model(model) is model
    assert traces(model) == before
    is_plain(model, architecture)
    assert kvspeed.unpatch_model(model) is model and traces(model) == before


def test_patching_twice_replaces_the_patch() -> None:
    model = fresh("llama")
    before = traces(model)
    kvspeed.patch_model(model, 2, boundary="keep")
    kvspeed.patch_model(model, K)
    once = traces(model)
    speeds(model)
    kvspeed.patch_model(model, K)
    assert [value[2] for key, value in traces(model).items() if isinstance(value, tuple)] == [
        value[2] for value in once.values() if isinstance(value, tuple)
    ]
    speeds(model)
    kvspeed.patch_model(model, None)
    is_plain(model)
    kvspeed.patch_model(model, 5, anchor_tokens=2)
    speeds(model, k=5, anchor_tokens=2)
    kvspeed.unpatch_model(model)
    assert traces(model) == before


def test_the_context_manager() -> None:
    model = fresh("llama")
    before = traces(model)
    with patched(model) as state:
        assert state is state_of(model) and state.spec is None
    assert traces(model) == before
    with pytest.raises(KeyError), patched(model, SpeedSpec(K)):
        speeds(model)
        raise KeyError
    assert traces(model) == before and state_of(model) is None
    kvspeed.patch_model(model, K, boundary="keep")
    with patched(model) as state:
        assert state.spec == SpeedSpec(K, boundary="keep")
    with patched(model, SpeedSpec(3), force=True):
        speeds(model, k=3)
    speeds(model, boundary="keep")


# ---- what is refused, and leaves everything as it was ---------------------------------------------------------------


def unknown(kind: str) -> nn.Module:
    small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))
    if kind == "gpt_neox":
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**small, intermediate_size=64))
    if kind == "mixtral":
        config = transformers.MixtralConfig(**small, intermediate_size=64, num_local_experts=2, num_key_value_heads=2)
        return transformers.MixtralForCausalLM(config)
    return nn.Linear(3, 3)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "mixtral", "Linear"])
def test_an_unknown_architecture_is_refused_by_name(kind: str) -> None:
    model = unknown(kind)
    keys = sorted(model.__dict__)
    with pytest.raises(ValueError) as error:
        kvspeed.patch_model(model)
    assert kind in str(error.value)
    for known in ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "granite", "gemma2", "gemma3_text"):
        assert f"({known})" in str(error.value)
    assert sorted(model.__dict__) == keys
    assert kvspeed.unpatch_model(fresh("llama")) is not None


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": True}, TypeError, "k is True"),
    ({"k": 4.0}, TypeError, "k is 4.0"),
    ({"k": "4"}, TypeError, "k is '4'"),
    ({"k": np.float32(4)}, TypeError, "k is"),
    ({"k": [4]}, TypeError, "k is"),
    ({"k": 0}, ValueError, "k is 0"),
    ({"k": -1}, ValueError, "k is -1"),
    ({"k": LAYERS + 1}, ValueError, f"k is {LAYERS + 1}.*{LAYERS} layers"),
    ({"k": K, "anchor_tokens": -1}, ValueError, "anchor_tokens is -1"),
    ({"k": K, "anchor_tokens": 1.0}, TypeError, "anchor_tokens"),
    ({"k": K, "boundary": "dropped"}, ValueError, "boundary is 'dropped'.*'transient', 'keep'"),
    ({"k": K, "upper_attention": "none"}, ValueError, "upper_attention is 'none'"),
    ({"k": K, "turns": "new"}, ValueError, "turns is 'new'"),
    ({"k": None, "turns": "new"}, ValueError, "turns is 'new'"),
]


@pytest.mark.parametrize(("given", "error", "says"), BAD)
def test_bad_arguments_change_nothing(given: dict[str, Any], error: type[Exception], says: str) -> None:
    model = fresh("llama")
    before = traces(model)
    with pytest.raises(error, match=says):
        kvspeed.patch_model(model, **given)
    assert traces(model) == before
    kvspeed.patch_model(model, K)  # one that is patched stays patched as it is
    before = traces(model)
    with pytest.raises(error, match=says):
        kvspeed.patch_model(model, **given)
    assert traces(model) == before
    speeds(model)


@pytest.mark.parametrize("k", [np.int64(K), torch.tensor(K)])
def test_integers_of_other_libraries(k: Any) -> None:
    """An int or a clear refusal, never a half of each."""
    model = fresh("llama")
    try:
        kvspeed.patch_model(model, k)
    except TypeError as error:
        assert "must be an int" in str(error) and state_of(model) is None
    else:
        speeds(model)


def test_layers_that_share_kv() -> None:
    model = fresh("llama")
    model.config.num_kv_shared_layers = 2
    for given in ({"k": K}, {"deep_layers": [2]}):
        with pytest.raises(ValueError, match="last 2 layers share the KV of lower ones"):
            kvspeed.patch_model(model, **given)  # type: ignore[arg-type]
    assert state_of(model) is None
    kvspeed.patch_model(model, LAYERS)
    with pytest.raises(ValueError, match="last 2 layers share the KV"):
        model.generate(ids_of(5), k=K)
    is_plain(model)


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError):
        kvspeed.patch_model(fresh("llama"), K, 1)  # type: ignore[misc]


def test_a_model_without_layers() -> None:
    model = tiny_model("llama", layers=1)
    model.model.layers = nn.ModuleList()
    with pytest.raises(ValueError):
        kvspeed.patch_model(model)
    assert state_of(model) is None


def test_prompt_tuning_is_refused_and_adapters_are_not() -> None:
    peft = pytest.importorskip("peft")
    virtual = peft.get_peft_model(fresh("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"PROMPT_TUNING.*virtual tokens"):
        kvspeed.patch_model(virtual, K)
    model = peft.get_peft_model(fresh("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    before = traces(model.get_base_model())
    assert kvspeed.patch_model(model, K) is model
    found = answer(model, input_ids=ids_of(12), n=3)
    close(
        found.logits[0], oracle(plain("llama"), found.sequences[0], conversation((12, 3)))[11:-1]
    )  # LoRA begins at zero
    kvspeed.unpatch_model(model)
    assert traces(model.get_base_model()) == before
    merged = kvspeed.patch_model(model, K).merge_and_unload()
    speeds(merged)
    is_plain(kvspeed.unpatch_model(merged))


# ---- copies, shared parts, files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_independent(how: str) -> None:
    model = speedy("llama")
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert state_of(other) is not None and state_of(other) is not state_of(model)
    speeds(other)
    kvspeed.unpatch_model(model)
    is_plain(model)
    speeds(other)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    speeds(other)
    kvspeed.patch_model(other, 2)
    speeds(other, k=2)
    is_plain(kvspeed.unpatch_model(other))


def test_two_models_of_one_config_object() -> None:
    config = tiny_config("llama", layers=LAYERS)
    config._attn_implementation = "sdpa"
    models = [transformers.LlamaForCausalLM(config).eval() for _ in range(2)]
    for model in models:
        model.load_state_dict(plain("llama").state_dict())
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    assert models[0].config is models[1].config
    before = config.to_dict()
    kvspeed.patch_model(models[0], K)
    is_plain(models[1])
    kvspeed.patch_model(models[1], 2, boundary="keep")
    speeds(models[0])
    speeds(models[1], k=2, boundary="keep")
    kvspeed.unpatch_model(models[0])
    is_plain(models[0])
    speeds(models[1], k=2, boundary="keep")
    assert config.to_dict() == before


@pytest.mark.parametrize("k", [None, K])
def test_saved_while_patched(k: int | None, tmp_path: Path) -> None:
    model = speedy("gemma3_text", k, boundary="keep")
    assert model.state_dict().keys() == plain("gemma3_text").state_dict().keys()
    model.save_pretrained(tmp_path / "patched")
    plain("gemma3_text").save_pretrained(tmp_path / "plain")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "patched" / name).read_text() == (tmp_path / "plain" / name).read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "patched").eval()
    assert state_of(loaded) is None
    loaded.generation_config.eos_token_id = None
    is_plain(loaded, "gemma3_text")


# ---- numbers and switches -------------------------------------------------------------------------------------------


def frequencies(model: nn.Module) -> list[torch.Tensor]:
    rotary = [module for name, module in decoder(model).named_modules() if name.startswith("rotary_emb")]
    return [buffer for module in rotary for name, buffer in module.named_buffers() if name.endswith("inv_freq")]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3_text"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_cast_to_bfloat16(architecture: str, when: str) -> None:
    """The cast rounds inv_freq, which a patched model puts right, and an unpatched one has back."""
    model, exact = fresh(architecture), frequencies(plain(architecture))
    if when == "after":
        kvspeed.patch_model(model, K)
    model.bfloat16()
    rounded = [buffer.clone() for buffer in frequencies(model)]
    assert all(buffer.dtype == torch.bfloat16 for buffer in rounded)
    if when == "before":
        kvspeed.patch_model(model, K)
    found = answer(model, ids_of(9), n=2)
    assert all(torch.equal(a, b) for a, b in zip(frequencies(model), exact, strict=True))
    assert all(buffer.dtype == torch.float32 for buffer in frequencies(model))
    reference = tiny_model(architecture, layers=LAYERS).bfloat16()
    for module in (reference, plain(architecture)):
        assert len(frequencies(module)) == len(exact)
    for buffer, right in zip(frequencies(reference), exact, strict=True):
        buffer.data = right.clone()
    wanted = oracle(reference, found.sequences[0], conversation((9, 2)))
    close(found.logits[0], wanted[8:-1], 0.2)
    kvspeed.unpatch_model(model)
    assert all(torch.equal(a, b) for a, b in zip(frequencies(model), rounded, strict=True))


@pytest.mark.parametrize("k", [None, K])
def test_attention_switched_while_patched(k: int | None) -> None:
    model = speedy("llama", k)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        speeds(model) if k else is_plain(model)
    kvspeed.unpatch_model(model)
    assert model.config._attn_implementation == "sdpa"
    is_plain(model)


def test_hidden_states_and_attentions_at_full_depth() -> None:
    """As the unpatched model gives them."""
    chosen = {"attn_implementation": "eager"}
    model, ids = fresh("llama", **chosen), ids_of(9)
    wanted = answer(model, ids, n=3, output_hidden_states=True, output_attentions=True).output
    kvspeed.patch_model(model, None)
    found = answer(model, ids, n=3, output_hidden_states=True, output_attentions=True).output
    for part in ("hidden_states", "attentions"):
        for one, two in zip(getattr(found, part), getattr(wanted, part), strict=True):
            assert len(one) == len(two) == LAYERS + (part == "hidden_states")
            for a, b in zip(one, two, strict=True):
                close(a, b)


def test_hidden_states_under_speed() -> None:
    """Every token below k, the deep columns above."""
    model = speedy("llama")
    with torch.no_grad():
        found = model.generate(
            ids_of(9), max_new_tokens=3, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
        )
    widths = [[state.shape[1] for state in step] for step in found.hidden_states]
    assert widths == [[9] * (K + 1) + [2] * (LAYERS - K)] + [[1] * (LAYERS + 1)] * 2


def test_attentions_under_speed() -> None:
    """Weights of the layers < k are right; above k there are none to show, or the call is refused."""
    chosen = {"attn_implementation": "eager"}
    model, ids = speedy("llama", model=chosen), ids_of(9)
    try:
        found = answer(model, ids, n=2, output_attentions=True)
    except ValueError as error:
        assert "output_attentions" in str(error)
        return
    with torch.no_grad():
        wanted = plain("llama", **chosen)(ids, output_attentions=True).attentions
    for layer in range(K):
        close(found.output.attentions[0][layer], wanted[layer])
    assert all(weights is None for weights in found.output.attentions[0][K:])
    close(found.logits[0], oracle(plain("llama", **chosen), found.sequences[0], conversation((9, 2)))[8:-1])


def test_a_bare_decoder_stack() -> None:
    """The model without its head can be patched too."""
    model = fresh("llama").model
    kvspeed.patch_model(model, K)
    cache = kvspeed.KVCache(model.config)
    cache.begin_turn(9)
    ids = ids_of(9)
    with torch.no_grad():
        out = model(ids, use_cache=True, **{CACHE: cache})
    assert out.last_hidden_state.shape == (1, 2, 64)
    with torch.no_grad():
        logits = plain("llama").lm_head(out.last_hidden_state[0, -1:])
    close(logits, oracle(plain("llama"), ids[0], conversation((9, 0)))[-1:])
    kvspeed.unpatch_model(model)
    with torch.no_grad():
        close(model(ids).last_hidden_state, plain("llama").model(ids).last_hidden_state)
