"""Tables with one row for each head, printed as tables, or as those of pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import UnsupportedError
from qkv.inspection.heads.score_rows import require_score

__all__ = ["HeadTable", "Table", "as_frame", "frame_or_table", "mean_of_known", "table_of_means"]

Array = NDArray[Any]


class Table(list[dict[str, Any]]):
    """Rows of a table; printed as one."""

    def __repr__(self) -> str:
        if not self:
            return f"{type(self).__name__}([])"
        columns = [(name, [_cell(row[name]) for row in self]) for name in self[0]]
        widths = [max(len(name), *map(len, cells)) for name, cells in columns]
        names, cells = [name for name, _ in columns], zip(*(c for _, c in columns), strict=True)
        lines = [
            "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
            for line in (names, *cells)
        ]
        return "\n".join(lines)


class HeadTable(Table):
    """Rows of a table, one for each head of a model."""

    def best(self, score: str) -> dict[str, Any] | None:
        """The row with the largest mean of a score; None if it applies to none.

        Raises
        ------
        ArgumentError
            If there is no such score; the message has their names.
        """
        require_score(score)
        rows = [row for row in self if np.isfinite(row[score])]
        return max(rows, key=lambda row: row[score], default=None)

    def grid(self, score: str) -> NDArray[np.float64]:
        """A score as an array, layers down and heads across; NaN where there is no head."""
        require_score(score)
        shape = [1 + max((row[place] for row in self), default=-1) for place in ("layer", "head")]
        scores = np.full(shape, np.nan)
        for row in self:
            scores[row["layer"], row["head"]] = row[score]
        return scores


def as_frame(table: Table) -> Any:
    """The table as a pandas.DataFrame.

    Raises
    ------
    UnsupportedError
        pandas is not installed.
    """
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise UnsupportedError(
            "a table of pandas needs pandas, which is not installed.",
            action="pip install pandas, or call rows(), which is a list of dicts.",
        ) from error
    return pandas.DataFrame(list(table))


def table_of_means(statistics: Mapping[str, Array], shape: Sequence[int]) -> Table:
    """A row for each batch row and head: means over the queries where a statistic is not NaN.

    Parameters
    ----------
    statistics : mapping of str to array
    shape : sequence of int
        (..., num_heads, q_len) of each, or (q_len,) for one head.

    Examples
    --------
    >>> table_of_means({"entropy": np.array([[0.5, np.nan], [1.0, 0.0]])}, (1, 2, 2))
    batch  head  entropy
        0     0    0.500
        0     1    0.500
    """
    *batch_shape, num_heads, q_len = (1, *shape) if len(shape) == 1 else shape
    whole = prod(batch_shape), num_heads, q_len
    shaped = {name: rows.reshape(whole) for name, rows in statistics.items()}
    return Table(
        {
            "batch": batch,
            "head": head,
            **{name: mean_of_known(rows[batch, head]) for name, rows in shaped.items()},
        }
        for batch, head in np.ndindex(*whole[:2])
    )


def mean_of_known(rows: Array) -> float:
    """The mean over what is not NaN; NaN of nothing."""
    there = rows[~np.isnan(rows)]
    return float(np.mean(there, dtype=np.float64)) if len(there) else float("nan")


def frame_or_table(table: HeadTable) -> Any:
    """The table as a pandas.DataFrame where pandas is installed, else as it is."""
    try:
        return as_frame(table)
    except UnsupportedError:
        return table


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:z.3f}" if isinstance(value, float) else str(value)
