"""Where blocks of queries meet a block of keys: the steps of `pairs` and `parts`, one by one.

    score     S = K Q^T
    finish    scale, score mods and mask; the largest of each row
    weigh     P = exp(S - m); row maximum and sum advance
    add       O = rescale * O + V^T P

Plain scores that no mask touches are not changed by `finish`: they are scaled as they are weighed.

Of a block of keys, a block of queries meets the quarters from the first to the last in which it may
see anything; their scores and weights begin where those of the whole block would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, Emitter, Value
from qkv.backends.cpu.emit.frame import Rows
from qkv.backends.cpu.forward.kernel import BLOCK_MAX, RUN
from qkv.backends.cpu.products.bfloat16 import whole
from qkv.problem.expressions import TRUE, Node
from qkv.problem.tiles import TileKind

QUARTERS = 4
MEETINGS = (*RUN, "first", "last")
"""A run of blocks of keys, with two bits for each block of queries in each of three words: its
`TileKind`, its first quarter and its last."""


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
class Together:
    """One task: some blocks of queries of one head, given by number."""

    parts: dict[str, Value]
    arguments: Value
    batch: Value
    head: Value
    query: Rows
    key: Rows
    value: Rows
    head_dim: Value
    v_head_dim: Value
    count: Value
    """Blocks."""
    block: Callable[[Value], Block]
    at: Buffers
    turned: Value


class Keys(NamedTuple):
    """A block of keys: K as a left factor, and who meets it."""

    start: Value
    count: Value
    kinds: Value
    """As `MEETINGS` has them, like those that follow."""
    first: Value
    last: Value
    rows: Value
    row: Value


class Values(NamedTuple):
    """V of a block of keys as it lies, and whether some values are left out of the left factor.

    Then forbidden weights are marked.
    """

    rows: Value
    row: Value
    sifted: Value


class Met(NamedTuple):
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

    def from_key(self, keys: Keys, k: Value) -> Value:
        """Where the left factor of a key lies."""

    def from_value(self, values: Value, k: Value) -> Value:
        """Where the left factor of the values from a key on lies."""


class Meeting:
    """The steps for the blocks of queries of one task and block after block of keys."""

    def __init__(self, kernel: ScoreKernel, task: Together) -> None:
        self.kernel, self.task = kernel, task
        self.e, self.parts = kernel.e, task.parts
        self.scores = task.at.scores
        self.weights = self.e.at(self.scores, kernel.weights_at)
        self.pairs = self.e.builder.ashr(whole(self.e, task.head_dim), self.e.index(1))
        """Of a row of Q, in whole chunks."""

    def begin(self) -> None:
        """Called before K and V of a block take the place of those before."""

    def meet(self, keys: Keys, values: Callable[[], Values]) -> None:
        """Every block of queries that sees some of a block of keys."""
        found = values()

        def one(met: Met) -> None:
            self.score(keys, met)
            self.finish(met)
            self.weigh(met, found.sifted)
            self.add(met, found)

        self.each(keys, one)

    def end(self) -> None:
        """Called after the last block of keys."""

    def each(self, keys: Keys, body: Callable[[Met], None]) -> None:
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
                body(Met(i, partial, e.add(keys.start, start), start, count))

        e.loop(0, self.task.count, 1, [], one)

    def is_finished(self, met: Met) -> Value:
        """Whether scores are weighed as they are."""
        kernel = self.kernel
        if kernel.plain and kernel.mask != TRUE:
            return met.partial
        return ir.Constant(BIT, not kernel.plain)

    def score(self, keys: Keys, met: Met) -> None:
        rows, packed = self.kernel.from_key(keys, met.start), self.task.block(met.block).packed
        args = [rows, packed, self.scores, keys.row, met.count, self.pairs]
        self.e.builder.call(self.parts["scores"], args)

    def finish(self, met: Met) -> None:
        self.by_kind(
            met,
            full=lambda: (
                self._largest(met) if self.kernel.plain else self._each(met, "finish_full")
            ),
            partial=lambda: self._each(met, "finish_partial"),
        )

    def weigh(self, met: Met, sifted: Value) -> None:
        if not self.kernel.plain:
            self._each(met, "weigh_finished", sifted)
            return
        self.by_kind(
            met,
            full=lambda: self._each(met, "weigh_plain", sifted),
            partial=lambda: self._each(met, "weigh_finished", sifted),
        )

    def add(self, met: Met, values: Values) -> None:
        self.e.builder.call(self.parts["add_values"], self.adding(met))
        self.add_sifted(met, values)

    def by_kind(self, met: Met, *, full: Callable[[], None], partial: Callable[[], None]) -> None:
        if self.kernel.mask == TRUE:
            full()
        else:
            self.e.choose(met.partial, partial, full)

    def adding(self, met: Met) -> list[Value]:
        """What `add_values` is called with."""
        block, task = self.task.block(met.block), self.task
        rescale = self.e.at(block.stats, 2 * self.kernel.width)
        values = self.kernel.from_value(task.at.values, met.start)
        return [values, self.weights, rescale, block.total, task.v_head_dim, met.count]

    def add_sifted(self, met: Met, values: Values) -> None:
        """Add the values that were left out."""
        if "add_sifted" not in self.parts:
            return
        b, row = self.e.builder, values.row
        with b.if_then(values.sifted, likely=False):
            _, weights, _, *rest = self.adding(met)
            rows = self.e.at(values.rows, self.e.mul(met.start, row))
            b.call(self.parts["add_sifted"], [rows, row, weights, *rest])

    def _largest(self, met: Met) -> None:
        largest = self.e.at(self.task.block(met.block).stats, BLOCK_MAX * self.kernel.width)
        self.e.builder.call(self.parts["block_max"], [self.scores, largest, met.count])

    def _each(self, met: Met, name: str, marked: Value | None = None) -> None:
        """Call a function as `softmax` for each vector of a block."""
        e, task, block = self.e, self.task, self.task.block(met.block)
        if marked is None:
            marked = ir.Constant(BIT, 0)
        for j in range(self.kernel.vectors):
            offset = j * e.vector_bytes
            places = (e.at(self.scores, offset), e.at(block.stats, offset), task.turned)
            row = e.add(block.row, j * e.lanes)
            where = (met.count, task.batch, task.head, row, met.first, marked)
            width = e.index(self.kernel.width)
            e.builder.call(self.parts[name], [task.arguments, *places, width, *where])
