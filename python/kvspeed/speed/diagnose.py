# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Where in depth a model reads its prompt: the diagnostics of SPEED's authors (arXiv:2605.06105), for any model.

Measured are the tokens that predict an answer token: the last prompt token and the generated ones but the last, which
are also the tokens that SPEED runs through all layers. For each layer, the mean over heads and then over these tokens:

- `mass`: attention weight on the prompt, the measured token itself aside; `content_mass`: on the prompt without its
  anchor, the first tokens: what SPEED takes away from the layers >= k;
- `entropy`: conditional prompt entropy, of the weights on the prompt renormalised to sum 1, in nats;
  `entropy_normalised`: divided by the logarithm of the prompt's length, 1 for an even look at all of it. The same of
  the content: `content_entropy`, `content_entropy_normalised` (an attention sink at the anchor hides what the rest of
  the prompt gets). The paper does not say which it normalises, so both are here;
- `curvature`: the angle, in radians, between the change that this layer makes to the hidden state and the change that
  the layer before made. It is None for the first layer, and a high value says that the layers have turned to another
  task; hidden states are taken as they leave a layer, before the last norm.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvspeed.atomic import replacing
from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import base_model, cache_argument, causal_lm, max_positions
from kvspeed.speed.depth import Recommendation, recommend_depth
from kvspeed.speed.loops import LoopDetector
from kvspeed.speed.probe import Recorder, probing

__all__ = ["METRICS", "Diagnosis", "Measured", "TokenPrompt", "diagnose"]

METRICS = (
    "mass",
    "content_mass",
    "entropy",
    "entropy_normalised",
    "content_entropy",
    "content_entropy_normalised",
    "curvature",
)

_FORMAT = "kvspeed-diagnosis-1"
_PREFILL_SCORES = 1 << 26  # of an attention that keeps all scores of a chunk: a quarter GiB in float32
_PREFILL_ROWS = 2048

Curve = list[float | None]


@dataclass(frozen=True)
class TokenPrompt:
    """One prompt in tokens.

    Attributes:
        id: a name, unique in a diagnosis.
        category: the kind of task.
        ids: the prompt, at least one token.
        answer: the answer to measure with; None: what the model says itself, greedily.
    """

    id: str
    category: str
    ids: tuple[int, ...]
    answer: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError(f"prompt {self.id!r} has no tokens; give at least one")
        if self.answer is not None and not self.answer:
            raise ValueError(f"the answer of prompt {self.id!r} has no tokens; give one, or None")

    def digest(self) -> str:
        """What a measurement belongs to."""
        text = json.dumps([self.category, self.ids, self.answer])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Measured:
    """What one prompt showed.

    Attributes:
        id: the prompt's name.
        category: its kind of task.
        digest: of its tokens.
        prompt_tokens: its length.
        answer: ids of the answer, EoS included; as many tokens were measured.
        curves: for each of `METRICS` a number a layer; None where there is none.
    """

    id: str
    category: str
    digest: str
    prompt_tokens: int
    answer: list[int]
    curves: dict[str, Curve]


