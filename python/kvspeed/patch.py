# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Patching one transformers model, in place, without copying or replacing any of its code.

A patch is a set of forward hooks, an attention function registered with transformers, and a `generate` that makes the
right cache. `unpatch_model` takes all of it away again.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from kvspeed import attention, generation, hooks
from kvspeed.cache import KVCache
from kvspeed.models import architecture, attention_modules, base_model, cache_argument, causal_lm
from kvspeed.rope import RopeSpec, float32_rope_buffers, rope_buffers
from kvspeed.rule import SpeedSpec
from kvspeed.tuned import remembered_spec

__all__ = ["PatchState", "patch_model", "patched", "state_of", "unpatch_model"]


_LOCK = threading.RLock()


class PatchState:
    """What a patched model's parts know of the patch (found as `module._kvspeed`).

    Attributes:
        spec: the depth and rule of SPEED, or None when every layer takes every token.
        config: the model's own config, whose attention implementation serves what the kernels do not.
        cache_name: what this transformers version calls the cache argument.
    """

    def __init__(self, model: nn.Module, spec: SpeedSpec | None) -> None:
        base = base_model(model)
        self.spec = spec
        self.config: Any = base.config
        self.cache_name = cache_argument(base)
        self.layers = len(base.layers)  # type: ignore[arg-type]
        self.handles: list[Any] = []
        self.rounded: torch.dtype | None = None  # to which a cast rounded the rotary frequencies, before the repair
        self.temporary = False  # installed by `patched`, to be taken off by the last that holds it
        self.holders: list[int] = []  # threads of the blocks of `patched` that run now
        self.before: PatchState | None = None  # what `patched` replaced
        self._weights: torch.dtype | None = None  # dtype of the model then
        self._base = base
        self._frequencies = rope_buffers(base)
        self._rope: RopeSpec | None = None

    @property
    def rope(self) -> RopeSpec:
        """The model's rotary embedding; raises where its keys cannot be shifted."""
        if self._rope is None:
            self._rope = RopeSpec.from_model(self._base)
        return self._rope

    def keep_frequencies(self) -> None:
        """Put right what a cast (`model.bfloat16()`) did to the rotary frequencies, before the patch or after it."""
        if all(getattr(module, name).dtype == torch.float32 for module, name in self._frequencies):
            return
        for module, name, exact in float32_rope_buffers(self._base):
            self.rounded = getattr(module, name).dtype
            self._weights = next(self._base.parameters()).dtype
            setattr(module, name, exact)

    def restore_frequencies(self) -> None:
        """Round them again, unless the model was cast once more since."""
        if self.rounded is None or next(self._base.parameters()).dtype != self._weights:
            return
        for module, name in self._frequencies:
            setattr(module, name, getattr(module, name).to(self.rounded))

    def inv_freq(self, layer: int) -> torch.Tensor:
        return self.rope.layer(layer)

    def check_cache(self, cache: KVCache) -> None:
        """Take an empty cache for this patch; refuse one that holds KV made under another.

        Raises:
            ValueError: both sides are named.
        """
        if cache.num_layers != self.layers:
            raise ValueError(
                f"the cache has {cache.num_layers} layers, the model {self.layers}; make one for this model"
            )
        if cache.spec == self.spec:
            return
        if cache.get_seq_length() > 0:
            raise ValueError(
                f"the cache was made with {_describe(cache.spec)}, the model is patched with {_describe(self.spec)}; "
                "start with a new cache, or patch the model as the cache was made"
            )
        cache.spec = self.spec


