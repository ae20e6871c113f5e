"""Gradients of tables: which tasks add to the same entries, and where each task adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkv.problem.backward import reads
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import Load
from qkv.problem.spec import Problem

Array = NDArray[Any]

_COPIES_BYTES = 2**24
"""The most bytes for copies of a table's gradient, one for each task that adds to the same
entries."""


@dataclass(frozen=True, slots=True)
class SummedTable:
    """A table whose gradient is wanted: where tasks that share its entries add.

    `shared` says for each of batch row, kv head and range of rows whether tasks that differ in it
    may add to the same entry. Such tasks have a copy each, of float64, if the copies take
    little memory; else they add to one array, one after the other.
    """

    name: str
    shape: tuple[int, ...]
    shared: tuple[bool, ...]
    counts: tuple[int, ...]
    wide: bool

    @property
    def copies(self) -> int:
        """How many arrays tasks add to, so that no two add to one entry at the same time."""
        return _number_of_copies(self.shared, self.counts) if self.wide else 1

    def copy_of(self, places: Array) -> Array:
        """Which copy each task adds to; `places` is (tasks, 3)."""
        copies = np.zeros(len(places), np.int64)
        for axis, (shared, count) in enumerate(zip(self.shared, self.counts, strict=True)):
            if shared and self.wide:
                copies = copies * count + places[:, axis]
        return copies


def summed_table(
    problem: Problem, name: str, ranges: int, along: Literal["q_index", "kv_index"]
) -> SummedTable:
    """A table of a problem whose tasks differ in batch row, kv head, and range of rows."""
    spec, array = problem.spec, problem.operands.tables[name]
    loads = reads(spec, frozenset({name}))
    counts = spec.batch_size, spec.num_kv_heads, ranges
    length = spec.q_len if along == "q_index" else spec.kv_len
    lengths = spec.batch_size, spec.num_heads, length
    shared = tuple(
        count > 1
        and not all(_reads_different_entries(problem, load, axis, length) for load in loads)
        for axis, count, length in zip(("batch", "head", along), counts, lengths, strict=True)
    )
    if len(loads) > 1:  # Two reads may add to the same entry even if neither does alone.
        shared = tuple(count > 1 for count in counts)
    size = _number_of_copies(shared, counts) * array.size * 8
    return SummedTable(name, array.shape, shared, counts, wide=size <= _COPIES_BYTES)


def launches_of(tables: Sequence[SummedTable], places: Array, counts: Sequence[int]) -> Array:
    """The launch that each task belongs to, 0 for all if no two may add to one entry.

    Tasks that would add to the same entries of a large table are in different launches.
    """
    launch = np.zeros(len(places), np.int64)
    for axis, count in enumerate(counts):
        if any(table.shared[axis] and not table.wide for table in tables):
            launch = launch * count + places[:, axis]
    return launch


def ranges_of(launch: Array) -> list[tuple[int, int]]:
    """Where each launch begins and ends, for tasks in the order of launches."""
    edges = [0, *(np.flatnonzero(np.diff(launch)) + 1).tolist(), len(launch)]
    return list(pairwise(edges))


def _number_of_copies(shared: Sequence[bool], counts: Sequence[int]) -> int:
    """One for each combination of the counted ranges that share entries."""
    return math.prod(n for n, s in zip(counts, shared, strict=True) if s)


def _reads_different_entries(problem: Problem, load: Load, axis: str, length: int) -> bool:
    """Whether different values of the variable `axis` always read different entries."""
    own = [index for index in load.indices if index.variables == {axis}]
    if not own:
        return False
    values = np.arange(length)
    dtype = problem.spec.compute_dtype
    read = [evaluate(index, {axis: values}, problem.operands.tables, dtype) for index in own]
    entries = np.stack(np.broadcast_arrays(*read, values)[:-1])
    return len(np.unique(entries, axis=1).T) == length
