# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Choosing k: the least depth at which a model keeps its score on a calibration set, for each task and for all.

    patch_model(model, "auto", tokenizer=tokenizer, calibration=samples, budget=0.02)
    model.generate(**inputs)                   # deep enough for every task
    model.generate(**inputs, task="code")      # as deep as this one needs

Where to begin is said by what the model was tuned for, else by its diagnostics (`speed.diagnose`); scores decide. From
there the depths are tried one by one, downwards while the budget is kept, else upwards until it is; full depth always
keeps it. A loss counts by its upper confidence bound, because a few samples that lose nothing prove little, and because
a depth that is chosen among several looks better on the samples it was chosen by than on others.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from kvspeed.fingerprint import model_fingerprint
from kvspeed.install import patched
from kvspeed.models import architecture, base_model, max_positions
from kvspeed.prompt import encode, prompt_ids
from kvspeed.rule import SpeedSpec
from kvspeed.samples import INSTRUCTION, SEPARATOR, Sample, document_text
from kvspeed.speed.choice import DepthChoice, TaskDepth, least_samples, remember_choice, remembered_choice
from kvspeed.speed.diagnose import TokenPrompt, diagnose
from kvspeed.speed.trial import Answers, Score, TaskTrial
from kvspeed.tuned import remembered_spec

__all__ = ["automatic", "choose_depth", "held_out", "prompts_of", "sample_ids", "word_f1"]

BUDGET = 0.02
_DIAGNOSED = 2  # samples of each task that say where to begin


def choose_depth(
    model: nn.Module,
    tokenizer: Any,
    calibration: Iterable[Sample],
    *,
    budget: float = BUDGET,
    confidence: float | None = 0.8,
    rule: SpeedSpec | None = None,
    depths: Sequence[int] | None = None,
    start: int | None = None,
    score: Score | None = None,
    max_new_tokens: int = 32,
    chat_template_kwargs: dict[str, Any] | None = None,
    each: Callable[[str], None] | None = None,
    answers: Answers | None = None,
) -> DepthChoice:
    """Find the depth at which `model` loses at most `budget` of its score, in every task of the calibration set.

    Samples are asked as everywhere in kvspeed: instruction, documents, question, in the chat template. The model is
    left as it was found; `patch_model(model, choice.k, k_by_task=choice.k_by_task())` uses the choice.

    Args:
        model: a causal LM that kvspeed knows, in evaluation mode, patched or not.
        tokenizer: its tokenizer.
        calibration: samples that nothing else was or will be measured with; `Sample.task` says which task each is of.
        budget: what a task's mean score may lose, in score points, 0 .. 1.
        confidence: with which the loss shall be within the budget, one-sided, 0 .. 1; None: its mean on these samples.
        rule: anchors, boundary and so on, at full depth or any; None: what the model was tuned for, else the defaults.
        depths: those to choose from, beside L; None: from L/2 on.
        start: where to begin; None: as said in the module's docstring.
        score: gives 0 .. 1 for a sample and what the model wrote; None: `word_f1`.
        max_new_tokens: the most tokens of an answer.
        chat_template_kwargs: further arguments for the chat template.
        each: told, after every sample, what was measured.
        answers: keeps what the model writes, and knows what it wrote in a run before; None: nothing is kept.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: no samples, too few of a task to show that it keeps the budget, a score out of range, a model in
            training mode, a depth that the model does not have, a prompt that leaves its answer no room.
    """
    architecture(model)
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    samples = _checked_samples(calibration)
    _check_numbers(budget, confidence, max_new_tokens, samples)
    if model.training:
        raise ValueError("the model is in training mode, so that dropout could enter; call model.eval() first")
    tuned = remembered_spec(model)
    rule = rule if rule is not None else tuned if tuned is not None else SpeedSpec(layers)
    rule = replace(rule, gaps=())
    candidates = _candidates(depths, layers)
    every = [one for group in samples.values() for one in group]
    ids = prompts_of(model, tokenizer, every, max_new_tokens, chat_template_kwargs)
    if start is not None:
        starts = dict.fromkeys(samples, start)
    elif tuned is not None and tuned.k < layers:
        starts = dict.fromkeys(samples, tuned.k)
    else:
        starts = _diagnosed(model, samples, ids, rule, max_new_tokens)
    measured: list[TaskDepth] = []
    by_task = {}
    with patched(model):
        for task, group in samples.items():
            trial = TaskTrial(
                model, tokenizer, task, group, ids, rule, layers, score or word_f1, max_new_tokens, each, answers
            )
            by_task[task] = trial.search(candidates, starts[task], budget, confidence)
            measured += trial.measured
    k = max(by_task.values())
    return DepthChoice(
        k=k,
        by_task=by_task,
        layers=layers,
        budget=budget,
        confidence=confidence,
        rule=_rule_fields(rule),
        fingerprint=model_fingerprint(model),
        calibration=_digest(samples, score, max_new_tokens, depths),
        measured=tuple(measured),
        reason=_reason(by_task, layers, budget, confidence, measured),
    )


