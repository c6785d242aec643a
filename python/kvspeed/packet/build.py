# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Making packets: one forward over a text alone, from position 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvspeed.fingerprint import model_fingerprint
from kvspeed.models import architecture, base_model, causal_lm, max_positions
from kvspeed.packet.adapter import PacketAdapter
from kvspeed.packet.packet import Packet
from kvspeed.packet.press.base import kept_tokens
from kvspeed.packet.press.bridge import as_press
from kvspeed.packet.press.record import Recorder
from kvspeed.packet.rotation import describe_rotation
from kvspeed.prompt import chat_parts, encode, preamble_ids
from kvspeed.rope import RopeSpec
from kvspeed.speed.prefill import prompt_kv
from kvspeed.state import state_of

__all__ = ["build_packet", "build_preamble", "build_single", "max_positions", "stored_depth"]


def build_packet(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    adapter: PacketAdapter | None = None,
    *,
    k: int | None = None,
    press: Any = None,
) -> Packet:
    """Compute the keys and values of `text` alone, so that they can be used at any place of any later prompt.

    The text is tokenised without special tokens, wrapped in the adapter's soft tokens where one is given, and run
    through `model` at positions 0, 1, ... seeing nothing else. Dropout is off and no gradients are kept, whatever mode
    the model is in; its mode is restored.

    Args:
        model: a causal LM that kvspeed knows, patched or not, bare or wrapped by PEFT.
        tokenizer: its tokenizer.
        text: the document.
        adapter: trained soft tokens, see `PacketAdapter`.
        k: layers to store. None: those the model is patched to, which are all where it is not patched with a k. Another
            number than the patched one is allowed; such a packet serves requests that go as deep or less.
        press: removes tokens, see `kvspeed.packet.press`: one of its presses, or a `kvpress.ScorerPress`. Soft tokens
            count among those of which a fraction is removed; where the press protects them, they stay, and at least one
            token of the text with them.

    Raises:
        TypeError: `text` is no string, or an argument is of another kind.
        ValueError: the text is empty or longer than the model's positions, the adapter belongs to another model, k is
            out of range, the architecture or its RoPE is not supported, or the press cannot serve packets.
    """
    press = as_press(press) if press is not None else None
    _check_text("text", text)
    if adapter is not None and not isinstance(adapter, PacketAdapter):
        raise TypeError(f"adapter: expected a PacketAdapter or None, got {type(adapter).__name__}")
    depth = stored_depth(model, k)
    if adapter is not None:
        adapter.check_model(model)
        if not all(bool(part.isfinite().all()) for part in (adapter.header, adapter.trailer)):
            raise ValueError("adapter: its soft tokens hold a number that is not finite; load or train another one")
    ids = encode(tokenizer, text, "text")
    adapter = adapter if adapter is not None and adapter.tokens else None
    if press is None:
        return _build(model, ids, text, adapter, depth)
    header, trailer = (adapter.header.shape[0], adapter.trailer.shape[0]) if adapter is not None else (0, 0)
    kept, protected = kept_tokens(header + len(ids) + trailer, press.ratio), None
    if press.protect_soft and header + trailer:
        kept = max(kept, header + trailer + 1)
        protected = torch.ones(header + len(ids) + trailer, dtype=torch.bool)
        protected[header : header + len(ids)] = False
    recorder = Recorder(press, rope_of(model), ids, kept, protected)
    return _build(model, ids, text, adapter, depth, recorder, press.describe())


