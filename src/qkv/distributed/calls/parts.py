"""What one rank computes: the parts of a problem between its queries and some keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Backend, Differentiable, Inspectable, check_results, choose
from qkv.inspection.weights.replay import Replay
from qkv.inspection.weights.statistics import weight_statistics
from qkv.partial import Partial, RowStatistics
from qkv.problem.backward import BackwardInputs, OperandGradients
from qkv.problem.language.bounds import bound
from qkv.problem.language.intervals import Interval
from qkv.problem.part import PartOf
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import Rows

__all__ = ["Merged", "Parts", "Places", "ShardRows", "is_needed"]

Array = NDArray[Any]
Places = tuple[tuple[range, slice], ...]
"""Runs of rows, and where each lies in its shard."""
_TILES = 1, 8, 64
"""How many tiles a run is cut into to look at a mask; more are tried where fewer leave it open."""
_BLOCK = 2**19
"""Bytes of output that are merged at a time."""


@dataclass(slots=True)
class Merged:
    """Attention of some rows over the keys seen so far; lse in float64, so that merging is exact.

    Parts are merged in the order of steps, which does not depend on when they arrive.
    """

    out: Array
    lse: Array
    entropy: Array | None = None
    largest: Array | None = None

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Merged:
        """Attention over no keys; `shape` is that of `out`."""
        return cls(np.zeros(shape, dtype), np.full(shape[:-1], -np.inf))

    def add(self, rows: slice, part: Partial) -> None:
        """Merge a part of the rows' keys in, whose arrays become this one's to write to.

        It goes in blocks, so that what is made stays in cache.
        """
        unrounded = part.out if part.unrounded is None else part.unrounded
        if self._is_all(part, unrounded):
            self.out, self.lse = unrounded, _float64_lse(part)
            return
        count, size = part.lse.shape[-1], max(1, unrounded.nbytes)
        step = max(1, count * _BLOCK // size)
        first = rows.indices(self.lse.shape[-1])[0]
        for start in range(0, count, step):
            block = slice(start, min(start + step, count))
            at = slice(first + block.start, first + block.stop)
            self._add(at, unrounded[..., block, :], _float64_lse(part, block))

    def _is_all(self, part: Partial, out: Array) -> bool:
        """Whether the first part has all rows, and a key for each of them."""
        of_part = out.shape, out.dtype, out.flags.writeable
        return (
            of_part == (self.out.shape, self.out.dtype, True)
            and bool(np.isneginf(self.lse).all())
            and not bool(np.isneginf(part.lse).any())
        )

    def _add(self, rows: slice, of_part: Array, lse_of_part: Array) -> None:
        """Merge output and lse of a block of the part's rows in."""
        out, lse = self.out[..., rows, :], self.lse[..., rows]
        with np.errstate(all="ignore"):
            total = np.logaddexp(lse, lse_of_part)
            base = np.where(np.isneginf(total), 0.0, total)
            old, new = (np.exp(of - base).astype(out.dtype)[..., None] for of in (lse, lse_of_part))
            if np.isneginf(lse).all() and (new == 1).all():  # These rows have seen no key before.
                out[...] = of_part
            else:
                out *= old
                added = of_part * new
                # Nothing is read of a row without keys: 0 times NaN is NaN. That of a row with keys
                # stays NaN, though its share may underflow to 0.
                for of, share, product in ((lse, old, out), (lse_of_part, new, added)):
                    if not share.all():
                        product[np.isneginf(of)] = 0
                whole = out + added
                # Shares may add up to a little more than one; a mean of finite values is finite.
                rounded = np.isinf(whole) & np.isfinite(out) & np.isfinite(added)
                whole[rounded] = np.copysign(np.finfo(whole.dtype).max, whole[rounded])
                out[...] = whole
        lse[...] = total

    def add_statistics(self, rows: slice, part: Partial, of_part: RowStatistics) -> None:
        """Merge entropy and largest weight in; to be called before `add` of the same part.

            entropy = sum_p c_p (entropy_p - log c_p),   c_p = exp(lse_p - lse)

        is kept as `sum_p exp(lse_p - lse) (entropy_p - lse_p)`, from which lse is taken at the end.
        """
        self.entropy, self.largest = self._statistics()
        entropy, largest, lse = (a[..., rows] for a in (self.entropy, self.largest, self.lse))
        of_lse = _float64_lse(part)
        with np.errstate(all="ignore"):
            total = np.logaddexp(lse, of_lse)
            base = np.where(np.isneginf(total), 0.0, total)
            own = of_part.entropy - np.where(np.isneginf(of_lse), 0.0, of_lse)
            entropy[...] = entropy * np.exp(lse - base) + own * np.exp(of_lse - base)
            heaviest = np.log(of_part.max_weight.astype(np.float64)) + of_lse
        np.maximum(largest, heaviest, out=largest)

    def _statistics(self) -> tuple[Array, Array]:
        """Entropy and largest so far; those of rows without keys where nothing was merged."""
        if self.entropy is None or self.largest is None:
            return np.zeros(self.lse.shape), np.full(self.lse.shape, -np.inf)
        return self.entropy, self.largest

    def statistics(self, sinks: Array | None) -> tuple[Array, Array]:
        """Entropy and largest weight of each row, sinks included."""
        entropy, largest = self._statistics()
        total = self.lse if sinks is None else np.logaddexp(self.lse, sinks[:, None])
        with np.errstate(all="ignore"):
            share = np.where(np.isneginf(self.lse), 0.0, np.exp(self.lse - total))
            entropy = share * (entropy + np.where(share == 0, 0.0, total))
            weight = np.where(np.isneginf(largest), 0.0, np.exp(largest - total))
        return np.maximum(entropy, 0).astype(self.out.dtype), weight.astype(self.out.dtype)

    def finished(self, sinks: Array | None) -> tuple[Array, Array, Array]:
        """Output, lse and its rounding error, after the sinks took their share."""
        out, lse = self.out, self.lse
        if sinks is not None:
            with np.errstate(all="ignore"):
                total = np.logaddexp(lse, sinks.astype(np.float64)[:, None])
                share = np.where(np.isneginf(lse), 0.0, np.exp(lse - total))
            out = out * share.astype(out.dtype)[..., None]
            lse = total
        rounded = lse.astype(out.dtype)
        with np.errstate(invalid="ignore"):
            rest = np.where(np.isfinite(rounded), lse - rounded, 0.0).astype(out.dtype)
        return out, rounded, rest


