# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Asks every question of every task by every method, and keeps a record of each answer.

What `kvspeed eval packets` and `kvspeed eval speed` share: they differ in their methods, and in whether methods may
bring weights of their own.

All methods answer a question one after the other, in an order that changes from question to question, so that a busy
moment of the machine hits all alike. Documents are computed once for all questions and methods that can share them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvspeed.eval.answer import Answer, end_to_end
from kvspeed.eval.fields import ANSWER
from kvspeed.eval.journal import Journal, Record
from kvspeed.eval.methods import METHODS, Context, Method, get_method
from kvspeed.eval.score import contains, exact_match, f1, string_match
from kvspeed.eval.tasks.spec import TaskSpec
from kvspeed.eval.weights import Weights
from kvspeed.fingerprint import model_fingerprint
from kvspeed.packet import PacketAdapter
from kvspeed.samples import INSTRUCTION, SEPARATOR, Sample, check_samples

__all__ = ["Plan", "Runner", "sample_digest"]

FULL = "full"


@dataclass(frozen=True)
class Plan:
    """What is asked, by whom.

    Attributes:
        tasks: in the order of the tables.
        methods: names as `get_method` takes them; `packet@NAME` uses the adapter of that name, `speed-22@NAME` the
            weights of that name. Weights and adapters that are called as a method are that method's without an @.
        samples: questions a task.
        seed: of the tasks.
        split: "train", "dev" or "test".
        questions_per_context: questions in a row on the same documents, where a task can; cheaper, and the confidence
            intervals take it into account.
        timed: the first so many questions of a task are timed; the others are answered in the cheapest way.
        end_to_end: the first so many questions of a task are timed from files too.
        steps: decoding steps that are timed after each answer of a timed question; 0: none.
        max_new_tokens: the most tokens of an answer; None: by the task,
        least_new_tokens: and at least so many.
        shard: (index, count): this process takes the contexts whose number leaves `index` over `count`.
    """

    tasks: tuple[TaskSpec, ...]
    methods: tuple[str, ...]
    samples: int = 100
    seed: int = 0
    split: str = "test"
    questions_per_context: int = 1
    timed: int = 20
    end_to_end: int = 0
    steps: int = 0
    max_new_tokens: int | None = None
    least_new_tokens: int = 1
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks: got none; name at least one")
        if not self.methods:
            raise ValueError("methods: got none; name at least one")
        for name in self.methods:
            if self.methods.count(name) > 1:
                raise ValueError(f"methods: {name} is given twice; name each once")
        index, count = self.shard
        if count < 1 or not 0 <= index < count:
            raise ValueError(f"shard: got {index} of {count}; the first of two is 0/2, the second 1/2")
        for what, least in (
            ("samples", 1),
            ("questions_per_context", 1),
            ("timed", 0),
            ("end_to_end", 0),
            ("steps", 0),
        ):
            if getattr(self, what) < least:
                raise ValueError(f"{what}: got {getattr(self, what)}, give at least {least}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {self.max_new_tokens}, give at least 1")

    def limit(self, task: TaskSpec) -> int:
        """The most tokens of an answer of this task."""
        return self.max_new_tokens or max(task.answer_tokens, self.least_new_tokens)


