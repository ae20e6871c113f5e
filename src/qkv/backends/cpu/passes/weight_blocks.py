"""The host side of `replay.weight_blocks`: reductions of rectangles of one problem's weights."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.passes.replay import ReplayPass, padded_shift, weight_shift
from qkv.backends.cpu.replay.layout import RANGE
from qkv.problem.spec import Problem

Array = NDArray[Any]

_BAND_BYTES = 1 << 25
"""Bytes that the kernel leaves at once: rows of queries are taken in bands of so much."""


class WeightBlocks:
    """Reduces the weights of one problem over blocks, one rectangle of one head at a call.

    Parameters
    ----------
    problem : Problem
    lse : array (*batch_shape, num_heads, q_len)
        Of the whole call.
    """

    def __init__(self, problem: Problem, lse: Array) -> None:
        self._problem = problem
        self._replay = ReplayPass(problem, "blocks")
        self._shift = padded_shift(problem.spec, *weight_shift(problem, lse))

    def __call__(
        self, batch: int, head: int, q_rows: slice, kv_rows: slice, block: int
    ) -> tuple[Array, Array] | None:
        """See `qkv.backends.protocols.WeightBlocks`."""
        spec = self._problem.spec
        if block < 2 or block & (block - 1) or q_rows.start % block or kv_rows.start % block:
            return None
        count = -(-(q_rows.stop - q_rows.start) // block)
        units = -(-(kv_rows.stop - kv_rows.start) // block)
        largest = np.zeros((count, units), spec.compute_dtype)
        sums = np.zeros((count, units))
        rows_of_entry = self._replay.shape.lanes if self._joins_lanes(block) else 1
        row_bytes = 2 * units * spec.compute_dtype.itemsize / rows_of_entry
        band = max(1, int(_BAND_BYTES / max(row_bytes * block, 1))) * block
        for start in range(q_rows.start, q_rows.stop, band):
            stop = min(start + band, q_rows.stop)
            first = (start - q_rows.start) // block
            reductions = self._reduce_band(batch, head, start, stop, kv_rows, block, units)
            place = slice(first, first + len(reductions[0]))
            largest[place], sums[place] = reductions
        return largest, sums

    def _joins_lanes(self, block: int) -> bool:
        """Whether all lanes of a vector belong to one block."""
        return block % self._replay.shape.lanes == 0

    def _reduce_band(
        self, batch: int, head: int, start: int, stop: int, kv_rows: slice, block: int, units: int
    ) -> tuple[Array, Array]:
        """Reductions of the queries from `start` to `stop`, block by block."""
        # A copy, because several threads may draw maps of one head.
        replay, spec = copy(self._replay), self._problem.spec
        lanes, block_q = replay.shape.lanes, replay.shape.block_q
        # Blocks of queries of the kernel, which may begin before and end behind the band.
        first_block, last_block = start // block_q, -(-stop // block_q)
        blocks = np.arange(first_block, last_block)
        tasks = np.empty((len(blocks), len(RANGE)), np.int64)
        tasks[:, 0], tasks[:, 1] = batch, head
        tasks[:, 2:4] = kv_rows.start, kv_rows.stop
        offset = (batch * spec.num_heads + head) * -(-spec.q_len // block_q)
        tasks[:, 4] = offset + blocks
        tasks[:, 5] = tasks[:, 4] + 1
        replay.tasks = tasks
        joins = self._joins_lanes(block)
        vectors = len(blocks) * block_q // lanes
        reductions = np.zeros((2, vectors, units, *(() if joins else (lanes,))), spec.compute_dtype)
        numbers = {
            "padded_rows": self._shift.shape[1] * self._shift.shape[3],
            "unit": block,
            "first_vector": first_block * block_q // lanes,
            "first_unit": kv_rows.start // block,
            "units": units,
            "joined": joins,
        }
        arrays = {
            "shift": self._shift,
            "blocks": replay.plan.tasks,
            "largest": reductions[0],
            "sums": reductions[1],
        }
        replay.run(numbers, arrays)
        if not joins:
            reductions = reductions.swapaxes(2, 3).reshape(2, -1, units)
        rows = lanes if joins else 1
        skip = (start - first_block * block_q) // rows
        largest, sums = reductions[:, skip : skip + -(-(stop - start) // rows)]
        starts = np.arange(0, len(largest), block // rows)
        return (
            np.maximum.reduceat(largest, starts, axis=0),
            np.add.reduceat(sums, starts, axis=0, dtype=np.float64),
        )
