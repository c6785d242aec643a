# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""One patched model, requests of different depths: each says how deep it goes, and none disturbs another.

A request's rule is a context variable, so that it holds in the thread that asks and in no other. What a forward does
follows from its plan, which is made under the rule; the hooks of layers that the plan leaves alone do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from kvspeed.rule import SpeedSpec

__all__ = ["ANY_TASK", "REQUEST", "ByTask", "checked_by_task", "depth_of_task"]

ByTask = Mapping[str, int] | Callable[[str], int]

ANY_TASK = "*"  # the key of a mapping for tasks that it does not name

# (the patch that is asked, its rule for this request), innermost; another model's generate may run within a request.
REQUEST: ContextVar[tuple[Any, SpeedSpec | None] | None] = ContextVar("kvspeed_request", default=None)


def checked_by_task(k_by_task: Any, layers: int) -> ByTask | None:
    """What `patch_model` was given as `k_by_task`, a mapping copied.

    Raises:
        TypeError: neither a mapping of task names to ints nor a callable.
        ValueError: a mapping without tasks, or with a depth that the model does not have.
    """
    if k_by_task is None:
        return None
    if not isinstance(k_by_task, Mapping):
        if callable(k_by_task):
            return k_by_task
        raise TypeError(
            f"k_by_task is {k_by_task!r:.80} ({type(k_by_task).__name__}); it must be a mapping of task names to "
            "depths, or a function from one to the other"
        )
    if not k_by_task:
        raise ValueError("k_by_task names no task; leave it out, or give a depth for at least one task")
    for task, k in k_by_task.items():
        if not isinstance(task, str):
            raise TypeError(f"k_by_task has the key {task!r} ({type(task).__name__}); tasks must be strings")
        _check_depth(f"k_by_task[{task!r}]", k, layers)
    return dict(k_by_task)


def depth_of_task(k_by_task: ByTask | None, task: Any, layers: int) -> int:
    """The depth for requests of a task.

    Raises:
        TypeError: `task` is no string, or a function gave no int.
        ValueError: there are no depths by task, none for this task, or a function gave one the model does not have.
    """
    if not isinstance(task, str):
        raise TypeError(f"task is {task!r} ({type(task).__name__}); it must be a string")
    if k_by_task is None:
        raise ValueError(
            f'task is {task!r}, and the model was patched without depths by task: give k_by_task (or k="auto") to '
            "patch_model, or ask for a k"
        )
    if not isinstance(k_by_task, Mapping):
        k = k_by_task(task)
        _check_depth(f"k_by_task({task!r})", k, layers)
        return k
    found = k_by_task.get(task, k_by_task.get(ANY_TASK))
    if found is None:
        raise ValueError(
            f"task is {task!r}, and k_by_task names {', '.join(map(repr, k_by_task))}: give one of these, or a depth "
            f"for all others under {ANY_TASK!r}"
        )
    return found


def _check_depth(name: str, k: Any, layers: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"{name} is {k!r} ({type(k).__name__}); it must be an int")
    if not 1 <= k <= layers:
        raise ValueError(f"{name} is {k} and the model has {layers} layers; give 1 to {layers}")
