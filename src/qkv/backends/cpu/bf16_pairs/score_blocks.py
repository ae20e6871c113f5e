"""One block of queries with one block of keys, step by step.

    compute_scores    S = K Q^T
    finish_scores     scale, score mods and mask; the largest score of each row
    compute_weights   P = exp(S - m); row maximum and row sum are updated
    add_values        O = rescale * O + V^T P

Without score mods and mask, `finish_scores` leaves scores alone, and they are scaled when their
weights are computed.

Each block of queries reads only the quarters of a block of keys from the first to the last one in
which it may see a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.forward.frame import ForwardFrame, ScoreVector
from qkv.backends.cpu.forward.layout import QUARTERS, RUN, StatsRow
from qkv.backends.cpu.products.bfloat16 import emit_round_to_chunks
from qkv.problem.language.expressions import TRUE
from qkv.problem.tiles import TileKind

BLOCK_RUN = (*RUN, "first", "last")
"""Words of a run of blocks of keys. `partial`, `first` and `last` hold two bits for each block of
queries: its kind, and the first and the last quarter of the keys that it sees."""


class Buffers(NamedTuple):
    """Memory of one worker: scores, transposed V, copied rows, and blocks of queries."""

    scores: Value
    values: Value
    key_copy: Value
    value_copy: Value
    blocks: Value


class QueryBlockMemory(NamedTuple):
    """One block of queries: packed Q, O, statistics, and its first row."""

    packed: Value
    total: Value
    stats: Value
    row: Value


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """One task: some blocks of queries of one head; `block(i)` is the one of number i."""

    functions: dict[str, Value]
    arguments: Value
    batch: Value
    head: Value
    key: RowView
    value: RowView
    head_dim: Value
    v_head_dim: Value
    count: Value
    """Number of blocks of queries."""
    block: Callable[[Value], QueryBlockMemory]
    at: Buffers
    transposed: Value


class KeyBlock(NamedTuple):
    """A block of keys: K as a left factor, and which blocks of queries see it."""

    start: Value
    count: Value
    kinds: Value
    """The word `partial` of a `BLOCK_RUN`; `first` and `last` are its words of quarters."""
    first: Value
    last: Value
    rows: Value
    row: Value


class ValueBlock(NamedTuple):
    """The rows of V of a block of keys, and whether values that are not finite were replaced by 0.

    If they were, weights of forbidden pairs are marked, so that these values can be added for all
    other pairs.
    """

    rows: Value
    row: Value
    has_non_finite: Value


class ScoreBlock(NamedTuple):
    """A block of queries, by number, and the keys that it sees."""

    block: Value
    partial: Value
    """Whether some pairs may be allowed and others forbidden."""
    first: Value
    """Number of the first key among all keys."""
    start: Value
    """Number of the first key within the block of keys."""
    count: Value


class ScoreBlocks:
    """The steps for the blocks of queries of one task and block after block of keys."""

    def __init__(self, frame: ForwardFrame, task: QueryBlocks) -> None:
        self.frame, self.e, self.task = frame, frame.e, task
        self.width = frame.shape.vectors * self.e.vector_bytes
        self.functions, self.scores = task.functions, task.at.scores
        self.pairs = self.e.builder.ashr(
            emit_round_to_chunks(self.e, task.head_dim), self.e.index(1)
        )
        """Number of pairs in a row of Q, in whole chunks."""

    def add_keys(self, keys: KeyBlock, values: ValueBlock) -> None:
        """Attend to a block of keys with every block of queries that sees some of it."""

        def attend(at: ScoreBlock) -> None:
            self.compute_scores(keys, at)
            self.finish_scores(at)
            self.compute_weights(at, values.has_non_finite)
            self.add_values(at, values)

        self.for_each_query_block(keys, attend)

    def for_each_query_block(self, keys: KeyBlock, body: Callable[[ScoreBlock], None]) -> None:
        e, b = self.e, self.e.builder

        def visit_block(i: Value, _: list[Value]) -> None:
            kind, first, last = (
                b.and_(b.lshr(word, e.mul(i, 2)), e.index(QUARTERS - 1))
                for word in (keys.kinds, keys.first, keys.last)
            )
            start, count = e.index(0), keys.count
            if self.frame.mask != TRUE:
                quarter = self.frame.block_kv // QUARTERS
                start = e.mul(first, quarter)
                count = e.sub(e.least(e.mul(e.add(last, 1), quarter), count), start)
            partial = b.icmp_signed("!=", b.and_(kind, e.index(TileKind.PARTIAL)), e.index(0))
            with b.if_then(b.icmp_signed("!=", kind, e.index(TileKind.EMPTY))):
                body(ScoreBlock(i, partial, e.add(keys.start, start), start, count))

        e.loop(0, self.task.count, 1, [], visit_block)

    def compute_scores(self, keys: KeyBlock, at: ScoreBlock) -> None:
        rows = self.e.at(keys.rows, self.e.mul(at.start, keys.row))
        packed = self.task.block(at.block).packed
        args = [rows, packed, self.scores, keys.row, at.count, self.pairs]
        self.e.builder.call(self.functions["scores"], args)

    def finish_scores(self, at: ScoreBlock) -> None:
        self.choose_by_kind(
            at,
            full=lambda: (
                self._find_block_max(at)
                if self.frame.plain
                else self._call_for_each_vector(at, "finish_full")
            ),
            partial=lambda: self._call_for_each_vector(at, "finish_partial"),
        )

    def compute_weights(self, at: ScoreBlock, has_non_finite: Value) -> None:
        if not self.frame.plain:
            self._call_for_each_vector(at, "weights_finished", has_non_finite)
            return
        self.choose_by_kind(
            at,
            full=lambda: self._call_for_each_vector(at, "weights_plain", has_non_finite),
            partial=lambda: self._call_for_each_vector(at, "weights_finished", has_non_finite),
        )

    def add_values(self, at: ScoreBlock, values: ValueBlock) -> None:
        self.e.builder.call(self.functions["add_values"], self.add_values_arguments(at))
        self.add_non_finite(at, values)

    def choose_by_kind(
        self, at: ScoreBlock, *, full: Callable[[], None], partial: Callable[[], None]
    ) -> None:
        if self.frame.mask == TRUE:
            full()
        else:
            self.e.choose(at.partial, partial, full)

    def add_values_arguments(self, at: ScoreBlock) -> list[Value]:
        """The arguments of `add_values`."""
        block, task = self.task.block(at.block), self.task
        rescale = self.e.at(block.stats, StatsRow.RESCALE * self.width)
        values = self.e.at(task.at.values, self.e.mul(at.start, 2))
        return [values, self.scores, rescale, block.total, task.v_head_dim, at.count]

    def add_non_finite(self, at: ScoreBlock, values: ValueBlock) -> None:
        """Add the values that are not finite, which 0 had replaced."""
        if "add_non_finite" not in self.functions:
            return
        b, row = self.e.builder, values.row
        with b.if_then(values.has_non_finite, likely=False):
            _, weights, _, *rest = self.add_values_arguments(at)
            rows = self.e.at(values.rows, self.e.mul(at.start, row))
            b.call(self.functions["add_non_finite"], [rows, row, weights, *rest])

    def _find_block_max(self, at: ScoreBlock) -> None:
        stats = self.task.block(at.block).stats
        largest = self.e.at(stats, StatsRow.BLOCK_MAX * self.width)
        self.e.builder.call(self.functions["block_max"], [self.scores, largest, at.count])

    def _call_for_each_vector(self, at: ScoreBlock, name: str, marked: Value | None = None) -> None:
        """Call a function of `ScoreVector` for each vector of a block."""
        e, task, block = self.e, self.task, self.task.block(at.block)
        if marked is None:
            marked = ir.Constant(BIT, 0)
        for j in range(self.frame.shape.vectors):
            offset = j * e.vector_bytes
            e.builder.call(
                self.functions[name],
                ScoreVector(
                    task.arguments, e.at(self.scores, offset), e.at(block.stats, offset),
                    task.transposed, width=e.index(self.width), count=at.count,
                    batch=task.batch, head=task.head, first_row=e.add(block.row, j * e.lanes),
                    kv_start=at.first, marked=marked,
                ),
            )  # fmt: skip
