# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Patching one transformers model, in place, without copying or replacing any of its code.

A patch is a set of forward hooks, an attention function registered with transformers, and a `generate` that makes the
right cache. `unpatch_model` takes all of it away again.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from kvspeed import attention, generation, hooks
from kvspeed.models import architecture, attention_modules, base_model, causal_lm, check_own_kv
from kvspeed.request import ByTask, checked_by_task
from kvspeed.rule import SpeedSpec
from kvspeed.state import LOCK, PatchState, asking, at_depth, describe_spec, hook_layers, state_of
from kvspeed.tuned import remembered_spec

__all__ = ["PatchState", "asking", "at_depth", "patch_model", "patched", "state_of", "unpatch_model"]


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
    _install(model, state)
    return model


def unpatch_model(model: nn.Module) -> nn.Module:
    """Take kvspeed's patch off `model`; one that is not patched stays as it is. Returns `model`."""
    state = state_of(model)
    if state is None:
        return model
    inner: Any = causal_lm(model)
    base: Any = base_model(model)
    for handle in state.handles:
        handle.remove()
    state.handles.clear()
    state.hooked.clear()
    if isinstance(base.layers, hooks.DepthList):
        base.layers.__class__ = nn.ModuleList  # type: ignore[assignment]
    for module in attention_modules(model):
        module.config = state.config
    state.restore_frequencies()
    for module in [inner, base, *attention_modules(model), *base.layers]:
        module.__dict__.pop("_kvspeed", None)
    for name in ("generate", "prepare_inputs_for_generation"):
        inner.__dict__.pop(name, None)
    return model


@contextmanager
def patched(model: nn.Module, spec: SpeedSpec | None = None, *, force: bool = False) -> Iterator[PatchState]:
    """`model` patched inside the block, and as before after it.

    A model that is patched already stays as it is, unless `force` asks for exactly `spec`. Threads may hold a model
    patched at once as long as they ask for the same; one that needs another patch meanwhile is refused.

    Raises:
        RuntimeError: another thread holds the model patched otherwise.
    """
    with LOCK:
        state, before = state_of(model), None
        if state is None or (force and state.spec != spec):
            if state is not None and any(thread != threading.get_ident() for thread in state.holders):
                raise RuntimeError(
                    f"the model is in use by another thread with {describe_spec(state.spec)}, and this call needs "
                    f"{describe_spec(spec)}; do one after the other"
                )
            before = state
            architecture(model)
            unpatch_model(model)
            state = PatchState(model, spec)
            state.temporary, state.before = True, before
            _install(model, state)
        state.holders.append(threading.get_ident())
    try:
        yield state
    finally:
        with LOCK:
            state.holders.remove(threading.get_ident())
            if state.temporary and not state.holders and state_of(model) is state:
                unpatch_model(model)
                if state.before is not None:
                    _install(model, state.before)


def _rule(model: nn.Module, layers: int, given: dict[str, Any]) -> SpeedSpec:
    """The rule that the arguments `given` ask for, completed by what the model was tuned for."""
    k, deep_layers = given.get("k"), given.pop("deep_layers", None)
    if deep_layers is not None:
        if k is not None:
            raise ValueError(f"k is {k} and deep_layers were given too; they say the same thing, so give one of them")
        given["k"], given["gaps"] = _depth_and_gaps(deep_layers, layers)
    elif k is not None:
        given["gaps"] = ()
    # Where every layer takes every token a damaged entry of the config need not matter.
    everywhere = k == layers and not isinstance(k, bool)
    tuned = None if everywhere else remembered_spec(model)
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
    from kvspeed.speed.auto import automatic  # it stands on this module

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


def _install(model: nn.Module, state: PatchState) -> None:
    inner: Any = causal_lm(model)
    base: Any = base_model(model)
    modules = attention_modules(model)
    if not modules:
        raise ValueError(f"{type(inner).__name__} has no attention modules to patch; pass a loaded causal LM")
    attention.register()
    config = copy.copy(state.config)
    config._attn_implementation = attention.NAME
    for module in modules:
        module.config = config
        module._kvspeed = state
    for module in (inner, base):
        module._kvspeed = state
    state.keep_frequencies()
    add = state.handles.append
    add(base.register_forward_pre_hook(hooks.stack_pre_hook, with_kwargs=True))
    add(base.register_forward_hook(hooks.stack_post_hook, with_kwargs=True, always_call=True))
    hook_layers(model, state)
    if hasattr(inner, "generate"):
        # Partial functions, since a method would be pickled by its name alone and come back as transformers' own.
        inner.generate = partial(generation.generate, inner)
        if generation.slices_inputs(inner):
            inner.prepare_inputs_for_generation = partial(generation.prepare_inputs, inner)
