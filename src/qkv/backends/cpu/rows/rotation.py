"""Rotary embedding as a compiled pass of its own: rows of query or key, rotated by their positions.

    out[2 i], out[2 i + 1] = a cos - b sin, a sin + b cos      of the pair (a, b) of entries

in float64 and rounded once to the type of computation, so that a rotation costs no accuracy. Other
kernels then read the rotated rows. The same kernel rotates gradients back, with the sines negated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import batch_offsets, quick_address_of
from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
from qkv.backends.cpu.emit.argument_block import word_index
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.rows.layout import ROTATION_FIELDS, RotationKey
from qkv.backends.cpu.rows.row_pass import RowPass, argument_words
from qkv.problem.spec import Angles, Problem

_EMIT = EmitFunction("qkv.backends.cpu.rows.rotation_kernel", "emit_rotation")

Array = NDArray[Any]

__all__ = ["AngleTable", "Rotation", "angle_tables", "rotated_rows"]

_BYTES_AHEAD = 2**23
"""The most bytes of cosines and sines that are computed ahead, for the positions of later steps."""


@lru_cache(maxsize=64)
def _kernel(key: RotationKey, here: Host) -> Kernel:
    return Kernel(build(_EMIT, (key,), here))


class CosSin(NamedTuple):
    """Cosines and sines `(1 or batch, length, pairs)`, dense float64."""

    cosines: Array
    sines: Array

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Addresses of both, and bytes from one batch row to the next."""
        step = 0 if len(self.cosines) == 1 else self.cosines.strides[0]
        return quick_address_of(self.cosines), quick_address_of(self.sines), step


