"""How much of a problem each pair of shards is, and orders that share the work out evenly."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked_size
from qkv.distributed.orders.order import Order, assigned, numbers
from qkv.problem.building.check import check
from qkv.problem.language.evaluate import evaluate
from qkv.problem.part import placeholder
from qkv.problem.spec import Problem
from qkv.problem.tiles import TileGrid, TileKind
from qkv.variants.as_variant import as_variant

__all__ = ["balance", "balanced", "pairs_between", "problem_of"]

Array = NDArray[Any]
_TILES = 1024
"""Tiles along one side of the whole problem whose mask is looked at."""
_MOST_RUNS = 32
"""Blocks of a rank, beyond which its parts would become too small to compute well."""
_MOST_COUNTED = 2**23
"""Pairs in tiles that the mask forbids in part, up to which they are counted; beyond, half are."""
_HEAD_DIM = 1024
"""Room for the frequencies of any RoPE."""
EVEN = 1.02
"""Largest over mean work with which more and smaller blocks are not tried."""


def balanced(
    length: int,
    ranks: int,
    *variants: Any,
    num_heads: int = 1,
    batch_shape: tuple[int, ...] = (),
    q_offset: Any = None,
    kv_offset: Any = 0,
) -> Order:
    """An order in which every rank has about equal work and equally many rows, for any mask.

    Parameters
    ----------
    length : int
        Rows of the sequence.
    ranks : int
    *variants
        Those of the call: their masks say how much work each row is.
    num_heads : int
        Needed if a variant has an array with one entry for each head.
    batch_shape : tuple of int
        Needed if a variant has an array with one entry for each batch row.
    q_offset, kv_offset
        As for `qkv.attention`.

    Returns
    -------
    Order
        Of at most 32 runs on each rank, as few as bring the largest work within 2 % of the mean.

    Raises
    ------
    QkvError
        If the variants do not fit a sequence of this length.

    Notes
    -----
    The tile schedule of the mask gives the pairs in each block of rows. Blocks are dealt out by
    falling work, each to the rank with the least so far that has room (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969), and then exchanged in pairs while that helps.

    Examples
    --------
    >>> import qkv
    >>> from qkv.distributed import balanced
    >>> balanced(1024, 2, qkv.Causal()).runs
    ((range(0, 256), range(768, 1024)), (range(256, 768),))
    """
    length = checked_size("length", length, 0)
    problem = problem_of(
        length, variants, num_heads=num_heads, batch_shape=batch_shape, q_offset=q_offset,
        kv_offset=kv_offset,
    )  # fmt: skip
    best = Order.contiguous(length, ranks)
    if ranks == 1 or length < 2 * ranks:
        return best
    rising = np.concatenate([[0.0], np.cumsum(_row_work(problem))])
    if rising[-1] == 0:
        return best
    lowest = np.inf
    runs = 1
    while runs <= _MOST_RUNS and runs * ranks <= length:
        blocks = [run[0] for run in Order.contiguous(length, runs * ranks).runs]
        edges = np.array([0, *[block.stop for block in blocks]])
        work = np.diff(np.interp(edges, np.linspace(0, length, len(rising)), rising))
        owners = _dealt(work, ranks)
        most = np.bincount(owners, work, ranks).max() / (work.sum() / ranks)
        if most < lowest - 1e-9:
            best, lowest = assigned("balanced", blocks, owners.tolist(), ranks), most
        if lowest <= EVEN:
            break
        runs *= 2
    return best


def problem_of(
    length: int,
    variants: Any,
    *,
    num_heads: int = 1,
    batch_shape: tuple[int, ...] = (),
    q_offset: Any = None,
    kv_offset: Any = 0,
) -> Problem:
    """A problem of this many queries and keys whose operands have no memory."""
    shape = (*batch_shape, num_heads, length, _HEAD_DIM)
    empty = placeholder(shape, np.dtype(np.float32))
    given = tuple(map(as_variant, variants))
    return check(empty, empty, empty, given, q_offset=q_offset, kv_offset=kv_offset)


def pairs_between(problem: Problem, queries: Order, keys: Order) -> tuple[Array, Array]:
    """How much each rank's queries see of each rank's keys, both `(ranks, ranks)`, about.

    Returns
    -------
    pairs : array
        Of a query and a key that it sees, summed over batch rows and heads. Where masks have very
        many tiles that are forbidden in part, these count as half.
    rows : array
        Keys in those runs of which a query sees at least one.
    """
    density = _density(problem)
    seen = _shares(queries, density.shape[0]) @ density
    pairs, rows = np.zeros((2, queries.ranks, keys.ranks))
    for rank in range(keys.ranks):
        of_runs = seen @ _shares_of_runs(keys, rank, density.shape[1]).T
        pairs[:, rank] = of_runs.sum(axis=1)
        rows[:, rank] = (of_runs > 0) @ np.array([len(run) for run in keys.runs[rank]])
    return pairs, rows


def balance(work: Array) -> float:
    """Largest over mean work of the ranks, from `pairs_between`; 1 is even."""
    by_rank = work.sum(axis=1)
    return float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0


def _row_work(problem: Problem) -> Array:
    """Pairs in each row of tiles."""
    return np.asarray(_density(problem).sum(axis=1))


def _density(problem: Problem) -> Array:
    """Pairs in each tile of a grid over the whole problem."""
    spec = problem.spec
    tile_q, tile_kv = max(1, -(-spec.q_len // _TILES)), max(1, -(-spec.kv_len // _TILES))
    grid = TileGrid(spec.mask, problem.operands.tables, spec.q_len, spec.kv_len, tile_q, tile_kv)
    rows = np.minimum(tile_q, spec.q_len - tile_q * np.arange(grid.q_blocks))
    columns = np.minimum(tile_kv, spec.kv_len - tile_kv * np.arange(grid.kv_blocks))
    batches = range(spec.batch_size if "batch" in grid.depends_on else 1)
    heads = range(spec.num_heads if "head" in grid.depends_on else 1)
    pairs = np.zeros((grid.q_blocks, grid.kv_blocks))
    for batch in batches:
        for head in heads:
            kinds = grid.classify(batch, head)
            full = kinds == TileKind.FULL
            pairs += full * rows[:, None] * columns
            partial = np.argwhere(kinds == TileKind.PARTIAL)
            if len(partial) * tile_q * tile_kv <= _MOST_COUNTED:
                pairs[tuple(partial.T)] += _counted(grid, partial, batch, head)
            else:
                pairs[tuple(partial.T)] += (rows[:, None] * columns)[tuple(partial.T)] / 2
    repeats = spec.batch_size * spec.num_heads / (len(batches) * len(heads))
    return pairs * repeats


def _counted(grid: TileGrid, tiles: Array, batch: int, head: int) -> Array:
    """The pairs that the mask allows in each of these tiles, counted one by one."""
    q_index = tiles[:, :1] * grid.block_q + np.arange(grid.block_q)
    kv_index = tiles[:, 1:] * grid.block_kv + np.arange(grid.block_kv)
    inside = (q_index < grid.q_len)[:, :, None] & (kv_index < grid.kv_len)[:, None, :]
    variables = {
        "q_index": np.minimum(q_index, grid.q_len - 1)[:, :, None],
        "kv_index": np.minimum(kv_index, grid.kv_len - 1)[:, None, :],
        "batch": batch,
        "head": head,
    }
    allowed = evaluate(grid.mask, variables, grid.tables, np.dtype(np.float32))
    return np.asarray((inside & allowed).sum(axis=(1, 2)))


def _shares(order: Order, tiles: int) -> Array:
    """The share of each tile's rows that each rank holds `(ranks, tiles)`."""
    return np.array([_shares_of_runs(order, r, tiles).sum(axis=0) for r in range(order.ranks)])


