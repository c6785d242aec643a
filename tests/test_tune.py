# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tuning runs on tiny models: what they learn, interruptions, several processes, and refusals."""

from __future__ import annotations

import copy
import json
from typing import Any

import kvspeed
import pytest
import torch
from kvspeed.packet import PacketAdapter
from kvspeed.rule import SpeedSpec
from kvspeed.speed import load_tuned, tune
from kvspeed.state import state_of
from kvspeed.tuned import remembered_spec
from train_tools import asked_model, random_samples, same, two_processes, weights

pytest.importorskip("peft")

QUICK: dict[str, Any] = {"k": 4, "steps": 4, "batch_size": 4, "dev": None, "lr": 1e-2, "rank": 4}


def chats(count: int) -> list[dict[str, Any]]:
    def say(number: int) -> str:
        return " ".join(f"w{int(torch.randint(100, 512, ()))}" for _ in range(number))

    return [
        {"messages": [{"role": "user", "content": say(6)}, {"role": "assistant", "content": say(2)}]}
        for _ in range(count)
    ]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_learns_and_remembers_what_for(method, loss):
    """Far fewer nats, weights that SPEED serves, and a config that says the depth."""
    model, tokenizer = asked_model()
    samples, before = random_samples(6, per_context=3), weights(model)
    rate = {"lora": 2e-2, "full": 3e-3}[method]
    options = {**QUICK, "steps": 25, "method": method, "loss": loss, "lr": rate, "boundary": "keep"}
    report = tune(model, tokenizer, samples, **options)
    losses = [one.loss for one in report.records]
    assert losses[-1] < 0.3 * losses[0] and report.steps == 25 and report.trained_tokens > 0
    assert report.speed["k"] == 4 and report.method == method and report.layers == 6
    assert not same(weights(model), before) and weights(model).keys() == before.keys()
    assert remembered_spec(model) == SpeedSpec(4, boundary="keep") and state_of(model) is None
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    if loss == "ce":
        return
    # the teacher was the model as it was given
    untouched, _ = asked_model()
    control = tune(untouched, tokenizer, samples, **{**options, "k": None, "steps": 1, "warmup": 0})
    assert control.records[0].loss < 1e-4 < losses[0]


def test_the_models_own_answers_as_labels():
    """Greedy at full depth; a model that is tuned to them at full depth has nothing to learn."""
    model, tokenizer = asked_model()
    report = tune(
        model, tokenizer, random_samples(4), **{**QUICK, "k": 6, "labels": "model", "steps": 1}, max_new_tokens=3
    )
    assert report.records[0].exact == 1.0
    shallow = tune(model, tokenizer, random_samples(4), **{**QUICK, "labels": "model", "steps": 1}, max_new_tokens=3)
    assert shallow.records[0].exact < 1.0


def test_bfloat16_products_leave_float32_weights():
    model, tokenizer = asked_model()
    data, before = [*random_samples(4, per_context=2), *chats(2)], weights(model)
    exact = tune(copy.deepcopy(model), tokenizer, data, **QUICK, warmup=0)
    near = tune(model, tokenizer, data, **QUICK, warmup=0, dtype="bf16")
    assert 0 < abs(near.records[0].loss - exact.records[0].loss) < 0.2
    assert all(weight.dtype == torch.float32 for weight in model.parameters()) and not same(weights(model), before)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(model.state_dict()[embedding], before[embedding])  # frozen weights are as they were
    full = tune(model, tokenizer, data, **{**QUICK, "lr": 1e-4}, method="full", dtype="bf16")
    assert full.steps == 4


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", [Stop, KeyboardInterrupt])
def test_goes_on_after_an_interruption(tmp_path, how):
    """To the bit as if nothing had happened."""
    options = {**QUICK, "steps": 6, "dev": 0.25, "evaluate_every": 2, "checkpoint_every": 1, "patience": 9}
    data = [*random_samples(8, per_context=2, seed=3), *chats(4)]
    whole, tokenizer = asked_model()
    wanted = tune(whole, tokenizer, data, **options)
    for at in (1, 4):
        model, _ = asked_model()
        before, folder = weights(model), tmp_path / str(at)

        def stop(what, done, total, record, at=at):
            if what == "train" and done == at:
                raise how

        with pytest.raises(how):
            tune(model, tokenizer, data, **options, folder=folder, progress=stop)
        assert same(weights(model), before) and not hasattr(model.config, "kvspeed")  # the LoRA was taken off
        report = tune(model, tokenizer, data, **options, folder=folder)
        assert same(weights(model), weights(whole))
        assert [(one.step, one.loss) for one in report.records] == [(one.step, one.loss) for one in wanted.records]


