"""Two records of models side by side: what changes in each head from one to the other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkv.declarations import checked
from qkv.errors import ArgumentError, ShapeError
from qkv.inspection.head_scores import SCORES
from qkv.inspection.head_table import HeadTable, as_frame
from qkv.inspection.pictures import draw_head_differences, picture
from qkv.inspection.tokens import printable

if TYPE_CHECKING:
    from qkv.inspection.model_record import ModelRecord

__all__ = ["HeadComparison"]

Array = NDArray[Any]
_LONGEST_TEXT = 70


@checked
class HeadComparison:
    """The heads of two records, and how far each mean score is from one to the other.

    Made by `ModelRecord.compare`: one model on two texts, or two models of the same shape, such as
    before and after fine-tuning, on one.

    Attributes
    ----------
    first, second : ModelRecord

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

    def __init__(self, first: ModelRecord, second: ModelRecord) -> None:
        _require_same_heads(first, second)
        self.first, self.second = first, second
        self._before, self._after = first.rows(), second.rows()

    def __repr__(self) -> str:
        return (
            f"HeadComparison({self.first.model!r} and {self.second.model!r}, "
            f"{len(self.first)} layers, {len(self._before)} heads)"
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
            for a, b in zip(self._before, self._after, strict=True)
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
            One of `qkv.inspection.head_scores.SCORES`.
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
        _require_score(score)
        table = [
            {
                **{name: row[name] for name in ("layer", "head", "first_kind", "second_kind")},
                "first": a[score],
                "second": b[score],
                "difference": row[score],
            }
            for row, a, b in zip(self.rows(), self._before, self._after, strict=True)
            if np.isfinite(row[score])
        ]
        table.sort(key=lambda row: (-abs(row["difference"]), row["layer"], row["head"]))
        return HeadTable(table[: max(count, 0)])

    def __str__(self) -> str:
        """The two texts, and of each score the head in which it differs most."""
        pairs = list(zip(self._before, self._after, strict=True))
        changed = sum(a["kind"] != b["kind"] for a, b in pairs)
        lines = [
            f"{name:<7} {printable(record.model, 40)}, {_described(record)}"
            for name, record in (("first", self.first), ("second", self.second))
        ]
        lines += ["", f"Heads of another kind in the second: {changed} of {len(pairs)}.", ""]
        best = [(score, row) for score in SCORES for row in self.largest(score, 1)]
        lines += ["The head in which each mean score differs most:"]
        lines += [repr(HeadTable({"score": score, **row} for score, row in best))]
        return "\n".join(lines)

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
        _require_score(score)
        widest = max(layer.num_heads for layer in self.first)
        differences = np.full((len(self.first), widest), np.nan)
        for row in self.rows():
            differences[row["layer"], row["head"]] = row[score]
        size = min(14.0, 2.5 + 0.4 * widest), min(14.0, 2.0 + 0.4 * len(self.first))
        names = self.first.model, self.second.model
        title = (
            f"{names[0]}, second less first" if names[0] == names[1] else " less ".join(names[::-1])
        )
        return picture(
            path, ax, size, lambda axes: draw_head_differences(axes, differences, score, title)
        )


def _described(record: ModelRecord) -> str:
    """How many tokens a record has, and what they say, as far as that is known."""
    if record.texts is None:
        return f"{record.layers[0].rows['entropy'].shape[-1]} queries"
    text = printable("".join(record.texts), _LONGEST_TEXT)
    return f"{len(record.texts)} tokens: {text}"


def _require_score(score: str) -> None:
    if score not in SCORES:
        raise ArgumentError(
            f"there is no score {score!r:.60}.",
            [("scores", ", ".join(SCORES))],
            "Choose one of these.",
        )


def _require_same_heads(first: ModelRecord, second: ModelRecord) -> None:
    heads = [[layer.num_heads for layer in record] for record in (first, second)]
    if heads[0] == heads[1] and heads[0]:
        return
    raise ShapeError(
        f"records of {len(first)} layers with {sum(heads[0])} heads and of {len(second)} layers "
        f"with {sum(heads[1])} heads cannot be compared head by head.",
        [("first", printable(first.model, 60)), ("second", printable(second.model, 60))],
        "Compare records of models with the same layers and heads.",
    )
