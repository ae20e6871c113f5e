"""One block of queries with one block of keys, step by step, in `bf16_dot` and `split_bf16`.

    score     S = K Q^T
    finish    scale, score mods and mask; the largest score of each row
    weigh     P = exp(S - m); row maximum and row sum are updated
    add       O = rescale * O + V^T P

Scores without mods and mask are left alone by `finish`, and are scaled as they are weighed.

Each block of queries reads only the quarters of a block of keys from the first to the last one in
which it may see a key. Scores and weights lie where they would if the whole block was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, Emitter, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.forward.kernel import BLOCK_MAX, RUN
from qkv.backends.cpu.products.bfloat16 import whole
from qkv.problem.expressions import TRUE, Node
from qkv.problem.tiles import TileKind

QUARTERS = 4
BLOCK_RUN = (*RUN, "first", "last")
"""Words of a run of blocks of keys. Three of them hold two bits for each block of queries: its
`TileKind`, and the first and the last quarter of the keys that it sees."""


class Buffers(NamedTuple):
    """Memory of one worker: scores, transposed V, copied rows, what each block of queries has."""

    scores: Value
    values: Value
    key_copy: Value
    value_copy: Value
    blocks: Value


class Block(NamedTuple):
    """One block of queries: packed Q, O, statistics, and its first row."""

    packed: Value
    total: Value
    stats: Value
    row: Value


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """One task: some blocks of queries of one head, given by number."""

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
    """Blocks."""
    block: Callable[[Value], Block]
    at: Buffers
    transposed: Value


class KeyBlock(NamedTuple):
    """A block of keys: K as a left factor, and who meets it."""

    start: Value
    count: Value
    kinds: Value
    """As `BLOCK_RUN` has them, like those that follow."""
    first: Value
    last: Value
    rows: Value
    row: Value


class ValueBlock(NamedTuple):
    """V of a block of keys as it lies, and whether some values are left out of the left factor.

    Then forbidden weights are marked.
    """

    rows: Value
    row: Value
    has_non_finite: Value


class ScoreBlock(NamedTuple):
    """A block of queries, by number, and the keys that it meets."""

    block: Value
    partial: Value
    """Whether its mask may differ from pair to pair."""
    first: Value
    start: Value
    """Of the block of keys."""
    count: Value


class ScoreKernel(Protocol):
    """What the steps ask of the kernel that they are a part of."""

    e: Emitter
    mask: Node
    plain: bool
    block_kv: int
    vectors: int
    width: int
    weights_at: int

    def from_key(self, keys: KeyBlock, k: Value) -> Value:
        """Where the left factor of a key lies."""

    def from_value(self, values: Value, k: Value) -> Value:
        """Where the left factor of the values from a key on lies."""


class ScoreBlocks:
    """The steps for the blocks of queries of one task and block after block of keys."""

    def __init__(self, kernel: ScoreKernel, task: QueryBlocks) -> None:
        self.kernel, self.task = kernel, task
        self.e, self.functions = kernel.e, task.functions
        self.scores = task.at.scores
        self.weights = self.e.at(self.scores, kernel.weights_at)
        self.pairs = self.e.builder.ashr(whole(self.e, task.head_dim), self.e.index(1))
        """Of a row of Q, in whole chunks."""

    def begin(self) -> None:
        """Called before K and V of a block take the place of those before."""

    def meet(self, keys: KeyBlock, values: Callable[[], ValueBlock]) -> None:
        """Every block of queries that sees some of a block of keys."""
        found = values()

        def one(met: ScoreBlock) -> None:
            self.score(keys, met)
            self.finish(met)
            self.weigh(met, found.has_non_finite)
            self.add(met, found)

        self.each(keys, one)

    def end(self) -> None:
        """Called after the last block of keys."""

    def each(self, keys: KeyBlock, body: Callable[[ScoreBlock], None]) -> None:
        e, b = self.e, self.e.builder

        def one(i: Value, _: list[Value]) -> None:
            kind, first, last = (
                b.and_(b.lshr(word, e.mul(i, 2)), e.index(QUARTERS - 1))
                for word in (keys.kinds, keys.first, keys.last)
            )
            start, count = e.index(0), keys.count
            if self.kernel.mask != TRUE:
                quarter = self.kernel.block_kv // QUARTERS
                start = e.mul(first, quarter)
                count = e.sub(e.least(e.mul(e.add(last, 1), quarter), count), start)
            partial = b.icmp_signed("==", kind, e.index(TileKind.PARTIAL))
            with b.if_then(b.icmp_signed("!=", kind, e.index(TileKind.EMPTY))):
                body(ScoreBlock(i, partial, e.add(keys.start, start), start, count))

        e.loop(0, self.task.count, 1, [], one)

    def is_finished(self, met: ScoreBlock) -> Value:
        """Whether scores are weighed as they are."""
        kernel = self.kernel
        if kernel.plain and kernel.mask != TRUE:
            return met.partial
        return ir.Constant(BIT, not kernel.plain)

    def score(self, keys: KeyBlock, met: ScoreBlock) -> None:
        rows, packed = self.kernel.from_key(keys, met.start), self.task.block(met.block).packed
        args = [rows, packed, self.scores, keys.row, met.count, self.pairs]
        self.e.builder.call(self.functions["scores"], args)

    def finish(self, met: ScoreBlock) -> None:
        self.by_kind(
            met,
            full=lambda: (
                self._largest(met) if self.kernel.plain else self._each(met, "finish_full")
            ),
            partial=lambda: self._each(met, "finish_partial"),
        )

    def weigh(self, met: ScoreBlock, has_non_finite: Value) -> None:
        if not self.kernel.plain:
            self._each(met, "weigh_finished", has_non_finite)
            return
        self.by_kind(
            met,
            full=lambda: self._each(met, "weigh_plain", has_non_finite),
            partial=lambda: self._each(met, "weigh_finished", has_non_finite),
        )

    def add(self, met: ScoreBlock, values: ValueBlock) -> None:
        self.e.builder.call(self.functions["add_values"], self.adding(met))
        self.add_non_finite(met, values)

    def by_kind(
        self, met: ScoreBlock, *, full: Callable[[], None], partial: Callable[[], None]
    ) -> None:
        if self.kernel.mask == TRUE:
            full()
        else:
            self.e.choose(met.partial, partial, full)

    def adding(self, met: ScoreBlock) -> list[Value]:
        """What `add_values` is called with."""
        block, task = self.task.block(met.block), self.task
        rescale = self.e.at(block.stats, 2 * self.kernel.width)
        values = self.kernel.from_value(task.at.values, met.start)
        return [values, self.weights, rescale, block.total, task.v_head_dim, met.count]

    def add_non_finite(self, met: ScoreBlock, values: ValueBlock) -> None:
        """Add the values that were left out."""
        if "add_non_finite" not in self.functions:
            return
        b, row = self.e.builder, values.row
        with b.if_then(values.has_non_finite, likely=False):
            _, weights, _, *rest = self.adding(met)
            rows = self.e.at(values.rows, self.e.mul(met.start, row))
            b.call(self.functions["add_non_finite"], [rows, row, weights, *rest])

    def _largest(self, met: ScoreBlock) -> None:
        largest = self.e.at(self.task.block(met.block).stats, BLOCK_MAX * self.kernel.width)
        self.e.builder.call(self.functions["block_max"], [self.scores, largest, met.count])

    def _each(self, met: ScoreBlock, name: str, marked: Value | None = None) -> None:
        """Call a function as `softmax` for each vector of a block."""
        e, task, block = self.e, self.task, self.task.block(met.block)
        if marked is None:
            marked = ir.Constant(BIT, 0)
        for j in range(self.kernel.vectors):
            offset = j * e.vector_bytes
            places = (e.at(self.scores, offset), e.at(block.stats, offset), task.transposed)
            row = e.add(block.row, j * e.lanes)
            where = (met.count, task.batch, task.head, row, met.first, marked)
            width = e.index(self.kernel.width)
            e.builder.call(self.functions[name], [task.arguments, *places, width, *where])