def test_a_lora_is_not_put_on_twice(tmp_path):
    """The model that a finished run was merged into is another one; so is one with other weights."""
    model, tokenizer = asked_model()
    samples = random_samples(4)
    tune(model, tokenizer, samples, **QUICK, folder=tmp_path)
    (tmp_path / ".saving").mkdir()  # as a kill in the midst of saving leaves it
    for other in (model, asked_model(seed=1)[0]):
        before = weights(other)
        with pytest.raises(ValueError, match="is of a run with another model"):
            tune(other, tokenizer, samples, **QUICK, folder=tmp_path)
        assert same(weights(other), before)
    again = asked_model()[0]
    tune(again, tokenizer, samples, **QUICK, folder=tmp_path)
    assert same(weights(again), weights(model)) and not (tmp_path / ".saving").exists()


def test_another_run_is_not_gone_on_from(tmp_path):
    model, tokenizer = asked_model()
    samples = random_samples(4)
    tune(model, tokenizer, samples, **QUICK, folder=tmp_path)
    for change, message in (
        ({"k": 3}, "with another speed"),
        ({"seed": 1}, "with another seed"),
        ({"batch_size": 2}, "with another batch_size"),
    ):
        with pytest.raises(ValueError, match=message):
            tune(asked_model()[0], tokenizer, samples, **{**QUICK, **change}, folder=tmp_path)
    done = tune(asked_model()[0], tokenizer, samples, **{**QUICK, "lr": 1e-3}, folder=tmp_path)
    assert done.steps == 4 and len(done.records) == 4  # it was at its end
    fresh = tune(asked_model()[0], tokenizer, samples, **{**QUICK, "k": 3}, folder=tmp_path, resume=False)
    assert fresh.speed["k"] == 3
    (tmp_path / "checkpoint.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="remove it to tune from the start"):
        tune(asked_model()[0], tokenizer, samples, **QUICK, folder=tmp_path)


@pytest.mark.parametrize("dev", [None, 0.25])
def test_no_number_ends_it_and_the_last_good_state_stays(tmp_path, dev, monkeypatch):
    model, tokenizer = asked_model()
    before, calls = weights(model), []
    from kvspeed.speed.tuning.forward import Learner

    backward = Learner.backward

    def spoiled(self, items, scale):
        found = backward(self, items, scale)
        calls.append(1)
        if len(calls) == 3:
            found.loss = float("nan") if dev is None else found.loss
            next(weight for weight in self.model.parameters() if weight.grad is not None).grad.fill_(float("inf"))
        return found

    monkeypatch.setattr(Learner, "backward", spoiled)
    options = {**QUICK, "dev": dev, "evaluate_every": 1, "seed": 3, "checkpoint_every": 1}
    what = "loss" if dev is None else "gradient"
    with pytest.raises(ValueError, match=f"the {what} is no number after 2 steps: the checkpoint holds the last good"):
        tune(model, tokenizer, random_samples(8, seed=1), **options, folder=tmp_path)
    assert same(weights(model), before)
    assert json.loads((tmp_path / "report.json").read_text())["stopped"] == "not a number"
    monkeypatch.setattr(Learner, "backward", backward)
    if dev is not None:
        loaded, _ = load_tuned(tmp_path, asked_model()[0])
        assert all(bool(torch.isfinite(weight).all()) for weight in loaded.parameters())
        assert not same(weights(loaded), before)
    report = tune(model, tokenizer, random_samples(8, seed=1), **{**options, "lr": 1e-3}, folder=tmp_path)
    assert report.steps == 4 and report.stopped == ""


@pytest.mark.parametrize("method", ["lora", "full"])
def test_weights_that_gave_no_number_are_not_kept(tmp_path, method):
    """A rate that is far too high: the step after it shows that, and the checkpoint is of before."""
    options = {**QUICK, "steps": 6, "warmup": 0, "method": method, "checkpoint_every": 1, "seed": 3}
    model, tokenizer = asked_model()
    before = weights(model)

    def stop(what, done, *_):
        if done == 2:
            raise KeyboardInterrupt

    samples = random_samples(8, seed=1)
    with pytest.raises(KeyboardInterrupt):
        tune(model, tokenizer, samples, **{**options, "lr": 1e-3}, folder=tmp_path, progress=stop)
    model, tokenizer = asked_model()
    with pytest.raises(
        ValueError, match=r"is no number after 3 steps: the checkpoint holds the last good state; lower"
    ):
        tune(model, tokenizer, samples, **{**options, "lr": 1e25}, folder=tmp_path)
    assert all(bool(weight.isfinite().all()) and weight.abs().max() < 1e3 for weight in weights(model).values())
    assert method == "full" or same(weights(model), before)  # a LoRA is taken off again
    model, tokenizer = asked_model()
    report = tune(model, tokenizer, samples, **{**options, "lr": 1e-3}, folder=tmp_path)
    assert report.steps == 6 and report.stopped == ""
    assert all(bool(weight.isfinite().all()) for weight in weights(load_tuned(tmp_path, asked_model()[0])[0]).values())


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_look_is_judged_once_also_where_it_is_interrupted(tmp_path, at):
    options = {**QUICK, "dev": 0.34, "lr": 0.3, "warmup": 0, "evaluate_every": 2}
    samples = random_samples(9, seed=1)
    model, tokenizer = asked_model()
    whole = tune(model, tokenizer, samples, **options)

    def stop(what, done, *_):
        if what == "dev" and done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(asked_model()[0], tokenizer, samples, **options, folder=tmp_path, progress=stop)
    again = asked_model()[0]
    report = tune(again, tokenizer, samples, **options, folder=tmp_path)
    assert (report.first_dev, report.best_step, report.best_dev) == (whole.first_dev, whole.best_step, whole.best_dev)
    assert [one.step for one in report.records if one.split == "dev"] == [0, 2, 4]
    assert same(weights(again), weights(model))


def test_a_dev_split_whose_loss_is_no_number_ends_it(tmp_path, monkeypatch):
    """The checkpoint can be gone on from: it holds numbers only."""
    from kvspeed.speed.tuning.forward import Learner

    evaluate, calls = Learner.evaluate, []

    def spoiled(self, items):
        found = evaluate(self, items)
        calls.append(1)
        found.loss = float("nan") if len(calls) == 3 else found.loss
        return found

    monkeypatch.setattr(Learner, "evaluate", spoiled)
    options = {**QUICK, "dev": 0.25, "evaluate_every": 1, "seed": 3}
    model, tokenizer = asked_model()
    with pytest.raises(ValueError, match="the loss on the dev split is no number after 2 steps"):
        tune(model, tokenizer, random_samples(8, seed=1), **options, folder=tmp_path)
    monkeypatch.setattr(Learner, "evaluate", evaluate)
    report = tune(model, tokenizer, random_samples(8, seed=1), **options, folder=tmp_path)
    assert report.steps == 4 and [one.step for one in report.records if one.split == "dev"] == [0, 1, 2, 3, 4]


def test_patience():
    model, tokenizer = asked_model()
    options = {**QUICK, "steps": 30, "dev": 0.5, "evaluate_every": 1, "patience": 2, "lr": 0.1, "warmup": 0}
    report = tune(model, tokenizer, random_samples(8), **options)
    assert report.stopped == "early" and report.steps == report.best_step + 2 < 30


def test_packets_and_weights_in_one_run(tmp_path):
    """The adapter and the weights learn for each other, and what was saved serves packets of depth k."""
    model, tokenizer = asked_model()
    start, adapter = copy.deepcopy(model), PacketAdapter.for_model(model, 2, 2)
    soft = adapter.header.detach().clone()
    samples = random_samples(6, per_context=2)
    options = {**QUICK, "steps": 20, "packet_share": 1.0, "adapter_lr": 2e-2, "lr": 2e-2, "dev": samples[:0] or None}
    report = tune(model, tokenizer, samples, **options, adapter=adapter, folder=tmp_path)
    assert report.records[-1].loss < 0.5 * report.records[0].loss and not torch.equal(adapter.header, soft)
    saved = PacketAdapter.load(tmp_path / "adapter.safetensors", model)
    assert torch.equal(saved.header, adapter.header) and adapter.notes["training"]["steps"] == 20
    assert adapter.header.grad is None
    loaded, _ = load_tuned(tmp_path, start)
    kvspeed.patch_model(loaded)
    packets = [kvspeed.build_packet(loaded, tokenizer, text, saved) for text in samples[0].documents]
    assert packets[0].keys.shape[0] == 4
    with pytest.raises(ValueError, match="packets hold documents, and the data have none"):
        tune(model, tokenizer, chats(2), **QUICK, adapter=adapter)


def test_a_share_of_the_contexts_stands_in_packets(monkeypatch):
    model, tokenizer = asked_model()
    seen: list[bool] = []
    from kvspeed.speed.tuning.forward import Learner

    backward = Learner.backward

    def watch(self, items, scale):
        seen.extend(item.packets for item in items if item.context is not None)
        return backward(self, items, scale)

    monkeypatch.setattr(Learner, "backward", watch)
    data = [*random_samples(8), *chats(2)]
    options = {**QUICK, "steps": 12, "batch_size": 5, "packet_share": 0.5}
    tune(model, tokenizer, data, **options, adapter=PacketAdapter.for_model(model, 2, 2))
    assert 0.2 < sum(seen) / len(seen) < 0.8


def test_a_models_own_peft_adapter_is_trained_and_stays_on():
    import peft

    model, tokenizer = asked_model()
    before = weights(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config)
    report = tune(wrapped, tokenizer, random_samples(4), **QUICK)
    assert report.trained_parameters == sum(w.numel() for w in wrapped.parameters() if w.requires_grad)
    lora_b = [weight for name, weight in wrapped.named_parameters() if "lora_B" in name]
    assert all(weight.abs().max() > 0 and weight.requires_grad for weight in lora_b)
    assert same(weights(wrapped.unload()), before) and remembered_spec(wrapped).k == 4


def test_a_peft_adapter_that_was_given_belongs_to_the_teacher():
    """Distillation is from the model as it is given: at full depth nothing is to be learned, in a row or a context."""
    import peft

    model, tokenizer = asked_model()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    options = {**QUICK, "k": None, "loss": "kl", "top": None, "steps": 2, "warmup": 0}
    report = tune(wrapped, tokenizer, [*random_samples(1), *chats(2)], **options)
    assert abs(report.records[0].loss) < 1e-4
    assert all(weight.abs().max() > 0 for name, weight in wrapped.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("option", ["anchor_tokens", "upper_attention", "k"])
def test_ablations_are_other_runs(option):
    """No anchor, SelfOnly and the control see other things, and so learn something else."""
    change = {"anchor_tokens": 0, "upper_attention": "self", "k": None}[option]
    samples, found = random_samples(4), []
    for options in (QUICK, {**QUICK, option: change}):
        model, tokenizer = asked_model()
        found.append(tune(model, tokenizer, samples, **options, warmup=0).records[0].loss)
        assert remembered_spec(model) == SpeedSpec(
            options["k"] or 6, options.get("anchor_tokens", 1), "transient", options.get("upper_attention", "causal")
        )
    assert abs(found[0] - found[1]) > 1e-5


def test_a_set_of_deep_layers():
    """Its first loss is that of the model patched so; the config says so."""
    model, tokenizer = asked_model()
    data = chats(1)
    options = {**QUICK, "k": None, "deep_layers": [1, 2, 5], "warmup": 0, "steps": 1}
    ids = tokenizer.apply_chat_template(data[0]["messages"], tokenize=False)
    ids = torch.tensor([tokenizer(ids, add_special_tokens=False)["input_ids"]])
    labels = torch.full_like(ids, -100)
    labels[:, -3:] = ids[:, -3:]
    patched = kvspeed.patch_model(copy.deepcopy(model), deep_layers=[1, 2, 5])
    with torch.no_grad():
        wanted = patched(ids, labels=labels).loss.item()
    assert tune(model, tokenizer, data, **options).records[0].loss == pytest.approx(wanted, rel=1e-4)
    assert remembered_spec(model) == SpeedSpec(5, gaps=(1, 2))
    assert tune(model, tokenizer, random_samples(2), **options).steps == 1
    for change, message in (
        ({"k": 4}, "they say the same thing"),
        ({"deep_layers": [0]}, "give layers from 1 to 5"),
        ({"adapter": PacketAdapter.for_model(model, 1, 1)}, "packets need a depth k"),
    ):
        with pytest.raises(ValueError, match=message):
            tune(model, tokenizer, random_samples(2), **{**options, **change})


@pytest.mark.parametrize("patched", [None, 3])
def test_a_patched_model_stays_patched_and_learns_the_same(patched):
    samples, found = random_samples(4), []
    for depth in (None, patched or 6):
        model, tokenizer = asked_model()
        if depth is not None:
            kvspeed.patch_model(model, depth)
        state = state_of(model)
        tune(model, tokenizer, samples, **QUICK)
        assert state_of(model) is state
        found.append(weights(model))
    assert same(*found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 7}, "k is 7 and the model has 6 layers"),
        ({"anchor_tokens": -1}, "anchor_tokens is -1"),
        ({"boundary": "maybe"}, "boundary is 'maybe'"),
        ({"upper_attention": "none"}, "upper_attention is 'none'"),
        ({"method": "adapter"}, "method: got 'adapter', choose from 'lora', 'full'"),
        ({"loss": "mse"}, "loss: got 'mse'"),
        ({"labels": "mine"}, "labels: got 'mine'"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"lr": 0.0}, "lr: got 0.0"),
        ({"lr": float("nan")}, "lr: got nan"),
        ({"rank": 0}, "rank: got 0"),
        ({"steps": 0}, "steps: got 0"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"packet_share": 2.0}, "packet_share: got 2.0"),
        ({"dev": 1.0}, "dev: got 1.0"),
        ({"dev": 0.01}, "leaves one side empty; .*, or 0 to"),
    ],
)
def test_refuses(change, message):
    model, tokenizer = asked_model()
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        tune(model, tokenizer, random_samples(4), **{**QUICK, **change})
    assert same(weights(model), before) and state_of(model) is None


