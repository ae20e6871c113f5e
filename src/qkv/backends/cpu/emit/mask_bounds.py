"""Interval arithmetic in machine code: what a mask can be over a block of keys.

This is `qkv.problem.bounds` for one block at a time, with the same rules and the same room for
rounding, so that a kernel finds out by itself which blocks it may skip and which need no mask. An
interval is a pair of float64 numbers and a bit that says whether the value may be NaN; of a
condition it is two bits, whether it certainly holds and whether it possibly does.

A table is read where all its indices are exact. Over ranges of indices its smallest and largest
element are looked up if these are few; otherwise its values may be whatever its type holds. Less is
known than in NumPy of exponentials, logarithms and hyperbolic tangents, which are not bounded, and
of integers beyond 2**53, which may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, DOUBLE, INT64, Emitter, Value
from qkv.backends.cpu.emit.expressions import INTEGER_TYPES, TableView, raw_type
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
        found = self._interval(node)
        assert isinstance(found, Truth)
        return found

    def bounds(self, node: Node) -> Bounds:
        """The bounds of a number."""
        found = self._interval(node)
        assert isinstance(found, Bounds)
        return found

    def _interval(self, node: Node) -> Bounds | Truth:
        found = self._known.get(node)
        if found is None:
            for landing in landings(node, self._known):
                self._known[landing] = self._emit(landing)
            found = self._known[node] = self._emit(node)
        return found

    def _emit(self, node: Node) -> Bounds | Truth:
        b = self.e.builder
        match node:
            case Const(kind="bool", value=value):
                return Truth(_bit(bool(value)), _bit(bool(value)))
            case Const(kind="int", value=value):
                return self._whole(_constant_bounds(float(value), float(value)))
            case Const(value=value):
                known = constant_interval(float(value))
                return _constant_bounds(float(known.low), float(known.high), bool(known.nan))
            case Var(name=name) if name in self._places:
                low, high = self._places[name]
                return Bounds(b.sitofp(low, DOUBLE), b.sitofp(high, DOUBLE), _bit(False))
            case Var():
                return UNKNOWN
            case Load():
                return self._load(node)
            case Op():
                return self._operation(node)

    # --- Operations ------------------------------------------------------------------------------

    def _operation(self, op: Op) -> Bounds | Truth:
        if op.name in ("and", "or", "not"):
            return self._logic(op.name, [self.truth(arg) for arg in op.args])
        if op.kind == "bool" and op.name == "where":
            return self._choice(*(self.truth(arg) for arg in op.args))
        if op.name == "where":
            condition = self.truth(op.args[0])
            return self._where(condition, *self._numbers(op, op.args[1:]))
        numbers = self._numbers(op, op.args)
        if op.kind == "bool":
            return self._compare(op.name, *numbers)
        exact = self._RULES[op.name](self, *numbers)
        if op.name not in ROUNDS:
            return exact
        return self._wrapped(exact) if op.kind == "int" else self._rounded(exact)

    def _numbers(self, op: Op, args: tuple[Node, ...]) -> list[Bounds]:
        """Integer arguments in the type in which the operation computes."""
        found = [self.bounds(arg) for arg in args]
        if op.kind == "int" and op.name != "floor":
            return found
        if op.kind != "float" and all(arg.kind != "float" for arg in args):
            return found
        return [
            self._real(x) if arg.kind == "int" else x for x, arg in zip(found, args, strict=True)
        ]

    def _logic(self, name: str, args: list[Truth]) -> Truth:
        b = self.e.builder
        if name == "not":
            (a,) = args
            return Truth(b.not_(a.possible), b.not_(a.certain))
        combine = b.and_ if name == "and" else b.or_
        return Truth(*(combine(x, y) for x, y in zip(*args, strict=True)))

    def _choice(self, condition: Truth, first: Truth, second: Truth) -> Truth:
        """Conditions as 0 and 1, under the rule of `_where`."""
        b, never = self.e.builder, self.e.builder.not_(condition.possible)
        certain = b.select(never, second.certain, b.and_(first.certain, second.certain))
        possible = b.select(never, second.possible, b.or_(first.possible, second.possible))
        return Truth(
            b.select(condition.certain, first.certain, certain),
            b.select(condition.certain, first.possible, possible),
        )

    def _where(self, condition: Truth, first: Bounds, second: Bounds) -> Bounds:
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
            same = self._all(
                b.fcmp_ordered("==", a.low, a.high),
                b.fcmp_ordered("==", c.low, c.high),
                b.fcmp_ordered("==", a.low, c.low),
            )
            overlap = b.and_(
                b.fcmp_ordered(">=", a.high, c.low), b.fcmp_ordered(">=", c.high, a.low)
            )
            found = Truth(same, overlap)
        else:
            sign = "<" if name == "lt" else "<="
            found = Truth(b.fcmp_ordered(sign, a.high, c.low), b.fcmp_ordered(sign, a.low, c.high))
        found = found._replace(certain=b.and_(found.certain, b.not_(b.or_(a.nan, c.nan))))
        return self._logic("not", [found]) if name == "ne" else found

    def _add(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = b.fadd(a.low, c.low), b.fadd(a.high, c.high)
        opposite = b.or_(
            b.and_(self._equals(a.high, math.inf), self._equals(c.low, -math.inf)),
            b.and_(self._equals(a.low, -math.inf), self._equals(c.high, math.inf)),
        )
        return Bounds(
            self._unless_nan(low, -math.inf),
            self._unless_nan(high, math.inf),
            b.or_(b.or_(a.nan, c.nan), opposite),
        )

    def _multiply(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._corners(b.fmul, a, c)
        zero_by_infinite = b.or_(
            b.and_(self._has_zero(a), self._infinite(c)),
            b.and_(self._has_zero(c), self._infinite(a)),
        )
        return Bounds(low, high, b.or_(b.or_(a.nan, c.nan), zero_by_infinite))

    def _divide(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._corners(b.fdiv, a, c)
        nan = b.or_(b.or_(a.nan, c.nan), b.and_(self._infinite(a), self._infinite(c)))
        return self._unless(self._has_zero(c), Bounds(low, high, nan))

    def _floor_divide(self, a: Bounds, c: Bounds) -> Bounds:
        """Divisors are 1 or more. The rounded quotient of exact integers never crosses a whole
        number, so that its floor is exact; ends that are not exact stay as they are."""
        b = self.e.builder

        def quotient(x: Value, y: Value) -> Value:
            found = self._float("floor", b.fdiv(x, y))
            return b.select(self._is_exact(x), found, x)

        low, high = self._corners(quotient, a, c)
        return self._unless(self._below_one(c), Bounds(low, high, _bit(False)))

    def _remainder(self, a: Bounds, c: Bounds) -> Bounds:
        b, one = self.e.builder, _number(1.0)
        first, last = (self._float("floor", b.fdiv(x, c.low)) for x in (a.low, a.high))
        small = [
            b.fcmp_ordered("<", self._float("fabs", x), _number(EXACT / 2))
            for x in (a.low, a.high, c.low)
        ]
        inside = self._all(
            b.fcmp_ordered("==", first, last), b.fcmp_ordered("==", c.low, c.high), *small
        )
        start = b.fmul(first, c.low)
        low = b.select(inside, b.fsub(a.low, start), _number(0.0))
        high = b.select(inside, b.fsub(a.high, start), b.fsub(c.high, one))
        return self._unless(self._below_one(c), Bounds(low, high, _bit(False)))

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
        b, zero = self.e.builder, _number(0.0)
        below = b.select(b.fcmp_ordered("<", a.high, zero), b.fneg(a.high), zero)
        low = b.select(b.fcmp_ordered(">", a.low, zero), a.low, below)
        return Bounds(low, self._greatest(b.fneg(a.low), a.high), a.nan)

    def _square_root(self, a: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._float("sqrt", a.low), self._float("sqrt", a.high)
        return Bounds(
            self._unless_nan(low, 0.0),
            self._unless_nan(high, math.inf),
            b.or_(a.nan, self.e.is_nan(low)),
        )

    def _floor(self, a: Bounds) -> Bounds:
        """Saturates, and turns NaN into 0, as `evaluate` does."""
        b, zero = self.e.builder, _number(0.0)
        limit = _number(_FLOOR_LIMIT)
        low, high = (
            self._greatest(self._least(self._float("floor", x), limit), _number(-_FLOOR_LIMIT))
            for x in (a.low, a.high)
        )
        return Bounds(
            b.select(a.nan, self._least(low, zero), low),
            b.select(a.nan, self._greatest(high, zero), high),
            _bit(False),
        )

    def _unbounded(self, _: Bounds) -> Bounds:
        return UNKNOWN

    _RULES: Mapping[str, Callable[..., Bounds]] = {
        "add": _add, "sub": _subtract, "mul": _multiply, "div": _divide,
        "floordiv": _floor_divide, "mod": _remainder, "min": _minimum, "max": _maximum,
        "neg": _negative, "abs": _absolute, "sqrt": _square_root, "floor": _floor,
        "exp": _unbounded, "log": _unbounded, "tanh": _unbounded,
    }  # fmt: skip

    # --- Margins for rounding, and for integers that wrap around ---------------------------------

    def _whole(self, a: Bounds) -> Bounds:
        """Bounds of integers that float64 holds exactly; larger ones have no bounds."""
        b = self.e.builder
        return Bounds(
            b.select(self._is_exact(a.low), a.low, _number(-_INTEGER_LIMIT)),
            b.select(self._is_exact(a.high), a.high, _number(_INTEGER_LIMIT)),
            a.nan,
        )

    def _wrapped(self, a: Bounds) -> Bounds:
        b = self.e.builder
        safe = b.and_(self._is_exact(a.low), self._is_exact(a.high))
        return Bounds(
            b.select(safe, a.low, _number(-_INTEGER_LIMIT)),
            b.select(safe, a.high, _number(_INTEGER_LIMIT)),
            a.nan,
        )

    def _real(self, a: Bounds) -> Bounds:
        """Integers turned into floating numbers, which float32 rounds beyond 2**24."""
        b, limit = self.e.builder, _number(2.0**24)
        near = self._all(
            *(b.fcmp_ordered("<=", self._float("fabs", x), limit) for x in (a.low, a.high))
        )
        wide = self._rounded(a)
        return Bounds(b.select(near, a.low, wide.low), b.select(near, a.high, wide.high), a.nan)

    def _rounded(self, a: Bounds) -> Bounds:
        """Room for the rounding, overflow and underflow of float32."""
        b = self.e.builder
        low, high = self._with_margin(a)
        beneath = b.fcmp_ordered("<", low, _number(-FLOAT32_MAX))
        above = b.fcmp_ordered(">", high, _number(FLOAT32_MAX))
        return Bounds(
            b.select(beneath, _number(-math.inf), low),
            b.select(above, _number(math.inf), high),
            a.nan,
        )

    def _narrowed(self, a: Bounds) -> Bounds:
        """Elements of a float64 table, which are rounded to float32 but stay finite."""
        b = self.e.builder
        low, high = self._with_margin(a)
        infinite = [self._equals(self._float("fabs", x), math.inf) for x in (a.low, a.high)]
        return Bounds(
            b.select(infinite[0], a.low, self._least(low, _number(FLOAT32_MAX))),
            b.select(infinite[1], a.high, self._greatest(high, _number(-FLOAT32_MAX))),
            a.nan,
        )

    def _with_margin(self, a: Bounds) -> tuple[Value, Value]:
        b, zero = self.e.builder, _number(0.0)

        def room(x: Value) -> Value:
            size = self._float("fabs", x)
            wide = b.fadd(b.fmul(size, _number(ROUNDING)), _number(TINY))
            return b.select(b.fcmp_ordered("<", size, _number(math.inf)), wide, zero)

        low, high = b.fsub(a.low, room(a.low)), b.fadd(a.high, room(a.high))
        positive = b.fcmp_ordered(">=", a.low, zero)
        negative = b.fcmp_ordered("<=", a.high, zero)
        return (
            b.select(positive, self._greatest(low, zero), low),
            b.select(negative, self._least(high, zero), high),
        )

    # --- Tables ----------------------------------------------------------------------------------

    def _load(self, load: Load) -> Bounds | Truth:
        """The bounds of what is read: of the elements if they are few, else of their type."""
        e, b = self.e, self.e.builder
        table = self.tables[load.table]
        ranges = [self._range(i, n) for i, n in zip(load.indices, table.sizes, strict=True)]
        count = _number(1.0)
        for first, last in ranges:
            count = b.fmul(count, b.sitofp(e.add(e.sub(last, first), 1), DOUBLE))
        known = b.fcmp_ordered("<=", count, self._most_reads)
        whatever = self._whatever(load, table)
        start = [_number(math.inf), _number(-math.inf), _bit(False)]
        start = [b.select(known, x, y) for x, y in zip(start, whatever, strict=True)]
        place, axes = table.pointer, list(zip(ranges, table.strides, strict=True))
        found = Bounds(*self._table_extremes(table, place, axes, known, start))
        if load.kind == "bool":
            zero = _number(0.0)
            return Truth(*(b.fcmp_ordered(">", x, zero) for x in (found.low, found.high)))
        if load.kind == "int":
            return self._whole(found)
        wide = table.spec.dtype == "float64"
        return self._narrowed(found) if wide else found

    def _range(self, index: Node, size: Value) -> tuple[Value, Value]:
        """First and last index, which are proved to lie inside; `size` only fences them off."""
        e, b = self.e, self.e.builder
        last = b.sitofp(e.sub(size, 1), DOUBLE)
        found = self.bounds(index)
        low, high = (
            self._greatest(self._least(x, last), _number(0.0)) for x in (found.low, found.high)
        )
        return b.fptosi(low, INT64), b.fptosi(high, INT64)

    def _table_extremes(
        self,
        table: TableView,
        place: Value,
        axes: list[tuple[tuple[Value, Value], Value]],
        known: Value,
        seen: list[Value],
    ) -> list[Value]:
        """Smallest and largest element of a box of indices, and whether one is NaN."""
        e, b = self.e, self.e.builder
        if not axes:
            x = self._element(table, place)
            nan = e.is_nan(x)
            # If one value is NaN, `bounds` treats all of them as unknown.
            low = b.select(nan, _number(-math.inf), self._least(seen[0], x))
            high = b.select(nan, _number(math.inf), self._greatest(seen[1], x))
            return [low, high, b.or_(seen[2], nan)]
        ((first, last), stride), *others = axes
        # Tables whose indices are unknown are not read.
        stop = b.select(known, e.add(last, 1), first)

        def one(i: Value, carried: list[Value]) -> list[Value]:
            return self._table_extremes(
                table, e.at(place, e.mul(i, stride)), others, known, carried
            )

        return e.loop(first, stop, 1, seen, one)

    def _element(self, table: TableView, place: Value) -> Value:
        e, b, dtype = self.e, self.e.builder, table.spec.dtype
        raw = e.load(place, raw_type(dtype))
        if dtype == "bool":
            return b.uitofp(b.icmp_unsigned("!=", raw, ir.Constant(raw.type, None)), DOUBLE)
        if dtype in INTEGER_TYPES:
            _, signed = INTEGER_TYPES[dtype]
            return b.sitofp(raw, DOUBLE) if signed else b.uitofp(raw, DOUBLE)
        if dtype == "float64":
            return raw
        wide = storage.widen(e, raw, dtype)
        return wide if wide.type == DOUBLE else b.fpext(wide, DOUBLE)

    def _whatever(self, load: Load, table: TableView) -> Bounds:
        """All that the type of a table holds."""
        if load.kind == "bool":
            return _constant_bounds(0.0, 1.0)
        if load.kind == "int":
            limits = np.iinfo(table.spec.dtype)
            return _constant_bounds(float(limits.min), float(limits.max))
        return UNKNOWN

    # --- Numbers ---------------------------------------------------------------------------------

    def _corners(
        self, combine: Callable[[Value, Value], Value], a: Bounds, c: Bounds
    ) -> tuple[Value, Value]:
        values = [
            self._unless_nan(combine(x, y), 0.0) for x in (a.low, a.high) for y in (c.low, c.high)
        ]
        low = high = values[0]
        for value in values[1:]:
            low, high = self._least(low, value), self._greatest(high, value)
        return low, high

    def _unless(self, condition: Value, found: Bounds) -> Bounds:
        """Unknown where the condition holds."""
        b = self.e.builder
        return Bounds(*(b.select(condition, x, y) for x, y in zip(UNKNOWN, found, strict=True)))

    def _unless_nan(self, x: Value, otherwise: float) -> Value:
        return self.e.builder.select(self.e.is_nan(x), _number(otherwise), x)

    def _least(self, x: Value, y: Value) -> Value:
        return self.e.builder.select(self.e.builder.fcmp_ordered("<", y, x), y, x)

    def _greatest(self, x: Value, y: Value) -> Value:
        return self.e.builder.select(self.e.builder.fcmp_ordered(">", y, x), y, x)

    def _equals(self, x: Value, number: float) -> Value:
        return self.e.builder.fcmp_ordered("==", x, _number(number))

    def _is_exact(self, x: Value) -> Value:
        return self.e.builder.fcmp_ordered("<", self._float("fabs", x), _number(EXACT))

    def _below_one(self, a: Bounds) -> Value:
        return self.e.builder.fcmp_ordered("<", a.low, _number(1.0))

    def _has_zero(self, a: Bounds) -> Value:
        b, zero = self.e.builder, _number(0.0)
        return b.and_(b.fcmp_ordered("<=", a.low, zero), b.fcmp_ordered(">=", a.high, zero))

    def _infinite(self, a: Bounds) -> Value:
        return self.e.builder.or_(
            *(self._equals(self._float("fabs", x), math.inf) for x in (a.low, a.high))
        )

    def _float(self, name: str, x: Value) -> Value:
        return self.e.intrinsic(name, x)

    def _all(self, *conditions: Value) -> Value:
        found = conditions[0]
        for condition in conditions[1:]:
            found = self.e.builder.and_(found, condition)
        return found


def _number(value: float) -> Value:
    return ir.Constant(DOUBLE, value)


def _bit(value: bool) -> Value:
    return ir.Constant(BIT, int(value))


def _constant_bounds(low: float, high: float, nan: bool = False) -> Bounds:
    return Bounds(_number(low), _number(high), _bit(nan))


UNKNOWN = _constant_bounds(-math.inf, math.inf, nan=True)
