# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Makes the testbed: SmolLM2 tuned to the generated tasks by a LoRA, the frozen model in which adapters are trained.

    python bench/make_testbed.py lora --folder build/first          # a quarter of an hour on one core
    torchrun --nproc_per_node 2 bench/make_testbed.py lora --folder build/testbed \\
        --begin-with build/first/lora.safetensors --people 2-8      # goes on from there, on two cores
    python bench/make_testbed.py merge --folder build/testbed       # the tuned model, as transformers loads it
    kvspeed train-adapter --model build/testbed/model --out build/testbed/universal \\
        --tasks biography,multihop,niah,niah-multikey
    python bench/make_testbed.py look --folder build/testbed --adapter build/testbed/universal/adapter.safetensors
    kvspeed tune-speed --model testbed --k 22 --rank 8 --adapter build/testbed/universal/adapter.safetensors ...
    python bench/make_testbed.py speed --run RUN --folder build/testbed     # what it learned, as it ships

The tuning sees full attention only, nothing of packets. Every context has several questions, which share one forward
over its documents. State is kept every 25 steps; the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from kvspeed.eval.score import f1
from kvspeed.eval.tasks import GENERATED
from kvspeed.packet import PacketAdapter
from kvspeed.packet.tensorfile import read_tensor_file, write_tensor_file
from kvspeed.packet.train.blocks import bfloat16_products, blocks_kv, rows_hidden
from kvspeed.packet.train.contexts import Context, contexts_of
from kvspeed.packet.train.processes import Processes
from kvspeed.packet.train.student import context_kv
from kvspeed.packet.train.teacher import greedy_answers
from kvspeed.samples import Sample
from kvspeed.smollm2 import load_smollm2
from kvspeed.testbed.lora import attach_lora, lora_tensors, merge_lora, peft_tensors, read_lora, set_lora, write_lora

KEEP = 25  # steps between checkpoints


SHARES = "biography=0.35,multihop=0.3,niah=0.1,niah-multikey=0.25"


def samples_of(
    split: str, seed: int, contexts: int, shared: str = SHARES, people: tuple[int, int] = (2, 7)
) -> list[Sample]:
    """`contexts` contexts of all tasks in their shares, mixed; `people` in a biography context, least and most."""
    shares = {name: float(share) for name, share in (part.split("=") for part in shared.split(","))}
    options: dict[str, dict[str, Any]] = {
        "biography": {"questions_per_context": 6, "documents": people},
        "multihop": {"questions_per_context": 4},
        "niah": {"chunks": (2, 6), "chunk_tokens": (40, 110)},
        "niah-multikey": {"chunks": (2, 5), "chunk_tokens": (40, 100), "questions_per_context": 4},
    }
    groups: list[list[Sample]] = []
    for task, share in shares.items():
        per = options[task].get("questions_per_context", 1)
        found = GENERATED[task](max(1, round(share * contexts)) * per, seed=seed, split=split, **options[task])
        groups += [found[start : start + per] for start in range(0, len(found), per)]
    random.Random(f"testbed/{split}/{seed}").shuffle(groups)
    return [sample for group in groups for sample in group]


def loss_of(model: Any, batch: list[Context], end: int) -> tuple[torch.Tensor, int]:
    """(summed cross-entropy of the answers' tokens, how many) under full attention."""
    embed = model.get_input_embeddings()
    total, count = torch.zeros(()), 0
    for context in batch:
        prefix = [*context.preamble, *(token for ids in context.documents for token in ids)]
        (kv,) = blocks_kv(model, [embed(torch.tensor(prefix))], [0])
        rows = [[*query.question, *query.target] for query in context.queries]
        hidden = rows_hidden(model, kv, [embed(torch.tensor(ids)) for ids in rows])
        picked = torch.cat([h[len(query.question) - 1 :] for h, query in zip(hidden, context.queries, strict=True)])
        targets = torch.tensor([token for query in context.queries for token in (*query.target, end)])
        logits = model.lm_head(picked).float()
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        count += len(targets)
    return total, count