def held_out(
    model: nn.Module,
    tokenizer: Any,
    samples: Iterable[Sample],
    choice: DepthChoice,
    *,
    score: Score | None = None,
    max_new_tokens: int = 32,
    chat_template_kwargs: dict[str, Any] | None = None,
    each: Callable[[str], None] | None = None,
    answers: Answers | None = None,
) -> list[TaskDepth]:
    """What a choice costs on samples it was not made by: each task at the depth for all tasks, and at its own.

    Here `kept` says that the mean loss is within the budget; `bound` is the bound of it, as in the choice. Tasks that
    were not calibrated are measured at the depth for all.

    Raises:
        TypeError, ValueError: as for `choose_depth`, but a few samples will do.
    """
    groups = _checked_samples(samples)
    if model.training:
        raise ValueError("the model is in training mode, so that dropout could enter; call model.eval() first")
    rule = SpeedSpec(**{**choice.rule, "k": choice.k})
    every = [one for group in groups.values() for one in group]
    ids = prompts_of(model, tokenizer, every, max_new_tokens, chat_template_kwargs)
    found = []
    with patched(model):
        for task, group in groups.items():
            trial = TaskTrial(
                model, tokenizer, task, group, ids, rule, choice.layers, score or word_f1, max_new_tokens, each, answers
            )
            depths = sorted({choice.k, choice.by_task.get(task, choice.k)}, reverse=True)
            trial.measure(depths)
            for k in depths:
                one = trial.result(k, choice.budget, choice.confidence)
                found.append(replace(one, kept=one.full - one.score <= choice.budget + 1e-12))
    return found


def automatic(
    model: nn.Module,
    rule: SpeedSpec,
    tokenizer: Any = None,
    calibration: Iterable[Sample] | None = None,
    budget: float | None = None,
) -> DepthChoice:
    """The choice for `patch_model(model, "auto")`: the one in the model's config where it fits, else a new one.

    It fits where weights and rule are those it was made for, and budget and calibration set, as far as they are given.
    A new one is written into the config.

    Raises:
        TypeError, ValueError: as for `choose_depth`; no choice in the config fits and there is no calibration set.
    """
    samples = None if calibration is None else list(calibration)
    wanted = {
        "fingerprint": model_fingerprint(model),
        "number of layers": len(base_model(model).layers),  # type: ignore[arg-type]
        "rule": _rule_fields(rule),
        **({} if budget is None else {"budget": budget}),
        **({} if samples is None else {"calibration": _digest(_checked_samples(samples), None, 32, None)}),
    }
    try:
        known = remembered_choice(model)
    except ValueError:
        if samples is None:
            raise
        known = None
    has = {**asdict(known), "number of layers": known.layers} if known is not None else {}
    different = [name for name, value in wanted.items() if known is not None and has[name] != value]
    if known is not None and not different:
        return known
    if samples is None or tokenizer is None:
        why = f"was made for another {', '.join(different)}" if different else "is not there"
        raise ValueError(
            f'k is "auto", and a choice in the model\'s config {why}: give tokenizer and calibration, a list of '
            "kvspeed.Sample of every kind of task, to choose by"
        )
    found = choose_depth(model, tokenizer, samples, rule=rule, budget=BUDGET if budget is None else budget)
    remember_choice(model, found)
    return found


def sample_ids(tokenizer: Any, sample: Sample, chat_template_kwargs: dict[str, Any] | None = None) -> tuple[int, ...]:
    """The prompt of a sample in token ids, every document tokenised alone: what all methods of an evaluation see."""
    around = prompt_ids(
        tokenizer,
        sample.question,
        preamble=INSTRUCTION,
        separator=SEPARATOR,
        chat_template_kwargs=chat_template_kwargs,
    )
    documents = [encode(tokenizer, document_text(text), "document") for text in sample.documents]
    return (*around.preamble, *(token for ids in documents for token in ids), *around.question)


