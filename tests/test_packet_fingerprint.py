# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""model_fingerprint and tensor_digest: what must change them and what must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kvspeed.digest import tensor_digest
from kvspeed.fingerprint import model_fingerprint
from tiny_models import tiny_model

HERE = Path(__file__).resolve().parent


# --- tensor_digest ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (7,), (3, 5), (1024,), (65, 129), (300, 77)])
def test_digest_sees_each_change_of_one_element(dtype, shape):
    values = torch.randint(-100, 100, shape, dtype=torch.int8).float().to(dtype)
    before = tensor_digest(values)
    assert before == tensor_digest(values.clone()), "the same values must give the same digest"
    flat = values.clone().reshape(-1).view(torch.uint8)
    for index in torch.randint(0, max(flat.numel(), 1), (5,)).tolist() if flat.numel() else []:
        changed = flat.clone()
        changed[index] ^= 1
        assert tensor_digest(changed.view(dtype).reshape(shape)) != before


def test_digest_sees_places_shape_and_dtype():
    values = torch.randn(64, 1024)
    before = tensor_digest(values)
    swapped = values.clone()
    swapped[[3, 40]] = swapped[[40, 3]]
    columns = values.clone()
    columns[:, [0, 9]] = columns[:, [9, 0]]
    others = [swapped, columns, values.t().contiguous(), values.view(1024, 64), values.view(torch.int32)]
    assert before not in [tensor_digest(other) for other in others]


def test_digest_does_not_depend_on_layout_or_address():
    values = torch.randn(40, 2048).bfloat16()
    before = tensor_digest(values)
    assert tensor_digest(values.t().contiguous().t()) == before
    odd = torch.empty(values.numel() + 1, dtype=torch.bfloat16)[1:].view(values.shape).copy_(values)
    assert odd.data_ptr() % 8, "the test needs an odd address"
    assert tensor_digest(odd) == before


def test_digest_refuses_what_has_no_bits():
    with pytest.raises(ValueError, match="meta device"):
        tensor_digest(torch.empty(3, device="meta"))


# --- model_fingerprint ---


def test_same_weights_agree_and_seeds_differ(architecture):
    first = model_fingerprint(tiny_model(architecture, layers=3, seed=1))
    assert len(first) == 64 and first == model_fingerprint(tiny_model(architecture, layers=3, seed=1))
    assert first != model_fingerprint(tiny_model(architecture, layers=3, seed=2))


def test_dtype_and_configuration_count():
    base = model_fingerprint(tiny_model("llama", layers=3))
    assert base != model_fingerprint(tiny_model("llama", layers=3, dtype=torch.bfloat16))
    assert base != model_fingerprint(tiny_model("llama", layers=3, theta=5000.0))
    assert base != model_fingerprint(tiny_model("llama", layers=3, rope={"rope_type": "linear", "factor": 2.0}))
    assert base != model_fingerprint(tiny_model("llama", layers=3, rms_norm_eps=1e-3))
    assert base == model_fingerprint(tiny_model("llama", layers=3, attn_implementation="eager"))


def test_every_parameter_counts(architecture):
    model = tiny_model(architecture, layers=2)
    before = model_fingerprint(model)
    for name, weight in model.named_parameters():
        index = int(torch.randint(0, weight.numel(), ()))
        with torch.no_grad():
            old = weight.view(-1)[index].item()
            weight.view(-1)[index] = old + 1
            assert model_fingerprint(model) != before, f"one element of {name}"
            weight.view(-1)[index] = old
    assert model_fingerprint(model) == before


def test_edit_through_data_is_noticed_by_the_probe():
    model = tiny_model("llama", layers=2)
    before = model_fingerprint(model)
    weight = model.model.layers[1].self_attn.k_proj.weight
    version = weight._version
    weight.data.add_(1e-3)  # as merging an adapter does
    assert weight._version == version, "the test needs an edit that the version counter does not see"
    assert model_fingerprint(model) != before


def test_edit_of_one_element_through_data_is_seen_on_refresh():
    model = tiny_model("llama", layers=2)
    before = model_fingerprint(model)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1.0
    assert model_fingerprint(model, refresh=True) != before


def test_replaced_parameter_is_noticed():
    model = tiny_model("llama", layers=2)
    before = model_fingerprint(model)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    assert model_fingerprint(model) != before


def test_probe_reads_no_whole_weight(monkeypatch):
    import kvspeed.fingerprint

    model = tiny_model("llama", layers=2)
    before = model_fingerprint(model)
    monkeypatch.setattr(kvspeed.fingerprint, "tensor_digest", lambda tensor: pytest.fail("read all weights again"))
    assert model_fingerprint(model) == before