def lora(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_smollm2()
    compute = torch.bfloat16 if options.bf16 else torch.float32
    trained = attach_lora(model, options.rank, alpha=2 * options.rank, compute=compute)
    if options.begin_with:
        set_lora(model, read_lora(options.begin_with)[0])
    processes = Processes.here(model)
    end = tokenizer.eos_token_id
    contexts = contexts_of(
        tokenizer, samples_of("train", options.seed, options.contexts, options.shares, options.people)
    )
    held = contexts_of(tokenizer, samples_of("dev", options.seed, 24))
    planned = len(contexts) // options.batch
    steps = min(planned, options.steps or planned)
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0)
    state = folder / "lora-state.safetensors"
    begin, spent = restore(state, trained, optimizer)
    for step in range(begin, steps):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate(step, planned, steps, options.fall_from)
        batch = contexts[step * options.batch : (step + 1) * options.batch]
        answers = sum(len(query.target) + 1 for context in batch for query in context.queries)
        loss = 0.0
        for context in batch[processes.index :: processes.count]:  # one graph at a time
            part, _ = loss_of(model, [context], end)
            (part / answers).backward()
            loss += part.item() / answers
        loss = processes.sum(loss)
        for weight in trained:
            processes.add_up(weight.grad)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent += time.perf_counter() - started
        if processes.is_main:
            print(f"step {step + 1}/{steps}  loss {loss:.4f}  {spent:.0f} s", flush=True)
        if processes.is_main and ((step + 1) % KEEP == 0 or step + 1 == steps):
            keep(state, trained, optimizer, step + 1, spent)
            if (step + 1) % (2 * KEEP) == 0 or step + 1 == steps:
                with torch.no_grad():
                    parts = [loss_of(model, [one], end) for one in held]
                dev = sum(part.item() for part, _ in parts) / sum(count for _, count in parts)
                print(f"step {step + 1}/{steps}  dev loss {dev:.4f}", flush=True)
                notes = {"seed": options.seed, "steps": step + 1, "contexts": options.contexts, "lr": options.lr}
                notes |= {"rank": options.rank, "batch": options.batch, "dev_loss": dev, "seconds": round(spent)}
                write_lora(folder / f"lora-{step + 1:04d}.safetensors", lora_tensors(model), notes)
                write_lora(folder / "lora.safetensors", lora_tensors(model), notes)


def rate(step: int, planned: int, steps: int, fall_from: int) -> float:
    """Up over 20 steps, then down towards `planned`; from `fall_from` on steeper, reaching zero at `steps`."""
    usual = min(1.0, (step + 1) / 20) * (1 - step / planned)
    return usual * min(1.0, (steps - step) / (steps - min(fall_from, steps - 1)))


def keep(path: Path, trained: list[Any], optimizer: Any, step: int, spent: float) -> None:
    tensors = {}
    for index, weight in enumerate(trained):
        state = optimizer.state[weight]
        tensors |= {f"{index}.weight": weight.detach()}
        tensors |= {f"{index}.{name}": state[name] for name in ("exp_avg", "exp_avg_sq", "step")}
    write_tensor_file(path, "kvspeed.testbed", 1, {"step": step, "seconds": spent}, tensors)


def restore(path: Path, trained: list[Any], optimizer: Any) -> tuple[int, float]:
    """(steps done, seconds spent) of an interrupted run; (0, 0.0) where there was none."""
    if not path.is_file():
        return 0, 0.0
    header, tensors = read_tensor_file(path, "kvspeed.testbed", 1)
    for index, weight in enumerate(trained):
        weight.data.copy_(tensors[f"{index}.weight"])
        optimizer.state[weight] = {
            name: tensors[f"{index}.{name}"].clone() for name in ("exp_avg", "exp_avg_sq", "step")
        }
    return header["step"], header["seconds"]


def merge(options: argparse.Namespace) -> None:
    model, tokenizer = load_smollm2()
    tensors, notes = read_lora(options.folder / options.lora)
    merge_lora(model, tensors)
    for part in (model, tokenizer):
        part.save_pretrained(options.folder / "model")
    print(json.dumps(notes))


def speed(options: argparse.Namespace) -> None:
    """A run of `kvspeed tune-speed` on the testbed, with soft tokens, as the two files that ship."""
    report = json.loads((options.run_folder / "report.json").read_text(encoding="utf-8"))
    notes = {name: report[name] for name in ("speed", "steps", "best_step", "best_dev", "trained_tokens", "seconds")}
    options.folder.mkdir(parents=True, exist_ok=True)
    write_lora(options.folder / "speed.safetensors", peft_tensors(options.run_folder), notes)
    PacketAdapter.load(options.run_folder / "adapter.safetensors").save(options.folder / "speed-adapter.safetensors")
    print(json.dumps(notes))


def average(options: argparse.Namespace) -> None:
    """The mean of several adapters, of which each was trained on from the one before: less noise than any of them."""
    adapters = [PacketAdapter.load(file) for file in options.adapter]
    mean = adapters[-1]
    with torch.no_grad():
        for name in ("header", "trailer"):
            getattr(mean, name).copy_(torch.stack([getattr(one, name) for one in adapters]).mean(0))
    mean.notes = {"averaged": [one.notes for one in adapters]}
    mean.save(options.out)


