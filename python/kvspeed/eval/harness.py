# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Tasks of the lm-evaluation-harness (`pip install lm-eval`), answered by SPEED or one of its rivals.

    from kvspeed.eval.harness import evaluate, harness_model
    found = evaluate(model, tokenizer, ["gsm8k", "ifeval"], method="speed-24", limit=100)     # its results
    lm = harness_model(model, tokenizer, "swiftkv-24", swiftkv=weights)                       # or its LM object

A request's context is the prompt, its continuation the answer: so the prompt ends at depth k, and the answer's tokens
run through all layers. `loglikelihood_rolling`, where all is answer, has no prompt but the first token, so that every
method but SelfOnly gives the full model's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from kvspeed.cache import KVCache
from kvspeed.eval.methods import SPEED_METHODS, Context, get_method
from kvspeed.eval.methods.prompt import PromptMethod
from kvspeed.models import base_model, cache_argument
from kvspeed.packet.build import max_positions
from kvspeed.patch import patch_model
from kvspeed.prompt import preamble_ids
from kvspeed.state import state_of

__all__ = ["Answerer", "evaluate", "harness_model"]

MAX_NEW_TOKENS = 256


def evaluate(model: Any, tokenizer: Any, tasks: Sequence[str], *, method: str = "full", **options: Any) -> Any:
    """`lm_eval.simple_evaluate` on one method.

    Args:
        model: a causal LM that kvspeed knows, tuned for the method where that needs it. It is patched.
        tokenizer: its tokenizer.
        tasks: the harness's names.
        method: one of `SPEED_METHODS`, but none with packets: "full", "speed-24", "pop-24", ...
        **options: for `harness_model` (`swiftkv`) and for `simple_evaluate` (`num_fewshot`, `limit`, ...).

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: there is no such method, or it does not fit the model.
    """
    own = {name: options.pop(name) for name in ("swiftkv",) if name in options}
    lm = harness_model(model, tokenizer, method, **own)
    from lm_eval import simple_evaluate

    return simple_evaluate(model=lm, tasks=list(tasks), **options)


