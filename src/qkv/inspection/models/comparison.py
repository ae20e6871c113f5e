"""Two records of models side by side: what changes in each head from one to the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked
from qkv.errors import ShapeError
from qkv.inspection.heads.head_table import HeadTable, as_frame
from qkv.inspection.heads.score_rows import SCORES, require_score
from qkv.inspection.rendering.counts import counted, words_of_tokens
from qkv.inspection.rendering.pictures import picture_of_differences
from qkv.inspection.rendering.tokens import joined, printable
from qkv.inspection.summaries import in_html

__all__ = ["HeadComparison"]

_LONGEST_TEXT = 70
_LEAST = 0.0005
"""A smaller difference is printed as 0.000."""


class ComparedHeads(NamedTuple):
    """One of two records that are compared.

    Attributes
    ----------
    model : str
        Its name.
    text : str
        How many tokens it has, and the beginning of what they say, as far as that is known.
    rows : HeadTable
        One row for each head.
    """

    model: str
    text: str
    rows: HeadTable

    @classmethod
    def of(
        cls,
        model: str,
        rows: HeadTable,
        texts: Sequence[str] | None,
        tokens: NDArray[Any] | None = None,
    ) -> ComparedHeads:
        """The heads of a record with these tokens, as text or as ids (batch, length)."""
        if texts is None:
            return cls(model, words_of_tokens(tokens), rows)
        said = printable(joined(texts), _LONGEST_TEXT)
        return cls(model, f"{counted(len(texts), 'token')}: {said}", rows)

    @property
    def layers(self) -> int:
        """How many layers have heads."""
        return len({row["layer"] for row in self.rows})


@checked
class HeadComparison:
    """The heads of two records, and how far each mean score is from one to the other.

    Made by `ModelRecord.compare`: one model on two texts, or two models of the same shape, such as
    before and after fine-tuning, on one.

    Attributes
    ----------
    first, second : ComparedHeads

    Examples
    --------
    >>> import qkv.samples
    >>> model = qkv.samples.tiny_model()
    >>> repeats = model.inspect("the cat. the cat. the cat.")
    >>> plain = model.inspect("a quick dog jumps over it.")
    >>> comparison = repeats.compare(plain)
    >>> comparison
    HeadComparison('tiny' and 'tiny', 2 layers, 8 heads)
    >>> row = comparison.largest("entropy", 1)[0]
    >>> bool(abs(row["second"] - row["first"] - row["difference"]) < 1e-12)
    True
    """

    def __init__(self, first: ComparedHeads, second: ComparedHeads) -> None:
        _require_same_heads(first, second)
        self.first, self.second = first, second

    def __repr__(self) -> str:
        return (
            f"HeadComparison({self.first.model!r} and {self.second.model!r}, {_sizes(self.first)})"
        )

    def rows(self) -> HeadTable:
        """One row for each layer and head.

        Returns
        -------
        HeadTable
            Columns layer, head, first_kind, second_kind, and for each score the second mean less
            the first; NaN where a score applies to one record at most.
        """
        return HeadTable(
            {
                "layer": a["layer"],
                "head": a["head"],
                "first_kind": a["kind"],
                "second_kind": b["kind"],
                **{score: b[score] - a[score] for score in SCORES},
            }
            for a, b in zip(self.first.rows, self.second.rows, strict=True)
        )

    def to_pandas(self) -> Any:
        """The rows as a table of pandas.

        Raises
        ------
        UnsupportedError
            pandas is not installed; `rows()` needs none.
        """
        return as_frame(self.rows())

    def largest(self, score: str, count: int = 8) -> HeadTable:
        """The heads in which a score differs most.

        Parameters
        ----------
        score : str
            One of `qkv.inspection.heads.head_scores.SCORES`.
        count : int
            Rows, at most.

        Returns
        -------
        HeadTable
            Columns layer, head, first_kind, second_kind, first, second, difference; the largest
            absolute difference first, and no head to which the score does not apply.

        Raises
        ------
        ArgumentError
            There is no such score.
        """
        require_score(score)
        table = [
            {
                **{name: row[name] for name in ("layer", "head", "first_kind", "second_kind")},
                "first": a[score],
                "second": b[score],
                "difference": row[score],
            }
            for row, a, b in zip(self.rows(), self.first.rows, self.second.rows, strict=True)
            if np.isfinite(row[score])
        ]
        table.sort(key=lambda row: (-abs(row["difference"]), row["layer"], row["head"]))
        return HeadTable(table[: max(count, 0)])

    def _repr_html_(self) -> str:
        return in_html(str(self))

    def __str__(self) -> str:
        """The two texts, and of each score the head in which it differs most."""
        pairs = list(zip(self.first.rows, self.second.rows, strict=True))
        changed = sum(a["kind"] != b["kind"] for a, b in pairs)
        lines = [
            f"{name:<7} {printable(heads.model, 40)}, {heads.text}"
            for name, heads in (("first", self.first), ("second", self.second))
        ]
        lines += ["", f"Heads of another kind in the second: {changed} of {len(pairs)}.", ""]
        best = HeadTable(
            {"score": score, **row}
            for score in SCORES
            for row in self.largest(score, 1)
            if abs(row["difference"]) >= _LEAST
        )
        if not best:
            return "\n".join([*lines, f"No mean score differs by {_LEAST} or more."])
        return "\n".join([*lines, "The head in which each mean score differs most:", repr(best)])

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        score: str = "entropy",
        *,
        ax: Any = None,
    ) -> Any:
        """Draw how far one score is from the first record to the second, layers by heads.

        Parameters
        ----------
        path, score, ax
            As for `ModelRecord.plot`.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ArgumentError
            There is no such score.
        UnsupportedError, FileError
            matplotlib is not installed; the file cannot be written.
        """
        names = self.first.model, self.second.model
        same = names[0] == names[1]
        title = f"{names[0]}, second less first" if same else f"{names[1]} less {names[0]}"
        return picture_of_differences(path, ax, self.rows().grid(score), score, title)


def _sizes(heads: ComparedHeads) -> str:
    return f"{counted(heads.layers, 'layer')}, {counted(len(heads.rows), 'head')}"


def _require_same_heads(first: ComparedHeads, second: ComparedHeads) -> None:
    places = [[(row["layer"], row["head"]) for row in each.rows] for each in (first, second)]
    if places[0] == places[1] and places[0]:
        return
    raise ShapeError(
        f"records of {_sizes(first)} and of {_sizes(second)} cannot be compared head by head.",
        [("first", printable(first.model, 60)), ("second", printable(second.model, 60))],
        "Compare records of models with the same layers and heads.",
    )
