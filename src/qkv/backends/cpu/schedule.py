"""Which keys each block of queries meets, as tables that the kernel reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.forward import RUN, TASK
from qkv.problem.expressions import Node, tables
from qkv.problem.spec import Problem
from qkv.problem.tiles import TileGrid, TileKind

Array = NDArray[Any]

TILE_KV = 64
"""Keys of one tile; neighbouring tiles of a kind are one run."""

_CELLS = 2**20
"""Tiles that are classified at once."""
_KEPT_TASKS = 4096
"""Schedules up to this long are worth keeping from call to call."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of `TASK` and `RUN`, and the number of pairs of a query row and a key in them."""

    tasks: Array
    runs: Array
    pairs: int


def schedule(problem: Problem, block_q: int) -> Schedule:
    """Every block of queries of every head, the longest of a head first."""
    spec, mask = problem.spec, problem.spec.mask
    blocks = spec.batch_size * spec.num_heads * -(-spec.q_len // block_q)
    sizes = (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, block_q)
    if not tables(mask) and blocks <= _KEPT_TASKS:
        return _without_tables(mask, *sizes)
    grid = TileGrid(mask, problem.operands.tables, spec.q_len, spec.kv_len, block_q, TILE_KV)
    return _schedule(grid, spec.batch_size, spec.num_heads)


@lru_cache(maxsize=64)
def _without_tables(
    mask: Node, batches: int, heads: int, q_len: int, kv_len: int, block_q: int
) -> Schedule:
    """A mask that reads no values has one schedule."""
    return _schedule(TileGrid(mask, {}, q_len, kv_len, block_q, TILE_KV), batches, heads)


def _schedule(grid: TileGrid, batches: int, heads: int) -> Schedule:
    own_batches = batches if "batch" in grid.depends_on else 1
    own_heads = heads if "head" in grid.depends_on else 1
    blocks = grid.q_blocks
    runs: list[Array] = []
    counts: list[Array] = []
    step = max(1, _CELLS // max(grid.kv_blocks, 1))
    for batch, head in np.ndindex(own_batches, own_heads):
        for first in range(0, blocks, step):
            kinds = grid.classify(batch, head, first, min(first + step, blocks))
            rows, found = _runs(kinds, grid)
            runs.append(found)
            counts.append(np.bincount(rows, minlength=len(kinds)))
    every_run, count = np.concatenate(runs), np.concatenate(counts)
    last = np.cumsum(count)
    ends = np.concatenate([[0], np.cumsum(every_run[:, 1] - every_run[:, 0])])
    keys = ends[last] - ends[last - count]
    shape = (own_batches, own_heads, blocks)
    order = np.argsort(-keys.reshape(shape), axis=-1, kind="stable")
    tasks = np.empty((batches, heads, blocks, len(TASK)), np.int64)
    tasks[..., 0] = np.arange(batches)[:, None, None]
    tasks[..., 1] = np.arange(heads)[:, None]
    tasks[..., 2] = order * grid.block_q
    for column, value in ((3, last - count), (4, last)):
        tasks[..., column] = np.take_along_axis(value.reshape(shape), order, axis=-1)
    copies = batches * heads // (own_batches * own_heads)
    return Schedule(
        tasks.reshape(-1, len(TASK)), every_run, int(keys.sum()) * copies * grid.block_q
    )


def _runs(kinds: Array, grid: TileGrid) -> tuple[Array, Array]:
    """Runs of one kind in each row of tiles, empty ones left out, and the row of each."""
    edge = np.ones((len(kinds), kinds.shape[1] + 1), bool)
    np.not_equal(kinds[:, 1:], kinds[:, :-1], out=edge[:, 1:-1])
    used = kinds != TileKind.EMPTY
    rows, first = np.nonzero(edge[:, :-1] & used)
    _, final = np.nonzero(edge[:, 1:] & used)
    runs = np.empty((len(rows), len(RUN)), np.int64)
    runs[:, 0] = first * grid.block_kv
    runs[:, 1] = np.minimum((final + 1) * grid.block_kv, grid.kv_len)
    runs[:, 2] = kinds[rows, first] == TileKind.PARTIAL
    return rows, runs
