"""Orders: which rows of a sequence each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked_integer, checked_size, shown
from qkv.distributed.orders.arrays import concatenated, taken
from qkv.errors import ArgumentError, ShapeError

__all__ = ["Order", "assigned", "numbers"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Order:
    """Which rows of a sequence each rank holds, and in which order.

    Make one with `contiguous`, `zigzag`, `striped`, or `qkv.distributed.balanced`.

    Attributes
    ----------
    name : str
    length : int
        Rows of the whole sequence.
    runs : tuple of tuple of range
        For each rank, the rows that it holds; its shard has them one run after another.

    Raises
    ------
    ArgumentError
        If the runs do not hold every row exactly once.

    Notes
    -----
    A causal mask gives late rows more work than early ones. `zigzag` gives every rank an early and
    a late run of equal length (Brandon et al., "Striped Attention", 2023, and Llama 3's context
    parallelism use the same idea), `striped` every n-th row.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.distributed import Order
    >>> order = Order.zigzag(8, 2)
    >>> order.position_ids(1)
    array([2, 3, 4, 5])
    >>> order.shard(np.arange(8.0)[:, None] * 10, rank=1)[:, 0]
    array([20., 30., 40., 50.])
    """

    name: str
    length: int
    runs: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        if not _are_runs(self.runs):
            raise ArgumentError(
                f"runs={shown(self.runs)} does not hold a tuple of ranges for each rank.",
                action="Write it like ((range(0, 4),), (range(4, 8),)), for two ranks.",
            )
        held = np.zeros(checked_size("length", self.length, 0), np.int64)
        for run in (run for rank in self.runs for run in rank):
            if len(run) and not (run.start >= 0 and run[-1] < self.length and run.step > 0):
                raise ArgumentError(
                    f"{run} reaches beyond a sequence of {self.length} rows.",
                    action="Name rows from 0 to length - 1, rising.",
                )
            held[run.start : run.stop : run.step] += 1
        wrong = np.flatnonzero(held != 1)
        if len(wrong):
            raise ArgumentError(
                f"{len(wrong)} of {self.length} rows are not held by exactly one rank.",
                [("first of them", f"row {wrong[0]}, held by {held[wrong[0]]} ranks")],
                "Give every row to one rank.",
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.runs)

    def rows(self, rank: int) -> int:
        """Number of rows that a rank holds."""
        return sum(map(len, self._of(rank)))

    def position_ids(self, rank: int) -> Array:
        """The row numbers of a rank's shard in the whole sequence, int64."""
        return numbers(self._of(rank))

    def _of(self, rank: int) -> tuple[range, ...]:
        """The runs of a rank; torch calls a process outside of a group its rank -1."""
        if not 0 <= checked_integer("rank", rank) < self.ranks:
            raise ArgumentError(
                f"there is no rank {rank} in an order of {self.ranks} ranks.",
                action=f"Pass a rank from 0 to {self.ranks - 1}.",
            )
        return self.runs[rank]

    def shard(self, array: Any, rank: int, axis: int = -2) -> Any:
        """The rows of a whole array that a rank holds.

        Parameters
        ----------
        array : array or tensor
            With all `length` rows along `axis`: query, key or value (`axis=-2`; -3 in the layout
            "blhd"), token ids or labels (`axis=-1`).
        rank : int
        axis : int

        Raises
        ------
        ShapeError
            If the array does not have `length` rows along the axis.
        """
        _check_array(array, axis)
        if not -array.ndim <= axis < array.ndim:
            raise ShapeError(
                f"the array has no axis {axis}.",
                [("shape", str(tuple(array.shape)))],
                "Name the axis of the rows: axis=-1 for token ids.",
            )
        if array.shape[axis] != self.length:
            raise ShapeError(
                f"the array has {array.shape[axis]} rows along axis {axis}; the order is of "
                f"{self.length}.",
                [("shape", str(tuple(array.shape)))],
                "Make the order for the length of the array, or name another axis.",
            )
        return taken(array, self.position_ids(rank), axis)

    def unshard(self, shards: Sequence[Any], axis: int = -2) -> Any:
        """The whole array of all ranks' shards, which are given in the order of ranks.

        Raises
        ------
        ShapeError
            If a shard does not have the rows of its rank.
        """
        for shard in shards:
            _check_array(shard, axis)
        sizes = [shard.shape[axis] for shard in shards]
        if sizes != [self.rows(rank) for rank in range(self.ranks)]:
            raise ShapeError(
                f"the shards have {sizes} rows along axis {axis}.",
                [("the order", str([self.rows(rank) for rank in range(self.ranks)]))],
                "Pass one shard for each rank, in the order of ranks.",
            )
        together = concatenated(shards, axis)
        numbers = np.concatenate([self.position_ids(rank) for rank in range(self.ranks)])
        return taken(together, np.argsort(numbers), axis)

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> Order:
        """Neighbouring rows, in the order of ranks; the first ranks have one more if need be."""
        return cls("contiguous", length, tuple((run,) for run in _cut(length, ranks)))

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> Order:
        """Cut rows into 2 n runs of equal length; rank r holds run r and run 2 n - 1 - r."""
        runs = _cut(length, 2 * _checked(ranks))
        return cls("zigzag", length, tuple(
            _joined((runs[rank], runs[2 * ranks - 1 - rank])) for rank in range(ranks)
        ))  # fmt: skip

    @classmethod
    def striped(cls, length: int, ranks: int) -> Order:
        """Rank r holds rows r, r + n, r + 2 n, ... (Brandon et al., 2023)."""
        length, ranks = checked_size("length", length, 0), _checked(ranks)
        return cls("striped", length, tuple((range(r, length, ranks),) for r in range(ranks)))

    def joined(self, count: int) -> Order:
        """The order of groups of `count` neighbouring ranks, each with its rows rising."""
        groups = []
        for first in range(0, self.ranks, count):
            numbers = np.sort(
                np.concatenate([self.position_ids(r) for r in range(first, first + count)])
            )
            groups.append(_runs_of(numbers))
        return Order(self.name, self.length, tuple(groups))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Order:
        """Neighbouring rows, in the order of ranks, as many as `sizes` says."""
        sizes = [checked_size(f"sizes[{rank}]", size, 0) for rank, size in enumerate(sizes)]
        ends = np.cumsum([0, *sizes]).tolist()
        runs = tuple((range(a, b),) for a, b in pairwise(ends))
        return cls("contiguous", int(ends[-1]), runs)