class AngleTable:
    """Cosines and sines of positions that follow one another, kept from call to call.

    Parameters
    ----------
    inv_freq : array (pairs,)
        Radians per position of each pair.
    factor : float
        What cosines and sines are multiplied with.
    """

    def __init__(self, inv_freq: Array, factor: float = 1.0) -> None:
        self._inv_freq = np.asarray(inv_freq, np.float64)
        self._factor = factor
        # Start and table are one attribute: no thread sees the start of one and another table.
        self._cached = 0, self._compute(0, 0)

    def rows(self, start: int, count: int) -> CosSin:
        """Cosines and sines of `count` positions from `start` on."""
        first, table = self._cached
        if start < first or start + count > first + table.cosines.shape[1]:
            # Later decoding steps find their positions here.
            more = min(max(count, 256), _BYTES_AHEAD // (16 * max(len(self._inv_freq), 1)))
            first, table = start, self._compute(start, count + more)
            self._cached = first, table
        at = slice(start - first, start - first + count)
        return CosSin(table.cosines[:, at], table.sines[:, at])

    def rows_of_batch(self, starts: Array, count: int) -> CosSin:
        """Cosines and sines of `count` positions from each of `starts` on, which are not kept."""
        return self._of_positions(starts[:, None] + np.arange(count))

    def _compute(self, start: int, count: int) -> CosSin:
        return self._of_positions(np.arange(start, start + count)[None])

    def _of_positions(self, positions: Array) -> CosSin:
        angle = positions.astype(np.float64)[..., None] * self._inv_freq
        return CosSin(self._factor * np.cos(angle), self._factor * np.sin(angle))


def angle_tables(angles: Angles, side: str) -> CosSin:
    """The angles of all rows of one side, "q" or "kv"."""
    tables = [angles.cos_sin(side, batch) for batch in range(angles.rows(side))]
    cosines, sines = (np.ascontiguousarray(np.stack(part)) for part in zip(*tables, strict=True))
    return CosSin(cosines, sines)


_NO_OFFSETS = np.zeros(1, np.int64)
"""Where the rows of the only batch entry begin."""


class RowLayout:
    """Where the rows of an array `(*batch_shape, heads, length, head_dim)` lie."""

    def __init__(self, shape: tuple[int, ...], strides: Sequence[int]) -> None:
        *lead, heads, length, dim = self.shape = shape
        *steps, head, row, element = strides
        self.heads = heads
        self.count = math.prod(lead) * heads
        self.entries = self.count * length * dim
        self.batches = _NO_OFFSETS if math.prod(lead) == 1 else batch_offsets(lead, steps)
        self.numbers = quick_address_of(self.batches), head, row, element, length

    @classmethod
    def of(cls, array: Array) -> RowLayout:
        """The layout of the rows of this array."""
        return cls(array.shape, array.strides)


class Rotation:
    """Rotates the rows of one array or two, such as query and key, in one launch.

    Parameters
    ----------
    problem : Problem
        With a rotation.
    arrays : sequence of array (*batch_shape, heads, length, head_dim)
        Arrays like those that will be rotated: of one dtype, with these heads and head_dim.
    """

    def __init__(self, problem: Problem, arrays: Sequence[Array]) -> None:
        rotation = problem.spec.rotation
        assert rotation is not None
        here = host()
        wide = here.shape_of(np.dtype(np.float64))
        self.out_dtype = problem.spec.compute_dtype
        interleaved = rotation.layout == "interleaved"
        key = RotationKey(
            arrays[0].dtype.name, self.out_dtype.name, interleaved, wide.lanes, wide.halves
        )
        layouts = list(map(RowLayout.of, arrays))
        count = sum(layout.count for layout in layouts)
        values = {
            "limit": count, "first_count": layouts[0].count, "dim": arrays[0].shape[-1],
            "pairs": rotation.rotary_dim // 2,
        }  # fmt: skip
        for n, layout in enumerate(layouts):
            values[f"heads_{n}"] = layout.heads
        places = [word for n in range(len(layouts)) for word in _WORDS[n]]
        words = argument_words(ROTATION_FIELDS, values)
        self._pass = RowPass(_kernel(key, here), words, places, count)

    def __call__(
        self,
        addresses: Sequence[int],
        layouts: Sequence[RowLayout],
        angles: Sequence[CosSin],
        outputs: Sequence[int],
        keep_alive: Any,
    ) -> None:
        """Rotate the rows at these addresses by these angles, dense, to where outputs lie.

        `keep_alive` owns the memory.
        """
        words = self.words(layouts, angles)
        numbers: list[int] = []
        for address, out, of_array in zip(addresses, outputs, words, strict=True):
            numbers += (address, out, *of_array)
        entries = sum([layout.entries for layout in layouts])
        self.run(numbers, entries, (keep_alive, angles, layouts))

    def words(
        self, layouts: Sequence[RowLayout], angles: Sequence[CosSin]
    ) -> list[tuple[int, ...]]:
        """What `run` takes for each array after the addresses of its rows and of the output."""
        pairs = zip(layouts, angles, strict=True)
        return [(*layout.numbers, *table.numbers) for layout, table in pairs]

    def run(self, numbers: Sequence[int], entries: int, keep_alive: Any) -> None:
        """Rotate so many entries of rows, as these addresses and words say."""
        self._pass.run(numbers, entries, keep_alive)

    def arrays(self, arrays: Sequence[Array], angles: Sequence[CosSin]) -> list[Array]:
        """Arrays rotated by these angles, in the type of computation."""
        outputs = [np.empty(array.shape, self.out_dtype) for array in arrays]
        at, layouts = quick_address_of, list(map(RowLayout.of, arrays))
        self(list(map(at, arrays)), layouts, angles, list(map(at, outputs)), (arrays, outputs))
        return outputs


_WORDS = [
    [
        word_index(f"{name}_{n}", ROTATION_FIELDS)
        for name in (
            "rows", "out", "batches", "head_stride", "row_stride", "element_stride", "length",
            "cosines", "sines", "table_bytes",
        )
    ]
    for n in (0, 1)
]  # fmt: skip
"""What each run writes of an array: its address and layout, and where its angles and output lie."""


def rotated_rows(problem: Problem, array: Array, side: str, *, back: bool = False) -> Array:
    """Rows of one side, "q" or "kv", rotated by their positions, or back."""
    angles = problem.operands.angles
    assert angles is not None
    table = angle_tables(angles, side)
    if back:
        table = CosSin(table.cosines, -table.sines)
    if not array.size:
        return np.empty(array.shape, problem.spec.compute_dtype)
    return Rotation(problem, [array]).arrays([array], [table])[0]
