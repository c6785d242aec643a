# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Generated tasks are what they promise, and datasets' own files are read or refused by line."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from kvspeed.eval.tasks import GENERATED, TaskSpec, biography, hotpotqa, multihop, musique, niah, split_specs
from kvspeed.samples import check_samples

SEED = random.randrange(10**6)
TASKS = list(GENERATED)


def asked_name(sample) -> str:
    """The person in a question: two capitalised words in a row, after the question word."""
    return next(re.finditer(r"[A-Z]\w+ [A-Z]\w+", sample.question.split(" Give")[0][1:])).group()


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_stands_in_the_gold_documents_and_nowhere_else(name):
    for sample in check_samples(GENERATED[name](150, seed=SEED, split="test")):
        said = re.compile(rf"\b{re.escape(sample.answers[0])}\b")  # "locks" is not in "clocks"
        holders = {number for number, text in enumerate(sample.documents) if said.search(text)}
        assert holders & set(sample.gold), (sample.id, SEED)
        if name == "biography":  # two people may have studied the same; the name in the question tells them apart
            holders = {number for number, text in enumerate(sample.documents) if asked_name(sample) in text}
        assert holders <= set(sample.gold), (sample.id, SEED)
        assert 1 <= len(sample.answers[0].split()) <= 5
        assert sample.prediction(sample.target) == sample.answers[0] and sample.task == name


@pytest.mark.parametrize("name", TASKS)
def test_samples_depend_on_seed_split_and_number_only(name):
    make = GENERATED[name]
    long = make(20, seed=SEED, split="dev")
    assert make(7, seed=SEED, split="dev") == long[:7]
    for other in (make(20, seed=SEED + 1, split="dev"), make(20, seed=SEED, split="train")):
        assert not {s.documents for s in other} & {s.documents for s in long}
    assert len({sample.documents for sample in long}) == 20


def test_samples_are_the_same_in_another_process():
    code = (
        "import hashlib; from kvspeed.eval.tasks import GENERATED\n"
        f"print(hashlib.sha256(repr([m(9, seed={SEED}) for m in GENERATED.values()]).encode()).hexdigest())"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)  # each with its own hash seed
    }
    assert len(runs) == 1


def test_gold_stands_anywhere():
    for samples in (
        biography(400, seed=SEED, documents=4),
        niah(400, seed=SEED, chunks=4),
        niah(400, seed=SEED, chunks=4, distractors=2),
    ):
        counts = Counter(sample.gold[0] for sample in samples)
        assert set(counts) == {0, 1, 2, 3} and min(counts.values()) > 55, (counts, SEED)
    firsts = Counter(sample.gold for sample in multihop(400, seed=SEED, pairs=2))
    assert len(firsts) == 12 and min(firsts.values()) > 8, (firsts, SEED)


def test_splits_share_no_names():
    seen: dict[str, set[str]] = {}
    for split in ("train", "dev", "test"):
        names: set[str] = set()
        for seed in (0, SEED):
            for sample in biography(300, seed=seed, split=split):
                for text in sample.documents:
                    names |= set(re.findall(r"(?:comes from|born in|lives in|home town is|home is in) (\w+)\.", text))
                    names |= {
                        found.split()[-1] for found in re.findall(r"(?:^|of )([A-Z]\w+ [A-Z]\w+) (?:was|is|came)", text)
                    }
            for sample in multihop(300, seed=seed, split=split):
                for text in sample.documents:
                    names |= set(re.findall(r"([A-Z]\w+ [A-Z]\w+) makes", text))
        assert len(names) > 50
        seen[split] = names
    assert not seen["train"] & seen["dev"] and not seen["train"] & seen["test"] and not seen["dev"] & seen["test"]


@pytest.mark.parametrize(("name", "questions"), [("biography", 12), ("multihop", 6), ("niah-multikey", 4)])
def test_questions_on_the_same_documents(name, questions):
    samples = check_samples(GENERATED[name](2 * questions + 1, seed=SEED, questions_per_context=questions))
    assert len(samples) == 2 * questions + 1
    for begin in (0, questions):
        group = samples[begin : begin + questions]
        assert len({sample.documents for sample in group}) == 1
        assert len({(sample.gold, sample.answers) for sample in group}) == questions
    assert samples[0].documents != samples[questions].documents
    with pytest.raises(ValueError, match="questions_per_context"):
        GENERATED[name](1, questions_per_context=questions + 1)


