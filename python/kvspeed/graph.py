# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Greedy decoding in which every step is the same work at the same addresses, so that a CUDA graph can replay it.

A decoding step of a small model takes a GPU less time than the host needs to queue it kernel by kernel. A CUDA graph is
queued as one. What it replays is fixed, so all that changes from step to step lies in device memory: the token and its
position, the place where its keys and values go, how long the tail is, who has finished. The model's own code runs once
more while the graph is captured; after that only the graph does.

`generate` here gives the tokens of transformers' greedy `generate`: for plain patched models, under SPEED, and after
assembled packets in either mode. On a CPU, and where capturing fails, the same steps run one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from kvspeed.cache import KVCache
from kvspeed.devices import layer_devices
from kvspeed.generation import undo_of
from kvspeed.greedy import check_greedy, greedy_arguments, token_ids
from kvspeed.models import attention_modules, causal_lm
from kvspeed.ops.attention import covers
from kvspeed.plan import DeepPlan, Keys, Plan, plan_deep
from kvspeed.rule import SpeedSpec
from kvspeed.state import PatchState, state_of

__all__ = ["DecodeStep", "generate"]

_CHECK = 8  # steps between two looks at whether all rows have finished; each look waits for the device
_WARM_UP = 2  # forwards before a capture, in which libraries make their handles and kernels their tables
_NEVER = 2**62  # the slot of a key that is not there yet


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int,
    cache: KVCache | None = None,
    capture: bool | None = None,
    on_token: Callable[[int], None] | None = None,
    **generate_kwargs: Any,
) -> torch.Tensor:
    """transformers' greedy `generate` of a patched model, its decoding steps replayed as one CUDA graph.

    The prompt's forward and the first token are transformers' own. Then one step is captured, which takes the host a
    few steps' time, and replayed for every token after that. The cache ends as `model.generate` leaves it.

    Args:
        model: a causal LM, patched (`kvspeed.patch_model`, with or without a k), in evaluation mode, on one device.
        input_ids: int64 `[B, T]`; after a filled cache the whole sequence, as for `model.generate`.
        attention_mask: `[B, T]`, 0 for left padding; None: no padding.
        max_new_tokens: the most tokens generated for a row.
        cache: a `KVCache` to go on from (`kvspeed.assemble`, or an earlier turn's); None for a new one.
        capture: None captures on CUDA, and where that fails warns once and goes on without a graph; True raises then;
            False never captures.
        on_token: called with 0, 1, 2, ... when the step that makes this token is queued (it need not be computed yet).
        **generate_kwargs: `eos_token_id`, `pad_token_id`, `generation_config`: what leaves `generate` greedy.

    Returns:
        int64 `[B, T + n]`, rows that ended early filled up with the padding token.

    Raises:
        ValueError: the model is not patched, in training mode, spread over devices, or of a dtype or head dimension
            that the kernels do not take; an argument or the model's generation_config asks for more than greedy
            search; rows hide more than left padding.
        RuntimeError: `capture=True` and capturing failed.
    """
    inner: Any = causal_lm(model)
    state = state_of(model)
    if state is None:
        raise ValueError("the model is not patched, which decoding by a CUDA graph needs: call kvspeed.patch_model")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected an integer from 1, got {max_new_tokens!r}")
    check_greedy(inner, generate_kwargs)
    _check_model(inner, state)
    if capture and not input_ids.is_cuda:
        raise RuntimeError(
            f"a CUDA graph was asked for and input_ids are on {input_ids.device}: move model and ids to a CUDA device, "
            "or leave capture out"
        )
    eos, pad = token_ids(inner, generate_kwargs)
    undo = undo_of(cache)
    try:
        cache = KVCache(state.config, spec=state.spec) if cache is None else cache
        cache.reserve(input_ids.shape[1] + max_new_tokens, max_new_tokens)
        given = greedy_arguments(generate_kwargs) | {"max_new_tokens": 1, state.cache_name: cache}
        output = inner.generate(input_ids=input_ids, attention_mask=attention_mask, **given)
        if on_token is not None:
            on_token(0)
        if max_new_tokens == 1:
            return output
        step = DecodeStep(inner, state, cache, output[:, -1], steps=max_new_tokens - 1, eos=eos, pad=pad)
        if step.finished():
            return output
        if capture or (capture is None and output.is_cuda):
            step.capture(must=bool(capture))
        for token in range(1, max_new_tokens):
            step()
            if on_token is not None:
                on_token(token)
            if token % _CHECK == 0 and step.finished():
                break
        return torch.cat([output, step.end()], 1)
    except BaseException:
        undo()
        raise


