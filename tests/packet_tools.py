# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""What the packet tests share: packets of random numbers, and a tokenizer made on the spot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from kvspeed.packet.packet import Packet

CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{{ '[' + message['role'] + ']' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def random_rope(layers: int, head_dim: int, *, rotary: int | None = None, rows: int = 1) -> dict[str, Any]:
    rotary = head_dim - head_dim % 2 if rotary is None else rotary
    frequencies = torch.rand(rows, rotary // 2).tolist()
    return {
        "rotary_dim": rotary,
        "interleaved": False,
        "layers": layers,
        "frequencies": frequencies,
        "row": [layer % rows for layer in range(layers)],
    }


def random_packet(
    *,
    layers: int = 4,
    heads: int = 2,
    tokens: int = 5,
    head_dim: int = 16,
    k: int | None = None,
    anchors: int = 1,
    soft: tuple[int, int] = (0, 0),
    kept: int | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Packet:
    """A packet of random numbers; `kept` stored tokens of each head where it is given."""
    length = tokens + sum(soft)
    depth = layers if k is None else k
    stored = length if kept is None else kept
    positions = None
    if kept is not None:
        order = torch.rand(depth, heads, length).argsort(-1)[..., :kept]
        positions = order.sort(-1).values.int()
    fields: dict[str, Any] = dict(
        keys=torch.randn(depth, heads, stored, head_dim).to(dtype),
        values=torch.randn(depth, heads, stored, head_dim).to(dtype),
        token_ids=tuple(torch.randint(3, 500, (tokens,)).tolist()),
        layers=layers,
        model_fingerprint="ab" * 32,
        rope=random_rope(layers, head_dim, rows=2),
        text="Zwölf Boxkämpfer jagen Viktor 🥊 quer über den Sylter Deich.",
        header=soft[0],
        trailer=soft[1],
        k=k,
        positions=positions,
        model_name="tiny",
        adapter_fingerprint="cd" * 32 if any(soft) else None,
        press={"name": "random", "ratio": 0.5} if kept is not None else None,
    )
    if k is not None and anchors:
        shape = (layers - k, heads, anchors, head_dim)
        fields |= {"anchor_keys": torch.randn(shape).to(dtype), "anchor_values": torch.randn(shape).to(dtype)}
    return Packet(**{**fields, **changes})


def assert_same_packet(a: Packet, b: Packet) -> None:
    """Equal to the bit, tensors and all other fields."""
    one, other = a.tensors(), b.tensors()
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape
        assert torch.equal(tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8)), name
    empty = dict.fromkeys(one)
    for field in a.__dataclass_fields__:
        if field not in empty:
            assert getattr(a, field) == getattr(b, field), field


def changed(packet: Packet, **changes: Any) -> Packet:
    return replace(packet, **changes)


def tiny_tokenizer(*, vocab: int = 512, bos: bool = False, template: str | None = None) -> Any:
    """A tokenizer whose tokens are words w3, w4, ... and single characters; `<s>` 1, `</s>` 2, `<pad>` 0.

    Args:
        vocab: its size.
        bos: whether it puts `<s>` first by itself, as Llama's does.
        template: a chat template.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>"]
    words += [chr(code) for code in range(33, 127)]
    words += ["[user]", "[assistant]", "[system]"]
    words += [f"w{index}" for index in range(len(words), vocab)]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.add_tokens(["[user]", "[assistant]", "[system]"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="?"
    )
    tokenizer.chat_template = template
    return tokenizer


def random_text(words: int, seed: int, *, vocab: int = 512) -> str:
    """`words` words of the tiny tokenizer, one token each; a word only returns when all have been used."""
    generator = torch.Generator().manual_seed(seed)
    rounds = range(-(-words // (vocab - 100)))
    ids = [100 + index for _ in rounds for index in torch.randperm(vocab - 100, generator=generator).tolist()][:words]
    return " ".join(f"w{index}" for index in ids)


# --- the oracle: one forward of the unpatched model, every layer with a mask of its own ---


def block_ids(lengths: list[int]) -> torch.Tensor:
    """int64 `[sum]`: the number of the block that each token is in."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def block_mask(lengths: list[int]) -> torch.Tensor:
    """bool `[T, T]`: each block sees itself, the last one sees everything; causal."""
    block = block_ids(lengths)
    causal = torch.ones(len(block), len(block), dtype=torch.bool).tril()
    return ((block[:, None] == block[None]) | (block == len(lengths) - 1)[:, None]) & causal


@torch.no_grad()
def masked_logits(
    model: Any,
    embeds: torch.Tensor,
    mask: torch.Tensor | list[torch.Tensor],
    *,
    upper: tuple[int, torch.Tensor] | None = None,
    first_position: int = 0,
) -> torch.Tensor:
    """Logits `[T, vocab]` of an unpatched model under exactly `mask`.

    Args:
        model: the unpatched model.
        embeds: `[T, hidden]`, input embeddings.
        mask: bool `[T, T]`, or one such mask or `[H_q, T, T]` a layer; sliding windows of the model are added to it.
        upper: `(k, mask)`: another mask for the layers from k on.
        first_position: position of token 0.
    """
    layers, config = model.model.layers, model.config
    position = torch.arange(len(embeds)) + first_position
    near = position[:, None] - position[None] < (getattr(config, "sliding_window", None) or len(embeds) + 1)

    def replace_mask(module: Any, args: Any, kwargs: Any) -> Any:
        index = module.self_attn.layer_idx
        seen = mask[index] if isinstance(mask, list) else mask
        seen = upper[1] if upper is not None and index >= upper[0] else seen
        if (getattr(config, "layer_types", None) or ["full_attention"] * len(layers))[index] == "sliding_attention":
            seen = seen & near
        added = torch.zeros(seen.shape, dtype=embeds.dtype).masked_fill(~seen, torch.finfo(embeds.dtype).min)
        return args, {**kwargs, "attention_mask": added[None] if added.ndim == 3 else added[None, None]}

    handles = [layer.register_forward_pre_hook(replace_mask, with_kwargs=True) for layer in layers]
    try:
        return model(inputs_embeds=embeds[None], position_ids=position[None], use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def embed(model: Any, ids: Any) -> torch.Tensor:
    """Input embeddings `[T, hidden]` of a list of ids."""
    return model.get_input_embeddings()(torch.as_tensor(list(ids), dtype=torch.long))


def packet_embeds(model: Any, packet: Packet, adapter: Any = None) -> torch.Tensor:
    """Input embeddings of a packet, soft tokens included."""
    text = embed(model, packet.token_ids)
    return adapter.wrap(text).detach() if adapter is not None and packet.adapter_fingerprint else text


@torch.no_grad()
def cached_logits(model: Any, cache: Any, question: Any, answer: Any) -> torch.Tensor:
    """Logits `[question + answer, vocab]` of tokens after a cache: the question at once, the answer one by one."""
    from kvspeed.models import base_model, cache_argument

    name = cache_argument(base_model(model))
    if hasattr(cache, "begin_turn"):
        cache.begin_turn(cache.get_seq_length() + len(question))
    pieces = [torch.tensor([list(question)])] + [torch.tensor([[token]]) for token in answer]
    return torch.cat([model(input_ids=piece, use_cache=True, **{name: cache}).logits[0] for piece in pieces])