def test_every_multihop_question_needs_both_documents():
    for sample in multihop(100, seed=SEED):
        person, firm = (sample.documents[index] for index in sample.gold)
        bridge = sample.reasoning.rstrip(".")
        assert bridge in person and bridge in firm and bridge not in sample.question
        name = asked_name(sample)
        assert name in person and name not in firm and sample.answers[0] not in person
    plain = multihop(5, seed=SEED, steps=False)
    assert all(not sample.reasoning and "Give only" in sample.question for sample in plain)


def test_needle_at_a_depth_and_in_a_haystack_of_a_length():
    for depth, place in ((0.0, 0), (1.0, -1)):
        for sample in niah(20, seed=SEED, depth=depth, chunks=5):
            assert sample.gold == (place % 5,)
            sentences = sample.documents[place].split(". ")
            assert sample.answers[0] in sentences[place]
    few, many = (
        sum(len(text.split()) for sample in niah(20, seed=SEED, chunks=c, chunk_tokens=t) for text in sample.documents)
        for c, t in ((2, 60), (8, 240))
    )
    assert 13 < many / few < 17
    assert all(len(sample.answers[0]) == 9 for sample in niah(20, seed=SEED, digits=9))


@pytest.mark.parametrize("facts", range(1, 7))
def test_a_person_has_as_many_facts_as_asked_for(facts):
    for sample in biography(20, seed=SEED, facts=facts, documents=3):
        assert all(text.count(". ") + 1 == facts and text.endswith(".") for text in sample.documents)
        assert all(re.search(r"[A-Z]\w+ [A-Z]\w+", text) for text in sample.documents)


def test_twenty_documents_and_more():
    assert all(len(sample.documents) == 20 for sample in biography(5, seed=SEED, documents=20))
    assert len(biography(1, seed=SEED, documents=40, split="train")[0].documents) == 40
    with pytest.raises(ValueError, match="more documents asked for"):
        biography(1, documents=2000)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: biography(0), "count: got 0"),
        (lambda: biography(1, split="eval"), "split: got 'eval', choose from train, dev, test"),
        (lambda: biography(1, documents=(3, 2)), "documents: got 3 to 2"),
        (lambda: biography(1, facts=7), "facts: got 7"),
        (lambda: niah(1, depth=1.5), "depth: got 1.5"),
        (lambda: niah(1, chunk_tokens=5), "chunk_tokens: got 5"),
        (lambda: niah(1, digits=1), "digits"),
        (lambda: niah(1, distractors=-1), "distractors"),
        (lambda: multihop(1, relations=("boss",)), "relations"),
        (lambda: multihop(1, pairs=0), "pairs"),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---- tasks as they are written -------------------------------------------------------------------------------------


def test_specs():
    specs = split_specs("niah:depth=0.5:chunks=2-3,biography, multihop:relations=town+chief:steps=false:shuffle=4")
    assert [spec.name for spec in specs] == ["niah", "biography", "multihop"]
    assert specs[0].options == {"depth": 0.5, "chunks": (2, 3)}
    assert specs[2].options == {"relations": ("town", "chief"), "steps": False} and specs[2].shuffle == 4
    assert specs[0].load(5, seed=SEED) == niah(5, seed=SEED, depth=0.5, chunks=(2, 3))
    (odd,) = split_specs("samples:path=/a,b/c:d.jsonl")
    assert odd.options == {"path": "/a,b/c:d.jsonl"}
    assert split_specs("multihop")[0].load(4, questions_per_context=4) == multihop(4, questions_per_context=4)
    # a task that cannot have as many questions on its documents has as many as it can, unless its options ask for them
    assert split_specs("niah")[0].load(3, questions_per_context=6) == niah(3)
    assert split_specs("biography:documents=2")[0].load(30, questions_per_context=40) == biography(
        30, documents=2, questions_per_context=12
    )
    with pytest.raises(ValueError, match="niah:questions_per_context=2: questions_per_context: got 2"):
        split_specs("niah:questions_per_context=2")[0].load(3)
    assert split_specs("niah")[0].answer_tokens < split_specs("hotpotqa:path=x:steps=true")[0].answer_tokens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got none"),
        ("niah,", None),
        ("needle", "there is no task 'needle'"),
        ("niah,niah", "given twice"),
        ("niah:size=3", "niah has no option 'size'; it has .*chunks"),
        ("biography:seed=1", "no option 'seed'"),
    ],
)
def test_wrong_specs(text, words):
    if words is None:
        assert len(split_specs(text)) == 1
        return
    with pytest.raises(ValueError, match=words):
        split_specs(text)


