# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The oracles themselves, against transformers' rotary modules and eager attention, and against hand-made cases."""

from __future__ import annotations

import math

import pytest
import reference
import torch
import transformers
from kvspeed.segment import Segment
from packaging.version import Version
from poison import UNUSED_PAGE, Embedded, embed, lazy_storage
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
}


def rotary_module(kind: str, head_dim: int = 64, theta: float = 10000.0) -> LlamaRotaryEmbedding:
    options = {
        "hidden_size": 2 * head_dim,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 16384,
    }
    if Version(transformers.__version__) >= Version("5.0.0"):
        config = LlamaConfig(rope_parameters={"rope_theta": theta, **ROPES[kind]}, **options)
    else:
        config = LlamaConfig(rope_theta=theta, rope_scaling=None if kind == "default" else ROPES[kind], **options)
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("kind", ROPES)
def test_tables_equal_the_models_angles(kind):
    """The module rounds `position * inv_freq` to float32; the tables may differ by that much and no more."""
    module = rotary_module(kind)
    positions = torch.tensor([[0, 1, 2, 77, 1000, 4095, 8192, 131071]])
    cos, sin = module(torch.zeros(1), positions)
    half = module.inv_freq.shape[0]
    assert torch.equal(cos[..., :half], cos[..., half:])
    mine_cos, mine_sin = reference.rope_tables(positions, module.inv_freq)
    allowed = positions[..., None] * module.inv_freq.double() * 2**-24 + 2e-7
    scaling = module.attention_scaling
    assert (kind == "yarn") == (scaling != 1.0)
    assert ((cos[..., :half].double() / scaling - mine_cos).abs() <= allowed).all()
    assert ((sin[..., :half].double() / scaling - mine_sin).abs() <= allowed).all()


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(("position", "offset"), [(0, 0), (0, 5), (3, 2000), (900, -900), (2500, -17)])
def test_shift_equals_rotation_at_the_new_position(kind, position, offset):
    """Shifting never applies the attention scaling again: YaRN keys come out as the model makes them."""
    module = rotary_module(kind)
    key = torch.randn(1, 2, 6, 64)

    def at(first: int) -> torch.Tensor:
        cos, sin = module(key, first + torch.arange(6)[None])
        return apply_rotary_pos_emb(key, key, cos, sin)[1]

    shifted = reference.rotate(at(position), offset, module.inv_freq)
    torch.testing.assert_close(shifted, at(position + offset).double(), rtol=0, atol=2e-3 if position > 500 else 5e-4)


def test_interleaved_pairing_equals_cohere():
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_interleaved

    inv_freq = rotary_module("default").inv_freq
    key = torch.randn(1, 2, 5, 64)
    cos, sin = reference.rope_tables(torch.arange(7, 12), inv_freq)
    model_cos, model_sin = (table.repeat_interleave(2, -1)[None].float() for table in (cos, sin))
    expected = apply_interleaved(key, key, model_cos, model_sin)[1]
    got = torch.stack([reference.rotate(key[:, :, i], 7 + i, inv_freq, True) for i in range(5)], 2)
    torch.testing.assert_close(got, expected.double(), rtol=0, atol=1e-5)
    halves = reference.rotate(key, 7, inv_freq, False)
    assert not torch.allclose(halves[:, :, 0], got[:, :, 0])


def test_partial_rotary_and_rows_per_layer():
    key = torch.randn(3, 2, 4, 16)
    inv_freq = torch.rand(3, 4)
    inv_freq[1] = 0
    got = reference.rotate(key, 11, inv_freq)
    assert torch.equal(got[..., 8:], key[..., 8:].double())
    assert torch.equal(got[1], key[1].double())
    for layer in range(3):
        torch.testing.assert_close(got[layer], reference.rotate(key[layer], 11, inv_freq[layer]))


def _heads(batch=2, heads=4, heads_kv=2, rows=3, tokens=9, head_dim=16):
    query = torch.randn(batch, heads, rows, head_dim)
    return query, torch.randn(batch, heads_kv, tokens, head_dim), torch.randn(batch, heads_kv, tokens, head_dim)


def test_attention_equals_sdpa():
    """Segments used at other positions than they were rotated for, against SDPA over keys rotated where they stand."""
    module = rotary_module("default")
    raw_query, raw_key, value = _heads(head_dim=64)

    def at(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = module(x, positions[None])
        return apply_rotary_pos_emb(x, x, cos, sin)[1]

    query, key = at(raw_query, torch.arange(6, 9)), at(raw_key, torch.arange(9))
    segments = [
        Segment(at(raw_key[:, :, :4], torch.arange(20, 24)), value[:, :, :4], -20),
        Segment(at(raw_key[:, :, 4:5], torch.arange(1)), value[:, :, 4:5], 4),
    ]
    out, lse = reference.segment_attention(query, segments, key[:, :, 5:], value[:, :, 5:], inv_freq=module.inv_freq)
    mask = torch.ones(3, 9, dtype=torch.bool).tril(6)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    logits = (query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) / 8).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=1e-5)


