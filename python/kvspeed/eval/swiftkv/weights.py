# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""SwiftKV's weights, and a model that runs with them.

Layers from k on take their keys and values from one hidden state, the output of layer k - 1 through a norm of its own
(SingleInputKV), by new projections; their queries by new projections from their own hidden states. `share` layers in a
row may use one layer's keys and values (AcrossKV). That holds for every token, prompt and answer; all else in the
layers stays. New weights start as copies of the model's, those of a group as the mean of its layers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvspeed.cache import KVCache
from kvspeed.eval.upper import UpperRows, rotated_kv
from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import architecture, base_model
from kvspeed.packet.tensorfile import read_tensor_file, write_tensor_file

__all__ = ["GroupedCache", "SwiftKV"]

FORMAT = "kvspeed.swiftkv"
VERSION = 1


class SwiftKV(nn.Module):
    """The weights for one model.

    Attributes:
        k: the first layer whose keys and values come from the output of the layer before it.
        share: layers that use one layer's keys and values.
        layers: of the model.
        norm: of that output.
        queries: one projection an upper layer.
        keys, values: one projection a group of upper layers.
        trained: whether they differ from where they start.
        base: fingerprint and dtype of the model that they were made from; None where a file does not say it.
    """

    def __init__(self, k: int, share: int, layers: int, norm: nn.Module, projections: dict[str, list[nn.Linear]]):
        super().__init__()
        self.k, self.share, self.layers, self.trained = k, share, layers, False
        self.base: tuple[str, str] | None = None
        self.norm = norm
        self.queries, self.keys, self.values = (nn.ModuleList(projections[name]) for name in "qkv")
        self._raw: dict[tuple[str, int], torch.Tensor] = {}  # what a group's projections gave in the running forward
        self.rows = UpperRows(k, self._project, self._normed)

    @classmethod
    def for_model(cls, model: nn.Module, k: int, share: int = 1) -> SwiftKV:
        """The weights before training.

        Args:
            model: a causal LM that kvspeed knows, with separate projections and a norm before its attention.
            k: 1 .. L - 1.
            share: 1 .. L - k.

        Raises:
            TypeError, ValueError: a number is out of range, or the architecture does not fit: the message says why.
        """
        architecture(model)
        stack: Any = base_model(model)
        count = len(stack.layers)
        for name, value, most in (("k", k, count - 1), ("share", share, count - k)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
            if not 1 <= value <= most:
                raise ValueError(f"{name}: is {value}; with {count} layers and k = {k} give 1 to {most}")
        upper = list(stack.layers)[k:]
        for layer in upper:
            if not hasattr(layer, "input_layernorm") or not hasattr(layer.self_attn, "k_proj"):
                raise ValueError(
                    f"{type(layer).__name__} has no norm before its attention, or one matrix for queries, keys and "
                    "values; SwiftKV is there for Llama, Mistral, Qwen, SmolLM3, Granite and Gemma"
                )
        attentions = [layer.self_attn for layer in upper]
        groups = [attentions[begin : begin + share] for begin in range(0, len(attentions), share)]
        for group in groups:
            if len({(bool(getattr(one, "use_rope", True)), _window(one)) for one in group}) > 1:
                raise ValueError(
                    f"share: {share} layers in a row would use one layer's keys, and some of them rotate or window "
                    "them otherwise; give share=1"
                )
        projections = {
            "q": [copy.deepcopy(one.q_proj) for one in attentions],
            "k": [_mean([one.k_proj for one in group]) for group in groups],
            "v": [_mean([one.v_proj for one in group]) for group in groups],
        }
        made = cls(k, share, count, copy.deepcopy(upper[0].input_layernorm), projections)
        made.base = _base_of(model)
        return made.requires_grad_(True)

    def owner(self, layer: int) -> int:
        """The layer whose keys and values an upper layer uses: itself, or the first of its group."""
        return layer - (layer - self.k) % self.share

    @property
    def owners(self) -> list[int]:
        """The upper layers that have keys and values."""
        return list(range(self.k, self.layers, self.share))

    def cache(self, config: Any, capacity: int) -> GroupedCache:
        """A cache in which the layers of a group are one."""
        return GroupedCache(config, {layer: self.owner(layer) for layer in range(self.k, self.layers)}, capacity)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[UpperRows]:
        """`model` runs with these weights inside the block; a prompt's forward, with `rows.prompt(cache, ends=...)`.

        Raises:
            ValueError: the model has another number of layers.
        """
        stack: Any = base_model(model)
        if len(stack.layers) != self.layers:
            raise ValueError(
                f"these SwiftKV weights are for a model of {self.layers} layers, and this one has {len(stack.layers)}"
            )
        before: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
        try:
            for index in range(self.k, self.layers):
                attention = stack.layers[index].self_attn
                before.append((attention, dict(attention._modules)))
                owner = self.owner(index)
                attention.q_proj = self.queries[index - self.k]
                for name, pool in (("k", self.keys), ("v", self.values)):
                    linear = pool[(owner - self.k) // self.share] if owner == index else None
                    setattr(attention, f"{name}_proj", _Given(self, (name, owner), linear))
                if owner != index and hasattr(attention, "k_norm"):
                    attention.k_norm = stack.layers[owner].self_attn.k_norm
            with self.rows.installed(model):
                yield self.rows
        finally:
            self._raw.clear()
            for attention, modules in before:
                attention._modules.clear()
                attention._modules.update(modules)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def _project(self, layer: Any, rows: torch.Tensor, position_embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of prompt rows; none in a layer that uses another's."""
        attention = layer.self_attn
        if self.owner(attention.layer_idx) != attention.layer_idx:
            return rows[:, :0], rows[:, :0]
        group = (attention.layer_idx - self.k) // self.share
        return rotated_kv(attention, self.keys[group](rows), self.values[group](rows), position_embeddings)

    def fingerprint(self) -> str:
        """64 hex digits over all weights."""
        digest = hashlib.sha256(json.dumps([self.k, self.share]).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights in their own dtype, atomically."""
        header: dict[str, Any] = {"k": self.k, "share": self.share, "layers": self.layers, "trained": self.trained}
        if self.base is not None:
            header["base_fingerprint"], header["base_dtype"] = self.base
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        write_tensor_file(path, FORMAT, VERSION, header, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> SwiftKV:
        """What `save` wrote, in the dtype and on the device of `model`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is none of ours, or made for another model.
        """
        header, tensors = read_tensor_file(path, FORMAT, VERSION)
        layers = len(base_model(model).layers)  # type: ignore[arg-type]
        if not {"k", "share", "layers", "trained"} <= header.keys():
            raise ValueError(f"{path}: does not say its k, share and layers; train it anew")
        if header["layers"] != layers:
            raise ValueError(f"{path}: is for a model of {header['layers']} layers, and this one has {layers}")
        made = cls.for_model(model, header["k"], header["share"])
        wanted = {name: tensor.shape for name, tensor in made.state_dict().items()}
        if wanted != {name: tensor.shape for name, tensor in tensors.items()}:
            raise ValueError(f"{path}: has tensors of other shapes than this model needs; give the file made for it")
        base = (header.get("base_fingerprint"), header.get("base_dtype"))
        # After a cast the weights are the same and their fingerprint is not.
        if made.base is not None and base[1] == made.base[1] and base != made.base:
            raise ValueError(f"{path}: was trained for a model of other weights; give the file made for this one")
        made.base = (str(base[0]), str(base[1])) if None not in base else None
        made.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
        made.trained = bool(header["trained"])
        return made.requires_grad_(False)


class _Given(nn.Module):
    """Stands for a layer's key or value projection: what the group's first layer projects from SwiftKV's input.

    It registers nothing, so that a model's parameters are its own while it is attached.
    """

    def __init__(self, weights: SwiftKV, key: tuple[str, int], linear: nn.Module | None) -> None:
        super().__init__()
        self.__dict__.update(_weights=weights, _key=key, _linear=linear)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights: SwiftKV = self.__dict__["_weights"]
        key: tuple[str, int] = self.__dict__["_key"]
        linear = self.__dict__["_linear"]
        if linear is not None:  # the last rows of a prompt's input are those that go on
            weights._raw[key] = linear(weights.rows.hidden[:, -hidden.shape[1] :])
        return weights._raw[key]


class GroupedCache(KVCache):
    """A cache in which several layers use one layer's KV, for one row.

    Args:
        config: the model's.
        owners: layer -> the layer whose KV it uses.
        capacity: tokens to make room for.
    """

    def __init__(self, config: Any, owners: dict[int, int], capacity: int) -> None:
        super().__init__(config, capacity=capacity)
        self.owners = owners
        for layer, owner in owners.items():
            self.layers[layer] = self.layers[owner]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.owners.get(layer_idx, layer_idx) != layer_idx:
            layer = self.layer(layer_idx)
            return layer.view(layer.length)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def kv_bytes(self) -> int:
        once = {id(layer): layer for layer in self._layers()}.values()
        tensors = [t for layer in once for t in (layer.keys, layer.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _map_rows(self, rows: torch.Tensor) -> None:
        raise ValueError("a cache of SwiftKV with shared layers takes one row; leave beams and batches out")


def _base_of(model: nn.Module) -> tuple[str, str]:
    return model_fingerprint(model), str(next(model.parameters()).dtype)


def _mean(linears: list[nn.Linear]) -> nn.Linear:
    mean = copy.deepcopy(linears[0])
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            parts = [dict(one.named_parameters())[name] for one in linears]
            parameter.copy_(torch.stack([part.double() for part in parts]).mean(0))
    return mean


def _window(attention: Any) -> int | None:
    return getattr(attention, "sliding_window", None)
