# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Turns a Llama-architecture GGUF file with a byte-level BPE tokenizer into a folder that transformers loads.

Written out by hand rather than through `from_pretrained(gguf_file=...)`: that route keeps the weights packed by default
in new versions (every forward would unpack them), writes a tokenizer class and a RoPE spelling that transformers 4.57
does not read, and its output depends on the version. Here every version gets the same bytes, so model fingerprints
agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

#: GGUF name -> transformers name, within a block and outside.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # GGUF token type of special tokens


def convert_gguf(source: Path, target: Path, advance: Callable[[int, int], None] | None = None) -> None:
    """Writes config, float32 weights and tokenizer of `source` into the existing, empty folder `target`.

    Args:
        source: a GGUF file of architecture "llama" with tokenizer model "gpt2".
        target: folder that gets config.json, generation_config.json, model.safetensors, tokenizer.json,
            tokenizer_config.json and chat_template.jinja.
        advance: called as advance(done, total) while weights are unpacked.

    Raises:
        RuntimeError: the file's architecture or tokenizer is another one.
    """
    import gguf
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(str(source))
    fields = dict(reader.fields)
    architecture, tokenizer = _value(fields, "general.architecture"), _value(fields, "tokenizer.ggml.model")
    if architecture != "llama" or tokenizer != "gpt2":
        raise RuntimeError(
            f"{source.name}: architecture {architecture!r} with tokenizer {tokenizer!r} cannot be converted, "
            "only 'llama' with 'gpt2' can"
        )
    heads = {"attn_q": _value(fields, "llama.attention.head_count")}
    heads["attn_k"] = _value(fields, "llama.attention.head_count_kv")
    weights = {}
    for done, tensor in enumerate(reader.tensors):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name, kind = _hf_name(tensor.name)
        if kind in heads:
            values = _unpermute(values, heads[kind])
        weights[name] = values.astype("float32", copy=True)
        if advance is not None:
            advance(done + 1, len(reader.tensors))
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    _write_config(fields, target, tied="lm_head.weight" not in weights)
    _write_tokenizer(fields, target)


def _value(fields: dict[str, Any], name: str) -> Any:
    return fields[name].contents()


def _hf_name(name: str) -> tuple[str, str]:
    """("blk.3.attn_q.weight") -> ("model.layers.3.self_attn.q_proj.weight", "attn_q")."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}", parts[2]
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}", parts[0]


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of Q and K rows: pairs (2i, 2i+1) back to halves (i, i + D/2), head by head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_config(fields: dict[str, Any], target: Path, *, tied: bool) -> None:
    heads, hidden = _value(fields, "llama.attention.head_count"), _value(fields, "llama.embedding_length")
    theta = float(_value(fields, "llama.rope.freq_base"))
    token_ids = {
        "bos_token_id": int(_value(fields, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_value(fields, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_value(fields, "tokenizer.ggml.padding_token_id")),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(_value(fields, "llama.vocab_size")),
        "hidden_size": int(hidden),
        "intermediate_size": int(_value(fields, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(fields, "llama.block_count")),
        "num_attention_heads": int(heads),
        "num_key_value_heads": int(_value(fields, "llama.attention.head_count_kv")),
        "head_dim": int(hidden) // int(heads),
        "hidden_act": "silu",
        "max_position_embeddings": int(_value(fields, "llama.context_length")),
        "rms_norm_eps": round(float(_value(fields, "llama.attention.layer_norm_rms_epsilon")), 9),
        # 4.57 reads rope_theta and would silently take 10000 without it, 5.x reads rope_parameters
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "dtype": "float32",
        "torch_dtype": "float32",
        **token_ids,
    }
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {"do_sample": False, **token_ids})


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _value(fields, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(fields, "tokenizer.ggml.merges")]
    types = _value(fields, "tokenizer.ggml.token_type")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    # the "smollm" pre-tokenizer splits numbers into single digits first
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    names = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # read by 4.57 and 5.x alike
        "model_max_length": int(_value(fields, "llama.context_length")),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "model_input_names": ["input_ids", "attention_mask"],  # 4.57 would hand out token_type_ids as well
        **{name: tokens[int(_value(fields, field))] for name, field in names.items()},
    }
    _write_json(target / "tokenizer_config.json", config)
    (target / "chat_template.jinja").write_text(_value(fields, "tokenizer.chat_template"), encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
