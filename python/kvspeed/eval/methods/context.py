# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One model as all methods of an evaluation use it, and the KV of documents that was computed for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from kvspeed import ops
from kvspeed.cache import KVCache
from kvspeed.devices import layer_devices
from kvspeed.eval.flops import ModelShape
from kvspeed.greedy import token_ids
from kvspeed.models import architecture, base_model, cache_argument, causal_lm
from kvspeed.packet import Packet, PacketAdapter, build_packet, build_preamble, prompt_ids
from kvspeed.packet.build import evaluating, max_positions, rope_of
from kvspeed.prompt import encode
from kvspeed.rope import float32_rope_buffers
from kvspeed.rule import SpeedSpec
from kvspeed.samples import INSTRUCTION, SEPARATOR, document_text
from kvspeed.segment import Segment
from kvspeed.speed.prefill import prompt_kv
from kvspeed.state import state_of

__all__ = ["Block", "Context"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Block:
    """KV of consecutive positions, and the position it was rotated for.

    Attributes:
        keys: `[L, H_kv, T, D]`.
        values: the same shape.
        start: the position that token 0 was rotated for.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int = 0

    @classmethod
    def of(cls, packet: Packet) -> Block:
        """A packet with all its tokens."""
        if packet.positions is not None:
            raise ValueError(f"{packet!r} has tokens removed; this method needs packets with all their tokens")
        return cls(packet.keys, packet.values)

    @property
    def length(self) -> int:
        """Positions it takes."""
        return self.keys.shape[2]

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))


class Context:
    """A model, its tokenizer and adapter, the prompt's layout, and documents computed before.

    Args:
        model: a causal LM that kvspeed knows. Patched (`patch_model`, without a k), its kernels serve all methods
            alike; its weights must not change while the context is in use.
        tokenizer: its tokenizer.
        adapter: soft tokens for the methods that use packets with an adapter.
        instruction: what stands between the chat template's head and the documents.
        separator: what stands between the last document and the question.
        swiftkv: SwiftKV's weights for the method that needs them, see `kvspeed.eval.swiftkv`.
        mode: how documents get into a cache where nothing is recomputed: "view" (in place; needs the patch) or "copy";
            None: "view" where the model is patched.
        max_new_tokens: answer tokens to make room for.
        memory: bytes of documents' KV to keep in memory; the least recently used ones go first.
        chat_template_kwargs: further arguments for the chat template.

    Raises:
        ValueError, TypeError: the model is not supported or patched with a k, or the adapter is another model's.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        adapter: PacketAdapter | None = None,
        swiftkv: Any = None,
        instruction: str = INSTRUCTION,
        separator: str = SEPARATOR,
        mode: Literal["view", "copy"] | None = None,
        max_new_tokens: int = 64,
        memory: int = 2 << 30,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        architecture(model)
        state = state_of(model)
        if state is not None and state.spec is not None:
            raise ValueError(
                f"the model is patched with k={state.spec.k}, and methods that recompute tokens need all layers: call "
                "patch_model(model, k) with the number of its layers"
            )
        if mode not in (None, "view", "copy"):
            raise ValueError(f'mode: expected "view", "copy" or None, got {mode!r}')
        if mode == "view" and state is None:
            raise ValueError('mode: "view" reads documents in place, which needs the patch: call patch_model(model)')
        if state is None and float32_rope_buffers(base_model(model)):
            raise ValueError(
                "this model's rotary frequencies were rounded by a cast (such as model.bfloat16()): load it with "
                "dtype=..., or call kvspeed.patch_model, which repairs them"
            )
        if adapter is not None:
            adapter.check_model(model)
        self.model, self.tokenizer, self.adapter, self.swiftkv = model, tokenizer, adapter, swiftkv
        self.instruction, self.separator = instruction, separator
        self.chat_template_kwargs = chat_template_kwargs
        self.mode: str = mode or ("view" if state is not None else "copy")
        self.max_new_tokens = max_new_tokens
        self.rope = rope_of(model)
        self.shape = ModelShape.of(model)
        self.preamble_ids = prompt_ids(
            tokenizer, "?", preamble=instruction, separator=separator, chat_template_kwargs=chat_template_kwargs
        ).preamble
        self._memory, self._held = memory, 0
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._preambles: dict[SpeedSpec | None, Packet] = {}

    # ---- what it is ------------------------------------------------------------------------------------------------

    @property
    def base(self) -> Any:
        """The decoder stack."""
        return base_model(self.model)

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        inner: Any = causal_lm(self.model)
        return inner.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV."""
        return self.base.dtype

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end an answer."""
        return frozenset(token_ids(causal_lm(self.model), {})[0])

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize

    # ---- ids -------------------------------------------------------------------------------------------------------

    def question_ids(self, question: str) -> tuple[int, ...]:
        """Ids after the documents: separator, question, and what the chat template puts after it."""
        return prompt_ids(
            self.tokenizer,
            question,
            preamble=self.instruction,
            separator=self.separator,
            chat_template_kwargs=self.chat_template_kwargs,
        ).question

    def document_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a document as it stands in the prompt, tokenised alone and without special tokens."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"documents: expected texts that are not empty, got {text!r:.60}")
        return self.keep(("ids", text), lambda: encode(self.tokenizer, document_text(text), "document"))

    def check_room(self, positions: int) -> None:
        """Refuse a prompt for which the model has not enough positions."""
        limit = max_positions(self.model)
        if limit is not None and positions > limit:
            raise ValueError(
                f"the prompt and its answer need {positions} positions, and the model has {limit}: use fewer documents"
            )

    # ---- what is computed once -------------------------------------------------------------------------------------

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives, from memory where it was made before under this `key`.

        Packets, blocks and tuples of these count with their bytes; the least recently used go when there are too many.
        """
        found = self._kept.get(key)
        if found is None:
            value = make()
            found = self._kept[key] = (value, _bytes_of(value))
            self._held += found[1]
            while self._held > self._memory and len(self._kept) > 1:
                self._held -= self._kept.popitem(last=False)[1][1]
        self._kept.move_to_end(key, last=True)
        return found[0]

    @property
    def spec(self) -> SpeedSpec | None:
        """How the model is patched now: a method may need it at a depth while it serves."""
        state = state_of(self.model)
        return None if state is None else state.spec

    @property
    def preamble(self) -> Packet | None:
        """The KV of the preamble, at the depth that the model is patched to; None where there is none."""
        if not self.preamble_ids:
            return None
        if self.spec not in self._preambles:
            self._preambles[self.spec] = build_preamble(self.model, self.tokenizer, self.preamble_ids)
        return self._preambles[self.spec]

    def packet(self, text: str, *, adapter: bool = False, press: Any = None) -> Packet:
        """The packet of a document, with the context's adapter or without, at the depth that the model is patched to.

        Raises:
            ValueError: an adapter is asked for and the context has none.
        """
        if adapter and self.adapter is None:
            raise ValueError("this method needs a packet adapter, and the context has none: give adapter=...")
        used = self.adapter if adapter else None
        self.document_ids(text)  # refuses what is no document
        described = None if press is None else repr(sorted(press.describe().items()))
        key = ("packet", text, used.fingerprint() if used is not None else None, described, self.spec)
        return self.keep(key, lambda: build_packet(self.model, self.tokenizer, document_text(text), used, press=press))

    def alone(self, ids: Sequence[int], before: Sequence[int] = ()) -> Block:
        """KV of `ids` computed right after `before`, which is dropped, and nothing else; positions count from 0."""
        return self.keep(("alone", tuple(before), tuple(ids)), lambda: self._alone(ids, before))

    def _alone(self, ids: Sequence[int], before: Sequence[int]) -> Block:
        self.check_room(len(before) + len(ids))
        tokens = torch.tensor([[*before, *ids]], device=self.device)
        with self.evaluating():
            keys, values, _, _ = prompt_kv(self.model, input_ids=tokens)
        if before:
            keys, values = (t[:, :, len(before) :].clone() for t in (keys, values))
        return Block(keys, values, len(before))

    # ---- forwards --------------------------------------------------------------------------------------------------

    def place(
        self,
        blocks: Sequence[Block],
        slots: int,
        mode: str | None = None,
        begins: Sequence[int] | None = None,
        removed: int = 0,
    ) -> KVCache:
        """A cache that holds `blocks` one after the other, each moved by one rotation from where it was computed.

        Args:
            blocks: in order; may be empty.
            slots: tokens to make room for in all.
            mode: "view" or "copy"; None: the context's.
            begins: the position of what was at 0 when a block was computed, for blocks that are chosen tokens of
                documents; None: blocks are whole and follow each other.
            removed: positions that hold no token, which mode "copy" counts before what comes next.
        """
        mode = mode or self.mode
        length = sum(block.length for block in blocks)
        cache = KVCache(self.base.config, capacity=slots - (length if mode == "view" else 0))
        if not blocks:
            return cache
        if begins is None:
            begins = list(accumulate((block.length for block in blocks[:-1]), initial=0))
        offsets = [begin - block.start for begin, block in zip(begins, blocks, strict=True)]
        devices = layer_devices(self.model)
        if mode == "view":
            per_layer = [
                [
                    Segment(block.keys[index].to(device), block.values[index].to(device), offset, start=block.start)
                    for block, offset in zip(blocks, offsets, strict=True)
                ]
                for index, device in enumerate(devices)
            ]
            cache.set_segments(per_layer, length)
            return cache
        if len(set(devices)) > 1:
            raise ValueError(
                f"methods that recompute tokens copy all layers in one launch, and this model is spread over "
                f"{len(set(devices))} devices: load it on one"
            )
        shape = (self.shape.layers, self.shape.kv_heads, slots, self.shape.head_dim)
        keys, values = (ops.empty_huge(shape, self.dtype, self.device) for _ in range(2))
        ops.rope_concat(
            [block.keys for block in blocks],
            [block.values for block in blocks],
            offsets,
            self.rope.first(self.shape.layers),
            keys,
            values,
            interleaved=self.rope.interleaved,
        )
        cache.set_storage(keys, values, length + removed, removed=removed)
        return cache

    @torch.no_grad()
    def forward(self, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """The model on `ids` after what `cache` holds; logits `[vocab]` of the last one."""
        tokens = torch.tensor([list(ids)], device=self.device)
        given = {"input_ids": tokens, "use_cache": True, "logits_to_keep": 1, cache_argument(self.base): cache}
        with self.evaluating():
            return self.model(**given).logits[0, -1]

    @torch.no_grad()
    def forward_unread(self, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
        """The model on `ids` for the KV they leave; nothing of worth is returned, as the prompt goes on after them."""
        given = {"input_ids": torch.tensor([list(ids)], device=self.device), cache_argument(self.base): cache}
        with self.evaluating():
            self.base(use_cache=True, **given)
        return torch.empty(0)

    def evaluating(self) -> AbstractContextManager[None]:
        """The model without dropout inside the block; nothing to do, and no time spent, where it is in eval mode."""
        return evaluating(self.model) if self.model.training else nullcontext()


def _bytes_of(value: Any) -> int:
    if isinstance(value, Packet):
        return value.kv_bytes
    if isinstance(value, KVCache):
        return value.allocated_bytes()
    if isinstance(value, Block):
        return value.bytes
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple) and value and not isinstance(value[0], int):
        return sum(_bytes_of(part) for part in value)
    return 0
