# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The forward hooks of a patched model. They hold no state of their own: everything is found from the module.

The plan of a forward travels as a keyword argument from the decoder stack to its layers and their attention, so that
gradient checkpointing replays it and two threads may run one model.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from kvspeed.cache import KVCache
from kvspeed.labelled import labelled_rows
from kvspeed.plan import Plan, plan_deep
from kvspeed.rule import SpeedSpec

__all__ = [
    "PROMPT_END",
    "DepthList",
    "first_layer_hook",
    "gap_post_hook",
    "layer_pre_hook",
    "lm_pre_hook",
    "stack_post_hook",
    "stack_pre_hook",
]

# Where the prompt ends in a `generate` that runs without a cache; with one, the cache knows.
PROMPT_END: ContextVar[int | None] = ContextVar("kvspeed_prompt_end", default=None)

# The rule of the forward that runs in this thread, where it has no work for the deep layers; None: all layers run.
_SHALLOW: ContextVar[SpeedSpec | None] = ContextVar("kvspeed_shallow", default=None)

_BARE = (
    "a model patched with k={k} of {n} layers was called without saying where the prompt ends; call model.generate, "
    "pass labels (-100 marks the prompt), or call begin_turn(prompt_length) on a kvspeed.KVCache and pass that"
)


class DepthList(nn.ModuleList):
    """The decoder layers of a model under SPEED.

    A slice, which is how every known decoder walks its layers, ends at the depth that the running forward needs, so
    that a chunk of a prompt without deep columns never enters the layers >= k (attention modules cannot take zero
    tokens). Gaps are filled, since decoders count the layers of a slice. Nothing shared is changed: other threads see
    all layers.
    """

    def __getitem__(self, index: Any) -> Any:
        spec = _SHALLOW.get()
        if isinstance(index, slice) and spec is not None:
            layers: list[Any] = list(self._modules.values())[: spec.k]
            for gap in spec.gaps:
                layers[gap] = _PassedBy(layers[gap])
            return nn.ModuleList(layers[index])
        return super().__getitem__(index)


class _PassedBy(nn.Module):
    """In place of a layer that no token of the forward runs through."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["passed"] = layer  # no child: it has a parent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["passed"], name)  # decoders ask for its kind of attention

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, None) if kwargs["kvspeed_plan"].deep.tuples else hidden_states


def lm_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Training: choose the deep columns from the labels, and give the loss the labels of those columns."""
    state: Any = module._kvspeed
    spec: SpeedSpec | None = state.spec
    if spec is None:
        return None
    kwargs = _as_keywords(module, args, kwargs)
    labels = kwargs.get("labels")
    if labels is None:
        return (), kwargs
    cache = kwargs.get(state.cache_name)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("labels were given together with a filled cache; under SPEED pass the whole sequence instead")
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"attention_mask has {mask.ndim} dimensions; under SPEED give a 2-D mask [batch, tokens]")
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    for name, given in (("labels", labels), ("attention_mask", mask)):
        if tokens is not None and given is not None and given.shape != tokens.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}, the tokens {tuple(tokens.shape[:2])}; they must agree"
            )
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and _restarts(position_ids, mask):
        raise ValueError(
            "position_ids restart within a row (packed sequences), which SPEED does not support; give one sequence "
            "a row"
        )
    deep, labels = labelled_rows(spec, labels, mask)
    plan = Plan(cache=None, past=0, padding=None, plain_mask=True, kernels=False, deep=deep)
    kwargs.update(kvspeed_plan=plan, use_cache=False)
    if spec.k < state.layers:
        kwargs["labels"] = labels.to(kwargs["labels"].device)
    elif mask is not None:  # the last layer takes all tokens, and so does the loss; padding predicts none
        padded = (mask == 0) | (mask.roll(1, 1) == 0)
        kwargs["labels"] = kwargs["labels"].masked_fill(padded.to(kwargs["labels"].device), -100)
    kwargs.pop(state.cache_name, None)
    return (), kwargs


def stack_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plan the forward of the decoder stack."""
    state: Any = module._kvspeed
    spec: SpeedSpec | None = state.spec
    _SHALLOW.set(None)
    state.keep_frequencies()
    kwargs = _as_keywords(module, args, kwargs)
    if kwargs.get("kvspeed_plan") is not None:
        return (), kwargs
    cache = kwargs.get(state.cache_name)
    if not isinstance(cache, KVCache):
        if spec is None:
            return (), kwargs
        _refuse_cache(cache, spec.k, len(module.layers))  # type: ignore[arg-type]
        cache = None
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if tokens is None:
        return (), kwargs  # the model's own message says it best
    if cache is not None:
        state.check_cache(cache)
    past = cache.get_seq_length() if cache is not None else 0
    prompt_end = cache.prompt_end if cache is not None else PROMPT_END.get()
    if spec is not None and prompt_end is None:
        raise ValueError(_BARE.format(k=spec.k, n=len(module.layers)))  # type: ignore[arg-type]
    padding, plain = _padding(cache, kwargs.get("attention_mask"), tokens.shape[1])
    if spec is not None and not plain:
        raise ValueError(
            "attention_mask hides tokens that are not left padding, which SPEED does not support; pad on the left "
            "(tokenizer.padding_side = 'left') and give a 2-D mask [batch, tokens]"
        )
    if spec is not None:
        prefix = cache.assembled if cache is not None else 0
        _check_places(past, prefix, tokens.shape[1], padding, kwargs.get("attention_mask"), kwargs.get("position_ids"))
    wants_weights = kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False)
    plan = Plan(cache=cache, past=past, padding=padding, plain_mask=plain, kernels=plain and not wants_weights)
    if spec is not None and prompt_end is not None:
        plan.deep = plan_deep(spec, cache, past, tokens.shape[1], prompt_end, padding)
        if plan.deep.columns == 0:
            _SHALLOW.set(spec)
    if cache is not None:
        cache.start_forward(plan)
    kwargs["kvspeed_plan"] = plan
    return (), kwargs


def stack_post_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Make the forward's KV count, or forget it when the forward failed."""
    _SHALLOW.set(None)
    cache = kwargs.get(module._kvspeed.cache_name)  # type: ignore[union-attr, arg-type]
    if isinstance(cache, KVCache) and cache.plan is not None:
        cache.end_forward(completed=output is not None)


