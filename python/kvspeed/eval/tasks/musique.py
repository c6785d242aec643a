# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""MuSiQue from its own files (musique_ans_v1.0_dev.jsonl and its kin), one question a line.

A line has `id`, `question`, `answer`, `answer_aliases`, `answerable` and `paragraphs`, each with `title`,
`paragraph_text` and `is_supporting`. Questions that are marked as not answerable are left out.
"""

from __future__ import annotations

from typing import Any

from kvspeed.eval.tasks.biography import check_count
from kvspeed.eval.tasks.files import HINT, STEPS, drawn, entries_of, text_of, texts_of
from kvspeed.samples import Sample

__all__ = ["musique"]


def musique(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    path: str | None = None,
    name: str | None = None,
    config: str | None = None,
    titles: bool = True,
    steps: bool = False,
) -> list[Sample]:
    """`count` answerable questions drawn from a file or a dataset of the `datasets` library.

    Args:
        count: how many, or as many as there are.
        seed: another seed, another draw.
        split: of the library's dataset: "train", or "dev" and "test", which are its validation split.
        path: the dataset's own file.
        name: of the dataset in the library, or a folder with it.
        config: of the library's dataset, where it has several.
        titles: documents begin with their title.
        steps: ask for reasoning before the answer, as the KV Packet paper does.

    Raises:
        OSError: the file cannot be read.
        ImportError: `name` without the `datasets` library.
        ValueError: the file has another format (the line is named), or not one of path and name is given.
    """
    entries = entries_of(path, name, config, split)

    def make(entry: dict[str, Any], number: str) -> Sample | None:
        return _sample(entry, number, titles, steps)

    return drawn(entries, make, check_count(count), "musique", split, seed)


def _sample(entry: dict[str, Any], number: str, titles: bool, steps: bool) -> Sample | None:
    if entry.get("answerable") is False:
        return None
    paragraphs = entry["paragraphs"]
    if not isinstance(paragraphs, list) or not all(isinstance(one, dict) for one in paragraphs):
        raise TypeError(f"paragraphs: expected a list of objects, got {type(paragraphs).__name__}")
    kept = [one for one in paragraphs if text_of(one, "paragraph_text")]
    gold = tuple(index for index, one in enumerate(kept) if one.get("is_supporting"))
    answers = [text_of(entry, "answer"), *texts_of(entry.get("answer_aliases") or [], "answer_aliases")]
    names = [str(one.get("title") or "").strip() for one in kept]
    texts = [one["paragraph_text"].strip() for one in kept]
    return Sample(
        id=f"musique-{entry.get('id') or number}",
        documents=tuple(f"{a}\n{b}" if titles and a else b for a, b in zip(names, texts, strict=True)),
        question=text_of(entry, "question").strip() + (STEPS if steps else HINT),
        answers=tuple(dict.fromkeys(answer for answer in answers if answer.strip())),
        gold=gold,
        task="musique",
        reasoning=" and ".join(dict.fromkeys(names[index] or "the text" for index in gold)) + "." if steps else "",
    )
