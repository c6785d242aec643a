# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SwiftKV's weights: where they start, their file, their loss and its gradients, and that training helps."""

from __future__ import annotations

import random

import pytest
import torch
from kvspeed import Sample, patch_model
from kvspeed.eval.methods import SPEED_METHODS, Context, get_method
from kvspeed.eval.swiftkv import SwiftKV, train_swiftkv
from kvspeed.eval.swiftkv.train import _Lesson, _rows
from kvspeed.packet.tensorfile import read_tensor_file, write_tensor_file
from packet_tools import CHAT_TEMPLATE, random_text, tiny_tokenizer
from tiny_models import tiny_model


def model_of(layers: int = 5, architecture: str = "llama"):
    return tiny_model(architecture, layers=layers, seed=random.randrange(10**6))


def samples_of(count: int) -> list[Sample]:
    seed = random.randrange(10**6)
    return [
        Sample(
            f"s{n}",
            (random_text(6, seed + 3 * n),),
            random_text(3, seed + 3 * n + 1),
            (random_text(2, seed + 3 * n + 2),),
        )
        for n in range(count)
    ]


def test_new_weights_are_the_models_own_and_a_groups_are_the_mean():
    model = model_of(architecture="qwen2")
    weights = SwiftKV.for_model(model, 1, 3)
    layers = model.model.layers
    assert torch.equal(weights.norm.weight, layers[1].input_layernorm.weight)
    for index, query in enumerate(weights.queries):
        assert torch.equal(query.weight, layers[1 + index].self_attn.q_proj.weight)
    for name, pool in (("k_proj", weights.keys), ("v_proj", weights.values)):
        for part in ("weight", "bias"):
            first = torch.stack([getattr(getattr(layers[i].self_attn, name), part) for i in (1, 2, 3)]).mean(0)
            torch.testing.assert_close(getattr(pool[0], part), first)
            assert torch.equal(getattr(pool[1], part), getattr(getattr(layers[4].self_attn, name), part))
    assert weights.owners == [1, 4] and [weights.owner(i) for i in (1, 2, 3, 4)] == [1, 1, 1, 4]


