# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Running some tokens of a prompt again, through the model's own modules: what all recomputing methods share.

For the rows I of a layer: norm, q, k and v at the rows' positions in the whole prompt; k and v overwrite those of the
cache at I; the rows attend by absolute index (`RowSet`) to all keys, recomputed or not; MLP. The model's own forward
does all of it: a cache that writes at I, an attention function that masks by index, and hooks before the layers, where
a method may go on with fewer rows. So each architecture that kvspeed knows works, and none is written a second time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from kvspeed.cache import KVCache
from kvspeed.eval.methods.context import Context
from kvspeed.eval.methods.rowset import RowSet
from kvspeed.eval.methods.work import Work
from kvspeed.models import attention_modules, cache_argument

__all__ = ["Before", "Choice", "Counted", "Pass", "Probe", "Watcher", "recompute"]

NAME = "kvspeed_rows"

# Is given the rotated queries `[1, H_q, rows, D]` of a layer.
Watcher = Callable[[torch.Tensor], None]

# Before a layer: which of the rows go on (int64, indices into the present rows, rising), or None for all.
Choice = Callable[["Pass", "Before"], torch.Tensor | None]


class Pass:
    """One run of rows through all layers.

    Attributes:
        context: the model.
        cache: where the KV of all positions is, in storage of its own (`Context.place` in mode "copy").
        total: positions of the whole prompt.
        question: the last rows, which are the question's; always kept.
        rows: the present rows, by their place in the cache.
        theta: share of the new KV where it overwrites a document's old one.
        watch: layer -> is given the layer's rotated queries `[1, H_q, rows, D]`.
        extra: operations besides those of rows in layers, which choices add to.
    """

    def __init__(self, context: Context, cache: KVCache, rows: RowSet, total: int, question: int) -> None:
        self.context, self.cache, self.total, self.question = context, cache, total, question
        self.rows = rows
        self.theta = 1.0
        self.watch: Mapping[int, Watcher] = {}
        self.extra = 0
        self.probing = False
        self.done: list[tuple[RowSet, int | None]] = []
        self.taken: torch.Tensor | None = None  # the present rows among the first ones; None: all of them
        self._gathered: dict[int, tuple[Any, Any]] = {}

    def keep(self, picked: torch.Tensor) -> None:
        """Go on with some of the present rows."""
        self.taken = picked if self.taken is None else self.taken[picked]
        self.rows = RowSet(self.rows.index[picked], self.rows.index.device)
        self._gathered.clear()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The present rows of something `[1, first rows, ...]`, which every layer is given anew."""
        if self.taken is None:
            return tensor
        known = self._gathered.get(id(tensor))
        if known is None or known[0] is not tensor:
            known = self._gathered[id(tensor)] = (tensor, tensor.index_select(1, self.taken.to(tensor.device)))
        return known[1]

    def stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all positions in a layer, `[1, H_kv, total, D]`; writing to them changes the cache."""
        return self.cache.layer(layer).view(self.total)


@dataclass
class Counted:
    """What a pass computed, without what it computed with."""

    question: int
    layers: list[tuple[torch.Tensor, int | None]]
    extra: int

    def work(self) -> Work:
        """Rows and pairs of each layer; counted when asked for, since that may wait for a GPU."""
        known: dict[tuple[int, int | None], int] = {}
        for index, window in self.layers:
            if (id(index), window) not in known:
                known[id(index), window] = RowSet(index, index.device).pairs(window)
        rows = tuple(index.numel() for index, _ in self.layers)
        return Work(self.question, rows, tuple(known[id(index), window] for index, window in self.layers), self.extra)


class Probe(NamedTuple):
    """What an attention is given: `[1, heads, rows, D]` each, rotated, the scale and softcap (0: none) of its scores,
    and how many tokens its window has (None: all)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float = 0.0
    window: int | None = None


class Before:
    """A layer that is about to run, with what it will be given.

    Attributes:
        index: of the layer.
        hidden: `[1, rows, hidden]`.
    """

    def __init__(self, run: Pass, layer: nn.Module, index: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        self._run, self._layer, self._kwargs = run, layer, kwargs
        self.index, self.hidden = index, hidden

    def probe(self, last: int | None = None) -> Probe:
        """What the layer's attention would be given for the rows (for the `last` of them); nothing is stored."""
        run, kwargs, hidden = self._run, dict(self._kwargs), self.hidden
        begin = 0 if last is None else hidden.shape[1] - last
        if begin:
            kwargs = _map_rows(kwargs, lambda tensor: tensor[:, begin:])
            hidden = hidden[:, begin:]
        shape = run.context.shape
        run.extra += 2 * hidden.shape[1] * shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
        run.probing = True
        try:
            self._layer.forward(hidden, **kwargs)
        except _Probed as probed:
            return probed.found
        finally:
            run.probing = False
        raise RuntimeError(f"{type(self._layer).__name__} ran without calling its attention function")


class _Probed(Exception):
    """Leaves a layer with what its attention was given."""

    def __init__(self, found: Probe) -> None:
        super().__init__("probed")
        self.found = found