def prompts_of(
    model: nn.Module,
    tokenizer: Any,
    samples: Iterable[Sample],
    max_new_tokens: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> dict[int, tuple[int, ...]]:
    """id() of a sample -> its prompt in token ids.

    Raises:
        ValueError: a prompt and `max_new_tokens` of an answer are longer than the model; the message names the sample.
    """
    limit, found = max_positions(model), {}
    for sample in samples:
        ids = found[id(sample)] = sample_ids(tokenizer, sample, chat_template_kwargs)
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise ValueError(
                f"sample {sample.id!r} has {len(ids)} tokens and its answer up to {max_new_tokens}, and the model has "
                f"{limit} positions: shorten its documents, or give a smaller max_new_tokens"
            )
    return found


def word_f1(sample: Sample, text: str) -> float:
    """How well the words of an answer agree with the best of the accepted ones, 0 .. 1; case and signs do not count."""
    said = _words(sample.prediction(text))
    return max(_overlap(said, _words(answer)) for answer in sample.answers)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold()) or text.split()


def _overlap(said: list[str], wanted: list[str]) -> float:
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else float(not said and not wanted)


def _checked_samples(calibration: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The samples by task."""
    samples = list(calibration)
    found: dict[str, list[Sample]] = {}
    for index, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise TypeError(f"calibration[{index}]: expected a kvspeed.Sample, got {type(sample).__name__}")
        found.setdefault(sample.task, []).append(sample)
    if not found:
        raise ValueError("calibration: got no samples; give some of every kind of task that the model shall serve")
    return found


def _check_numbers(
    budget: float, confidence: float | None, max_new_tokens: int, samples: dict[str, list[Sample]]
) -> None:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected an integer from 1, got {max_new_tokens!r}")
    if not 0 <= budget < 1 or not math.isfinite(budget):
        raise ValueError(f"budget: is {budget}; give score points from 0 to 1, such as {BUDGET}")
    if confidence is not None and not 0 < confidence < 1:
        raise ValueError(f"confidence: is {confidence}; give a number between 0 and 1, or None to go by the mean")
    least = least_samples(budget, confidence)
    for task, group in samples.items():
        if len(group) < least:
            raise ValueError(
                f"calibration: has {len(group)} samples of task {task!r}, too few to show with a confidence of "
                f"{confidence} that at most {budget} is lost: give {least} or more, a larger budget, or "
                "confidence=None to go by the mean"
            )


def _candidates(depths: Sequence[int] | None, layers: int) -> list[int]:
    """In order, L last."""
    given = list(range(max(1, math.ceil(layers / 2)), layers)) if depths is None else list(depths)
    for k in given:
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"depths: hold {k!r} ({type(k).__name__}); they must be ints")
        if not 1 <= k <= layers:
            raise ValueError(f"depths: hold {k} and the model has {layers} layers; give 1 to {layers}")
    return sorted({*given, layers})


def _diagnosed(
    model: nn.Module,
    samples: dict[str, list[Sample]],
    ids: dict[int, tuple[int, ...]],
    rule: SpeedSpec,
    max_new_tokens: int,
) -> dict[str, int]:
    """Where to begin with each task, by the diagnostics of its first samples."""
    names = {f"{number}": task for number, task in enumerate(samples)}
    prompts = [
        TokenPrompt(f"{name}-{number}", name, ids[id(sample)])
        for name, task in names.items()
        for number, sample in enumerate(samples[task][:_DIAGNOSED])
    ]
    found = diagnose(model, prompts, max_new_tokens=min(16, max_new_tokens), anchor_tokens=rule.anchor_tokens)
    return {names[name]: one.k for name, one in found.recommendation().by_category.items()}


def _rule_fields(rule: SpeedSpec) -> dict[str, Any]:
    return {name: value for name, value in asdict(rule).items() if name not in ("k", "gaps")}


def _digest(samples: dict[str, list[Sample]], score: Score | None, new: int, depths: Sequence[int] | None) -> str:
    named = None if score is None else getattr(score, "__qualname__", type(score).__qualname__)
    rows = [asdict(sample) for group in samples.values() for sample in group]
    text = json.dumps([rows, named, new, None if depths is None else sorted(depths)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _reason(
    by_task: dict[str, int], layers: int, budget: float, confidence: float | None, measured: list[TaskDepth]
) -> str:
    k = max(by_task.values())
    deepest = [task or "the task" for task, depth in by_task.items() if depth == k]
    sure = "on average" if confidence is None else f"with a confidence of {confidence:.0%}"
    if k == layers:
        best = {one.task: one for one in measured}  # what was tried last
        lost = [f"{one.task or 'the task'} loses up to {one.bound:.3f} at k = {one.k}" for one in best.values()]
        return f"no depth below {layers} keeps {', '.join(deepest)} within {budget} {sure}" + (
            f" ({'; '.join(lost)})" if lost else ""
        )
    need, rest = ("needs" if len(deepest) == 1 else "need"), len(deepest) < len(by_task)
    return f"{', '.join(deepest)} {need} {k} of {layers} layers to lose at most {budget} {sure}" + (
        "; the others need less" if rest else ""
    )