def harness_model(model: Any, tokenizer: Any, method: str = "full", *, swiftkv: Any = None) -> Any:
    """An `lm_eval.api.model.LM` that answers by one method, one request at a time.

    Args:
        model: as for `evaluate`.
        tokenizer: its tokenizer.
        method: as for `evaluate`.
        swiftkv: the weights for the methods `swiftkv-...`.

    Raises:
        ImportError, ValueError: as for `evaluate`.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise ImportError("the harness is not installed: pip install 'kvspeed[harness]' (or lm-eval)") from None
    answerer = Answerer(model, tokenizer, method, swiftkv=swiftkv)

    class KvspeedLM(LM):
        """Requests of the harness to `Answerer`."""

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return answerer.likelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return [answerer.rolling(request.args[0]) for request in requests]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [answerer.generate(*request.args) for request in requests]

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return tokenizer.chat_template if chat_template else None

        @property
        def tokenizer_name(self) -> str:
            return str(getattr(tokenizer, "name_or_path", "")).replace("/", "__")

    return KvspeedLM()


class Answerer:
    """What the harness asks, answered by one method.

    Args:
        model: a causal LM that kvspeed knows.
        tokenizer: its tokenizer.
        method: of `SPEED_METHODS`, without packets.
        swiftkv: weights for SwiftKV.
    """

    def __init__(self, model: Any, tokenizer: Any, method: str, *, swiftkv: Any = None) -> None:
        found = get_method(method, SPEED_METHODS)
        if not isinstance(found, PromptMethod):
            raise ValueError(f"method: {method} has packets, and the harness has prompts; choose one without packets")
        state = state_of(model)
        if state is None or state.spec is not None:
            patch_model(model, len(base_model(model).layers))  # type: ignore[arg-type]
        self.method, self.tokenizer = found, tokenizer
        self.context = Context(model, tokenizer, swiftkv=swiftkv, max_new_tokens=MAX_NEW_TOKENS)
        self.limit = max_positions(model) or 1 << 30
        with found.serving(self.context):
            pass  # what does not fit is refused now

    # ---- requests --------------------------------------------------------------------------------------------------

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether it is the greedy one) of each (context, continuation).

        Continuations of one context that come one after the other share its prefill.
        """
        found: list[tuple[float, bool]] = []
        encoded = [self.encode_pair(*pair) for pair in pairs]
        with self.method.serving(self.context):
            for prompt, group in groupby(encoded, key=lambda pair: pair[0]):
                found += self._scored(prompt, [continuation for _, continuation in group])
        return found

    def rolling(self, text: str) -> float:
        """Log-probability of a whole text, in windows as long as the model's positions."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        total, window = 0.0, self.limit - 1
        with self.method.serving(self.context):
            for begin in range(0, len(ids), window):
                part = ids[begin : begin + window]
                before = [self.first_id()] if begin == 0 else ids[max(0, begin + len(part) - self.limit) : begin]
                total += self._scored(before, [part])[0][0]
        return total

    def generate(self, text: str, options: dict[str, Any]) -> str:
        """Greedy text after a prompt, up to the first of `until`, which is left out.

        Raises:
            ValueError: sampling is asked for.
        """
        if options.get("do_sample") and options.get("temperature", 1.0) not in (0, 0.0):
            raise ValueError("do_sample: kvspeed's methods are compared by greedy answers; give do_sample=False")
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        most = int(options.get("max_gen_toks", options.get("max_new_tokens", MAX_NEW_TOKENS)))
        prompt = self.encode(text)[-(self.limit - most) :] if most < self.limit else []
        if not prompt:
            raise ValueError(f"max_gen_toks: {most} leaves no room for a prompt in {self.limit} positions")
        tokens: list[int] = []
        said = ""
        with torch.no_grad(), self.method.serving(self.context):
            logits, cache = self.method.prefill(self.context, prompt, most)
            while len(tokens) < most:
                token = int(logits.argmax())
                if token in self.context.eos:
                    break
                tokens.append(token)
                said = self.tokenizer.decode(tokens, skip_special_tokens=True)
                if any(stop in said for stop in stops):
                    break
                if len(tokens) < most:
                    logits = self.context.forward([token], cache)
        ends = [said.index(stop) for stop in stops if stop in said]
        return said[: min(ends)] if ends else said

    # ---- ids -------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids with BoS where the tokenizer adds one and the text does not bring it."""
        return list(preamble_ids(self.tokenizer, text))

    def encode_pair(self, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of both, as the harness wants them: spaces between belong to the continuation; never an empty prompt."""
        kept = context.rstrip()
        continuation, context = context[len(kept) :] + continuation, kept
        if not context:
            ids = list(self.tokenizer(continuation, add_special_tokens=False)["input_ids"])
            first = self.first_id()
            return (first,), tuple(ids[1:] if ids[:1] == [first] else ids)
        prompt, whole = self.encode(context), self.encode(context + continuation)
        answer = whole[len(prompt) :]
        return tuple(prompt[-(self.limit - len(answer)) :]), tuple(answer)

    def first_id(self) -> int:
        """What stands before a text that has nothing before it: BoS, or EoS where there is none."""
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self.tokenizer, name, None)
            if value is not None:
                return int(value)
        raise ValueError("the tokenizer has neither BoS nor EoS, and a text alone needs a token before it")

    # ---- forwards --------------------------------------------------------------------------------------------------

    def _scored(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = []
        cut = not any(window is not None for window in self.context.shape.windows)
        first: torch.Tensor | None = None
        cache: Any = None
        for ids in continuations:
            if not ids:
                found.append((0.0, True))
                continue
            if first is None or not cut:
                first, cache = self.method.prefill(self.context, prompt, max(map(len, continuations)))
            rows = torch.cat([first[None].float(), self._answer_logits(ids[:-1], cache)])
            log_p = rows.log_softmax(-1)
            wanted = torch.tensor(list(ids), device=log_p.device)
            score = float(log_p.gather(1, wanted[:, None]).double().sum())
            found.append((score, bool((rows.argmax(-1) == wanted).all())))
            if cut:
                cache.crop(len(prompt))
        return found

    @torch.no_grad()
    def _answer_logits(self, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """float32 logits `[len(ids), vocab]` of answer tokens after what `cache` holds."""
        context = self.context
        if not ids:
            return torch.empty(0, context.shape.vocab, device=context.device)
        given = {"input_ids": torch.tensor([list(ids)], device=context.device), cache_argument(context.base): cache}
        with context.evaluating():
            return context.model(use_cache=True, **given).logits[0].float()
