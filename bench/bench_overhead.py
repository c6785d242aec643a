# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What kvspeed costs where it brings nothing: its import beyond torch's own, a patched model's step at k = L, and the
host's part of an attention call.

    python bench/bench_overhead.py

Import: fresh processes that have torch (and, as a second case, transformers' model class) loaded already, and then
import kvspeed, or also every name that a user of it calls. Step: the unpatched and the patched (k = None) model, with
the same weights, take turns, one decode step each, through the models' forward. Calls: see host_time.py.
Targets: 50 ms; 1.03 of the unpatched; 6 us a call with its launches, whatever the number of segments.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median
from typing import Any

import torch
from host_time import CALLS, compare_calls, microseconds
from kvspeed import KVCache, patch_model
from kvspeed.models import cache_argument
from models import Stamp, add_sample, load_pair, prompt_of
from timing import Comparison, Timing, save

IMPORTS = {
    "import kvspeed, after torch": ("import torch", "import kvspeed"),
    "kvspeed and its names, after torch and transformers": (
        "import torch, transformers.generation.utils; from transformers import LlamaForCausalLM, AutoTokenizer",
        "import kvspeed; kvspeed.ops; kvspeed.patch_model; kvspeed.build_packet; kvspeed.generate",
    ),
}


def import_seconds(before: str, timed: str) -> float:
    """Seconds that `timed` takes in a fresh interpreter after `before`."""
    code = f"{before}\nimport time\nbegin = time.perf_counter()\n{timed}\nprint(time.perf_counter() - begin)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@torch.no_grad()
def compare_steps(models: dict[str, Any], ids: torch.Tensor, steps: int) -> Comparison:
    """Single decode steps after the prompt `ids`, models in turn."""
    name = cache_argument(next(iter(models.values())))
    timings = {method: Timing() for method in models}
    caches = {}
    for method, model in models.items():
        # As generate does it: a patched model gets a KVCache with room, another one makes its own cache.
        patched = "patched" in method.split()
        cache = KVCache(model.config, capacity=ids.shape[1] + steps + 8) if patched else None
        caches[method] = getattr(model(ids, use_cache=True, logits_to_keep=1, **{name: cache}), name)
    token = ids[:, -1:]
    for step in range(steps + 5):
        for method in list(models)[:: 1 if step % 2 else -1]:
            before = Stamp.now()
            models[method](token, use_cache=True, logits_to_keep=1, **{name: caches[method]})
            if step >= 5:
                add_sample(timings[method], before, Stamp.now())
    return Comparison(timings, torch.get_num_threads())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imports", type=int, default=7, help="fresh processes for each import")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 512, 2048], help="prompt lengths")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15, help="samples of each kind of call")
    parser.add_argument("--calls-only", action="store_true", help="time the calls, and nothing else")
    options = parser.parse_args()

    calls = compare_calls(options.rounds)
    times = microseconds(calls)
    for name, microsecond in times.items():
        print(f"{name}: {microsecond:.2f} us")
    save("overhead_calls", calls, case={"calls of a sample": CALLS}, ratios={}, microseconds=times)
    if options.calls_only:
        return
    imports = {}
    for case, code in IMPORTS.items():
        seconds = [import_seconds(*code) for _ in range(options.imports)]
        imports[case] = seconds
        print(f"{case}: median {median(seconds) * 1e3:.1f} ms, least {min(seconds) * 1e3:.1f} ms")
    plain, fast, tokenizer = load_pair()
    models = {"unpatched": plain, "patched k=L": patch_model(fast)}
    for tokens in options.tokens:
        found = compare_steps(models, torch.tensor([prompt_of(tokenizer, tokens)]), options.steps)
        print(f"\none step after {tokens} tokens")
        print(found.table("unpatched"))
        ratios = {"patched over unpatched": found.ratio("patched k=L", "unpatched")}
        save(
            f"overhead_{tokens}", found, case={"tokens": tokens, "steps": options.steps}, ratios=ratios, imports=imports
        )


if __name__ == "__main__":
    main()
