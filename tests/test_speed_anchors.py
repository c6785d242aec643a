# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The chat template's beginning as an anchor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvspeed
import pytest
import torch
from cli_tools import save_tokenizer
from kvspeed.speed.anchors import template_anchor
from speed_tools import answer, close, conversation, fresh, oracle, plain
from transformers import AutoTokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def test_it_is_what_all_prompts_begin_with(tokenizer: Any) -> None:
    head = tokenizer("<s>user\n", add_special_tokens=False)["input_ids"]
    assert template_anchor(tokenizer) == len(head)
    tokenizer.chat_template = "<s>{{ style }}|{{ messages[0]['content'] }}</s>"
    assert template_anchor(tokenizer, {"style": "short"}) == len("?short|")
    for template, says in ((None, "no chat template"), ("{{ messages[0]['content'] }}", "begin with the user's words")):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=says):
            template_anchor(tokenizer)


def test_it_does_not_count_a_token_that_the_users_words_change() -> None:
    """A tokenizer that joins the last sign of the template with the first of the words."""

    class Joining:
        chat_template = "there is one"

        def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
            return "<s>ab:" + messages[0]["content"]

        def __call__(self, text: str, **kwargs: Any) -> dict[str, list[str]]:
            return {"input_ids": ["<s>", "a", "b", text[5:7], *text[7:]]}  # type: ignore[list-item]

    assert template_anchor(Joining()) == 3


def test_under_speed(tokenizer: Any) -> None:
    """As an anchor: its KV is in every layer and the same for every prompt."""
    count, caches = template_anchor(tokenizer), []
    model = kvspeed.patch_model(fresh("llama"), 4, anchor_tokens=count)
    for words in ("What is it?", "Who is that over there?"):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": words}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        found = answer(model, ids)
        prompt = ids.shape[1]
        wanted = oracle(plain("llama"), found.sequences[0], conversation((prompt, 5)), anchor_tokens=count)
        close(found.logits[0], wanted[prompt - 1 : prompt + 4])
        caches.append([found.cache.layer(layer).view(count)[0].clone() for layer in (4, 5)])
        assert found.cache.layer(5).length == count + 4 < found.cache.layer(3).length
    for first, second in zip(*caches, strict=True):
        close(first, second)
