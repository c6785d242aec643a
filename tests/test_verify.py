# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`verify` passes on every architecture, leaves the model as it found it, and fails when something is wrong."""

from __future__ import annotations

import dataclasses

import kvspeed
import pytest
import torch
from kvspeed import attention, gate, packet, plan, rope
from kvspeed.state import state_of
from tiny_models import random_ids, tiny_model


def failed(report: kvspeed.VerifyReport) -> set[str]:
    return {check.name[:3] for check in report.checks if not check.ok}


def test_passes_on_every_architecture(architecture: str) -> None:
    model = tiny_model(architecture)
    report = kvspeed.verify(model)
    assert report.ok, str(report)
    assert [check.name[:3] for check in report.checks] == ["(a)", "(b)", "(c)", "(d)"]
    assert max(check.error for check in report.checks) < 1e-3
    assert state_of(model) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_passes_in_16_bits(dtype: torch.dtype) -> None:
    report = kvspeed.verify(tiny_model("llama", dtype=dtype))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
    ids=lambda value: value["rope_type"],
)
def test_passes_with_scaled_rope(rope_parameters: dict[str, object]) -> None:
    report = kvspeed.verify(tiny_model("llama", rope=rope_parameters))
    assert report.ok, str(report)


def test_leaves_the_patch_and_the_mode_as_they_were() -> None:
    model = tiny_model("llama")
    kvspeed.patch_model(model, 4, anchor_tokens=2, boundary="keep")
    spec = state_of(model).spec
    ids = random_ids(20)
    before = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.train()
    assert kvspeed.verify(model).ok
    assert model.training and state_of(model).spec == spec
    model.eval()
    assert torch.equal(before, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_a_requests_depth_outlives_it() -> None:
    model, ids = kvspeed.patch_model(tiny_model("llama"), 4), random_ids(15)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with kvspeed.at_depth(model, 2):
        before = model.generate(ids, **options)
        assert kvspeed.verify(model).ok
        after = model.generate(ids, **options)
    assert all(torch.equal(one, other) for one, other in zip(before.logits, after.logits, strict=True))


def test_a_wrong_frequency_fails_the_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    true = rope.RopeSpec.from_model

    def wrong(model: torch.nn.Module) -> rope.RopeSpec:
        spec = true(model)
        return dataclasses.replace(spec, inv_freq=spec.inv_freq * 1.001)

    monkeypatch.setattr(rope.RopeSpec, "from_model", wrong)
    assert "(a)" in failed(kvspeed.verify(tiny_model("llama")))


def test_a_wrong_mask_fails_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = plan._plan_uniform
    monkeypatch.setattr(plan, "_plan_uniform", lambda *args: true(*args[:-1], args[-1] - 1))
    assert failed(kvspeed.verify(tiny_model("llama"))) == {"(d)"}


def test_a_wrong_kernel_fails_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    true = attention._segments
    monkeypatch.setattr(attention, "_segments", lambda *args: true(*args) * 1.01)
    assert "(b)" in failed(kvspeed.verify(tiny_model("llama")))


def test_a_view_that_is_not_the_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    true = packet.assemble

    def wrong(packets: list[packet.Packet], *, mode: str, **kwargs: object) -> kvspeed.KVCache:
        return true(packets[::-1] if mode == "view" else packets, mode=mode, **kwargs)

    monkeypatch.setattr(gate, "assemble", wrong)
    assert failed(kvspeed.verify(tiny_model("llama"))) == {"(c)"}


def test_a_rope_that_cannot_be_shifted_is_reported() -> None:
    model = tiny_model("llama", rope={"rope_type": "dynamic", "factor": 2.0})
    report = kvspeed.verify(model)
    assert not report.ok
    assert "dynamic" in str(report)
    assert {"(a)", "(c)"} <= failed(report) and "(d)" not in failed(report)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NoneType|Linear|not known|known are"):
        kvspeed.verify(torch.nn.Linear(2, 2))


def test_the_report_as_data_and_text() -> None:
    report = kvspeed.verify(tiny_model("qwen3"))
    data = report.to_dict()
    assert data["ok"] is True and len(data["checks"]) == 4
    assert "Qwen3ForCausalLM" in str(report)
    assert not dataclasses.replace(report.checks[0], error=float("nan")).ok
