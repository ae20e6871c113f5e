"""Pairs of bfloat16 numbers in the lanes of a vector, and rows of pairs in whole chunks.

Where `Emitter.emulated`, the instructions for bfloat16 (AVX512-BF16, FEAT_BF16 of Arm) are written
out as the manuals define them: they take subnormal numbers for zeros, and give zeros instead of
them, but for the conversion to bfloat16 of Arm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from qkv.backends.cpu.emit import storage, vector_math
from qkv.backends.cpu.emit.emitter import BIT, FLOAT, INT16, INT32, POINTER, Emitter, Value
from qkv.backends.cpu.products.layout import CHUNK


class _BFloatType(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types.
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloatType)

    def __hash__(self) -> int:
        return hash(_BFloatType)


_BFLOATS = ir.VectorType(_BFloatType(), 8)
_FLOATS = ir.VectorType(FLOAT, 4)

HALVES = ir.VectorType(INT16, CHUNK)
"""A chunk as the bits of its elements."""


def emit_round_to_chunks(e: Emitter, dim: Value) -> Value:
    """`round_to_chunks` of a value at run time."""
    return e.round_down(e.add(dim, CHUNK - 1), CHUNK)


def present_elements(e: Emitter, count: Value) -> Value:
    """A mask of the elements that a vector of pairs has if `count` are left, its first ones."""
    b, size = e.builder, 2 * e.lanes
    halves = ir.VectorType(INT16, size)
    left = b.trunc(e.least(count, size), INT16)
    empty = ir.Constant(halves, ir.Undefined)
    first = b.insert_element(empty, left, ir.Constant(INT32, 0))
    numbers = ir.Constant(halves, list(range(size)))
    counts = b.shuffle_vector(first, empty, e.shuffle_mask([0] * size))
    return b.icmp_signed("<", numbers, counts)


def load_chunk(e: Emitter, place: Value, present: Value) -> Value:
    """A pair of elements in each lane; elements that are not `present` are not read, but 0."""
    halves = ir.VectorType(INT16, 2 * e.lanes)
    has_masked_loads = e.pairs_by == "vdpbf16ps" and halves.count == CHUNK
    if has_masked_loads or e.emulated:
        return e.builder.bitcast(e.load_where(present, place, halves, 2), e.vector)
    marks = e.builder.bitcast(present, ir.IntType(halves.count))
    return e.builder.call(_load_chunk_function(e, halves), [place, marks])


def _load_chunk_function(e: Emitter, halves: Any) -> Value:
    """A function `(place, marks)` that does the same with the mask in a word.

    Without instructions for masked loads, LLVM writes a branch for each element. So they stand
    in one function, and whole chunks are loaded before them.
    """
    name = "load_chunk"
    if (known := e.module.globals.get(name)) is not None:
        return known
    word = ir.IntType(halves.count)
    with e.function(name, [POINTER, word], e.vector) as (function, (place, marks)):
        b = e.builder
        with b.if_then(b.icmp_signed("==", marks, ir.Constant(word, -1)), likely=True):
            b.ret(e.load(place, e.vector, 2))
        present = b.bitcast(marks, ir.VectorType(BIT, halves.count))
        b.ret(b.bitcast(e.load_where(present, place, halves, 2), e.vector))
    return function


def multiply_add_pairs(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """total + x . y, for a pair of bfloat16 in each lane.

    VDPBF16PS adds the product of the second elements first, each by a multiply-add that rounds once
    (Intel, "Architectures Software Developer's Manual", volume 2, 2024). BFDOT adds both products,
    which are exact, then the total, and rounds either sum to odd: a sum that is not exact becomes
    the neighbour whose last bit is 1 (Arm, "Architecture Reference Manual", BFDotAdd, without
    FEAT_EBF16).
    """
    if e.emulated:
        return e.builder.call(_emulated_multiply_add_pairs(e), [x, y, total])
    if e.pairs_by == "bfdot":
        return _by_quarters(e, _bfdot, x, y, total)
    pairs = (e.as_bits(x), e.as_bits(y))
    return e.machine_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", e.vector, total, *pairs)


def multiply_add_quads(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """total + X Y^T for every four lanes: X and Y are two rows of two pairs, the total is 2 x 2.

    BFMMLA does what BFDOT does with the first pair of each row, and then with the second one (Arm,
    "Architecture Reference Manual", BFMatMulAdd).
    """
    if e.emulated:
        for pair in range(2):
            rows, columns = (
                e.shuffle_mask([i + 2 * n + pair for i in range(0, e.lanes, 4) for n in picks])
                for picks in ((0, 0, 1, 1), (0, 1, 0, 1))
            )
            first = e.builder.shuffle_vector(x, x, rows)
            second = e.builder.shuffle_vector(y, y, columns)
            total = multiply_add_pairs(e, first, second, total)
        return total
    return _by_quarters(e, _bfmmla, x, y, total)


def _by_quarters(e: Emitter, compute: Callable[..., Value], *vectors: Value) -> Value:
    """What `compute` makes of four neighbouring lanes at a time, side by side."""
    parts = [
        compute(e, *(e.lanes_from(vector, i, 4) for vector in vectors))
        for i in range(0, e.lanes, 4)
    ]
    while len(parts) > 1:
        picks = e.shuffle_mask(range(2 * parts[0].type.count))
        parts = [
            e.builder.shuffle_vector(*pair, picks)
            for pair in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _bfdot(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    pairs = (e.builder.bitcast(pair, _BFLOATS) for pair in (x, y))
    return e.machine_intrinsic("llvm.aarch64.neon.bfdot.v4f32.v8bf16", _FLOATS, total, *pairs)


def _bfmmla(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    rows = (e.builder.bitcast(each, _BFLOATS) for each in (x, y))
    return e.machine_intrinsic("llvm.aarch64.neon.bfmmla", _FLOATS, total, *rows)


def join_pairs(e: Emitter, first: Value, second: Value) -> Value:
    """Two vectors of float32 as pairs, rounded to nearest; NaN and the sign of zeros stay."""
    b, both = e.builder, round_to_bfloat16(e, e.as_bits(first), e.as_bits(second))
    order = [half * e.lanes + lane for lane in range(e.lanes) for half in range(2)]
    return b.bitcast(b.shuffle_vector(both, both, e.shuffle_mask(order)), e.vector)


def round_both(e: Emitter, first: Value, second: Value) -> Value:
    """Two vectors of float32 rounded to bfloat16, one behind the other, as one vector of bits."""
    both = round_to_bfloat16(e, e.as_bits(first), e.as_bits(second))
    return e.builder.bitcast(both, e.vector)


def round_to_bfloat16(e: Emitter, first: Value, second: Value) -> Value:
    """Two vectors of float32 as one of bfloat16, rounded to nearest, the first one in front."""
    if e.emulated:
        return e.builder.call(_emulated_round_to_bfloat16(e), [first, second])
    if e.pairs_by == "bfdot":
        b, bfloats = e.builder, ir.VectorType(_BFloatType(), e.lanes)
        parts = [
            b.bitcast(b.fptrunc(e.as_floats(x), bfloats), ir.VectorType(INT16, e.lanes))
            for x in (first, second)
        ]
        return b.shuffle_vector(*parts, e.shuffle_mask(range(CHUNK)))
    floats = e.as_floats(second), e.as_floats(first)
    return e.machine_intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", HALVES, *floats)


def zip_chunks(e: Emitter, first: Value, second: Value) -> list[Value]:
    """Elements of two chunks in pairs, those of the first half in one vector."""
    b, halves = e.builder, [e.builder.bitcast(x, HALVES) for x in (first, second)]
    orders = [[n + i * CHUNK for n in range(start, start + e.lanes) for i in range(2)]
              for start in (0, e.lanes)]  # fmt: skip
    return [
        b.bitcast(b.shuffle_vector(*halves, e.shuffle_mask(order)), e.vector) for order in orders
    ]


def split_pairs(e: Emitter, pairs: Value) -> tuple[Value, Value]:
    """The first and the second element of every pair, as float32."""
    b, bits = e.builder, e.as_bits(pairs)
    first, second = b.shl(bits, e.const_bits(16)), b.and_(bits, e.const_bits(-(2**16)))
    return e.as_floats(first), e.as_floats(second)


# The instructions written out. They are functions, as copies of them would take long to compile.


def _emulated_multiply_add_pairs(e: Emitter) -> Value:
    name = "multiply_add_pairs"
    if (known := e.module.globals.get(name)) is not None:
        return known
    with e.function(name, [e.vector] * 3, e.vector) as (function, (x, y, total)):
        if e.pairs_by == "bfdot":
            products = (
                flushed(e, e.builder.fmul(flushed(e, first), flushed(e, second)))
                for first, second in zip(split_pairs(e, x), split_pairs(e, y), strict=True)
            )
            e.builder.ret(_add_to_odd(e, flushed(e, total), _add_to_odd(e, *products)))
            return function
        total = flushed(e, total)
        for first, second in reversed(list(zip(split_pairs(e, x), split_pairs(e, y), strict=True))):
            total = multiply_add(e, flushed(e, first), flushed(e, second), total)
        e.builder.ret(total)
    return function


def _add_to_odd(e: Emitter, x: Value, y: Value) -> Value:
    """x + y of float32, rounded to odd; a subnormal result becomes 0.

    Rounded to nearest, a sum with an even last bit lies beside the odd one, on the side of what
    was lost. Sums that would be rounded to infinity are halved meanwhile.
    """
    b, zero = e.builder, e.const(0.0)
    nearest = b.fadd(x, y)
    is_number = b.fcmp_ordered("ord", b.fmul(x, zero), b.fmul(y, zero))
    is_halved = b.and_(is_number, b.fcmp_unordered("uno", nearest, b.fmul(nearest, zero)))
    x, y = (b.select(is_halved, b.fmul(part, e.const(0.5)), part) for part in (x, y))
    total = b.fadd(x, y)
    lost, bits = vector_math.error_of_sum(e, x, y, total), e.as_bits(total)
    is_even = b.icmp_signed("==", b.and_(bits, e.const_bits(1)), e.const_bits(0))
    changes = b.and_(b.and_(is_number, b.fcmp_unordered("!=", lost, zero)), is_even)
    grows = b.icmp_signed(">=", b.xor(e.as_bits(lost), bits), e.const_bits(0))
    beside = b.add(bits, b.select(grows, e.const_bits(1), e.const_bits(-1)))
    odd = e.as_floats(b.select(changes, beside, bits))
    return flushed(e, b.select(is_halved, b.fmul(odd, e.const(2.0)), odd))


def _emulated_round_to_bfloat16(e: Emitter) -> Value:
    name = "round_to_bfloat16"
    if (known := e.module.globals.get(name)) is not None:
        return known
    with e.function(name, [e.bits] * 2, HALVES) as (function, parts):
        floats = [e.as_floats(x) for x in parts]
        if e.pairs_by == "vdpbf16ps":
            floats = [flushed(e, x) for x in floats]
        rounded = [storage.narrow(e, x, "bfloat16") for x in floats]
        e.builder.ret(e.builder.shuffle_vector(*rounded, e.shuffle_mask(range(CHUNK))))
    return function


def multiply_add(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """total + x * y of float32 in each lane, rounded once; a subnormal result becomes 0."""
    return flushed(e, e.intrinsic("fma", x, y, total))


def flushed(e: Emitter, x: Value) -> Value:
    """float32 with subnormal numbers replaced by zeros of their sign."""
    b, bits = e.builder, e.as_bits(x)
    exponent = b.and_(bits, e.const_bits(0x7F800000))
    is_small = b.icmp_signed("==", exponent, e.const_bits(0))
    return e.as_floats(b.select(is_small, b.and_(bits, e.const_bits(-(2**31))), bits))
