# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""PacketAdapter: initialisation, wrapping, gradients, files, and what it refuses."""

from __future__ import annotations

import os

import pytest
import torch
from kvspeed.packet.adapter import PacketAdapter, embedding_statistics
from kvspeed.packet.tensorfile import TensorFileError, read_tensor_file, write_tensor_file
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=2)


def test_drawn_from_the_statistics_of_the_embedding(model):
    adapter = PacketAdapter.for_model(model, header=400, trailer=300, seed=3)
    weight = model.get_input_embeddings().weight.detach().double()
    assert adapter.header.shape == (400, 64) and adapter.trailer.shape == (300, 64)
    for part in (adapter.header, adapter.trailer):
        assert part.dtype == torch.float32 and part.requires_grad
        assert abs(part.mean().item() - weight.mean().item()) < 5 * weight.std().item() / part.numel() ** 0.5
        assert part.std().item() == pytest.approx(weight.std().item(), rel=0.02)


def test_statistics_are_those_of_what_the_embedding_gives(architecture):
    model = tiny_model(architecture, layers=1, vocab=700)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.25)
        everything = model.get_input_embeddings()(torch.arange(700)).double()
    mean, std = embedding_statistics(model)
    assert mean == pytest.approx(everything.mean().item(), rel=1e-6)
    assert std == pytest.approx(everything.std(unbiased=False).item(), rel=1e-6)


