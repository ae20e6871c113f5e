"""Pictures for papers: weights, head scores and tile schedules as SVG, PNG or PDF.

They need matplotlib. Without their date and with fixed names, the same numbers give the same file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked, shown
from qkv.errors import ArgumentError, UnsupportedError
from qkv.extras import install_command
from qkv.files.writing import replace_file
from qkv.inspection.rendering.tokens import printable
from qkv.problem.tiles import TileGrid, TileKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "LONGEST", "draw_tiles", "draw_weights", "picture", "picture_of_differences",
    "picture_of_heads", "save_picture",
]  # fmt: skip

Array = NDArray[Any]

LONGEST = 1024
"""Rows and columns of a picture of weights; longer ones show the largest weight of blocks."""

_FORMATS = ("pdf", "png", "svg")
_MOST_NAMES = 40
"""Tokens that are written beside a picture, at most."""

_COLOURS = ("#f4f7fc", "#8eb0dd", "#16498a")
"""The colours of the smallest, a middle and the largest weight: those of the lab in the light."""
_COLOURS_OF_DIFFERENCES = ("#b35806", "#f7f7f7", "#16498a")
"""The colours of less, equal and more; they are told apart with any kind of colour vision."""

_KINDS = {
    TileKind.EMPTY: ("skipped", "#ffffff"),
    TileKind.PARTIAL: ("partial: the mask is evaluated", "#7fcdbb"),
    TileKind.FULL: ("full: no mask needed", "#2c7fb8"),
}


@checked
def save_picture(
    path: str | os.PathLike[str], size: tuple[float, float], draw: Callable[[Figure], None]
) -> None:
    """Draw a figure and write it to a file.

    Parameters
    ----------
    path : path
        Its ending says the format: .svg, .png or .pdf.
    size : (width, height)
        In inches.
    draw : callable (figure)

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    ArgumentError
        The ending is another.
    FileError
        The file cannot be written.
    """
    kind = os.path.splitext(path)[1].removeprefix(".").lower()
    if kind not in _FORMATS:
        raise ArgumentError(
            f"{shown(str(path), 100)} does not end in {', '.join(f'.{f}' for f in _FORMATS)}.",
            action="Name a file with one of these endings.",
        )
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _no_matplotlib() from error
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "qkv"}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        metadata = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
        figure.savefig(file, format=kind, metadata=metadata, dpi=150)
    replace_file(path, file.getvalue())


def picture(
    path: str | os.PathLike[str] | None,
    ax: Any,
    size: tuple[float, float],
    draw: Callable[[Axes], None],
) -> Axes:
    """Draw in a file, in axes of the caller, or in a new figure of pyplot, as notebooks show it.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ArgumentError
        Both a path and axes are given, or `ax` is something else.
    UnsupportedError, FileError
        As `save_picture`.
    """
    if ax is not None and not hasattr(type(ax), "imshow"):
        raise ArgumentError(
            f"ax={shown(ax)} is not axes of matplotlib.",
            action="Pass what pyplot.subplots() returns second.",
        )
    if path is not None:
        if ax is not None:
            raise ArgumentError(
                "a picture goes to a file or into axes, and both are given.",
                action="Leave one out; ax.figure.savefig(path) writes what was drawn.",
            )
        made: list[Axes] = []

        def draw_alone(figure: Figure) -> None:
            made.append(figure.subplots())
            draw(made[0])

        save_picture(path, size, draw_alone)
        return made[0]
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise _no_matplotlib() from error
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    draw(ax)
    axes: Axes = ax
    return axes


def _no_matplotlib() -> UnsupportedError:
    return UnsupportedError(
        "a picture needs matplotlib, which is not installed.",
        action=f"Install it, as with {install_command('plot')}.",
    )


def _colour_map(colours: Sequence[str]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("qkv", colours)


def draw_weights(
    axes: Axes, weights: Array, title: str, tokens: Sequence[str] | None, block: int
) -> None:
    """Weights `(queries, keys)` as a picture, queries down and keys across.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
    weights : array (rows, columns)
        Of single pairs, or the largest of blocks of `block` x `block`.
    title : str
    tokens : sequence of str or None
        Names of the keys, and of the queries where there are as many.
    block : int
    """
    from matplotlib.colors import PowerNorm

    extent = (-0.5, block * weights.shape[1] - 0.5, block * weights.shape[0] - 0.5, -0.5)
    # Most weights are small: on a scale of square roots they differ visibly from 0.
    norm = PowerNorm(0.5, 0.0, max(float(np.nan_to_num(weights).max()), 1e-30))
    colours = _colour_map(_COLOURS)
    image = axes.imshow(weights, cmap=colours, norm=norm, extent=extent, interpolation="nearest")
    largest = f", largest of {block} x {block}" if block > 1 else ""
    axes.figure.colorbar(image, ax=axes, label=f"weight{largest}", shrink=0.8)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(title, parse_math=False)
    if tokens is not None:
        every = -(-len(tokens) // _MOST_NAMES)
        places = range(0, len(tokens), every) if tokens else range(0)
        names = [printable(tokens[place]) for place in places]
        left_out = f" ({len(names)} of {len(tokens)} are named)" if every > 1 else ""
        axes.set_xticks(places, names, rotation=90, fontsize=7, parse_math=False)
        axes.set(xlabel=f"key{left_out}")
        # Rows of a block stand for as many queries.
        if -(-len(tokens) // block) == weights.shape[0]:
            axes.set_yticks(places, names, fontsize=7, parse_math=False)
            axes.set(ylabel=f"query{left_out}")


def picture_of_heads(
    path: str | os.PathLike[str] | None, ax: Any, scores: Array, score: str, title: str
) -> Axes:
    """One score of every head, layers down and heads across, where `picture` draws.

    Parameters
    ----------
    path, ax
        As for `picture`.
    scores : array (layers, heads)
        NaN where a layer has fewer heads, or the score does not apply.
    score, title : str
    """
    return picture(
        path, ax, _size_of_heads(scores), lambda axes: _draw_heads(axes, scores, score, title)
    )


def picture_of_differences(
    path: str | os.PathLike[str] | None, ax: Any, differences: Array, score: str, title: str
) -> Axes:
    """How far a score of every head is from one record to another, in colours around 0.

    Arguments are those of `picture_of_heads`, with differences in place of scores.
    """
    return picture(
        path,
        ax,
        _size_of_heads(differences),
        lambda axes: _draw_differences(axes, differences, score, title),
    )


def _size_of_heads(scores: Array) -> tuple[float, float]:
    layers, heads = scores.shape
    return min(14.0, 2.5 + 0.4 * heads), min(14.0, 2.0 + 0.4 * layers)


def _draw_heads(axes: Axes, scores: Array, score: str, title: str) -> None:
    image = axes.imshow(scores, cmap=_colour_map(_COLOURS), interpolation="nearest")
    _describe_heads(axes, image, _name_of(score), title)


def _draw_differences(axes: Axes, differences: Array, score: str, title: str) -> None:
    largest = max(float(np.nan_to_num(np.abs(differences)).max()), 1e-30)
    colours = _colour_map(_COLOURS_OF_DIFFERENCES)
    image = axes.imshow(
        differences, cmap=colours, vmin=-largest, vmax=largest, interpolation="nearest"
    )
    _describe_heads(axes, image, f"difference of {_name_of(score)}", title)


def _name_of(score: str) -> str:
    """A score with its unit; others are shares, or have no unit."""
    units = {"entropy": "entropy, nats", "distance": "distance, tokens"}
    return units.get(score, score.replace("_", " "))


def _describe_heads(axes: Axes, image: Any, label: str, title: str) -> None:
    """The texts around a picture with one cell for each head."""
    axes.figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    axes.set(xlabel="head", ylabel="layer")
    # Text of others may hold a dollar sign, which matplotlib would read as a formula.
    axes.set_title(printable(title, 60), parse_math=False)
    _set_ticks(axes, image.get_array().shape)


def draw_tiles(figure: Figure, grid: TileGrid, batch: int, head: int, title: str) -> None:
    """Which tiles of a head are skipped, which evaluate a mask, and which need none."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    kinds = grid.classify(batch, head)
    axes = figure.subplots()
    extent = (0, grid.kv_blocks * grid.block_kv, grid.q_blocks * grid.block_q, 0)
    colours = ListedColormap([colour for _, colour in _KINDS.values()])
    axes.imshow(
        kinds, cmap=colours, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto"
    )
    axes.set(xlabel="key", ylabel="query", xlim=(0, grid.kv_len), ylim=(grid.q_len, 0))
    axes.set_title(title, parse_math=False)
    counts = {kind: int((kinds == kind).sum()) for kind in TileKind}
    patches = [
        Patch(facecolor=colour, edgecolor="#555555", label=f"{counts[kind]:,} {name}")
        for kind, (name, colour) in _KINDS.items()
    ]
    about = f"tiles of {grid.block_q} queries and {grid.block_kv} keys"
    figure.legend(handles=patches, loc="outside lower center", title=about, fontsize=8)


def _set_ticks(axes: Axes, shape: tuple[int, ...]) -> None:
    """Ticks at whole numbers, at most about twenty."""
    for length, place in zip(shape, (axes.set_yticks, axes.set_xticks), strict=True):
        place(np.arange(0, length, max(1, -(-length // 20))))