def patch_model(
    model: nn.Module,
    k: int | None = None,
    *,
    anchor_tokens: int | None = None,
    boundary: str | None = None,
    upper_attention: str | None = None,
    turns: str | None = None,
) -> nn.Module:
    """Make `model` use kvspeed: its kernels and caches, and SPEED where `k` is given. A new patch replaces an old one.

    Under SPEED (arXiv:2605.06105) prompt tokens are computed and cached in the first `k` layers only. Above, a token
    sees the anchor (the first `anchor_tokens` of the sequence), earlier answer tokens and itself; see `speed_mask`.
    What `generate` is given is prompt, what it generates is answer. A forward with labels trains the same way (-100
    marks the prompt) and returns the logits of the deep columns: anchors, answer tokens, and those that predict one.

    A model that was tuned for SPEED says so in its config (`kvspeed.tuned`): what is left out here comes from there.
    For one that was not, the defaults are k = L, one anchor token, "transient", "causal" and "keep".

    Args:
        model: a causal LM of transformers (see `kvspeed.models.ARCHITECTURES`), bare or wrapped by PEFT.
        k: layers that see the whole prompt, 1 .. L; L: all of them, and the logits are the unpatched model's.
        anchor_tokens: first tokens of the sequence that live in every layer; 0 for SPEED without anchor.
        boundary: "transient": the last prompt token leaves nothing above k once it has predicted the first answer;
            "keep": later answer tokens see it there.
        upper_attention: "causal", or "self" (the paper's SelfOnly ablation: anchors and itself only).
        turns: "keep": answers of earlier turns stay deep; "reset": a new turn starts as if the conversation were
            encoded afresh. A turn's last answer token, sampled but not yet cached, is prompt of the next turn in both.

    Returns:
        `model` itself.

    Raises:
        TypeError, ValueError: an argument is out of range, the architecture is not known, or the config's entry is
            damaged; nothing is changed then.
    """
    architecture(model)
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    given = {
        "k": k,
        "anchor_tokens": anchor_tokens,
        "boundary": boundary,
        "upper_attention": upper_attention,
        "turns": turns,
    }
    spec = _spec(model, layers, {name: value for name, value in given.items() if value is not None})
    unpatch_model(model)
    state = PatchState(model, spec)
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


def state_of(model: nn.Module) -> PatchState | None:
    """The patch of `model`, or None."""
    return base_model(model).__dict__.get("_kvspeed")


@contextmanager
def patched(model: nn.Module, spec: SpeedSpec | None = None, *, force: bool = False) -> Iterator[PatchState]:
    """`model` patched inside the block, and as before after it.

    A model that is patched already stays as it is, unless `force` asks for exactly `spec`. Threads may hold a model
    patched at once as long as they ask for the same; one that needs another patch meanwhile is refused.

    Raises:
        RuntimeError: another thread holds the model patched otherwise.
    """
    with _LOCK:
        state, before = state_of(model), None
        if state is None or (force and state.spec != spec):
            if state is not None and any(thread != threading.get_ident() for thread in state.holders):
                raise RuntimeError(
                    f"the model is in use by another thread with {_describe(state.spec)}, and this call needs "
                    f"{_describe(spec)}; do one after the other"
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
        with _LOCK:
            state.holders.remove(threading.get_ident())
            if state.temporary and not state.holders and state_of(model) is state:
                unpatch_model(model)
                if state.before is not None:
                    _install(model, state.before)


def _spec(model: nn.Module, layers: int, given: dict[str, Any]) -> SpeedSpec | None:
    """The rule that the arguments `given` ask for, completed by what the model was tuned for."""
    if "k" in given and given["k"] == layers and not isinstance(given["k"], bool):
        tuned = None  # every layer takes every token, so that a damaged entry need not matter
    else:
        tuned = remembered_spec(model)
    spec = replace(tuned, **given) if tuned is not None else SpeedSpec(**{"k": layers, **given})
    if spec.k > layers:
        raise ValueError(f"k is {spec.k} and the model has {layers} layers; give 1 to {layers}, or None for all")
    return spec if spec.k < layers else None


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
    if state.spec is not None:
        base.layers.__class__ = hooks.DepthList
        for layer in list(base.layers)[state.spec.k :]:
            add(layer.register_forward_pre_hook(hooks.layer_pre_hook, with_kwargs=True))
        if inner is not base:
            add(inner.register_forward_pre_hook(hooks.lm_pre_hook, with_kwargs=True))
    if hasattr(inner, "generate"):
        # Partial functions, since a method would be pickled by its name alone and come back as transformers' own.
        inner.generate = partial(generation.generate, inner)
        if generation.slices_inputs(inner):
            inner.prepare_inputs_for_generation = partial(generation.prepare_inputs, inner)


def _describe(spec: SpeedSpec | None) -> str:
    if spec is None:
        return "all layers (no SPEED)"
    return (
        f"k={spec.k}, anchor_tokens={spec.anchor_tokens}, boundary={spec.boundary!r}, "
        f"upper_attention={spec.upper_attention!r}, turns={spec.turns!r}"
    )