def test_softcap_equals_gemma2_and_sinks_equal_gpt_oss():
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

    query, key, value = (x.double() * 3 for x in _heads())
    empty = key[:, :, :0]
    segment = Segment(key, value)
    layer = torch.nn.Module().eval()
    layer.num_key_value_groups = 2
    layer.sinks = torch.randn(4, dtype=torch.float64)

    got, _ = reference.segment_attention(query, [segment], empty, empty, softcap=5.0)
    expected, _ = gemma2(layer, query, key, value, None, scaling=0.25, softcap=5.0)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=1e-5)  # HF's softmax is float32

    got, _ = reference.segment_attention(query, [segment], empty, empty, sinks=layer.sinks)
    expected, _ = gpt_oss(layer, query, key, value, None, scaling=0.25)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 4, 100])
def test_window_equals_transformers_rule(window):
    from transformers.masking_utils import sliding_window_causal_mask_function

    visible = sliding_window_causal_mask_function(window)
    query = torch.zeros(1, 1, 3, 8)
    segment = Segment(torch.zeros(1, 5, 8), torch.zeros(1, 5, 8), 10, start=-10)
    mask = reference.attention_mask(query, [segment], torch.zeros(1, 1, 4, 8), window=window, tail_start=5)
    for row, position in enumerate(range(6, 9)):
        for key_position in range(9):
            assert bool(mask[0, row, key_position]) == bool(
                visible(torch.tensor(0), torch.tensor(0), torch.tensor(position), torch.tensor(key_position))
            )


def test_attention_corners():
    query, key, value = _heads()
    empty = key[:, :, :0]
    out, lse = reference.segment_attention(query, [], empty, empty)
    assert (out == 0).all() and (lse == -math.inf).all()
    sinks = torch.tensor([0.0, 1.0, -2.0, 1e4])
    out, lse = reference.segment_attention(query, [], empty, empty, sinks=sinks)
    assert (out == 0).all() and torch.equal(lse, sinks.double()[None, :, None].expand(2, 4, 3))
    # A tail of one token under three rows: only the last row sees it.
    out, lse = reference.segment_attention(query, [], key[:, :, :1], value[:, :, :1])
    assert (lse[:, :, :2] == -math.inf).all() and (out[:, :, :2] == 0).all()
    assert torch.equal(out[:, :, 2], value[:, :, 0].double().repeat_interleave(2, 1))
    # What is padding in every row may hold NaN.
    key[:, :, :2] = math.nan
    first = torch.tensor([2, 9], dtype=torch.int32)
    out, lse = reference.segment_attention(query, [Segment(key, value, first=first)], empty, empty)
    assert torch.isfinite(out).all() and (lse[1] == -math.inf).all()


def test_merge_of_halves_is_the_whole():
    query, key, value = _heads()
    empty = key[:, :, :0]
    whole = reference.segment_attention(query, [Segment(key, value)], empty, empty)
    halves = [
        reference.segment_attention(query, [Segment(key[:, :, s], value[:, :, s])], empty, empty)
        for s in (slice(0, 4), slice(4, 9))
    ]
    merged = reference.merge_states(*halves[0], *halves[1])
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected)
    nothing = (torch.zeros(2, 4, 3, 16), torch.full((2, 4, 3), -math.inf))
    out, lse = reference.merge_states(*nothing, *nothing)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert torch.equal(reference.merge_states(*whole, *nothing)[0], whole[0])


def test_accept_refuses_what_it_should():
    truth = torch.randn(50, dtype=torch.float64)
    own = truth.to(torch.bfloat16)
    reference.accept(own.clone(), truth, own)
    worse = own.clone()
    worse[7] += 0.1
    for bad in (worse, own.clone().fill_(math.nan)):
        with pytest.raises(AssertionError):
            reference.accept(bad, truth, own)
    infinite = truth.clone()
    infinite[3] = -math.inf
    with pytest.raises(AssertionError):
        reference.accept(own, infinite, own)
    assert not reference.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert reference.ulps_of_row_maximum(torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.5 + 2**-23])) == 1.0


def test_poison_helpers():
    held = Embedded((2, 3, 4, 8), torch.bfloat16, order=(1, 2, 0, 3), gap=2, shift=3)
    assert held.view.isnan().all() and held.view.stride(-1) == 1 and held.view.storage_offset() == 3
    held.view.zero_()
    held.check()
    with pytest.raises(AssertionError):
        held.check(written=torch.zeros(2, 3, 4, 8, dtype=torch.bool))
    held.view.as_strided((1,), (1,), 2).zero_()
    with pytest.raises(AssertionError):
        held.check()
    values = torch.randn(2, 3, 4, 8)
    assert torch.equal(embed(values, order=(2, 0, 1, 3)), values)
    huge = lazy_storage(2**33, torch.bfloat16)
    huge[-1] = 3
    assert huge[-1] == 3 and huge[2**32] == 0
    assert UNUSED_PAGE < 2**31 - 1
