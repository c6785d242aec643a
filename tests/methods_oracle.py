# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A decoder written out in float64, token by token in no hurry, that recomputes any rows: what the methods are held to.

It shares nothing with the package but the model's weights: RMS norm, RoPE, a mask formed from places, gated MLP. Only
Llama and Qwen3 are written out; other architectures are tested by what must be equal within the package.
"""

from __future__ import annotations

from typing import Any

import torch
from kvspeed.eval.methods import Context
from packet_tools import CHAT_TEMPLATE, random_text, tiny_tokenizer


class Oracle:
    """A tiny Llama or Qwen3 in float64."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
        self.layers, self.size = self.config.num_hidden_layers, self.config.head_dim
        self.heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        rope = getattr(self.config, "rope_parameters", None)  # transformers 5
        theta = rope["rope_theta"] if rope else self.config.rope_theta
        self.frequencies = theta ** (-torch.arange(0, self.size, 2).double() / self.size)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * self.weights[name]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` `[n, heads, D]` at `positions` `[n]`."""
        angle = (positions.double()[:, None] * self.frequencies).unsqueeze(1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of rows, not rotated, `[n, heads, D]`."""
        name = f"model.layers.{layer}."
        x = self.norm(hidden, name + "input_layernorm.weight")
        parts = []
        for letter, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            part = (x @ self.weights[f"{name}self_attn.{letter}_proj.weight"].T).view(len(x), heads, self.size)
            if letter != "v" and f"{name}self_attn.{letter}_norm.weight" in self.weights:
                part = self.norm(part, f"{name}self_attn.{letter}_norm.weight")
            parts.append(part)
        return parts[0], parts[1], parts[2]

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, MLP and both residuals."""
        name = f"model.layers.{layer}."
        hidden = hidden + attended.reshape(len(hidden), -1) @ self.weights[name + "self_attn.o_proj.weight"].T
        x = self.norm(hidden, name + "post_attention_layernorm.weight")
        gate, up, down = (self.weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return hidden + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """`[n, H_q, D]`; query and key rotated, `seen` bool `[n, T]`."""
        group = self.heads // self.kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("nhd,thd->hnt", query, key) * self.size**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hnt,thd->nhd", weights, value)

    def embed(self, ids: Any) -> torch.Tensor:
        return self.weights["model.embed_tokens.weight"][torch.as_tensor(list(ids))]

    def alone(self, ids: Any, before: Any = ()) -> tuple[list[Any], list[torch.Tensor]]:
        """KV of `ids` behind `before`, keys not rotated: `[(key, value)]` a layer; and the queries, not rotated."""
        hidden, places = self.embed([*before, *ids]), torch.arange(len(before) + len(ids))
        kv, queries = [], []
        for layer in range(self.layers):
            query, key, value = self.project(layer, hidden)
            kv.append((key[len(before) :], value[len(before) :]))
            queries.append(query[len(before) :])
            seen = places[None] <= places[:, None]
            attended = self.attend(self.rotate(query, places), self.rotate(key, places), value, seen)
            hidden = self.finish(layer, hidden, attended)
        return kv, queries

    def run(
        self,
        kv: list[Any],
        ids: Any,
        rows: list[list[int]],
        *,
        written: dict[int, list[int]] | None = None,
        positions: Any = None,
        theta: float = 1.0,
        question: int = 1,
    ) -> dict[str, Any]:
        """Recompute rows of a prompt.

        Args:
            kv: `[(key, value)]` a layer of all places, not rotated; changed in place.
            ids: of all places.
            rows: of each layer, among those of the layer before.
            written: layer -> rows whose KV is written there, where they are more than those that attend.
            positions: of all places; None: the places.
            theta: share of new KV in rows that are not the last `question`.
            question: see `theta`.

        Returns:
            "logits" of the last row, "fresh" KV and "queries" (not rotated) of each layer's written rows.
        """
        positions = torch.arange(len(ids)) if positions is None else torch.as_tensor(positions)
        present = rows[0]
        hidden = self.embed(ids)[present]
        fresh, queries = [], []
        for layer in range(self.layers):
            wide = (written or {}).get(layer, rows[layer])
            hidden = hidden[[present.index(row) for row in wide]]
            query, key, value = self.project(layer, hidden)
            fresh.append((key, value))
            queries.append(query)
            mixed = [row < len(ids) - question for row in wide]
            for old, new in zip(kv[layer], (key, value), strict=True):
                mixture = theta * new + (1 - theta) * old[wide].nan_to_num()
                old[wide] = torch.where(torch.tensor(mixed)[:, None, None], mixture, new)
            inner = [wide.index(row) for row in rows[layer]]
            at = torch.tensor(rows[layer])
            seen = torch.arange(len(ids))[None] <= at[:, None]
            keys = self.rotate(kv[layer][0], positions)
            attended = self.attend(self.rotate(query[inner], positions[at]), keys, kv[layer][1], seen)
            hidden, present = self.finish(layer, hidden[inner], attended), rows[layer]
        last = self.norm(hidden[-1:], "model.norm.weight")
        return {"logits": (last @ self.weights["lm_head.weight"].T)[0], "fresh": fresh, "queries": queries}

    def joined(self, parts: list[list[Any]], question: int) -> list[Any]:
        """KV of blocks one after the other, and room for the question (NaN, which shows when it is read unwritten)."""
        joined = []
        for layer in range(self.layers):
            pair = []
            for which in (0, 1):
                room = torch.full((question, self.kv_heads, self.size), float("nan")).double()
                pair.append(torch.cat([*(part[layer][which] for part in parts), room]))
            joined.append(tuple(pair))
        return joined


class Case:
    """A model, documents and a question, as the package and the oracle see them."""

    def __init__(self, model: Any, lengths: list[int], *, question: int = 3, seed: int | None = None, **kwargs: Any):
        seed = int(torch.randint(1, 10**6, ())) if seed is None else seed
        self.model = model
        self.tokenizer = tiny_tokenizer(template=CHAT_TEMPLATE)
        self.context = Context(model, self.tokenizer, **kwargs)
        self.documents = [random_text(length, seed + index) for index, length in enumerate(lengths)]
        self.question = self.context.question_ids(random_text(question, seed - 1))
        self.oracle = Oracle(model)
        self.preamble = self.context.preamble_ids
        self.ids = [self.context.document_ids(text) for text in self.documents]
        self.prompt = [*self.preamble, *(token for ids in self.ids for token in ids), *self.question]
        self.length = len(self.prompt) - len(self.question)

    def kv(self, *, before: Any = (), ids: list[Any] | None = None) -> list[Any]:
        """The oracle's KV of preamble and documents, each of these computed behind `before` alone."""
        parts = [self.oracle.alone(one, before)[0] for one in (self.ids if ids is None else ids)]
        return self.oracle.joined([self.oracle.alone(self.preamble)[0], *parts], len(self.question))

    def asked(self) -> list[int]:
        """Rows of the question."""
        return list(range(self.length, len(self.prompt)))

    def document_rows(self) -> list[int]:
        return list(range(len(self.preamble), self.length))