@dataclass
class Diagnosis:
    """The measurements of a model, prompt by prompt.

    Attributes:
        model: its name.
        fingerprint: of its weights.
        layers: L.
        anchor_tokens: the first tokens of a prompt that are not content.
        max_new_tokens: the most tokens of an answer.
        measured: one entry a prompt.
        complete: whether all prompts are there.
    """

    model: str
    fingerprint: str
    layers: int
    anchor_tokens: int
    max_new_tokens: int
    measured: list[Measured] = field(default_factory=list)
    complete: bool = False

    def settings(self) -> tuple[str, int, int, int]:
        """What two diagnoses must share for their prompts to be put together: weights, layers, anchor, answer."""
        return (self.fingerprint, self.layers, self.anchor_tokens, self.max_new_tokens)

    @property
    def categories(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(one.category for one in self.measured))

    def curve(self, metric: str, category: str | None = None) -> Curve:
        """Mean over the prompts of a category (all for None), each prompt alike; one number a layer."""
        return [_mean(values) for values in self._by_layer(metric, category)]

    def error(self, metric: str, category: str | None = None) -> Curve:
        """Standard error of `curve`; None for fewer than two prompts."""
        return [_standard_error(values) for values in self._by_layer(metric, category)]

    def _by_layer(self, metric: str, category: str | None) -> list[list[float]]:
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}; it must be one of {', '.join(METRICS)}")
        chosen = [one.curves[metric] for one in self.measured if category in (None, one.category)]
        if not chosen:
            raise ValueError(f"category is {category!r}, of which nothing was measured; there are {self.categories}")
        return [[value for value in values if value is not None] for values in zip(*chosen, strict=True)]

    def recommendation(self, **options: Any) -> Recommendation:
        """A depth to try first, and why; see `recommend_depth`, which takes the options."""
        curves = {
            category: {metric: self.curve(metric, category) for metric in METRICS} for category in self.categories
        }
        return recommend_depth(curves, self.layers, **options)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: settings, curves by category with standard errors, the recommendation, and every prompt."""
        names = self.categories
        both = {
            name: {
                "curves": {m: self.curve(m, name) for m in METRICS},
                "errors": {m: self.error(m, name) for m in METRICS},
            }
            for name in names
        }
        found = {name: getattr(self, name) for name in ("model", "fingerprint", "layers", "anchor_tokens")}
        return {
            "format": _FORMAT,
            **found,
            "max_new_tokens": self.max_new_tokens,
            "complete": self.complete,
            "categories": both,
            "recommendation": asdict(self.recommendation()) if names else None,
            "measured": [asdict(one) for one in self.measured],
        }

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically: a reader sees the old file or the new one."""
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Diagnosis:
        """Read what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is no diagnosis, or a damaged one.
        """
        wrong = f"{path} is no diagnosis written by kvspeed"
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{wrong} ({error}); give another file") from None
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"{wrong}: its format is not {_FORMAT!r}; give another file")
        try:
            found = cls(
                **{name: data[name] for name in ("model", "fingerprint", "layers", "anchor_tokens", "max_new_tokens")},
                measured=[Measured(**one) for one in data["measured"]],
                complete=bool(data["complete"]),
            )
            _check(found)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{wrong}, or damaged ({type(error).__name__}: {error}); give another file") from None
        return found


@torch.no_grad()
def diagnose(
    model: nn.Module,
    prompts: Iterable[TokenPrompt],
    *,
    name: str = "",
    max_new_tokens: int = 32,
    anchor_tokens: int = 1,
    eos_token_ids: Sequence[int] | None = None,
    known: Diagnosis | None = None,
    each: Callable[[Diagnosis, Measured], None] | None = None,
) -> Diagnosis:
    """Measure `model` with prompts, one after the other, at full depth (a patch for SPEED is taken off meanwhile).

    Attention weights over the prompt are never materialised, neither to measure nor, beyond a chunk's, by the model.
    An answer ends at EoS, after `max_new_tokens`, or where it runs into a loop.

    Args:
        model: a causal LM that kvspeed knows, in evaluation mode.
        prompts: at least one; see `kvspeed.speed.prompts` for texts.
        name: what to call the model.
        max_new_tokens: the most tokens of an answer.
        anchor_tokens: the first tokens of a prompt that are not content.
        eos_token_ids: ids that end an answer; the model's own for None.
        known: an earlier diagnosis; prompts that were measured there with this model and these settings are taken over.
        each: called after every prompt with the diagnosis so far, to save it or show progress.

    Raises:
        TypeError, ValueError: a model in training mode or of an unknown architecture, no prompts, two of one name, one
            that is longer than the model, or a number out of range.
    """
    prompts = list(prompts)
    _check_call(model, prompts, max_new_tokens, anchor_tokens)
    base: Any = base_model(model)
    ends = set(_eos(model) if eos_token_ids is None else eos_token_ids)
    found = Diagnosis(name, model_fingerprint(model), len(base.layers), anchor_tokens, max_new_tokens)
    earlier: dict[str, Measured] = {}
    if known is not None and known.settings() == found.settings():
        earlier = {one.digest: one for one in known.measured}
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    # Those that are known come first, so that a diagnosis that is saved after each never holds less than before.
    with probing(model, anchor_tokens) as recorder:
        for prompt in sorted(prompts, key=lambda one: one.digest() not in earlier):
            digest = prompt.digest()
            one = earlier.get(digest) or _measure(model, recorder, prompt, max_new_tokens, ends)
            one = Measured(prompt.id, prompt.category, digest, one.prompt_tokens, one.answer, one.curves)
            found.measured = sorted([*found.measured, one], key=lambda one: places[one.id])
            found.complete = len(found.measured) == len(prompts)
            if each is not None:
                each(found, one)
    return found


