"""The attention weights as an array that is computed where it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from qkv.arguments.declarations import checked, is_integer, shown
from qkv.backends import Inspectable
from qkv.backends.reference import DENSE_LIMIT
from qkv.errors import ArgumentError, DTypeError, UnsupportedError
from qkv.inspection.weights.replay import BLOCK_Q, Replay
from qkv.inspection.weights.weight_reductions import (
    Axis,
    largest,
    place_of_largest,
    reduced_axes,
    smallest,
    total,
)
from qkv.ledger import memory

Array = NDArray[Any]


@checked
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class LazyWeights(NDArrayOperatorsMixin):
    """Weights `(..., num_heads, q_len, kv_len)`, before dropout; only what is sliced is computed.

    Slicing follows NumPy: slices, integers, integer and boolean arrays on any axis, `...` and
    None. `sum`, `mean`, `max`, `min` and `argmax` go tile by tile, in no more memory than their
    result. Operators (`weights > 0.5`) and NumPy's functions compute the whole first, if it stays
    below the reference limit. Cost: `2 head_dim` operations and one exp for each weight read.

    Weights of a row add up to 1 within 1e-6, or to 1 less the sink's share, whether it is read
    whole, in parts, one by one or in reductions: they are divided by sums of their own scores, not
    by the rounded lse of the call, whose kernel may add products in another order. Where parts of
    a row are read, its sum is made once, at the cost of two readings of the whole row, and kept:
    two numbers for each row.

    Parameters
    ----------
    replay : Replay
        Computes the weights again from query, key and lse.
    shape : tuple of int
        `(..., num_heads, q_len, kv_len)`.
    backend : Inspectable, optional
        Adds the weights up over queries, in place of NumPy.

    Raises
    ------
    UnsupportedError
        From a slice or an operator that would hold more than the reference limit; the message has
        its size.
    IndexError
        From an index that does not fit the shape.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((100_000, 4), np.float32)
    >>> weights = qkv.inspect(x, x, x, qkv.SlidingWindow(7, 0)).weights
    >>> weights
    LazyWeights(shape=(100000, 100000), dtype=float32, 37.3 GiB if dense)
    >>> weights[1, :3]
    array([0.5, 0.5, 0. ], dtype=float32)
    >>> x = np.eye(2)
    >>> qkv.inspect(x, x, x, qkv.Causal()).weights.max(axis=-1).round(2)
    array([1.  , 0.67])
    """

    replay: Replay
    shape: tuple[int, ...]
    backend: Inspectable | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, or float64 for float64 input."""
        return self.replay.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of weights in all."""
        return int(np.prod(self.shape, dtype=object))

    @property
    def nbytes(self) -> int:
        """Bytes that the whole would take."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return (
            f"LazyWeights(shape={self.shape}, dtype={self.dtype}, {memory(self.nbytes)} if dense)"
        )

    def __contains__(self, number: Any) -> bool:
        """Whether some weight equals a number."""
        return bool((self == number).any())

    def numpy(self) -> Array:
        """The whole matrix; the same as `[...]`."""
        return self[...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[...], dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Operators and functions of NumPy, on the whole."""
        if any(isinstance(given, LazyWeights) for given in options.get("out", ())):
            raise ArgumentError(
                f"weights are computed and cannot be written to: {ufunc.__name__} was to change "
                "them in place.",
                action="Write weights = weights + 1, or change a copy of weights[...].",
            )
        whole = [given[...] if isinstance(given, LazyWeights) else given for given in inputs]
        return getattr(ufunc, method)(*whole, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"LazyWeights has no attribute {name!r}")
        raise AttributeError(
            f"LazyWeights has no {name}: it is computed where it is read. weights[...] is the "
            f"whole as a NumPy array, {memory(self.nbytes)}. sum, mean, max, min and argmax go "
            "tile by tile, and so do entropy, received and top(k) of a record."
        )

    def sum(
        self, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False
    ) -> Any:
        """`numpy.sum`, added up in float64; over queries it is `Record.received`."""
        axes = reduced_axes(axis, self.ndim)
        if axes == {self.ndim - 2} and self.backend is not None:
            received = self.backend.received(self.replay.problem, self.replay.lse, None)
            sums = received.reshape(*self.shape[:-2], self.shape[-1])
        else:
            sums = total(self, axes)
        return self._reduced(sums, axes, dtype, out, keepdims)

    def mean(
        self, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False
    ) -> Any:
        """`numpy.mean`; NaN of no weights."""
        axes = reduced_axes(axis, self.ndim)
        count = np.float64(np.prod([self.shape[n] for n in axes], dtype=object))
        with np.errstate(invalid="ignore"):
            means = np.asarray(self.sum(axis, np.float64)) / count
        return self._reduced(means, axes, dtype, out, keepdims)

    def max(self, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
        """`numpy.max`.

        Raises
        ------
        ArgumentError
            There is nothing along the axis; it is a ValueError, as NumPy's.
        """
        axes = reduced_axes(axis, self.ndim)
        return self._reduced(largest(self, axes), axes, None, out, keepdims)

    def min(self, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
        """`numpy.min`.

        Raises
        ------
        ArgumentError
            There is nothing along the axis; it is a ValueError, as NumPy's.
        """
        axes = reduced_axes(axis, self.ndim)
        return self._reduced(smallest(self, axes), axes, None, out, keepdims)

    def argmax(self, axis: int | None = None, out: None = None, *, keepdims: bool = False) -> Any:
        """`numpy.argmax`: the first largest along one axis, or in the flattened whole.

        Raises
        ------
        ArgumentError
            There is nothing along the axis; it is a ValueError, as NumPy's.
        """
        axes = reduced_axes(axis, self.ndim)
        return self._reduced(place_of_largest(self, axis), axes, np.int64, out, keepdims)

    def _reduced(self, array: Array, axes: set[int], dtype: Any, out: Any, keepdims: bool) -> Any:
        """A result in the type and shape that was asked for."""
        if out is not None:
            raise ArgumentError(
                "reductions of weights write to a new array.", action="Leave out= away."
            )
        try:
            result = array.astype(self.dtype if dtype is None else np.dtype(dtype))
        except (RuntimeError, TypeError, ValueError) as error:
            raise DTypeError(
                f"dtype={shown(dtype)} is not a type of numbers.", action="Pass one of NumPy's."
            ) from error
        if keepdims:
            return result.reshape([1 if n in axes else size for n, size in enumerate(self.shape)])
        return result[()]

    def __getitem__(self, index: Any) -> Array:
        entries = index_per_axis(index, self.shape)
        axes = [e for e in entries if e is not None and e is not Ellipsis]
        arrays = [axis for axis, e in enumerate(axes) if isinstance(e, np.ndarray)]
        if {self.ndim - 2, self.ndim - 1} <= set(arrays):
            return self._pointwise(tuple(entries))
        found = self._outer(entries)
        return found if _has_ellipsis(index) else found[()]

    def _outer(self, entries: list[Any]) -> Array:
        """Each axis on its own: compute the rows and columns that are named, then index those."""
        coordinates: list[Array] = []
        local: list[Any] = []
        for entry in entries:
            if entry is None or entry is Ellipsis:
                local.append(entry)
                continue
            size = self.shape[len(coordinates)]
            if isinstance(entry, slice):
                coordinates.append(np.arange(size)[entry])
                local.append(slice(None))
            elif isinstance(entry, int):
                coordinates.append(np.array([entry]))
                local.append(0)
            else:
                values, inverse = np.unique(entry, return_inverse=True)
                coordinates.append(values)
                local.append(inverse.reshape(entry.shape))
        shape = tuple(map(len, coordinates))
        self.check_size(int(np.prod(shape, dtype=object)))
        block = np.empty(shape, self.dtype)
        q_index, kv_index = coordinates[-2:]
        leading_coordinates = coordinates[:-2]
        whole = len(kv_index) == self.shape[-1]
        weights_of = self.replay.whole_rows if whole else self.replay.part
        for leading in np.ndindex(*shape[:-2]):
            batch, head = self.matrix(
                [int(c[i]) for c, i in zip(leading_coordinates, leading, strict=True)]
            )
            for start in range(0, len(q_index), BLOCK_Q):
                rows = slice(start, start + BLOCK_Q)
                block[leading][rows] = weights_of(batch, head, q_index[rows], kv_index)
        return np.asarray(block[tuple(local)])

    def _pointwise(self, index: tuple[Any, ...]) -> Array:
        """Query and key rows are named pair by pair: compute just the pairs."""
        coordinates = [
            np.broadcast_to(np.arange(n).reshape(-1, *(1,) * (self.ndim - 1 - axis)), self.shape)[
                index
            ]
            for axis, n in enumerate(self.shape)
        ]
        shape = np.shape(coordinates[0])
        self.check_size(int(np.prod(shape, dtype=object)))
        flat = [np.reshape(coordinate, -1) for coordinate in coordinates]
        out = np.empty(flat[0].shape, self.dtype)
        matrix_index = np.zeros(len(out), np.int64)
        if self.ndim > 2:
            matrix_index = np.ravel_multi_index(tuple(flat[:-2]), self.shape[:-2])
        for matrix in np.unique(matrix_index):
            selected = np.flatnonzero(matrix_index == matrix)
            batch, head = divmod(int(matrix), self.replay.problem.spec.num_heads)
            out[selected] = self.replay.pairs(batch, head, flat[-2][selected], flat[-1][selected])
        return out.reshape(shape)

    def matrix(self, leading: Sequence[int]) -> tuple[int, int]:
        """Flat batch index and head of leading coordinates.

        Raises
        ------
        ArgumentError
            If they name no matrix.
        """
        if len(leading) != self.ndim - 2 or not all(
            -n <= i < n for i, n in zip(leading, self.shape, strict=False)
        ):
            raise ArgumentError(
                f"leading={shown(leading)} names no matrix of weights {self.shape}.",
                action="Pass an index for each dimension before the last two.",
            )
        if not leading:
            return 0, 0
        leading = [i % n for i, n in zip(leading, self.shape, strict=False)]
        flat = int(np.ravel_multi_index(leading, self.shape[:-2]))
        return divmod(flat, self.replay.problem.spec.num_heads)

    def check_size(self, count: int) -> None:
        """Refuse to hold so many weights at once.

        Raises
        ------
        UnsupportedError
            If they take more memory than the reference backend may.
        """
        require_small(count, self.shape, self.dtype)


def require_small(count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse to hold `count` of the weights of this shape at once.

    Raises
    ------
    UnsupportedError
        If they take more memory than the reference backend may.
    """
    size = count * dtype.itemsize
    if size > DENSE_LIMIT:
        whole = memory(int(np.prod(shape, dtype=object)) * dtype.itemsize)
        raise UnsupportedError(
            f"this slice of the weights holds {memory(size)} (limit {memory(DENSE_LIMIT)}).",
            [("weights", f"{dtype} {shape}, {whole} in all")],
            "Read fewer rows, reduce it by .sum, .mean, .max, .min or .argmax, or use "
            ".top(k), .entropy and .mass(...) of the record, which stay small.",
        )


def _has_ellipsis(index: Any) -> bool:
    """Whether an index has `...`, with which NumPy gives an array even of one number."""
    return any(part is Ellipsis for part in (index if isinstance(index, tuple) else (index,)))


def index_per_axis(index: Any, shape: tuple[int, ...]) -> list[Any]:
    """One entry for each axis: a slice, an int, an integer array; None for a new axis.

    An ellipsis that stands for no axis is an entry too, since it separates arrays.
    """
    given = index if isinstance(index, tuple) else (index,)
    parts: list[Any] = []
    for part in given:
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
        elif isinstance(part, bool | np.bool_):
            raise IndexError("weights cannot be indexed with a single boolean")
        elif is_integer(part):
            parts.append(int(part))
        else:
            array = np.asarray(part)
            is_empty_list = not array.size and not isinstance(part, np.ndarray)
            if array.dtype == bool and array.ndim:
                parts.append(array)
            elif array.dtype.kind in "iu" or is_empty_list:
                parts.append(array.astype(np.int64) if array.ndim else int(array))
            else:
                raise IndexError(f"weights cannot be indexed with {array.dtype} values")
    taken = sum(
        part.ndim if isinstance(part, np.ndarray) and part.dtype == bool else 1
        for part in parts
        if part is not None and part is not Ellipsis
    )
    if taken > len(shape) or sum(part is Ellipsis for part in parts) > 1:
        raise IndexError(f"{taken} indices for weights of {len(shape)} dimensions")
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    entries: list[Any] = []
    axis = 0
    for part in parts:
        if part is None:
            entries.append(None)
        elif part is Ellipsis:
            entries += [slice(None)] * (len(shape) - taken) or [Ellipsis]
            axis += len(shape) - taken
        elif isinstance(part, np.ndarray) and part.dtype == bool:
            if part.shape != shape[axis : axis + part.ndim]:
                raise IndexError(
                    f"boolean index of shape {part.shape} on axes of sizes "
                    f"{shape[axis : axis + part.ndim]}"
                )
            entries += list(np.nonzero(part))
            axis += part.ndim
        else:
            entries.append(
                part if isinstance(part, slice) else _checked_integers(part, shape[axis], axis)
            )
            axis += 1
    return entries


def _checked_integers(part: Any, size: int, axis: int) -> Any:
    """Integers with negative ones counted from the end, checked against the axis."""
    array = np.asarray(part)
    if array.size and (array.min() < -size or array.max() >= size):
        wrong = array.min() if array.min() < -size else array.max()
        raise IndexError(f"index {wrong} is out of bounds for axis {axis} with size {size}")
    positive = np.where(array < 0, array + size, array)
    return int(positive) if isinstance(part, int) else positive
