# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Asking a question about packets: transformers' `generate` on a cache that holds the documents already."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

from kvspeed import graph
from kvspeed.cache import KVCache
from kvspeed.fingerprint import model_fingerprint
from kvspeed.install import patched
from kvspeed.models import base_model, causal_lm
from kvspeed.packet.assemble import lay_out, pad_id
from kvspeed.packet.belongs import check_blocks
from kvspeed.packet.build import build_preamble, evaluating, max_positions
from kvspeed.packet.packet import Packet
from kvspeed.prompt import Preamble, PromptIds, prompt_ids
from kvspeed.rule import SpeedSpec
from kvspeed.state import at_depth, state_of

__all__ = ["GenerateStats", "generate"]

_PREAMBLES = 4  # default preambles kept a model


@dataclass
class GenerateStats:
    """What one call of `generate` took.

    Attributes:
        prefix_tokens: positions of preamble and packets, whose KV was there.
        question_tokens: tokens of each question, which were computed.
        new_tokens: tokens generated for each answer, EoS included.
        assemble_s: seconds to check the packets and to make the cache.
        ttft_s: seconds from the call to the first new token, assembling included.
        total_s: seconds of the call.
        kv_bytes: bytes of the KV that is stored at the end, packets included once.
        allocated_bytes: bytes that the cache allocated; packets read in place are not among them.
    """

    prefix_tokens: int
    question_tokens: list[int]
    new_tokens: list[int] = field(default_factory=list)
    assemble_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    kv_bytes: int = 0
    allocated_bytes: int = 0

    @property
    def time_per_token_s(self) -> float:
        """Mean seconds of the tokens after the first, 0 where there is only one."""
        steps = max(self.new_tokens, default=0) - 1
        return (self.total_s - self.ttft_s) / steps if steps > 0 else 0.0


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: Any,
    question: str | Sequence[str],
    packets: Iterable[Packet],
    *,
    preamble: Preamble = None,
    mode: Literal["view", "copy"] = "view",
    max_new_tokens: int = 64,
    k: int | None = None,
    task: str | None = None,
    cuda_graph: bool = False,
    return_stats: bool = False,
    separator: str = "\n\n",
    chat_template_kwargs: dict[str, Any] | None = None,
    **generate_kwargs: Any,
) -> Any:
    """Answer `question` from `packets`; only the question and the answer are computed.

    The prompt is [preamble][packet 1]...[packet N][question]. With a chat template, the preamble is by default what the
    template puts before the user's words, and the question is followed by what it puts after them, so that documents
    and question form the user's turn; see `kvspeed.prompt.prompt_ids`, which gives the exact ids. The default
    preamble's KV is computed once and kept with the model.

    The model may be patched, with or without a k, or not: then it is patched for the length of this call. Decoding is
    greedy unless `generate_kwargs` ask for something else.

    Args:
        model: the model that made the packets.
        tokenizer: its tokenizer.
        question: one question, or several, which are answered in one batch.
        packets: the documents, in order. May be empty.
        preamble: None, a `Packet`, instructions as a string, or False; see `prompt_ids`.
        mode: "view" or "copy"; see `assemble`.
        max_new_tokens: the most tokens of an answer.
        k: how deep this request goes, instead of the patch's k; packets that were built deeper serve it as they are.
        task: the same, by the `k_by_task` that the model was patched with.
        cuda_graph: capture one decoding step as a CUDA graph and replay it for every token: the same greedy answer, in
            less time where the host is slower than the GPU. Where capturing fails a warning says so and the steps run
            without; so they do, silently, on a CPU. See `kvspeed.graph` for what it refuses.
        return_stats: return `(answer, GenerateStats)`.
        separator: text between the last packet and the question.
        chat_template_kwargs: further arguments for the chat template.
        **generate_kwargs: passed on to transformers' `generate`. Logits processors see the ids of preamble and packets
            before the question's (the pad id for soft tokens).

    Returns:
        The answer; a list of answers where several questions or `num_return_sequences` were given. With `return_stats`,
        a pair with the statistics.

    Raises:
        TypeError, ValueError: an empty question, packets that do not belong to the model or to each other (see
            `assemble`), a prompt and answer longer than the model's positions, or an argument that this function sets
            itself.
    """
    begin = time.perf_counter()
    _refuse_own(generate_kwargs)
    if not isinstance(cuda_graph, bool):
        raise TypeError(f"cuda_graph: expected True or False, got {cuda_graph!r}")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected an integer from 1, got {max_new_tokens!r}")
    questions = _questions(question)
    prompts = [
        prompt_ids(tokenizer, one, preamble=preamble, separator=separator, chat_template_kwargs=chat_template_kwargs)
        for one in questions
    ]
    with patched(model), at_depth(model, k, task=task), evaluating(model):
        head = _preamble(model, tokenizer, preamble, prompts[0])
        width = max(len(prompt.question) for prompt in prompts)
        blocks = check_blocks(packets, head, model)
        total = sum(block.length for block in blocks) + width + max_new_tokens
        _check_room(model, total, width, max_new_tokens)
        cache = lay_out(blocks, model, mode, total)
        prefix = cache.prefix_ids or []
        assembled = time.perf_counter()
        clock = _Clock() if return_stats else None
        if generate_kwargs.get("stop_strings") is not None:
            generate_kwargs["tokenizer"] = tokenizer  # by which transformers looks for them
        output = _run(model, cache, prompts, prefix, max_new_tokens, clock, cuda_graph, generate_kwargs)
    new = output[:, len(prefix) + width :]
    answers = tokenizer.batch_decode(new, skip_special_tokens=True)
    one = isinstance(question, str) and len(answers) == 1
    result = answers[0] if one else answers
    if clock is None:
        return result
    stats = GenerateStats(len(prefix), [len(prompt.question) for prompt in prompts])
    stats.new_tokens = _lengths(new, _eos(model, generate_kwargs))
    stats.assemble_s = assembled - begin
    stats.ttft_s = (clock.first or time.perf_counter()) - begin
    stats.total_s = (clock.last or time.perf_counter()) - begin
    stats.kv_bytes, stats.allocated_bytes = cache.kv_bytes(), cache.allocated_bytes()
    return result, stats


