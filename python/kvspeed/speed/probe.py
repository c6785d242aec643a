# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Looking into a model while it decodes: how each layer attends to the prompt, and how it turns the hidden states.

The attention of the rows that are measured, and of no others, is computed a second time, over the keys in chunks with
a running softmax. No matrix of attention weights is ever there, so that memory does not grow with the prompt. The keys
and queries are those that the model's attention function is given: rotated, normalised, as they are used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from kvspeed import attention
from kvspeed.install import patched
from kvspeed.models import attention_modules, base_model

__all__ = ["PromptAttention", "Recorder", "probing", "prompt_attention", "turning_angle"]

NAME = "kvspeed_probe"

_SCORES = 1 << 22  # of a chunk: 16 MiB in float32, a few times


class PromptAttention(NamedTuple):
    """How query tokens attend to the prompt; each float64 `[H_q, S]`.

    The *anchor* is the first tokens of the prompt, its *content* the others, which SPEED takes away from the layers
    >= k. A query that is a prompt token does not count as the prompt that it looks at.

    Attributes:
        mass: attention weight on anchor and content together, 0 .. 1.
        content_mass: on the content alone.
        entropy: of the weights on anchor and content, renormalised to sum 1, in nats; NaN where none is visible.
        content_entropy: of the weights on the content, renormalised; NaN where none is visible.
    """

    mass: torch.Tensor
    content_mass: torch.Tensor
    entropy: torch.Tensor
    content_entropy: torch.Tensor


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    query_start: int,
    prompt_end: int,
    anchor_tokens: int = 1,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    max_scores: int = _SCORES,
) -> PromptAttention:
    """Attention to the prompt, without materialising the weights.

    Args:
        query: `[1, H_q, S, D]`, ready for use, at positions `query_start` on.
        key: `[1, H_kv, T, D]`, ready for use; the last of them belongs to the last query. What a sliding cache has
            dropped in front may be missing.
        query_start: position of the first query.
        prompt_end: positions below are prompt.
        anchor_tokens: the first positions that are anchors.
        scale, softcap, window, sinks: as `ops.segment_attention` takes them.
        max_scores: how many numbers to hold at once; at least those of one key.

    Raises:
        ValueError: more than one row, or no query.
    """
    if query.shape[0] != 1 or query.shape[2] == 0:
        raise ValueError(f"query has shape {tuple(query.shape)}; give one row, [1, heads, tokens >= 1, head_dim]")
    heads, rows, size = query.shape[1:]
    kv_heads, length = key.shape[1], key.shape[2]
    group = heads // kv_heads
    scale = size**-0.5 if scale is None else scale
    packed = query[0].float().reshape(kv_heads, group * rows, size) * scale
    start = query_start + rows - length  # position of the first key
    at = torch.arange(query_start, query_start + rows, device=query.device)
    step = max(1, max_scores // max(heads * rows, kv_heads * size))  # scores, and keys in float32

    def scores(begin: int, end: int) -> torch.Tensor:
        """`[H_q, S, end - begin]`, capped, for keys at those positions."""
        part = key[0, :, begin - start : end - start].float()
        found = (packed @ part.transpose(1, 2)).reshape(heads, rows, end - begin)
        return softcap * torch.tanh(found / softcap) if softcap else found

    anchor_end = min(anchor_tokens, prompt_end)
    anchor, content, rest = (_Running(heads, rows, query.device) for _ in range(3))
    total = query_start + rows
    for running, begin, end in (
        (anchor, 0, anchor_end),
        (content, anchor_end, prompt_end),
        (rest, prompt_end, total),
    ):
        for left in range(max(begin, start), min(end, total), step):
            place = torch.arange(left, min(left + step, end, total), device=query.device)
            seen = place <= at[:, None]
            if window is not None:
                seen = seen & (at[:, None] - place < window)
            if running is not rest:
                seen = seen & (place != at[:, None])
            running.add(scores(left, left + place.shape[0]), seen)
    for own in range(query_start, min(prompt_end, total)):  # a prompt token that looks at itself
        rest.add(scores(own, own + 1), (at == own)[:, None])
    rest_lse = rest.lse
    if sinks is not None:
        rest_lse = torch.logaddexp(rest_lse, sinks.detach().to(rest_lse)[:, None])
    both = torch.stack([anchor.lse, content.lse])
    lse = torch.logsumexp(both, 0)
    share = torch.where(lse.isfinite(), torch.exp(both - lse), 0.0)
    # The entropy of a choice between groups, and then within one.
    entropy = share[0] * anchor.entropy + share[1] * content.entropy - torch.special.xlogy(share, share).sum(0)
    everything = torch.logaddexp(lse, rest_lse)
    return PromptAttention(
        mass=torch.exp(lse - everything),
        content_mass=torch.exp(content.lse - everything),
        entropy=torch.where(lse.isfinite(), entropy, math.nan),
        content_entropy=torch.where(content.lse.isfinite(), content.entropy, math.nan),
    )


class _Running:
    """A softmax over keys that come in chunks: its log-sum-exp and its entropy, float64 `[H_q, S]`."""

    def __init__(self, heads: int, rows: int, device: torch.device) -> None:
        self.top = torch.full((heads, rows), -math.inf, dtype=torch.float64, device=device)
        self.sum = torch.zeros_like(self.top)  # of exp(score - top)
        self.moment = torch.zeros_like(self.top)  # of exp(score - top) * (score - top)

    def add(self, scores: torch.Tensor, seen: torch.Tensor) -> None:
        """Take `scores` `[H_q, S, C]` where `seen` `[S, C]`."""
        scores = scores.masked_fill(~seen, -math.inf)
        top = torch.maximum(self.top, scores.amax(-1).double())
        known = top.isfinite()
        base = torch.where(known, top, 0.0)
        fall = torch.where(self.top.isfinite(), self.top - base, 0.0)
        shrink = torch.where(self.top.isfinite(), torch.exp(fall), 0.0)
        apart = (scores - base.float()[..., None]).masked_fill(~seen, 0.0)
        weight = torch.exp(apart).masked_fill(~seen, 0.0)
        self.moment = (self.moment + self.sum * fall) * shrink + (weight * apart).sum(-1, dtype=torch.float64)
        self.sum = self.sum * shrink + weight.sum(-1, dtype=torch.float64)
        self.top = top

    @property
    def lse(self) -> torch.Tensor:
        return self.top + torch.log(self.sum)  # -inf where nothing came

    @property
    def entropy(self) -> torch.Tensor:
        """In nats; 0 where nothing came."""
        empty = self.sum == 0
        total = torch.where(empty, 1.0, self.sum)
        return (torch.log(total) - self.moment / total).clamp_min(0.0)


def turning_angle(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Angle in radians between vectors `[..., N]`, 0 .. pi, exact for small angles too; NaN where one has no length."""
    a, b = (v / v.norm(dim=-1, keepdim=True) for v in (before.double(), after.double()))
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


@dataclass
class _Row:
    """What one layer said of the tokens of one forward; float64 `[S]` on the CPU, means over heads."""

    attention: dict[str, torch.Tensor]
    curvature: torch.Tensor | None = None


class Recorder:
    """Collects what the layers do with the tokens that are to be measured.

    Args:
        layers: how many there are.
        anchor_tokens: the first positions that are anchors.
    """

    def __init__(self, layers: int, anchor_tokens: int) -> None:
        self.layers, self.anchor_tokens = layers, anchor_tokens
        self.prompt_end = 0
        self._start: int | None = None
        self._rows: list[list[_Row]] = [[] for _ in range(layers)]
        self._entered: torch.Tensor | None = None
        self._change: torch.Tensor | None = None

    def begin(self, prompt_end: int) -> None:
        """Another prompt: forget what there is."""
        self.prompt_end = prompt_end
        self._rows = [[] for _ in range(self.layers)]

    @contextmanager
    def measuring(self, start: int) -> Iterator[None]:
        """The forward inside the block is measured; its first token stands at position `start`."""
        self._start, self._change = start, None
        try:
            yield
        finally:
            self._start = self._change = self._entered = None

    def values(self) -> dict[str, torch.Tensor]:
        """Each float64 `[L, rows]`, in order of the tokens: `PromptAttention`'s names, and `curvature` (NaN at 0)."""
        found = {
            name: torch.stack([torch.cat([row.attention[name] for row in rows]) for rows in self._rows])
            for name in PromptAttention._fields
        }
        curves = []
        for rows in self._rows:
            empty = [torch.full_like(row.attention["mass"], math.nan) for row in rows]
            curves.append(
                torch.cat([e if row.curvature is None else row.curvature for row, e in zip(rows, empty, strict=True)])
            )
        return {**found, "curvature": torch.stack(curves)}

    # ---- called by the model -------------------------------------------------------------------------------------

    def attended(self, layer: int, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
        """A layer's attention function was called."""
        if self._start is None:
            return
        found = prompt_attention(
            query,
            key,
            query_start=self._start,
            prompt_end=self.prompt_end,
            anchor_tokens=self.anchor_tokens,
            **options,
        )
        means = {name: value.mean(0).cpu() for name, value in found._asdict().items()}
        self._rows[layer].append(_Row(means))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A decoder layer begins."""
        if self._is_on():
            self._entered = (args[0] if args else kwargs["hidden_states"]).detach()

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """It ends: how far did it turn the way of the hidden states?"""
        if not self._is_on() or self._entered is None:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        change = (hidden.detach().double() - self._entered.double())[0]
        if self._change is not None:
            angle = turning_angle(self._change.to(change.device), change)
            self._rows[module.self_attn.layer_idx][-1].curvature = angle.cpu()  # type: ignore[union-attr, index]
        self._change, self._entered = change, None

    def _is_on(self) -> bool:
        return self._start is not None and _RECORDER.get() is self


# The recorder of this thread: another that runs the same model is not measured.
_RECORDER: ContextVar[Recorder | None] = ContextVar("kvspeed_recorder", default=None)


@contextmanager
def probing(model: nn.Module, anchor_tokens: int = 1) -> Iterator[Recorder]:
    """Inside the block `model` runs at full depth, patched without SPEED, and its layers tell the recorder.

    The model is afterwards as it was before, patched or not.

    Raises:
        ValueError: the architecture is not known.
        RuntimeError: another thread holds the model patched otherwise.
    """
    with patched(model, None, force=True):
        base: Any = base_model(model)
        modules = attention_modules(model)
        recorder = Recorder(len(modules), anchor_tokens)
        AttentionInterface.register(NAME, _attention)
        before = [module.config for module in modules]
        handles: list[Any] = []
        token = _RECORDER.set(recorder)
        try:
            for module in modules:
                module.config = copy.copy(module.config)
                module.config._attn_implementation = NAME
            for layer in base.layers:
                handles.append(layer.register_forward_pre_hook(recorder.enter, with_kwargs=True))
                handles.append(layer.register_forward_hook(recorder.leave, with_kwargs=True))
            yield recorder
        finally:
            _RECORDER.reset(token)
            for handle in handles:
                handle.remove()
            for module, config in zip(modules, before, strict=True):
                module.config = config


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention of a patched model, with a look at its queries and keys."""
    recorder = _RECORDER.get()
    if recorder is not None:
        options = {
            "scale": scaling,
            "softcap": kwargs.get("softcap") or 0.0,
            "window": kwargs.get("sliding_window"),
            "sinks": kwargs.get("s_aux"),
        }
        recorder.attended(module.layer_idx, query, key, options)  # type: ignore[arg-type]
    return attention.attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