class Runner:
    """Runs a plan on one model.

    Args:
        model: a causal LM, patched without a k or not patched.
        tokenizer: its tokenizer.
        plan: what to do.
        adapters: name -> adapter; the one named "" serves where no other is named. May be empty where no method needs
            one.
        weights: name -> weights that a method uses instead of the model.
        known: the methods to choose from, `METHODS` or `SPEED_METHODS`.
        kind: of evaluation; journals of one kind are refused by the other.
        path: of the journal; None keeps records in memory only.
        model_name: for the report.
        chat_template_kwargs: further arguments for the chat template.

    Raises:
        ValueError: a method, task or adapter is not known or does not fit the model; the journal is of another run.
        OSError: a dataset or the journal cannot be read.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        plan: Plan,
        *,
        adapters: Mapping[str, PacketAdapter] | None = None,
        weights: Mapping[str, Weights] | None = None,
        known: Mapping[str, Callable[..., Method]] = METHODS,
        kind: str = "packets",
        path: str | Path | None = None,
        model_name: str = "",
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.plan, self.kind = model, tokenizer, plan, kind
        self.adapters, self.weights = dict(adapters or {}), dict(weights or {})
        self.methods = {name: get_method(name.partition("@")[0], known) for name in plan.methods}
        self._made_with = {name: self._source(name) for name in plan.methods}
        self.samples: dict[str, list[Sample]] = {task.text: self._load(task) for task in plan.tasks}
        longest = max(plan.limit(task) for task in plan.tasks)
        self._contexts = {
            key: self._context(*key, max_new_tokens=longest, chat_template_kwargs=chat_template_kwargs)
            for key in sorted({("", ""), *self._made_with.values()})
        }
        self._fingerprints = {name: self._fingerprint(name) for name in plan.methods}
        self.header = {
            "model": model_fingerprint(model),
            "name": model_name,
            "dtype": str(self.context.dtype).removeprefix("torch."),
            "prompt": [INSTRUCTION, SEPARATOR, chat_template_kwargs or {}],
            **({} if kind == "packets" else {"kind": kind}),
        }
        self._memory: list[Record] = []
        self.journal = Journal(path, self.header, ANSWER) if path is not None else None

    @property
    def context(self) -> Context:
        """The run's own model, without what single methods bring."""
        return self._contexts["", ""]

    def context_of(self, name: str) -> Context:
        """The model as a method of the plan uses it."""
        return self._contexts[self._made_with[name]]

    def weights_of(self, name: str) -> Weights | None:
        """The weights that a method of the plan brings."""
        return self.weights.get(self._made_with[name][0])

    # ---- what there is to do ---------------------------------------------------------------------------------------

    def steps(self) -> int:
        """Answers of this process's share, those of earlier runs included."""
        return sum(len(list(self._share(task))) for task in self.plan.tasks) * len(self.methods)

    def run(self, advance: Callable[[str], None] = lambda what: None) -> None:
        """Asks what has no record yet; `advance` is called once an answer.

        Raises:
            ValueError: a prompt is longer than the model.
            OSError: a record cannot be written; those before are on disk.
        """
        for task in self.plan.tasks:
            warm = False
            for number, sample in self._share(task):
                missing = [name for name in self._turns(number) if self._wanted(task, number, sample, name)]
                for _ in range(len(self.methods) - len(missing)):
                    advance(task.text)
                if missing and number < self.plan.timed and not warm:
                    warm = self._warm_up(sample, missing)
                drafts = self._drafts(task, sample)
                for name in missing:
                    record = self._record(task, number, sample, name, drafts)
                    drafts.insert(0, record["token_ids"])
                    self._keep(record)
                    advance(f"{task.text} {name}")

    def records(self, task: TaskSpec) -> dict[str, list[Record]]:
        """Method -> its records of a task in the samples' order, of all shards that are there already.

        A record belongs to a question by what was asked, and names the sample as it is called now: lines of a file may
        have moved since, and two may ask the same.
        """
        found: dict[str, list[Record]] = {}
        for name in self.methods:
            rows = [(sample.id, self._find(task, sample, name)) for sample in self.samples[task.text]]
            found[name] = [{**row, "sample": called} for called, row in rows if row is not None]
        return found

    # ---- one answer ------------------------------------------------------------------------------------------------

    def _record(self, task: TaskSpec, number: int, sample: Sample, name: str, drafts: list[list[int]]) -> Record:
        context, limit, method = self.context_of(name), self.plan.limit(task), self.methods[name]
        is_timed = number < self.plan.timed
        documents, question = sample.documents, sample.question
        cheaper = method.shared(context) if not is_timed and self._shares_documents(task, number) else None
        steps = self.plan.steps if is_timed else 0
        total = None
        with method.serving(context):
            try:
                answer = Answer.of(
                    cheaper or method, context, documents, question, max_new_tokens=limit, drafts=drafts, steps=steps
                )
            except ValueError as error:
                raise ValueError(f"{task.text}, sample {sample.id}, method {name}: {error}") from error
            if number < self.plan.end_to_end:
                total = end_to_end(method, context, documents, question)
            if cheaper is not None:  # its answers are the method's, its costs are not
                prepared = method.prepare(context, documents)
                answer = replace(
                    answer,
                    flops=int(method.flops(prepared, answer.question_tokens)),
                    kv_bytes=int(method.kv_bytes(prepared)),
                    stored_bytes=int(method.stored_bytes(prepared)),
                )
        text = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        said = sample.prediction(text)
        return {
            "task": task.text,
            "sample": sample.id,
            "digest": sample_digest(sample),
            "group": _digest(sample.documents),
            "method": name,
            "adapter": self._fingerprints[name],
            "max_new_tokens": limit,
            "text": text,
            "prediction": said,
            "f1": f1(said, sample.answers),
            "em": float(exact_match(said, sample.answers)),
            "contains": float(contains(said, sample.answers)),
            "string_match": string_match(said, sample.answers),
            "token_ids": answer.token_ids,
            "prompt_tokens": answer.prompt_tokens,
            "question_tokens": answer.question_tokens,
            "flops": answer.flops,
            "kv_bytes": answer.kv_bytes,
            "stored_bytes": answer.stored_bytes,
            "ttft_s": answer.ttft_s if is_timed else None,
            "step_s": answer.step_s,
            "end_to_end_s": total,
            "seconds": answer.seconds,
        }

    def _drafts(self, task: TaskSpec, sample: Sample) -> list[list[int]]:
        """Likely answers: those that other methods gave, and the expected one."""
        eos = sorted(self.context.eos)[:1]
        given = self.tokenizer(sample.target, add_special_tokens=False)["input_ids"]
        known = [self._find(task, sample, name) for name in self.methods]
        return [*(row["token_ids"] for row in known if row is not None), [*given, *eos]]

    def _warm_up(self, sample: Sample, names: Sequence[str]) -> bool:
        """First calls are slow: threads, the allocator, the preamble."""
        for name in names:
            context, method = self.context_of(name), self.methods[name]
            with method.serving(context):
                Answer.of(method, context, sample.documents, sample.question, max_new_tokens=1)
        return True

    # ---- bookkeeping -----------------------------------------------------------------------------------------------

    def _load(self, task: TaskSpec) -> list[Sample]:
        plan = self.plan
        return check_samples(
            task.load(plan.samples, seed=plan.seed, split=plan.split, questions_per_context=plan.questions_per_context)
        )

    def _source(self, name: str) -> tuple[str, str]:
        """The names of the weights and of the adapter that a method uses; "" where it has none of its own."""
        base, at, given = name.partition("@")
        wanted = given if at else base
        if at and given not in self.adapters and given not in self.weights:
            known = ", ".join(other for other in (*self.adapters, *self.weights) if other) or "none"
            what = "an adapter" if base == "packet" else "weights or an adapter"
            raise ValueError(f"methods: {name} needs {what} named {given!r}; those given are {known}")
        uses = getattr(self.methods[name], "adapter", False)
        return wanted if wanted in self.weights else "", wanted if uses and wanted in self.adapters else ""

    def _context(self, weights: str, adapter: str, **options: Any) -> Context:
        own = self.weights.get(weights, Weights())
        soft = self.adapters.get(adapter) if adapter or own.adapter is None else own.adapter
        model = self.model if own.model is None else own.model
        return Context(model, self.tokenizer, adapter=soft, swiftkv=own.swiftkv, **options)

    def _fingerprint(self, name: str) -> str | None:
        """Of the weights and the adapter that a method uses, so that a record of others is not taken for its."""
        own, soft = self.weights_of(name), self.context_of(name).adapter
        parts = [own.fingerprint()] if own is not None else []
        if getattr(self.methods[name], "adapter", False) and soft is not None:
            parts.append(soft.fingerprint()[:16])
        return "+".join(parts) or None

    def _share(self, task: TaskSpec) -> Iterator[tuple[int, Sample]]:
        """(number, sample) of this process's shard; questions on the same documents stay together."""
        index, count = self.plan.shard
        context, last = -1, None
        for number, sample in enumerate(self.samples[task.text]):
            if sample.documents != last:
                context, last = context + 1, sample.documents
            if context % count == index:
                yield number, sample

    def _shares_documents(self, task: TaskSpec, number: int) -> bool:
        samples = self.samples[task.text]
        near = [samples[other].documents for other in (number - 1, number + 1) if 0 <= other < len(samples)]
        return samples[number].documents in near

    def _turns(self, number: int) -> list[str]:
        names = list(self.methods)
        shift = number % len(names)
        return names[shift:] + names[:shift]

    def _wanted(self, task: TaskSpec, number: int, sample: Sample, name: str) -> bool:
        row = self._find(task, sample, name)
        if row is None:
            return True
        timed, whole = number < self.plan.timed, number < self.plan.end_to_end
        missing = row["ttft_s"] is None or (self.plan.steps > 0 and row.get("step_s") is None)
        return (timed and missing) or (whole and row["end_to_end_s"] is None)

    def _find(self, task: TaskSpec, sample: Sample, name: str) -> Record | None:
        key = {
            "task": task.text,
            "digest": sample_digest(sample),
            "method": name,
            "adapter": self._fingerprints[name],
            "max_new_tokens": self.plan.limit(task),
        }
        if self.journal is not None:
            return self.journal.get(**key)
        return next((row for row in self._memory if all(row[field] == value for field, value in key.items())), None)

    def _keep(self, record: Record) -> None:
        if self.journal is not None:
            self.journal.add(record)
        else:
            self._memory.append(record)


def sample_digest(sample: Sample) -> str:
    """16 hex digits over everything in a sample but its id."""
    fields = asdict(sample)
    fields.pop("id")
    if not sample.checks:  # so that journals from before there were any stay good
        fields.pop("checks")
    return _digest(fields)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
