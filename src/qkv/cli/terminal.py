"""Terminal output of commands: tables, printable tokens, a progress bar."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from qkv.inspection.tokens import printable

if TYPE_CHECKING:
    from rich.progress import Progress

LONGEST_TOKEN = 16
"""Columns of a token in a table."""

BAR_AFTER = 0.5
"""Seconds after which work counts as long."""


class Page:
    """Builds the output of a command and renders it as text for standard output."""

    def __init__(self) -> None:
        # Texts come from files, so nothing in them is interpreted as markup or emoji.
        self.console = Console(
            file=sys.stdout, markup=False, highlight=False, emoji=False, soft_wrap=False
        )
        encoding = self.console.encoding
        self.ascii = not encoding.startswith("utf")
        self.arrow = "->" if self.ascii else "→"
        self.full = "#" if self.ascii else "█"

    @property
    def width(self) -> int:
        return self.console.width

    def token(self, token: str | None, longest: int = LONGEST_TOKEN) -> str:
        """A token that no terminal acts on, in characters that it can show."""
        text = printable(token or "", longest)
        return text.encode("ascii", "backslashreplace").decode() if self.ascii else text

    def table(self, *columns: str) -> Table:
        """A table with a line under its head; columns whose name begins with `>` are numbers."""
        rule = "-" if self.ascii else "─"
        blank = "    \n"
        box = Box(2 * blank + f" {rule}{rule} \n" + 5 * blank, ascii=self.ascii)
        table = Table(box=box, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for column in columns:
            name = column.removeprefix(">")
            table.add_column(Text(name), justify="left" if name == column else "right")
        return table

    def render(self, *parts: RenderableType) -> str:
        """All parts, one below the other; a text that is not to be wrapped stays whole."""
        with self.console.capture() as capture:
            for part in parts:
                whole = isinstance(part, Text) and part.no_wrap
                self.console.print(part, soft_wrap=whole)
        return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def weight(value: float) -> Text:
    """A weight of 0 to 1, faint if small and strong if large."""
    return Text(f"{value:.2f}", style="bold" if value >= 0.5 else "dim" if value < 0.05 else "")


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
