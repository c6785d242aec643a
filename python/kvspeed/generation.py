# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""`generate` of a patched model: transformers' own, given the right cache and told where the prompt ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from kvspeed.cache import KVCache
from kvspeed.hooks import PROMPT_END
from kvspeed.state import at_depth

__all__ = ["generate", "prepare_inputs", "slices_inputs", "undo_of"]

_DYNAMIC = (
    None,
    "dynamic",
    "dynamic_full",
)  # cache kinds that a KVCache stands in for; the last is an assistant's in 4.57
_MAX_RESERVE = 4096  # answer tokens; a cache grows beyond


def generate(self: Any, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate` under kvspeed's patch; the same arguments and results.

    Two arguments are kvspeed's own: `k`, how deep this request goes, or `task`, whose depth is in the `k_by_task` of
    `patch_model`. A request that carries a cache on must ask for the depth at which that was made.

    Without a cache in the arguments it makes a `KVCache`, which is returned where `generate` returns caches and carries
    a conversation on. Under SPEED all tokens given are prompt.

    Raises:
        ValueError: under SPEED, a cache that cannot hold different tokens in different layers (static, quantised,
            offloaded), one made under another k, or no new token.
    """
    k, task = kwargs.pop("k", None), kwargs.pop("task", None)
    if k is not None or task is not None:
        with at_depth(self, k, task=task):
            return generate(self, inputs, *args, **kwargs)
    state = self._kvspeed
    spec = state.spec
    names = [name for name in ("cache", "past_key_values") if kwargs.get(name) is not None]
    given = kwargs[names[0]] if names else None
    config = kwargs.get("generation_config") or (args[0] if args and args[0] is not None else self.generation_config)
    kind = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
    use_cache = kwargs.get("use_cache", getattr(config, "use_cache", True)) is not False
    if spec is not None:
        _check_kind(spec, "cache_implementation" in kwargs, kind, given)
    if kwargs.get("assistant_early_exit", getattr(config, "assistant_early_exit", None)) is not None:
        raise ValueError(
            "assistant_early_exit drafts with the first layers of this same model, which a patched model does not "
            "support; give an assistant_model or prompt_lookup_num_tokens instead, or unpatch the model"
        )
    call = type(self).generate
    if spec is None and (_foreign(given) or (given is None and (kind not in (*_DYNAMIC, "hybrid") or not use_cache))):
        return call(self, inputs, *args, **kwargs)
    prompt_end, rows = _prompt(inputs, kwargs, given)
    if not use_cache and given is None:
        token = PROMPT_END.set(prompt_end)
        try:
            return call(self, inputs, *args, **kwargs)
        finally:
            PROMPT_END.reset(token)
    undo = undo_of(given)
    try:
        cache = _cache(self, state, given)
        if prompt_end is not None:
            cache.begin_turn(prompt_end)
            new = _new_tokens(kwargs, config, prompt_end)
            cache.reserve(prompt_end + new, new)
        sequences = max(_option(kwargs, config, "num_beams", 1), _option(kwargs, config, "num_return_sequences", 1))
        if cache.has_tail and cache.max_batch_size == 1 and sequences * rows > 1:
            cache.batch_repeat_interleave(sequences * rows)
        kwargs[names[0] if names else state.cache_name] = cache
        kwargs["use_cache"] = True  # a cache that is given is used, whatever a config kept from training says
        kwargs.pop("cache_implementation", None)
        if kind is not None:
            kwargs["cache_implementation"] = None  # transformers refuses a kind beside a cache
        return call(self, inputs, *args, **kwargs)
    except BaseException:
        undo()
        raise


def slices_inputs() -> bool:
    """Whether this transformers version leaves it to the caller to take cached tokens out of a forward's inputs."""
    return "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


def prepare_inputs(
    self: Any, input_ids: torch.Tensor, next_sequence_length: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """transformers' `prepare_inputs_for_generation`, with what the cache holds kept out of the inputs.

    Assisted decoding in transformers 5 gives the whole sequence to its first forward, whatever the cache has seen.
    """
    cache = kwargs.get(self._kvspeed.cache_name)
    if next_sequence_length is None and isinstance(cache, KVCache):
        seen = cache.get_seq_length()
        if 0 < seen < (cache.prompt_end or 0) <= input_ids.shape[1]:
            next_sequence_length = input_ids.shape[1] - seen
    kwargs["next_sequence_length"] = next_sequence_length  # by name: Phi-3's own comes after other arguments
    return type(self).prepare_inputs_for_generation(self, input_ids, *args, **kwargs)


# transformers reads it. Not functools.wraps: a function that bears another's name cannot be pickled.
prepare_inputs.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    GenerationMixin.prepare_inputs_for_generation
)


def _cache(model: Any, state: Any, given: Any) -> KVCache:
    if isinstance(given, KVCache):
        state.check_cache(given)
        return given
    config = model.config.get_text_config()
    if given is None:
        return KVCache(config, spec=state.spec)
    # An empty DynamicCache that the caller holds: it becomes the KVCache, so that the caller finds its KV in it.
    given.__class__ = KVCache
    given.__dict__.clear()
    KVCache.__init__(given, config, spec=state.spec)
    return given


def undo_of(given: Any) -> Callable[[], None]:
    """What puts the caller's cache back as it was, where `generate` fails or is interrupted."""
    if isinstance(given, KVCache):
        snapshot = given.snapshot()
        return lambda: given.restore(snapshot)
    if given is None:
        return lambda: None
    kind, fields = type(given), dict(given.__dict__)

    def undo() -> None:
        given.__class__ = kind
        given.__dict__.clear()
        given.__dict__.update(fields)

    return undo


def _foreign(cache: Any) -> bool:
    """Whether a cache was given that only transformers' own path can use."""
    return cache is not None and not isinstance(cache, KVCache) and not _empty_dynamic(cache)


def _empty_dynamic(cache: Any) -> bool:
    return type(cache).__name__ == "DynamicCache" and not cache.offloading and cache.get_seq_length() == 0


def _check_kind(spec: Any, asked: bool, kind: str | None, given: Any) -> None:
    if _foreign(given):
        what = f"a {type(given).__name__}" if isinstance(given, Cache) else f"a cache of type {type(given).__name__}"
        filled = " that is not empty" if type(given).__name__ == "DynamicCache" else ""
        raise ValueError(
            f"generate under SPEED (k={spec.k}) was given {what}{filled}, which cannot hold different tokens in "
            "different layers; pass none, an empty DynamicCache, or the kvspeed.KVCache of an earlier turn"
        )
    if kind not in _DYNAMIC and not (kind == "hybrid" and not asked):
        raise ValueError(
            f"cache_implementation is {kind!r}, and SPEED (k={spec.k}) supports only its own cache; leave it out"
        )


def _prompt(inputs: torch.Tensor | None, kwargs: dict[str, Any], cache: Any) -> tuple[int | None, int]:
    """The absolute slot where the prompt ends, and the rows of the batch."""
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    embeds, mask = kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    seen = cache.get_seq_length() if isinstance(cache, KVCache) else 0
    if mask is not None and mask.ndim == 2 and seen > 0:
        return mask.shape[1], mask.shape[0]  # ids may be the whole sequence or its new part; the mask covers it all
    if embeds is not None:
        return embeds.shape[1], embeds.shape[0]  # ids beside them are for the logits processors alone
    if ids is not None:
        return ids.shape[1], ids.shape[0]
    return 1, 1  # transformers starts with BoS


def _option(kwargs: dict[str, Any], config: Any, name: str, default: int) -> int:
    value = kwargs.get(name)
    value = getattr(config, name, None) if value is None else value
    return default if value is None else value


def _new_tokens(kwargs: dict[str, Any], config: Any, prompt_end: int) -> int:
    new = _option(kwargs, config, "max_new_tokens", 0)
    if not new:
        new = _option(kwargs, config, "max_length", prompt_end + 20) - prompt_end
    return max(1, min(int(new), _MAX_RESERVE))