def _shares_of_runs(order: Order, rank: int, tiles: int) -> Array:
    """The share of each tile's rows in each run of a rank `(runs, tiles)`."""
    tile = max(1, -(-order.length // max(tiles, 1)))
    held = [np.bincount(numbers((run,)) // tile, minlength=tiles) for run in order.runs[rank]]
    sizes = np.minimum(tile, order.length - tile * np.arange(tiles))
    return np.array(held).reshape(len(held), tiles) / sizes


def _dealt(work: Array, ranks: int) -> NDArray[np.int64]:
    """The rank of each block: equally many for each, with work as even as exchanges make it."""
    room = np.full(ranks, len(work) // ranks)
    load = np.zeros(ranks)
    owners = np.zeros(len(work), np.int64)
    for block in np.argsort(-work, kind="stable"):
        rank = int(np.argmin(np.where(room > 0, load, np.inf)))
        owners[block] = rank
        load[rank] += work[block]
        room[rank] -= 1
    for _ in range(16 * ranks):
        high = int(np.argmax(load))
        mine, others = np.flatnonzero(owners == high), np.flatnonzero(owners != high)
        moved = work[mine][:, None] - work[others]
        after = np.maximum(load[high] - moved, load[owners[others]] + moved)
        at = np.unravel_index(np.argmin(after), after.shape)
        if not after[at] < load[high] * (1 - 1e-9):
            break
        a, b = mine[at[0]], others[at[1]]
        load[high] -= moved[at]
        load[owners[b]] += moved[at]
        owners[a], owners[b] = owners[b], owners[a]
    return owners
