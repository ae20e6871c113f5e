"""Memory and vectors of lanes, in structured code.

A *vector* has one real number for each lane: float32, or float64 where that is the type of
computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from qkv.backends.cpu.emit.structured_code import (
    BYTE,
    CACHE_LINE,
    INT64,
    POINTER,
    VOID,
    StructuredCode,
    Value,
)

__all__ = [
    "BIT", "BYTE", "CACHE_LINE", "DOUBLE", "FLOAT", "HALF", "INT16", "INT32", "INT64", "POINTER",
    "VOID", "Emitter", "Value", "is_vector",
]  # fmt: skip

BIT = ir.IntType(1)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
HALF = ir.HalfType()
FLOAT = ir.FloatType()
DOUBLE = ir.DoubleType()


def is_vector(value: Value) -> bool:
    return isinstance(value.type, ir.VectorType)


def _short_name(type_: Any) -> str:
    """What names of intrinsics call a vector, such as v16f32."""
    element = str(type_.element).replace("float", "f32").replace("double", "f64")
    return f"v{type_.count}{element.replace('half', 'f16')}"


class _SameLanes(ir.Constant):  # type: ignore[misc]  # llvmlite has no types.
    """A vector with one number in every lane, in a form that LLVM reads quicker than all lanes."""

    def __init__(self, kind: Any, number: float) -> None:
        super().__init__(kind, None)
        self._text = f"splat ({ir.Constant(kind.element, number)})"

    def get_reference(self) -> str:
        return self._text


class Emitter(StructuredCode):
    """Writes one module for vectors of `lanes` real numbers, FLOAT or DOUBLE.

    `halves` says whether the machine converts float16 by itself, `fused` whether it multiplies and
    adds in one instruction, `emulated` whether instructions for bfloat16 are written out as code
    that every machine runs, and `pairs_by` which one multiplies pairs of them.
    """

    def __init__(
        self,
        name: str,
        lanes: int,
        real: Any = FLOAT,
        *,
        halves: bool = False,
        fused: bool = True,
        emulated: bool = False,
        pairs_by: str = "vdpbf16ps",
    ) -> None:
        super().__init__(name)
        self.lanes = lanes
        self.real = real
        self.halves = halves
        self.fused = fused
        self.emulated = emulated
        self.pairs_by = pairs_by
        self.real_bytes = 4 if real == FLOAT else 8
        self.real_bits = ir.IntType(8 * self.real_bytes)
        self.vector = ir.VectorType(real, lanes)
        self.bits = ir.VectorType(self.real_bits, lanes)
        self.vector_bytes = self.real_bytes * lanes
        self._constants: dict[str, Value] = {}

    # Memory

    def load(self, pointer: Value, type_: Any, align: int = 1) -> Value:
        return self.builder.load(pointer, align=align, typ=type_)

    def store(self, value: Value, pointer: Value, align: int) -> None:
        self.builder.store(value, pointer, align=align)

    def load_where(self, live: Value, pointer: Value, type_: Any, align: int) -> Value:
        """A vector of which only the lanes in `live` are read; the others are 0."""
        zeros = ir.Constant(type_, None)
        name = f"llvm.masked.load.{_short_name(type_)}.p0"
        return self.machine_intrinsic(name, type_, pointer, ir.Constant(INT32, align), live, zeros)

    def store_where(self, live: Value, value: Value, pointer: Value, align: int) -> None:
        """Write only the lanes in `live`."""
        name = f"llvm.masked.store.{_short_name(value.type)}.p0"
        self.machine_intrinsic(name, VOID, value, pointer, ir.Constant(INT32, align), live)

    def first_lanes(self, count: Value) -> Value:
        """A mask whose first `count` lanes are set, for a count below 2^31."""
        number = self.splat(self.builder.trunc(count, INT32))
        return self.builder.icmp_signed("<", self.lane_numbers(INT32), number)

    def prefetch(self, pointer: Value, *, soon: bool = True) -> None:
        """Prefetch the cache line of an address, which may be invalid, for a read soon or later."""
        read, locality, data_cache = (ir.Constant(INT32, n) for n in (0, 3 if soon else 2, 1))
        self.machine_intrinsic("llvm.prefetch.p0", VOID, pointer, read, locality, data_cache)

    def load_vector(self, pointer: Value, *, aligned: bool = True) -> Value:
        return self.load(pointer, self.vector, self.vector_bytes if aligned else self.real_bytes)

    def store_vector(self, value: Value, pointer: Value, *, aligned: bool = True) -> None:
        self.store(value, pointer, self.vector_bytes if aligned else self.real_bytes)

    def scale_vector(self, pointer: Value, factor: Value) -> None:
        """Multiply the vector at an address."""
        self.store_vector(self.builder.fmul(self.load_vector(pointer), factor), pointer)

    def clear(self, pointer: Value, start: Any, stop: Value) -> None:
        """Write 0 from byte `start` to byte `stop`, whole vectors."""
        zero = self.const(0.0)
        self.loop(
            start, stop, self.vector_bytes, [],
            lambda i, _: self.store_vector(zero, self.at(pointer, i), aligned=False),
        )  # fmt: skip

    def stack_words(self, count: int = 1) -> Value:
        """Memory for 64-bit words, which lasts as long as the function runs."""
        return self._stack(INT64, count, 8)

    def stack_vectors(self, count: int) -> Value:
        """Memory for vectors, which lasts as long as the function runs."""
        return self._stack(self.vector, count, self.vector_bytes)

    def _stack(self, kind: Any, count: int, align: int) -> Value:
        with self.builder.goto_entry_block():
            place = self.builder.alloca(kind, count)
        place.align = align
        place.type = POINTER  # llvmlite would let nothing but this kind be stored there.
        return place

    # Vectors

    def const(self, value: float) -> Value:
        return _SameLanes(self.vector, float(value))

    def const_bits(self, value: int) -> Value:
        return _SameLanes(self.bits, value)

    def _constant(self, kind: Any, lanes: Sequence[float]) -> Value:
        """A constant, made once: writing out constants as text takes a third of all emission."""
        name = f"{kind} {lanes}"  # As numbers, 0.0 and -0.0 are equal.
        if name not in self._constants:
            self._constants[name] = ir.Constant(kind, lanes)
        return self._constants[name]

    def zeros_address(self) -> Value:
        """The address of zero bytes, as many as a vector has."""
        kind = ir.ArrayType(BYTE, self.vector_bytes)
        return self.constant_in_memory("zeros", ir.Constant(kind, None)).bitcast(POINTER)

    def constant_in_memory(self, name: str, content: Value) -> Value:
        """A constant that the module holds once, under this name."""
        held = self.module.globals.get(name)
        if held is None:
            held = ir.GlobalVariable(self.module, content.type, name)
            held.linkage, held.global_constant, held.initializer = "internal", True, content
        return held

    def splat(self, scalar: Value) -> Value:
        """The scalar in every lane."""
        type_ = ir.VectorType(scalar.type, self.lanes)
        empty = ir.Constant(type_, ir.Undefined)
        first = self.builder.insert_element(empty, scalar, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(first, empty, self.shuffle_mask([0] * self.lanes))

    def shuffle_mask(self, lanes: Sequence[int]) -> Value:
        """The constant by which a shuffle takes these lanes of its two vectors."""
        return self._constant(ir.VectorType(INT32, len(lanes)), list(lanes))

    def lane_numbers(self, type_: Any) -> Value:
        return ir.Constant(ir.VectorType(type_, self.lanes), list(range(self.lanes)))

    def extract(self, vector: Value, lane: int) -> Value:
        return self.builder.extract_element(vector, ir.Constant(INT32, lane))

    def insert(self, vector: Value, scalar: Value, lane: int) -> Value:
        return self.builder.insert_element(vector, scalar, ir.Constant(INT32, lane))

    def intrinsic(self, name: str, *args: Value) -> Value:
        """An intrinsic whose result is of the type of its arguments, such as `fma` or `sqrt`."""
        type_ = args[0].type
        element = type_.element if isinstance(type_, ir.VectorType) else type_
        count = f"v{type_.count}" if isinstance(type_, ir.VectorType) else ""
        full = f"llvm.{name}.{count}{'f32' if element == FLOAT else 'f64'}"
        return self.machine_intrinsic(full, type_, *args)

    def machine_intrinsic(self, name: str, result: Any, *args: Value) -> Value:
        """An instruction that only some machines have, by the name of its intrinsic."""
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [arg.type for arg in args])
            function = ir.Function(self.module, kind, name)
        return self.builder.call(function, args)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once where the machine does so."""
        if not self.fused:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        return self.intrinsic("fma", a, b, c)

    def as_bits(self, vector: Value) -> Value:
        return self.builder.bitcast(vector, self.bits)

    def as_floats(self, bits: Value) -> Value:
        return self.builder.bitcast(bits, self.vector)

    def settled(self, x: Value) -> Value:
        """The vector x, computed before anything that is written after it.

        Otherwise LLVM may move the sums of a long stretch of code to its end, and keep in memory
        until then what is to be added. Where kernels are emulated, this does nothing.
        """
        if self.emulated:
            return x
        kind = ir.FunctionType(x.type, [x.type])
        return self.builder.asm(kind, "", "=v,0", [x], side_effect=True)

    def is_nan(self, x: Value) -> Value:
        return self.builder.fcmp_unordered("uno", x, x)

    def any_lane(self, condition: Value) -> Value:
        """Whether a condition holds in any lane."""
        lanes = ir.IntType(self.lanes)
        bits = self.builder.bitcast(condition, lanes)
        return self.builder.icmp_unsigned("!=", bits, ir.Constant(lanes, 0))

    def greatest(self, a: Value, b: Value) -> Value:
        """Lane-wise `b if b > a else a`, which ignores a NaN in b."""
        return self.builder.select(self.builder.fcmp_ordered(">", b, a), b, a)

    def lanes_from(self, vector: Value, first: int, count: int) -> Value:
        """Some neighbouring lanes as a shorter vector."""
        picks = self.shuffle_mask(range(first, first + count))
        return self.builder.shuffle_vector(vector, vector, picks)

    def reduce(self, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
        """`join` over all lanes, the result in every lane; neighbours are joined first."""
        shift = 1
        while shift < self.lanes:
            picks = self.shuffle_mask([i ^ shift for i in range(self.lanes)])
            vector = join(vector, self.builder.shuffle_vector(vector, vector, picks))
            shift *= 2
        return vector

    def sum_each(self, vectors: Sequence[Value]) -> Value:
        """The sums of as many vectors as there are lanes: lane i is the sum of vector i.

        Neighbouring lanes are added first. Each step adds the even parts of two vectors to their
        odd parts. A part is first a lane and then 16 bytes, because processors have instructions
        that select either.
        """
        vectors_left = list(vectors)
        item = 8 if vectors[0].type.element == DOUBLE else 4
        near_lanes = min(self.lanes, 16 // item)
        while len(vectors_left) > 1:
            is_lane = self.lanes // len(vectors_left) < near_lanes
            part, span = (1, near_lanes) if is_lane else (near_lanes, self.lanes)
            even, odd = (
                [
                    vector + start + i
                    for near in range(0, self.lanes, span)
                    for vector in (near, self.lanes + near)
                    for start in range(first, span, 2 * part)
                    for i in range(part)
                ]
                for first in (0, part)
            )
            pairs = []
            for pair in zip(vectors_left[::2], vectors_left[1::2], strict=True):
                halves = (
                    self.builder.shuffle_vector(*pair, self.shuffle_mask(p)) for p in (even, odd)
                )
                pairs.append(self.builder.fadd(*halves))
            vectors_left = pairs
        return vectors_left[0]

    def transpose(self, rows: list[Value]) -> list[Value]:
        """`lanes` vectors transposed: element j of row i becomes element i of row j."""
        half = 1
        while half < self.lanes:
            transposed: list[Value] = [None] * self.lanes
            for i in range(self.lanes):
                if i & half:
                    continue
                upper, lower = rows[i], rows[i + half]
                for row, shift in ((i, 0), (i + half, half)):
                    picks = [
                        self.lanes + j - half + shift if j & half else j + shift
                        for j in range(self.lanes)
                    ]
                    transposed[row] = self.builder.shuffle_vector(
                        upper, lower, self.shuffle_mask(picks)
                    )
            rows, half = transposed, 2 * half
        return rows
