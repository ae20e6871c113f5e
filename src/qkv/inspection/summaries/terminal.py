"""Text for terminals: tables, printable tokens, weights."""

from __future__ import annotations

import os
import sys

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from qkv.inspection.rendering.tokens import printable

__all__ = ["Page", "weight"]

LONGEST_TOKEN = 16
"""Columns of a token in a table."""


class Page:
    """Builds a text and renders it for standard output."""

    def __init__(self) -> None:
        # Texts come from files, so nothing in them is interpreted as markup or emoji.
        # rich would still print bold and faint where NO_COLOR is set; many read it as: no codes.
        self.console = Console(
            file=sys.stdout,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=False,
            force_jupyter=False,  # rich would display there what is to be returned as text
            color_system=None if os.environ.get("NO_COLOR") else "auto",
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

    def table(self, *columns: str, gap: int = 2) -> Table:
        """A table with a line under its head; columns whose name begins with `>` are numbers.

        Where it is too wide for the terminal, each row becomes a list with a line for each cell.
        """
        rule = "-" if self.ascii else "─"
        blank = "    \n"
        box = Box(2 * blank + f" {rule}{rule} \n" + 5 * blank, ascii=self.ascii)
        table = _Table(box=box, pad_edge=False, show_edge=False, padding=(0, gap - 1, 0, 0))
        for column in columns:
            name = column.removeprefix(">")
            table.add_column(Text(name), justify="left" if name == column else "right")
        return table

    def render(self, *parts: RenderableType) -> str:
        """All parts, one below the other; texts marked as unwrapped keep their lines."""
        with self.console.capture() as capture:
            for part in parts:
                whole = isinstance(part, Text) and part.no_wrap
                self.console.print(part, soft_wrap=whole)
        return "\n".join(line.rstrip() for line in capture.get().split("\n"))


class _Table(Table):
    """A table that becomes a list where its longest words do not fit beside each other."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=10_000)
        if Measurement.get(console, unbounded, self).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        names = [str(column.header) for column in self.columns]
        label = max(map(len, names)) + 2
        for row in zip(*(column.cells for column in self.columns), strict=True):
            for name, cell in zip(names, row, strict=True):
                if not str(cell):
                    continue
                if not name:
                    yield cell
                    continue
                line = Table.grid()
                line.add_column(width=label)
                line.add_column()
                line.add_row(Text(name, style="dim"), cell)
                yield Padding(line, (0, 0, 0, 0 if name == names[0] else 2))
            yield Text()


def weight(value: float) -> Text:
    """A weight of 0 to 1, faint if small and strong if large; a dash for NaN."""
    if value != value:
        return Text("-", style="dim")
    return Text(f"{value:.2f}", style="bold" if value >= 0.5 else "dim" if value < 0.05 else "")
