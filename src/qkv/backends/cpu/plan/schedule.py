"""Which blocks of keys each block of queries needs, as tables that the kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.forward.layout import (
    LAST_PARTIAL,
    QUARTERS,
    RUN,
    TASK,
    skips_keys_within_blocks,
)
from qkv.problem.language.expressions import Load, Node, Op, conjunction, walk
from qkv.problem.spec import Problem, Spec
from qkv.problem.tiles import TileGrid, TileKind

Array = NDArray[Any]
TableContents: TypeAlias = tuple[tuple[str, np.dtype[Any], tuple[int, ...], bytes], ...]
"""Name, dtype, shape and bytes of each table."""

TILE_KV = 64
"""Number of keys of one tile; neighbouring tiles of one kind become one run."""

_FINE_TILES, _MOST_FINE_TILES = (16, 32), 2**17
"""Numbers of keys of finer tiles, and the most such tiles that are classified for one head."""
_TILES_AT_ONCE = 2**16
"""Number of tiles that are classified at once, in a few arrays of 512 KiB."""
_LEAST_SHARING = 8
"""A bias is bounded only if at least this many heads and batch rows share it."""
CHEAP_OPERATIONS = 1e7
"""The most operations with which computing all products is as quick as reading tables to find tiles
to skip."""
_MOST_CONTENT_BYTES = 4096
_KEPT_TASKS = 4096
"""Schedules of up to this many tasks are cached from call to call."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of `TASK`, rows of `RUN` or `BLOCK_RUN`, and how many pairs of a query and a key."""

    tasks: Array
    runs: Array
    pairs: int

    def ordered(self) -> Schedule:
        """The same with its tasks in the order of batch rows, heads and queries."""
        order = np.lexsort(self.tasks[:, 2::-1].T)
        return replace(self, tasks=np.ascontiguousarray(self.tasks[order]))


class BlockFilter(Protocol):
    """Finds tiles that a mask allows, but that need not be computed."""

    def skip(self, kinds: Array, tile_kv: int, batch: int, head: int, first: int) -> Array:
        """`TileKind` of the query blocks of a head from `first` on, of which some are now empty."""
        ...


def packs_gqa(spec: Spec, lanes: int) -> bool:
    """Whether the heads that share a kv head become rows of one block: few queries fill no vector.

    Not if the mask differs from head to head: then each head has a schedule of its own.
    """
    leave_lanes = spec.group_size > 1 and 2 * spec.q_len <= lanes
    return leave_lanes and "head" not in spec.mask.variables


