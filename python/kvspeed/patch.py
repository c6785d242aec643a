# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`patch_model`: the rule that its arguments, the config and a chosen depth make, and a patch that follows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from kvspeed.install import install, unpatch_model
from kvspeed.models import architecture, base_model, check_own_kv
from kvspeed.request import ByTask, checked_by_task
from kvspeed.rule import SpeedSpec
from kvspeed.speed.auto import automatic
from kvspeed.state import PatchState
from kvspeed.tuned import remembered_spec

__all__ = ["patch_model"]


def patch_model(
    model: nn.Module,
    k: int | str | None = None,
    *,
    anchor_tokens: int | None = None,
    boundary: str | None = None,
    upper_attention: str | None = None,
    turns: str | None = None,
    deep_layers: Iterable[int] | None = None,
    k_by_task: ByTask | None = None,
    tokenizer: Any = None,
    calibration: Iterable[Any] | None = None,
    budget: float | None = None,
) -> nn.Module:
    """Make `model` use kvspeed: its kernels and caches, and SPEED where `k` is given. A new patch replaces an old one.

    Under SPEED (arXiv:2605.06105) prompt tokens are computed and cached in the first `k` layers only. Above, a token
    sees the anchor (the first `anchor_tokens` of the sequence), earlier answer tokens and itself; see `speed_mask`.
    What `generate` is given is prompt, what it generates is answer. A forward with labels trains the same way (-100
    marks the prompt) and returns the logits of the deep columns: anchors, answer tokens, and those that predict one.

    A single request may go another way: `model.generate(..., k=18)`, or `task="code"` where `k_by_task` names the task.

    A model that was tuned for SPEED says so in its config (`kvspeed.tuned`): what is left out here comes from there.
    For one that was not, the defaults are k = L, one anchor token, "transient", "causal" and "keep".

    Args:
        model: a causal LM of transformers (see `kvspeed.models.ARCHITECTURES`), bare or wrapped by PEFT.
        k: layers that see the whole prompt, 1 .. L; L: all of them, and the logits are the unpatched model's. "auto":
            the depth that keeps the score on `calibration`, chosen once and kept in the model's config; see
            `kvspeed.speed.auto`.
        anchor_tokens: first tokens of the sequence that live in every layer; 0 for SPEED without anchor.
        boundary: "transient": the last prompt token leaves nothing above k once it has predicted the first answer;
            "keep": later answer tokens see it there.
        upper_attention: "causal", or "self" (the paper's SelfOnly ablation: anchors and itself only).
        turns: "keep": answers of earlier turns stay deep; "reset": a new turn starts as if the conversation were
            encoded afresh. A turn's last answer token, sampled but not yet cached, is prompt of the next turn in both.
        deep_layers: instead of `k`, the layers that are what those from k on are otherwise: any of 1 .. L-1, not only
            the last ones. Prompt tokens pass such a layer by unchanged and go on in the next. Layers above it see what
            the last prompt token and answers were in it, so that turns="reset" is refused; packets are as well.
        k_by_task: how deep requests go that name their task: a mapping (its key "*" is for tasks it does not name) or a
            function from task to depth. With k="auto", those that were found for the tasks of `calibration`.
        tokenizer: with k="auto", the model's tokenizer, which is needed where a depth must be chosen.
        calibration: with k="auto", samples (`kvspeed.Sample`) of every kind of task, to choose by.
        budget: with k="auto", how much of a task's score may be lost, 0 .. 1; 0.02 where nothing is said.

    Returns:
        `model` itself.

    Raises:
        TypeError, ValueError: an argument is out of range, the architecture is not known, the config's entry is
            damaged, or no depth can be chosen; nothing is changed then.
    """
    architecture(model)
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    given = {
        "k": k,
        "anchor_tokens": anchor_tokens,
        "boundary": boundary,
        "upper_attention": upper_attention,
        "turns": turns,
        "deep_layers": deep_layers,
    }
    by_task = checked_by_task(k_by_task, layers)
    if k == "auto":
        rule, chosen = _chosen(model, layers, given, tokenizer, calibration, budget)
        by_task = by_task if by_task is not None else chosen
    else:
        for name, value in (("tokenizer", tokenizer), ("calibration", calibration), ("budget", budget)):
            if value is not None:
                raise ValueError(f'{name} was given and k is {k!r}; it is for k="auto", so give that or leave it out')
        rule = _rule(model, layers, {name: value for name, value in given.items() if value is not None})
    unpatch_model(model)
    state = PatchState(model, rule, by_task)
    install(model, state)
    return model


def _rule(model: nn.Module, layers: int, given: dict[str, Any]) -> SpeedSpec:
    """The rule that the arguments `given` ask for, completed by what the model was tuned for."""
    k, deep_layers = given.get("k"), given.pop("deep_layers", None)
    if deep_layers is not None:
        if k is not None:
            raise ValueError(f"k is {k} and deep_layers were given too; they say the same thing, so give one of them")
        given["k"], given["gaps"] = _depth_and_gaps(deep_layers, layers)
    elif k is not None:
        given["gaps"] = ()
    try:
        tuned = remembered_spec(model)
    except ValueError:
        if k != layers or isinstance(k, bool):
            raise
        tuned = None  # where every layer takes every token a damaged entry of the config need not matter
    rule = replace(tuned, **given) if tuned is not None else SpeedSpec(**{"k": layers, **given})
    if rule.k > layers:
        raise ValueError(f"k is {rule.k} and the model has {layers} layers; give 1 to {layers}, or None for all")
    if rule.deep_layers(layers):
        check_own_kv(base_model(model).config)
    return rule


def _chosen(
    model: nn.Module,
    layers: int,
    given: dict[str, Any],
    tokenizer: Any,
    calibration: Iterable[Any] | None,
    budget: float | None,
) -> tuple[SpeedSpec, dict[str, int]]:
    """The rule with the depth that is chosen for `model`, and depths by task."""
    if given["deep_layers"] is not None:
        raise ValueError('k is "auto" and deep_layers were given too; only a depth can be chosen, so give one of them')
    fixed = {name: value for name, value in given.items() if value is not None and name != "k"}
    rule = replace(_rule(model, layers, fixed), gaps=())
    choice = automatic(model, rule, tokenizer, calibration, budget)
    return replace(rule, k=choice.k), choice.k_by_task()


def _depth_and_gaps(deep_layers: Iterable[int], layers: int) -> tuple[int, tuple[int, ...]]:
    """The depth that prompts go to, and the layers below it that they pass by."""
    given = list(deep_layers)
    for layer in given:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"deep_layers hold {layer!r} ({type(layer).__name__}); they must be ints")
        if not 0 < layer < layers or given.count(layer) > 1:
            raise ValueError(
                f"deep_layers hold {layer}; give layers from 1 to {layers - 1}, each once (layer 0 sees every prompt)"
            )
    depth = max(layer for layer in range(layers) if layer not in given) + 1
    return depth, tuple(sorted(layer for layer in given if layer < depth))
