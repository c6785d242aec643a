# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A needle in a haystack, of the kind that RULER calls S-NIAH: one sentence with a number in a long dull text.

The haystack is made of everyday sentences put together here; it is cut into chunks, which are the documents. The
needle's depth and the haystack's length are arguments, so that both can be swept, and `distractors` adds needles with
other keys (RULER's multi-key variant).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from kvspeed.eval.tasks.biography import HINT, check_count, check_questions, span
from kvspeed.eval.tasks.names import check_split, rng_of
from kvspeed.samples import Sample

__all__ = ["long", "niah"]

_NEEDLES = (
    "The secret number of the {key} is {value}.",
    "Remember that the secret number of the {key} is {value}.",
    "Someone wrote that the secret number of the {key} is {value}.",
)
_QUESTIONS = (
    "What is the secret number of the {key}?",
    "Which secret number does the {key} have?",
    "What is the secret number of the {key} in the documents?",
)
_COLOURS = "amber black blue brown copper crimson golden green grey ivory lilac orange pink purple red silver white"
_THINGS = (
    "anchor arrow barrel basket beetle bridge button camel candle canoe carpet castle cello chapel cherry "
    "clock compass coral cradle dagger dolphin drum falcon feather ferry fiddle fountain garden goblet hammer harp "
    "helmet heron island jacket kettle kite ladder lantern lemon lighthouse lion lizard locket magnet marble medal "
    "mirror monkey needle otter owl paddle parrot pebble pepper pigeon pillow pistol pocket puzzle rabbit ribbon "
    "rocket saddle sailor scarf shield sparrow spider spoon statue sword tiger torch tower trumpet tulip turtle violin "
    "wagon walnut whistle window wizard"
)
_WHO = (
    "the baker,the gardener,an old sailor,the teacher,a quiet neighbour,the postman,a young painter,the miller,my aunt,"
    "the librarian,a tired farmer,the carpenter,a tall stranger,the cook,the shepherd,a careful tailor,the porter"
).split(",")
_DOES = (
    "walked along the river,opened the wooden gate,talked about the weather,carried a bag of apples,waited at the "
    "station,counted the boats,looked at the clouds,mended a broken chair,read an old letter,sold bread and cheese,"
    "swept the narrow street,watched the ducks,wrote a short list,sang a slow song,lit the small stove,drank a cup of "
    "tea,fed the brown horse,painted the garden fence,looked for a lost key,sat under the oak"
).split(",")
_WHEN = (
    "in the morning,after the rain,before supper,on a cold day,late in the evening,when the bell rang,during the "
    "market,at noon,while the others slept,in early spring,as on every Sunday,without saying a word,for almost an hour"
).split(",")
_THEN = (
    "and went home again,and nobody asked why,and then it grew dark,and the dog followed,and the wind was mild,and "
    "that was all,but soon it was forgotten,and the children laughed,but the shop was closed,and the street was empty"
).split(",")


def niah(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    chunks: int | tuple[int, int] = (3, 6),
    chunk_tokens: int | tuple[int, int] = (90, 120),
    depth: float | None = None,
    digits: int = 5,
    distractors: int = 0,
    questions_per_context: int = 1,
) -> list[Sample]:
    """`count` samples, each with a haystack of its own.

    Args:
        count: how many.
        seed: another seed, other samples; sample i of a seed does not depend on `count`.
        split: "train", "dev" or "test"; the things that needles are about differ between them.
        chunks: documents a sample, or the least and the most; the haystack's length is chunks x chunk_tokens.
        chunk_tokens: about how many tokens a document has, or the least and the most (1.2 tokens a word).
        depth: where the needle stands, 0.0 (the first sentence of all) to 1.0 (the last); None: anywhere.
        digits: of the number.
        distractors: needles with other keys and numbers, anywhere else.
        questions_per_context: this many samples in a row have the same documents and ask for different needles.

    Raises:
        ValueError: an argument is out of range.
    """
    least, most = span("chunks", chunks)
    short, long = span("chunk_tokens", chunk_tokens)
    check_split(split)
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth: got {depth}; give 0.0 to 1.0, or None for anywhere")
    if not 2 <= digits <= 18:
        raise ValueError(f"digits: got {digits}, give 2 to 18")
    if not 0 <= distractors <= 50:
        raise ValueError(f"distractors: got {distractors}, give 0 to 50")
    if short < 20:
        raise ValueError(f"chunk_tokens: got {short}, give at least 20, which is one sentence")
    if depth is not None:  # which holds for one needle
        check_questions(questions_per_context, 1, "the needles that stand at a depth asked for are")
    check_questions(questions_per_context, 1 + distractors, "the needles to ask for are")
    task = "niah-multikey" if distractors else "niah"
    samples: list[Sample] = []
    for index in range(-(-check_count(count) // questions_per_context)):
        rng = rng_of(task, split, seed, index)
        texts = [_haystack(rng, rng.randint(short, long)) for _ in range(rng.randint(least, most))]
        keys = rng.sample(_keys(split), 1 + distractors)
        values = _values(rng, digits, 1 + distractors)
        needles = [_needle(rng, key, value) for key, value in zip(keys, values, strict=True)]
        for needle in needles[1:]:
            _insert(rng, texts, needle, None)
        _insert(rng, texts, needles[0], depth)
        for turn in range(questions_per_context):
            samples.append(
                Sample(
                    id=f"{task}-{split}-{seed}-{index * questions_per_context + turn:05d}",
                    documents=tuple(" ".join(sentences) for sentences in texts),
                    question=rng.choice(_QUESTIONS).format(key=keys[turn]) + HINT,
                    answers=(values[turn],),
                    gold=tuple(number for number, sentences in enumerate(texts) if needles[turn] in sentences),
                    task=task,
                )
            )
    return samples[:count]


def long(
    count: int,
    *,
    seed: int = 0,
    split: str = "test",
    tokens: int = 1024,
    chunk_tokens: int = 240,
    depth: float | None = None,
    digits: int = 5,
    distractors: int = 0,
    questions_per_context: int = 1,
) -> list[Sample]:
    """`niah` by the length of the haystack: one bucket of a sweep over prompt lengths.

    Args:
        count: how many.
        seed: another seed, other samples.
        split: as for `niah`.
        tokens: about how long all documents are together, at least 40.
        chunk_tokens: about how long one document is.
        depth: as for `niah`.
        digits: as for `niah`.
        distractors: as for `niah`.
        questions_per_context: as for `niah`.

    Raises:
        ValueError: an argument is out of range.
    """
    if tokens < 40 or chunk_tokens < 20:
        raise ValueError(f"tokens, chunk_tokens: got {tokens} and {chunk_tokens}, give at least 40 and 20")
    chunks = max(1, round(tokens / chunk_tokens))
    made = niah(
        count,
        seed=seed,
        split=split,
        chunks=chunks,
        chunk_tokens=max(20, tokens // chunks - 10),  # a haystack ends with a whole sentence, half of one too late
        depth=depth,
        digits=digits,
        distractors=distractors,
        questions_per_context=questions_per_context,
    )
    return [replace(sample, id=f"long-{tokens}-{sample.id}", task="long") for sample in made]


def _keys(split: str) -> list[str]:
    """Colour and thing; a thing belongs to one split, whatever its colour."""
    things = _THINGS.split()
    parts = {"train": things[0::2], "dev": things[1::4], "test": things[3::4]}
    return [f"{colour} {thing}" for colour in _COLOURS.split() for thing in parts[split]]


def _values(rng: Random, digits: int, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        value = str(rng.randrange(10 ** (digits - 1), 10**digits))
        if value not in found:
            found.append(value)
    return found


def _needle(rng: Random, key: str, value: str) -> str:
    return rng.choice(_NEEDLES).format(key=key, value=value)


def _haystack(rng: Random, tokens: int) -> list[str]:
    """Sentences of about that many tokens together."""
    sentences: list[str] = []
    words = 0.0
    while words < tokens / 1.2:
        sentence = f"{rng.choice(_WHEN)} {rng.choice(_WHO)} {rng.choice(_DOES)} {rng.choice(_THEN)}"
        sentence = f"{sentence[0].upper()}{sentence[1:]}."
        sentences.append(sentence)
        words += len(sentence.split())
    return sentences


def _insert(rng: Random, texts: list[list[str]], needle: str, depth: float | None) -> None:
    """Puts the needle between sentences."""
    places = [(number, at) for number, sentences in enumerate(texts) for at in range(len(sentences) + 1)]
    number, at = rng.choice(places) if depth is None else places[round(depth * (len(places) - 1))]
    texts[number].insert(at, needle)
