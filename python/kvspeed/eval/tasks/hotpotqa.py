# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""HotpotQA from its own files (hotpot_train_v1.1.json, hotpot_dev_distractor_v1.json, hotpot_dev_fullwiki_v1.json).

An entry has `_id`, `question`, `answer`, `context` (pairs of a title and its sentences) and `supporting_facts` (pairs
of a title and the number of a sentence); the `datasets` library has the same as columns. One paragraph is one document.
In the fullwiki setting a paragraph with the answer may be missing; `gold` then names those that are there.
"""

from __future__ import annotations

from typing import Any

from kvspeed.eval.tasks.biography import check_count
from kvspeed.eval.tasks.files import HINT, STEPS, drawn, entries_of, text_of, texts_of
from kvspeed.samples import Sample

__all__ = ["hotpotqa"]


def hotpotqa(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    path: str | None = None,
    name: str | None = None,
    config: str = "distractor",
    titles: bool = True,
    steps: bool = False,
) -> list[Sample]:
    """`count` questions drawn from a file or a dataset of the `datasets` library.

    Args:
        count: how many, or as many as there are.
        seed: another seed, another draw.
        split: of the library's dataset: "train", or "dev" and "test", which are its validation split.
        path: the dataset's own file.
        name: of the dataset in the library ("hotpotqa/hotpot_qa"), or a folder with it.
        config: of the library's dataset: "distractor" or "fullwiki".
        titles: documents begin with their title.
        steps: ask for reasoning before the answer, as the KV Packet paper does.

    Raises:
        OSError: the file cannot be read.
        ImportError: `name` without the `datasets` library.
        ValueError: the file has another format (the line or entry is named), or not one of path and name is given.
    """
    entries = entries_of(path, name, config, split)

    def make(entry: dict[str, Any], number: str) -> Sample:
        return _sample(entry, number, titles, steps)

    return drawn(entries, make, check_count(count), "hotpotqa", split, seed)


def _sample(entry: dict[str, Any], number: str, titles: bool, steps: bool) -> Sample:
    paragraphs = _paragraphs(entry["context"])
    facts = entry.get("supporting_facts") or []
    # [[title, sentence], ...] in the files, {"title": [...], "sent_id": [...]} in the library
    supporting = set(texts_of(facts["title"] if isinstance(facts, dict) else _titles(facts), "supporting_facts"))
    kept = [(title, "".join(sentences).strip()) for title, sentences in paragraphs]
    kept = [(title, text) for title, text in kept if text]
    gold = tuple(index for index, (title, _) in enumerate(kept) if title in supporting)
    key = entry.get("_id") or entry.get("id") or number
    return Sample(
        id=f"hotpotqa-{key}",
        documents=tuple(f"{title}\n{text}" if titles else text for title, text in kept),
        question=text_of(entry, "question").strip() + (STEPS if steps else HINT),
        answers=(text_of(entry, "answer"),),
        gold=gold,
        task="hotpotqa",
        reasoning=" and ".join(kept[index][0] for index in gold) + "." if steps else "",
    )


def _titles(facts: Any) -> list[Any]:
    if not isinstance(facts, list) or not all(isinstance(fact, (list, tuple)) and fact for fact in facts):
        raise TypeError(f"supporting_facts: expected pairs of a title and a sentence's number, got {facts!r:.60}")
    return [fact[0] for fact in facts]


def _paragraphs(context: Any) -> list[tuple[str, list[str]]]:
    if isinstance(context, dict):
        context = list(zip(context["title"], context["sentences"], strict=True))
    if not isinstance(context, list):
        raise TypeError(f"context: expected pairs of a title and sentences, got {type(context).__name__}")
    pairs = []
    for pair in context:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"context: expected pairs of a title and sentences, got {pair!r:.60}")
        pairs.append((pair[0], texts_of(pair[1], "context")))
    return pairs