def fine_tile(problem: Problem, block_q: int) -> int:
    """How many keys a tile has: few, if classifying many small tiles costs little.

    With small tiles, less is computed along the edge of a mask.
    """
    spec, arrays = problem.spec, problem.operands.tables
    if not _small_tables(spec, arrays).issuperset(spec.mask.tables):
        return TILE_KV
    cells = -(-spec.q_len // block_q) * spec.kv_len
    return next((keys for keys in _FINE_TILES if cells <= keys * _MOST_FINE_TILES), TILE_KV)


def _small_tables(spec: Spec, arrays: Mapping[str, Array]) -> set[str]:
    """Tables of which a mask reads no more elements for a batch row than it has tokens."""
    reads: dict[str, int] = {}
    for load in (node for node in walk(spec.mask) if isinstance(node, Load)):
        sizes = zip(load.indices, arrays[load.table].shape, strict=True)
        own = prod(size for index, size in sizes if "batch" not in index.variables)
        reads[load.table] = max(own, reads.get(load.table, 0))
    return {name for name, size in reads.items() if size <= spec.q_len + spec.kv_len}


def schedule(
    problem: Problem,
    block_q: int,
    pack_gqa: bool = False,
    q_blocks_per_task: int = 1,
    tile_kv: int = TILE_KV,
    block_kv: int | None = None,
    block_filter: BlockFilter | None = None,
    *,
    in_quarters: bool = True,
) -> Schedule:
    """Tasks and runs of keys for every block of queries; in each head, those with most keys first.

    If several blocks are one task, the kind of a run holds two bits for each of them, a `TileKind`.
    With `block_kv`, of which a tile is at least a quarter, runs are of blocks of keys, `BLOCK_RUN`.
    Blocks are whole but for quarters at their ends that no query of the task may see, which are
    not read; the first and the last quarter that a block of queries sees are counted from where
    the run begins. Without `in_quarters` they are rows of `RUN`, for one block of queries a task.

    So which keys a kernel takes in one block follows from their positions: a sum has the same
    order whether tiles were found to be empty or full before, or by the kernel.
    """
    spec, (mask, has_costly) = problem.spec, cheap_conditions(problem, CHEAP_OPERATIONS)
    if pack_gqa:
        return _packed_schedule(problem, mask, has_costly, block_q)
    blocks = spec.batch_size * spec.num_heads * -(-spec.q_len // block_q)
    sizes = (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, block_q, tile_kv)
    contents = table_contents(mask, problem.operands.tables)
    if contents is not None and blocks <= _KEPT_TASKS and block_filter is None:
        return _cached_schedule(
            mask, contents, has_costly, *sizes, q_blocks_per_task, block_kv, in_quarters
        )
    grid = TileGrid(mask, problem.operands.tables, spec.q_len, spec.kv_len, block_q, tile_kv)
    shape = (spec.batch_size, spec.num_heads)
    return _schedule(
        grid, has_costly, *shape, q_blocks_per_task, block_kv, in_quarters, block_filter
    )


def cheap_conditions(problem: Problem, most: float) -> tuple[Node, bool]:
    """The conditions of the mask whose bounds cost little, and whether others were left out.

    Conditions that read no arrays cost nothing: they have been bounded before. In a problem of up
    to `most` operations, no others are worth their cost. Bounding a bias reads it all; a bias that
    few heads share is read in about the time that its tiles take, and seldom empties any.

    Fine tiles of small tables with elements for pairs decide the order in which a row is added up.
    So it is the operations of one batch row that count there, whatever the others are.
    """
    spec, arrays = problem.spec, problem.operands.tables
    pairs = spec.batch_size * spec.num_heads * spec.q_len * spec.kv_len
    operations = 2.0 * (spec.head_dim + spec.v_head_dim) * pairs
    fine = set() if skips_keys_within_blocks(spec.mask) else _small_tables(spec, arrays)
    costly = {
        name
        for name, array in arrays.items()
        if (array.ndim and operations <= most * (spec.batch_size if name in fine else 1))
        or (
            array.dtype.kind != "b"
            and array.size > max(4 * (spec.q_len + spec.kv_len), pairs // _LEAST_SHARING)
        )
    }
    parts = _conditions(spec.mask)
    cheap = [part for part in parts if not part.tables & costly]
    return conjunction(cheap), len(cheap) < len(parts)


def _conditions(node: Node) -> list[Node]:
    """The operands of a conjunction, each once."""
    conditions: dict[Node, None] = {}
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if not (isinstance(part, Op) and part.name == "and"):
            conditions[part] = None
        elif part not in seen:
            seen.add(part)
            waiting.extend(reversed(part.args))
    return list(conditions)


def _packed_schedule(problem: Problem, mask: Node, has_costly: bool, block_q: int) -> Schedule:
    """The schedule with the `group_size * q_len` queries of a group of heads as rows of a block."""
    spec, arrays = problem.spec, problem.operands.tables
    grid = TileGrid(mask, arrays, spec.q_len, spec.kv_len, spec.q_len, TILE_KV)
    whole = _schedule(grid, has_costly, spec.batch_size, spec.num_kv_heads)
    first_rows = np.arange(0, spec.group_size * spec.q_len, block_q)
    tasks = np.repeat(whole.tasks, len(first_rows), axis=0)
    tasks[:, TASK.index("head")] *= spec.group_size
    tasks[:, TASK.index("first_row")] = np.tile(first_rows, len(whole.tasks))
    return Schedule(tasks, whole.runs, whole.pairs * spec.group_size)


def table_contents(mask: Node, arrays: Mapping[str, Array]) -> TableContents | None:
    """The tables that a mask reads, if they are small enough to compare: the layers of a model
    often have the same."""
    read = [(name, arrays[name]) for name in sorted(mask.tables)]
    if any(array.nbytes > _MOST_CONTENT_BYTES for _, array in read):
        return None
    return tuple((name, array.dtype, array.shape, array.tobytes()) for name, array in read)


def arrays_of(contents: TableContents) -> dict[str, Array]:
    return {name: np.frombuffer(b, dtype).reshape(shape) for name, dtype, shape, b in contents}


@lru_cache(maxsize=64)
def _cached_schedule(
    mask: Node,
    contents: TableContents,
    has_costly: bool,
    batches: int,
    heads: int,
    q_len: int,
    kv_len: int,
    block_q: int,
    tile_kv: int,
    q_blocks_per_task: int,
    block_kv: int | None,
    in_quarters: bool,
) -> Schedule:
    """The schedule of a mask and the contents of its tables, cached."""
    grid = TileGrid(mask, arrays_of(contents), q_len, kv_len, block_q, tile_kv)
    return _schedule(grid, has_costly, batches, heads, q_blocks_per_task, block_kv, in_quarters)


def _schedule(
    grid: TileGrid,
    has_costly: bool,
    batches: int,
    heads: int,
    q_blocks_per_task: int = 1,
    block_kv: int | None = None,
    in_quarters: bool = True,
    block_filter: BlockFilter | None = None,
) -> Schedule:
    """The schedule of a grid. If costly conditions were left out of its mask, no tile is full."""
    mask_batches = batches if "batch" in grid.depends_on else 1
    mask_heads = heads if "head" in grid.depends_on else 1
    own_batches, own_heads = (batches, heads) if block_filter else (mask_batches, mask_heads)
    blocks = -(-grid.q_blocks // q_blocks_per_task)
    runs: list[Array] = []
    counts: list[Array] = []
    step = max(1, _TILES_AT_ONCE // max(grid.kv_blocks * q_blocks_per_task, 1))
    known: tuple[tuple[int, ...], Array] | None = None
    for batch, head in np.ndindex(own_batches, own_heads):
        for first in range(0, blocks, step):
            place = (
                min(batch, mask_batches - 1),
                min(head, mask_heads - 1),
                first * q_blocks_per_task,
            )
            if known is None or known[0] != place:
                last_block = min((first + step) * q_blocks_per_task, grid.q_blocks)
                kinds = grid.classify(*place, last_block)
                if has_costly:
                    kinds[kinds == TileKind.FULL] = TileKind.PARTIAL
                known = place, kinds
            kinds = known[1]
            if block_filter is not None:
                kinds = block_filter.skip(
                    kinds, grid.block_kv, batch, head, first * q_blocks_per_task
                )
            if block_kv is None:
                words = _packed_kinds(kinds, q_blocks_per_task)[..., None]
                rows, new_runs = _find_runs(words, grid.block_kv, grid.kv_len)
            else:
                kind, first_seen, last_seen = _kinds_and_quarters(kinds, block_kv // grid.block_kv)
                used = kind != TileKind.EMPTY
                seen = _seen_quarters(used, first_seen, last_seen, q_blocks_per_task)
                start = np.repeat(seen[..., 0], q_blocks_per_task, axis=0)[: len(kind)]
                parts = kind, *(np.where(used, x - start, 0) for x in (first_seen, last_seen))
                words = np.stack(
                    [_packed_kinds(part, q_blocks_per_task) for part in parts], axis=-1
                )
                rows, new_runs = _find_runs(words, block_kv, grid.kv_len, seen)
                new_runs = new_runs if in_quarters else new_runs[:, : len(RUN)]
            if q_blocks_per_task == 1 and (block_kv is None or not in_quarters):
                new_runs[:, 2] &= TileKind.PARTIAL
            runs.append(new_runs)
            counts.append(np.bincount(rows, minlength=min(step, blocks - first)))
    every_run, count = np.concatenate(runs), np.concatenate(counts)
    last = np.cumsum(count)
    ends = np.concatenate([[0], np.cumsum(every_run[:, 1] - every_run[:, 0])])
    keys = ends[last] - ends[last - count]
    shape = (own_batches, own_heads, blocks)
    order = np.argsort(-keys.reshape(shape), axis=-1, kind="stable")
    tasks = np.empty((batches, heads, blocks, len(TASK)), np.int64)
    tasks[..., 0] = np.arange(batches)[:, None, None]
    tasks[..., 1] = np.arange(heads)[:, None]
    tasks[..., 2] = order * grid.block_q * q_blocks_per_task
    for column, value in ((3, last - count), (4, last)):
        tasks[..., column] = np.take_along_axis(value.reshape(shape), order, axis=-1)
    copies = batches * heads // (own_batches * own_heads)
    pairs = int(keys.sum()) * copies * grid.block_q * q_blocks_per_task
    return Schedule(tasks.reshape(-1, len(TASK)), every_run, pairs)


def _packed_kinds(kinds: Array, q_blocks_per_task: int) -> Array:
    """One row of words for `q_blocks_per_task` rows: two bits for each, the first one's lowest."""
    if q_blocks_per_task == 1:
        return kinds.astype(np.int64)
    rows = -(-len(kinds) // q_blocks_per_task)
    padded = np.zeros((rows * q_blocks_per_task, kinds.shape[1]), np.int64)
    padded[: len(kinds)] = kinds
    shifted = (
        padded.reshape(rows, q_blocks_per_task, -1) << 2 * np.arange(q_blocks_per_task)[:, None]
    )
    return np.asarray(shifted.sum(axis=1))


def _kinds_and_quarters(kinds: Array, tiles: int) -> tuple[Array, Array, Array]:
    """Kind, first used quarter and last used quarter of each block of `tiles` tiles.

    A kind is a `TileKind` or `LAST_PARTIAL`.
    """
    rows, columns = kinds.shape
    padded = np.full((rows, -(-columns // tiles) * tiles), TileKind.EMPTY, kinds.dtype)
    padded[:, :columns] = kinds
    # Tiles are the first axis, because NumPy is slow at reducing a short last one.
    blocks = np.ascontiguousarray(np.moveaxis(padded.reshape(rows, -1, tiles), -1, 0))
    used, is_full_tile = blocks != TileKind.EMPTY, blocks == TileKind.FULL
    some = used.any(axis=0)
    first, after = used.argmax(axis=0), tiles - used[::-1].argmax(axis=0)
    full = is_full_tile.sum(axis=0) == after - first
    kind = np.where(full, TileKind.FULL, TileKind.PARTIAL)
    first, last = first * QUARTERS // tiles, after * QUARTERS // tiles - 1
    number = (np.arange(tiles) * QUARTERS // tiles)[:, None, None]
    before = (number >= first) & (number < last)
    is_full = (is_full_tile | ~before).all(axis=0) & (last > first)
    kind = np.where((kind == TileKind.PARTIAL) & is_full, LAST_PARTIAL, kind)
    kind, first, last = (np.where(some, word, 0) for word in (kind, first, last))
    return kind, first, last


def _seen_quarters(used: Array, first: Array, last: Array, q_blocks_per_task: int) -> Array:
    """The first quarter that each task sees of each block of keys, and the one after the last.

    All quarters count as seen in blocks that no query of the task sees.
    """
    rows = -(-len(used) // q_blocks_per_task)
    quarters = np.empty((rows, used.shape[1], 2), np.int64)
    for n, (quarter, nothing, choose) in enumerate(
        ((first, QUARTERS, np.minimum), (last + 1, 0, np.maximum))
    ):
        padded = np.full((rows * q_blocks_per_task, used.shape[1]), nothing)
        padded[: len(used)] = np.where(used, quarter, nothing)
        choose.reduce(padded.reshape(rows, q_blocks_per_task, -1), axis=1, out=quarters[..., n])
    quarters[quarters[..., 1] == 0] = 0, QUARTERS
    return quarters


def _find_runs(
    words: Array, size: int, kv_len: int, seen: Array | None = None
) -> tuple[Array, Array]:
    """Runs of neighbouring blocks of keys with the same words, without empty ones, and their rows.

    The first word of a block is its kind. A block of which only some quarters are `seen` is a run
    of its own, of these.
    """
    if seen is None:
        seen = np.broadcast_to(np.array([0, QUARTERS]), (*words.shape[:2], 2))
    edge = np.ones((words.shape[0], words.shape[1] + 1), bool)
    edge[:, 1:-1] = (words[:, 1:] != words[:, :-1]).any(axis=-1)
    whole = (seen[..., 0] == 0) & (seen[..., 1] == QUARTERS)
    edge[:, 1:-1] |= ~(whole[:, :-1] & whole[:, 1:])
    used = words[..., 0] != TileKind.EMPTY
    rows, first = np.nonzero(edge[:, :-1] & used)
    _, final = np.nonzero(edge[:, 1:] & used)
    starts = first * size + seen[rows, first, 0] * size // QUARTERS
    stops = final * size + seen[rows, final, 1] * size // QUARTERS
    return rows, np.column_stack([starts, np.minimum(stops, kv_len), words[rows, first]])
