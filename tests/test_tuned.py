# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a tuned model remembers, in its config or beside its adapter, and patch_model reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import kvspeed
import pytest
import torch
import transformers
from kvspeed import SpeedSpec
from kvspeed.fingerprint import model_fingerprint
from kvspeed.state import state_of
from kvspeed.tuned import SPEC_FILE, read_spec, remember_spec, remembered_spec, write_spec
from speed_tools import LAYERS, K, answer, close, conversation, fresh, ids_of, oracle, plain
from torch import nn


def spec_of(model: nn.Module) -> SpeedSpec | None:
    state = state_of(model)
    assert state is not None
    return state.spec


def any_spec() -> SpeedSpec:
    return SpeedSpec(
        random.randint(1, LAYERS - 1),
        random.randint(0, 3),
        random.choice(["transient", "keep"]),
        random.choice(["causal", "self"]),
        random.choice(["keep", "reset"]),
    )


def test_patch_model_reads_what_was_remembered(architecture: str) -> None:
    model, before = fresh(architecture), model_fingerprint(fresh(architecture))
    remember_spec(model, SpeedSpec(K, 2, "keep"))
    assert spec_of(kvspeed.patch_model(model)) == SpeedSpec(K, 2, "keep")
    found = answer(model, ids_of(12), n=3)
    wanted = oracle(plain(architecture), found.sequences[0], conversation((12, 3)), K, anchor_tokens=2, boundary="keep")
    close(found.logits[0], wanted[11:-1])
    assert model_fingerprint(model) == before  # packets of these weights stay good


def test_saved_and_loaded_with_the_model(architecture: str, tmp_path: Path) -> None:
    model, spec = fresh(architecture), any_spec()
    kvspeed.patch_model(model, K)
    remember_spec(model, spec)  # also while it is patched
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["kvspeed"]["k"] == spec.k
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert remembered_spec(loaded) == spec
    assert spec_of(kvspeed.patch_model(loaded)) == spec
    if (architecture, loaded.config._attn_implementation) != ("gemma2", "sdpa"):  # the softcap is left out in sdpa
        assert kvspeed.verify(loaded).ok
    assert spec_of(loaded) == spec


def test_what_is_given_goes_before_what_was_remembered() -> None:
    model = fresh("llama")
    remember_spec(model, SpeedSpec(4, 3, "keep", "self", "reset"))
    given: list[tuple[dict[str, Any], SpeedSpec | None]] = [
        ({"k": 2}, SpeedSpec(2, 3, "keep", "self", "reset")),
        ({"anchor_tokens": 0, "turns": "keep"}, SpeedSpec(4, 0, "keep", "self", "keep")),
        ({"k": 5, "boundary": "transient", "upper_attention": "causal"}, SpeedSpec(5, 3, turns="reset")),
        ({"k": LAYERS}, None),
        ({}, SpeedSpec(4, 3, "keep", "self", "reset")),
    ]
    for arguments, wanted in given:
        assert spec_of(kvspeed.patch_model(model, **arguments)) == wanted


def test_all_layers_is_a_depth_to_remember() -> None:
    model = fresh("llama")
    remember_spec(model, SpeedSpec(LAYERS))
    assert spec_of(kvspeed.patch_model(model)) is None
    close(answer(model, ids := ids_of(9)).logits, answer(plain("llama"), ids).logits)


def test_forgetting() -> None:
    model = fresh("llama")
    before = model.config.to_dict()
    remember_spec(model, None)  # nothing there: nothing happens
    remember_spec(model, any_spec())
    remember_spec(model, None)
    assert remembered_spec(model) is None and model.config.to_dict() == before
    assert spec_of(kvspeed.patch_model(model)) is None


def test_a_model_at_full_depth_stays_so_in_the_gate() -> None:
    model = fresh("llama")
    remember_spec(model, SpeedSpec(K))
    kvspeed.patch_model(model, LAYERS)
    assert kvspeed.verify(model).ok
    assert spec_of(model) is None


def test_beside_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, spec = fresh("llama"), any_spec()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    remember_spec(wrapped, spec)
    wrapped.save_pretrained(tmp_path)
    write_spec(tmp_path, spec)
    loaded = peft.PeftModel.from_pretrained(fresh("llama"), tmp_path)
    assert remembered_spec(loaded) is None  # PEFT saves no config of the model: hence the file
    remember_spec(loaded, read_spec(tmp_path))
    assert spec_of(kvspeed.patch_model(loaded)) == spec
    assert read_spec(tmp_path / "elsewhere") is None
    assert sorted(p.name for p in tmp_path.iterdir() if "tmp" in p.name) == []


DAMAGED: list[Any] = [
    {},
    {"anchor_tokens": 2},
    {"k": "4"},
    {"k": 0},
    {"k": True},
    {"k": 4, "boundary": "dropped"},
    {"k": 4, "depth": 3},
    {"k": 4, "anchor_tokens": None},
    [4],
    4,
    "auto",
]


@pytest.mark.parametrize("entry", DAMAGED)
def test_a_damaged_entry(entry: Any, tmp_path: Path) -> None:
    model = fresh("llama")
    model.config.kvspeed = entry
    for arguments in ({}, {"k": K}):
        with pytest.raises(ValueError, match=r"config\.kvspeed is"):
            kvspeed.patch_model(model, **arguments)
        assert state_of(model) is None
    assert spec_of(kvspeed.patch_model(model, LAYERS)) is None  # there it does not matter
    (tmp_path / SPEC_FILE).write_text(json.dumps(entry))
    with pytest.raises(ValueError, match=SPEC_FILE):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b'{"k": 4', b"\xff\xfe\x00"])
def test_a_damaged_file(text: bytes, tmp_path: Path) -> None:
    (tmp_path / SPEC_FILE).write_bytes(text)
    with pytest.raises(ValueError, match=r"kvspeed\.json is damaged"):
        read_spec(tmp_path)


def test_an_entry_of_a_deeper_model() -> None:
    model = fresh("llama")
    model.config.kvspeed = {"k": LAYERS + 1}
    with pytest.raises(ValueError, match=f"k = {LAYERS + 1} and the model has {LAYERS} layers"):
        kvspeed.patch_model(model)
    with pytest.raises(ValueError, match=f"k is {LAYERS + 1} and the model has {LAYERS} layers"):
        remember_spec(fresh("llama"), SpeedSpec(LAYERS + 1))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        write_spec(tmp_path / "none", SpeedSpec(K))


def test_tuned_weights_do_not_leak_between_models() -> None:
    one, other = fresh("llama"), fresh("llama")
    remember_spec(one, SpeedSpec(K))
    assert remembered_spec(other) is None
    with torch.no_grad():
        close(kvspeed.patch_model(other)(ids := ids_of(7)).logits, plain("llama")(ids).logits)


def test_other_depths_keep_the_rule_where_all_layers_were_asked_for() -> None:
    model = fresh("llama")
    remember_spec(model, SpeedSpec(K, anchor_tokens=3, boundary="keep"))
    layers = len(model.model.layers)
    kvspeed.patch_model(model, layers, k_by_task={"a": 3})
    assert state_of(model).at(k=3) == SpeedSpec(3, anchor_tokens=3, boundary="keep")
