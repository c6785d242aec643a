# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""RopeSpec: what is read from a model is what the model does; kinds that cannot be shifted are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from kvspeed.rope import RopeSpec, float32_rope_buffers
from kvspeed.speed import prompt_kv
from speed_tools import CACHE, decoder
from tiny_models import ARCHITECTURES, tiny_config, tiny_model

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}  # fmt: skip


def turned(keys: torch.Tensor, inv_freq: torch.Tensor, offset: int, interleaved: bool = False) -> torch.Tensor:
    """`keys` `[..., D]` moved by `offset` positions, in float64."""
    angle = offset * inv_freq.double()
    cos, sin = angle.cos(), angle.sin()
    rotary, rest = keys.double()[..., : 2 * angle.numel()], keys.double()[..., 2 * angle.numel() :]
    if interleaved:
        one, two = rotary[..., ::2], rotary[..., 1::2]
        return torch.cat([torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2), rest], -1)
    one, two = rotary.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


@torch.no_grad()
def keys_at(model: torch.nn.Module, ids: torch.Tensor, start: int) -> list[torch.Tensor]:
    """The keys of every layer `[H_kv, T, D]`, computed by the unpatched model with positions from `start` on.

    The token's own position matters to attention only by differences, so the hidden states are the same at any start.
    """
    cache = transformers.DynamicCache()
    positions = torch.arange(start, start + ids.shape[1])[None]
    model(ids, position_ids=positions, use_cache=True, **{CACHE: cache})
    return [layer.keys[0] for layer in cache.layers]


def moves(model: torch.nn.Module, offset: int, tolerance: float) -> None:
    """A key made at 0 and turned by the spec is the key made at `offset`, in every layer."""
    spec = RopeSpec.from_model(model)
    ids = torch.randint(3, 500, (1, 12))
    for layer, (here, there) in enumerate(zip(keys_at(model, ids, 0), keys_at(model, ids, offset), strict=True)):
        found = turned(here, spec.layer(layer), offset, spec.interleaved)
        error = (found - there).abs().max() / there.abs().max()
        assert error < tolerance, f"layer {layer}: off by {error:.2g}"
        # Above the first layer they depend on attention, and so on the rounding of the model's own angles.
        still = (here - there)[..., spec.rotary_dim :].abs()
        allowed = tolerance * there.abs().max() if layer else 0.0
        assert not still.numel() or still.max() <= allowed, f"layer {layer}: unrotated dimensions moved"


@pytest.mark.parametrize("offset", [1, 7, 1000, 65535])
def test_keys_of_every_architecture_move_as_the_spec_says(architecture: str, offset: int) -> None:
    # float32 angles of the model itself are off by about position * 2^-24
    moves(tiny_model(architecture), offset, 1e-4 + offset * 2e-7)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_kind_of_scaling(architecture: str, kind: str) -> None:
    settings: dict[str, Any] = {"rope": dict(ROPES[kind])}
    model = tiny_model(architecture, **settings)
    spec = RopeSpec.from_model(model)
    assert spec.kinds == (kind,)
    assert spec.inv_freq.dtype == torch.float32 and spec.inv_freq.is_contiguous()
    assert spec.inv_freq.shape == (spec.rotary_dim // 2,)
    assert spec.rotary_dim == 16 and not spec.interleaved and spec.layers == 6
    moves(model, 300, 1e-4)


def test_scaling_changes_the_frequencies() -> None:
    """The configured theta and scaling are really used, as formulas."""
    exponents = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    for theta in (10000.0, 500000.0):
        spec = RopeSpec.from_model(tiny_model("llama", theta=theta))
        torch.testing.assert_close(spec.inv_freq.double(), theta**-exponents, rtol=1e-6, atol=0)
        linear = RopeSpec.from_model(tiny_model("llama", theta=theta, rope=dict(ROPES["linear"])))
        torch.testing.assert_close(linear.inv_freq * 4, spec.inv_freq, rtol=1e-6, atol=0)
    differing = {
        kind: RopeSpec.from_model(tiny_model("llama", rope=dict(rope))).inv_freq for kind, rope in ROPES.items()
    }
    for one in differing:
        for two in differing:
            assert (one == two) == torch.equal(differing[one], differing[two])


def test_yarn_is_shifted_without_its_attention_scaling() -> None:
    """cos and sin of the model carry a factor; a shift must not apply it again, so norms stay."""
    model = tiny_model("llama", rope=dict(ROPES["yarn"]))
    assert decoder(model).rotary_emb.attention_scaling != 1.0
    keys = keys_at(model, torch.randint(3, 500, (1, 5)), 0)[2]
    moved = turned(keys, RopeSpec.from_model(model).layer(2), 123)
    torch.testing.assert_close(moved.norm(dim=-1), keys.double().norm(dim=-1))
    moves(model, 123, 1e-4)


def test_two_thetas() -> None:
    """Gemma 3: sliding layers turn with the local theta, full ones with the global."""
    model = tiny_model("gemma3_text", theta=1000000.0, rope={"rope_type": "linear", "factor": 8.0})
    spec = RopeSpec.from_model(model)
    assert spec.inv_freq.shape == (6, 8) and spec.rotary_dim == 16
    exponents = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    for layer, kind in enumerate(model.config.layer_types):
        wanted = 10000.0**-exponents if kind == "sliding_attention" else 1000000.0**-exponents / 8
        torch.testing.assert_close(spec.layer(layer).double(), wanted, rtol=1e-6, atol=0)
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert torch.equal(spec.first(4), spec.inv_freq[:4])
    moves(model, 300, 1e-4)


def test_layers_without_rope() -> None:
    model = tiny_model("smollm3", no_rope_layers=[1, 0, 0, 1, 1, 0])
    spec = RopeSpec.from_model(model)
    assert spec.inv_freq.shape == (6, 8)
    assert [bool(row.any()) for row in spec.inv_freq] == [True, False, False, True, True, False]
    moves(model, 300, 1e-4)


@pytest.mark.parametrize("factor", [0.5, 0.25, 1.0])
def test_partial_rotary(factor: float) -> None:
    model = tiny_model("phi3", partial_rotary_factor=factor)
    assert RopeSpec.from_model(model).rotary_dim == int(16 * factor)
    moves(model, 300, 1e-4)


def test_a_rounded_model_has_its_exact_frequencies_read() -> None:
    for architecture in ARCHITECTURES:
        exact = RopeSpec.from_model(tiny_model(architecture))
        model = tiny_model(architecture).bfloat16()
        repairs = float32_rope_buffers(decoder(model))
        assert repairs and all(value.dtype == torch.float32 for _, _, value in repairs)
        assert any(getattr(module, name).dtype == torch.bfloat16 for module, name, _ in repairs)
        found = RopeSpec.from_model(model)
        assert torch.equal(found.inv_freq, exact.inv_freq)
        assert found.describe() == exact.describe()
        assert not float32_rope_buffers(decoder(tiny_model(architecture)))


def test_descriptions() -> None:
    """Equal for equal embeddings, different for all others, and JSON."""
    import json

    models = {
        "a": tiny_model("llama"),
        "b": tiny_model("llama", theta=20000.0),
        "c": tiny_model("llama", rope=dict(ROPES["linear"])),
        "d": tiny_model("phi3"),
        "e": tiny_model("smollm3"),
        "f": tiny_model("gemma3_text"),
        "g": tiny_model("llama", layers=5),
    }
    texts = {name: json.dumps(RopeSpec.from_model(model).describe(), sort_keys=True) for name, model in models.items()}
    assert len(set(texts.values())) == len(texts)
    assert texts["a"] == json.dumps(RopeSpec.from_model(tiny_model("llama", seed=5)).describe(), sort_keys=True)


def test_the_spec_owns_its_numbers() -> None:
    model = tiny_model("llama")
    spec = RopeSpec.from_model(model)
    before = spec.inv_freq.clone()
    decoder(model).rotary_emb.inv_freq.zero_()
    assert torch.equal(spec.inv_freq, before)


# ---- refusals -------------------------------------------------------------------------------------------------------

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic NTK"),
        ({**LONG, "original_max_position_embeddings": 1024}, "LongRoPE"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "M-RoPE"),
    ],
)
def test_kinds_that_cannot_be_shifted(rope: dict[str, Any], says: str) -> None:
    config = tiny_config("llama")
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {"rope_theta": 10000.0, **rope}
    else:
        config.rope_scaling = dict(rope)
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(ValueError, match=rf"{says}.*supported are default, linear, llama3, yarn"):
        RopeSpec.from_model(model)