class DecodeStep:
    """One decoding step after a prompt: calling it queues the next token of every row, the same work each time."""

    def __init__(
        self,
        model: Any,
        state: PatchState,
        cache: KVCache,
        token: torch.Tensor,
        *,
        steps: int,
        eos: list[int],
        pad: int,
    ) -> None:
        """`token`, int64 `[B]`, is the first new token; at most `steps` steps follow."""
        if not cache.plain_mask:
            raise ValueError(
                "attention_mask hides tokens that are not left padding, which a step of fixed shape does not support: "
                "pad on the left (tokenizer.padding_side = 'left')"
            )
        if any(layer.survivors and layer.window is not None for layer in map(cache.layer, range(cache.num_layers))):
            raise ValueError(
                "packets with removed tokens lie in sliding-window layers, which a step of fixed shape does not "
                "support: leave cuda_graph out"
            )
        device, rows, past = token.device, token.shape[0], cache.get_seq_length()
        self._model, self._state, self._cache = model, state, cache
        self._steps, self._done, self._pad = steps, 0, pad
        self._layers = [cache.layer(index) for index in range(cache.num_layers)]
        for layer in self._layers:
            layer.open(steps)
        deep = None
        if state.spec is not None:
            deep = _deep_step(state.spec, cache, past, steps, device)
        self._deep = deep
        self._graph: torch.cuda.CUDAGraph | None = None
        # What changes from step to step, in memory that stays where it is.
        self._ids = token[:, None].clone()
        self._positions = torch.full((rows, 1), past, device=device)
        if cache.padding is not None:
            self._positions -= cache.padding.to(device)[:, None]
        self._tokens = torch.full((rows, steps), pad, device=device)
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._ends = torch.tensor(eos, dtype=torch.long, device=device)
        self._first, self._ended = token, self._is_end(token)
        self._places: dict[int, torch.Tensor] = {}  # by tail length before the first step: int64 [1]
        self._lengths: dict[int, torch.Tensor] = {}  # the same, less the tokens skipped: int32 [B]
        self._arguments = {
            "input_ids": self._ids,
            "position_ids": self._positions,
            # Four dimensions: transformers takes it for a mask that is ready, and makes none. Nothing reads it.
            "attention_mask": torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=device),
            "use_cache": True,
            "kvspeed_plan": Plan(cache, past, cache.padding, True, True, deep, self._tail_length),
            state.cache_name: _StepCache(self._layers, self._write),
        }

    def __call__(self) -> None:
        """Queue one token for every row."""
        if self._done == self._steps:
            raise ValueError(f"this step was made for {self._steps} tokens, which are there; make another")
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()
        self._done += 1

    def capture(self, *, must: bool = False) -> bool:
        """Capture the step; where that fails, raise (`must`) or warn and return False: steps then run one by one."""
        device = self._ids.device
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):  # writes what the first step will write again; nothing moves on
                    self._logits()
            current.wait_stream(side)
            try:
                # Thread-local, so that what other threads do with their tensors meanwhile does not break the capture.
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    self._run()
            except Exception as error:
                if must:
                    raise RuntimeError(f"the decoding step could not be captured as a CUDA graph: {error}") from error
                warnings.warn(
                    f"the decoding step could not be captured as a CUDA graph ({error}); it runs without one, slower "
                    "but with the same result",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return False
        self._graph = graph
        return True

    def finished(self) -> bool:
        """Whether every row has ended. Waits for the device."""
        return bool(self._ends.numel()) and bool(self._ended.all())

    def end(self) -> torch.Tensor:
        """The tokens, int64 `[B, n]`, up to where the last row ended; the cache then holds what `generate` leaves."""
        count = self._done
        if self._ends.numel():
            ended = self._is_end(torch.cat([self._first[:, None], self._tokens[:, : self._done]], 1))
            running = (~ended).long().cumprod(1).sum(1).max()  # tokens of the longest row before its end
            count = min(count, int(running))
        elif self._graph is not None:
            torch.cuda.current_stream(self._ids.device).synchronize()  # the graph's memory is not freed under it
        self._graph = None
        past = self._cache.get_seq_length()
        for layer in self._layers:
            layer.length += count
        if self._deep is not None:
            self._cache.deep_slots.extend(range(past, past + count))
        return self._tokens[:, :count]

    # ---- what a step does ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        token = self._logits().argmax(-1)
        if self._ends.numel():
            token = torch.where(self._ended, self._pad, token)
            self._ended |= self._is_end(token)
        self._tokens.index_copy_(1, self._column, token[:, None])
        self._ids.copy_(token[:, None])
        for counter in (self._positions, self._column, *self._places.values(), *self._lengths.values()):
            counter.add_(1)
        if self._deep is not None:
            self._deep.advance()

    def _logits(self) -> torch.Tensor:
        if self._deep is not None:
            self._deep.begin()
        return self._model(**self._arguments).logits[:, -1].float()

    def _write(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` of the cache: one token into layer `index`. Returns the storage; `_tail_length` has its length."""
        layer = self._layers[index]
        keys, values = layer.view(layer.length + self._steps)
        place = self._places.get(layer.length)
        if place is None:  # in the first run, which is never captured
            place = self._places[layer.length] = torch.full((1,), layer.length + self._done, device=key.device)
        keys.index_copy_(2, place, key)
        values.index_copy_(2, place, value)
        return keys, values

    def _tail_length(self, index: int, skip: int) -> torch.Tensor:
        before = self._layers[index].length - skip
        length = self._lengths.get(before)
        if length is None:
            rows, now = self._ids.shape[0], before + 1 + self._done
            length = self._lengths[before] = torch.full((rows,), now, dtype=torch.int32, device=self._ids.device)
        return length

    def _is_end(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens[..., None] == self._ends).any(-1)


class _StepCache(Cache):
    """The cache that a step gives to the model: writes go to places that device memory names."""

    def __init__(self, layers: list[Any], write: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(layers=layers)
        self._write = write

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._write(layer_idx, key_states, value_states)


@dataclass
class _DeepStep(DeepPlan):
    """The plan of the layers >= k, whose only column is the step's token, with all that moves on in device memory."""

    place: torch.Tensor | None = None  # int64 [1], the column's index among the keys; None where no mask is needed

    def begin(self) -> None:
        """Before a step's forward: forget the masks of the last one, and place the token's slot among the keys."""
        self._masks.clear()
        if self.place is not None:
            slots = self.keys().slot
            slots.index_copy_(1, self.place, self.query_slot.expand(slots.shape[0], 1))

    def advance(self) -> None:
        self.query_slot.add_(1)
        if self.place is not None:
            self.place.add_(1)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        if self.place is None:
            return None
        if window not in self._masks:
            self._masks[window] = self.visible(window)
        return self._masks[window]


def _deep_step(spec: SpeedSpec, cache: KVCache, past: int, steps: int, device: torch.device) -> _DeepStep:
    """What `plan_deep` says of the first step, made to last for `steps` of them."""
    assert cache.prompt_end is not None
    plan = plan_deep(spec, cache, past, 1, cache.prompt_end, cache.padding)
    assert plan.whole and plan.kept == 1
    layers = [cache.layer(index) for index in spec.deep_layers(cache.num_layers)]
    now = plan.keys()
    count = now.slot.shape[1] - 1  # keys that are there; the column is the last one
    masked = not plan.plain or any(layer.window is not None for layer in layers)

    def widened(tensor: torch.Tensor, value: Any) -> torch.Tensor:
        wide = torch.full((tensor.shape[0], count + steps), value, dtype=tensor.dtype, device=device)
        wide[:, :count] = tensor[:, :count].to(device)
        return wide

    keys = Keys(widened(now.slot, _NEVER), widened(now.seen, True), widened(now.answer, True))
    if masked:  # the masked attention is SDPA, which multiplies what it does not see by zero: NaN would stay
        for layer in layers:
            for tensor in layer.view(count + steps):
                tensor[:, :, count:] = 0
    return _DeepStep(
        spec=spec,
        index=plan.index,
        keys=lambda: keys,
        padding=plan.padding.to(device),
        query_slot=torch.full((1, 1), past, device=device),
        plain=not masked,
        whole=True,
        place=torch.full((1,), count, device=device) if masked else None,
    )


def _check_model(model: Any, state: PatchState) -> None:
    """Refuse what a step of fixed shape cannot serve."""
    leave = "leave cuda_graph out"
    if model.training:
        raise ValueError("the model is in training mode, and dropout is not greedy decoding: call model.eval()")
    if getattr(state.config, "output_attentions", False):
        raise ValueError(f"the model's config asks for output_attentions, which the kernels do not give: {leave}")
    devices = sorted({str(device) for device in layer_devices(model)})
    if len(devices) > 1:
        raise ValueError(f"the model is spread over {', '.join(devices)}, and a CUDA graph is of one device: {leave}")
    attention = attention_modules(model)[0]
    weight = next(model.parameters())
    if not covers(weight.new_empty(1, 1, 1, attention.head_dim)):
        raise ValueError(
            f"kvspeed's kernels for {weight.device} do not take {weight.dtype} with head dimension "
            f"{attention.head_dim} (CUDA: bfloat16 and float16, 64, 80, 96, 128, 256; CPU: multiples of 8 up to 256), "
            f"or are not in this build (see `python -m kvspeed doctor`): {leave}"
        )
    try:
        _ = state.rope
    except ValueError as error:
        raise ValueError(f"a step of fixed shape needs angles that follow from the position alone: {error}") from None