def look(options: argparse.Namespace) -> None:
    """F1 of full attention, plain packets, packets with each adapter, on samples of the dev split."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.folder / "model").eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model")
    none = PacketAdapter.for_model(model, 0, 0)
    ways: dict[str, PacketAdapter | None] = {"full": None, "none": none}
    ways |= {f"{file.parent.name}": PacketAdapter.load(file, model) for file in options.adapter}
    with torch.no_grad(), bfloat16_products(model) if options.bf16 else nullcontext():
        look_at(options, model, tokenizer, ways)


def look_at(options: argparse.Namespace, model: Any, tokenizer: Any, ways: dict[str, PacketAdapter | None]) -> None:
    end = frozenset([tokenizer.eos_token_id])
    for task in options.tasks.split(","):
        samples = GENERATED[task](options.count, seed=options.seed, split="dev")
        contexts = contexts_of(tokenizer, samples)
        by_id = {sample.id: sample for sample in samples}
        scores: dict[str, list[float]] = {name: [] for name in ways}
        wrong: dict[str, list[str]] = {name: [] for name in ways}
        for context in contexts:
            for name, adapter in ways.items():
                past = context_kv(model, context, adapter)
                written = greedy_answers(model, past, context.queries, end, 24)
                for query, (tokens, _) in zip(context.queries, written, strict=True):
                    text = tokenizer.decode(tokens, skip_special_tokens=True)
                    sample = by_id[query.id]
                    scores[name].append(f1(sample.prediction(text), sample.answers))
                    if scores[name][-1] < 1:
                        wrong[name].append(f"{text!r} for {sample.target!r}")
        for name, found in scores.items():
            mean = sum(found) / len(found)
            ratio = mean / (sum(scores["full"]) / len(found))
            print(f"{task:14} {name:20} F1 {mean:.3f}  of full {ratio:.3f}   {'; '.join(wrong[name][:3])}", flush=True)


def pair(text: str) -> tuple[int, int]:
    least, most = text.split("-")
    return int(least), int(most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("lora", help="tune SmolLM2 to the tasks")
    part.add_argument("--folder", type=Path, required=True, help="where state and results go")
    part.add_argument("--contexts", type=int, default=480, help="training contexts of 1 to 6 questions")
    part.add_argument("--shares", default=SHARES, help="of the tasks")
    part.add_argument("--begin-with", type=Path, help="go on from this update, with a new optimiser")
    part.add_argument("--people", type=pair, default=(2, 7), help="of a biography context, as 2-7")
    part.add_argument("--batch", type=int, default=4, help="contexts a step")
    part.add_argument("--steps", type=int, default=70, help="stop after so many")
    part.add_argument("--fall-from", type=int, default=25, help="step from which the rate falls to zero at --steps")
    part.add_argument("--rank", type=int, default=16)
    part.add_argument("--lr", type=float, default=1e-3)
    part.add_argument("--seed", type=int, default=0)
    part.add_argument("--threads", type=int, default=1)
    part.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="frozen products in bfloat16")
    part.set_defaults(run=lora)
    part = commands.add_parser("merge", help="write the tuned model as transformers loads it")
    part.add_argument("--folder", type=Path, required=True)
    part.add_argument("--lora", default="lora.safetensors", help="file in the folder")
    part.set_defaults(run=merge, threads=1)
    part = commands.add_parser("speed", help="files of the testbed from a run of kvspeed tune-speed")
    part.add_argument("--run", dest="run_folder", type=Path, required=True, help="its --out")
    part.add_argument("--folder", type=Path, required=True)
    part.set_defaults(run=speed, threads=1)
    part = commands.add_parser("average", help="the mean of several adapters of one model")
    part.add_argument("--adapter", type=Path, nargs="+", required=True)
    part.add_argument("--out", type=Path, required=True, help="the file to write")
    part.set_defaults(run=average, threads=1)
    part = commands.add_parser("look", help="F1 on a few samples of the dev split")
    part.add_argument("--folder", type=Path, required=True)
    part.add_argument("--adapter", type=Path, nargs="*", default=[])
    part.add_argument("--tasks", default="biography,multihop,niah,niah-multikey")
    part.add_argument("--count", type=int, default=60)
    part.add_argument("--seed", type=int, default=1)
    part.add_argument("--threads", type=int, default=1)
    part.add_argument("--bf16", action="store_true", help="products in bfloat16: twice as fast, a little off")
    part.set_defaults(run=look)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps({name: str(value) for name, value in vars(options).items() if name != "run"}), flush=True)
    options.run(options)


if __name__ == "__main__":
    main()
