# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A small RAG over text files: every passage is computed once, kept on disk, and never computed again.

    python examples/rag.py docs/*.txt -q "What was decided in March?" -q "By whom?"
    python examples/rag.py docs/*.txt                      # asks for questions
    python examples/rag.py docs/*.txt --model DIR --adapter DIR/adapter.safetensors     # with trained soft tokens
    python examples/rag.py docs/*.txt --k 24               # the same in 24 layers (SPEED), on a model tuned for it

Passages are found by BM25, which needs nothing but the words. Their KV lies in a `PacketStore`, a packet each; a
question takes the packets of the passages found, in any order, and only its own few tokens are computed.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kvspeed

INSTRUCTION = "Answer the question from these passages, in a few words.\n\n"
WORDS = 160  # a passage, about 200 tokens


def passages(text: str) -> list[str]:
    """`text` in pieces of whole paragraphs, each of about `WORDS` words."""
    pieces: list[str] = []
    for paragraph in (part.strip() for part in re.split(r"\n\s*\n", text)):
        if pieces and len(pieces[-1].split()) + len(paragraph.split()) <= WORDS:
            pieces[-1] += "\n\n" + paragraph
        elif paragraph:
            pieces.append(paragraph)
    return pieces


class BM25:
    """Ranks passages by the words that they share with a question."""

    def __init__(self, texts: list[str]) -> None:
        self.counts = [Counter(self._words(text)) for text in texts]
        self.lengths = [max(1, sum(count.values())) for count in self.counts]
        self.mean = sum(self.lengths) / len(self.lengths)
        self.containing = Counter(word for count in self.counts for word in count)

    def best(self, question: str, n: int) -> list[int]:
        """Indices of the `n` best passages, best first."""
        scores = [self._score(self._words(question), i) for i in range(len(self.counts))]
        return sorted(range(len(scores)), key=lambda i: -scores[i])[:n]

    def _score(self, words: list[str], i: int) -> float:
        score = 0.0
        for word in words:
            there = self.counts[i][word]
            rarity = math.log(1 + (len(self.counts) - self.containing[word] + 0.5) / (self.containing[word] + 0.5))
            score += rarity * there * 2.2 / (there + 1.2 * (0.25 + 0.75 * self.lengths[i] / self.mean))
        return score

    @staticmethod
    def _words(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())


def load_model(name: str | None) -> tuple[Any, Any]:
    """(model, tokenizer): SmolLM2-135M-Instruct, or whatever `name` names."""
    if name is None:
        from kvspeed.smollm2 import load_smollm2

        return load_smollm2()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask questions about text files.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-q", "--question", action="append", help="may be given several times; none: ask for them")
    parser.add_argument("--model", help="a folder or name for transformers; default: SmolLM2-135M-Instruct")
    parser.add_argument("--adapter", type=Path, help="soft tokens trained for the model; default: none")
    parser.add_argument("--k", type=int, help="layers that see the documents (SPEED); default: all")
    parser.add_argument("--passages", type=int, default=3, help="passages a question")
    parser.add_argument("--store", default="packet-store", help="folder or URL for the packets")
    options = parser.parse_args(arguments)

    try:
        texts = [piece for file in options.files for piece in passages(file.read_text(encoding="utf-8"))]
    except OSError as error:
        print(f"rag.py: {error.filename} cannot be read ({error.strerror})", file=sys.stderr)
        return 2
    if not texts:
        parser.error("the files hold no text")
    model, tokenizer = load_model(options.model)
    kvspeed.patch_model(model, k=options.k)
    adapter = kvspeed.PacketAdapter.load(options.adapter, model) if options.adapter else None
    begin = time.perf_counter()
    store = kvspeed.PacketStore(options.store, model=model, tokenizer=tokenizer, adapter=adapter)
    ids = store.add([text + "\n\n" for text in texts])
    print(
        f"{len(ids)} passages, {store.stats().bytes / 2**20:.1f} MiB in {options.store}: "
        f"{store.counters.built} computed, the others found, in {time.perf_counter() - begin:.1f} s"
    )

    index = BM25(texts)
    for question in options.question or map(str.strip, iter(lambda: _ask(), "")):
        found = index.best(question, options.passages)
        answer, stats = kvspeed.generate(
            model, tokenizer, question, store.load([ids[i] for i in found]), preamble=INSTRUCTION, return_stats=True
        )
        print(f"\n{question}\n  {answer.strip()}")
        print(f"  first token after {stats.ttft_s * 1e3:.0f} ms, over {stats.prefix_tokens} stored tokens; read:")
        for i in found:
            print(f"    {' '.join(texts[i].split())[:90]} ...")
    return 0


def _ask() -> str:
    try:
        return input("\nquestion (empty: leave) > ")
    except EOFError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
