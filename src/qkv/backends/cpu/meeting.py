"""Where blocks of queries meet a block of keys: the steps of `pairs` and `parts`, one by one.

    score     S = K Q^T
    finish    scale, score mods and mask; the largest of each row
    weigh     P = exp(S - m); row maximum and sum advance
    add       O = rescale * O + V^T P

Plain scores that no mask touches are not changed by `finish`: they are scaled as they are weighed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir

from qkv.backends.cpu.bfloat16 import whole
from qkv.backends.cpu.forward import BLOCK_MAX
from qkv.backends.cpu.frame import Rows
from qkv.backends.cpu.ir import BIT, Value
from qkv.problem.expressions import TRUE
from qkv.problem.tiles import TileKind

if TYPE_CHECKING:
    from qkv.backends.cpu.pairs import PairForward


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
    head_dim: Value
    v_head_dim: Value
    count: Value
    """Blocks."""
    block: Callable[[Value], Block]
    at: Buffers
    turned: Value


class Keys(NamedTuple):
    """A block of keys: K and V as left factors, and V as it lies."""

    start: Value
    count: Value
    kinds: Value
    """A `TileKind` of two bits for each block of queries."""
    rows: Value
    row: Value
    values: Rows
    sifted: Value
    """Whether some values are left out of the factor: then forbidden weights are marked."""


class Meeting:
    """The steps for each block of the queries of one task and a block of keys."""

    def __init__(self, kernel: PairForward, task: Together, keys: Keys) -> None:
        self.kernel, self.task, self.keys = kernel, task, keys
        self.e, self.parts = kernel.e, task.parts
        self.scores = task.at.scores
        self.weights = self.e.at(self.scores, kernel.weights_at)
        self.pairs = self.e.builder.ashr(whole(self.e, task.head_dim), self.e.index(1))
        """Of a row of Q, in whole chunks."""

    def is_empty(self, i: Value) -> Value:
        return self._is(i, TileKind.EMPTY)

    def is_finished(self, i: Value) -> Value:
        """Whether scores are weighed as they are."""
        kernel = self.kernel
        if kernel.plain and kernel.mask != TRUE:
            return self._is(i, TileKind.PARTIAL)
        return ir.Constant(BIT, not kernel.plain)

    def _is(self, i: Value, kind: TileKind) -> Value:
        e, b = self.e, self.e.builder
        found = b.and_(b.lshr(self.keys.kinds, e.mul(i, 2)), e.index(3))
        return b.icmp_signed("==", found, e.index(kind))

    def score(self, i: Value) -> None:
        e, (rows, row, count) = self.e, (self.keys.rows, self.keys.row, self.keys.count)
        packed = self.task.block(i).packed
        e.builder.call(self.parts["scores"], [rows, packed, self.scores, row, count, self.pairs])

    def finish(self, i: Value) -> None:
        self.by_kind(
            i,
            full=lambda: self._largest(i) if self.kernel.plain else self._each(i, "finish_full"),
            partial=lambda: self._each(i, "finish_partial"),
        )

    def weigh(self, i: Value) -> None:
        if not self.kernel.plain:
            self._each(i, "weigh_finished")
            return
        self.by_kind(
            i,
            full=lambda: self._each(i, "weigh_plain"),
            partial=lambda: self._each(i, "weigh_finished"),
        )

    def add(self, i: Value) -> None:
        self.e.builder.call(self.parts["add_values"], self.adding(i))
        self.add_sifted(i)

    def by_kind(self, i: Value, *, full: Callable[[], None], partial: Callable[[], None]) -> None:
        if self.kernel.mask == TRUE:
            full()
        else:
            self.e.choose(self._is(i, TileKind.PARTIAL), partial, full)

    def adding(self, i: Value) -> list[Value]:
        """What `add_values` is called with."""
        block, task = self.task.block(i), self.task
        rescale = self.e.at(block.stats, 2 * self.kernel.width)
        where = [task.at.values, self.weights, rescale, block.total]
        return [*where, task.v_head_dim, self.keys.count]

    def add_sifted(self, i: Value) -> None:
        """Add the values that were left out."""
        if "add_sifted" not in self.parts:
            return
        b, (rows, row, _) = self.e.builder, self.keys.values
        with b.if_then(self.keys.sifted, likely=False):
            _, weights, _, *rest = self.adding(i)
            b.call(self.parts["add_sifted"], [rows, row, weights, *rest])

    def _largest(self, i: Value) -> None:
        largest = self.e.at(self.task.block(i).stats, BLOCK_MAX * self.kernel.width)
        rows = [self.scores, largest, self.keys.count]
        self.e.builder.call(self.parts["block_max"], rows)

    def _each(self, i: Value, name: str) -> None:
        """Call a function as `softmax` for each vector of a block."""
        e, task, keys, block = self.e, self.task, self.keys, self.task.block(i)
        for j in range(self.kernel.vectors):
            offset = j * e.vector_bytes
            places = (e.at(self.scores, offset), e.at(block.stats, offset), task.turned)
            first = e.add(block.row, j * e.lanes)
            where = (keys.count, task.batch, task.head, first, keys.start, keys.sifted)
            width = e.index(self.kernel.width)
            e.builder.call(self.parts[name], [task.arguments, *places, width, *where])
