# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Samples as token ids, those about the same documents together.

Questions about the same documents in the same order share one forward over them, in the teacher and in the student:
four questions a context cost little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvspeed.prompt import encode, prompt_ids
from kvspeed.samples import INSTRUCTION, SEPARATOR, Sample, document_text

__all__ = ["Context", "Query", "contexts_of"]


@dataclass(frozen=True)
class Query:
    """One question about a context.

    Attributes:
        id: the sample's.
        question: ids after the documents, up to where the answer begins.
        target: ids of the sample's own answer, without an end token.
    """

    id: str
    question: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Context:
    """Documents and what is asked about them.

    Attributes:
        preamble: ids before the documents; may be empty.
        documents: ids of each document, tokenised alone, without special tokens.
        queries: at least one.
    """

    preamble: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    queries: tuple[Query, ...]

    @property
    def tokens(self) -> int:
        """Tokens of preamble, documents and questions; answers and soft tokens come on top."""
        return len(self.preamble) + sum(map(len, self.documents)) + sum(len(query.question) for query in self.queries)


def contexts_of(
    tokenizer: Any,
    samples: Sequence[Sample],
    *,
    most_queries: int = 8,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Context]:
    """The contexts of `samples`, neighbours about the same documents together.

    Args:
        tokenizer: the model's.
        samples: in their order.
        most_queries: the most questions of one context; more make another one.
        chat_template_kwargs: further arguments for the chat template.

    Raises:
        ValueError: a text gives no tokens; the message names the sample.
    """
    contexts = []
    documents: dict[str, tuple[int, ...]] = {}  # a document stands in many samples
    for texts, group in groupby(samples, key=lambda sample: sample.documents):
        members = list(group)
        for start in range(0, len(members), most_queries):
            queries: list[Query] = []
            preamble: tuple[int, ...] = ()
            for sample in members[start : start + most_queries]:
                try:
                    for text in texts:
                        if text not in documents:
                            documents[text] = encode(tokenizer, document_text(text), "documents")
                    prompt = prompt_ids(
                        tokenizer,
                        sample.question,
                        preamble=INSTRUCTION,
                        separator=SEPARATOR,
                        chat_template_kwargs=chat_template_kwargs,
                    )
                    preamble = prompt.preamble
                    queries.append(Query(sample.id, prompt.question, encode(tokenizer, sample.target, "answers")))
                except ValueError as error:
                    raise ValueError(f"sample {sample.id}: {error}") from None
            contexts.append(Context(preamble, tuple(documents[text] for text in texts), tuple(queries)))
    return contexts
