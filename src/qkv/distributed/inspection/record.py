"""Looking into attention over ranks: statistics of weights that no rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.arguments.declarations import is_integer, shown
from qkv.arrays.copies import own_copy
from qkv.backends import Inspectable, choose
from qkv.distributed.calls.agreed_call import Place
from qkv.distributed.calls.parts import ShardRows
from qkv.distributed.calls.sharded_call import ShardedCall
from qkv.distributed.messages.links import Links
from qkv.errors import ArgumentError, ShapeError
from qkv.inspection.weights.statistics import number_of_keys
from qkv.problem.part import PartOf
from qkv.problem.scores import Scores
from qkv.problem.spec import Problem

__all__ = ["DistributedRecord", "ShardOperands", "with_own_arrays"]

Array = NDArray[Any]
_BLOCK = 512
"""Queries, and keys, whose weights are held at a time."""


@dataclass(frozen=True, slots=True)
class ShardOperands:
    """This rank's shards: query as an array, keys and values as they are sent."""

    query: Array
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Seen:
    """A part that this rank computes: whose keys, which problem, and where both lie in shards."""

    owner: int
    problem: Problem
    part: PartOf
    q_at: slice
    kv_at: slice


class DistributedRecord:
    """Attention over ranks, and what is needed to look into it.

        w[i, j] = exp(s[i, j] - lse[i]),   recomputed from query, key and lse where it is asked for

    Statistics are of this rank's rows, in the order of its shard; keys are named by their number in
    the whole sequence. Each method is a pass in which keys travel, so that every rank must call it.

    Attributes
    ----------
    output, lse : Tensor
        As `qkv.distributed.attention` returns them.
    entropy, max_weight : Tensor (..., num_heads, own rows)
        In nats, and the largest weight of each row. They come with the output.

    Notes
    -----
    `received` and `top(256)` are compiled passes over the scores with the backend "cpu". `tile`,
    more keys, and other backends take `2 head_dim` operations for each pair in NumPy, and hold no
    more than a block of 512 x 512 weights of one head.
    """

    def __init__(
        self,
        call: ShardedCall,
        operands: ShardOperands,
        output: torch.Tensor,
        lse: Array,
        entropy: Array,
        max_weight: Array,
    ) -> None:
        self.output = output
        self.lse = torch.from_numpy(lse.astype(call.call.problem.spec.compute_dtype))
        self.entropy = torch.from_numpy(entropy)
        self.max_weight = torch.from_numpy(max_weight)
        self._call = call
        self._operands = operands
        self._lse = lse

    def received(self) -> torch.Tensor:
        """`sum_i w[i, j]` of this rank's keys, `(..., num_heads, own keys)`, over all queries."""
        ring = self._call.ring
        self._agree("received")
        own = ring.links.rank
        heads = self._lse.shape[:-1]
        sums = [np.zeros((*heads, ring.keys.rows(rank))) for rank in range(ring.links.ranks)]
        for seen in self._parts():
            of_owner = sums[seen.owner][..., seen.kv_at]
            backend = self._inspectable(seen)
            if backend is not None:
                of_owner += backend.received(seen.problem, self._lse_of(seen), of_part=True)
                continue
            for index, head, _, columns, weights in self._blocks(seen):
                of_owner[(*index, head, columns)] += weights.sum(axis=0)
        parts = {rank: torch.from_numpy(of) for rank, of in enumerate(sums)}
        mine = parts.pop(own)
        buffers = {rank: torch.empty_like(mine) for rank in parts}
        ring.links.exchange(parts, buffers).wait()
        buffers[own] = mine
        total = torch.zeros_like(mine)
        for rank in range(ring.links.ranks):
            total += buffers[rank]
        return total.to(self.lse.dtype)

    def top(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and weights of the k keys with the largest weights, falling, for each own row.

        Of equal weights the lower number comes first; rows of fewer keys end in -1 and 0. Both are
        `(..., num_heads, own rows, k)`.

        Raises
        ------
        ArgumentError
            If k is not a whole number of 1 or more.
        """
        with self._place.told():
            k = number_of_keys(k)
        self._agree("top", k=k)
        numbers = np.full((*self._lse.shape, k), -1, np.int64)
        best = np.zeros((*self._lse.shape, k))
        for seen in self._parts():
            for place, names, weights in self._best_of(seen, k):
                _merge_best(numbers[place], best[place], names, weights)
        return torch.from_numpy(numbers), torch.from_numpy(best).to(self.lse.dtype)

    def tile(self, queries: slice, keys: slice) -> torch.Tensor:
        """Weights of some rows of the whole sequence, on every rank.

        Parameters
        ----------
        queries, keys : slice
            Row numbers of the whole sequence, with step 1.

        Returns
        -------
        Tensor (..., num_heads, queries, keys)

        Raises
        ------
        ShapeError, ArgumentError
            If a slice reaches beyond the sequence, or is not one.
        DistributedError
            If ranks ask for different rows.
        """
        ring = self._call.ring
        with self._place.told():
            q_range = _range_of(queries, ring.queries.length, "queries")
            kv_range = _range_of(keys, ring.keys.length, "keys")
        self._agree("tile", queries=str(q_range), keys=str(kv_range))
        tile = np.zeros((*self._lse.shape[:-1], len(q_range), len(kv_range)))
        for seen in self._parts():
            for index, head, rows, columns, weights in self._blocks(seen):
                part_rows = slice(rows.start - seen.q_at.start, rows.stop - seen.q_at.start)
                numbers = _numbers(seen.part.q_rows, part_rows)
                of_kv = _numbers(seen.part.kv_rows, columns)
                a, b = (
                    np.flatnonzero((n >= r.start) & (n < r.stop))
                    for n, r in ((numbers, q_range), (of_kv, kv_range))
                )
                to = numbers[a][:, None] - q_range.start, of_kv[b][None] - kv_range.start
                tile[(*index, head, *to)] = weights[a[:, None], b]
        summed = ring.links.summed(torch.from_numpy(tile))
        return summed.to(self.lse.dtype)

    def _agree(self, function: str, **said: Any) -> None:
        """Raise unless every rank asks for the same."""
        self._place.everyone({"function": f"record.{function}", **said}, torch.device("cpu"))

    @property
    def _place(self) -> Place:
        links = self._call.ring.links
        return Place(links, Links(None, links.timeout))

    def _parts(self) -> Iterator[_Seen]:
        ring, query = self._call.ring, self._operands.query
        own = ShardRows(ring.queries.runs[ring.links.rank])
        for step, keys, shard in ring.key_shards(self._operands.key, self._operands.value):
            if shard is None:
                continue
            owner = (ring.links.rank - step) % ring.links.ranks
            of_owner = dict(ShardRows(ring.keys.runs[owner]))
            for part, q_at, at in ring.parts.pairs(own, keys):
                key, value = (of[..., at, :] for of in shard)
                problem = part.of(ring.parts.whole, query[..., q_at, :], key, value)
                yield _Seen(owner, problem, part, q_at, of_owner[part.kv_rows])

    def _inspectable(self, seen: _Seen) -> Inspectable | None:
        """The backend that computes a part, if it computes statistics of weights."""
        parts = self._call.ring.parts
        backend = choose(seen.problem.spec, parts.backend).backend
        return backend if isinstance(backend, Inspectable) else None

    def _lse_of(self, seen: _Seen) -> Array:
        return np.ascontiguousarray(self._lse[..., seen.q_at])

    def _best_of(self, seen: _Seen, k: int) -> Iterator[tuple[Any, Array, Array]]:
        """(rows of the shard, numbers of keys, their weights): the k best keys of a part, or all
        keys of one block after the other."""
        backend, best_keys = self._inspectable(seen), None
        if backend is not None:
            best_keys = backend.top(seen.problem, self._lse_of(seen), k, of_part=True)
        if best_keys is not None:
            keys = _numbers(seen.part.kv_rows, slice(None))
            for first in range(0, seen.problem.spec.q_len, _BLOCK):
                rows = slice(first, min(first + _BLOCK, seen.problem.spec.q_len))
                here = slice(seen.q_at.start + rows.start, seen.q_at.start + rows.stop)
                indices, weights = (of[..., rows, :] for of in best_keys)
                yield (..., here, slice(None)), keys[indices], weights
            return
        for index, head, rows, columns, weights in self._blocks(seen):
            keys = np.broadcast_to(_numbers(seen.part.kv_rows, columns), weights.shape)
            yield (*index, head, rows), keys, weights

    def _blocks(self, seen: _Seen) -> Iterator[tuple[Any, int, slice, slice, Array]]:
        """(batch index, head, rows of the shard, columns of the part, weights) of every block."""
        problem, q_at = seen.problem, seen.q_at
        spec = problem.spec
        scores = Scores(problem, spec.compute_dtype)
        for batch, index in enumerate(np.ndindex(*spec.batch_shape)):
            for head in range(spec.num_heads):
                for first in range(0, spec.q_len, _BLOCK):
                    rows = slice(first, min(first + _BLOCK, spec.q_len))
                    here = slice(q_at.start + rows.start, q_at.start + rows.stop)
                    lse = self._lse[(*index, head, here)][:, None]
                    for left in range(0, spec.kv_len, _BLOCK):
                        columns = slice(left, min(left + _BLOCK, spec.kv_len))
                        s = scores.tile(batch, head, rows, columns).astype(np.float64)
                        with np.errstate(all="ignore"):
                            weights = np.where(np.isneginf(s), 0.0, np.exp(s - lse))
                        yield index, head, here, columns, weights


def with_own_arrays(whole: Problem) -> Problem:
    """The same with copies of the arrays of variants and offsets, which callers may write to."""
    of = whole.operands
    tables = {name: own_copy(table) for name, table in of.tables.items()}
    positions, angles = deepcopy((of.positions, of.angles))
    operands = replace(of, tables=tables, positions=positions, angles=angles)
    return replace(whole, operands=operands)


def _merge_best(numbers: Array, best: Array, others: Array, weights: Array) -> None:
    """Merge keys into the best of each row, in place; a weight of 0 names none."""
    both = np.concatenate([best, weights], axis=-1)
    names = np.concatenate([numbers, np.where(weights > 0, others, -1)], axis=-1)
    last = np.where(names < 0, np.iinfo(np.int64).max, names)
    order = np.lexsort((last, -both), axis=-1)[..., : best.shape[-1]]
    best[...] = np.take_along_axis(both, order, axis=-1)
    numbers[...] = np.take_along_axis(names, order, axis=-1)


def _numbers(run: range, rows: slice) -> Array:
    """The numbers in the whole sequence of some rows of a run."""
    return np.arange(run.start, run.stop, run.step, dtype=np.int64)[rows]


def _range_of(rows: Any, length: int, name: str) -> range:
    if not isinstance(rows, slice) or not all(
        end is None or is_integer(end) for end in (rows.start, rows.stop, rows.step)
    ):
        raise ArgumentError(
            f"{name}={shown(rows)} is not a slice of whole numbers.",
            action="Name a run of rows, as slice(0, 4) does.",
        )
    run = range(*rows.indices(length))
    if run.step != 1 or any(abs(end or 0) > length for end in (rows.start, rows.stop)):
        raise ShapeError(
            f"{name}={rows} is not a run of the {length} rows.",
            action="Name a slice of neighbouring rows inside the sequence.",
        )
    return run
