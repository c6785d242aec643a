# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the tests of training share: a tiny model that is asked about random words, and dense oracles."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from kvspeed.packet.train.contexts import Context, Query
from kvspeed.packet.train.teacher import Answer
from kvspeed.samples import Sample
from packet_tools import CHAT_TEMPLATE, block_mask, embed, masked_logits, random_text, tiny_tokenizer
from tiny_models import EOS, tiny_model


def asked_model(architecture: str = "llama", **settings: Any) -> tuple[Any, Any]:
    """(model, tokenizer) with an end token and a chat template."""
    model = tiny_model(architecture, **settings)
    model.generation_config.eos_token_id = EOS
    return model, tiny_tokenizer(template=CHAT_TEMPLATE)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of everything in its state dict."""
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal to the bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def random_samples(count: int, *, per_context: int = 1, seed: int | None = None) -> list[Sample]:
    """`count` samples of random words; `per_context` neighbours have the same documents."""
    rng = random.Random(seed if seed is not None else random.random())

    def words(least: int, most: int) -> str:
        return random_text(rng.randint(least, most), seed=rng.randrange(10**6))

    samples = []
    for index in range(count):
        if index % per_context == 0:
            documents = tuple(words(1, 9) for _ in range(rng.randint(1, 4)))
        samples.append(Sample(f"s{index}", documents, words(1, 5), (words(1, 3),)))
    return samples


def random_context(queries: int = 2, *, preamble: int = 4, documents: tuple[int, ...] = (5, 1, 7)) -> Context:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 512, (count,)).tolist())

    asked = tuple(Query(f"q{i}", ids(int(torch.randint(1, 6, ()))), ids(2)) for i in range(queries))
    return Context(ids(preamble), tuple(ids(length) for length in documents), asked)


def random_answers(context: Context, vocab: int = 512) -> list[Answer]:
    """Answers of different lengths with a distribution each."""
    found = []
    for _ in context.queries:
        count = int(torch.randint(1, 5, ()))
        tokens = tuple(torch.randint(3, vocab, (count,)).tolist())
        found.append(Answer(tokens, torch.log_softmax(2 * torch.randn(count, vocab), -1), None))
    return found


def dense_logits(model: Any, context: Context, answer: Answer, index: int, adapter: Any, **upper: Any) -> torch.Tensor:
    """The answer's logits by one forward of the whole sequence under a dense block mask. No gradient."""
    blocks = [embed(model, context.preamble)] if context.preamble else []
    blocks += [adapter.wrap(embed(model, ids)).detach() for ids in context.documents]
    blocks.append(embed(model, [*context.queries[index].question, *answer.tokens]))
    lengths = [len(block) for block in blocks]
    logits = masked_logits(model, torch.cat(blocks), block_mask(lengths), **upper)
    return logits[-len(answer.tokens) - 1 : -1]


_START = """
import atexit, sys
import torch
atexit.register(lambda: print("in a group:", torch.distributed.is_initialized()))
torch.set_num_threads(1)
sys.path[:0] = [{tests!r}]
"""


def two_processes(script: str, folder: Path) -> str:
    """Runs `script` ({folder} filled in) in two processes over gloo; what both said. They end well, out of their group:
    one that is still in it as the interpreter ends aborts now and then."""
    path = folder.with_suffix(".py")
    path.write_text((_START + script).format(tests=str(Path(__file__).parent), folder=str(folder)))
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    environment |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    running = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=900) for process in running]
    assert all(process.returncode == 0 for process in running), said
    assert said[0][0] == said[1][0]
    result, end = said[0][0].rsplit("in a group: ", 1)
    assert end == "False\n"
    return result