def test_an_option_of_the_wrong_kind_is_a_sentence():
    for text, words in (
        ("biography:documents=few", "documents is two numbers as 2-7 or a whole number"),
        ("biography:documents=true", "documents is two numbers"),
        ("biography:facts=a", "facts is a whole number"),
        ("biography:shuffle=abc", "shuffle is the seed"),
        ("multihop:steps=no", "steps is true or false"),
        ("multihop:relations=5", r"relations is names as a\+b"),
        ("niah:depth=abc", "depth is a number"),
        ("niah:depth=", "depth is a number"),
        ("niah:chunks=1e9", "chunks is two numbers"),
        ("niah:digits=3.5", "digits is a whole number"),
        ("samples", "samples needs path: write samples:path=..."),
    ):
        with pytest.raises(ValueError, match=f"^tasks: {text}.*{words}|^tasks: {words}"):
            TaskSpec.parse(text)
    assert TaskSpec.parse("niah:depth=1:chunks=2-3").load(1) and TaskSpec.parse("multihop:relations=town").load(1)


def test_a_needle_at_a_depth_is_one_to_ask_for():
    asked = TaskSpec.parse("niah-multikey:depth=0.5:chunks=5").load(40, questions_per_context=4)
    assert len({sample.documents for sample in asked}) == 40


def test_more_of_a_file_begin_with_the_same_ones(tmp_path):
    file = tmp_path / "many.json"
    entry = {"question": "Who?", "answer": "Bo", "context": [["A", ["Bo."]]], "supporting_facts": [["A", 0]]}
    file.write_text(json.dumps([{**entry, "_id": str(number)} for number in range(300)]))
    few, more = hotpotqa(10, path=str(file)), hotpotqa(100, path=str(file))
    assert more[:10] == few and len({sample.id for sample in more}) == 100
    for broken in ([[]], [1], "abc"):
        file.write_text(json.dumps([{**entry, "supporting_facts": broken}]))
        with pytest.raises(ValueError, match=r"many.json, entry 1: supporting_facts: expected pairs"):
            hotpotqa(1, path=str(file))


def test_shuffle_moves_documents_and_gold_together():
    plain = biography(60, seed=SEED, questions_per_context=3)
    mixed = TaskSpec.parse("biography:shuffle=1").load(60, seed=SEED, questions_per_context=3)
    assert [sorted(s.documents) for s in mixed] == [sorted(s.documents) for s in plain]
    assert any(a.documents != b.documents for a, b in zip(plain, mixed, strict=True))
    for before, after in zip(plain, mixed, strict=True):
        assert [before.documents[i] for i in before.gold] == [after.documents[i] for i in after.gold]
        assert (before.id, before.answers, before.question) == (after.id, after.answers, after.question)
    assert mixed[0].documents == mixed[2].documents  # questions on the same documents keep them


def test_samples_from_a_file(tmp_path):
    from kvspeed import write_samples

    samples = biography(5, seed=SEED)
    write_samples(tmp_path / "s.jsonl", samples)
    assert TaskSpec.parse(f"samples:path={tmp_path}/s.jsonl").load(3, seed=9) == samples[:3]


# ---- datasets' own files -------------------------------------------------------------------------------------------

