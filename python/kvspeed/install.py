# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Putting a patch on one transformers model and taking it off, without copying or replacing any of its code.

A patch is a set of forward hooks, an attention function registered with transformers, and a `generate` that makes the
right cache. `unpatch_model` takes all of it away again.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from kvspeed import attention, generation, hooks
from kvspeed.models import architecture, attention_modules, base_model, causal_lm
from kvspeed.rule import SpeedSpec
from kvspeed.state import LOCK, PatchState, describe_spec, hook_layers, state_of

__all__ = ["install", "patched", "unpatch_model"]


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
            install(model, state)
        state.holders.append(threading.get_ident())
    try:
        yield state
    finally:
        with LOCK:
            state.holders.remove(threading.get_ident())
            if state.temporary and not state.holders and state_of(model) is state:
                unpatch_model(model)
                if state.before is not None:
                    install(model, state.before)


def install(model: nn.Module, state: PatchState) -> None:
    """Put the patch that `state` describes on `model`, which has none."""
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
        if generation.slices_inputs():
            inner.prepare_inputs_for_generation = partial(generation.prepare_inputs, inner)