@pytest.mark.parametrize("name", ["lr", "adapter_lr", "alpha", "clip", "packet_share", "seed"])
@pytest.mark.parametrize("value", ["1", True])
def test_refuses_other_types(name, value):
    model, tokenizer = asked_model()
    with pytest.raises(TypeError, match=f"{name}: expected an? (number|integer), got {type(value).__name__}"):
        tune(model, tokenizer, random_samples(4), **{**QUICK, name: value})


def test_refuses_what_does_not_fit():
    model, tokenizer = asked_model()
    with pytest.raises(ValueError, match="data: got none"):
        tune(model, tokenizer, [], **QUICK)
    with pytest.raises(ValueError, match="has no answer to learn from"):
        tune(model, tokenizer, [{"messages": [{"role": "user", "content": "w100"}]}], **QUICK)
    with pytest.raises(ValueError, match="bfloat16, in which small steps are lost"):
        tune(copy.deepcopy(model).bfloat16(), tokenizer, random_samples(4), **QUICK, method="full")
    with pytest.raises(ValueError, match="its answer, more than the model's 4096 positions"):
        long = random_samples(1)[0]
        tune(model, tokenizer, [type(long)("long", ("w100 " * 4100,), "w101", ("w102",))], **QUICK)
    told: list[Any] = []
    with pytest.raises(ValueError, match=r"4096 positions: .*; max_new_tokens is 4090"):
        wanted = {**QUICK, "labels": "model", "max_new_tokens": 4090}
        tune(model, tokenizer, random_samples(4), **wanted, progress=lambda *seen: told.append(seen))
    assert not told  # the model was asked nothing
    model.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="last 2 layers share the KV of lower ones"):
        tune(model, tokenizer, random_samples(4), **QUICK)