def test_a_file_brings_them_back(tmp_path):
    model = model_of()
    weights = SwiftKV.for_model(model, 2, 2)
    with torch.no_grad():
        weights.keys[0].weight.add_(1)
    weights.trained = True
    weights.save(tmp_path / "w")
    again = SwiftKV.load(tmp_path / "w", model)
    assert again.fingerprint() == weights.fingerprint() != SwiftKV.for_model(model, 2, 2).fingerprint()
    assert again.trained and (again.k, again.share) == (2, 2)
    other = tiny_model("llama", layers=5, seed=99)
    with pytest.raises(ValueError, match="trained for a model of other weights"):
        SwiftKV.load(tmp_path / "w", other)
    SwiftKV.load(tmp_path / "w", other.bfloat16())  # where it cannot be seen
    again.save(tmp_path / "again")
    with pytest.raises(ValueError, match="trained for a model of other weights"):
        SwiftKV.load(tmp_path / "again", tiny_model("llama", layers=5, seed=99))
    header, tensors = read_tensor_file(tmp_path / "w", "kvspeed.swiftkv", 1)
    del header["base_fingerprint"], header["base_dtype"]
    write_tensor_file(tmp_path / "w", "kvspeed.swiftkv", 1, header, tensors)
    assert SwiftKV.load(tmp_path / "w", tiny_model("llama", layers=5, seed=99)).base is None  # a file of before
    with pytest.raises(ValueError, match="for a model of 5 layers, and this one has 4"):
        SwiftKV.load(tmp_path / "w", model_of(4))
    with pytest.raises(ValueError, match="tensors of other shapes"):
        SwiftKV.load(tmp_path / "w", tiny_model("llama", layers=5, num_key_value_heads=1))
    write_tensor_file(tmp_path / "w", "kvspeed.swiftkv", 1, {"layers": 5}, {})
    with pytest.raises(ValueError, match="does not say its k, share and layers"):
        SwiftKV.load(tmp_path / "w", model)
    (tmp_path / "w").write_bytes(b"nothing")
    with pytest.raises(ValueError):
        SwiftKV.load(tmp_path / "w", model)


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("patched", [False, True])
def test_the_loss_is_that_of_whole_sequences(share, patched):
    """KL and hidden error of a batch, and their gradients, against one sequence at a time through the whole model."""
    model, tokenizer = model_of(), tiny_tokenizer(template=CHAT_TEMPLATE)
    weights = SwiftKV.for_model(model, 2, share)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    samples = samples_of(3)
    rows = list(_rows(samples, tokenizer, [2], None).values())
    assert [answer for _, _, answer in rows] == [3, 3, 3]
    if patched:
        patch_model(model, 5)
    model.requires_grad_(False)
    lesson = _Lesson(model, weights, 2.0, 1.0)
    divergence, error = lesson.losses(rows)
    (4 * divergence + error).backward()
    found = [parameter.grad.clone() for parameter in weights.parameters()]
    weights.zero_grad()
    kl, squares, count = [], [], 0
    for _, ids, answer in rows:
        given = {"input_ids": torch.tensor([ids]), "output_hidden_states": True, "use_cache": False}
        with torch.no_grad():
            taught = model(**given)
        with weights.attached(model):
            learned = model(**given)
        p, q = (out.logits[0, -answer - 1 : -1].div(2).log_softmax(-1) for out in (taught, learned))
        kl.append((p.exp() * (p - q)).sum())
        squares.append((taught.hidden_states[-2] - learned.hidden_states[-2]).square().sum())
        count += taught.hidden_states[-2].numel()
    wanted, hidden = sum(kl) / 9, sum(squares) / count
    torch.testing.assert_close(divergence, wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(error, hidden, atol=1e-5, rtol=1e-4)
    (4 * wanted + hidden).backward()
    for one, parameter in zip(found, weights.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, atol=1e-4, rtol=1e-3)
        assert one.abs().max() > 0


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_training_helps_and_leaves_the_model_alone(tmp_path, dtype):
    model, tokenizer = model_of(), tiny_tokenizer(template=CHAT_TEMPLATE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights, samples = SwiftKV.for_model(model, 2), samples_of(16)
    calls = []
    report = train_swiftkv(
        model,
        tokenizer,
        samples,
        weights,
        lr=3e-3,
        epochs=8,
        batch_size=4,
        dev=0.25,
        dtype=dtype,
        path=tmp_path / "w",
        progress=lambda *call: calls.append(call[:3]),
    )
    assert report.best_dev < 0.9 * report.first_dev, report
    losses = [record.loss for record in report.records if record.split == "train"]
    assert len(losses) == 24 and sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert SwiftKV.load(tmp_path / "w", model).fingerprint() == weights.fingerprint() and weights.trained
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert ("train", 24, 24) in calls and calls[0][0] == "dev"
    patch_model(model, 5)
    context = Context(model, tokenizer, swiftkv=weights)
    method = get_method("swiftkv-2", SPEED_METHODS)
    with method.serving(context):
        method.prefill(context, [5, 6, 7])


def test_a_loss_that_is_no_number_ends_it():
    model, tokenizer = model_of(), tiny_tokenizer(template=CHAT_TEMPLATE)
    weights = SwiftKV.for_model(model, 2)
    start = weights.fingerprint()
    with pytest.raises(ValueError, match="the loss is no number"):
        train_swiftkv(model, tokenizer, samples_of(8), weights, lr=1e30, epochs=5, batch_size=2, dev=0.25)
    assert weights.fingerprint() == start  # the best so far


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0}, "lr: got 0"),
        ({"temperature": -1}, "temperature: got -1"),
        ({"looks": 0}, "hidden_weight, warmup, looks"),
        ({"dtype": "fp16"}, "dtype: got 'fp16'"),
        ({"dev": 0.9999}, "dev: "),
    ],
)
def test_wrong_settings(options, words):
    model = model_of()
    with pytest.raises(ValueError, match=words):
        train_swiftkv(
            model, tiny_tokenizer(template=CHAT_TEMPLATE), samples_of(4), SwiftKV.for_model(model, 2), **options
        )


@pytest.mark.parametrize(("k", "share", "words"), [(0, 1, "k: is 0"), (5, 1, "k: is 5"), (3, 3, "share: is 3")])
def test_wrong_depths(k, share, words):
    with pytest.raises(ValueError, match=words):
        SwiftKV.for_model(model_of(), k, share)