def test_stable_across_processes():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tiny_models import tiny_model\nfrom kvspeed.fingerprint import model_fingerprint\n"
        "print(model_fingerprint(tiny_model('gemma3_text', layers=3, seed=5)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(HERE)], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.strip() == model_fingerprint(tiny_model("gemma3_text", layers=3, seed=5))


def test_patching_changes_nothing():
    from kvspeed import patch_model, unpatch_model

    model = tiny_model("llama", layers=3)
    before = model_fingerprint(model)
    assert model_fingerprint(patch_model(model, k=2)) == before
    assert model_fingerprint(model, refresh=True) == before
    assert model_fingerprint(unpatch_model(model)) == before


def test_tied_weights_and_non_contiguous_weights():
    tied = tiny_model("llama", layers=2, tie_word_embeddings=True)
    before = model_fingerprint(tied)
    weight = tied.model.layers[0].mlp.down_proj
    weight.weight = torch.nn.Parameter(weight.weight.detach().t().contiguous().t())
    assert not weight.weight.is_contiguous()
    assert model_fingerprint(tied) == before, "the layout of a weight in memory does not count"
    weight.weight.data.mul_(1.5)
    assert model_fingerprint(tied) != before


def test_compiled_wrapper_agrees():
    model = tiny_model("llama", layers=2)
    assert model_fingerprint(torch.compile(model)) == model_fingerprint(model)


@pytest.mark.parametrize("given", [None, "model", 3, {}])
def test_refuses_what_is_no_model(given):
    with pytest.raises(TypeError, match="model"):
        model_fingerprint(given)


def test_refuses_weights_that_are_not_loaded():
    with pytest.raises(ValueError, match="meta device"):
        model_fingerprint(tiny_model("llama", layers=2).to("meta"))


# --- PEFT ---


def lora(model, *, seed=0, zero=False, name="default", **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, config, adapter_name=name)
    if not zero:
        for key, weight in wrapped.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=0.1)
    return wrapped.eval()


def test_lora_without_effect_is_the_bare_model():
    bare = model_fingerprint(tiny_model("llama", layers=2))
    assert model_fingerprint(lora(tiny_model("llama", layers=2), zero=True)) == bare
    wrapped = lora(tiny_model("llama", layers=2))
    active = model_fingerprint(wrapped)
    assert active != bare
    with wrapped.disable_adapter():
        assert model_fingerprint(wrapped) == bare
    assert model_fingerprint(wrapped) == active


def test_lora_weights_and_scaling_count_and_the_name_does_not():
    first = model_fingerprint(lora(tiny_model("llama", layers=2), seed=1))
    assert first != model_fingerprint(lora(tiny_model("llama", layers=2), seed=2))
    assert first != model_fingerprint(lora(tiny_model("llama", layers=2), seed=1, lora_alpha=64))
    assert first == model_fingerprint(lora(tiny_model("llama", layers=2), seed=1, name="other"))


def test_merging_and_unloading():
    wrapped = lora(tiny_model("llama", layers=2))
    bare, active = model_fingerprint(tiny_model("llama", layers=2)), model_fingerprint(wrapped)
    versions = {name: weight._version for name, weight in wrapped.named_parameters()}
    wrapped.merge_adapter()
    base = {name for name, weight in wrapped.named_parameters() if weight._version != versions[name]}
    assert not base, "PEFT merges through .data; if it no longer does, this test has lost its point"
    merged = model_fingerprint(wrapped)
    assert merged not in (active, bare)
    assert model_fingerprint(wrapped.merge_and_unload()) == merged, "unloading a merged adapter changes nothing"


def test_disabled_while_merged_is_refused():
    wrapped = lora(tiny_model("llama", layers=2))
    wrapped.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"), wrapped.disable_adapter():
        model_fingerprint(wrapped)


def test_second_adapter_counts_only_while_active():
    peft = pytest.importorskip("peft")
    wrapped = lora(tiny_model("llama", layers=2), seed=1)
    first = model_fingerprint(wrapped)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    wrapped.add_adapter("second", config)
    assert model_fingerprint(wrapped) == first
    wrapped.set_adapter("second")
    assert model_fingerprint(wrapped) != first


def test_trained_copies_of_modules_count_where_they_are_used():
    bare = model_fingerprint(tiny_model("llama", layers=2))
    wrapped = lora(tiny_model("llama", layers=2), zero=True, modules_to_save=["lm_head"])
    assert model_fingerprint(wrapped) == bare
    with torch.no_grad():
        wrapped.base_model.model.lm_head.modules_to_save["default"].weight.add_(1.0)
    assert model_fingerprint(wrapped) != bare
    with wrapped.disable_adapter():
        assert model_fingerprint(wrapped) == bare


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="virtual tokens"):
        model_fingerprint(peft.get_peft_model(tiny_model("llama", layers=2), config))
