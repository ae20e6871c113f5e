"""Expressions as vector code, which computes what `qkv.problem.language.evaluate` does.

A value is *uniform* (a scalar: the same for all lanes) or lane-varying (a vector), like the
variables that it is computed from. Uniform integers have 64 bits; integer lanes have 32 if every
integer of the problem fits, else 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from qkv.backends.cpu.emit import storage, vector_math
from qkv.backends.cpu.emit.emitter import BIT, FLOAT, INT64, Emitter, Value, is_vector
from qkv.backends.cpu.emit.expressions.tables import INTEGER_TYPES, TableView, item_bytes, raw_type
from qkv.problem.language.expressions import (
    Const,
    Load,
    Node,
    Op,
    Var,
    children,
    computed_first,
    walk,
)

_KEY = Var("kv_index")
KEY_VARIABLES = frozenset({"kv_index", "score"})
"""Variables that change from key to key."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The lanes are keys side by side.

    Attributes
    ----------
    first : 64-bit integer
        The key of the first lane.
    all_exist : bit
        Whether there are as many keys as lanes.
    """

    first: Value
    all_exist: Value


class Expressions:
    """Emits nodes; equal nodes are emitted once. `places` are the values of variables."""

    def __init__(
        self,
        e: Emitter,
        tables: Mapping[str, TableView],
        places: Mapping[str, Value],
        int_bits: int,
    ) -> None:
        self.e = e
        self.tables = tables
        self.places = dict(places)
        self.int_bits = int_bits
        self.known: dict[Node, Value] = {}
        self.neighbours: Neighbours | None = None

    def hoist(self, node: Node) -> None:
        """Emit the largest subexpressions that do not change from key to key, before the loop."""
        seen: set[Node] = set()
        waiting = [node]
        while waiting:
            n = waiting.pop()
            if n in seen:
                continue
            seen.add(n)
            if n.variables & KEY_VARIABLES:
                waiting.extend(reversed(children(n)))
            else:
                self.value(n)

    def at_key(
        self, kv_index: Value, score: Value, neighbours: Neighbours | None = None
    ) -> Expressions:
        """These expressions inside the loop over keys, at one key or at one in each lane."""
        inner = Expressions(self.e, self.tables, self.places, self.int_bits)
        inner.places.update(kv_index=kv_index, score=score)
        inner.known = dict(self.known)
        inner.neighbours = neighbours
        return inner

    def floats(self, node: Node) -> Value:
        """The node as a vector of reals."""
        return self._as_lanes(self._as_float(self.value(node)))

    def condition(self, node: Node) -> Value:
        """The node as a vector of bits."""
        return self._as_lanes(self.value(node))

    def value(self, node: Node) -> Value:
        if node not in self.known:
            for part in computed_first(node, self.known):
                self.known[part] = self._emit(part)
            self.known[node] = self._emit(node)
        return self.known[node]

    def _emit(self, node: Node) -> Value:
        match node:
            case Const(kind="bool", value=value):
                return ir.Constant(BIT, int(value))
            case Const(kind="int", value=value):
                return ir.Constant(INT64, int(value))
            case Const(value=value):
                with np.errstate(over="ignore"):
                    rounded = float(np.float32(value)) if self.e.real == FLOAT else float(value)
                return ir.Constant(self.e.real, rounded)
            case Var(name=name):
                return self.places[name]
            case Load():
                return self._emit_load(node)
            case Op():
                return self._emit_operation(node)

    # Shapes and kinds of values

    def _as_lanes(self, value: Value) -> Value:
        if is_vector(value):
            return value
        if value.type == INT64 and self.int_bits == 32:
            value = self.e.builder.trunc(value, ir.IntType(32))
        return self.e.splat(value)

    def _to_same_shape(self, *values: Value) -> list[Value]:
        """The values, as vectors if any of them is one."""
        if any(is_vector(v) for v in values):
            return [self._as_lanes(v) for v in values]
        return list(values)

    def _as_float(self, value: Value) -> Value:
        element = value.type.element if is_vector(value) else value.type
        if element == self.e.real:
            return value
        wanted = self.e.vector if is_vector(value) else self.e.real
        return self.e.builder.sitofp(value, wanted)

    # Tables

    def entry_offset(self, load: Load, table: TableView) -> tuple[Value, Value | None]:
        """Byte offset of the entry: a uniform part, and a lane-varying one if there is any."""
        e, b = self.e, self.e.builder
        uniform: Value = ir.Constant(INT64, 0)
        varying: Value | None = None
        for index, size, stride in zip(load.indices, table.sizes, table.strides, strict=True):
            value = self._index(index, size)
            if not is_vector(value):
                uniform = b.add(uniform, b.mul(value, stride))
                continue
            wide = value if self.int_bits == 64 else b.sext(value, ir.VectorType(INT64, e.lanes))
            offset = b.mul(wide, e.splat(stride))
            varying = offset if varying is None else b.add(varying, offset)
        return uniform, varying

    def _index(self, index: Node, size: Value) -> Value:
        value = self.value(index)
        if any(isinstance(n, Op) and n.name == "floor" for n in walk(index)):
            value = self._clamp_index(value, size)
        return value

    def _emit_load(self, load: Load) -> Value:
        e, table = self.e, self.tables[load.table]
        raw = raw_type(table.spec.dtype)
        if self._reads_neighbours(load):
            return self._widen(self._load_neighbours(load, table, raw), table.spec.dtype)
        uniform, varying = self.entry_offset(load, table)
        if varying is None:
            return self._widen(e.load(e.at(table.pointer, uniform), raw), table.spec.dtype)
        return self._widen(self._gather(table, raw, uniform, varying), table.spec.dtype)

    def _gather(self, table: TableView, raw: Any, uniform: Value, varying: Value) -> Value:
        e = self.e
        row = ir.Constant(ir.VectorType(raw, e.lanes), ir.Undefined)
        for lane in range(e.lanes):
            # The lane's own offset comes first, so that LLVM moves it out of the loop over keys.
            start = e.at(table.pointer, e.extract(varying, lane))
            row = e.insert(row, e.load(e.at(start, uniform), raw), lane)
        return row

    def _reads_neighbours(self, load: Load) -> bool:
        """Whether the lanes read entries of keys side by side, of one row of the table."""
        return (
            self.neighbours is not None
            and load.indices[-1:] == (_KEY,)
            and not any(is_vector(self.value(index)) for index in load.indices[:-1])
        )

    def _load_neighbours(self, load: Load, table: TableView, raw: Any) -> Value:
        """One load if the entries are neighbours in memory too, else a load for each lane."""
        e, neighbours = self.e, self.neighbours
        assert neighbours is not None
        item = e.index(item_bytes(table.spec.dtype))
        *others, _ = zip(load.indices, table.sizes, table.strides, strict=True)
        row = e.add(0, *[e.mul(self._index(index, size), by) for index, size, by in others])
        start = e.at(table.pointer, e.add(row, e.mul(neighbours.first, item)))
        side_by_side = e.builder.icmp_signed("==", table.strides[-1], item)
        return e.either(
            e.builder.and_(side_by_side, neighbours.all_exist),
            lambda: e.load(start, ir.VectorType(raw, e.lanes)),
            lambda: self._gather(table, raw, *self.entry_offset(load, table)),
        )

    def _clamp_index(self, index: Value, size: Value) -> Value:
        """The index, clamped: bounds are proved in float64, `floor` of float32 may exceed them."""
        b = self.e.builder
        index, last = self._to_same_shape(index, b.sub(size, ir.Constant(INT64, 1)))
        zero = ir.Constant(index.type, None)
        index = b.select(b.icmp_signed("<", index, zero), zero, index)
        return b.select(b.icmp_signed(">", index, last), last, index)

    def _widen(self, raw: Value, dtype: str) -> Value:
        """A stored element as a real, as an integer of this width, or as a bit."""
        e, b = self.e, self.e.builder
        if dtype == "bool":
            return b.icmp_unsigned("!=", raw, ir.Constant(raw.type, None))
        if dtype == "float64" and e.real == FLOAT:
            return b.fptrunc(self._clamp_to_float32(raw), e.vector if is_vector(raw) else FLOAT)
        if dtype not in INTEGER_TYPES:
            return storage.widen(e, raw, dtype)
        bits, signed = INTEGER_TYPES[dtype]
        width = self.int_bits if is_vector(raw) else 64
        if bits == width:
            return raw
        wanted: Any = ir.IntType(width)
        if is_vector(raw):
            wanted = ir.VectorType(wanted, e.lanes)
        if bits > width:
            return b.trunc(raw, wanted)
        return b.sext(raw, wanted) if signed else b.zext(raw, wanted)

    def _clamp_to_float32(self, raw: Value) -> Value:
        """Clamp to the range of float32, so that a large finite bias does not become -inf."""
        b = self.e.builder

        def constant(number: float) -> Value:
            return ir.Constant(raw.type, [number] * self.e.lanes if is_vector(raw) else number)

        largest = float(np.finfo(np.float32).max)
        for sign, limit in (("<", -largest), (">", largest)):
            infinite = b.fcmp_ordered("==", raw, constant(limit * np.inf))
            beyond = b.and_(b.fcmp_ordered(sign, raw, constant(limit)), b.not_(infinite))
            raw = b.select(beyond, constant(limit), raw)
        return raw

    # Operations

    def _emit_operation(self, op: Op) -> Value:
        e, b = self.e, self.e.builder
        if (parts := _soft_cap_parts(op)) is not None:
            cap, score, ratio = (self._as_lanes(self._as_float(self.value(n))) for n in parts)
            return vector_math.soft_cap(e, cap, score, ratio)
        if (fused := self._emit_multiply_add(op)) is not None:
            return fused
        values = [self.value(arg) for arg in op.args]
        kinds = {arg.kind for arg in op.args}
        if "float" in kinds or (op.kind == "float" and op.name != "where"):
            values = [
                self._as_float(v) if arg.kind == "int" else v
                for v, arg in zip(values, op.args, strict=True)
            ]
        if op.name in _FUNCTIONS:
            return _FUNCTIONS[op.name](e, self._as_lanes(values[0]))
        if op.name == "floor":
            return self._emit_floor(values[0])
        values = self._to_same_shape(*values)
        if op.name in _COMPARISONS:
            sign = _COMPARISONS[op.name]
            if "float" not in kinds:
                return b.icmp_signed(sign, *values)
            compare = b.fcmp_unordered if op.name == "ne" else b.fcmp_ordered
            return compare(sign, *values)
        match op.name:
            case "where":
                return b.select(*values)
            case "and":
                return b.and_(*values)
            case "or":
                return b.or_(*values)
            case "not":
                return b.not_(*values)
        if "float" in kinds or op.kind == "float":
            return self._emit_float_operation(op.name, values)
        return self._emit_int_operation(op.name, values)

    def _emit_multiply_add(self, op: Op) -> Value | None:
        """A sum or difference one of whose terms is a product, as one fused multiply-add.

        Where the product and the other term cancel, as with the bias of ALiBi, the rounding error
        of the product alone would be most of the result.
        """
        if op.name not in ("add", "sub") or op.kind != "float":
            return None
        e, b = self.e, self.e.builder
        for place, (product, other) in enumerate((op.args, op.args[::-1])):
            if not isinstance(product, Op) or product.name != "mul" or product.kind != "float":
                continue
            if product in self.known or _soft_cap_parts(product) is not None:
                continue
            terms = (*product.args, other)
            x, y, term = (self._as_lanes(self._as_float(self.value(n))) for n in terms)
            if op.name == "sub":
                x, term = (b.fneg(x), term) if place else (x, b.fneg(term))
            return e.fma(x, y, term)
        return None

    def _emit_float_operation(self, name: str, values: list[Value]) -> Value:
        b = self.e.builder
        match name:
            case "add":
                return b.fadd(*values)
            case "sub":
                return b.fsub(*values)
            case "mul":
                return b.fmul(*values)
            case "div":
                return b.fdiv(*values)
            case "neg":
                return b.fneg(*values)
            case "abs":
                return self.e.intrinsic("fabs", *values)
        # If either argument is NaN, the result is NaN.
        first, second = values
        better = b.fcmp_unordered("<" if name == "min" else ">", first, second)
        second_is_nan = self.e.is_nan(second)
        return b.select(second_is_nan, second, b.select(better, first, second))

    def _emit_int_operation(self, name: str, values: list[Value]) -> Value:
        b = self.e.builder
        zero = ir.Constant(values[0].type, None)
        match name:
            case "add":
                return b.add(*values)
            case "sub":
                return b.sub(*values)
            case "mul":
                return b.mul(*values)
            case "neg":
                return b.sub(zero, values[0])
            case "abs":
                negative = b.icmp_signed("<", values[0], zero)
                return b.select(negative, b.sub(zero, values[0]), values[0])
            case "min" | "max":
                better = b.icmp_signed("<" if name == "min" else ">", *values)
                return b.select(better, *values)
        # These truncate. NumPy rounds down, which differs where the remainder is negative, because
        # a divisor is at least 1.
        remainder = b.srem(*values)
        negative = b.icmp_signed("<", remainder, zero)
        if name == "mod":
            return b.select(negative, b.add(remainder, values[1]), remainder)
        one = ir.Constant(remainder.type, [1] * self.e.lanes if is_vector(remainder) else 1)
        quotient = b.sdiv(*values)
        return b.select(negative, b.sub(quotient, one), quotient)

    def _emit_floor(self, x: Value) -> Value:
        """Rounded down to an integer: 0 for NaN, clamped to the range of integer lanes."""
        e, b = self.e, self.e.builder
        lanes = self._as_lanes(x)
        # The largest magnitude that both float32 and these integers can hold.
        limit = e.const(2.0**62 if self.int_bits == 64 else 2.0**31 - 128)
        low = b.fneg(limit)
        lanes = e.intrinsic("floor", lanes)
        lanes = b.select(e.is_nan(lanes), e.const(0.0), lanes)
        lanes = b.select(b.fcmp_ordered("<", lanes, low), low, lanes)
        lanes = b.select(b.fcmp_ordered(">", lanes, limit), limit, lanes)
        return b.fptosi(lanes, ir.VectorType(ir.IntType(self.int_bits), e.lanes))


def _soft_cap_parts(op: Op) -> tuple[Node, Node, Node] | None:
    """cap, x and x / cap of `cap * tanh(x / cap)`, which rounds less as a single function."""
    if op.name != "mul":
        return None
    for cap, other in (op.args, op.args[::-1]):
        if isinstance(other, Op) and other.name == "tanh":
            (ratio,) = other.args
            if isinstance(ratio, Op) and ratio.name == "div" and ratio.args[1] == cap:
                return cap, ratio.args[0], ratio
    return None


_COMPARISONS = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_FUNCTIONS: Mapping[str, Callable[[Emitter, Value], Value]] = {
    "exp": vector_math.exp,
    "log": vector_math.log,
    "tanh": vector_math.tanh,
    "sqrt": lambda e, x: e.intrinsic("sqrt", x),
}
