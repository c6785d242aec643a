# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets in fewer bits: errors within half a step, exact files, both modes, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from kvspeed import patch_model
from kvspeed.packet import assemble, build_packet
from kvspeed.packet.packet import Packet
from kvspeed.packet.quantise import full, quantise, storage_dtype
from packet_tools import assert_same_packet, cached_logits, changed, random_packet, random_text, tiny_tokenizer
from tiny_models import tiny_model

EIGHT_BIT = [torch.int8, torch.float8_e4m3fn]
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def steps(packet: Packet, scale: torch.Tensor, numbers: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """The largest error that rounding to the nearest may leave, for each number."""
    unit = scale.double()[..., None, None].expand(numbers.shape)
    if stored == torch.int8:
        return unit / 2
    exponent = torch.floor(torch.log2((numbers.double() / unit).abs().clamp_min(2.0**-6)))
    return unit * 2.0 ** (exponent - 4)  # 3 bits after the leading one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", EIGHT_BIT)
def test_error_is_within_half_a_step(stored, dtype):
    for options in (dict(), dict(k=2), dict(tokens=9, kept=4), dict(tokens=1, heads=1, head_dim=5)):
        packet = random_packet(dtype=dtype, **options)
        spread = 10.0 ** torch.randint(-3, 4, (*packet.keys.shape[:2], 1, 1))  # each head has a size of its own
        packet = changed(packet, keys=(packet.keys * spread).to(dtype))
        small = quantise(packet, stored)
        assert small.dtype == dtype and small.keys.dtype == small.values.dtype == stored
        assert small.key_scale.shape == packet.keys.shape[:2] and small.key_scale.dtype == torch.float32
        assert small.kv_bytes < packet.kv_bytes and "in " + str(stored)[6:] in repr(small)
        again = full(small)
        assert again.dtype == dtype and again.compute_dtype is None and again.key_scale is None
        rounding = torch.finfo(dtype).eps
        for name, scale in (("keys", small.key_scale), ("values", small.value_scale)):
            want, got = getattr(packet, name).double(), getattr(again, name).double()
            allowed = steps(packet, scale, want, stored) * (1 + 1e-5) + want.abs() * rounding + 1e-30
            if dtype == torch.float16:
                allowed += 2.0**-24
            assert ((want - got).abs() <= allowed).all(), name
            # the largest of a head survives: the whole range is in use
            raw = getattr(small, name).float().abs().amax((2, 3))
            assert (raw == LARGEST[stored]).all()
        if packet.anchor_keys is not None:
            assert torch.equal(again.anchor_keys, packet.anchor_keys) and small.anchor_keys.dtype == dtype


@pytest.mark.parametrize("stored", EIGHT_BIT)
def test_zeros_and_tiny_numbers_stay(stored):
    packet = random_packet()
    keys = packet.keys.clone()
    keys[0, 0] = 0
    keys[1, 1] = 1e-44
    keys[2, 0] = 1e30
    small = quantise(changed(packet, keys=keys), stored)
    got = small.full().keys
    assert (got[0, 0] == 0).all() and (got[1, 1].abs() <= 1e-44).all() and torch.isfinite(got).all()
    assert torch.allclose(got[2, 0], keys[2, 0])


def test_smaller_floats():
    packet = random_packet(k=2)
    for stored in (torch.bfloat16, torch.float16):
        small = quantise(packet, stored)
        assert small.key_scale is None and small.dtype == torch.float32 and small.keys.dtype == stored
        assert torch.equal(small.full().keys, packet.keys.to(stored).float())
    half = random_packet(dtype=torch.bfloat16)
    for stored in (torch.bfloat16, torch.float16, torch.float32):
        assert quantise(half, stored) is half, "nothing is gained"
    assert half.full() is half


def test_what_does_not_fit_is_refused():
    for wrong in (float("nan"), float("inf"), -float("inf")):
        packet = random_packet()
        packet.values[1, 1, 2, 3] = wrong
        for stored in EIGHT_BIT:
            with pytest.raises(ValueError, match=r"values of Packet.*hold NaN or infinity"):
                quantise(packet, stored)
        assert quantise(packet, torch.bfloat16).full().values[1, 1, 2, 3].isfinite() == torch.tensor(False)
    packet = random_packet()
    packet.keys[0, 0, 0, 0] = 1e6
    with pytest.raises(ValueError, match=r"keys of Packet.*beyond the range of torch\.float16"):
        quantise(packet, torch.float16)
    with pytest.raises(ValueError, match="already"):
        quantise(quantise(packet, torch.int8), torch.float8_e4m3fn)


def test_names_of_dtypes():
    assert storage_dtype("int8") == torch.int8 and storage_dtype("fp8") == torch.float8_e4m3fn
    assert storage_dtype(torch.bfloat16) == torch.bfloat16 and storage_dtype(None) is None
    for wrong in ("int4", 8, torch.int32, torch.float64, "", ["int8"]):
        with pytest.raises((ValueError, TypeError), match=r"kept as bf16|unhashable"):
            storage_dtype(wrong)


# --- files ---


@pytest.mark.parametrize("stored", [*EIGHT_BIT, torch.bfloat16, torch.float16])
def test_files_are_exact_small_and_aligned(tmp_path, stored):
    for options in (dict(), dict(k=2, tokens=90, anchors=3), dict(tokens=99, kept=44), dict(heads=1, head_dim=5)):
        packet = random_packet(**options)
        small = quantise(packet, stored)
        packet.save(tmp_path / "full")
        small.save(tmp_path / "small")
        loaded = Packet.load(tmp_path / "small")
        assert_same_packet(loaded, small)
        assert loaded.keys.data_ptr() % 64 == 0
        gained = packet.kv_bytes - small.kv_bytes
        assert gained > 0
        sizes = [(tmp_path / name).stat().st_size for name in ("full", "small")]
        assert abs(sizes[0] - sizes[1] - gained) < 600


def test_old_versions_are_written_and_read(tmp_path):
    from safetensors import safe_open

    packet = random_packet()
    for one, version in ((packet, "1"), (quantise(packet, torch.int8), "2")):
        one.save(tmp_path / "p")
        with safe_open(tmp_path / "p", "pt") as file:  # it is plain safetensors still
            assert file.metadata()["version"] == version
            assert torch.equal(file.get_tensor("keys"), one.keys)


@pytest.mark.parametrize("stored", EIGHT_BIT)
def test_wrong_scales_are_refused(stored):
    small = quantise(random_packet(), stored)
    for change, message in (
        (dict(key_scale=None), "key_scale: 8-bit keys and values need"),
        (dict(value_scale=small.value_scale.double()), "value_scale: is torch.float64"),
        (dict(value_scale=small.value_scale[:1]), "value_scale: expected"),
        (dict(key_scale=-small.key_scale), "key_scale: expected finite numbers above 0"),
        (dict(key_scale=small.key_scale * float("nan")), "key_scale: expected finite"),
        (dict(key_scale=small.key_scale * 0), "key_scale: expected finite"),
        (dict(compute_dtype=None), "must say what it is used in"),
        (dict(compute_dtype=stored), "compute_dtype: expected"),
        (dict(compute_dtype=torch.float64), "compute_dtype: expected"),
        (dict(values=torch.randn(small.values.shape)), "values: is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            changed(small, **change)
    with pytest.raises(ValueError, match="only 8-bit keys and values have scales"):
        changed(random_packet(), key_scale=small.key_scale, value_scale=small.value_scale)


# --- in a model ---


@pytest.mark.parametrize("mode", ["view", "copy"])
@pytest.mark.parametrize("stored", [*EIGHT_BIT, torch.bfloat16])
@pytest.mark.parametrize("depth", [None, 3])
def test_a_model_uses_them(stored, mode, depth):
    """The same logits, within rounding, as from the packet that was made full by hand."""
    model = tiny_model("llama", seed=random.randrange(10**6))
    patch_model(model, depth)
    tokenizer = tiny_tokenizer()
    exact = [build_packet(model, tokenizer, random_text(n, n)) for n in (9, 1, 30)]
    small = [quantise(packet, stored) for packet in exact]
    small += [small[0]]
    again = [packet.full() for packet in small]
    question, answer = [5, 6, 7], [8, 9]
    got = cached_logits(model, assemble(small, model=model, mode=mode), question, answer)
    want = cached_logits(model, assemble(again, model=model, mode=mode), question, answer)
    assert torch.allclose(got, want, atol=2e-4, rtol=2e-4)
    far = cached_logits(model, assemble([*exact, exact[0]], model=model, mode=mode), question, answer)
    error = (got - far).abs().max()
    assert 0 < error < 2.0, "it is the exact packet, or another one"


def test_mixed_packets_go_together():
    model = tiny_model("qwen3")
    patch_model(model)
    tokenizer = tiny_tokenizer()
    packets = [build_packet(model, tokenizer, random_text(12, seed)) for seed in range(3)]
    mixed = [quantise(packets[0], torch.int8), packets[1], quantise(packets[2], torch.float8_e4m3fn)]
    logits = [cached_logits(model, assemble(mixed, model=model, mode=mode), [5, 6], [7]) for mode in ("view", "copy")]
    assert torch.allclose(*logits, atol=2e-4, rtol=2e-4)
