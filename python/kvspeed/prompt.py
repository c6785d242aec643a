# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""The tokens around packets: [preamble][packet 1]...[packet N][question], as the chat template has them.

The documents stand in the user's turn before the question: the preamble is what the template puts before the user's
words (BoS, a system turn, the user header), and the question ends with what it puts after them (the end of the turn,
the assistant's header).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = ["PromptIds", "chat_parts", "encode", "prompt_ids"]

_DOCUMENTS = "@@kvspeed-documents@@"  # stands for them in the template; any text that a template leaves alone


@runtime_checkable
class Block(Protocol):
    """Something that was computed before, as a `Packet` is, and stands first."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...


Preamble = Block | str | Literal[False] | None


@dataclass(frozen=True)
class PromptIds:
    """Token ids on both sides of the packets.

    Attributes:
        preamble: before the first packet; may be empty.
        question: after the last one.
    """

    preamble: tuple[int, ...]
    question: tuple[int, ...]


def prompt_ids(
    tokenizer: Any,
    question: str,
    *,
    preamble: Preamble = None,
    separator: str = "\n\n",
    chat_template_kwargs: dict[str, Any] | None = None,
) -> PromptIds:
    """The ids that `kvspeed.generate` puts around its packets.

    Args:
        tokenizer: a transformers tokenizer.
        question: what is asked, in plain words; control tokens come from the chat template.
        preamble: None: what the chat template puts before the user's words, or BoS where the tokenizer adds one and
            has no template. A string: the same, followed by this text (instructions). A `Packet`: that block. False:
            nothing before the packets and nothing after the question.
        separator: text between the last packet and the question.
        chat_template_kwargs: further arguments for the template, e.g. `{"enable_thinking": False}`.

    Raises:
        TypeError: `question` or `preamble` is of another type.
        ValueError: the question is empty, or the tokenizer gives no ids.
    """
    if not isinstance(question, str):
        raise TypeError(f"question: expected a string, got {type(question).__name__}")
    if not isinstance(separator, str):
        raise TypeError(f"separator: expected a string, got {type(separator).__name__}")
    if not question.strip():
        raise ValueError("question: is empty; ask something")
    if preamble is False:
        return PromptIds((), encode(tokenizer, separator + question, "question"))
    head, tail = chat_parts(tokenizer, chat_template_kwargs)
    after = encode(tokenizer, separator + question + tail, "question")
    if isinstance(preamble, Block):
        return PromptIds(preamble.token_ids, after)
    if preamble is not None and not isinstance(preamble, str):
        raise TypeError(f"preamble: expected a Packet, a string, False or None, got {type(preamble).__name__}")
    return PromptIds(preamble_ids(tokenizer, head + (preamble or "")), after)


def preamble_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of `text`, after BoS where the tokenizer adds one by itself and the text does not begin with it."""
    ids = encode(tokenizer, text, "preamble") if text else ()
    bos = added_bos(tokenizer)
    return ids if bos is None or ids[:1] == (bos,) else (bos, *ids)


def chat_parts(tokenizer: Any, chat_template_kwargs: dict[str, Any] | None = None) -> tuple[str, str]:
    """What the chat template puts before and after the user's words; `("", "")` for a tokenizer without template.

    Raises:
        ValueError: the template does not show the user's words exactly once.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    messages = [{"role": "user", "content": _DOCUMENTS}]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
    )
    parts = text.split(_DOCUMENTS)
    if len(parts) != 2:
        raise ValueError(
            f"the tokenizer's chat template shows the user's words {len(parts) - 1} times, so there is no place for "
            "the packets: give preamble=False, and write the control tokens into the question yourself"
        )
    return parts[0], parts[1]


def added_bos(tokenizer: Any) -> int | None:
    """The BoS id, where the tokenizer puts it first by itself."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return None
    return bos if list(tokenizer("a")["input_ids"])[:1] == [bos] else None


def encode(tokenizer: Any, text: str, name: str) -> tuple[int, ...]:
    """Ids of `text` without special tokens.

    Raises:
        TypeError: `tokenizer` is none.
        ValueError: there are no ids; the message calls the text `name`.
    """
    if not callable(tokenizer):
        raise TypeError(f"tokenizer: expected a transformers tokenizer, got {type(tokenizer).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: holds half of a surrogate pair at {error.start}, which is no text; remove it"
        ) from None
    # verbose=False: a document longer than the model is refused in words, not warned about
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)
    try:
        ids = tuple(int(token) for token in encoded["input_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"tokenizer: {type(tokenizer).__name__} gave no list of input_ids for the {name}; a transformers tokenizer "
            "is expected"
        ) from error
    if not ids:
        raise ValueError(f"{name}: the tokenizer gave no tokens for {text[:40]!r}; give some text")
    return ids
