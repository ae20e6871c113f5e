"""A table as the terminal and Markdown draw it, each in its way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Table", "markdown", "three_digits"]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells.

    Attributes
    ----------
    title : str
        What the columns mean; may be empty.
    columns : tuple of str
        One that begins with ">" is flush right.
    rows : list of tuple of str
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def three_digits(number: float) -> str:
    """A number with three significant digits, or all of its whole ones: never with an exponent."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def markdown(table: Table) -> Iterator[str]:
    """The lines of a table in Markdown.

    Examples
    --------
    >>> for line in markdown(Table("", ("who", ">ms"), [("ALiBi", "3")])):
    ...     print(line)
    | who | ms |
    | --- | ---: |
    | ALiBi | 3 |
    """
    if table.title:
        yield table.title
        yield ""
    heads = [column.removeprefix(">") for column in table.columns]
    rules = ["---:" if column.startswith(">") else "---" for column in table.columns]
    for row in (heads, rules, *table.rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
