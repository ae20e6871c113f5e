"""The forward kernel for bfloat16 on machines that multiply bfloat16.

It computes what `forward` says, in the same order, with two differences.

Both products add products of *pairs*, of neighbouring elements of Q and K in one, of neighbouring
keys in the other:

    S[k, q]  =  sum_p K[k, p] . Q[p, q]          p: two elements
    O[d, q] +=  sum_p V[d, p] . P[p, q]          p: two keys

The left factor has a row for each result, its pairs adjacent; the right one is *packed*, a pair of
each query in a lane. K lies so in memory; of V, each block of keys is transposed. Weights are
rounded to bfloat16 as they are packed; their sums stay float32, of unrounded weights.

One task is several blocks of queries, so that they share the transposed block. A run of keys says
of each block whether it sees none, all or part of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, FLOAT, INT16, INT32, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import WORD, RowView
from qkv.backends.cpu.emit.transpose import transposed_bytes
from qkv.backends.cpu.forward.kernel import (
    BLOCK_MAX,
    SOFTMAX,
    STATS,
    TASK,
    Forward,
    ForwardKernel,
    ForwardKey,
)
from qkv.backends.cpu.forward.score_blocks import (
    BLOCK_RUN,
    Block,
    Buffers,
    KeyBlock,
    QueryBlocks,
    ScoreBlocks,
    ValueBlock,
)
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products import matrix_unit
from qkv.backends.cpu.products.bfloat16 import CHUNK, chunks, join, multiply_add_pairs, split, whole
from qkv.backends.cpu.products.query_lanes import dot_rows, store_vectors, vectors_at
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec

BLOCK_KV = 256
"""Number of keys whose scores are held at once; a multiple of `CHUNK`."""

_PARTIAL = int("01" * CHUNK, 2)
"""In the kinds of a run, two bits for each block of queries, the bit that marks a block as
partial."""
_V_ROW = 2 * BLOCK_KV
"""Bytes of one row of transposed V."""


def bf16_dot_scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: a block of S, V, K and tables; Q, O and statistics of each block."""
    width = 4 * shape.block_q
    head_dim, v_head_dim = chunks(spec.head_dim), chunks(spec.v_head_dim)
    shared = BLOCK_KV * (width + 2 * (head_dim + 2 * v_head_dim))
    own = width * (head_dim // 2 + v_head_dim + STATS)
    transposed = transposed_bytes(spec, BLOCK_KV, 4 * shape.lanes)
    return -(-(shared + shape.q_blocks_per_task * own + transposed) // 4096) * 4096


def emit_bf16_dot(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = Bf16DotForward(key)
    kernel.all_tasks()
    return str(kernel.e.module)


class Bf16DotForward(Forward):
    def __init__(self, key: ForwardKey) -> None:
        super().__init__(key)
        self.block_kv = BLOCK_KV
        self.terms = self.shape.terms
        """Rows of Q, K, transposed V and weights are this many rows of pairs."""
        self.weights_at = 0
        """Bytes from scores to weights: these take their place."""
        self.value_row = _V_ROW
        self.unrolled: tuple[int, ...] = (4, 2, 1)
        """Keys that are weighed in one step of the loop, and of those over what is left."""
        self.stats_rows = STATS
        """Rows of statistics of a block of queries; more of them hold what `pack` gives."""
        e = self.e
        self.vectors = self.shape.vectors
        self.width = self.vectors * e.vector_bytes
        self.halves = ir.VectorType(INT16, CHUNK)

    # Rows of bfloat16

    def first_of_chunk(self, count: Value) -> Value:
        """Which elements of a chunk are there, when `count` are."""
        e, b = self.e, self.e.builder
        left = b.trunc(e.least(count, CHUNK), INT16)
        empty = ir.Constant(self.halves, ir.Undefined)
        first = b.insert_element(empty, left, ir.Constant(INT32, 0))
        numbers = ir.Constant(self.halves, list(range(CHUNK)))
        return b.icmp_signed("<", numbers, b.shuffle_vector(first, empty, e.picks([0] * CHUNK)))

    def chunk(self, place: Value, there: Value) -> Value:
        """32 elements as 16 pairs; 0 in place of those that are not there, which are not read."""
        e, b = self.e, self.e.builder
        loaded = e.machine(
            "llvm.masked.load.v32i16.p0", self.halves,
            b.bitcast(place, self.halves.as_pointer()), ir.Constant(INT32, 2), there,
            ir.Constant(self.halves, None),
        )  # fmt: skip
        return b.bitcast(loaded, e.vector)

    def copy(self) -> Value:
        """A function `(from, row, element, count, dim, to)`: rows side by side, in whole chunks.

        What is missing from the chunk of the last row or element is 0.
        """
        e = self.e
        with e.function("copy", [POINTER, *[INT64] * 4, POINTER]) as (function, args):
            source, row, element, count, dim, target = args
            b = e.builder
            width = e.mul(2, whole(e, dim))
            adjacent = b.icmp_signed("==", element, e.index(2))

            def each(k: Value, _: list[Value]) -> None:
                start, end = e.at(source, e.mul(k, row)), e.at(target, e.mul(k, width))
                exists = e.below(k, count)

                def chunk(d: Value, _: list[Value]) -> None:
                    place = b.select(exists, e.at(start, e.mul(d, 2)), e.zeros())
                    there = self.first_of_chunk(b.select(adjacent, e.sub(dim, d), e.index(0)))
                    e.store_vector(self.chunk(place, there), e.at(end, e.mul(d, 2)))

                def single(d: Value, _: list[Value]) -> None:
                    x = e.load(e.at(start, e.mul(d, element)), INT16, 2)
                    e.store(x, e.at(end, e.mul(d, 2)), 2)

                e.loop(0, dim, CHUNK, [], chunk)
                scattered = b.and_(exists, b.not_(adjacent))
                e.loop(0, b.select(scattered, dim, e.index(0)), 1, [], single)

            e.loop(0, whole(e, count), 1, [], each)
        return function

    def pack_pairs(self, functions: dict[str, Value]) -> Value:
        """One vector of queries as pairs; lanes beyond the last row repeat it."""
        e = self.e
        arguments = [POINTER, POINTER, POINTER, POINTER, INT64]
        with e.function("pack", arguments) as (function, args):
            arguments_, query, packed, copy, first_row = args
            b = e.builder
            names = ("query_row", "query_element", "head_dim", "rows")
            row, element, head_dim, rows = (self.field(arguments_, name) for name in names)
            last = e.least(e.lanes - 1, e.sub(e.sub(rows, first_row), 1))
            here = e.at(query, e.mul(first_row, row))
            start, row = self.adjacent(
                functions, (here, row, element), e.add(last, 1), head_dim, copy
            )
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            negative = b.fcmp_ordered(
                "<", self.real_field(arguments_, "sign"), ir.Constant(FLOAT, 0)
            )
            flip = e.splat(b.select(negative, *(ir.Constant(INT32, x) for x in (0x80008000, 0))))

            def turn(d: Value, _: list[Value]) -> None:
                there = self.first_of_chunk(e.sub(head_dim, d))
                loaded = [self.chunk(e.at(place, e.mul(d, 2)), there) for place in places]
                start = e.at(packed, e.mul(d, self.width // 2))
                for p, pairs in enumerate(e.transpose(loaded)):
                    signed = e.as_floats(b.xor(e.as_bits(pairs), flip))
                    e.store_vector(signed, e.at(start, p * self.width))

            e.loop(0, head_dim, CHUNK, [], turn)
        return function

    def adjacent(
        self,
        functions: dict[str, Value],
        rows: tuple[Value, Value, Value],
        count: Value,
        dim: Value,
        copy: Value,
        *,
        chunks: bool = False,
    ) -> tuple[Value, Value]:
        """Rows with adjacent elements, and whole `chunks` if asked for: where they lie, or copied.

        Rows are where they start, and the byte strides of rows and elements.
        """
        e, b = self.e, self.e.builder
        here, row, element = rows
        needed = b.icmp_signed("!=", element, e.index(2))
        if chunks:
            for size in (count, dim):
                broken = b.icmp_signed("!=", whole(e, size), size)
                needed = b.or_(needed, broken)
        with b.if_then(needed, likely=False):
            b.call(functions["copy"], [here, row, element, count, dim, copy])
        return b.select(needed, copy, here), b.select(needed, e.mul(2, whole(e, dim)), row)

    def transpose_values(self) -> Value:
        """A function `(rows, row, count, dim, to)`: V[keys, d] becomes [d, keys], whole chunks."""
        e = self.e
        arguments = [POINTER, *[INT64] * 3, POINTER]
        with e.function("transpose_values", arguments) as (function, args):
            rows, row, count, dim, target = args
            b = e.builder
            low, high = e.const_bits(0xFFFF), e.const_bits(-(2**16))
            sixteen = e.const_bits(16)

            def keys(k: Value, _: list[Value]) -> None:
                def elements(d: Value, _: list[Value]) -> None:
                    there = self.first_of_chunk(e.sub(dim, d))
                    start = e.at(rows, e.mul(d, 2))

                    def transposed(first: int) -> list[Value]:
                        """Pairs of elements of every other key."""
                        loaded = []
                        for i in range(first, CHUNK, 2):
                            key = e.add(k, i)
                            place = e.at(start, e.mul(key, row))
                            place = b.select(e.below(key, count), place, e.zeros())
                            loaded.append(self.chunk(place, there))
                        return [e.as_bits(vector) for vector in e.transpose(loaded)]

                    to = e.at(target, e.mul(d, _V_ROW), e.mul(k, 2))
                    for p, (even, odd) in enumerate(zip(transposed(0), transposed(1), strict=True)):
                        below = b.or_(b.and_(even, low), b.shl(odd, sixteen))
                        above = b.or_(b.lshr(even, sixteen), b.and_(odd, high))
                        for half, pairs in enumerate((below, above)):
                            place = e.at(to, (2 * p + half) * _V_ROW)
                            e.store_vector(e.as_floats(pairs), place)

                e.loop(0, dim, CHUNK, [], elements)

            e.loop(0, count, CHUNK, [], keys)
        return function

    # Products

    def product(self, name: str, *, onto: bool) -> Value:
        """A function as `matrix_unit.add_product`; vectors and pairs where there are no tiles."""
        e = self.e
        if self.shape.product == "tiles":
            return matrix_unit.add_product(e, name, self.vectors, onto=onto)
        with e.function(name, [*[POINTER] * 3, *[INT64] * 3]) as (function, args):
            rows, packed, out, row, count, pairs = args

            def finish(i: Value, products: list[Value], _: list[Value]) -> list[Value]:
                place = e.at(out, e.mul(i, self.width))
                if onto:
                    held = [
                        e.load_vector(e.at(place, n * e.vector_bytes)) for n in range(len(products))
                    ]
                    products = list(map(e.builder.fadd, held, products))
                store_vectors(e, place, products)
                return []

            dot_rows(
                e, rows, row, count, packed, self.vectors, pairs, self.shape.keys, [], finish,
                multiply_add_pairs,
            )  # fmt: skip
        return function

    # S = K Q^T, transposed

    def block_max(self) -> Value:
        """A function `(scores, block_max, count)`: the largest score of each query."""
        e, at_once = self.e, 4
        with e.function("block_max", [POINTER, POINTER, INT64]) as (function, args):
            scores, largest, count = args

            def step(k: Value, seen: list[Value]) -> list[Value]:
                # The last keys may be met twice.
                rows = [e.least(e.add(k, i), e.sub(count, 1)) for i in range(at_once)]
                vectors = [v for row in rows for v in vectors_at(e, scores, self.vectors, row)]
                return list(map(e.greatest, seen, vectors))

            lowest = [e.const(-math.inf)] * (at_once * self.vectors)
            seen = e.loop(0, count, at_once, lowest, step)
            for i in range(self.vectors, len(seen)):
                seen[i % self.vectors] = e.greatest(seen[i % self.vectors], seen[i])
            store_vectors(e, largest, seen[: self.vectors])
        return function

    # P = exp(S - m)

    def finish(self, name: str, *, masked: bool) -> Value:
        """A function as `softmax`, up to the weights: S is finished, its largest is kept."""
        e = self.e
        with e.function(name, SOFTMAX) as (function, args):
            arguments_, scores, stats, transposed, width, count, batch, head, first_row = args[:9]
            kv_start = args[9]
            places = self.places(arguments_, batch, head, first_row)
            scale = e.splat(self.real_field(arguments_, "scale"))
            largest = self.finish_scores(
                places, scale, scores, transposed, width, count, kv_start, masked
            )
            e.store_vector(largest, e.at(stats, e.mul(width, BLOCK_MAX)))
        return function

    def weigh(self, name: str, *, finished: bool) -> Value:
        """A function as `softmax`, from there on."""
        e = self.e
        with e.function(name, SOFTMAX) as (function, args):
            arguments_, scores, stats, _, width, count, batch, head, first_row = args[:9]
            kv_start, marked = args[9:]
            places = self.places(arguments_, batch, head, first_row)
            largest = e.load_vector(e.at(stats, e.mul(width, BLOCK_MAX)))
            where = (arguments_, places, scores, stats, width, count, kv_start)
            self.weigh_scores(*where, largest, marked, finished=finished)
        return function

    def store_weights(
        self,
        scores: Value,
        width: Value,
        start: Value,
        stop: Value,
        sums: list[Value],
        weigh: Callable[[Value, list[Value]], tuple[Value, list[Value]]],
        *,
        few: bool = False,
    ) -> list[Value]:
        """Weights of two keys share a lane; an odd last one is paired with 0."""
        e = self.e

        def pairs(count: int) -> Callable[[Value, list[Value]], list[Value]]:
            def body(k: Value, sums: list[Value]) -> list[Value]:
                weights = []
                for i in range(count):
                    weight, sums = weigh(e.add(k, i), sums)
                    weights.append(weight)
                weights += [e.const(0.0)] * (count % 2)
                for p in range(0, len(weights), 2):
                    place = self.place_of_pair(scores, e.add(k, p), width)
                    self.store_pair(weights[p], weights[p + 1], place)
                return sums

            return body

        for size in self.unrolled[few:]:
            end = e.sub(stop, e.builder.srem(e.sub(stop, start), e.index(size)))
            sums = e.loop(start, end, size, sums, pairs(size))
            start = end
        return sums

    def place_of_pair(self, scores: Value, k: Value, width: Value) -> Value:
        """Where the weights of key k and the next one go, k even."""
        e = self.e
        return e.at(scores, e.mul(e.builder.ashr(k, e.index(1)), width))

    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        """Two weights of each lane as a pair."""
        self.e.store_vector(join(self.e, first, second), place)

    def clear_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        """Pairs of weights that fill the last chunk are 0."""
        e = self.e
        nothing = [e.const(0.0)] * self.vectors
        e.loop(
            first, stop, 1, [],
            lambda p, _: store_vectors(e, e.at(weights, e.mul(p, self.width)), nothing),
        )  # fmt: skip

    # O = rescale * O + V^T P

    def add_values(self, add: Value) -> Value:
        """A function `(values, weights, rescale, out, v_head_dim, count)`: one block of keys."""
        e = self.e
        with e.function("add_values", [*[POINTER] * 4, INT64, INT64]) as (function, args):
            values, weights, rescale, out, v_head_dim, count = args
            pairs = self.before_adding(weights, rescale, out, v_head_dim, count)
            row = e.index(self.value_row)
            e.builder.call(add, [values, weights, out, row, v_head_dim, pairs])
        return function

    def before_adding(
        self, weights: Value, rescale: Value, out: Value, v_head_dim: Value, count: Value
    ) -> Value:
        """Rescale O and fill the last chunk of weights; gives the number of pairs."""
        e, b = self.e, self.e.builder
        pairs = e.add(b.ashr(e.sub(count, 1), e.index(1)), 1)
        self.clear_pairs(weights, pairs, b.ashr(whole(e, count), e.index(1)))
        factors = vectors_at(e, rescale, self.vectors)
        moved = ir.Constant(BIT, 0)
        lanes = ir.IntType(e.lanes)
        for factor in factors:
            changed = b.fcmp_unordered("!=", factor, e.const(1.0))
            some = b.icmp_unsigned("!=", b.bitcast(changed, lanes), ir.Constant(lanes, 0))
            moved = b.or_(moved, some)

        def scale(d: Value, _: list[Value]) -> None:
            place = e.at(out, e.mul(d, self.width))
            held = vectors_at(e, place, self.vectors)
            store_vectors(e, place, list(map(b.fmul, held, factors)))

        e.loop(0, b.select(moved, v_head_dim, e.index(0)), 1, [], scale)
        return pairs

    # Values that are not finite

    def sift(self) -> Value:
        """A function `(values, v_head_dim, count) -> bit`: whether any value is not finite.

        Those become 0.
        """
        e = self.e
        with e.function("sift", [POINTER, INT64, INT64], BIT) as (function, args):
            values, v_head_dim, count = args
            b = e.builder
            exponent = ir.Constant(self.halves, [0x7F80] * CHUNK)
            bits = ir.IntType(CHUNK)

            def row(d: Value, found: list[Value]) -> list[Value]:
                def chunk(k: Value, found: list[Value]) -> list[Value]:
                    place = e.at(values, e.mul(d, _V_ROW), e.mul(k, 2))
                    x = e.load(place, self.halves, e.vector_bytes)
                    broken = b.icmp_unsigned("==", b.and_(x, exponent), exponent)
                    zeros = ir.Constant(self.halves, None)
                    e.store(b.select(broken, zeros, x), place, e.vector_bytes)
                    return [b.or_(found[0], b.bitcast(broken, bits))]

                return e.loop(0, count, CHUNK, found, chunk)

            (found,) = e.loop(0, v_head_dim, 1, [ir.Constant(bits, 0)], row)
            b.ret(b.icmp_unsigned("!=", found, ir.Constant(bits, 0)))
        return function

    def add_non_finite(self) -> Value:
        """A function `(rows, row, weights, out, v_head_dim, count)`: what `sift` left out.

        A weight of -0.0 leaves O alone.
        """
        e = self.e
        arguments = [POINTER, INT64, POINTER, POINTER, INT64, INT64]
        with e.function("add_non_finite", arguments) as (function, args):
            rows, row, weights, out, v_head_dim, count = args
            b = e.builder
            forbidden = e.as_bits(e.const(-0.0))

            def each(k: Value, _: list[Value]) -> None:
                odd = b.trunc(b.and_(k, e.index(1)), BIT)
                pairs = vectors_at(e, weights, self.vectors, b.ashr(k, e.index(1)))
                halves = [split(e, pair) for pair in pairs]
                weighed = [b.select(odd, second, first) for first, second in halves]

                def element(d: Value, _: list[Value]) -> None:
                    x = storage.load(e, e.at(rows, e.mul(k, row), e.mul(d, 2)), "bfloat16")
                    difference = b.fsub(x, x)
                    with b.if_then(e.is_nan(difference), likely=False):
                        place = e.at(out, e.mul(d, self.width))
                        total = vectors_at(e, place, self.vectors)
                        for j, (weight, old) in enumerate(zip(weighed, total, strict=True)):
                            allowed = b.icmp_signed("!=", e.as_bits(weight), forbidden)
                            new = b.select(allowed, e.fma(e.splat(x), weight, old), old)
                            e.store_vector(new, e.at(place, j * e.vector_bytes))

                e.loop(0, v_head_dim, 1, [], element)

            e.loop(0, count, 1, [], each)
        return function

    # One task, all tasks

    def buffers(self, scratch: Value, wide: Value, v_wide: Value) -> Buffers:
        """Where things lie in a worker's memory; rows of K and V are copied where they must be."""
        e = self.e
        values = e.at(scratch, BLOCK_KV * self.width)
        key_copy = e.at(values, e.mul(v_wide, _V_ROW))
        value_copy = e.at(key_copy, e.mul(wide, 2 * BLOCK_KV))
        blocks = e.at(value_copy, e.mul(v_wide, 2 * BLOCK_KV))
        return Buffers(scratch, values, key_copy, value_copy, blocks)

    def block_of_keys(
        self,
        arguments: Value,
        functions: dict[str, Value],
        rows: RowView,
        kv_start: Value,
        count: Value,
        head_dim: Value,
        at: Buffers,
    ) -> tuple[Value, Value]:
        """K as the left factor of the scores, and the bytes of its rows."""
        e = self.e
        here = e.at(rows.pointer, e.mul(kv_start, rows.row))
        strided = (here, rows.row, rows.element)
        return self.adjacent(functions, strided, count, head_dim, at.key_copy, chunks=True)

    def block_of_values(
        self,
        arguments: Value,
        functions: dict[str, Value],
        rows: RowView,
        kv_start: Value,
        count: Value,
        v_head_dim: Value,
        at: Buffers,
        kinds: Value,
    ) -> ValueBlock:
        """Turn V."""
        e = self.e
        here = e.at(rows.pointer, e.mul(kv_start, rows.row))
        strided = (here, rows.row, rows.element)
        v, row = self.adjacent(functions, strided, count, v_head_dim, at.value_copy)
        b = e.builder
        b.call(functions["transpose_values"], [v, row, count, v_head_dim, at.values])
        has_non_finite: Value = ir.Constant(BIT, 0)
        if "sift" in functions:
            careful = b.icmp_signed("!=", b.and_(kinds, e.index(_PARTIAL)), e.index(0))
            if not self.plain:
                careful = ir.Constant(BIT, 1)
            sifted_keys = b.select(careful, count, e.index(0))
            has_non_finite = b.call(functions["sift"], [at.values, v_head_dim, sifted_keys])
        return ValueBlock(v, row, has_non_finite)

    def from_key(self, keys: KeyBlock, k: Value) -> Value:
        """Rows of K from one on."""
        return self.e.at(keys.rows, self.e.mul(k, keys.row))

    def from_value(self, values: Value, k: Value) -> Value:
        """Transposed V from a key on."""
        return self.e.at(values, self.e.mul(k, 2))

    def meeting(self, task: QueryBlocks) -> ScoreBlocks:
        return ScoreBlocks(self, task)

    def attend_together(self, functions: dict[str, Value]) -> Value:
        """Some blocks of queries of one head over their runs of keys."""
        e = self.e
        with e.function("attend", [POINTER] * 3) as (function, args):
            arguments, task, scratch = args
            b = e.builder
            if self.shape.product == "tiles":
                matrix_unit.configure(e)
            batch, head, first_row, first_run, last_run = self.record(task, TASK)
            names = (
                "group_size",
                "num_heads",
                "q_len",
                "head_dim",
                "v_head_dim",
                "q_blocks_per_task",
            )
            group_size, num_heads, q_len, head_dim, v_head_dim, q_blocks_per_task = (
                self.field(arguments, name) for name in names
            )
            kv_head = b.sdiv(head, group_size)
            query = self.operand(arguments, "query", batch, head)
            key = self.operand(arguments, "key", batch, kv_head)
            value = self.operand(arguments, "value", batch, kv_head)

            wide, v_wide = whole(e, head_dim), whole(e, v_head_dim)
            at = self.buffers(scratch, wide, v_wide)
            total_at = e.mul(wide, self.terms * self.width // 2)
            stats_at = e.add(total_at, e.mul(v_wide, self.width))
            block_bytes = e.add(stats_at, self.stats_rows * self.width)
            block_q = self.shape.block_q
            left = e.add(e.sub(q_len, first_row), block_q - 1)
            count = e.least(q_blocks_per_task, b.sdiv(left, e.index(block_q)))
            transposed = e.at(at.blocks, e.mul(q_blocks_per_task, block_bytes))

            def block_at(i: Value) -> Block:
                packed = e.at(at.blocks, e.mul(i, block_bytes))
                row = e.add(first_row, e.mul(i, block_q))
                return Block(packed, e.at(packed, total_at), e.at(packed, stats_at), row)

            def each_block(body: Callable[[Block], None]) -> None:
                e.loop(0, count, 1, [], lambda i, _: body(block_at(i)))

            def each_vector(row: Value, body: Callable[[int, Value], None]) -> None:
                """A vector beyond the last row repeats it."""
                for j in range(self.vectors):
                    body(j * e.vector_bytes, e.least(e.add(row, j * e.lanes), e.sub(q_len, 1)))

            def begin(block: Block) -> None:
                stats = block.stats

                def vector(offset: int, row: Value) -> None:
                    where = [query.pointer, e.at(block.packed, offset), at.key_copy, row]
                    packing = b.call(functions["pack"], [arguments, *where])
                    if self.stats_rows > STATS:
                        e.store(packing, e.at(stats, offset + STATS * self.width), WORD)
                    e.store_vector(e.const(-math.inf), e.at(stats, offset))
                    for i in (1, 3, 5):
                        e.store_vector(e.const(0.0), e.at(stats, offset + i * self.width))

                each_vector(block.row, vector)
                zeros = [e.const(0.0)] * self.vectors
                e.loop(
                    0, v_wide, 1, [],
                    lambda d, _: store_vectors(e, e.at(block.total, e.mul(d, self.width)), zeros),
                )  # fmt: skip

            each_block(begin)

            here = QueryBlocks(
                functions=functions,
                arguments=arguments,
                batch=batch,
                head=head,
                query=query,
                key=key,
                value=value,
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                count=count,
                block=block_at,
                at=at,
                transposed=transposed,
            )

            meeting = self.meeting(here)

            def block_of_keys(
                kv_start: Value, keys: Value, kinds: Value, first: Value, last: Value
            ) -> None:
                meeting.begin()
                where = (arguments, functions)
                factor, row = self.block_of_keys(*where, key, kv_start, keys, head_dim, at)

                def values() -> ValueBlock:
                    return self.block_of_values(
                        *where, value, kv_start, keys, v_head_dim, at, kinds
                    )

                meeting.meet(KeyBlock(kv_start, keys, kinds, first, last, factor, row), values)

            runs, size = self.pointer_field(arguments, "runs"), self.block_kv

            def each_run(r: Value, _: list[Value]) -> None:
                run = e.at(runs, e.mul(r, WORD * len(BLOCK_RUN)))
                start, stop, *seen = self.record(run, BLOCK_RUN)
                e.loop(
                    start, stop, size, [],
                    lambda k, _: block_of_keys(k, e.least(size, e.sub(stop, k)), *seen),
                )  # fmt: skip

            e.loop(first_run, last_run, 1, [], each_run)
            meeting.end()
            place = e.mul(e.add(e.mul(batch, num_heads), head), q_len)

            def end(block: Block) -> None:
                def vector(offset: int, row: Value) -> None:
                    held = e.at(block.total, offset), e.at(block.stats, offset), e.add(place, row)
                    last = e.sub(q_len, row)
                    size = e.index(self.width)
                    b.call(functions["unpack"], [arguments, *held, v_head_dim, size, last])

                each_vector(block.row, vector)

            each_block(end)
            if self.shape.product == "tiles":
                matrix_unit.release(e)
        return function

    def rows(self) -> dict[str, Value]:
        """The functions that read and pack rows."""
        functions = {"copy": self.copy(), "transpose_values": self.transpose_values()}
        functions["pack"] = self.pack_pairs(functions)
        if self.mask != TRUE or not self.plain:
            functions["sift"], functions["add_non_finite"] = self.sift(), self.add_non_finite()
        return functions

    def all_tasks(self) -> None:
        e = self.e
        functions = {
            **self.rows(),
            "scores": self.product("scores", onto=False),
            "unpack": self.unpack(),
            "add_values": self.add_values(self.product("products", onto=True)),
        }
        masked = self.mask != TRUE
        if self.plain:
            functions["block_max"] = self.block_max()
            functions["weigh_plain"] = self.weigh("weigh_plain", finished=False)
        else:
            functions["finish_full"] = self.finish("finish_full", masked=False)
        if masked:
            functions["finish_partial"] = self.finish("finish_partial", masked=True)
        if masked or not self.plain:
            functions["weigh_finished"] = self.weigh("weigh_finished", finished=True)
        attend = self.attend_together(functions)

        def run(arguments: Value, number: Value, scratch: Value) -> None:
            task = e.at(self.pointer_field(arguments, "tasks"), e.mul(number, WORD * len(TASK)))
            e.builder.call(attend, [arguments, task, scratch])

        self.job(run)


BF16_DOT = ForwardKernel(emit_bf16_dot, bf16_dot_scratch_bytes, BLOCK_KV)
"""The kernel for bfloat16 on machines that multiply it, by pairs or by tiles."""
