# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`kvspeed eval speed` on a tiny model: names, weights, files, going on, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_tools import refused, run, save_model
from kvspeed import PacketAdapter
from kvspeed.eval.expand import expanded
from kvspeed.eval.methods import SPEED_METHODS
from kvspeed.eval.swiftkv import SwiftKV


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", layers=3)


@pytest.fixture(scope="module")
def network(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir)


TASKS = "copying:documents=1:kinds=function,long:tokens=40:samples=1"
SMALL = ["--tasks", TASKS, "--samples", 2, "--max-new-tokens", 3, "--timed", 1, "--steps", 2]


def evaluated(*arguments):
    result = run("eval", "speed", *SMALL, *arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


@pytest.mark.parametrize(
    ("asked", "depths", "found"),
    [
        ("full,speed", [2, 3], "full,speed-2,speed-3"),
        ("speed-noanchor,selfonly", [20], "speed-20-noanchor,selfonly-20"),
        ("swiftkv,swiftkv-share2,pop", [4], "swiftkv-4,swiftkv-4-share2,pop-4"),
        ("speed@tuned,packet+speed@both", [5], "speed-5@tuned,packet+speed-5@both"),
        ("speed-7,swiftkv-7-share3,packet", [5], "speed-7,swiftkv-7-share3,packet"),
        ("speed,speed-5", [5], "speed-5"),
        ("what", [5], "what"),
    ],
)
def test_families_at_their_depths(asked, depths, found):
    assert expanded(asked.split(","), depths, SPEED_METHODS) == tuple(found.split(","))


def test_a_family_without_a_depth():
    with pytest.raises(ValueError, match="speed-noanchor needs a depth: give --k, or write speed-22-noanchor"):
        expanded(["speed-noanchor"], [], SPEED_METHODS)


def test_one_command_writes_everything(tmp_path, model_dir, network):
    pytest.importorskip("matplotlib")
    PacketAdapter.for_model(network, header=2, trailer=1).save(tmp_path / "soft.safetensors")
    weights = SwiftKV.for_model(network, 2)
    weights.trained = True
    weights.save(tmp_path / "swift.safetensors")
    (tmp_path / "swift.safetensors.json").write_text('{"tokens_per_second": 12.5, "seconds": 3, "other": 1}')
    files = ["--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md", "--plots", tmp_path / "plots"]
    given = ["--adapter", tmp_path / "soft.safetensors", "--weights", f"swiftkv-2={tmp_path / 'swift.safetensors'}"]
    families = "full,speed,speed-noanchor,selfonly,swiftkv,pop,packet,packet+speed"
    result = evaluated("--model", model_dir, *files, *given, "--methods", families, "--k", "1,2")
    assert "swiftkv-1 has no trained weights" in result.stderr and "swiftkv-2 has" not in result.stderr
    assert "speed-1-noanchor has no weights of its own" in result.stderr and "pop-1 has" not in result.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    names = ["full"] + [f"{f}-{k}" for f in ("speed",) for k in (1, 2)] + ["speed-1-noanchor", "speed-2-noanchor"]
    names += [f"{f}-{k}" for f in ("selfonly", "swiftkv", "pop") for k in (1, 2)] + ["packet"]
    names += ["packet+speed-1", "packet+speed-2"]
    assert [row["method"] for row in found["rows"]] == names * 2
    rows = {(row["method"], row["task"]): row for row in found["rows"]}
    long = "long:tokens=40:samples=1"
    full, speed, pop = (rows[name, long] for name in ("full", "speed-1", "pop-1"))
    assert full["questions"] == 1 and rows["full", TASKS.split(",")[0]]["questions"] == 2
    assert 0.3 < speed["kv_bytes"] / full["kv_bytes"] < 0.36 and pop["kv_bytes"] == full["kv_bytes"]
    assert speed["flops"] < pop["flops"] < full["flops"]
    assert all(row["step_s"] > 0 and row["step_speedup"] > 0 and row["ttft_s"] > 0 for row in found["rows"])
    assert {entry["category"] for entry in found["averages"]} == {"copying", "long context", "all"}
    assert found["kind"] == "kvspeed.eval.speed" and found["weights"]["swiftkv-2"]["training"]["seconds"] == 3
    text = (tmp_path / "r.md").read_text()
    assert "| speed-2-noanchor |" in text and "**Training**" in text and "| swiftkv-2 | 12 |" in text
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"score-depth.png", "costs-length.png", "loops.png"}
    again = run("eval", "plot", tmp_path / "r.json", tmp_path / "again")
    assert again.exit_code == 0 and (tmp_path / "again" / "loops.png").exists()


