"""What the functions of a tangent kernel agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.emit.emitter import DOUBLE, INT64, POINTER, Value
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.backends.cpu.tangents.layout import (
    FIELDS,
    PAIR_AREAS,
    REAL_ROWS,
    SUM_ROWS,
    TangentKey,
    pair_areas,
    scratch_areas,
)
from qkv.problem.language.expressions import SCORE


class PairArguments(NamedTuple):
    """The arguments of a function for one vector of queries and one block of keys.

    The areas of pairs hold `count` vectors, `width` bytes apart; see `pair_areas`.
    """

    arguments: Value
    task: Value
    scores: Value
    scores_dot: Value
    products: Value
    products_dot: Value
    d_weights: Value
    d_weights_dot: Value
    sums: Value
    reals: Value
    width: Value
    count: Value
    batch: Value
    head: Value
    first_row: Value
    rows: Value
    kv_start: Value


class TangentFrame(BackwardFrame):
    """A backward frame, with the memory and the expressions of a tangent kernel."""

    def __init__(self, key: TangentKey) -> None:
        super().__init__(key.of_backward)
        self.backward, self.scaled_dot = key.backward, key.scaled_dot
        areas = scratch_areas(key.spec, key.shape, backward=key.backward)
        self.area_names = tuple(areas)
        self.fields = (*FIELDS, *(f"area_{name}" for name in areas))
        self.score_dot, self.slope_dot = key.score_dot, key.slope_dot
        self.load_slopes_dot = dict(zip(self.loads, key.load_slopes_dot, strict=True))
        self.may_forbid = True
        self.plain = self.score == SCORE
        self.pair_areas = pair_areas(plain=self.plain, backward=self.backward)
        self.wide_vector = ir.VectorType(DOUBLE, self.e.lanes)

    @contextmanager
    def pair_function(self, name: str) -> Iterator[tuple[Value, PairArguments]]:
        pointers = 2 + len(PAIR_AREAS) + 2
        types = [*[POINTER] * pointers, *[INT64] * (len(PairArguments._fields) - pointers)]
        with self.e.function(name, types) as (function, args):
            yield function, PairArguments(*args)

    def expressions(self, at: PairArguments) -> Expressions:
        return self.expressions_of_rows(at.arguments, at.batch, at.head, at.first_row, at.rows)

    def sum_place(self, sums: Value, width: Value, name: str) -> Value:
        """Where a row of sums lies in float64, of the vector at which `sums` begins."""
        wide = self.e.mul(width, 8 // self.e.real_bytes)
        return self.e.at(sums, self.e.mul(wide, SUM_ROWS.index(name)))

    def real_place(self, reals: Value, width: Value, name: str) -> Value:
        return self.e.at(reals, self.e.mul(width, REAL_ROWS.index(name)))

    def load_sum(self, place: Value) -> Value:
        return self.e.load(place, self.wide_vector, self.e.vector_bytes)

    def store_sum(self, value: Value, place: Value) -> None:
        self.e.store(value, place, self.e.vector_bytes)

    def as_wide(self, x: Value) -> Value:
        """A vector in float64."""
        return x if x.type == self.wide_vector else self.e.builder.fpext(x, self.wide_vector)

    def as_real(self, x: Value) -> Value:
        """A vector of float64 in the type of computation."""
        return x if x.type == self.e.vector else self.e.builder.fptrunc(x, self.e.vector)
