"""Mechanisms side by side on the shared five tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Indent, checked
from qkv.inspection.rendering.pictures import save_picture
from qkv.mechanisms.base.example import example_tokens
from qkv.mechanisms.lookup.scaled_dot_product import ScaledDotProduct
from qkv.mechanisms.registry import MECHANISMS, mechanism_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Comparison", "ComparisonRow", "compare"]

_COLUMNS = 6
"""Pictures in a row."""

SCHEMA, VERSION = "qkv-compare", 1


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonRow:
    """One mechanism on the shared example.

    Attributes
    ----------
    name, formula, paper : str
    mixing : array (num_heads, 5, m)
        Weights, or the effective token-mixing matrix, of m tokens that are read.
    output : array (5, 4)
    difference : float
        Largest absolute difference from the output of full attention.
    """

    name: str
    formula: str
    paper: str
    mixing: NDArray[Any]
    output: NDArray[Any]
    difference: float

    @property
    def causal(self) -> bool:
        """Whether no token takes anything of a later one."""
        *_, rows, columns = self.mixing.shape
        return rows == columns and not np.triu(self.mixing, 1).any()


@checked
@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Mechanisms on the shared example; `to_json()` is strict JSON.

    Attributes
    ----------
    tokens : tuple of str
        Names of the five tokens.
    rows : tuple of ComparisonRow

    Examples
    --------
    >>> import qkv.mechanisms
    >>> comparison = qkv.mechanisms.compare(["scaled-dot-product", "linear"])
    >>> [row.name for row in comparison.rows], comparison.tokens[0]
    (['scaled-dot-product', 'linear'], 'The')
    """

    tokens: tuple[str, ...]
    rows: tuple[ComparisonRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        rows = [
            {
                "mechanism": row.name,
                "formula": row.formula,
                "paper": row.paper,
                "token_mixing": row.mixing.tolist(),
                "output": row.output.tolist(),
                "difference_from_full_attention": row.difference,
                "causal": row.causal,
            }
            for row in self.rows
        ]
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "tokens": list(self.tokens),
            "mechanisms": rows,
        }

    def to_json(self, indent: Indent | None = None) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the matrices of all mechanisms to a file, averaged over heads.

        The path and the errors are those of `qkv.Record.plot`.
        """
        columns = min(_COLUMNS, len(self.rows))
        lines = -(-len(self.rows) // columns)

        def draw(figure: Figure) -> None:
            axes = figure.subplots(lines, columns, squeeze=False).ravel()
            for axis in axes:
                axis.set_axis_off()
            for axis, row in zip(axes, self.rows, strict=False):
                _draw(axis, row, self.tokens)

        save_picture(path, (2.2 * columns, 2.5 * lines), draw)


@checked
def compare(names: Sequence[str] = ()) -> Comparison:
    """Run mechanisms on the shared five tokens and compare them with full attention.

        difference = max |output - softmax(Q K^T / sqrt(d)) V|

    Parameters
    ----------
    names : sequence of str
        Command-line names, in the order wanted; all of `MECHANISMS` by default.

    Returns
    -------
    Comparison

    Raises
    ------
    ArgumentError
        There is no mechanism of that name.

    Notes
    -----
    Each mechanism runs as its `example()`, whose projections select Q, K and V; see the docstring
    of that method for heads, windows and the like.

    Examples
    --------
    >>> from qkv.mechanisms import compare
    >>> [(row.name, round(row.difference, 2)) for row in compare(["flash", "causal"]).rows]
    [('flash', 0.0), ('causal', 0.77)]
    """
    full = ScaledDotProduct.example()(*ScaledDotProduct.example_arguments())
    rows = []
    for name in names or MECHANISMS:
        cls = mechanism_class(name)
        mechanism, arguments = cls.example(), cls.example_arguments()
        output = mechanism(*arguments)
        mixing = np.asarray(mechanism.token_mixing(*arguments))
        mixing = mixing if mixing.ndim == 3 else mixing[None]
        difference = float(np.abs(output - full).max())
        rows.append(ComparisonRow(name, cls.formula, cls.paper, mixing, output, difference))
    return Comparison(example_tokens(), tuple(rows))


def _draw(axis: Axes, row: ComparisonRow, tokens: tuple[str, ...]) -> None:
    mixing = row.mixing.mean(axis=0)
    # Differential attention has negative weights, so the colour scale is symmetric.
    largest = float(np.abs(mixing).max())
    axis.set_axis_on()
    axis.imshow(mixing, cmap="RdBu_r", vmin=-largest, vmax=largest)
    axis.set_title(f"{row.name}\n{row.difference:.3f} from full", fontsize=8)
    axis.set_xticks(range(mixing.shape[1]), tokens[: mixing.shape[1]], fontsize=6)
    axis.set_yticks(range(mixing.shape[0]), tokens, fontsize=6)