class _RowCache(Cache):
    """What the model writes its KV to: the rows of a `KVCache`'s storage."""

    def __init__(self, run: Pass) -> None:
        super().__init__(layers=[])
        self.run = run

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.run.probing:
            return key_states, value_states
        stored = self.run.stored(layer_idx)
        for old, new in zip(stored, (key_states, value_states), strict=True):
            self.run.rows.write(old, self._fused(old, new))
        return stored

    def _fused(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """New KV, and theta of it where it belongs to documents."""
        theta, documents = self.run.theta, new.shape[2] - self.run.question
        if theta == 1 or not documents:
            return new
        kept = old.index_select(2, self.run.rows.index[:documents].to(old.device))
        return torch.cat([torch.lerp(kept, new[:, :, :documents], theta), new[:, :, documents:]], 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    run: Pass = kwargs["kvspeed_rows"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, window = kwargs.get("softcap") or 0.0, kwargs.get("sliding_window")
    if run.probing:
        raise _Probed(Probe(query, key, value, scale, softcap, window))
    watch = run.watch.get(module.layer_idx)  # type: ignore[call-overload]
    if watch is not None:
        watch(query)
    run.done.append((run.rows, window))
    out = run.rows.attend(query, key, value, scale=scale, softcap=softcap, window=window)
    return out.transpose(1, 2).contiguous(), None


@torch.no_grad()
def recompute(
    context: Context,
    cache: KVCache,
    ids: Sequence[int],
    rows: Sequence[int],
    question: int,
    choices: Mapping[int, Choice] | None = None,
    *,
    positions: Sequence[int] | None = None,
    theta: float = 1.0,
    watch: Mapping[int, Watcher] | None = None,
) -> tuple[torch.Tensor, Counted]:
    """Run the tokens `rows` of a prompt anew over a cache that holds KV of the positions before the question.

    Args:
        context: the model.
        cache: filled by `Context.place` in mode "copy" with room for the whole prompt; afterwards it holds all of it.
        ids: token ids of all that the cache will hold, `[total]`.
        rows: places in the cache to compute, rising; the last `question` of them must be the last of the prompt.
        question: tokens of the question.
        choices: layer -> which rows go on, asked before the layer runs.
        positions: of the rows, where the cache leaves out tokens of the prompt; None: rows are positions.
        theta: share of the new KV where it overwrites a document's.
        watch: layer -> is given the layer's rotated queries.

    Returns:
        Logits `[vocab]` of the last token, and what was computed.

    Raises:
        ValueError: the rows do not end with the question.
    """
    total = len(ids)
    if question < 1 or len(rows) < question or list(rows[-question:]) != list(range(total - question, total)):
        raise ValueError(f"rows: must end with the {question} tokens of the question, the last of {total} positions")
    given = [ids[row] for row in rows] if len(rows) < total else list(ids)
    run = Pass(context, cache, RowSet(rows, context.device), total, question)
    run.theta, run.watch = theta, watch or {}
    places = run.rows.index if positions is None else torch.tensor(list(positions), device=context.device)
    name = cache_argument(context.base)
    tokens = torch.tensor([given], device=context.device)
    with _rows_attention(context, choices or {}), context.evaluating():
        logits = context.model(
            input_ids=tokens,
            position_ids=places[None],
            attention_mask=tokens.new_zeros((1, 1, 1, 1)),  # four dimensions: taken as it is, and not looked at
            use_cache=True,
            logits_to_keep=1,
            kvspeed_rows=run,
            **{name: _RowCache(run)},
        ).logits[0, -1]
    for index in range(cache.num_layers):
        cache.layer(index).length = total
    return logits, Counted(question, [(one.index, window) for one, window in run.done], run.extra)


@contextmanager
def _rows_attention(context: Context, choices: Mapping[int, Choice]) -> Iterator[None]:
    """The model's attention by rows inside the block, and as it was afterwards, patched or not."""
    AttentionInterface.register(NAME, _attention)
    modules = attention_modules(context.model)
    before = [module.config for module in modules]
    config = copy.copy(context.base.config)
    config._attn_implementation = NAME
    layers = list(context.base.layers)
    fewer = min(choices, default=len(layers))
    handles = []
    try:
        for module in modules:
            module.config = config
        for index, layer in enumerate(layers):
            if index >= fewer:
                handles.append(
                    layer.register_forward_pre_hook(_layer_hook(index, choices.get(index)), with_kwargs=True)
                )
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, own in zip(modules, before, strict=True):
            module.config = own


def _layer_hook(index: int, choice: Choice | None) -> Callable[..., Any]:
    def before_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run: Pass = kwargs["kvspeed_rows"]
        hidden = args[0] if args else kwargs["hidden_states"]
        kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        given = _map_rows(kwargs, run.gather)
        if choice is not None:
            picked = choice(run, Before(run, layer, index, hidden, given))
            if picked is not None:
                hidden = hidden.index_select(1, picked.to(hidden.device))
                run.keep(picked)
                given = _map_rows(kwargs, run.gather)
        return (hidden, *args[1:]), given

    return before_layer


def _map_rows(kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The arguments of a layer with `change` applied to those that have one entry a row."""
    changed = dict(kwargs)
    for name, given in kwargs.items():
        if given is None:
            continue
        if name.startswith("position_embeddings"):
            changed[name] = tuple(change(part) for part in given)
        elif name == "position_ids":
            changed[name] = change(given)
    return changed
