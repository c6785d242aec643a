# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""train_adapter: it learns, changes nothing else, goes on after interruptions, and refuses what it cannot do."""

from __future__ import annotations

import csv
import errno
import os

import kvspeed
import pytest
import torch
from kvspeed.packet import PacketAdapter
from kvspeed.packet.train import checkpoint as checkpoint_module
from kvspeed.packet.train.batches import batches, split
from kvspeed.packet.train.contexts import contexts_of
from kvspeed.packet.train.student import Student
from kvspeed.state import state_of
from train_tools import asked_model, random_samples, two_processes

QUICK = {"max_new_tokens": 3, "batch_size": 4, "lr": 0.1, "top": 16}


def soft(model, seed=0):
    return PacketAdapter.for_model(model, 3, 2, seed=seed)


def train(model, tokenizer, samples, adapter, **options):
    return kvspeed.train_adapter(model, tokenizer, samples, adapter, **{**QUICK, **options})


def parts(adapter):
    return [adapter.header.detach().clone(), adapter.trailer.detach().clone()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("k", [None, 4])
def test_learns(loss, k):
    model, tokenizer = asked_model()
    samples, adapter = random_samples(10, per_context=2), soft(model)
    before = parts(adapter)
    report = train(model, tokenizer, samples, adapter, dev=None, steps=20, loss=loss, k=k)
    losses = [one.loss for one in report.records]
    assert len(losses) == report.steps == report.best_step == 20
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert not equal(parts(adapter), before)


def test_only_the_soft_tokens_change():
    model, tokenizer = asked_model()
    model.train()
    model.model.norm.weight.requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    flags = [weight.requires_grad for weight in model.parameters()]
    adapter = soft(model)
    adapter.header.requires_grad_(False)
    train(model, tokenizer, random_samples(6), adapter, steps=2, dev=None, dtype="bf16")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert [weight.requires_grad for weight in model.parameters()] == flags
    assert model.training and model.model.layers[0].training and state_of(model) is None
    assert all(weight.grad is None for weight in [*model.parameters(), *adapter.parameters()])
    assert not adapter.header.requires_grad and adapter.trailer.requires_grad


def test_the_same_twice_and_another_with_another_seed():
    model, tokenizer = asked_model()
    samples, found = random_samples(9), []
    for seed in (1, 1, 2):
        adapter = soft(model)
        train(model, tokenizer, samples, adapter, steps=4, seed=seed)
        found.append(parts(adapter))
    assert equal(found[0], found[1]) and not equal(found[0], found[2])


@pytest.mark.parametrize("k", [None, 3])
def test_a_patched_model_stays_patched_and_trains_the_same(k):
    samples, found = random_samples(8), []
    for depth in (None, k):
        model, tokenizer = asked_model()
        kvspeed.patch_model(model, depth)
        adapter, state = soft(model), state_of(model)
        train(model, tokenizer, samples, adapter, steps=3)
        assert state_of(model) is state
        found.append(parts(adapter))
    assert equal(*found)


def test_the_best_by_the_dev_split_is_kept_and_training_ends_early():
    model, tokenizer = asked_model()
    samples, held = random_samples(8), random_samples(4, seed=99)
    held = [type(one)(f"dev-{one.id}", one.documents, one.question, one.answers) for one in held]
    adapter = soft(model)
    options = {"dev": held, "steps": 40, "evaluate_every": 1, "patience": 2, "lr": 2.0}
    report = train(model, tokenizer, samples, adapter, **options)  # such steps do harm soon
    looks = {one.step: one.loss for one in report.records if one.split == "dev"}
    assert report.stopped_early and report.steps == report.best_step + 2 < 40
    assert report.best_dev == min(looks.values()) == looks[report.best_step]
    assert report.first_dev == looks[0] and report.dev_samples == 4
    again = train(model, tokenizer, samples, adapter, **{**options, "steps": 1, "lr": 1e-9})
    assert again.first_dev == pytest.approx(report.best_dev, rel=1e-5)  # what is left in the adapter is the best


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 4, 7])
def test_goes_on_after_an_interruption(tmp_path, at, how):
    """To the bit as if nothing had happened."""
    model, tokenizer = asked_model()
    samples, whole = random_samples(9, per_context=2), soft(model)
    options = {"steps": 8, "evaluate_every": 2, "dev": 0.3, "patience": 9}
    wanted = train(model, tokenizer, samples, whole, **options)

    def stop(what, done, total, record):
        if what == "train" and done == at:
            raise how

    adapter = soft(model)
    with pytest.raises(how):
        train(model, tokenizer, samples, adapter, **options, folder=tmp_path, checkpoint_every=2, progress=stop)
    if at > 1:  # what was best so far is there
        notes = PacketAdapter.load(tmp_path / "adapter.safetensors", model).notes["training"]
        assert notes["best_step"] in range(0, at + 1)
    adapter = soft(model)
    report = train(model, tokenizer, samples, adapter, **options, folder=tmp_path, checkpoint_every=2)
    assert equal(parts(adapter), parts(whole))
    assert [(r.step, r.split, r.loss, r.lr) for r in report.records] == [
        (r.step, r.split, r.loss, r.lr) for r in wanted.records
    ]
    assert equal(parts(PacketAdapter.load(tmp_path / "adapter.safetensors", model)), parts(whole))


