"""The compiled passes around a kernel: rotary embedding before it, sinks after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.passes.scratch import Scratch, take_scratch
from qkv.backends.cpu.prepared.placeholders import placeholder
from qkv.backends.cpu.rows.rotation import (
    AngleTable,
    CosSin,
    Rotation,
    RowLayout,
    angle_tables,
)
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
    """Rotates query and key of one form by kept angles, into scratch memory of `bytes`."""

    def __init__(self, problem: Problem) -> None:
        operands = problem.operands
        assert operands.angles is not None
        arrays = operands.query, plain(operands.key)
        self._rotation = Rotation(problem, arrays)
        self._layouts = list(map(RowLayout, arrays))
        self.angles = angle_tables(operands.angles, "q"), angle_tables(operands.angles, "kv")
        of_query, of_key = _areas(self._layouts, self._rotation)
        self._key_at, self.bytes = of_query, of_query + of_key

    def __call__(self, query: int, key: int, at: int, keep_alive: Any) -> tuple[int, int]:
        """Rotate what lies at these addresses; where it lies then."""
        rotated = at, at + self._key_at
        self._rotation((query, key), self._layouts, self.angles, rotated, keep_alive)
        return rotated

    def arrays(self, query: Array, key: Array) -> list[Array]:
        """Both rotated, as arrays."""
        return self._rotation.arrays((query, key), self.angles)


class RotateGradients:
    """Rotates gradients of rotated queries and keys back."""

    def __init__(self, problem: Problem, angles: tuple[CosSin, CosSin]) -> None:
        form = rotated_form(problem).operands
        self._rotation = Rotation(problem, [form.query, plain(form.key)])
        self._angles = tuple([CosSin(t.cosines, -t.sines) for t in angles])

    def arrays(self, query: Array, key: Array) -> list[Array]:
        """Both gradients rotated back."""
        return self._rotation.arrays((query, key), self._angles)


class RotateSteps:
    """Rotates query and keys of steps over any number of keys, into scratch memory.

    `arrays` are placeholders with the dtypes and numbers of axes of what each step rotates.
    """

    def __init__(self, problem: Problem) -> None:
        operands = problem.operands
        assert operands.angles is not None
        self.arrays = placeholder(operands.query), placeholder(operands.key)
        self._rotation = Rotation(problem, self.arrays)
        angles = operands.angles.inv_freq, operands.angles.factor
        self._of_query, self._of_key = AngleTable(*angles), AngleTable(*angles)
        self._kv_shift = int(operands.positions.kv_shift[0])

    def __call__(self, query: Array, key: Array, q_shift: int) -> tuple[Array, Array, Scratch]:
        """Both rotated, with the first query at `q_shift`, and the memory that they lie in."""
        layouts, dtype = [RowLayout(query), RowLayout(key)], self._rotation.out_dtype
        angles = (
            self._of_query.rows(q_shift, query.shape[-2]),
            self._of_key.rows(self._kv_shift, key.shape[-2]),
        )
        of_query, of_key = _areas(layouts, self._rotation)
        # Steps of a few keys more find room in the same memory.
        scratch = take_scratch(of_query + of_key, of_key // 4)
        places = scratch.address, scratch.address + of_query
        at = quick_address_of
        self._rotation((at(query), at(key)), layouts, angles, places, (query, key, scratch))
        rotated = [
            scratch.array[start : start + layout.entries * dtype.itemsize].view(dtype)
            for start, layout in zip((0, of_query), layouts, strict=True)
        ]
        return rotated[0].reshape(query.shape), rotated[1].reshape(key.shape), scratch


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