def layer_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Deep layers: the first from k on, and each in a gap, takes the deep columns out of the hidden states; all of them
    see the columns at their own places.
    """
    plan: Plan | None = kwargs.get("kvspeed_plan")
    if plan is None or plan.deep is None:
        return None
    deep = plan.deep
    layer: int = module.self_attn.layer_idx  # type: ignore[union-attr, assignment]
    if not deep.spec.is_deep(layer):
        return None  # the hook is there for requests that go less deep
    hidden = args[0] if args else kwargs["hidden_states"]
    batch = hidden.shape[0]
    kwargs = dict(kwargs)
    if layer <= deep.spec.k:
        # A layer in a gap gives back what it took by itself: gradient checkpointing runs single layers again.
        hidden = deep.gather(hidden, batch) if layer == deep.spec.k else deep.take(hidden)
        if args:
            args = (hidden, *args[1:])
        else:
            kwargs["hidden_states"] = hidden
    for name, given in kwargs.items():
        if name.startswith("position_embeddings") and given is not None:
            kwargs[name] = tuple(deep.gather_once(part, batch) for part in given)
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = deep.gather_once(kwargs["position_ids"], batch)
    kwargs["attention_mask"] = None  # made for the prompt's tokens; the plan has the one for the columns
    return args, kwargs


def gap_post_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A layer in a gap has run: its columns go back among the tokens that passed it by."""
    plan: Plan | None = kwargs.get("kvspeed_plan")
    if plan is None or plan.deep is None:
        return None
    if isinstance(output, tuple):
        return (plan.deep.put(output[0]), *output[1:])
    return plan.deep.put(output)


def first_layer_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Layer 0 shows how this transformers version's layers return their result."""
    plan: Plan | None = kwargs.get("kvspeed_plan")
    if plan is not None and plan.deep is not None:
        plan.deep.tuples = isinstance(output, tuple)


def _padding(cache: KVCache | None, mask: Any, tokens: int) -> tuple[torch.Tensor | None, bool]:
    """Left padding of each row (int64 `[B]` on the CPU, None: no padding), and whether the mask is nothing more."""
    known = cache.padding if cache is not None else None
    if mask is None:
        return known, True
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return known, False
    answering = cache is not None and cache.prompt_end is not None and cache.get_seq_length() >= cache.prompt_end
    if cache is not None and answering and tokens == 1:
        return known, cache.plain_mask  # a decode step adds a column of ones: what the prompt's forward found holds
    prefix = cache.assembled if cache is not None else 0
    mask = mask.cpu()  # the one wait for the device, once a prompt
    hidden = mask[:, prefix:] == 0
    padding = hidden.to(torch.long).cumprod(1).sum(1)
    plain = bool((hidden.sum(1) == padding).all()) and bool((mask[:, :prefix] != 0).all())
    return (padding if bool(padding.any()) else None), plain


def _restarts(position_ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether positions fall from one token to the next, padding aside."""
    falls = position_ids[..., 1:] < position_ids[..., :-1]
    if mask is not None:
        falls = falls & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(falls.any())


def _check_places(
    past: int,
    prefix: int,
    tokens: int,
    padding: torch.Tensor | None,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> None:
    """Refuse a call whose mask or positions say that its tokens do not follow those in the cache."""
    if mask is not None and mask.shape[1] != past + tokens:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens, while the cache holds {past} and this call brings "
            f"{tokens}; pass only tokens that the cache has not seen, and a mask over both"
        )
    if position_ids is None or tokens == 1:  # a decode step is left alone: looking would cost a wait for the GPU
        return
    last = position_ids[:, -1].cpu()
    wanted = past + tokens - 1 - (padding if padding is not None else torch.zeros_like(last))
    if bool(((last != wanted) & (wanted >= prefix)).any()):  # a row may still be nothing but padding
        raise ValueError(
            f"position_ids end at {last.tolist()}, while the tokens end at {wanted.tolist()} ({past} in the cache, "
            f"{tokens} in this call, less left padding); SPEED needs absolute positions. The chunked prefill of "
            "transformers 4.57 gets here with padded rows: leave prefill_chunk_size out"
        )


def _refuse_cache(cache: Any, k: int, layers: int) -> None:
    if isinstance(cache, Cache) and (type(cache).__name__ != "DynamicCache" or cache.get_seq_length() > 0):
        raise ValueError(
            f"a model patched with k={k} of {layers} layers was given a {type(cache).__name__}; SPEED keeps different "
            "tokens in different layers, which only kvspeed.KVCache holds: pass none, an empty DynamicCache to "
            "generate, or the KVCache of an earlier turn"
        )


def _as_keywords(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = dict(kwargs)
    if args:
        kwargs.update(inspect.signature(module.forward).bind_partial(*args).arguments)
    return kwargs
