# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Conversations as token ids, with the answers in them marked: what instruction tuning is trained on.

A file is JSON Lines, one conversation a line:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}

Every assistant turn is an answer, up to and with its end token; everything else is prompt. Each piece is tokenised as
generation would meet it: the prompt up to the assistant's header, then the answer by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvspeed.prompt import added_bos, encode
from kvspeed.samples import distinct_keys

__all__ = ["Conversation", "Messages", "Row", "conversations_of", "dataset_messages", "read_messages", "rows_of"]

Messages = list[dict[str, str]]
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """A conversation, and where it comes from.

    Attributes:
        id: for messages, e.g. the file's name and line.
        messages: roles and contents, in order.
    """

    id: str
    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Row:
    """One sequence of tokens.

    Attributes:
        id: of the conversation or sample it was made from.
        ids: all tokens.
        answer: for each token, whether it belongs to an answer.
    """

    id: str
    ids: tuple[int, ...]
    answer: tuple[bool, ...]

    @property
    def answers(self) -> int:
        """Tokens of answers that have a token before them, which are those with a loss."""
        return sum(self.answer[1:])


def read_messages(path: str | os.PathLike[str]) -> list[Conversation]:
    """The conversations of a JSON Lines file, empty lines skipped.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no conversation; the message names the file and the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start}); JSON Lines are expected") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line, object_pairs_hook=distinct_keys)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: is no JSON ({error.msg} at character {error.pos + 1})") from None
        except RecursionError:
            raise ValueError(f"{where}: is nested too deeply to be a conversation") from None
        except ValueError as error:  # a key that is there twice
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(entry, dict) or "messages" not in entry:
            raise ValueError(f'{where}: expected an object with "messages", as instruction data has them')
        found.append(_conversation(f"{path.stem}-{number}", entry["messages"], where))
    if not found:
        raise ValueError(f"{path}: holds no conversations; one JSON object a line is expected")
    return found


def dataset_messages(name: str, split: str = "train", *, limit: int | None = None) -> list[Conversation]:
    """The conversations of a `datasets` dataset with a column "messages".

    Args:
        name: as `datasets.load_dataset` takes it: a hub id or a folder; a configuration after a colon.
        split: of the dataset.
        limit: only the first so many.

    Raises:
        ImportError: datasets is missing.
        ValueError: there is no such dataset, split or column.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(f"{name} is read with datasets, which is missing; pip install datasets") from None
    path, _, config = name.partition(":")
    try:
        data = load_dataset(path, config or None, split=split)
    except Exception as error:  # datasets raises many kinds
        raise ValueError(
            f"{name}: could not be read ({str(error).splitlines()[0] if str(error) else error!r})"
        ) from error
    columns = getattr(data, "column_names", None) or []
    if "messages" not in columns:
        raise ValueError(f'{name}: has no column "messages", it has {", ".join(map(repr, columns))}')
    count = len(data) if limit is None else min(limit, len(data))
    return [_conversation(f"{path}-{index}", data[index]["messages"], f"{name}, row {index}") for index in range(count)]


def conversations_of(given: Iterable[Any]) -> list[Conversation]:
    """Conversations from what a caller may hand over: `Conversation`s, lists of messages, or `{"messages": [...]}`.

    Raises:
        ValueError: an entry is none of these.
    """
    found = []
    for number, entry in enumerate(given):
        if isinstance(entry, Conversation):
            found.append(entry)
            continue
        messages = entry.get("messages") if isinstance(entry, dict) else entry
        found.append(_conversation(f"conversation-{number}", messages, f"data[{number}]"))
    return found


def rows_of(
    tokenizer: Any,
    conversations: Sequence[Conversation],
    end: Collection[int],
    *,
    max_tokens: int,
    cut: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Row]:
    """Conversations as tokens; what follows the last answer is left out.

    Args:
        tokenizer: the model's, with a chat template.
        conversations: in order.
        end: ids that end an answer.
        max_tokens: the most tokens of a row.
        cut: longer ones are cut off there, and left out where no answer remains; else they are refused.
        chat_template_kwargs: further arguments for the template.

    Raises:
        ValueError: there is no chat template, it cannot be followed turn by turn, a conversation has no answer, or is
            too long; the message names the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template, which says how conversations are written; set one")
    rows = []
    for one in conversations:
        row = _row(tokenizer, one, end, chat_template_kwargs or {})
        if len(row.ids) > max_tokens:
            if not cut:
                raise ValueError(
                    f"{one.id}: has {len(row.ids)} tokens, more than {max_tokens}; leave it out, or give max_tokens to "
                    "cut such ones off"
                )
            row = Row(row.id, row.ids[:max_tokens], row.answer[:max_tokens])
            if not row.answers:
                continue
        rows.append(row)
    return rows


def _row(tokenizer: Any, one: Conversation, end: Collection[int], template: dict[str, Any]) -> Row:
    messages = [{"role": role, "content": content} for role, content in one.messages]
    done, ids, answer = "", list[int](), list[bool]()
    bos = added_bos(tokenizer)

    def render(count: int, header: bool) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=header, **template
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(
                f"{one.id}: the chat template does not take its first messages, {count} of {len(messages)} ({error}); "
                "leave it out, or set another template"
            ) from error

    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, whole = render(index, True), render(index + 1, False)
        if not prompt.startswith(done) or not whole.startswith(prompt):
            raise ValueError(
                f"{one.id}: the chat template writes earlier turns anew once message {index + 1} is there (some take "
                "out their reasoning), so that its answers cannot be told apart; train on its turns one by one, or set "
                "a template that does not"
            )
        before = encode(tokenizer, prompt[len(done) :], f"{one.id}, messages") if prompt[len(done) :] else ()
        if not ids and bos is not None and before[:1] != (bos,):
            before = (bos, *before)
        reply = encode(tokenizer, whole[len(prompt) :], f"{one.id}, message {index + 1}")
        ended = next((place for place, token in enumerate(reply) if token in end), len(reply) - 1)
        ids += [*before, *reply]
        answer += [False] * len(before) + [place <= ended for place in range(len(reply))]
        done = whole
    if not any(answer[1:]):
        raise ValueError(f"{one.id}: has no answer to learn from (no message of the assistant); leave it out")
    last = max(place for place, is_answer in enumerate(answer) if is_answer)
    return Row(one.id, tuple(ids[: last + 1]), tuple(answer[: last + 1]))


def _conversation(name: str, messages: Any, where: str) -> Conversation:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"{where}: messages is {messages!r:.60}; expected a list of at least one")
    found = []
    for number, message in enumerate(messages, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f'{where}: message {number} is {message!r:.60}; expected {{"role": ..., "content": ...}}')
        if role not in ROLES:
            raise ValueError(f"{where}: message {number} is of {role!r}; the roles are {', '.join(ROLES)}")
        found.append((role, content))
    return Conversation(name, tuple(found))