def test_a_finished_run_is_not_run_again(tmp_path):
    model, tokenizer = asked_model()
    samples, first, second = random_samples(8), soft(model), soft(model)
    report = train(model, tokenizer, samples, first, steps=3, folder=tmp_path)
    seen = []
    again = train(
        model, tokenizer, samples, second, steps=3, folder=tmp_path, progress=lambda what, *_: seen.append(what)
    )
    assert equal(parts(first), parts(second)) and again.records == report.records
    assert "train" not in seen and "dev" not in seen
    train(model, tokenizer, samples, first, steps=3, folder=tmp_path)  # trained in place: it may go on from itself
    with pytest.raises(ValueError, match="of a run with another adapter to begin with"):
        train(model, tokenizer, samples, soft(model, seed=5), steps=3, folder=tmp_path)


def test_another_models_run_is_refused(tmp_path):
    model, tokenizer = asked_model()
    samples = random_samples(8)
    train(model, tokenizer, samples, soft(model), steps=3, folder=tmp_path)
    other, _ = asked_model()
    with torch.no_grad():
        other.get_input_embeddings().weight[3, 1] += 0.5
    begun = soft(other)
    before = parts(begun)
    with pytest.raises(ValueError, match=r"of a run with another model .*resume=False"):
        train(other, tokenizer, samples, begun, steps=3, folder=tmp_path)
    assert equal(parts(begun), before)
    with pytest.raises(ValueError, match="of a run with another model"):
        train(model.bfloat16(), tokenizer, samples, soft(model).float(), steps=3, folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "name"), [({"lr": 0.2}, "lr"), ({"seed": 3}, "seed"), ({"loss": "ce"}, "loss"), ({"k": 2}, "k")]
)
def test_another_runs_checkpoint_is_refused(tmp_path, change, name):
    model, tokenizer = asked_model()
    samples = random_samples(8)
    train(model, tokenizer, samples, soft(model), steps=2, folder=tmp_path, dev=None)
    adapter = soft(model, seed=4)
    before = parts(adapter)
    with pytest.raises(ValueError, match=rf"of a run with another {name} .*resume=False"):
        train(model, tokenizer, samples, adapter, **{"steps": 2, "folder": tmp_path, "dev": None, **change})
    assert equal(parts(adapter), before)
    train(
        model, tokenizer, samples, adapter, **{"steps": 2, "folder": tmp_path, "dev": None, "resume": False, **change}
    )


def test_a_damaged_checkpoint_is_named(tmp_path):
    model, tokenizer = asked_model()
    samples = random_samples(8)
    train(model, tokenizer, samples, soft(model), steps=2, folder=tmp_path)
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is truncated.*remove it to train from the start"):
        train(model, tokenizer, samples, soft(model), steps=2, folder=tmp_path)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    model, tokenizer = asked_model()
    samples, whole = random_samples(8), soft(model)
    options = {"steps": 5, "checkpoint_every": 1, "dev": None}
    train(model, tokenizer, samples, whole, **options)
    write, calls = checkpoint_module.write_tensor_file, []

    def full(path, *rest):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *rest)

    monkeypatch.setattr(checkpoint_module, "write_tensor_file", full)
    with pytest.raises(OSError, match="No space left"):
        train(model, tokenizer, samples, soft(model), folder=tmp_path, **options)
    monkeypatch.undo()
    adapter, seen = soft(model), []
    train(
        model, tokenizer, samples, adapter, folder=tmp_path, progress=lambda *event: seen.append(event[:2]), **options
    )
    assert [step for what, step in seen if what == "train"] == [3, 4, 5]  # two were kept
    assert equal(parts(adapter), parts(whole))


