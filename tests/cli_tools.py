# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A tiny model folder with a tokenizer of its own, and a runner for the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import tiny_model

CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with single bytes only: 256 of them after three special tokens, so 259 ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def save_model(folder: Path, architecture: str = "llama", **settings: Any) -> Path:
    """Writes a tiny model of 300 ids and its tokenizer into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model(architecture, vocab=300, **{"layers": 5, "max_position_embeddings": 16384, **settings})
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def run(*arguments: Any):
    """Runs `kvspeed ARGUMENTS` in this process; the result has exit_code, stdout, stderr."""
    from kvspeed.cli.app import app
    from typer.testing import CliRunner

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result) -> str:
    """The one sentence of a refused request; asserts that it is one, that stdout is empty, and exit code 2."""
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == "" and "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("kvspeed: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]
