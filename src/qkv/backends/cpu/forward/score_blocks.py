"""One block of queries with one block of keys, step by step, in `bf16_dot`.

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

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, Emitter, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.forward.frame import ForwardFrame, ScoreVector
from qkv.backends.cpu.forward.layout import QUARTERS, RUN, StatsRow
from qkv.backends.cpu.forward.softmax import WeightOfKey
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
    query: RowView
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


class PairOperands(ABC):
    """How a kernel keeps its operands as pairs of bfloat16, and what it multiplies them with."""

    value_row: int
    """Bytes of one row of transposed V."""
    unrolled: tuple[int, ...] = (4, 2, 1)
    """Numbers of keys whose weights one step of a loop computes, for the main loop and the loops
    over the keys that it leaves."""

    def __init__(self, frame: ForwardFrame) -> None:
        self.frame, self.e = frame, frame.e
        self.vectors = frame.shape.vectors
        self.width = self.vectors * self.e.vector_bytes

    @abstractmethod
    def row_functions(self) -> dict[str, Value]:
        """The functions that read and pack rows."""

    @abstractmethod
    def product_function(self, name: str, *, onto: bool) -> Value:
        """A function `(rows, packed, out, row, count, pairs)`, as `matrix_unit.add_product`."""

    @abstractmethod
    def place_of_pair(self, scores: Value, k: Value, width: Value) -> Value:
        """Where the weights of key k and key k + 1 go, for an even k."""

    @abstractmethod
    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        """Store two weights of each lane as a pair."""

    @abstractmethod
    def finish_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        """Set pairs of weights to 0, which pad the last chunk, and make a right factor of all."""

    @abstractmethod
    def buffers(self, scratch: Value, head_dim: Value, v_head_dim: Value) -> Buffers:
        """The buffers in a worker's memory; head dimensions are padded to whole chunks."""

    @abstractmethod
    def prepare_keys(self, task: QueryBlocks, kv_start: Value, count: Value) -> tuple[Value, Value]:
        """K as the left factor of the scores, and the bytes of its rows."""

    @abstractmethod
    def prepare_values(
        self, task: QueryBlocks, kv_start: Value, count: Value, kinds: Value
    ) -> ValueBlock:
        """V as the left factor of the output."""

    @abstractmethod
    def keys_from(self, keys: KeyBlock, k: Value) -> Value:
        """The address of the left factor of the keys from `k` on."""

    @abstractmethod
    def values_from(self, values: Value, k: Value) -> Value:
        """The address of the left factor of the values from key `k` on."""

    def store_weights(
        self,
        e: Emitter,
        scores: Value,
        width: Value,
        start: Value,
        stop: Value,
        sums: list[Value],
        weight_of_key: WeightOfKey,
        *,
        short: bool = False,
    ) -> list[Value]:
        """`softmax.store_weights` for pairs: two keys share a lane, an odd last one with 0."""

        def store_keys(count: int) -> Callable[[Value, list[Value]], list[Value]]:
            def store_step(k: Value, sums: list[Value]) -> list[Value]:
                weights = []
                for i in range(count):
                    weight, sums = weight_of_key(e.add(k, i), sums)
                    weights.append(weight)
                weights += [e.const(0.0)] * (count % 2)
                for p in range(0, len(weights), 2):
                    place = self.place_of_pair(scores, e.add(k, p), width)
                    self.store_pair(weights[p], weights[p + 1], place)
                return sums

            return store_step

        for size in self.unrolled[short:]:
            end = e.sub(stop, e.builder.srem(e.sub(stop, start), e.index(size)))
            sums = e.loop(start, end, size, sums, store_keys(size))
            start = end
        return sums


class ScoreBlocks:
    """The steps for the blocks of queries of one task and block after block of keys."""

    def __init__(self, operands: PairOperands, task: QueryBlocks) -> None:
        self.operands, self.frame, self.task = operands, operands.frame, task
        self.e, self.functions = operands.e, task.functions
        self.scores = task.at.scores
        self.pairs = self.e.builder.ashr(
            emit_round_to_chunks(self.e, task.head_dim), self.e.index(1)
        )
        """Number of pairs in a row of Q, in whole chunks."""

    def add_keys(self, keys: KeyBlock, values: Callable[[], ValueBlock]) -> None:
        """Attend to a block of keys with every block of queries that sees some of it."""
        value_block = values()

        def attend(at: ScoreBlock) -> None:
            self.compute_scores(keys, at)
            self.finish_scores(at)
            self.compute_weights(at, value_block.has_non_finite)
            self.add_values(at, value_block)

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
        rows, packed = self.operands.keys_from(keys, at.start), self.task.block(at.block).packed
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
        rescale = self.e.at(block.stats, StatsRow.RESCALE * self.operands.width)
        values = self.operands.values_from(task.at.values, at.start)
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
        largest = self.e.at(stats, StatsRow.BLOCK_MAX * self.operands.width)
        self.e.builder.call(self.functions["block_max"], [self.scores, largest, at.count])

    def _call_for_each_vector(self, at: ScoreBlock, name: str, marked: Value | None = None) -> None:
        """Call a function of `ScoreVector` for each vector of a block."""
        e, task, block = self.e, self.task, self.task.block(at.block)
        if marked is None:
            marked = ir.Constant(BIT, 0)
        for j in range(self.operands.vectors):
            offset = j * e.vector_bytes
            e.builder.call(
                self.functions[name],
                ScoreVector(
                    task.arguments, e.at(self.scores, offset), e.at(block.stats, offset),
                    task.transposed, width=e.index(self.operands.width), count=at.count,
                    batch=task.batch, head=task.head, first_row=e.add(block.row, j * e.lanes),
                    kv_start=at.first, marked=marked,
                ),
            )  # fmt: skip