PROCESS = """
from kvspeed.speed import tune
from test_tune import QUICK
from train_tools import asked_model, random_samples, same, weights
model, tokenizer = asked_model()
report = tune(
    model, tokenizer, random_samples(14, per_context=2, seed=11),
    **{{**QUICK, "dev": 0.3, "loss": "kl", "evaluate_every": 2, "folder": {folder!r}}},
)
print(report.steps, report.best_dev)
"""


def test_two_processes_do_the_work_of_one(tmp_path):
    """Over gloo on CPUs: the same weights within rounding, and one of the processes writes."""
    pytest.importorskip("accelerate")
    said = two_processes(PROCESS, tmp_path / "two")
    model, tokenizer = asked_model()
    samples = random_samples(14, per_context=2, seed=11)
    report = tune(model, tokenizer, samples, **{**QUICK, "dev": 0.3, "loss": "kl", "evaluate_every": 2})
    two, _ = load_tuned(tmp_path / "two", asked_model()[0])
    for (name, one), other in zip(weights(model).items(), weights(two).values(), strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=5e-3, msg=name)
    assert float(said.split()[1]) == pytest.approx(report.best_dev, rel=1e-2)


# ---- other people's loops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
def test_transformers_trainer_works_unchanged(tmp_path, wrapped):
    """On a patched model the Trainer trains under SPEED: the loss of its first step is that of the masked forward."""
    pytest.importorskip("accelerate")
    from speed_tools import masked, rule
    from test_speed_training import read
    from transformers import Trainer, TrainingArguments

    model, _ = asked_model()
    reference = copy.deepcopy(model)
    model = kvspeed.patch_model(model, 4).train()
    if wrapped:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    text = "ppppppaaa"
    ids = torch.randint(3, 512, (4, len(text)))
    labels = torch.where(torch.tensor([letter == "a" for letter in text]), ids, -100)
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    with torch.no_grad(), masked(reference, rule(read(text)[0])):
        wanted = reference(ids, labels=labels, use_cache=False).loss.item()
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=8, learning_rate=1e-2, report_to=[], use_cpu=True,
        logging_steps=1, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(wanted, rel=1e-3) and losses[-1] < losses[0]


def test_the_fused_lora_product_is_pefts_own():
    """In bfloat16: result and gradients, whatever the shapes; disabled adapters are not there."""
    import peft
    from kvspeed.speed.tuning.products import bfloat16_work

    model, _ = asked_model("qwen2")  # with biases
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    )
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    layers = [model.model.layers[2].self_attn.q_proj, model.model.layers[1].mlp.up_proj]
    for layer in layers:
        x = torch.randn(2, 7, layer.in_features, requires_grad=True)
        weights = [layer.lora_A.default.weight, layer.lora_B.default.weight]
        found = []
        for low in (False, True):
            with bfloat16_work(wrapped, "lora", low):
                for one in (x, *weights):
                    one.grad = None
                y = layer(x)
                (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
                with torch.no_grad(), wrapped.disable_adapter():
                    bare = layer(x)
                found.append([y.detach(), bare, *(one.grad.clone() for one in (x, *weights))])
        assert "forward" not in layer.__dict__ and layer.base_layer.weight.dtype == torch.float32
        for exact, near in zip(*found, strict=True):
            error = (exact - near).abs().max() / exact.abs().max()
            assert 0 < error < 0.03 and near.dtype == torch.float32