def test_weights_of_a_method(tmp_path, model_dir, network):
    """A folder of tuned weights serves the method of its name, or the one that names it; records know which."""
    tuned = save_model(tmp_path / "tuned", layers=3, seed=5)
    path, base = tmp_path / "r.json", ["--model", model_dir]
    given = [*base, "--json", path, "--methods", "full,speed-2,speed-1@speed-2,cut-2", "--weights", f"speed-2={tuned}"]
    evaluated(*given)
    records = [json.loads(line) for line in path.with_name("r.json.records").read_text().splitlines()[1:]]
    made_with = {row["method"]: row["adapter"] for row in records}
    assert made_with["full"] is None and made_with["cut-2"] is None
    assert made_with["speed-2"] == made_with["speed-1@speed-2"] is not None
    before = path.with_name("r.json.records").read_text()
    evaluated(*given)
    assert path.with_name("r.json.records").read_text() == before
    other = save_model(tmp_path / "other", layers=3, seed=6)
    evaluated(*given[:-1], f"speed-2={other}")
    more = path.with_name("r.json.records").read_text()
    assert more.startswith(before) and len(more.splitlines()) == len(before.splitlines()) + 2 * 3


def test_a_lora_finds_its_model(tmp_path, model_dir, network):
    """It is merged into a copy of the run's model, or into the one it names where it was made for another."""
    peft = pytest.importorskip("peft")
    import torch
    from kvspeed.eval.weights import load_weights
    from kvspeed.fingerprint import model_fingerprint
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir)
    lora = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in lora.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1)
    folder = tmp_path / "lora"
    lora.save_pretrained(folder)
    damaged = '"records": [], "seconds": "9", "method": 3, "peak_memory_bytes": [1], "trained_tokens": NaN'
    (folder / "report.json").write_text(f'{{"tokens_per_second": 7, {damaged}}}')
    before = model_fingerprint(network)
    found = load_weights(folder, network)
    assert found.training == {"tokens_per_second": 7} and model_fingerprint(network) == before
    assert found.fingerprint() != before[:16]
    (folder / "kvspeed-lora.json").write_text(json.dumps({"base_fingerprint": "another", "base_dtype": "x"}))
    other = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "other", layers=3, seed=9))
    assert load_weights(folder, other).fingerprint() == found.fingerprint()


def test_weights_of_another_kind_of_model_are_refused(tmp_path, model_dir):
    given = ["--model", model_dir, "--methods", "speed-2", "--weights"]
    for architecture, settings, words in (
        ("qwen3", {"layers": 3}, "another architecture (qwen3) than the run's own (llama)"),
        ("llama", {"layers": 4}, "another number of layers (4) than the run's own (3)"),
    ):
        other = save_model(tmp_path / f"{architecture}{settings['layers']}", architecture, **settings)
        assert words in refused(run("eval", "speed", *SMALL, *given, f"speed-2={other}"))


def test_the_list_needs_no_model():
    result = run("eval", "speed", "--list")
    assert (
        result.exit_code == 0
        and "instruction" in result.stdout
        and "is a depth" in result.stdout
        and "swiftkv-<n>-share<n>" in result.stdout
    )


def test_training_swiftkv(tmp_path, model_dir):
    samples = tmp_path / "s.jsonl"
    asked = ["--tasks", "copying:documents=1:kinds=function", "--samples", 6]
    assert run("eval", "samples", samples, *asked).exit_code == 0
    out = tmp_path / "w.safetensors"
    given = ["--samples", samples, "--k", 2, "--steps", 2, "--dev", 0.34, "--batch-size", 2, "--model", model_dir]
    result = run("eval", "train-swiftkv", out, *given)
    assert result.exit_code == 0, (result.stderr, result.exception)
    facts = json.loads((tmp_path / "w.safetensors.json").read_text())
    assert facts["steps"] == 2 and facts["k"] == 2 and facts["tokens_per_second"] > 0 and facts["dev_samples"] == 2
    evaluated("--model", model_dir, "--methods", "swiftkv-2", "--weights", f"swiftkv-2={out}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "speed"], "speed needs a depth: give --k"),
        (["--methods", "sped", "--k", "2"], "method: 'sped' is not known (did you mean speed-<n>?)"),
        (["--methods", "speed", "--k", "2,x"], "--k: got 'x'"),
        (["--methods", "speed", "--k", "9"], "k: is 9 and the model has 3 layers"),
        (["--methods", "packet+speed", "--k", "2"], "packet+speed-2 needs a trained adapter"),
        (["--methods", "speed-2", "--weights", "speed-1=x"], "--weights: no method uses speed-1"),
        (["--methods", "speed-2", "--weights", "speed-2=/nowhere"], "/nowhere: there is no such folder or file"),
        (["--methods", "speed-2", "--weights", "speed-2=a", "--weights", "speed-2=b"], "have one name, speed-2"),
        (["--methods", "speed-2@b"], "speed-2@b needs weights or an adapter named 'b'; those given are none"),
        (["--methods", "full", "--tasks", "copying:kinds=x"], "kinds: got 'x'"),
    ],
)
def test_refusals(model_dir, arguments, words):
    assert words in refused(run("eval", "speed", "--model", model_dir, "--samples", 1, *arguments))


def test_records_of_packets_are_no_records_of_speed(tmp_path, model_dir):
    path = tmp_path / "r.json"
    result = run("eval", "packets", *SMALL[:-2], "--model", model_dir, "--json", path, "--methods", "nocache")
    assert result.exit_code == 0, result.stderr
    other = run("eval", "speed", *SMALL, "--model", model_dir, "--json", path, "--methods", "full")
    assert "belongs to another run: its kind is None, and now it is 'speed'" in refused(other)
