# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""Saying how far a long piece of work is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Progress", "reporting"]

Progress = bool | Callable[[int, int], Any] | None


@contextmanager
def reporting(progress: Progress, what: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Yields a function to call with the number done so far.

    Args:
        progress: a function of (done, total); True: a bar on stderr where that is a terminal; None or False: nothing.
        what: the bar's label.
        total: of all steps.
    """
    if callable(progress):
        yield lambda done: progress(done, total)
        return
    if not progress:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
