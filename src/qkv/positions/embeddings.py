"""Positions that are added to the embeddings of tokens, before the first layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.arguments.declarations import NotNegative, Size, Whole, checked, is_integer, shown
from qkv.arguments.readable_checks import array_shape, as_array
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.positions.rotation import array_namespace, cast, check_positions, promoting
from qkv.positions.scaling import inverse_frequencies, positive

__all__ = ["LearnedPositions", "SinusoidalPositions"]


@checked
class SinusoidalPositions:
    """`x + P[position]` with the sines and cosines of the paper.

        P[p, 2 i] = sin(p * base ** (-2 i / embed_dim)),   P[p, 2 i + 1] = cos(the same)

    Parameters
    ----------
    embed_dim : int
        Width of the model, even.
    base : float
        The slowest pair turns by nearly `1 / base` radians per position.

    Raises
    ------
    ArgumentError
        If embed_dim is not a positive even integer.

    Notes
    -----
    Attention alone does not know the order of its rows: to permute the input of self-attention is
    to permute its output. `P[p + n]` is a rotation of `P[p]` that depends on n alone. Cost: one
    sine or cosine for each entry, in float64, rounded once to the type of `x`. Source: Vaswani et
    al. (2017), section 3.5.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> positions = qkv.SinusoidalPositions(4)
    >>> positions(np.zeros((2, 4))).round(3)
    array([[0.   , 1.   , 0.   , 1.   ],
           [0.841, 0.54 , 0.01 , 1.   ]])
    """

    def __init__(self, embed_dim: int, base: float = 10000.0) -> None:
        if not is_integer(embed_dim) or embed_dim < 2 or embed_dim % 2:
            raise ArgumentError(
                f"embed_dim={shown(embed_dim)} is not a positive even integer.",
                action="Pass the width of the model: each sine has a cosine beside it.",
            )
        self.embed_dim, self.base = int(embed_dim), positive("base", base)

    def __repr__(self) -> str:
        return f"SinusoidalPositions({self.embed_dim}, base={self.base:g})"

    def encoding(self, positions: ArrayLike) -> NDArray[np.float64]:
        """P of an integer array of positions: `(*positions.shape, embed_dim)`.

        Raises
        ------
        DTypeError
            Positions are not numbers.
        """
        try:
            given = np.asarray(positions, np.float64)
            if np.asarray(positions).dtype.kind in "OMm":  # None would be NaN, a date its number.
                raise TypeError
        except (OverflowError, TypeError, ValueError, RuntimeError) as error:
            raise DTypeError(
                f"positions are a {type(positions).__name__}, not integers.",
                action="Pass an integer array.",
            ) from error
        angle = given[..., None] * inverse_frequencies(self.embed_dim, self.base)
        pairs = np.stack([np.sin(angle), np.cos(angle)], axis=-1)
        return pairs.reshape(*angle.shape[:-1], self.embed_dim)

    def __call__(self, x: Any, positions: ArrayLike | None = None) -> Any:
        """Add the encoding of each row's position.

        Parameters
        ----------
        x : array (..., length, embed_dim)
            NumPy array, torch tensor or JAX array of a floating type.
        positions : integer array that broadcasts to x.shape[:-1], optional
            0, 1, 2, ... by default; given, its values must be known.

        Returns
        -------
        array
            Like `x`.
        """
        xp = array_namespace(x)
        _check_width(x, self.embed_dim)
        added = self.encoding(_positions_of(x, positions))
        if xp.__name__ == "torch":
            return x + xp.as_tensor(added, device="cpu").to(x)
        with promoting(x):
            return x + cast(xp.asarray(added), x.dtype)


@checked
class LearnedPositions:
    """`x + table[position]`, a row of its own for every position.

    Parameters
    ----------
    table : array (max_positions, embed_dim)
        NumPy array, torch tensor or JAX array; gradients of torch and JAX reach it.

    Raises
    ------
    ShapeError
        If the table has not two dimensions; when called, if a position has no row in it.

    Notes
    -----
    `SinusoidalPositions` knows every position, this only those of training. Cost: one row read for
    each row. Source: Gehring et al., "Convolutional Sequence to Sequence Learning" (2017), section
    3.1; BERT, GPT-2.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> positions = qkv.LearnedPositions.random(max_positions=16, embed_dim=4, seed=0)
    >>> x = np.zeros((3, 4))
    >>> bool((positions(x) == positions.table[:3]).all())
    True
    """

    def __init__(self, table: Any) -> None:
        array_namespace(table, "table")
        shape = array_shape("table", table)
        if len(shape) != 2:
            raise ShapeError(
                f"the table of positions has shape {shape}.",
                action="Pass (max_positions, embed_dim).",
            )
        self.table = table

    @classmethod
    def random(
        cls, max_positions: Size, embed_dim: Size, seed: Whole = 0, std: NotNegative = 0.02
    ) -> LearnedPositions:
        """A float32 table of normal numbers, as models begin their training with.

        Parameters
        ----------
        max_positions, embed_dim : int
            Shape of the table.
        seed : int
            Of `numpy.random.default_rng`.
        std : float
            Standard deviation; 0.02 in BERT and GPT-2.

        Raises
        ------
        ArgumentError
            A size is not a positive integer, or the table would have more than 2**28 numbers.
        """
        if max_positions * embed_dim > 2**28:
            raise ArgumentError(
                f"a table of {max_positions} x {embed_dim} would be {max_positions * embed_dim} "
                f"random numbers; at most {2**28} are drawn.",
                action="Choose smaller sizes, or pass a table.",
            )
        rng = np.random.default_rng(seed)
        return cls(rng.normal(scale=std, size=(max_positions, embed_dim)).astype(np.float32))

    def __repr__(self) -> str:
        return f"LearnedPositions({'x'.join(map(str, self.table.shape))})"

    def __call__(self, x: Any, positions: ArrayLike | None = None) -> Any:
        """Add the row of each position.

        Parameters
        ----------
        x : array (..., length, embed_dim)
            Of the library of the table, or any if that is a NumPy array.
        positions : integer array that broadcasts to x.shape[:-1], optional
            0, 1, 2, ... by default; given, its values must be known.

        Returns
        -------
        array
            Like `x`.

        Raises
        ------
        ShapeError
            If a position is negative, or not below max_positions.
        """
        xp = array_namespace(x)
        _check_width(x, self.table.shape[1])
        at = _positions_of(x, positions)
        if at.size and not (at.min() >= 0 and at.max() < self.table.shape[0]):
            raise ShapeError(
                f"positions run from {at.min()} to {at.max()}; the table has "
                f"{self.table.shape[0]} rows.",
                action="Pass shorter rows, or a longer table.",
            )
        if array_namespace(self.table, "table") not in (np, xp):
            raise DTypeError(
                f"x is a {type(x).__name__} and the table a {type(self.table).__name__}.",
                action="Pass x of the library of the table, or a table of NumPy.",
            )
        rows = self.table[at.astype(np.int64)]  # torch takes uint8 for a mask
        if xp.__name__ == "torch":
            known = isinstance(rows, xp.Tensor)
            return x + (rows if known else xp.as_tensor(rows, device="cpu")).to(x)
        with promoting(x):
            return x + cast(xp.asarray(rows), x.dtype)


def _check_width(x: Any, embed_dim: int) -> None:
    shape = array_shape("x", x)
    if len(shape) < 2 or shape[-1] != embed_dim:
        raise ShapeError(
            f"x has shape {shape}; embed_dim={embed_dim}.",
            action="Pass (..., length, embed_dim).",
        )


def _positions_of(x: Any, positions: ArrayLike | None) -> NDArray[Any]:
    # A size that torch traces becomes a number here: NumPy would make an object of it.
    at = np.arange(int(x.shape[-2])) if positions is None else as_array("positions", positions)
    check_positions(at, x)
    return at
