"""What a mask can be over a block of keys, found out in machine code.

This is `qkv.problem.language.bounds` for one block at a time, with the same rules and the same room
for rounding, so that a kernel finds out by itself which blocks it may skip and which need no mask.

The elements of a table that a block may read are looked up if they are few; otherwise they may be
any value of the table's type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import DOUBLE, INT64, Emitter, Value, is_vector
from qkv.backends.cpu.emit.expressions.interval_arithmetic import (
    ANY_VALUE,
    Bounds,
    IntervalArithmetic,
    Truth,
    bool_constant,
    constant,
    constant_bounds,
)
from qkv.backends.cpu.emit.expressions.tables import INTEGER_TYPES, TableView, item_bytes, raw_type
from qkv.problem.language.expressions import Const, Load, Node, Op, Var, computed_first
from qkv.problem.language.intervals import ROUNDS, constant_interval


class MaskBounds:
    """Emits the bounds of expressions; equal nodes are emitted once.

    `places` are the smallest and largest value of each variable, as 64-bit integers below 2**53;
    `most_reads`, a float64, is how many elements of a table may be looked up.
    """

    def __init__(
        self,
        e: Emitter,
        tables: Mapping[str, TableView],
        places: Mapping[str, tuple[Value, Value]],
        most_reads: Value,
    ) -> None:
        self.e = e
        self._arithmetic = IntervalArithmetic(e)
        self.tables = tables
        self._most_reads = most_reads
        self._places = places
        self._known: dict[Node, Bounds | Truth] = {}

    def truth(self, node: Node) -> Truth:
        """The bounds of a condition."""
        interval = self._interval(node)
        assert isinstance(interval, Truth)
        return interval

    def bounds(self, node: Node) -> Bounds:
        """The bounds of a number."""
        interval = self._interval(node)
        assert isinstance(interval, Bounds)
        return interval

    def _interval(self, node: Node) -> Bounds | Truth:
        interval = self._known.get(node)
        if interval is None:
            for part in computed_first(node, self._known):
                self._known[part] = self._emit(part)
            interval = self._known[node] = self._emit(node)
        return interval

    def _emit(self, node: Node) -> Bounds | Truth:
        b = self.e.builder
        match node:
            case Const(kind="bool", value=value):
                return Truth(bool_constant(bool(value)), bool_constant(bool(value)))
            case Const(kind="int", value=value):
                return self._arithmetic.exact_integers(constant_bounds(float(value), float(value)))
            case Const(value=value):
                known = constant_interval(float(value))
                return constant_bounds(float(known.low), float(known.high), bool(known.nan))
            case Var(name=name) if name in self._places:
                low, high = self._places[name]
                return Bounds(b.sitofp(low, DOUBLE), b.sitofp(high, DOUBLE), bool_constant(False))
            case Var():
                return ANY_VALUE
            case Load():
                return self._emit_load(node)
            case Op():
                return self._emit_operation(node)

    # --- Operations ------------------------------------------------------------------------------

    def _emit_operation(self, op: Op) -> Bounds | Truth:
        if op.name in ("and", "or", "not"):
            return self._arithmetic.combine_conditions(
                op.name, [self.truth(arg) for arg in op.args]
            )
        if op.kind == "bool" and op.name == "where":
            return self._arithmetic.where_condition(*(self.truth(arg) for arg in op.args))
        if op.name == "where":
            condition = self.truth(op.args[0])
            return self._arithmetic.where_number(condition, *self._argument_bounds(op, op.args[1:]))
        numbers = self._argument_bounds(op, op.args)
        if op.kind == "bool":
            return self._arithmetic.compare(op.name, *numbers)
        exact = self._arithmetic.apply(op.name, *numbers)
        if op.name not in ROUNDS:
            return exact
        if op.kind == "int":
            return self._arithmetic.unless_wrapped(exact)
        return self._arithmetic.rounded(exact)

    def _argument_bounds(self, op: Op, args: tuple[Node, ...]) -> list[Bounds]:
        """Bounds of arguments, integers among them as float32 if the operation computes in it."""
        bounds = [self.bounds(arg) for arg in args]
        if op.kind == "int" and op.name != "floor":
            return bounds
        if op.kind != "float" and all(arg.kind != "float" for arg in args):
            return bounds
        return [
            self._arithmetic.as_float(x) if arg.kind == "int" else x
            for x, arg in zip(bounds, args, strict=True)
        ]

    # --- Tables ----------------------------------------------------------------------------------

    def _emit_load(self, load: Load) -> Bounds | Truth:
        """Bounds of the elements that may be read if they are few, else of the table's type."""
        e, b = self.e, self.e.builder
        table = self.tables[load.table]
        ranges = [self._index_range(i, n) for i, n in zip(load.indices, table.sizes, strict=True)]
        count = constant(1.0)
        for first, last in ranges:
            count = b.fmul(count, b.sitofp(e.add(e.sub(last, first), 1), DOUBLE))
        is_read = b.fcmp_ordered("<=", count, self._most_reads)
        axes = list(zip(ranges, table.strides, strict=True))
        nothing = [constant(math.inf), constant(-math.inf), bool_constant(False)]
        seen = [*nothing, *[e.splat(x) for x in nothing]]
        seen = self._bounds_of_entries(table, table.pointer, axes, is_read, seen)
        found = self._joined(seen[:3], self._over_lanes(seen[3:]))
        type_bounds = self._bounds_of_type(load, table)
        bounds = Bounds(*[b.select(is_read, x, y) for x, y in zip(found, type_bounds, strict=True)])
        if load.kind == "bool":
            zero = constant(0.0)
            return Truth(*(b.fcmp_ordered(">", x, zero) for x in (bounds.low, bounds.high)))
        if load.kind == "int":
            return self._arithmetic.exact_integers(bounds)
        wide = table.spec.dtype == "float64"
        return self._arithmetic.as_float32(bounds) if wide else bounds

    def _index_range(self, index: Node, size: Value) -> tuple[Value, Value]:
        """First and last index. Indices are proved to lie inside the table, but their bounds may
        be wider, so that they are cut off at `size`."""
        e, b = self.e, self.e.builder
        last = b.sitofp(e.sub(size, 1), DOUBLE)
        bounds = self.bounds(index)
        low, high = (
            self._arithmetic.greatest(self._arithmetic.least(x, last), constant(0.0))
            for x in (bounds.low, bounds.high)
        )
        return b.fptosi(low, INT64), b.fptosi(high, INT64)

    def _bounds_of_entries(
        self,
        table: TableView,
        place: Value,
        axes: list[tuple[tuple[Value, Value], Value]],
        is_read: Value,
        seen: list[Value],
    ) -> list[Value]:
        """Smallest and largest element of a box of indices, and whether one is NaN.

        `axes` are the index ranges and strides still to go through. `seen` is the result so far: of
        elements that were read one by one, and in each lane of those that were read as vectors.
        """
        e, b = self.e, self.e.builder
        if not axes:
            entry = self._load_element(table, place, 1)
            return [*self._with_entries(seen[:3], entry), *seen[3:]]
        ((first, last), stride), *others = axes
        # If too many elements may be read, the loop is empty and none is.
        stop = b.select(is_read, e.add(last, 1), first)

        def read_along_axis(i: Value, carried: list[Value]) -> list[Value]:
            return self._bounds_of_entries(
                table, e.at(place, e.mul(i, stride)), others, is_read, carried
            )

        def read_neighbours(i: Value, carried: list[Value]) -> list[Value]:
            here = e.at(place, e.mul(i, stride))
            return self._with_entries(carried, self._load_element(table, here, e.lanes))

        if not others:
            side_by_side = b.icmp_signed("==", stride, e.index(item_bytes(table.spec.dtype)))
            whole = e.add(first, e.round_down(e.sub(stop, first), e.lanes))
            whole = b.select(side_by_side, whole, first)
            seen = [*seen[:3], *e.loop(first, whole, e.lanes, seen[3:], read_neighbours)]
            first = whole
        return e.loop(first, stop, 1, seen, read_along_axis)

    def _with_entries(self, seen: list[Value], entries: Value) -> list[Value]:
        """What was seen, and these entries."""
        b = self.e.builder
        nan = self.e.is_nan(entries)
        low, high = constant(-math.inf), constant(math.inf)
        if is_vector(entries):
            low, high = self.e.splat(low), self.e.splat(high)
        # `qkv.problem.language.bounds` has the same rule: one NaN leaves a table without bounds.
        return self._joined(seen, [b.select(nan, low, entries), b.select(nan, high, entries), nan])

    def _joined(self, first: Sequence[Value], second: Sequence[Value]) -> list[Value]:
        """Smallest and largest, and whether one is NaN, of both."""
        combine = self._arithmetic.least, self._arithmetic.greatest, self.e.builder.or_
        return [of(x, y) for of, x, y in zip(combine, first, second, strict=True)]

    def _over_lanes(self, seen: list[Value]) -> list[Value]:
        """What was seen in any lane."""
        b, e, width = self.e.builder, self.e, self.e.lanes
        while width > 1:
            width //= 2
            halves = [
                [b.shuffle_vector(x, x, e.shuffle_mask(range(start, start + width))) for x in seen]
                for start in (0, width)
            ]
            seen = self._joined(*halves)
        return [e.extract(x, 0) for x in seen]

    def _load_element(self, table: TableView, place: Value, count: int) -> Value:
        """One element, or a vector of `count` neighbours, in float64."""
        e, b, dtype = self.e, self.e.builder, table.spec.dtype
        raw_element, double = raw_type(dtype), DOUBLE
        if count > 1:
            raw_element, double = (ir.VectorType(of, count) for of in (raw_element, double))
        raw = e.load(place, raw_element)
        if dtype == "bool":
            return b.uitofp(b.icmp_unsigned("!=", raw, ir.Constant(raw.type, None)), double)
        if dtype in INTEGER_TYPES:
            _, signed = INTEGER_TYPES[dtype]
            return b.sitofp(raw, double) if signed else b.uitofp(raw, double)
        if dtype == "float64":
            return raw
        wide = storage.widen(e, raw, dtype)
        return wide if wide.type == double else b.fpext(wide, double)

    def _bounds_of_type(self, load: Load, table: TableView) -> Bounds:
        """The smallest and largest value that the type of a table holds."""
        if load.kind == "bool":
            return constant_bounds(0.0, 1.0)
        if load.kind == "int":
            limits = np.iinfo(table.spec.dtype)
            return constant_bounds(float(limits.min), float(limits.max))
        return ANY_VALUE