def build_preamble(
    model: nn.Module,
    tokenizer: Any,
    text_or_ids: str | Sequence[int] | torch.Tensor | None = None,
    *,
    k: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Packet:
    """The block that comes before all packets: the head of the chat template with BoS, never wrapped in soft tokens.

    Args:
        model: as for `build_packet`.
        tokenizer: its tokenizer.
        text_or_ids: None: what the chat template puts before the user's words. A string: the same, followed by this
            text (instructions); without a template the text alone. Token ids (a sequence, or int tensor `[T]`): exactly
            these. In the first two cases BoS goes first where the tokenizer adds one by itself.
        k: as for `build_packet`.
        chat_template_kwargs: further arguments for the template.

    Raises:
        TypeError, ValueError: as for `build_packet`; and where there is neither template, BoS nor text.
    """
    depth = stored_depth(model, k)
    if text_or_ids is None or isinstance(text_or_ids, str):
        head, _ = chat_parts(tokenizer, chat_template_kwargs)
        text = head + (text_or_ids or "")
        ids = preamble_ids(tokenizer, text)
        if not ids:
            raise ValueError(
                "the tokenizer has neither a chat template nor a BoS token that it adds by itself, so there is no "
                "default preamble: give its text or ids, or do without"
            )
    else:
        ids = _given_ids(text_or_ids)
        text = tokenizer.decode(list(ids)) if hasattr(tokenizer, "decode") else ""
    return _build(model, ids, text, None, depth)


def build_single(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    preamble: Packet | None = None,
    k: int | None = None,
    press: Any = None,
) -> Packet:
    """One block of the preamble and all `texts`, each of which sees everything before it, to compare packets with.

    It holds the very ids of the preamble and of the packets of the same texts, without soft tokens. It is used as a
    preamble: `assemble([], preamble=block, model=model)`.

    Args:
        model: as for `build_packet`.
        tokenizer: its tokenizer.
        texts: the documents, in order.
        preamble: the block before them; its ids are computed again, together with the texts.
        k: as for `build_packet`.
        press: as for `build_packet`. The preamble stays whole (without BoS attention has no sink), and the press
            removes its fraction of the texts' tokens.

    Raises:
        TypeError, ValueError: as for `build_packet`; no text.
    """
    press = as_press(press) if press is not None else None
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise TypeError(f"texts: expected a sequence of at least one string, got {texts!r:.60}")
    if preamble is not None and not isinstance(preamble, Packet):
        raise TypeError(f"preamble: expected a Packet or None, got {type(preamble).__name__}")
    for index, text in enumerate(texts):
        _check_text(f"texts[{index}]", text)
    depth = stored_depth(model, k)
    head = preamble.token_ids if preamble is not None else ()
    parts = [encode(tokenizer, text, f"texts[{index}]") for index, text in enumerate(texts)]
    ids = head + tuple(token for part in parts for token in part)
    text = (preamble.text if preamble is not None else "") + "".join(texts)
    if press is None:
        return _build(model, ids, text, None, depth)
    protected = torch.arange(len(ids)) < len(head)
    kept = len(head) + kept_tokens(len(ids) - len(head), press.ratio)
    recorder = Recorder(press, rope_of(model), ids, kept, protected)
    return _build(model, ids, text, None, depth, recorder, {**press.describe(), "protected": len(head)})


@torch.no_grad()
def _build(
    model: nn.Module,
    ids: tuple[int, ...],
    text: str,
    adapter: PacketAdapter | None,
    depth: int | None,
    recorder: Recorder | None = None,
    press: dict[str, Any] | None = None,
) -> Packet:
    inner: Any = causal_lm(model)
    embedding = inner.get_input_embeddings()
    length = len(ids) + (adapter.tokens if adapter is not None else 0)
    limit = max_positions(model)
    if limit is not None and length > limit:
        raise ValueError(f"the text is {length} tokens long and the model has {limit} positions: split the text")
    if max(ids) >= embedding.weight.shape[0]:
        raise ValueError(
            f"the tokenizer gave id {max(ids)} and the model has {embedding.weight.shape[0]} embeddings: "
            "use the model's own tokenizer"
        )
    rope = describe_rotation(rope_of(model))
    tokens = torch.tensor([ids], device=embedding.weight.device)
    state = state_of(model)
    anchors = state.spec.anchor_tokens if state is not None and state.spec is not None else 1
    with evaluating(model), recorder.watching(model) if recorder is not None else nullcontext():
        given = {"input_ids": tokens} if adapter is None else {"inputs_embeds": adapter.wrap(embedding(tokens))}
        keys, values, anchor_keys, anchor_values = prompt_kv(
            model, k=depth, anchor_tokens=anchors, observe=recorder, **given
        )
    positions = None
    if recorder is not None:
        keys, values, positions = recorder.compressed(keys, values)
    name = str(getattr(inner.config, "_name_or_path", "") or "")
    return Packet(
        keys=keys.detach(),
        values=values.detach(),
        token_ids=ids,
        layers=len(base_model(model).layers),  # type: ignore[arg-type]
        model_fingerprint=model_fingerprint(model),
        rope=rope,
        text=text,
        header=adapter.header.shape[0] if adapter is not None else 0,
        trailer=adapter.trailer.shape[0] if adapter is not None else 0,
        k=depth,
        anchor_keys=anchor_keys.detach() if anchor_keys is not None else None,
        anchor_values=anchor_values.detach() if anchor_values is not None else None,
        positions=positions,
        press=press,
        model_name=Path(name).name or type(inner).__name__,
        adapter_fingerprint=adapter.fingerprint() if adapter is not None else None,
    )


def rope_of(model: nn.Module) -> RopeSpec:
    """The rotary embedding of `model`, from its patch where it has one."""
    state = state_of(model)
    return state.rope if state is not None else RopeSpec.from_model(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules of `model` in eval mode, and as they were afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def stored_depth(model: nn.Module, k: int | None) -> int | None:
    """The number of layers to store, None for all."""
    architecture(model)
    layers = len(base_model(model).layers)  # type: ignore[arg-type]
    if k is None:
        state = state_of(model)
        spec = state.spec if state is not None else None
        if spec is not None and spec.gaps:
            raise ValueError(
                f"packets hold the layers below a depth k without gaps, and the model is patched with gaps at layers "
                f"{list(spec.gaps)}: give k, and patch the model with it to use the packets"
            )
        return spec.k if spec is not None else None
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k: expected an integer or None, got {type(k).__name__}")
    if not 1 <= k <= layers:
        raise ValueError(f"k: is {k} and the model has {layers} layers; give 1 to {layers}, or None")
    return k if k < layers else None


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a string, got {type(text).__name__}")
    if not text.strip():
        raise ValueError(f"{name}: is empty; a packet needs some text")


def _given_ids(ids: Any) -> tuple[int, ...]:
    values = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    if not isinstance(values, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise TypeError("text_or_ids: expected a string, or token ids in one flat sequence of integers")
    if not values or min(values) < 0:
        raise ValueError("text_or_ids: expected at least one token id, none negative")
    return tuple(values)
