# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""How many tokens to take as anchor, where that depends on the tokenizer.

`patch_model(anchor_tokens=n)` makes the first n tokens of a sequence live in every layer. 0 is SPEED without anchor, 1
is the paper's (BoS, or whatever token comes first where there is none). A chat template begins every prompt with the
same tokens (BoS, a system turn, the header of the user's turn); as an anchor these work just as well, since their KV
above k depends on nothing that comes later and is computed once.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

__all__ = ["template_anchor"]

# Any users' words that share no beginning: a letter, a digit, a sign, white space, letters of two and three bytes.
_WORDS = ("Anchor", "7 times", "(sign)", "été", "錨")


def template_anchor(tokenizer: Any, chat_template_kwargs: dict[str, Any] | None = None) -> int:
    """How many tokens every prompt of the tokenizer's chat template begins with.

        patch_model(model, k, anchor_tokens=template_anchor(tokenizer))

    Found by comparing prompts, so that a token which the template's last character shares with the user's first is not
    counted. A prompt with a system turn of its own begins otherwise: then count its tokens yourself.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        chat_template_kwargs: further arguments for the template.

    Raises:
        ValueError: there is no template, or its prompts have no common beginning.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat template, so that prompts have no common beginning: give anchor_tokens=1, for "
            "the first token, or a number of your own"
        )
    rows = []
    for words in _WORDS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": words}],
            tokenize=False,
            add_generation_prompt=True,
            **(chat_template_kwargs or {}),
        )
        rows.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    count = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))
    if count == 0:
        raise ValueError("prompts of the tokenizer's chat template begin with the user's words; give anchor_tokens=1")
    return count