def assigned(name: str, blocks: Sequence[range], owners: Sequence[int], ranks: int) -> Order:
    """The order in which block i belongs to rank `owners[i]`."""
    held: list[list[range]] = [[] for _ in range(ranks)]
    for block, owner in zip(blocks, owners, strict=True):
        held[owner].append(block)
    return Order(name, sum(map(len, blocks)), tuple(_joined(tuple(runs)) for runs in held))


def _are_runs(given: Any) -> bool:
    """Whether there are ranges for each of some ranks."""
    ranks = given if isinstance(given, (tuple, list)) else [given]
    are_sequences = all(isinstance(rank, (tuple, list)) for rank in ranks)
    return are_sequences and all(isinstance(run, range) for rank in ranks for run in rank)


def _check_array(array: Any, axis: Any) -> None:
    """Refuse what is not an array, and an axis that is not a number."""
    checked_integer("axis", axis)
    if not (hasattr(array, "ndim") and hasattr(array, "shape")):
        raise ArgumentError(
            f"{shown(array)} is a {type(array).__name__}, not an array.",
            action="Pass an array of NumPy or JAX, or a tensor.",
        )


def _runs_of(numbers: Array) -> tuple[range, ...]:
    """Rising row numbers as runs of neighbours."""
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    pieces = np.split(numbers, edges)
    return tuple(range(int(p[0]), int(p[-1]) + 1) for p in pieces if len(p))


def numbers(runs: Sequence[range]) -> Array:
    """The numbers of the rows of some runs, one run after another."""
    parts = [np.arange(run.start, run.stop, run.step, dtype=np.int64) for run in runs]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _checked(ranks: int) -> int:
    if checked_integer("ranks", ranks) < 1:
        raise ArgumentError(f"{ranks} ranks cannot hold anything.", action="Name 1 rank or more.")
    return ranks


def _cut(length: int, count: int) -> list[range]:
    """Neighbouring runs whose lengths differ by at most one."""
    small, more = divmod(checked_size("length", length, 0), _checked(count))
    ends = np.cumsum([0, *[small + (i < more) for i in range(count)]]).tolist()
    return [range(a, b) for a, b in pairwise(ends)]


def _joined(runs: tuple[range, ...]) -> tuple[range, ...]:
    """Rising runs, neighbours as one, empty ones left out."""
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.start and joined[-1].step == run.step == 1:
            joined[-1] = range(joined[-1].start, run.stop)
        elif len(run):
            joined.append(run)
    return tuple(joined)
