# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SPEED in `generate`: TTFT, time per token and KV bytes of a patched SmolLM2 over those of the unpatched one.

    python bench/bench_generate.py                       # k = 22 of 30, prompts of 2,048 and 8,000 tokens
    python bench/bench_generate.py --tokens 2048 --rounds 9

Both models have the same weights and the same prompt, real text. They run in turn, each round beginning with the other
one. The weights are not trained for SPEED: what is measured is cost, not answers. Targets: TTFT 0.76 and KV bytes 0.74
at 2,048 tokens, time per token 0.8 at 8,000.
"""

from __future__ import annotations

import argparse

from kvspeed import patch_model
from models import Trial, load_pair, plain_generate, prompt_of
from timing import wait_until_idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=22, help="layers that see the prompt (of 30)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8000], help="prompt lengths")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    plain, fast, tokenizer = load_pair()
    patch_model(fast, k=options.k)
    models = {"unpatched": plain, f"SPEED k={options.k}": fast}
    for model in models.values():  # threads, allocator, code: the first run is not measured
        plain_generate(model, prompt_of(tokenizer, 256), 4)
    for tokens in options.tokens:
        ids = prompt_of(tokenizer, tokens)
        trial = Trial(f"{tokens} tokens of prompt, {options.new_tokens} of answer")
        for turn in range(options.rounds):
            wait_until_idle(2.0)
            for name in list(models)[:: 1 if turn % 2 else -1]:
                trial.add(name, *plain_generate(models[name], ids, options.new_tokens))
        trial.report(f"generate_{tokens}", "unpatched", k=options.k)


if __name__ == "__main__":
    main()
