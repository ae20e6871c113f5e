"""What all forward kernels agree on: arguments, tasks, statistics, and queries in lanes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.backends.cpu.emit.frame import Frame
from qkv.backends.cpu.emit.storage import real_dtype
from qkv.backends.cpu.forward.layout import BLOCK_KV, FIELDS, ForwardKey
from qkv.problem.language.expressions import SCORE


class ScoreVector(NamedTuple):
    """The arguments of a function for one vector of queries and one block of keys.

    `scores` holds `count` vectors, `width` bytes apart. If `marked`, forbidden pairs get the weight
    `FORBIDDEN_WEIGHT`, else 0.
    """

    arguments: Value
    scores: Value
    stats: Value
    transposed: Value
    width: Value
    count: Value
    batch: Value
    head: Value
    first_row: Value
    kv_start: Value
    marked: Value


class ForwardFrame(Frame):
    """What the functions of a forward kernel share, or of a kernel that recomputes its scores.

    If `plain` is False, scores are finished before weights are computed, even without score mods.
    """

    def __init__(
        self,
        key: ForwardKey,
        *,
        fields: tuple[str, ...] = FIELDS,
        block_kv: int = BLOCK_KV,
        plain: bool = True,
    ) -> None:
        super().__init__("qkv_forward", key.spec, key.shape, key.int_bits, fields)
        self.pack_gqa = key.pack_gqa
        self.out_dtype = key.out_dtype
        self.statistics = key.statistics
        self.block_kv = block_kv
        operand_dtype = real_dtype(self.e) if key.rotated else key.spec.dtype
        self.dtypes = {"query": operand_dtype, "key": operand_dtype, "value": key.spec.dtype}
        self.plain = plain and self.score == SCORE
        """Whether there are no score mods, so that scores are the scaled products."""

    @contextmanager
    def vector_function(self, name: str) -> Iterator[tuple[Value, ScoreVector]]:
        """A function whose arguments are a `ScoreVector`."""
        with self.e.function(name, [*[POINTER] * 4, *[INT64] * 6, BIT]) as (function, args):
            yield function, ScoreVector(*args)

    def places(self, arguments: Value, batch: Value, head: Value, first_row: Value) -> Expressions:
        """Expressions of the queries in the lanes; lanes beyond the last row repeat it."""
        e, b = self.e, self.e.builder
        last = self.lane_integers(e.sub(self.field(arguments, "rows"), 1))
        numbers = self.lane_numbers()
        row = b.add(self.lane_integers(first_row), numbers)
        row = b.select(b.icmp_signed("<", row, last), row, last)
        if self.pack_gqa:
            q_len = self.lane_integers(self.field(arguments, "q_len"))
            head = b.add(self.lane_integers(head), b.sdiv(row, q_len))
            row = b.srem(row, q_len)
        variables = {"batch": batch, "head": head, "q_index": row}
        return Expressions(e, self.tables(arguments), variables, self.int_bits)

    def places_at(self, at: ScoreVector) -> Expressions:
        """`places` of the queries of one vector."""
        return self.places(at.arguments, at.batch, at.head, at.first_row)

    def is_wanted(self, arguments: Value, name: str) -> Value:
        """Whether the caller wants this result: its field is an address, not 0."""
        return self.e.builder.icmp_signed("!=", self.field(arguments, name), self.e.index(0))
