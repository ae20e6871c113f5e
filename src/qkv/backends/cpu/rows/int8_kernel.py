"""The kernel that rounds rows to int8; `int8` has the formula.

It computes in float64 for rows of float64, and in float32 for all others.
"""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import (
    BYTE,
    DOUBLE,
    FLOAT,
    INT64,
    POINTER,
    Emitter,
    Value,
    is_vector,
)
from qkv.backends.cpu.rows.head_job import emit_head_job
from qkv.backends.cpu.rows.layout import INT8_FIELDS, INT8_ROW_FIELDS, Int8Key

_MOST = 127.0
"""The largest int8 that is used; its negative is the least."""


def emit_int8_rows(key: Int8Key) -> str:
    """The module of one kernel; each task of `job(arguments, worker)` rounds rows of one head."""
    real = DOUBLE if key.dtype == "float64" else FLOAT
    e = Emitter("int8_rows", key.lanes, real, halves=key.halves, fused=False)
    plain, less_offset = (_RowFunction(e, key.dtype, has).emit() for has in (False, True))

    def round_head(number: Value, words: dict[str, Value]) -> None:
        b = e.builder
        is_first = e.below(number, words["first_count"])
        fields = {n: b.select(is_first, words[f"{n}_0"], words[f"{n}_1"]) for n in INT8_ROW_FIELDS}
        number = e.sub(number, b.select(is_first, e.index(0), words["first_count"]))
        batch, head = b.sdiv(number, fields["heads"]), b.srem(number, fields["heads"])
        start = e.load(e.at(e.pointer(fields["batches"]), e.mul(batch, WORD)), INT64, WORD)
        source = e.at(e.pointer(fields["rows"]), start, e.mul(head, fields["head_stride"]))
        first = e.mul(number, fields["length"])
        values = e.at(e.pointer(fields["values"]), e.mul(first, fields["dim"]))
        scales = e.at(e.pointer(fields["scales"]), e.mul(first, 4))
        offset = e.at(e.pointer(fields["offset"]), e.mul(head, fields["dim"], 4))

        def round_with(function: Value) -> None:
            def round_row(r: Value, _: list[Value]) -> None:
                e.builder.call(
                    function,
                    [
                        e.at(source, e.mul(r, fields["row_stride"])),
                        e.at(values, e.mul(r, fields["dim"])),
                        e.at(scales, e.mul(r, 4)),
                        offset,
                        fields["element_stride"],
                        fields["dim"],
                    ],
                )

            e.loop(0, fields["length"], 1, [], round_row)

        has_offset = b.icmp_signed("!=", fields["offset"], e.index(0))
        e.choose(has_offset, lambda: round_with(less_offset), lambda: round_with(plain))

    emit_head_job(e, INT8_FIELDS, round_head)
    return str(e.module)


class _RowFunction:
    """A function that rounds one row: `(source, values, scale, offset, element, dim)`."""

    def __init__(self, e: Emitter, dtype: str, has_offset: bool) -> None:
        self.e, self.dtype, self.has_offset = e, dtype, has_offset

    def emit(self) -> Value:
        e, item = self.e, storage.ITEM_BYTES[self.dtype]
        name = "row_less_offset" if self.has_offset else "row"
        with e.function(name, [*[POINTER] * 4, *[INT64] * 2]) as (function, args):
            self.source, self.values, scale, self.offset, self.element, self.dim = args
            b = e.builder
            # The last vector begins earlier where dim is not a multiple of its lanes.
            is_adjacent = b.icmp_signed("==", self.element, e.index(item))
            enough = b.icmp_signed(">=", self.dim, e.index(e.lanes))
            self.stop = b.select(b.and_(is_adjacent, enough), self.dim, e.index(0))
            peak = b.bitcast(self._peak_bits(), e.real)
            step = b.fdiv(peak, ir.Constant(e.real, _MOST))
            stored = step if e.real == FLOAT else b.fptrunc(step, FLOAT)
            e.store(stored, scale, 4)
            is_zero = b.fcmp_ordered("==", stored, ir.Constant(FLOAT, 0.0))
            divisor = b.select(is_zero, ir.Constant(FLOAT, 1.0), stored)
            self._round_by(divisor if e.real == FLOAT else b.fpext(divisor, DOUBLE))
        return function

    def _entries(self, d: Value, lanes: int) -> Value:
        """Entry d, or as many from there on as there are lanes, less the offset."""
        e = self.e
        step = storage.ITEM_BYTES[self.dtype] if lanes else self.element
        entries = storage.load(e, e.at(self.source, e.mul(d, step)), self.dtype, lanes)
        if not self.has_offset:
            return entries
        taken = storage.load(e, e.at(self.offset, e.mul(d, 4)), "float32", lanes)
        return e.builder.fsub(entries, taken)

    def _last(self, d: Value) -> Value:
        """Where the vector of entry d begins, so that it ends within the row."""
        return self.e.least(d, self.e.sub(self.stop, self.e.lanes))

    def _peak_bits(self) -> Value:
        """The bits of the largest absolute value; those of infinity and NaN are larger still."""
        e, b = self.e, self.e.builder

        def larger(x: Value, y: Value) -> Value:
            return b.select(b.icmp_signed(">", x, y), x, y)

        def with_vector(d: Value, carried: list[Value]) -> list[Value]:
            vector = self._entries(self._last(d), e.lanes)
            return [larger(carried[0], e.as_bits(e.intrinsic("fabs", vector)))]

        def with_entry(d: Value, carried: list[Value]) -> list[Value]:
            bits = b.bitcast(e.intrinsic("fabs", self._entries(d, 0)), e.real_bits)
            return [larger(carried[0], bits)]

        (bits,) = e.loop(0, self.stop, e.lanes, [e.const_bits(0)], with_vector)
        largest = e.extract(e.reduce(bits, larger), 0)
        (largest,) = e.loop(self.stop, self.dim, 1, [largest], with_entry)
        return largest

    def _round_by(self, divisor: Value) -> None:
        e = self.e
        divisors = e.splat(divisor)

        def round_vector(d: Value, _: list[Value]) -> None:
            start = self._last(d)
            self._store(e.builder.fdiv(self._entries(start, e.lanes), divisors), start)

        def round_entry(d: Value, _: list[Value]) -> None:
            self._store(e.builder.fdiv(self._entries(d, 0), divisor), d)

        e.loop(0, self.stop, e.lanes, [], round_vector)
        e.loop(self.stop, self.dim, 1, [], round_entry)

    def _store(self, quotient: Value, d: Value) -> None:
        """Round to nearest, ties to even; NaN is stored as 0, since its scale says that it is."""
        e, b = self.e, self.e.builder

        def const(number: float) -> Value:
            return e.const(number) if is_vector(quotient) else ir.Constant(e.real, number)

        def select(relation: str, bound: float, number: Value) -> Value:
            beyond = b.fcmp_ordered(relation, number, const(bound))
            return b.select(beyond, const(bound), number)

        inside = select("<", -_MOST, select(">", _MOST, quotient))
        inside = b.select(e.is_nan(inside), const(0.0), inside)
        # The last bits of the sum are those of the integer: the spacing of numbers there is 1.
        whole = b.fadd(inside, const(1.5 * 2.0 ** (23 if e.real == FLOAT else 52)))
        bits = e.as_bits(whole) if is_vector(whole) else b.bitcast(whole, e.real_bits)
        byte = ir.VectorType(BYTE, e.lanes) if is_vector(whole) else BYTE
        e.store(b.trunc(bits, byte), e.at(self.values, d), 1)