def test_seed_decides_and_the_global_generator_does_not(model):
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = PacketAdapter.for_model(model, seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    second = PacketAdapter.for_model(model, seed=5)
    assert torch.equal(first.header, second.header) and torch.equal(first.trailer, second.trailer)
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint() != PacketAdapter.for_model(model, seed=6).fingerprint()
    assert not torch.equal(first.header, first.trailer)


def test_fingerprint_sees_every_element_and_the_split(model):
    adapter = PacketAdapter.for_model(model, header=3, trailer=2)
    before = adapter.fingerprint()
    for part in (adapter.header, adapter.trailer):
        with torch.no_grad():
            part[1, 7] += 1e-3
            assert adapter.fingerprint() != before
            part[1, 7] -= 1e-3
    other = PacketAdapter(64, 2, 3)
    rows = torch.cat((adapter.header, adapter.trailer)).detach()
    other.header.data.copy_(rows[:2])
    other.trailer.data.copy_(rows[2:])
    assert other.fingerprint() != adapter.fingerprint()


@pytest.mark.parametrize(("header", "trailer"), [(8, 8), (0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrap(model, header, trailer, dtype):
    adapter = PacketAdapter.for_model(model, header=header, trailer=trailer)
    for shape in ((5, 64), (3, 5, 64), (2, 1, 64)):
        embeddings = torch.randn(shape).to(dtype)
        wrapped = adapter.wrap(embeddings)
        tokens = shape[-2]
        assert wrapped.dtype == dtype and wrapped.shape == (*shape[:-2], header + tokens + trailer, 64)
        assert torch.equal(wrapped[..., header : header + tokens, :], embeddings)
        row = wrapped if wrapped.ndim == 2 else wrapped[-1]
        assert torch.equal(row[:header], adapter.header.to(dtype))
        assert torch.equal(row[header + tokens :], adapter.trailer.to(dtype))


def test_wrap_passes_gradients(model):
    adapter = PacketAdapter.for_model(model, header=2, trailer=1)
    adapter.wrap(torch.randn(4, 3, 64)).sum().backward()
    assert torch.equal(adapter.header.grad, torch.full((2, 64), 4.0))
    assert torch.equal(adapter.trailer.grad, torch.full((1, 64), 4.0))
    assert [name for name, _ in adapter.named_parameters()] == ["header", "trailer"]


@pytest.mark.parametrize(("header", "trailer"), [(8, 8), (0, 3), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path, model, header, trailer, dtype):
    adapter = PacketAdapter.for_model(model, header=header, trailer=trailer, dtype=dtype)
    adapter.notes = {"steps": 70, "data": "biography"}
    adapter.save(tmp_path / "a.safetensors")
    loaded = PacketAdapter.load(tmp_path / "a.safetensors", model)
    assert torch.equal(loaded.header, adapter.header) and torch.equal(loaded.trailer, adapter.trailer)
    assert loaded.header.dtype == dtype and loaded.header.requires_grad
    assert loaded.fingerprint() == adapter.fingerprint()
    assert (loaded.model, loaded.notes) == (adapter.model, adapter.notes)
    assert loaded.tokens == header + trailer
    with torch.no_grad():
        loaded.header.add_(1)  # training writes to it: not to the file
    assert PacketAdapter.load(tmp_path / "a.safetensors").fingerprint() == adapter.fingerprint()


def test_another_width_is_refused_naming_both(model):
    wide = tiny_model("llama", layers=2, hidden_size=96)
    adapter = PacketAdapter.for_model(wide)
    with pytest.raises(ValueError, match=r"hidden size 96.*hidden size 64"):
        adapter.check_model(model)
    with pytest.raises(ValueError, match=r"hidden size 96.*hidden size 64"):
        PacketAdapter(96).check_model(model)
    with pytest.raises(ValueError, match="96 wide and the embeddings 64"):
        adapter.wrap(torch.randn(3, 64))


def test_another_kind_of_model_is_refused_naming_both(model):
    adapter = PacketAdapter.for_model(tiny_model("qwen3", layers=2))
    with pytest.raises(ValueError, match=r"qwen3.*llama"):
        adapter.check_model(model)
    with pytest.raises(ValueError, match=r"3 layers.*2 layers"):
        PacketAdapter.for_model(tiny_model("llama", layers=3)).check_model(model)
    PacketAdapter.for_model(tiny_model("llama", layers=2, seed=9)).check_model(model)


def test_load_checks_the_model(tmp_path, model):
    PacketAdapter.for_model(tiny_model("llama", layers=2, hidden_size=96)).save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"hidden size 96.*hidden size 64"):
        PacketAdapter.load(tmp_path / "a", model)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "hidden_size"),
        ((64, -1), ValueError, "header"),
        ((64, 8, 2.0), TypeError, "trailer"),
        ((64, True), TypeError, "header"),
        (("64",), TypeError, "hidden_size"),
    ],
)
def test_refused_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        PacketAdapter(*arguments)


def test_refused_dtype():
    with pytest.raises(ValueError, match="floating-point"):
        PacketAdapter(64, dtype=torch.int8)


def test_bad_files(tmp_path, model):
    path = tmp_path / "a"
    adapter = PacketAdapter.for_model(model, header=2, trailer=1)
    adapter.save(path)
    data = path.read_bytes()
    for size in range(0, len(data), 64):
        path.write_bytes(data[:size])
        with pytest.raises(TensorFileError):
            PacketAdapter.load(path)
    damaged = bytearray(data)
    damaged[-70] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(TensorFileError, match="checksum"):
        PacketAdapter.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        PacketAdapter.load(tmp_path / "missing")

    adapter.save(path)
    header, tensors = read_tensor_file(path, "kvspeed.adapter", 1)
    for change, replaced in (
        ({"hidden_size": 65}, {}),
        ({"header": 3}, {}),
        ({"header": "2"}, {}),
        ({"model": {"name": "x"}}, {}),
        ({"model": 3}, {}),
        ({"notes": []}, {}),
        ({"more": 1}, {}),
        ({}, {"header": torch.zeros(2, 64, dtype=torch.int32)}),
        ({}, {"header": torch.zeros(2, 64, dtype=torch.bfloat16)}),
        ({}, {"third": torch.zeros(1)}),
    ):
        write_tensor_file(path, "kvspeed.adapter", 1, {**header, **change}, {**tensors, **replaced})
        with pytest.raises(TensorFileError, match="not a valid adapter file"):
            PacketAdapter.load(path)


def test_failed_save_keeps_the_old_file(tmp_path, model, monkeypatch):
    path = tmp_path / "a"
    adapter = PacketAdapter.for_model(model)
    adapter.save(path)
    other = PacketAdapter.for_model(model, seed=1)
    other.notes = {"x": object()}
    with pytest.raises(TypeError):
        other.save(path)
    assert os.listdir(tmp_path) == ["a"]
    assert PacketAdapter.load(path).fingerprint() == adapter.fingerprint()