def _run(
    model: nn.Module,
    cache: KVCache,
    prompts: list[PromptIds],
    prefix: list[int],
    max_new_tokens: int,
    clock: _Clock | None,
    cuda_graph: bool,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Call the model's `generate`; returns int64 `[rows, prefix + question + new]`."""
    width = max(len(prompt.question) for prompt in prompts)
    pad = pad_id(model)
    inner: Any = causal_lm(model)
    device = inner.get_input_embeddings().weight.device
    ids = torch.tensor([prefix + [pad] * (width - len(p.question)) + list(p.question) for p in prompts], device=device)
    mask = torch.ones_like(ids)
    for row, prompt in enumerate(prompts):
        mask[row, len(prefix) : len(prefix) + width - len(prompt.question)] = 0
    if cuda_graph:
        ended = graph.generate(
            model,
            ids,
            mask,
            max_new_tokens=max_new_tokens,
            cache=cache,
            on_token=None if clock is None else lambda token: None if token else clock.note(ids),
            **{"pad_token_id": pad, **kwargs},
        )
        if clock is not None:
            clock.note(ended)
        return ended
    state: Any = state_of(model)
    given = {"pad_token_id": pad, **kwargs}
    if "generation_config" not in given and not given.setdefault("do_sample", False):
        # a model's own sampling settings would only draw warnings
        for name in ("temperature", "top_p", "top_k"):
            given.setdefault(name, None)
    if clock is not None:
        given["stopping_criteria"] = StoppingCriteriaList([clock, *(kwargs.get("stopping_criteria") or [])])
    given |= {"input_ids": ids, "attention_mask": mask, "max_new_tokens": max_new_tokens, state.cache_name: cache}
    generated: Any = model.generate(**given)  # type: ignore[operator]
    return generated if isinstance(generated, torch.Tensor) else generated.sequences


class _Clock(StoppingCriteria):
    """Notes when each new token is there; stops nothing."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None

    def note(self, tokens: torch.Tensor) -> None:
        """A token is there, once the device of `tokens` has done what is queued."""
        if tokens.is_cuda:
            torch.cuda.synchronize(tokens.device)
        self.last = time.perf_counter()
        self.first = self.first or self.last

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.note(input_ids)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


_kept_preambles: weakref.WeakKeyDictionary[nn.Module, dict[Any, Packet]] = weakref.WeakKeyDictionary()


def _preamble(model: nn.Module, tokenizer: Any, preamble: Preamble, prompt: PromptIds) -> Packet | None:
    """The preamble's block, from those kept with the model where it is there."""
    if isinstance(preamble, Packet):
        return preamble
    if not prompt.preamble:
        return None
    state = state_of(model)
    spec = state.spec if state is not None else None
    key = (prompt.preamble, model_fingerprint(model))
    kept = _kept_preambles.setdefault(causal_lm(model), {})
    if key not in kept or not _deep_enough(kept[key], spec):
        if key not in kept and len(kept) >= _PREAMBLES:
            kept.pop(next(iter(kept)))
        kept[key] = build_preamble(model, tokenizer, prompt.preamble)
    return kept[key]


def _deep_enough(block: Packet, spec: SpeedSpec | None) -> bool:
    """Whether a request of this rule can use the block, which may be deeper."""
    if block.k is None or spec is None or block.k < spec.k:
        return block.k is None
    held = block.anchor_keys.shape[2] if block.anchor_keys is not None else 0
    return held >= min(spec.anchor_tokens, block.length)


def _questions(question: Any) -> list[str]:
    if isinstance(question, str):
        return [question]
    if not isinstance(question, Sequence) or isinstance(question, bytes) or not question:
        raise TypeError(f"question: expected a string or a sequence of at least one string, got {question!r:.60}")
    return list(question)


def _refuse_own(kwargs: dict[str, Any]) -> None:
    own = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "past_key_values", "cache", "cache_implementation")
    for name in (*own, "use_cache"):
        if name in kwargs:
            raise TypeError(
                f"{name}: is made from question and packets here; to set it, call assemble and model.generate"
            )


def _check_room(model: nn.Module, total: int, width: int, new: int) -> None:
    limit = max_positions(model)
    if limit is not None and total > limit:
        raise ValueError(
            f"preamble and packets ({total - width - new}), question ({width}) and max_new_tokens ({new}) need {total} "
            f"positions, and the model has {limit}: use fewer packets or fewer new tokens"
        )


def _eos(model: nn.Module, kwargs: dict[str, Any]) -> set[int]:
    value = kwargs.get("eos_token_id")
    for config in (
        kwargs.get("generation_config"),
        getattr(model, "generation_config", None),
        base_model(model).config,
    ):
        value = getattr(config, "eos_token_id", None) if value is None else value
    return {value} if isinstance(value, int) else set(value or ())


def _lengths(new: torch.Tensor, eos: set[int]) -> list[int]:
    """Tokens of each row up to and with its first EoS."""
    lengths = []
    for row in new.tolist():
        end = next((index + 1 for index, token in enumerate(row) if token in eos), len(row))
        lengths.append(end)
    return lengths
