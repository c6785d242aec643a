# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The trained soft tokens of KV Packet (arXiv:2604.13226): one header and one trailer a model, for all documents."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvspeed.digest import tensor_digest
from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import causal_lm
from kvspeed.packet.tensorfile import TensorFileError, brief, read_tensor_file, write_tensor_file

__all__ = ["PacketAdapter"]

FORMAT = "kvspeed.adapter"
VERSION = 1

_CHUNK = 8192  # rows of the embedding that are looked at together


@dataclass(frozen=True)
class AdapterModel:
    """The model that an adapter was made for."""

    model_type: str
    name: str
    hidden_size: int
    layers: int
    vocab_size: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.name} ({self.model_type}, hidden size {self.hidden_size}, {self.layers} layers)"


class PacketAdapter(nn.Module):
    """Soft tokens in a model's embedding space: `header` goes before a document, `trailer` after it.

    They take part in the packet's forward like tokens, count as positions, and are the only thing that training a
    packet adapter changes. Kept in float32 unless asked otherwise; `wrap` casts them to the embeddings' dtype.

    Attributes:
        header: parameter `[header, hidden]`; may have no rows.
        trailer: parameter `[trailer, hidden]`; may have no rows.
        model: the model it was made for, or None.
        notes: JSON-able facts that are kept in the file (e.g. how it was trained).
    """

    header: nn.Parameter
    trailer: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        header: int = 8,
        trailer: int = 8,
        *,
        mean: float = 0.0,
        std: float = 0.02,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        hidden_size = _count("hidden_size", hidden_size, 1)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype: soft tokens are trained, so a floating-point dtype is needed; got {dtype}")
        check_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        for name, rows in (("header", _count("header", header)), ("trailer", _count("trailer", trailer))):
            noise = torch.randn(rows, hidden_size, generator=generator)
            setattr(self, name, nn.Parameter((mean + std * noise).to(dtype)))
        self.model: AdapterModel | None = None
        self.notes: dict[str, Any] = {}

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        header: int = 8,
        trailer: int = 8,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> PacketAdapter:
        """Soft tokens drawn from Normal(mean, std) of what `model`'s input embedding gives over its whole vocabulary.

        Args:
            model: a causal language model.
            header: soft tokens before a document.
            trailer: soft tokens after it.
            seed: of the draw, which neither reads nor moves torch's global generator.
            dtype: of the parameters.
        """
        described = describe_model(model)
        mean, std = embedding_statistics(model)
        adapter = cls(described.hidden_size, header, trailer, mean=mean, std=std, seed=seed, dtype=dtype)
        adapter.model = described
        return adapter.to(input_embedding(model).weight.device)

    @property
    def hidden_size(self) -> int:
        """Width of a soft token."""
        return self.header.shape[1]

    @property
    def tokens(self) -> int:
        """Positions that the soft tokens take in each packet."""
        return self.header.shape[0] + self.trailer.shape[0]

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, header={self.header.shape[0]}, trailer={self.trailer.shape[0]}"

    def wrap(self, embeddings: torch.Tensor) -> torch.Tensor:
        """`[..., T, hidden]` embeddings of a document -> `[..., header + T + trailer, hidden]`; differentiable."""
        if embeddings.shape[-1] != self.hidden_size:
            raise ValueError(
                f"this adapter's soft tokens are {self.hidden_size} wide and the embeddings {embeddings.shape[-1]}: "
                "use an adapter made for this model"
            )
        header, trailer = (
            part.to(embeddings.device, embeddings.dtype).expand(*embeddings.shape[:-2], *part.shape)
            for part in (self.header, self.trailer)
        )
        return torch.cat((header, embeddings, trailer), dim=-2)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a `model` that this adapter was not made for (another width, or another kind of model).

        Other weights of the same kind are let through: an adapter outlives a cast or a light fine-tuning of its model.

        Raises:
            ValueError: naming both models.
        """
        other = describe_model(model)
        if self.hidden_size != other.hidden_size:
            made = f", made for {self.model}," if self.model else ""
            raise ValueError(
                f"this adapter{made} has hidden size {self.hidden_size}, and the model {other.name} has hidden size "
                f"{other.hidden_size}: use an adapter made for this model"
            )
        mine = self.model
        if mine is not None and (mine.model_type, mine.layers, mine.vocab_size) != (
            other.model_type,
            other.layers,
            other.vocab_size,
        ):
            raise ValueError(
                f"this adapter was made for {mine}, vocabulary {mine.vocab_size}, and the model given is {other}, "
                f"vocabulary {other.vocab_size}: use an adapter made for this model"
            )

    def fingerprint(self) -> str:
        """64 hex digits over the soft tokens' bits; packets remember it."""
        return hashlib.sha256(tensor_digest(self.header) + tensor_digest(self.trailer)).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the adapter to `path` (safetensors), atomically: a reader sees the old file or the new one.

        Raises:
            OSError: the file cannot be written; whatever was at `path` is untouched.
            TypeError: `notes` is not JSON-able.
        """
        header = {
            "hidden_size": self.hidden_size,
            "header": self.header.shape[0],
            "trailer": self.trailer.shape[0],
            "model": asdict(self.model) if self.model else None,
            "notes": self.notes,
        }
        tensors = {"header": self.header.detach(), "trailer": self.trailer.detach()}
        write_tensor_file(path, FORMAT, VERSION, header, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> PacketAdapter:
        """Read an adapter that `save` wrote.

        Args:
            path: the file.
            model: when given, the adapter is checked against it and put on its device.

        Raises:
            FileNotFoundError: there is no such file.
            TensorFileError: the file is no adapter, is truncated, altered, or of an unknown version.
            ValueError: the adapter does not fit `model`.
        """
        header, tensors = read_tensor_file(path, FORMAT, VERSION)
        adapter = cls.__new__(cls)
        nn.Module.__init__(adapter)
        try:
            adapter._restore(header, tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise TensorFileError(f"{Path(path)} is not a valid adapter file: {brief(error)}") from error
        if model is not None:
            adapter.check_model(model)
            adapter.to(input_embedding(model).weight.device)
        return adapter

    def _restore(self, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        expected = {"hidden_size", "header", "trailer", "model", "notes"}
        if set(header) != expected or set(tensors) != {"header", "trailer"}:
            raise ValueError(f"unexpected contents {sorted(set(header) ^ expected) or sorted(tensors)}")
        width = _count("hidden_size", header["hidden_size"], 1)
        for name in ("header", "trailer"):
            shape = (_count(name, header[name]), width)
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, its description says {shape}")
            if not tensors[name].dtype.is_floating_point:
                raise ValueError(f"{name} is {tensors[name].dtype}")
            setattr(self, name, nn.Parameter(tensors[name].clone()))  # a copy, since training writes to it
        if self.header.dtype != self.trailer.dtype:
            raise ValueError(f"header is {self.header.dtype} and trailer {self.trailer.dtype}")
        self.model = AdapterModel(**header["model"]) if header["model"] is not None else None
        if not isinstance(header["notes"], dict):
            raise ValueError("notes is not a mapping")
        self.notes = header["notes"]


def input_embedding(model: nn.Module) -> Any:
    """The module that turns token ids into embeddings."""
    inner: Any = causal_lm(model)
    return inner.get_input_embeddings()


def describe_model(model: nn.Module) -> AdapterModel:
    """What an adapter remembers of `model`."""
    inner: Any = causal_lm(model)
    config: Any = inner.config
    vocab_size, hidden_size = inner.get_input_embeddings().weight.shape
    return AdapterModel(
        model_type=str(config.model_type),
        name=Path(str(getattr(config, "_name_or_path", "") or type(inner).__name__)).name,
        hidden_size=int(hidden_size),
        layers=int(config.num_hidden_layers),
        vocab_size=int(vocab_size),
        fingerprint=model_fingerprint(model),
    )


@torch.no_grad()
def embedding_statistics(model: nn.Module) -> tuple[float, float]:
    """Mean and standard deviation over all entries that the input embedding of `model` can give.

    The module's output is measured, not its weight: Gemma 3 scales inside the embedding.
    """
    embedding = input_embedding(model)
    vocab = embedding.weight.shape[0]
    total = squares = 0.0
    count = 0
    for start in range(0, vocab, _CHUNK):
        ids = torch.arange(start, min(start + _CHUNK, vocab), device=embedding.weight.device)
        values = embedding(ids).double()
        total += float(values.sum())
        squares += float(values.square().sum())
        count += values.numel()
    mean = total / count
    return mean, max(squares / count - mean * mean, 0.0) ** 0.5


def _count(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return value


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not take."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: got {seed}, give an integer of 64 bits (-2**63 to 2**63 - 1)")
