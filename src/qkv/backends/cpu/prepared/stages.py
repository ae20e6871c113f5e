"""The compiled passes around a kernel: rotary embedding before it, sinks after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.prepared.placeholders import placeholder
from qkv.backends.cpu.rows.rotation import AngleTable, CosSin, Rotation, RowLayout, angle_tables
from qkv.backends.cpu.rows.sinks import Sinks
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

Array = NDArray[Any]

__all__ = ["Rotate", "RotateGradients", "RotateSteps", "ShareWithSinks", "is_rotation_kept",
           "rotated_form"]  # fmt: skip

_MOST_ANGLES = 2**19
"""The most angles of one prepared call: 8 MiB of cosines and sines."""
_LINE = 64
"""Bytes that areas of scratch memory are aligned to."""


def rotated_form(problem: Problem) -> Problem:
    """The problem that is left once query and key have been rotated: they are dense arrays then."""
    operands, compute = problem.operands, problem.spec.compute_dtype
    query, key = (np.empty(a.shape, compute) for a in (operands.query, plain(operands.key)))
    return replace(problem, operands=replace(operands, query=query, key=key, angles=None))


def is_rotation_kept(problem: Problem) -> bool:
    """Whether the angles of all rows are few enough to be kept with a prepared call."""
    angles = problem.operands.angles
    assert angles is not None
    positions = angles.q_pos.size + angles.kv_pos.size
    return positions * len(angles.inv_freq) <= _MOST_ANGLES


class Rotate:
    """Rotates query and key by these angles, into scratch memory of `bytes`.

    Attributes
    ----------
    bytes : int
    angles : (CosSin, CosSin)
        Of query and key.
    """

    def __init__(
        self, rotation: Rotation, layouts: Sequence[RowLayout], angles: tuple[CosSin, CosSin]
    ) -> None:
        self._rotation, self._layouts, self.angles = rotation, layouts, angles
        of_query, of_key = _areas(layouts, rotation)
        self._key_at, self.bytes = of_query, of_query + of_key
        self._of_query, self._of_key = rotation.words(layouts, angles)
        self._entries = sum([layout.entries for layout in layouts])

    @classmethod
    def of(cls, problem: Problem) -> Rotate:
        """The rotation of arrays like those of a problem, by angles that are kept."""
        operands = problem.operands
        assert operands.angles is not None
        arrays = operands.query, plain(operands.key)
        angles = angle_tables(operands.angles, "q"), angle_tables(operands.angles, "kv")
        return cls(Rotation(problem, arrays), list(map(RowLayout.of, arrays)), angles)

    def __call__(self, query: int, key: int, at: int, keep_alive: Any) -> tuple[int, int]:
        """Rotate what lies at these addresses; where it lies then."""
        rotated_key = at + self._key_at
        self._rotation.run(
            (query, at, *self._of_query, key, rotated_key, *self._of_key),
            self._entries, (keep_alive, self),
        )  # fmt: skip
        return at, rotated_key

    @property
    def layouts(self) -> list[tuple[int, ...]]:
        """Sizes of the rotated query, its strides in bytes, and both of the key."""
        found = []
        for layout in self._layouts:
            found += [layout.shape, _dense(layout.shape, self._rotation.out_dtype.itemsize)]
        return found


def _dense(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a dense array."""
    strides = [itemsize]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1])


class RotateGradients:
    """Rotates gradients of rotated queries and keys back."""

    def __init__(self, problem: Problem, angles: tuple[CosSin, CosSin]) -> None:
        form = rotated_form(problem).operands
        arrays = form.query, plain(form.key)
        self._rotation, self._layouts = Rotation(problem, arrays), list(map(RowLayout.of, arrays))
        self._angles = tuple([CosSin(t.cosines, -t.sines) for t in angles])

    def __call__(self, query: int, key: int, d_query: int, d_key: int, keep_alive: Any) -> None:
        """Both rotated back, from the first two addresses to the others."""
        self._rotation((query, key), self._layouts, self._angles, (d_query, d_key), keep_alive)


class RotateSteps:
    """Rotates query and keys of steps over any number of keys."""

    def __init__(self, problem: Problem) -> None:
        operands = problem.operands
        assert operands.angles is not None
        unread = placeholder(operands.query), placeholder(plain(operands.key))
        self._rotation = Rotation(problem, list(unread))
        angles = operands.angles.inv_freq, operands.angles.factor
        self._of_query, self._of_key = AngleTable(*angles), AngleTable(*angles)
        self._kv_shift = int(operands.positions.kv_shift[0])

    def __call__(self, layouts: Sequence[Any], q_shift: int | Array) -> Rotate:
        """The rotation of a step whose first query is at `q_shift`, or those of batch rows at these
        positions; strides are in bytes."""
        query, key = RowLayout(*layouts[:2]), RowLayout(*layouts[2:4])
        of_key = self._of_key.rows(self._kv_shift, key.shape[-2])
        if isinstance(q_shift, int):
            of_query = self._of_query.rows(q_shift, query.shape[-2])
        else:
            of_query = self._of_query.rows_of_batch(q_shift, query.shape[-2])
        return Rotate(self._rotation, (query, key), (of_query, of_key))


def _areas(layouts: Sequence[RowLayout], rotation: Rotation) -> list[int]:
    """Bytes of the rotated arrays of these layouts."""
    return [_area(layout.entries * rotation.out_dtype.itemsize) for layout in layouts]


class ShareWithSinks:
    """Lets sinks take their share of what a kernel leaves, in scratch memory of `bytes`.

    With `keeps`, a backward pass follows, and reads the output before it is rounded.
    """

    def __init__(self, problem: Problem, *, keeps: bool = False) -> None:
        spec, sinks = problem.spec, problem.operands.sinks
        assert sinks is not None
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        compute, dtype = spec.compute_dtype, np.dtype(spec.dtype)
        self._rounds = dtype != compute
        self._sinks = Sinks(sinks, shape, compute, dtype, keeps=keeps and self._rounds)
        rows = math.prod(shape[:-1]) * compute.itemsize
        self._lse_at = _area(rows * spec.v_head_dim) if self._rounds else 0
        self.bytes = self._lse_at + _area(rows)

    def places(self, out: int, lse: int, unrounded: int, at: int) -> tuple[int, int]:
        """Where the kernel is to leave output and lse over the keys alone.

        All are addresses, `at` that of scratch memory; lse and unrounded may be 0.
        """
        return (unrounded or at) if self._rounds else out, lse or at + self._lse_at

    def __call__(self, keys_out: int, lse: int, rest: int, out: int, keep_alive: Any) -> None:
        """Add the sinks to what the kernel left there; `rest` may be 0."""
        self._sinks(keys_out, lse, rest, out, lse, keep_alive)


def _area(size: int) -> int:
    """Bytes from an area of scratch memory to the next.

    Areas whose distance is a multiple of 4096 bytes would be slow to read and write at once, since
    processors compare the lower 12 bits of addresses first.
    """
    whole = -(-size // _LINE) * _LINE
    return whole + 17 * _LINE if whole % 4096 < 17 * _LINE else whole