def test_layers_that_rotate_different_widths_are_refused() -> None:
    model = tiny_model("gemma3_text")
    base = decoder(model)
    names = [(module, name) for module in base.children() for name, _ in module.named_buffers(recurse=False)]
    module, name = next((m, n) for m, n in names if n.endswith("inv_freq") and ("full" in n or n == "inv_freq"))
    setattr(module, name, getattr(module, name)[:4])
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        RopeSpec.from_model(model)


def test_an_unknown_architecture() -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)
    with pytest.raises(ValueError, match="gpt2"):
        RopeSpec.from_model(transformers.GPT2LMHeadModel(config))


# ---- prompt_kv, which packets are made with -------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 4])
def test_prompt_kv_is_the_models_own(architecture: str, k: int | None) -> None:
    """Rotated from position 0, all layers below k, the anchor's above, and the model as it was."""
    model, ids = tiny_model(architecture), torch.randint(3, 500, (1, 33))
    found = prompt_kv(model, ids, k=k, anchor_tokens=2)
    assert "_kvspeed" not in decoder(model).__dict__
    wanted = keys_at(tiny_model(architecture), ids, 0)
    depth = 6 if k is None else k
    assert found.keys.shape == found.values.shape == (depth, 2, 33, 16)
    for layer in range(depth):
        own = wanted[layer]  # a sliding layer of transformers has forgotten its first tokens
        torch.testing.assert_close(found.keys[layer][:, -own.shape[1] :], own, rtol=0, atol=1e-4)
    if k is None:
        assert found.anchor_keys is None and found.anchor_values is None
        return
    assert found.anchor_keys is not None and found.anchor_keys.shape == (2, 2, 2, 16)
    first = prompt_kv(model, ids[:, :2])
    torch.testing.assert_close(found.anchor_keys, first.keys[4:], rtol=0, atol=1e-4)
    embeddings = model.get_input_embeddings()(ids)
    again = prompt_kv(model, inputs_embeds=embeddings, k=k, anchor_tokens=2)
    torch.testing.assert_close(again.keys, found.keys, rtol=0, atol=1e-4)


def test_prompt_kv_refuses() -> None:
    model, ids = tiny_model("llama"), torch.randint(3, 500, (1, 5))
    for bad in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(1, 5, 64)}, {"input_ids": ids[:, :0]},
                {"input_ids": ids.expand(2, 5)}):  # fmt: skip
        with pytest.raises(ValueError, match="exactly one"):
            prompt_kv(model, **bad)
    with pytest.raises(ValueError, match="training mode"):
        prompt_kv(model.train(), ids)
