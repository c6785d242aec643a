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
from functools import partial
from typing import Any

import torch
from torch import nn

from kvspeed import attention, generation, hooks
from kvspeed.cache import KVCache
from kvspeed.models import architecture, attention_modules, base_model, cache_argument, causal_lm
from kvspeed.rope import RopeSpec, float32_rope_buffers, rope_buffers
from kvspeed.rule import SpeedSpec

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
    anchor_tokens: int = 1,
    boundary: str = "transient",
    upper_attention: str = "causal",
    turns: str = "keep",
    deep_layers: Iterable[int] | None = None,
) -> nn.Module:
    """Make `model` use kvspeed: its kernels and caches, and SPEED where `k` is given. A new patch replaces an old one.

    Under SPEED (arXiv:2605.06105) prompt tokens are computed and cached in the first `k` layers only. Above, a token
    sees the anchor (the first `anchor_tokens` of the sequence), earlier answer tokens and itself; see `speed_mask`.
    What `generate` is given is prompt, what it generates is answer. A forward with labels trains the same way (-100
    marks the prompt) and returns the logits of the deep columns: anchors, answer tokens, and those that predict one.

    Args:
        model: a causal LM of transformers (see `kvspeed.models.ARCHITECTURES`), bare or wrapped by PEFT.
        k: layers that see the whole prompt, 1 .. L; None or L: all of them, and the logits are the unpatched model's.
        anchor_tokens: first tokens of the sequence that live in every layer; 0 for SPEED without anchor.
        boundary: "transient": the last prompt token leaves nothing above k once it has predicted the first answer;
            "keep": later answer tokens see it there.
        upper_attention: "causal", or "self" (the paper's SelfOnly ablation: anchors and itself only).
        turns: "keep": answers of earlier turns stay deep; "reset": a new turn starts as if the conversation were
            encoded afresh. A turn's last answer token, sampled but not yet cached, is prompt of the next turn in both.
        deep_layers: instead of `k`, the layers that are what those from k on are otherwise: any of 1 .. L-1, not only
            the last ones. Prompt tokens pass such a layer by unchanged and go on in the next. Layers above it see what
            the last prompt token and answers were in it, so that turns="reset" is refused; packets are as well.

    Returns:
        `model` itself.

    Raises:
        TypeError, ValueError: an argument is out of range, or the architecture is not known; nothing is changed then.
    """
    architecture(model)
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    spec = _spec(k, layers, anchor_tokens, boundary, upper_attention, turns, deep_layers)
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


def _spec(
    k: int | None,
    layers: int,
    anchor_tokens: int,
    boundary: str,
    upper_attention: str,
    turns: str,
    deep_layers: Iterable[int] | None,
) -> SpeedSpec | None:
    gaps: tuple[int, ...] = ()
    depth = layers if k is None else k
    if deep_layers is not None:
        if k is not None:
            raise ValueError(f"k is {k} and deep_layers were given too; they say the same thing, so give one of them")
        depth, gaps = _depth_and_gaps(deep_layers, layers)
    spec = SpeedSpec(depth, anchor_tokens, boundary, upper_attention, turns, gaps)
    if depth > layers:
        raise ValueError(f"k is {k} and the model has {layers} layers; give 1 to {layers}, or None for all")
    return spec if depth < layers or gaps else None


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
    if state.spec is not None:
        base.layers.__class__ = hooks.DepthList
        for index in state.spec.deep_layers(state.layers):
            add(base.layers[index].register_forward_pre_hook(hooks.layer_pre_hook, with_kwargs=True))
        if state.spec.gaps:
            add(base.layers[0].register_forward_hook(hooks.first_layer_hook, with_kwargs=True))
        for index in state.spec.gaps:
            add(base.layers[index].register_forward_hook(hooks.gap_post_hook, with_kwargs=True))
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
        + (f", gaps at layers {list(spec.gaps)}" if spec.gaps else "")
    )