def _measure(
    model: nn.Module, recorder: Recorder, prompt: TokenPrompt, max_new_tokens: int, ends: set[int]
) -> Measured:
    inner: Any = causal_lm(model)
    base: Any = base_model(model)
    cache_name, device = cache_argument(base), inner.get_input_embeddings().weight.device
    cache: Any = None
    seen = 0
    recorder.begin(len(prompt.ids))

    def run(stack: Any, ids: Sequence[int]) -> Any:
        nonlocal cache, seen
        tokens = torch.tensor([list(ids)], device=device)
        place = torch.arange(seen, seen + len(ids), device=device)[None]
        output = stack(input_ids=tokens, position_ids=place, use_cache=True, **{cache_name: cache})
        cache, seen = getattr(output, cache_name), seen + len(ids)
        return output

    total = len(prompt.ids) + max_new_tokens
    step = _chunk(base.config, total)
    before = prompt.ids[:-1]
    for left in range(0, len(before), step):
        run(base, before[left : left + step])
    if prompt.answer is not None:
        answer = list(prompt.answer[:max_new_tokens])
        rows = [prompt.ids[-1], *answer[:-1]]
        for left in range(0, len(rows), step):
            with recorder.measuring(seen):
                run(base, rows[left : left + step])
    else:
        answer, loops = [], LoopDetector()
        token = prompt.ids[-1]
        while len(answer) < max_new_tokens:
            with recorder.measuring(seen):
                logits = run(inner, [token]).logits
            token = int(logits[0, -1].argmax())
            answer.append(token)
            if token in ends or loops.push(token) is not None:
                break
    curves = _curves(recorder.values(), len(prompt.ids), recorder.anchor_tokens)
    return Measured(prompt.id, prompt.category, prompt.digest(), len(prompt.ids), answer, curves)


def _curves(values: dict[str, torch.Tensor], prompt_tokens: int, anchor_tokens: int) -> dict[str, Curve]:
    """Means over tokens, and what is derived from them; layer by layer."""
    whole, content = prompt_tokens, prompt_tokens - min(anchor_tokens, prompt_tokens)
    values = {
        **values,
        "entropy_normalised": values["entropy"] / _log(whole),
        "content_entropy_normalised": values["content_entropy"] / _log(content),
    }
    return {name: [_mean([x for x in row if not math.isnan(x)]) for row in values[name].tolist()] for name in METRICS}


def _log(tokens: int) -> float:
    """Of one token, whose entropy is 0, the normalised entropy shall be 0 too."""
    return math.log(tokens) if tokens > 1 else 1.0


def _chunk(config: Any, total: int) -> int:
    """How many tokens to run at once, so that even an attention that keeps all their scores stays small."""
    heads = config.num_attention_heads if config._attn_implementation == "eager" else 1
    return max(16, min(_PREFILL_ROWS, _PREFILL_SCORES // (heads * total)))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _standard_error(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    middle = sum(values) / len(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values))


def _eos(model: nn.Module) -> list[int]:
    inner: Any = causal_lm(model)
    for config in (getattr(inner, "generation_config", None), inner.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []


def _check_call(model: nn.Module, prompts: list[TokenPrompt], max_new_tokens: int, anchor_tokens: int) -> None:
    for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("anchor_tokens", anchor_tokens, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be an int")
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    if not prompts:
        raise ValueError("prompts: got none; give at least one")
    names = [prompt.id for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"prompts: two are called {twice!r}; give each a name of its own")
    if model.training:
        raise ValueError("the model is in training mode, so that dropout could enter; call model.eval() first")
    config: Any = base_model(model).config
    limit = max_positions(model)
    for prompt in prompts:
        new = max_new_tokens if prompt.answer is None else min(max_new_tokens, len(prompt.answer))
        if limit is not None and len(prompt.ids) + new > limit:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.ids)} tokens and its answer up to {new}, and the model has "
                f"{limit} positions: give a shorter prompt, or a smaller max_new_tokens"
            )
        wrong = next((i for i in (*prompt.ids, *(prompt.answer or ())) if not 0 <= i < config.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"prompt {prompt.id!r} holds token {wrong}, and the model's ids end at {config.vocab_size}"
            )


def _check(found: Diagnosis) -> None:
    """A diagnosis read from a file fits together."""
    for name in ("layers", "anchor_tokens", "max_new_tokens"):
        if not isinstance(getattr(found, name), int):
            raise TypeError(f"{name} is no int")
    for one in found.measured:
        if set(one.curves) != set(METRICS) or any(len(curve) != found.layers for curve in one.curves.values()):
            raise ValueError(f"the curves of {one.id!r} do not fit {found.layers} layers")
        if any(not (value is None or isinstance(value, (int, float))) for c in one.curves.values() for value in c):
            raise TypeError(f"the curves of {one.id!r} hold something else than numbers")
