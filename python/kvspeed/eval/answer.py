# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One answer by one method: its tokens, and what it took where that is measured.

Times follow two definitions. `ttft_s` is the paper's: from KV in memory to the first token's logits, the question's
tokens at hand; for methods that keep no KV of documents it is the whole prompt's prefill. `end_to_end_s` starts with KV
in files and the question as text: reading, tokenising the question, putting the prompt together, the forward, and the
choice of the token.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvspeed.eval.methods import Context, Method, Prepared, decode
from kvspeed.eval.methods.full import SharedFull
from kvspeed.models import cache_argument
from kvspeed.packet import Packet
from kvspeed.packet.build import evaluating

__all__ = ["Answer", "SharedFull", "end_to_end", "greedy"]


@dataclass(frozen=True)
class Answer:
    """What a method made of one question.

    Attributes:
        token_ids: greedy tokens, EoS included where it came.
        ttft_s: seconds from KV in memory to the first token's logits.
        step_s: median seconds of a decoding step after the answer; None where none was timed.
        seconds: of the whole question: preparing what was not kept, first token, decoding.
        prompt_tokens: positions of the prompt, soft tokens and question included.
        question_tokens: of these, the question's.
        flops: operations to the first token.
        kv_bytes: of the prompt without the question.
        stored_bytes: kept of the documents between prompts.
    """

    token_ids: list[int]
    ttft_s: float
    seconds: float
    prompt_tokens: int
    question_tokens: int
    flops: int
    kv_bytes: int
    stored_bytes: int
    step_s: float | None = None

    @classmethod
    def of(
        cls,
        method: Method,
        context: Context,
        documents: Sequence[str],
        question: str,
        *,
        max_new_tokens: int,
        drafts: Sequence[Sequence[int]] = (),
        steps: int = 0,
    ) -> Answer:
        """Prepares the documents, times the first token, decodes greedily. Call it inside `method.serving(context)`.

        Args:
            method: who answers.
            context: the model and the documents seen before.
            documents: in the order of the prompt.
            question: in words.
            max_new_tokens: the most tokens.
            drafts: answers that are likely; see `greedy`.
            steps: decoding steps to time, one by one, when the answer is there.
        """
        begin = time.perf_counter()
        prepared = method.prepare(context, documents)
        ids = context.question_ids(question)
        ttft, (logits, cache) = timed(context, lambda: method.first_token(prepared, ids))
        tokens = greedy(context, logits, cache, drafts, max_new_tokens=max_new_tokens)
        seconds = time.perf_counter() - begin
        return cls(
            tokens,
            ttft,
            seconds,
            prepared.length + len(ids),
            len(ids),
            int(method.flops(prepared, len(ids))),
            int(method.kv_bytes(prepared)),
            int(method.stored_bytes(prepared)),
            _step_seconds(context, tokens[-1], cache, steps) if steps else None,
        )


def timed(context: Context, run: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result), with the device's work inside the time and only that."""
    _synchronise(context)
    begin = time.perf_counter()
    result = run()
    _synchronise(context)
    return time.perf_counter() - begin, result


def _step_seconds(context: Context, token: int, cache: Any, steps: int) -> float:
    """Median seconds of a step of greedy decoding that goes on after `token`, whether it ends an answer or not."""
    taken = []
    for _ in range(steps):
        took, logits = timed(context, partial(context.forward, [token], cache))
        taken.append(took)
        token = int(logits.argmax())
    return median(taken)


@torch.no_grad()
def greedy(
    context: Context, logits: torch.Tensor, cache: Any, drafts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> list[int]:
    """Greedy tokens as `kvspeed.eval.methods.decode` gives them, faster where a draft guesses them.

    A draft that begins with the tokens found so far is run through the model in one forward; the tokens that the model
    would have chosen itself are kept, the rest is cut off the cache. What comes out never depends on the drafts, up to
    the rounding between a forward of one token and one of several.

    Args:
        context: the model.
        logits: `[vocab]` of the first token.
        cache: from `first_token`; it grows.
        drafts: token ids, EoS included where it is expected.
        max_new_tokens: the most tokens.
    """
    if any(window is not None for window in context.shape.windows):
        return decode(context, logits, cache, max_new_tokens=max_new_tokens)  # such layers forget, and cannot be cut
    ends, tokens = context.eos, [int(logits.argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in ends:
        draft = next((list(d) for d in drafts if len(d) > len(tokens) and list(d[: len(tokens)]) == tokens), tokens)
        ahead = list(takewhile(lambda token: token not in ends, draft[len(tokens) - 1 : max_new_tokens - 1]))
        held = cache.get_seq_length()
        chosen = _choices(context, ahead, cache)
        kept = 1
        while kept < len(ahead) and ahead[kept] == chosen[kept - 1]:
            kept += 1
        tokens += chosen[:kept]
        if kept < len(ahead):
            cache.crop(held + kept)
    return tokens


def end_to_end(method: Method, context: Context, documents: Sequence[str], question: str) -> float:
    """Seconds from KV in files and the question as text to the first token; see the module's docstring.

    The files are written before (and lie in the page cache); what a method keeps nothing of is not read.
    """
    prepared = method.prepare(context, documents)
    with tempfile.TemporaryDirectory(prefix="kvspeed-") as folder:
        readers = _store(prepared, Path(folder))

        def run() -> int:
            for read in readers:
                read()
            again = method.prepare(context, documents)
            return int(method.first_token(again, context.question_ids(question))[0].argmax())

        return timed(context, run)[0]


def _store(prepared: Prepared, folder: Path) -> list[Callable[[], Any]]:
    """Writes what is kept of the documents, one file each; how each is read back."""
    from safetensors.torch import load_file, save_file

    skip = 1 if prepared.preamble else 0
    readers: list[Callable[[], Any]] = []
    for number, packet in enumerate(prepared.extra.get("packets", ())[skip:]):
        path = folder / f"{number}.packet"
        packet.save(path)
        readers.append(partial(_read_packet, path))
    for number, block in enumerate(prepared.blocks[skip:]):
        path = folder / f"{number}.block"
        save_file({"keys": block.keys.contiguous(), "values": block.values.contiguous()}, path)
        device = str(block.keys.device)
        readers.append(partial(load_file, path, device=device))
    return readers


def _read_packet(path: Path) -> list[torch.Tensor]:
    """Copies of its keys and values, since a memory-mapped packet has read nothing yet."""
    packet = Packet.load(path)
    return [packet.keys.clone(), packet.values.clone()]


@torch.no_grad()
def _choices(context: Context, ids: Sequence[int], cache: Any) -> list[int]:
    """The model's choice after each of `ids`."""
    tokens = torch.tensor([list(ids)], device=context.device)
    given = {"input_ids": tokens, "use_cache": True, cache_argument(context.base): cache}
    with evaluating(context.model):
        return context.model(**given).logits[0].argmax(-1).tolist()


def _synchronise(context: Context) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
