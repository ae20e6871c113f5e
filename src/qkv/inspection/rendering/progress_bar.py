"""The progress bar of commands and pictures that take long."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bar"]

BAR_AFTER = 0.5
"""Seconds after which work counts as long."""


class Bar:
    """A progress bar on standard error, if that is a terminal and the work takes long.

    Called with `(done, total)` by each of `passes` passes over the weights.
    """

    def __init__(self, label: str, passes: int) -> None:
        self._label = label
        self._passes = passes
        self._finished = 0
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._console = Console(stderr=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        share = (self._finished + done / max(total, 1)) / self._passes
        if done >= total:
            self._finished += 1
        if self._bar is None and self._console.is_terminal:
            self._start()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=share)

    def _start(self) -> None:
        if time.monotonic() - self._began < BAR_AFTER:
            return
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._bar.add_task(self._label, total=1.0)
        self._bar.start()