def test_the_folder_holds_curve_and_adapter(tmp_path):
    pytest.importorskip("matplotlib")
    model, tokenizer = asked_model()
    adapter = soft(model)
    report = train(model, tokenizer, random_samples(10), adapter, steps=6, folder=tmp_path / "new" / "run")
    folder = tmp_path / "new" / "run"
    rows = list(csv.DictReader((folder / "curve.csv").read_text().splitlines()))
    assert len(rows) == len(report.records)
    for row, one in zip(rows, report.records, strict=True):
        filled, empty = ("loss", "dev_loss") if one.split == "train" else ("dev_loss", "loss")
        assert int(row["step"]) == one.step and row[empty] == ""
        assert float(row[filled]) == pytest.approx(one.loss, abs=1e-6)
        assert (float(row["tokens_per_s"]) > 0) == (one.split == "train")
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    notes = PacketAdapter.load(folder / "adapter.safetensors", model).notes["training"]
    assert notes["dev_loss"] == report.best_dev and notes["loss"] == "kl" and notes["lr"] == 0.1
    assert not [name for name in os.listdir(folder) if name.endswith((".part", ".tmp"))]


def test_questions_about_the_same_documents_cost_nothing_in_quality():
    """The same samples, apart and together: the same loss and, within rounding, the same soft tokens."""
    model, tokenizer = asked_model()
    together = random_samples(6, per_context=3)
    apart = [together[index] for index in (0, 3, 1, 4, 2, 5)]
    assert len(contexts_of(tokenizer, together)) == 2 and len(contexts_of(tokenizer, apart)) == 6
    found = []
    for samples in (together, apart):
        adapter = soft(model)
        report = train(model, tokenizer, samples, adapter, steps=3, batch_size=6, dev=None, warmup=0)
        found.append((report.records[0].loss, parts(adapter)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=5e-3)


def test_batches_take_every_sample_once_an_epoch():
    _, tokenizer = asked_model()
    contexts = contexts_of(tokenizer, random_samples(14, per_context=3, seed=1))
    plan = list(batches(contexts, 4, 3, None, 7))
    each = len(plan) // 3
    for epoch in range(3):
        assert sorted(index for batch in plan[epoch * each : (epoch + 1) * each] for index in batch) == list(range(5))
    assert all(sum(len(contexts[i].queries) for i in batch) >= 4 for batch in plan[: each - 1])
    assert list(batches(contexts, 4, 1, len(plan), 7)) == plan  # steps beat epochs
    assert list(batches(contexts, 4, 3, None, 8)) != plan


def test_split_keeps_contexts_whole():
    samples = random_samples(30, per_context=3, seed=2)
    kept, held = split(samples, 0.2, 5)
    assert len(held) == 6 and sorted([*kept, *held], key=samples.index) == samples
    assert not {one.documents for one in kept} & {one.documents for one in held}
    assert split(samples, 0.2, 5) == (kept, held) != split(samples, 0.2, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "mse"}, r'loss: got \'mse\', choose "kl" or "ce"'),
        ({"lr": 0.0}, "lr: got 0.0"),
        ({"lr": float("nan")}, "lr: got nan"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, give an integer of 64 bits"),
        ({"steps": -1}, "steps: got -1"),
        ({"epochs": 0}, "epochs: got 0"),
        ({"patience": 0}, "patience: got 0"),
        ({"top": 0}, "top: got 0"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"dev": 1.0}, "dev: got 1.0"),
        ({"dev": 0.01}, "leaves one side empty; .*, or 0 to"),
        ({"k": 0}, "k: is 0 and the model has 6 layers"),
        ({"k": 7}, "k: is 7"),
        ({"k": 3, "recompute": True}, "recompute: is not there under SPEED"),
        ({"max_new_tokens": 5000}, r"sample s\d+: has \d+ tokens, and with \d+ soft tokens and 5000 of an answer more"),
    ],
)
def test_refuses(change, message):
    model, tokenizer = asked_model()
    adapter = soft(model)
    before = parts(adapter)
    with pytest.raises(ValueError, match=message):
        train(model, tokenizer, random_samples(8), adapter, **{"steps": 1, **change})
    assert equal(parts(adapter), before) and state_of(model) is None


