"""`qkv compare`: all mechanisms on the same five tokens, as a table, JSON or a picture."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from qkv.cli.terminal import Page
from qkv.errors import ArgumentError, UnsupportedError
from qkv.files.writing import replace_file
from qkv.mechanisms.comparison import Comparison, ComparisonRow, compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["picture", "run"]

_COLUMNS = 6
"""Pictures in a row."""


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    found = compare(options.mechanisms)
    if options.plot is not None:
        replace_file(options.plot, picture(found, Path(options.plot).suffix.removeprefix(".")))
    return found.to_json(2) + "\n" if options.json else _text(found)


def _text(found: Comparison) -> str:
    page = Page()
    # The middle token is shown because it has tokens before and after it.
    index = len(found.tokens) // 2
    token = found.tokens[index]
    table = page.table("mechanism", f"weights of {token}", f"output of {token}", ">difference")
    for row in found.rows:
        weights = " ".join(f"{weight:.2f}" for weight in row.mixing[:, index].mean(axis=0))
        output = " ".join(f"{number:.2f}" for number in row.output[index])
        table.add_row(*map(Text, (row.name, weights, output, f"{row.difference:.4f}")))
    lines = [
        f"Tokens: {' '.join(found.tokens)}. Q, K and V are those of qkv explain.",
        "Weights are averaged over heads; where there are none, an effective token-mixing matrix.",
        "Difference: the largest of any token, from softmax(Q K^T / sqrt(d)) V.",
        f"Step by step: qkv explain --mechanism {found.rows[0].name}",
    ]
    return page.render(table, Text(), *map(Text, lines))


def picture(found: Comparison, kind: str) -> bytes:
    """The matrices of all mechanisms as one picture.

    Parameters
    ----------
    found : Comparison
    kind : str
        What matplotlib calls the format, such as "png".

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    ArgumentError
        matplotlib does not write this format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "--plot needs matplotlib, which is not installed.",
            action="Run pip install 'qkv[plot]'.",
        ) from error
    columns = min(_COLUMNS, len(found.rows))
    lines = -(-len(found.rows) // columns)
    figure = Figure(figsize=(2.2 * columns, 2.5 * lines), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if kind not in kinds:
        raise ArgumentError(
            f"--plot cannot write {kind!r:.60} files.", action=f"Use one of {', '.join(kinds)}."
        )
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, row in zip(axes, found.rows, strict=False):
        _draw(axis, row, found.tokens)
    memory = io.BytesIO()
    figure.savefig(memory, format=kind)
    return memory.getvalue()


def _draw(axis: Axes, row: ComparisonRow, tokens: tuple[str, ...]) -> None:
    mixing = row.mixing.mean(axis=0)
    # Differential attention has negative weights, so the colour scale is symmetric.
    largest = float(np.abs(mixing).max())
    axis.set_axis_on()
    axis.imshow(mixing, cmap="RdBu_r", vmin=-largest, vmax=largest)
    axis.set_title(f"{row.name}\n{row.difference:.3f} from full", fontsize=8)
    axis.set_xticks(range(mixing.shape[1]), tokens[: mixing.shape[1]], fontsize=6)
    axis.set_yticks(range(mixing.shape[0]), tokens, fontsize=6)
