# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Packets: TTFT of a question about 2,000 tokens of documents, over full recompute of the same tokens.

    python bench/bench_packets.py
    python bench/bench_packets.py --k 24 --rounds 15

Full recompute is the unpatched model and transformers' own `generate` on the same token ids. The packets are built
once, beforehand; checking and assembling them, the question's forward and whatever else `kvspeed.generate` does are
inside the time. Target: TTFT 0.06 in view mode.
"""

from __future__ import annotations

import argparse

import kvspeed
from kvspeed.data import documents
from kvspeed.packet import prompt_ids
from models import NEVER, Stamps, Trial, load_pair, plain_generate
from timing import wait_until_idle

QUESTION = "In which bay on the east coast of Canada are the highest tides of the world, and how high are they?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=22, help="depth of the rows with SPEED (of 30)")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    plain, fast, tokenizer = load_pair()
    texts = [document.text + "\n\n" for document in documents()]
    packets = {}
    for k in (None, options.k):
        kvspeed.patch_model(fast, k=k)
        packets[k] = [kvspeed.build_packet(fast, tokenizer, text) for text in texts]
    ids = prompt_ids(tokenizer, QUESTION)
    whole = [*ids.preamble, *(token for packet in packets[None] for token in packet.token_ids), *ids.question]

    methods: dict[str, tuple[int | None, str] | None] = {"full recompute": None}
    for k in (None, options.k):
        for mode in ("view", "copy"):
            methods[f"packets, {mode}" + (f", SPEED k={k}" if k else "")] = (k, mode)
    trial = Trial(f"{len(whole)} tokens: {len(texts)} documents, question of {len(ids.question)} with its chat tokens")
    order = list(methods)
    for turn in range(-1, options.rounds):  # the first turn is not measured
        wait_until_idle(2.0)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            method = methods[name]
            if method is None:
                stamps, kv_bytes = plain_generate(plain, whole, options.new_tokens)
            else:
                k, mode = method
                kvspeed.patch_model(fast, k=k)
                clock = Stamps()
                _, stats = kvspeed.generate(
                    fast,
                    tokenizer,
                    QUESTION,
                    packets[k],
                    mode=mode,
                    max_new_tokens=options.new_tokens,
                    return_stats=True,
                    eos_token_id=NEVER,
                    stopping_criteria=[clock],
                )
                stamps, kv_bytes = clock.taken, stats.kv_bytes
            if turn >= 0:
                trial.add(name, stamps, kv_bytes)
    trial.report("packets", "full recompute", k=options.k)


if __name__ == "__main__":
    main()
