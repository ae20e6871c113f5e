"""The forward kernel for bfloat16 on machines that multiply bfloat16.

It computes what `forward` says, in the same order, with two differences.

Both products add products of *pairs*, of neighbouring elements of Q and K in one, of neighbouring
keys in the other:

    S[k, q]  =  sum_p K[k, p] . Q[p, q]          p: two elements
    O[d, q] +=  sum_p V[d, p] . P[p, q]          p: two keys

The left factor has a row for each k or d, its pairs adjacent; the right factor is *packed*, a pair
of each query in a lane. Pairs of K are adjacent in memory; V is transposed, block by block of keys.
Weights are rounded to bfloat16 as they are packed; row sums are float32 sums of unrounded weights.

One task is several blocks of queries, so that they share transposed V. A run of blocks of keys says
for each block of queries whether it sees all of the keys, some or none.
"""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, FLOAT, INT16, INT32, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import RowView, rows_from
from qkv.backends.cpu.emit.transpose import transposed_bytes
from qkv.backends.cpu.forward.frame import STATS, ForwardFrame, ForwardKey
from qkv.backends.cpu.forward.kernel import ForwardKernel
from qkv.backends.cpu.forward.pair_kernel import emit_pair_kernel
from qkv.backends.cpu.forward.score_blocks import (
    Buffers,
    KeyBlock,
    PairOperands,
    QueryBlocks,
    ValueBlock,
)
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products import matrix_unit
from qkv.backends.cpu.products.bfloat16 import (
    CHUNK,
    emit_round_to_chunks,
    join_pairs,
    multiply_add_pairs,
    round_to_chunks,
    split_pairs,
)
from qkv.backends.cpu.products.query_lanes import SumOrder, dot_rows, store_vectors, vectors_at
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec

BLOCK_KV = 256
"""Number of keys whose scores are held at once; a multiple of `CHUNK`."""

_PARTIAL_BITS = int("01" * CHUNK, 2)
"""A run's word of kinds has two bits for each block of queries. These are the bits that mark blocks
as partial."""
_V_ROW = 2 * BLOCK_KV
"""Bytes of one row of transposed V."""