def _float64_lse(part: Partial, rows: slice = slice(None)) -> Array:
    """The lse of some rows of a part in float64, with the rounding error added."""
    lse = part.lse[..., rows].astype(np.float64)
    return lse if part.lse_rest is None else lse + part.lse_rest[..., rows]


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The runs of whole rows that a shard holds, and where each lies in the shard."""

    runs: tuple[range, ...]

    def __iter__(self) -> Iterator[tuple[range, slice]]:
        start = 0
        for run in self.runs:
            yield run, slice(start, start + len(run))
            start += len(run)

    def __len__(self) -> int:
        return sum(map(len, self.runs))


@dataclass(slots=True)
class Parts:
    """The parts of one call on one rank.

    Attributes
    ----------
    whole : Problem
        Of the whole sequence; of its operands only tables, positions and scale are read.
    backend : str
    heads, kv_heads : range
        What this rank holds of them.
    """

    whole: Problem
    backend: str
    heads: range
    kv_heads: range
    _needed: dict[tuple[range, range], bool] = field(default_factory=dict)

    def pairs(self, queries: ShardRows, keys: ShardRows) -> Iterator[tuple[PartOf, slice, slice]]:
        """The parts between two shards in which a query may see a key."""
        for q_run, q_at in queries:
            for kv_run, kv_at in keys:
                if self._is_needed(q_run, kv_run):
                    yield PartOf(q_run, kv_run, self.heads, self.kv_heads), q_at, kv_at

    def needed(self, queries: ShardRows, keys: ShardRows) -> Places:
        """The runs of keys that some query may see, and where each lies in its shard."""
        return tuple(
            (kv_run, kv_at)
            for kv_run, kv_at in keys
            if any(self._is_needed(q_run, kv_run) for q_run, _ in queries)
        )

    def _is_needed(self, q_run: range, kv_run: range) -> bool:
        place = q_run, kv_run
        if place not in self._needed:
            self._needed[place] = is_needed(self.whole, q_run, kv_run)
        return self._needed[place]

    def attend(
        self,
        merged: Merged,
        query: Array,
        queries: ShardRows,
        key: Rows,
        value: Rows,
        keys: ShardRows,
        *,
        backward: bool = False,
        statistics: bool = False,
    ) -> None:
        """Attention of a shard's queries over a shard's keys, merged with what was seen before."""
        for part, q_at, kv_at in self.pairs(queries, keys):
            problem = part.of(
                self.whole, query[..., q_at, :], _rows(key, kv_at), _rows(value, kv_at)
            )
            backend = choose(problem.spec, self.backend, backward=backward).backend
            if statistics:
                partial, of_part = _with_statistics(backend, problem)
                merged.add_statistics(q_at, partial, of_part)
                merged.add(q_at, partial)
                continue
            run = backend.run
            if backward and isinstance(backend, Differentiable):
                run = backend.run_for_backward
            partial = run(problem)
            check_results(partial, problem.spec, backend)
            merged.add(q_at, partial)

    def gradients(
        self,
        residuals: Residuals,
        query: Array,
        queries: ShardRows,
        key: Array,
        value: Array,
        keys: ShardRows,
        sums: GradientSums,
    ) -> tuple[Array, Array]:
        """Gradients of a shard's keys and values; those of queries and tables are added up."""
        dtype = self.whole.spec.compute_dtype
        d_key, d_value = np.zeros(key.shape, dtype), np.zeros(value.shape, dtype)
        for part, q_at, kv_at in self.pairs(queries, keys):
            problem = part.of(
                self.whole, query[..., q_at, :], key[..., kv_at, :], value[..., kv_at, :]
            )
            backend = choose(problem.spec, self.backend, backward=True).backend
            assert isinstance(backend, Differentiable)  # `choose` refuses all others
            gradients = backend.backward(problem, residuals.inputs(q_at, frozenset(sums.tables)))
            with np.errstate(all="ignore"):
                sums.query[..., q_at, :] += gradients.query
                d_key[..., kv_at, :] += gradients.key
                d_value[..., kv_at, :] += gradients.value
                sums.add_tables(gradients)
        return d_key, d_value


