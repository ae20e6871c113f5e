"""Interval arithmetic in machine code: what a mask can be over a block of keys.

This is `qkv.problem.bounds` for one block at a time, with the same rules and the same room for
rounding, so that a kernel finds out by itself which blocks it may skip and which need no mask. The
bounds of a number are two float64 numbers and a bit that says whether it may be NaN; those of a
condition are two bits, whether it certainly holds and whether it possibly does.

The elements of a table that a block may read are looked up if they are few; otherwise they may be
any value of the table's type. Two things are bounded less tightly than in `qkv.problem.bounds`:
exponentials, logarithms and hyperbolic tangents have no bounds at all, and neither have integers
beyond 2**53.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, DOUBLE, INT64, Emitter, Value, is_vector
from qkv.backends.cpu.emit.expressions import INTEGER_TYPES, TableView, item_bytes, raw_type
from qkv.problem.expressions import Const, Load, Node, Op, Var, landings
from qkv.problem.intervals import EXACT, FLOAT32_MAX, ROUNDING, ROUNDS, TINY, constant_interval

_INTEGER_LIMIT = 2.0**63
_FLOOR_LIMIT = 2.0**62


class Bounds(NamedTuple):
    """Smallest and largest value as float64, and whether it may be NaN."""

    low: Value
    high: Value
    nan: Value


class Truth(NamedTuple):
    """Whether a condition certainly holds, and whether it possibly does."""

    certain: Value
    possible: Value


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
            for landing in landings(node, self._known):
                self._known[landing] = self._emit(landing)
            interval = self._known[node] = self._emit(node)
        return interval

    def _emit(self, node: Node) -> Bounds | Truth:
        b = self.e.builder
        match node:
            case Const(kind="bool", value=value):
                return Truth(_bool_constant(bool(value)), _bool_constant(bool(value)))
            case Const(kind="int", value=value):
                return self._exact_integers(_constant_bounds(float(value), float(value)))
            case Const(value=value):
                known = constant_interval(float(value))
                return _constant_bounds(float(known.low), float(known.high), bool(known.nan))
            case Var(name=name) if name in self._places:
                low, high = self._places[name]
                return Bounds(b.sitofp(low, DOUBLE), b.sitofp(high, DOUBLE), _bool_constant(False))
            case Var():
                return ANY_VALUE
            case Load():
                return self._emit_load(node)
            case Op():
                return self._emit_operation(node)

    # --- Operations ------------------------------------------------------------------------------

    def _emit_operation(self, op: Op) -> Bounds | Truth:
        if op.name in ("and", "or", "not"):
            return self._combine_conditions(op.name, [self.truth(arg) for arg in op.args])
        if op.kind == "bool" and op.name == "where":
            return self._where_condition(*(self.truth(arg) for arg in op.args))
        if op.name == "where":
            condition = self.truth(op.args[0])
            return self._where_number(condition, *self._argument_bounds(op, op.args[1:]))
        numbers = self._argument_bounds(op, op.args)
        if op.kind == "bool":
            return self._compare(op.name, *numbers)
        exact = self._RULES[op.name](self, *numbers)
        if op.name not in ROUNDS:
            return exact
        return self._unless_wrapped(exact) if op.kind == "int" else self._rounded(exact)

    def _argument_bounds(self, op: Op, args: tuple[Node, ...]) -> list[Bounds]:
        """Bounds of arguments, integers among them as float32 if the operation computes in it."""
        bounds = [self.bounds(arg) for arg in args]
        if op.kind == "int" and op.name != "floor":
            return bounds
        if op.kind != "float" and all(arg.kind != "float" for arg in args):
            return bounds
        return [
            self._as_float(x) if arg.kind == "int" else x
            for x, arg in zip(bounds, args, strict=True)
        ]

    def _combine_conditions(self, name: str, args: list[Truth]) -> Truth:
        b = self.e.builder
        if name == "not":
            (a,) = args
            return Truth(b.not_(a.possible), b.not_(a.certain))
        combine = b.and_ if name == "and" else b.or_
        return Truth(*(combine(x, y) for x, y in zip(*args, strict=True)))

    def _where_condition(self, condition: Truth, first: Truth, second: Truth) -> Truth:
        """`_where_number` for conditions, taken as 0 and 1."""
        b, never = self.e.builder, self.e.builder.not_(condition.possible)
        certain = b.select(never, second.certain, b.and_(first.certain, second.certain))
        possible = b.select(never, second.possible, b.or_(first.possible, second.possible))
        return Truth(
            b.select(condition.certain, first.certain, certain),
            b.select(condition.certain, first.possible, possible),
        )

    def _where_number(self, condition: Truth, first: Bounds, second: Bounds) -> Bounds:
        b, never = self.e.builder, self.e.builder.not_(condition.possible)
        low = b.select(never, second.low, self._least(first.low, second.low))
        high = b.select(never, second.high, self._greatest(first.high, second.high))
        nan = b.or_(
            b.and_(condition.possible, first.nan), b.and_(b.not_(condition.certain), second.nan)
        )
        return Bounds(
            b.select(condition.certain, first.low, low),
            b.select(condition.certain, first.high, high),
            nan,
        )

    def _compare(self, name: str, a: Bounds, c: Bounds) -> Truth:
        """A comparison with NaN is false, and `ne` with it is true."""
        b = self.e.builder
        if name in ("eq", "ne"):
            same = self._all_of(
                b.fcmp_ordered("==", a.low, a.high),
                b.fcmp_ordered("==", c.low, c.high),
                b.fcmp_ordered("==", a.low, c.low),
            )
            overlap = b.and_(
                b.fcmp_ordered(">=", a.high, c.low), b.fcmp_ordered(">=", c.high, a.low)
            )
            truth = Truth(same, overlap)
        else:
            sign = "<" if name == "lt" else "<="
            truth = Truth(b.fcmp_ordered(sign, a.high, c.low), b.fcmp_ordered(sign, a.low, c.high))
        truth = truth._replace(certain=b.and_(truth.certain, b.not_(b.or_(a.nan, c.nan))))
        return self._combine_conditions("not", [truth]) if name == "ne" else truth

    def _add(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = b.fadd(a.low, c.low), b.fadd(a.high, c.high)
        opposite = b.or_(
            b.and_(self._equals(a.high, math.inf), self._equals(c.low, -math.inf)),
            b.and_(self._equals(a.low, -math.inf), self._equals(c.high, math.inf)),
        )
        return Bounds(
            self._replace_nan(low, -math.inf),
            self._replace_nan(high, math.inf),
            b.or_(b.or_(a.nan, c.nan), opposite),
        )

    def _multiply(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._corner_extremes(b.fmul, a, c)
        zero_by_infinite = b.or_(
            b.and_(self._may_be_zero(a), self._may_be_infinite(c)),
            b.and_(self._may_be_zero(c), self._may_be_infinite(a)),
        )
        return Bounds(low, high, b.or_(b.or_(a.nan, c.nan), zero_by_infinite))

    def _divide(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._corner_extremes(b.fdiv, a, c)
        nan = b.or_(b.or_(a.nan, c.nan), b.and_(self._may_be_infinite(a), self._may_be_infinite(c)))
        return self._any_value_if(self._may_be_zero(c), Bounds(low, high, nan))

    def _floor_divide(self, a: Bounds, c: Bounds) -> Bounds:
        """Divisors are 1 or more. The rounded quotient of exact integers never crosses an integer,
        so that its floor is exact; a bound that is not exact stays as it is."""
        b = self.e.builder

        def quotient(x: Value, y: Value) -> Value:
            floor = self._intrinsic("floor", b.fdiv(x, y))
            return b.select(self._is_exact(x), floor, x)

        low, high = self._corner_extremes(quotient, a, c)
        return self._any_value_if(
            self._may_be_below_one(c), Bounds(low, high, _bool_constant(False))
        )

    def _remainder(self, a: Bounds, c: Bounds) -> Bounds:
        b, one = self.e.builder, _constant(1.0)
        first, last = (self._intrinsic("floor", b.fdiv(x, c.low)) for x in (a.low, a.high))
        small = [
            b.fcmp_ordered("<", self._intrinsic("fabs", x), _constant(EXACT / 2))
            for x in (a.low, a.high, c.low)
        ]
        inside = self._all_of(
            b.fcmp_ordered("==", first, last), b.fcmp_ordered("==", c.low, c.high), *small
        )
        start = b.fmul(first, c.low)
        low = b.select(inside, b.fsub(a.low, start), _constant(0.0))
        high = b.select(inside, b.fsub(a.high, start), b.fsub(c.high, one))
        return self._any_value_if(
            self._may_be_below_one(c), Bounds(low, high, _bool_constant(False))
        )

    def _minimum(self, a: Bounds, c: Bounds) -> Bounds:
        nan = self.e.builder.or_(a.nan, c.nan)
        return Bounds(self._least(a.low, c.low), self._least(a.high, c.high), nan)

    def _maximum(self, a: Bounds, c: Bounds) -> Bounds:
        nan = self.e.builder.or_(a.nan, c.nan)
        return Bounds(self._greatest(a.low, c.low), self._greatest(a.high, c.high), nan)

    def _negative(self, a: Bounds) -> Bounds:
        b = self.e.builder
        return Bounds(b.fneg(a.high), b.fneg(a.low), a.nan)

    def _subtract(self, a: Bounds, c: Bounds) -> Bounds:
        return self._add(a, self._negative(c))

    def _absolute(self, a: Bounds) -> Bounds:
        b, zero = self.e.builder, _constant(0.0)
        below = b.select(b.fcmp_ordered("<", a.high, zero), b.fneg(a.high), zero)
        low = b.select(b.fcmp_ordered(">", a.low, zero), a.low, below)
        return Bounds(low, self._greatest(b.fneg(a.low), a.high), a.nan)

    def _square_root(self, a: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._intrinsic("sqrt", a.low), self._intrinsic("sqrt", a.high)
        return Bounds(
            self._replace_nan(low, 0.0),
            self._replace_nan(high, math.inf),
            b.or_(a.nan, self.e.is_nan(low)),
        )

    def _floor(self, a: Bounds) -> Bounds:
        """Saturates, and turns NaN into 0, as `evaluate` does."""
        b, zero = self.e.builder, _constant(0.0)
        limit = _constant(_FLOOR_LIMIT)
        low, high = (
            self._greatest(
                self._least(self._intrinsic("floor", x), limit), _constant(-_FLOOR_LIMIT)
            )
            for x in (a.low, a.high)
        )
        return Bounds(
            b.select(a.nan, self._least(low, zero), low),
            b.select(a.nan, self._greatest(high, zero), high),
            _bool_constant(False),
        )

    def _any_value(self, _: Bounds) -> Bounds:
        return ANY_VALUE

    _RULES: Mapping[str, Callable[..., Bounds]] = {
        "add": _add, "sub": _subtract, "mul": _multiply, "div": _divide,
        "floordiv": _floor_divide, "mod": _remainder, "min": _minimum, "max": _maximum,
        "neg": _negative, "abs": _absolute, "sqrt": _square_root, "floor": _floor,
        "exp": _any_value, "log": _any_value, "tanh": _any_value,
    }  # fmt: skip

    # --- Margins for rounding, and for integers that wrap around ---------------------------------

    def _exact_integers(self, a: Bounds) -> Bounds:
        """Bounds that float64 holds exactly; beyond 2**53 only the bounds of int64 are known."""
        b = self.e.builder
        return Bounds(
            b.select(self._is_exact(a.low), a.low, _constant(-_INTEGER_LIMIT)),
            b.select(self._is_exact(a.high), a.high, _constant(_INTEGER_LIMIT)),
            a.nan,
        )

    def _unless_wrapped(self, a: Bounds) -> Bounds:
        """The bounds of a sum or product, unless either is so large that the integer may wrap."""
        b = self.e.builder
        safe = b.and_(self._is_exact(a.low), self._is_exact(a.high))
        return Bounds(
            b.select(safe, a.low, _constant(-_INTEGER_LIMIT)),
            b.select(safe, a.high, _constant(_INTEGER_LIMIT)),
            a.nan,
        )

    def _as_float(self, a: Bounds) -> Bounds:
        """Bounds of an integer that is converted to float32, which rounds it beyond 2**24."""
        b, limit = self.e.builder, _constant(2.0**24)
        near = self._all_of(
            *(b.fcmp_ordered("<=", self._intrinsic("fabs", x), limit) for x in (a.low, a.high))
        )
        wide = self._rounded(a)
        return Bounds(b.select(near, a.low, wide.low), b.select(near, a.high, wide.high), a.nan)

    def _rounded(self, a: Bounds) -> Bounds:
        """Bounds with a margin for the rounding, overflow and underflow of float32."""
        b = self.e.builder
        low, high = self._with_margin(a)
        beneath = b.fcmp_ordered("<", low, _constant(-FLOAT32_MAX))
        above = b.fcmp_ordered(">", high, _constant(FLOAT32_MAX))
        return Bounds(
            b.select(beneath, _constant(-math.inf), low),
            b.select(above, _constant(math.inf), high),
            a.nan,
        )

    def _as_float32(self, a: Bounds) -> Bounds:
        """Bounds of elements of a float64 table, rounded to float32; finite ones stay finite."""
        b = self.e.builder
        low, high = self._with_margin(a)
        infinite = [self._equals(self._intrinsic("fabs", x), math.inf) for x in (a.low, a.high)]
        return Bounds(
            b.select(infinite[0], a.low, self._least(low, _constant(FLOAT32_MAX))),
            b.select(infinite[1], a.high, self._greatest(high, _constant(-FLOAT32_MAX))),
            a.nan,
        )

    def _with_margin(self, a: Bounds) -> tuple[Value, Value]:
        b, zero = self.e.builder, _constant(0.0)

        def margin(x: Value) -> Value:
            size = self._intrinsic("fabs", x)
            wide = b.fadd(b.fmul(size, _constant(ROUNDING)), _constant(TINY))
            return b.select(b.fcmp_ordered("<", size, _constant(math.inf)), wide, zero)

        low, high = b.fsub(a.low, margin(a.low)), b.fadd(a.high, margin(a.high))
        positive = b.fcmp_ordered(">=", a.low, zero)
        negative = b.fcmp_ordered("<=", a.high, zero)
        return (
            b.select(positive, self._greatest(low, zero), low),
            b.select(negative, self._least(high, zero), high),
        )

    # --- Tables ----------------------------------------------------------------------------------

    def _emit_load(self, load: Load) -> Bounds | Truth:
        """Bounds of the elements that may be read if they are few, else of the table's type."""
        e, b = self.e, self.e.builder
        table = self.tables[load.table]
        ranges = [self._index_range(i, n) for i, n in zip(load.indices, table.sizes, strict=True)]
        count = _constant(1.0)
        for first, last in ranges:
            count = b.fmul(count, b.sitofp(e.add(e.sub(last, first), 1), DOUBLE))
        is_read = b.fcmp_ordered("<=", count, self._most_reads)
        axes = list(zip(ranges, table.strides, strict=True))
        nothing = [_constant(math.inf), _constant(-math.inf), _bool_constant(False)]
        seen = [*nothing, *[e.splat(x) for x in nothing]]
        seen = self._bounds_of_entries(table, table.pointer, axes, is_read, seen)
        found = self._joined(seen[:3], self._over_lanes(seen[3:]))
        type_bounds = self._bounds_of_type(load, table)
        bounds = Bounds(*[b.select(is_read, x, y) for x, y in zip(found, type_bounds, strict=True)])
        if load.kind == "bool":
            zero = _constant(0.0)
            return Truth(*(b.fcmp_ordered(">", x, zero) for x in (bounds.low, bounds.high)))
        if load.kind == "int":
            return self._exact_integers(bounds)
        wide = table.spec.dtype == "float64"
        return self._as_float32(bounds) if wide else bounds

    def _index_range(self, index: Node, size: Value) -> tuple[Value, Value]:
        """First and last index. Indices are proved to lie inside the table, but their bounds may
        be wider, so that they are cut off at `size`."""
        e, b = self.e, self.e.builder
        last = b.sitofp(e.sub(size, 1), DOUBLE)
        bounds = self.bounds(index)
        low, high = (
            self._greatest(self._least(x, last), _constant(0.0)) for x in (bounds.low, bounds.high)
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
        low, high = _constant(-math.inf), _constant(math.inf)
        if is_vector(entries):
            low, high = self.e.splat(low), self.e.splat(high)
        # `qkv.problem.bounds` has the same rule: one NaN leaves a table without bounds.
        return self._joined(seen, [b.select(nan, low, entries), b.select(nan, high, entries), nan])

    def _joined(self, first: Sequence[Value], second: Sequence[Value]) -> list[Value]:
        """Smallest and largest, and whether one is NaN, of both."""
        combine = self._least, self._greatest, self.e.builder.or_
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
            return _constant_bounds(0.0, 1.0)
        if load.kind == "int":
            limits = np.iinfo(table.spec.dtype)
            return _constant_bounds(float(limits.min), float(limits.max))
        return ANY_VALUE

    # --- Numbers ---------------------------------------------------------------------------------

    def _corner_extremes(
        self, combine: Callable[[Value, Value], Value], a: Bounds, c: Bounds
    ) -> tuple[Value, Value]:
        """Smallest and largest result for the bounds of both arguments; 0 where one is NaN."""
        values = [
            self._replace_nan(combine(x, y), 0.0) for x in (a.low, a.high) for y in (c.low, c.high)
        ]
        low = high = values[0]
        for value in values[1:]:
            low, high = self._least(low, value), self._greatest(high, value)
        return low, high

    def _any_value_if(self, condition: Value, bounds: Bounds) -> Bounds:
        """`ANY_VALUE` where the condition holds, else `bounds`."""
        b = self.e.builder
        return Bounds(*(b.select(condition, x, y) for x, y in zip(ANY_VALUE, bounds, strict=True)))

    def _replace_nan(self, x: Value, otherwise: float) -> Value:
        return self.e.builder.select(self.e.is_nan(x), _constant(otherwise), x)

    def _least(self, x: Value, y: Value) -> Value:
        return self.e.builder.select(self.e.builder.fcmp_ordered("<", y, x), y, x)

    def _greatest(self, x: Value, y: Value) -> Value:
        return self.e.builder.select(self.e.builder.fcmp_ordered(">", y, x), y, x)

    def _equals(self, x: Value, number: float) -> Value:
        return self.e.builder.fcmp_ordered("==", x, _constant(number))

    def _is_exact(self, x: Value) -> Value:
        return self.e.builder.fcmp_ordered("<", self._intrinsic("fabs", x), _constant(EXACT))

    def _may_be_below_one(self, a: Bounds) -> Value:
        return self.e.builder.fcmp_ordered("<", a.low, _constant(1.0))

    def _may_be_zero(self, a: Bounds) -> Value:
        b, zero = self.e.builder, _constant(0.0)
        return b.and_(b.fcmp_ordered("<=", a.low, zero), b.fcmp_ordered(">=", a.high, zero))

    def _may_be_infinite(self, a: Bounds) -> Value:
        return self.e.builder.or_(
            *(self._equals(self._intrinsic("fabs", x), math.inf) for x in (a.low, a.high))
        )

    def _intrinsic(self, name: str, x: Value) -> Value:
        return self.e.intrinsic(name, x)

    def _all_of(self, *conditions: Value) -> Value:
        all_hold = conditions[0]
        for condition in conditions[1:]:
            all_hold = self.e.builder.and_(all_hold, condition)
        return all_hold


def _constant(value: float) -> Value:
    return ir.Constant(DOUBLE, value)


def _bool_constant(value: bool) -> Value:
    return ir.Constant(BIT, int(value))


def _constant_bounds(low: float, high: float, nan: bool = False) -> Bounds:
    return Bounds(_constant(low), _constant(high), _bool_constant(nan))


ANY_VALUE = _constant_bounds(-math.inf, math.inf, nan=True)
