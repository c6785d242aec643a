# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Steps of SPEED tuning against the same steps at full depth: the paper's training tokens a second.

    python bench/bench_tuning.py                     # k = 22 of 30; conversations, and documents with questions
    python bench/bench_tuning.py --k 24 --prompt 2048 --rounds 9

SmolLM2 takes steps of `kvspeed.speed.tune` (LoRA: forward, backward, AdamW) on the same data at both depths in turn.
Target: 1.25 times the tokens a second at k = 22 (arXiv:2605.06105 reports 1.29 at 3/4 of the layers). The control is
spared the same work: it too runs a context once for all its questions, and makes logits for answers alone.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import kvspeed
import torch
from kvspeed.eval.tasks import GENERATED
from kvspeed.smollm2 import load_smollm2
from models import Stamp, add_sample, prompt_of
from timing import Comparison, Timing, save, wait_until_idle

STEPS = 3  # of a call; the first is not measured


def conversations(tokenizer: Any, prompt: int, answer: int, count: int) -> list[dict[str, Any]]:
    """Prompts of different lengths, `prompt` tokens on average, and answers, of real text."""
    lengths = [prompt * (3 + index % 3) // 4 for index in range(count)]
    text = [tokenizer.decode(prompt_of(tokenizer, length + answer)) for length in lengths]
    cut = [len(tokenizer.decode(prompt_of(tokenizer, length))) for length in lengths]
    return [
        {"messages": [{"role": "user", "content": one[:at]}, {"role": "assistant", "content": one[at:]}]}
        for one, at in zip(text, cut, strict=True)
    ]


def steps(model: Any, tokenizer: Any, data: Any, k: int | None, batch: int, timing: Timing, bf16: bool) -> int:
    """Takes steps, and times all but the first; returns the tokens of all."""
    stamps: list[Stamp] = []
    report = kvspeed.speed.tune(
        model, tokenizer, data, k=k, steps=STEPS, batch_size=batch, dev=0, dtype="bf16" if bf16 else None,
        progress=lambda what, done, total, record: stamps.append(Stamp.now()),
    )  # fmt: skip
    for before, after in itertools.pairwise(stamps):
        add_sample(timing, before, after)
    return report.trained_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=22, help="layers that see the prompt (of 30)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a conversation's prompt, on average")
    parser.add_argument("--answer", type=int, default=32, help="tokens of its answer")
    parser.add_argument("--batch", type=int, default=6, help="conversations a step; documents take four times as many")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16")
    options = parser.parse_args()

    model, tokenizer = load_smollm2()
    samples = GENERATED["multihop"](4 * options.batch, seed=0, split="train", questions_per_context=4)
    cases = {
        "conversations": (conversations(tokenizer, options.prompt, options.answer, options.batch), options.batch),
        "documents": (samples, 4 * options.batch),
    }
    depths = {f"SPEED k={options.k}": options.k, "full depth": None}
    for case, (data, batch) in cases.items():
        timings = {name: Timing() for name in depths}
        tokens = {name: 0 for name in depths}
        for turn in range(options.rounds):
            wait_until_idle(2.0)
            for name in list(depths)[:: 1 if turn % 2 else -1]:
                tokens[name] += steps(model, tokenizer, data, depths[name], batch, timings[name], options.bf16)
        comparison = Comparison(timings, torch.get_num_threads())
        own, control = depths
        each = {name: tokens[name] // (options.rounds * STEPS) for name in depths}  # every step has all the data
        ratio = comparison.ratio(control, own) * each[own] / each[control]
        about = {"case": case, "k": options.k, "batch": batch, "bf16": options.bf16, "tokens a step": each[own]}
        kept = save(f"tuning_{case}", comparison, case=about, ratios={"training tokens/s over full depth": ratio})
        print(f"\n{case}: {each[own]} tokens a step, {comparison.clean_share():.0%} of samples clean")
        for name in depths:
            seconds = comparison.seconds(name)
            print(f"  {name:<12} {seconds:7.3f} s a step   {each[name] / seconds:7.0f} tokens/s")
        print(f"  {ratio:.2f}x the tokens/s; saved in {kept}")


if __name__ == "__main__":
    main()