HOTPOT = {
    "_id": "5a",
    "question": "Which town has the mill of Ada Row?",
    "answer": "Norton",
    "context": [["Ada Row", ["Ada Row owns a mill.", " It is old."]], ["Mills", ["One is in Norton."]], ["Void", []]],
    "supporting_facts": [["Mills", 0], ["Ada Row", 0]],
    "type": "bridge",
}
MUSIQUE = {
    "id": "2hop__1",
    "question": "Who leads the firm of Ada?",
    "answer": "Bo",
    "answer_aliases": ["Bo Lee", ""],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Ada", "paragraph_text": "Ada works at Fox.", "is_supporting": True},
        {"idx": 1, "title": "Sea", "paragraph_text": "The sea is wide.", "is_supporting": False},
        {"idx": 2, "title": "Fox", "paragraph_text": "Fox is led by Bo.", "is_supporting": True},
    ],
}


def lines(path, entries, *, array=False):
    text = json.dumps(entries, indent=1) if array else "\n".join(json.dumps(entry) for entry in entries)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_hotpotqa(tmp_path):
    rows = {
        "title": [title for title, _ in HOTPOT["context"]],
        "sentences": [text for _, text in HOTPOT["context"]],
    }
    columns = {**HOTPOT, "context": rows, "supporting_facts": {"title": ["Mills", "Ada Row"], "sent_id": [0, 0]}}
    array = hotpotqa(5, path=lines(tmp_path / "a.json", [HOTPOT], array=True))
    assert array == hotpotqa(5, path=lines(tmp_path / "b.jsonl", [columns]))
    (sample,) = array
    assert sample.documents == ("Ada Row\nAda Row owns a mill. It is old.", "Mills\nOne is in Norton.")
    assert sample.gold == (0, 1) and sample.answers == ("Norton",) and sample.id == "hotpotqa-5a"
    (bare,) = hotpotqa(1, path=str(tmp_path / "a.json"), titles=False, steps=True)
    assert bare.documents[1] == "One is in Norton." and bare.target.endswith("Answer: Norton")


def test_musique(tmp_path):
    hidden = {**MUSIQUE, "id": "no", "answerable": False}
    (sample,) = musique(5, path=lines(tmp_path / "m.jsonl", [hidden, MUSIQUE]))
    assert sample.gold == (0, 2) and sample.answers == ("Bo", "Bo Lee")
    assert sample.documents[0] == "Ada\nAda works at Fox."
    with pytest.raises(ValueError, match="no questions with an answer"):
        musique(1, path=lines(tmp_path / "n.jsonl", [hidden]))


def test_a_draw_depends_on_the_seed(tmp_path):
    entries = [{**MUSIQUE, "id": str(number)} for number in range(60)]
    path = lines(tmp_path / "m.jsonl", entries)
    one, two = (musique(20, path=path, seed=seed) for seed in (SEED, SEED + 1))
    assert one == musique(20, path=path, seed=SEED) and [s.id for s in one] != [s.id for s in two]
    assert len({sample.id for sample in one}) == 20 and len(musique(99, path=path)) == 60


@pytest.mark.parametrize(
    ("make", "broken", "words"),
    [
        (musique, "{", "line 2: is no JSON"),
        (musique, "3", "line 2: expected a JSON object"),
        (musique, json.dumps({**MUSIQUE, "paragraphs": "p"}), "line 2: paragraphs: expected a list"),
        (musique, json.dumps({"id": "x"}), "line 2: paragraphs is missing"),
        (musique, json.dumps({**MUSIQUE, "answer": 5}), "line 2: answer: expected a string"),
        (hotpotqa, json.dumps({**HOTPOT, "context": [["a"]]}), "line 2: context: expected pairs"),
        (hotpotqa, json.dumps({**HOTPOT, "question": " "}), "line 2"),
        (hotpotqa, json.dumps(MUSIQUE), "line 2: context is missing"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path, make, broken, words):
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(MUSIQUE if make is musique else HOTPOT) + "\n" + broken + "\n")
    with pytest.raises(ValueError, match=words) as error:
        make(3, path=str(path))
    assert str(path) in str(error.value)


def test_path_or_name():
    with pytest.raises(ValueError, match=r"either path= .* or name="):
        hotpotqa(1)
    with pytest.raises(ValueError, match="either"):
        musique(1, path="a", name="b")
    with pytest.raises(FileNotFoundError):
        musique(1, path="/nowhere/m.jsonl")