def test_refuses_what_does_not_fit(tmp_path):
    model, tokenizer = asked_model()
    samples = random_samples(4)
    other = asked_model("llama", hidden_size=32, num_attention_heads=2, num_key_value_heads=1)[0]
    with pytest.raises(ValueError, match="hidden size 32"):
        train(model, tokenizer, samples, soft(other))
    with pytest.raises(ValueError, match="has no soft tokens"):
        train(model, tokenizer, samples, PacketAdapter.for_model(model, 0, 0))
    with pytest.raises(ValueError, match=r"train it as adapter\.float\(\)"):
        train(model, tokenizer, samples, soft(model).bfloat16())
    with pytest.raises(ValueError, match="has the id 's1'"):
        train(model, tokenizer, [*samples, samples[1]], soft(model))
    with pytest.raises(ValueError, match="samples: got none"):
        train(model, tokenizer, [], soft(model))
    with pytest.raises(TypeError, match="lr: expected a number, got str"):
        train(model, tokenizer, samples, soft(model), lr="1")
    with pytest.raises(TypeError, match=r"samples\[0\]: expected a kvspeed.Sample, got dict"):
        train(model, tokenizer, [{}], soft(model))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is a file; give a folder"):
        train(model, tokenizer, samples, soft(model), dev=None, folder=tmp_path / "file")
    with pytest.raises(ValueError, match=r"fp32 was asked for and the model is torch\.bfloat16"):
        train(model.bfloat16(), tokenizer, samples, soft(model), dev=None, dtype="fp32")


def test_a_loss_that_is_no_number_ends_it():
    model, tokenizer = asked_model()
    samples = random_samples(4)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="the loss is no number after 0 steps: lower lr"):
        train(model, tokenizer, samples, soft(model), steps=1, dev=None)


def test_after_an_error_the_same_call_goes_on(tmp_path):
    """An error of the caller's own leaves the adapter as it was given, and ends where a clean run does."""
    samples, (model, tokenizer) = random_samples(8, seed=1), asked_model()
    options = {"batch_size": 4, "steps": 6, "dev": 0.25, "checkpoint_every": 2, "evaluate_every": 3, "lr": 0.1}
    clean, adapter = soft(model), soft(model)
    before = adapter.fingerprint()
    train(model, tokenizer, samples, clean, **options)

    def fail(what, done, *_):
        if what == "train" and done == 5:
            raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        train(model, tokenizer, samples, adapter, **options, folder=tmp_path, progress=fail)
    assert adapter.fingerprint() == before
    train(model, tokenizer, samples, adapter, **options, folder=tmp_path)
    assert adapter.fingerprint() == clean.fingerprint() != before


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_dev_loss_that_is_no_number_ends_it(tmp_path, monkeypatch, wrong):
    """Nothing is less than a NaN, so that soft tokens that were never trained would be kept as the best."""
    model, tokenizer = asked_model()
    *samples, held = random_samples(5)
    monkeypatch.setattr(Student, "evaluate", lambda *_: (wrong, 1))
    with pytest.raises(ValueError, match="the loss on the dev split is no number after 0 steps: lower lr"):
        train(model, tokenizer, samples, soft(model), steps=2, dev=[held], folder=tmp_path)


PROCESS = """
import kvspeed
from kvspeed.packet import PacketAdapter
from train_tools import asked_model, random_samples
model, tokenizer = asked_model()
adapter = PacketAdapter.for_model(model, 3, 2)
report = kvspeed.train_adapter(
    model, tokenizer, random_samples(14, per_context=2, seed=11), adapter, dev=0.3, steps=5, batch_size=4, lr=0.1,
    max_new_tokens=3, folder={folder!r}, evaluate_every=2, checkpoint_every=2,
)
print(report.steps, report.best_dev)
"""


def test_two_processes_do_the_work_of_one(tmp_path):
    """Over gloo on CPUs: the same soft tokens within rounding, and one of the processes writes."""
    pytest.importorskip("accelerate")
    said = two_processes(PROCESS, tmp_path / "two")
    model, tokenizer = asked_model()
    adapter = soft(model)
    samples = random_samples(14, per_context=2, seed=11)
    report = train(
        model, tokenizer, samples, adapter, dev=0.3, steps=5, top=128, evaluate_every=2, folder=tmp_path / "one"
    )
    two = PacketAdapter.load(tmp_path / "two" / "adapter.safetensors", model)
    for one, other in zip(parts(adapter), parts(two), strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=5e-3)
    assert float(said.split()[1]) == pytest.approx(report.best_dev, rel=1e-3)


def test_several_processes_need_a_folder(monkeypatch):
    model, tokenizer = asked_model()
    from kvspeed.packet.train.processes import Processes

    monkeypatch.setattr(Processes, "here", classmethod(lambda cls, model: cls(0, 2, None)))
    with pytest.raises(ValueError, match="several processes share the teacher's answers through a folder"):
        train(model, tokenizer, random_samples(4), soft(model), dev=None)