def bf16_dot_scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: a block of S, V, K and tables; Q, O and statistics of each block."""
    width = 4 * shape.block_q
    head_dim, v_head_dim = round_to_chunks(spec.head_dim), round_to_chunks(spec.v_head_dim)
    shared = BLOCK_KV * (width + 2 * (head_dim + 2 * v_head_dim))
    own = width * (head_dim // 2 + v_head_dim + STATS)
    transposed = transposed_bytes(spec, BLOCK_KV, 4 * shape.lanes)
    return -(-(shared + shape.q_blocks_per_task * own + transposed) // 4096) * 4096


def emit_bf16_dot(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    return emit_pair_kernel(Bf16Operands(ForwardFrame(key, block_kv=BLOCK_KV)))


class Bf16Operands(PairOperands):
    """Operands of bfloat16: K as it lies or copied, V transposed."""

    value_row = _V_ROW

    def __init__(self, frame: ForwardFrame) -> None:
        super().__init__(frame)
        self.halves = ir.VectorType(INT16, CHUNK)

    def row_functions(self) -> dict[str, Value]:
        functions = {"copy": self.copy_function(), "transpose_values": self.transpose_function()}
        functions["pack"] = self.pack_function(functions)
        if self.frame.mask != TRUE or not self.frame.plain:
            functions["sift"] = self.sift_function()
            functions["add_non_finite"] = self.add_non_finite_function()
        return functions

    def present_elements(self, count: Value) -> Value:
        """A mask of the elements that a chunk has if `count` are left, its first ones."""
        e, b = self.e, self.e.builder
        left = b.trunc(e.least(count, CHUNK), INT16)
        empty = ir.Constant(self.halves, ir.Undefined)
        first = b.insert_element(empty, left, ir.Constant(INT32, 0))
        numbers = ir.Constant(self.halves, list(range(CHUNK)))
        counts = b.shuffle_vector(first, empty, e.shuffle_mask([0] * CHUNK))
        return b.icmp_signed("<", numbers, counts)

    def load_chunk(self, place: Value, present: Value) -> Value:
        """32 elements as 16 pairs; elements that are not `present` are not read, but 0."""
        e, b = self.e, self.e.builder
        loaded = e.machine_intrinsic(
            "llvm.masked.load.v32i16.p0", self.halves,
            b.bitcast(place, self.halves.as_pointer()), ir.Constant(INT32, 2), present,
            ir.Constant(self.halves, None),
        )  # fmt: skip
        return b.bitcast(loaded, e.vector)

    def copy_function(self) -> Value:
        """A function `(from, row, element, count, dim, to)` that copies rows side by side.

        Rows, and elements of rows, are padded with 0 to whole chunks.
        """
        e = self.e
        with e.function("copy", [POINTER, *[INT64] * 4, POINTER]) as (function, args):
            source, row, element, count, dim, target = args
            b = e.builder
            width = e.mul(2, emit_round_to_chunks(e, dim))
            adjacent = b.icmp_signed("==", element, e.index(2))

            def copy_row(k: Value, _: list[Value]) -> None:
                start, end = e.at(source, e.mul(k, row)), e.at(target, e.mul(k, width))
                exists = e.below(k, count)

                def copy_chunk(d: Value, _: list[Value]) -> None:
                    place = b.select(exists, e.at(start, e.mul(d, 2)), e.zeros_address())
                    present = self.present_elements(b.select(adjacent, e.sub(dim, d), e.index(0)))
                    e.store_vector(self.load_chunk(place, present), e.at(end, e.mul(d, 2)))

                def copy_element(d: Value, _: list[Value]) -> None:
                    x = e.load(e.at(start, e.mul(d, element)), INT16, 2)
                    e.store(x, e.at(end, e.mul(d, 2)), 2)

                e.loop(0, dim, CHUNK, [], copy_chunk)
                scattered = b.and_(exists, b.not_(adjacent))
                e.loop(0, b.select(scattered, dim, e.index(0)), 1, [], copy_element)

            e.loop(0, emit_round_to_chunks(e, count), 1, [], copy_row)
        return function

    def pack_function(self, functions: dict[str, Value]) -> Value:
        """One vector of queries as pairs; lanes beyond the last row repeat it."""
        e = self.e
        arguments = [POINTER, POINTER, POINTER, POINTER, INT64]
        with e.function("pack", arguments) as (function, args):
            arguments_, query, packed, copy, first_row = args
            b = e.builder
            names = ("query_row", "query_element", "head_dim", "rows")
            row, element, head_dim, rows = (self.frame.field(arguments_, name) for name in names)
            last = e.least(e.lanes - 1, e.sub(e.sub(rows, first_row), 1))
            here = rows_from(e, RowView(query, row, element), first_row)
            start, row = self.rows_with_adjacent_elements(
                functions, here, e.add(last, 1), head_dim, copy
            )
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            negative = b.fcmp_ordered(
                "<", self.frame.real_field(arguments_, "sign"), ir.Constant(FLOAT, 0)
            )
            flip = e.splat(b.select(negative, *(ir.Constant(INT32, x) for x in (0x80008000, 0))))

            def pack_chunk(d: Value, _: list[Value]) -> None:
                present = self.present_elements(e.sub(head_dim, d))
                loaded = [self.load_chunk(e.at(place, e.mul(d, 2)), present) for place in places]
                start = e.at(packed, e.mul(d, self.width // 2))
                for p, pairs in enumerate(e.transpose(loaded)):
                    signed = e.as_floats(b.xor(e.as_bits(pairs), flip))
                    e.store_vector(signed, e.at(start, p * self.width))

            e.loop(0, head_dim, CHUNK, [], pack_chunk)
        return function

    def rows_with_adjacent_elements(
        self,
        functions: dict[str, Value],
        rows: RowView,
        count: Value,
        dim: Value,
        copy: Value,
        *,
        whole_chunks: bool = False,
    ) -> tuple[Value, Value]:
        """Rows with adjacent elements, as they lie or copied; copied too for `whole_chunks`."""
        e, b = self.e, self.e.builder
        here, row, element = rows
        is_copied = b.icmp_signed("!=", element, e.index(2))
        if whole_chunks:
            for size in (count, dim):
                has_rest = b.icmp_signed("!=", emit_round_to_chunks(e, size), size)
                is_copied = b.or_(is_copied, has_rest)
        with b.if_then(is_copied, likely=False):
            b.call(functions["copy"], [here, row, element, count, dim, copy])
        start = b.select(is_copied, copy, here)
        return start, b.select(is_copied, e.mul(2, emit_round_to_chunks(e, dim)), row)

    def transpose_function(self) -> Value:
        """A function `(rows, row, count, dim, to)`: V[keys, d] becomes [d, keys], whole chunks."""
        e = self.e
        arguments = [POINTER, *[INT64] * 3, POINTER]
        with e.function("transpose_values", arguments) as (function, args):
            rows, row, count, dim, target = args
            b = e.builder
            low, high = e.const_bits(0xFFFF), e.const_bits(-(2**16))
            sixteen = e.const_bits(16)

            def transpose_keys(k: Value, _: list[Value]) -> None:
                def transpose_chunk(d: Value, _: list[Value]) -> None:
                    present = self.present_elements(e.sub(dim, d))
                    start = e.at(rows, e.mul(d, 2))

                    def load_every_other(first: int) -> list[Value]:
                        """Pairs of elements of every other key from key `first` on, transposed."""
                        loaded = []
                        for i in range(first, CHUNK, 2):
                            key = e.add(k, i)
                            place = e.at(start, e.mul(key, row))
                            place = b.select(e.below(key, count), place, e.zeros_address())
                            loaded.append(self.load_chunk(place, present))
                        return [e.as_bits(vector) for vector in e.transpose(loaded)]

                    to = e.at(target, e.mul(d, _V_ROW), e.mul(k, 2))
                    evens, odds = load_every_other(0), load_every_other(1)
                    for p, (even, odd) in enumerate(zip(evens, odds, strict=True)):
                        below = b.or_(b.and_(even, low), b.shl(odd, sixteen))
                        above = b.or_(b.lshr(even, sixteen), b.and_(odd, high))
                        for half, pairs in enumerate((below, above)):
                            place = e.at(to, (2 * p + half) * _V_ROW)
                            e.store_vector(e.as_floats(pairs), place)

                e.loop(0, dim, CHUNK, [], transpose_chunk)

            e.loop(0, count, CHUNK, [], transpose_keys)
        return function

    def product_function(self, name: str, *, onto: bool) -> Value:
        """`matrix_unit.add_product`, or the same function by vectors where there are no tiles."""
        e = self.e
        if self.frame.shape.product == "tiles":
            return matrix_unit.add_product(e, name, self.vectors, onto=onto)
        with e.function(name, [*[POINTER] * 3, *[INT64] * 3]) as (function, args):
            rows, packed, out, row, count, pairs = args

            def store_products(i: Value, products: list[Value], _: list[Value]) -> list[Value]:
                place = e.at(out, e.mul(i, self.width))
                if onto:
                    held = [
                        e.load_vector(e.at(place, n * e.vector_bytes)) for n in range(len(products))
                    ]
                    products = list(map(e.builder.fadd, held, products))
                store_vectors(e, place, products)
                return []

            dot_rows(
                e, rows, row, count, packed, self.vectors, pairs, self.frame.shape.keys, [],
                store_products, SumOrder(multiply_add_pairs),
            )  # fmt: skip
        return function

    def place_of_pair(self, scores: Value, k: Value, width: Value) -> Value:
        e = self.e
        return e.at(scores, e.mul(e.builder.ashr(k, e.index(1)), width))

    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        self.e.store_vector(join_pairs(self.e, first, second), place)

    def clear_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        e = self.e
        nothing = [e.const(0.0)] * self.vectors
        e.loop(
            first, stop, 1, [],
            lambda p, _: store_vectors(e, e.at(weights, e.mul(p, self.width)), nothing),
        )  # fmt: skip

    def sift_function(self) -> Value:
        """A function `(values, v_head_dim, count)`: whether any value is not finite.

        Values that are not finite become 0.
        """
        e = self.e
        with e.function("sift", [POINTER, INT64, INT64], BIT) as (function, args):
            values, v_head_dim, count = args
            b = e.builder
            exponent = ir.Constant(self.halves, [0x7F80] * CHUNK)
            bits = ir.IntType(CHUNK)

            def sift_row(d: Value, found: list[Value]) -> list[Value]:
                def sift_chunk(k: Value, found: list[Value]) -> list[Value]:
                    place = e.at(values, e.mul(d, _V_ROW), e.mul(k, 2))
                    x = e.load(place, self.halves, e.vector_bytes)
                    is_not_finite = b.icmp_unsigned("==", b.and_(x, exponent), exponent)
                    zeros = ir.Constant(self.halves, None)
                    e.store(b.select(is_not_finite, zeros, x), place, e.vector_bytes)
                    return [b.or_(found[0], b.bitcast(is_not_finite, bits))]

                return e.loop(0, count, CHUNK, found, sift_chunk)

            (found,) = e.loop(0, v_head_dim, 1, [ir.Constant(bits, 0)], sift_row)
            b.ret(b.icmp_unsigned("!=", found, ir.Constant(bits, 0)))
        return function

    def add_non_finite_function(self) -> Value:
        """A function `(rows, row, weights, out, v_head_dim, count)` that adds what `sift` left out.

        A weight of -0.0 marks a forbidden pair, whose value is not added: 0 * inf would be NaN.
        """
        e = self.e
        arguments = [POINTER, INT64, POINTER, POINTER, INT64, INT64]
        with e.function("add_non_finite", arguments) as (function, args):
            rows, row, weights, out, v_head_dim, count = args
            b = e.builder
            forbidden = e.as_bits(e.const(-0.0))

            def add_key(k: Value, _: list[Value]) -> None:
                is_second = b.trunc(b.and_(k, e.index(1)), BIT)
                pairs = vectors_at(e, weights, self.vectors, b.ashr(k, e.index(1)))
                halves = [split_pairs(e, pair) for pair in pairs]
                weights_of_key = [b.select(is_second, second, first) for first, second in halves]

                def add_element(d: Value, _: list[Value]) -> None:
                    x = storage.load(e, e.at(rows, e.mul(k, row), e.mul(d, 2)), "bfloat16")
                    difference = b.fsub(x, x)
                    with b.if_then(e.is_nan(difference), likely=False):
                        place = e.at(out, e.mul(d, self.width))
                        total = vectors_at(e, place, self.vectors)
                        for j, (weight, old) in enumerate(zip(weights_of_key, total, strict=True)):
                            allowed = b.icmp_signed("!=", e.as_bits(weight), forbidden)
                            new = b.select(allowed, e.fma(e.splat(x), weight, old), old)
                            e.store_vector(new, e.at(place, j * e.vector_bytes))

                e.loop(0, v_head_dim, 1, [], add_element)

            e.loop(0, count, 1, [], add_key)
        return function

    def buffers(self, scratch: Value, head_dim: Value, v_head_dim: Value) -> Buffers:
        e = self.e
        values = e.at(scratch, BLOCK_KV * self.width)
        key_copy = e.at(values, e.mul(v_head_dim, _V_ROW))
        value_copy = e.at(key_copy, e.mul(head_dim, 2 * BLOCK_KV))
        blocks = e.at(value_copy, e.mul(v_head_dim, 2 * BLOCK_KV))
        return Buffers(scratch, values, key_copy, value_copy, blocks)

    def prepare_keys(self, task: QueryBlocks, kv_start: Value, count: Value) -> tuple[Value, Value]:
        here = rows_from(self.e, task.key, kv_start)
        functions, copy = task.functions, task.at.key_copy
        return self.rows_with_adjacent_elements(
            functions, here, count, task.head_dim, copy, whole_chunks=True
        )

    def prepare_values(
        self, task: QueryBlocks, kv_start: Value, count: Value, kinds: Value
    ) -> ValueBlock:
        """V transposed. Where pairs may be forbidden, 0 replaces values that are not finite."""
        e, b, functions, at, dim = self.e, self.e.builder, task.functions, task.at, task.v_head_dim
        here = rows_from(e, task.value, kv_start)
        v, row = self.rows_with_adjacent_elements(functions, here, count, dim, at.value_copy)
        b.call(functions["transpose_values"], [v, row, count, dim, at.values])
        has_non_finite: Value = ir.Constant(BIT, 0)
        if "sift" in functions:
            has_partial = b.icmp_signed("!=", b.and_(kinds, e.index(_PARTIAL_BITS)), e.index(0))
            if not self.frame.plain:
                has_partial = ir.Constant(BIT, 1)
            sifted_keys = b.select(has_partial, count, e.index(0))
            has_non_finite = b.call(functions["sift"], [at.values, dim, sifted_keys])
        return ValueBlock(v, row, has_non_finite)

    def keys_from(self, keys: KeyBlock, k: Value) -> Value:
        return self.e.at(keys.rows, self.e.mul(k, keys.row))

    def values_from(self, values: Value, k: Value) -> Value:
        return self.e.at(values, self.e.mul(k, 2))


BF16_DOT = ForwardKernel(emit_bf16_dot, bf16_dot_scratch_bytes, BLOCK_KV)
"""The kernel for bfloat16 on machines that multiply it, by pairs or by tiles."""