@dataclass(frozen=True, slots=True)
class Residuals:
    """What the backward pass reads: output, lse and its rest, and their cotangents."""

    out: Array
    lse: Array
    lse_rest: Array
    grad_out: Array
    grad_lse: Array

    def inputs(self, rows: slice, tables: frozenset[str]) -> BackwardInputs:
        """The inputs of the backward pass for some of the rows."""
        return BackwardInputs(
            np.ascontiguousarray(self.out[..., rows, :]),
            np.ascontiguousarray(self.lse[..., rows]),
            np.ascontiguousarray(self.grad_out[..., rows, :]),
            np.ascontiguousarray(self.grad_lse[..., rows]),
            tables,
            np.ascontiguousarray(self.lse_rest[..., rows]),
            of_part=True,
        )


@dataclass(slots=True)
class GradientSums:
    """Gradients of a rank's queries, and of tables, as they grow."""

    query: Array
    tables: dict[str, Array]

    def add_tables(self, gradients: OperandGradients) -> None:
        """Add those of one part."""
        for name, gradient in gradients.tables.items():
            self.tables[name] += gradient


def _with_statistics(backend: Backend, problem: Problem) -> tuple[Partial, RowStatistics]:
    """A part, and the entropy and largest weight of its rows over its keys alone."""
    if isinstance(backend, Inspectable):
        return backend.run_with_statistics(problem)
    part = backend.run(problem)
    statistics = weight_statistics(Replay(problem, part.lse))
    shape = part.lse.shape
    entropy, largest = (a.reshape(shape) for a in (statistics.entropy, statistics.max_weight))
    return part, RowStatistics(entropy, np.full(shape, -np.inf, part.lse.dtype), largest)


def is_needed(whole: Problem, q_run: range, kv_run: range) -> bool:
    """Whether a query of one run may see a key of the other; True where that cannot be told."""
    spec = whole.spec
    if not (len(q_run) and len(kv_run)):
        return False
    read = spec.mask.variables
    batches: Sequence[int] = range(spec.batch_size if "batch" in read else 1)
    heads: Sequence[int] = range(spec.num_heads if "head" in read else 1)
    for tiles in _TILES:
        q_index, kv_index = _bounds(q_run, tiles)[..., None], _bounds(kv_run, tiles)
        allowed = [
            bound(
                spec.mask,
                {
                    "q_index": Interval(*q_index),
                    "kv_index": Interval(*kv_index),
                    "batch": Interval.of(batch, batch),
                    "head": Interval.of(head, head),
                },
                whole.operands.tables,
            )
            for batch in batches
            for head in heads
        ]
        if any(bool((of.low >= 1).any()) for of in allowed):
            return True
        if all(bool((of.high <= 0).all()) for of in allowed):
            return False
    return True


def _bounds(run: range, tiles: int) -> Array:
    """The least and the largest number in each of so many parts of a run `(2, parts)`."""
    size = -(-len(run) // tiles)
    first = np.arange(0, len(run), size, dtype=np.int64)
    last = np.minimum(first + size, len(run)) - 1
    return run.start + run.step * np.array([first, last])


def _rows(rows: Rows, at: slice) -> Any:
    """Some of the rows; those in storage of their own are one run, and taken whole."""
    return rows[..., at, :] if isinstance(rows, np.ndarray) else rows
