# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What a patched model's parts know of the patch, and the depth of a single request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kvspeed import hooks
from kvspeed.cache import KVCache
from kvspeed.models import base_model, cache_argument, causal_lm, check_own_kv
from kvspeed.request import REQUEST, ByTask, depth_of_task
from kvspeed.rope import RopeSpec, float32_rope_buffers, rope_buffers
from kvspeed.rule import SpeedSpec

__all__ = ["LOCK", "PatchState", "asking", "at_depth", "describe_spec", "hook_layers", "state_of"]

LOCK = threading.RLock()  # held while hooks come and go


class PatchState:
    """What a patched model's parts know of the patch (found as `module._kvspeed`).

    Attributes:
        rule: the depth and rule of SPEED; k = L, without gaps, when every layer takes every token.
        k_by_task: the depth of requests that name their task, or None.
        config: the model's own config, whose attention implementation serves what the kernels do not.
        cache_name: what this transformers version calls the cache argument.
    """

    def __init__(self, model: nn.Module, rule: SpeedSpec | None, k_by_task: ByTask | None = None) -> None:
        base = base_model(model)
        self.config: Any = base.config
        self.cache_name = cache_argument(base)
        self.layers = len(base.layers)  # type: ignore[arg-type]
        self.rule = rule if rule is not None else SpeedSpec(self.layers)
        self.k_by_task = k_by_task
        self.shallowest = self.rule.k  # the smallest k that was asked for: layers from there on have hooks
        self.hooked: set[int] = set()
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
    def spec(self) -> SpeedSpec | None:
        """The depth and rule of SPEED for the request that runs in this thread; None: every layer takes every token."""
        request = REQUEST.get()
        if request is not None and request[0] is self:
            return request[1]
        return self._effective(self.rule)

    def at(self, k: int | None = None, task: str | None = None) -> SpeedSpec | None:
        """The rule at another depth, `k` or that of a task; see `at_depth`, also for what is raised."""
        if k is not None and task is not None:
            raise ValueError(f"k is {k} and task is {task!r}; both say how deep to go, so give one of them")
        if task is not None:
            k = depth_of_task(self.k_by_task, task, self.layers)
        if k is None:
            return self.spec
        rule = replace(self.rule, k=k, gaps=())
        if k > self.layers:
            raise ValueError(f"k is {k} and the model has {self.layers} layers; give 1 to {self.layers}")
        if k < self.layers:
            check_own_kv(self.config)
        return self._effective(rule)

    def _effective(self, rule: SpeedSpec) -> SpeedSpec | None:
        return rule if rule.gaps or rule.k < self.layers else None

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
                f"the cache was made with {describe_spec(cache.spec)}, the model is patched with "
                f"{describe_spec(self.spec)}; start with a new cache, or patch the model (or ask) as the cache was made"
            )
        cache.spec = self.spec


def state_of(model: nn.Module) -> PatchState | None:
    """The patch of `model`, or None."""
    return base_model(model).__dict__.get("_kvspeed")


@contextmanager
def at_depth(model: nn.Module, k: int | None = None, *, task: str | None = None) -> Iterator[None]:
    """Inside the block, and in this thread alone, `model` works to depth `k`, or to the depth of a task.

    The rest of the rule is that of the patch; gaps are left out. Without `k` and `task` nothing changes.

    Raises:
        TypeError, ValueError: `k` is out of range, `task` is not known, both are given, or the model is not patched.
    """
    state = state_of(model)
    if k is None and task is None:
        yield
        return
    if state is None:
        raise ValueError("the model is not patched, so that no depth can be asked for: call kvspeed.patch_model first")
    with asking(model, state.at(k, task)):
        yield


@contextmanager
def asking(model: nn.Module, spec: SpeedSpec | None) -> Iterator[PatchState]:
    """Inside the block, and in this thread alone, the patched `model` works by `spec`; None: at full depth."""
    state = state_of(model)
    if state is None:
        raise ValueError("the model is not patched; call kvspeed.patch_model first")
    if spec is not None and spec != state.rule:
        if spec.gaps:
            raise ValueError(f"gaps at layers {list(spec.gaps)} are not for single requests; patch the model with them")
        if spec.k < state.shallowest:
            with LOCK:
                state.shallowest = min(state.shallowest, spec.k)
                hook_layers(model, state)
    token = REQUEST.set((state, spec))
    try:
        yield state
    finally:
        REQUEST.reset(token)


def hook_layers(model: nn.Module, state: PatchState) -> None:
    """Give hooks to the layers that may be deep, where they have none yet."""
    inner: Any = causal_lm(model)
    base: Any = base_model(model)
    add = state.handles.append
    gaps = state.rule.gaps
    missing = {*gaps, *range(state.shallowest, state.layers)} - state.hooked
    if not missing:
        return
    base.layers.__class__ = hooks.DepthList
    if not state.hooked:
        if gaps:
            add(base.layers[0].register_forward_hook(hooks.first_layer_hook, with_kwargs=True))
        if inner is not base:
            add(inner.register_forward_pre_hook(hooks.lm_pre_hook, with_kwargs=True))
    for index in sorted(missing):
        add(base.layers[index].register_forward_pre_hook(hooks.layer_pre_hook, with_kwargs=True))
        if index in gaps:
            add(base.layers[index].register_forward_hook(hooks.gap_post_hook, with_kwargs=True))
        state.hooked.add(index)


def describe_spec(spec: SpeedSpec | None) -> str:
    if spec is None:
        return "all layers (no SPEED)"
    return (
        f"k={spec.k}, anchor_tokens={spec.anchor_tokens}, boundary={spec.boundary!r}, "
        f"upper_attention={spec.upper_attention!r}, turns={spec.turns!r}"
        + (f", gaps at layers {list(spec.gaps)}" if spec.gaps else "")
    )
