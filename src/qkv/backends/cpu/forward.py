"""The forward kernel: online softmax with queries in lanes.

One task is a block of queries of one head, `vectors * lanes` rows at most; when there are few
queries, as in decoding, the heads that share a kv head are rows of one *folded* block. Its scores
are computed transposed, one vector of queries for each key, so that the maximum, the sum, the
rescaling and the mask of a row are all lane-wise:

    S[k, q] = score(scale * K[k, :] . Q[q, :])            -inf where the mask forbids the pair
    m'[q]   = max(m[q], max_k S[k, q])
    P[k, q] = exp(S[k, q] - m'[q])
    l[q]    = exp(m[q] - m'[q]) * l[q] + sum_k P[k, q]
    O[d, q] = exp(m[q] - m'[q]) * O[d, q] + sum_k V[k, d] * P[k, q]

for one block of keys after the other; then `out = O / l` and `lse = m + log(l)`. Only Q is packed;
K and V are read where they lie, one element at a time, whatever their strides.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"FlashAttention" (2022), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from qkv.backends.cpu import vector_math
from qkv.backends.cpu.dropout import first_word
from qkv.backends.cpu.expressions import Expressions, TableView
from qkv.backends.cpu.ir import BIT, FLOAT, INT64, POINTER, Emitter, Value, is_vector
from qkv.problem.expressions import SCORE, TRUE
from qkv.problem.spec import Spec

BLOCK_KV = 64
"""Keys whose scores are held at once."""

_CHUNK = 64
"""Entries of a row whose products are added one after the other: rounding errors grow with it."""

WORD = 8
COUNTER_BYTES = 128
"""The counter of tasks has cache lines of its own, before the fields."""

FIELDS = (
    "limit", "tasks", "runs", "scratch", "scratch_bytes",
    "query", "query_batches", "query_head", "query_row", "query_element",
    "key", "key_batches", "key_head", "key_row", "key_element",
    "value", "value_batches", "value_head", "value_row", "value_element",
    "out", "lse", "num_heads", "group_size", "rows", "q_len", "head_dim", "v_head_dim", "scale",
    "dropout_seed", "dropout_threshold", "dropout_factor",
)  # fmt: skip
"""The argument block, a 64-bit word each; tables follow: address, then size and stride of each
dimension. `*_batches` are arrays of byte offsets, one for each batch row."""

STATS = 4
"""Row maximum, row sum, rescaling, and what rounding took from the row sum."""

TASK = ("batch", "head", "first_row", "first_run", "last_run")
RUN = ("start", "stop", "partial")


@dataclass(frozen=True, slots=True)
class Shape:
    """What fits the registers of a machine: lanes of a vector, vectors and keys of one tile."""

    lanes: int
    vectors: int
    keys: int

    @property
    def block_q(self) -> int:
        return self.lanes * self.vectors


def scratch_bytes(shape: Shape, head_dim: int, v_head_dim: int) -> int:
    """Memory of one worker: packed Q, O, P, and the statistics of each row."""
    rows = head_dim + v_head_dim + BLOCK_KV + STATS
    return -(-rows * shape.block_q * 4 // 4096) * 4096


def emit_forward(spec: Spec, shape: Shape, int_bits: int, folded: bool) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = _Forward(spec, shape, int_bits, folded)
    kernel.job()
    return str(kernel.e.module)


class _Forward:
    def __init__(self, spec: Spec, shape: Shape, int_bits: int, folded: bool) -> None:
        self.spec = spec
        self.shape = shape
        self.int_bits = int_bits
        self.folded = folded
        self.e = Emitter("qkv_forward", shape.lanes)
        self.score, self.mask = spec.score, spec.mask

    def field(self, arguments: Value, name: str) -> Value:
        offset = COUNTER_BYTES + WORD * FIELDS.index(name)
        return self.e.load(self.e.at(arguments, offset), INT64, WORD)

    def float_field(self, arguments: Value, name: str) -> Value:
        offset = COUNTER_BYTES + WORD * FIELDS.index(name)
        return self.e.load(self.e.at(arguments, offset), FLOAT, WORD)

    def record(self, pointer: Value, names: tuple[str, ...]) -> list[Value]:
        return [self.e.load(self.e.at(pointer, WORD * i), INT64, WORD) for i in range(len(names))]

    def tables(self, arguments: Value) -> dict[str, TableView]:
        e, views = self.e, {}
        offset = COUNTER_BYTES + WORD * len(FIELDS)
        for spec in self.spec.tables:
            words = [
                e.load(e.at(arguments, offset + WORD * i), INT64, WORD)
                for i in range(1 + 2 * spec.ndim)
            ]
            offset += WORD * len(words)
            views[spec.name] = TableView(
                spec, e.pointer(words[0]), tuple(words[1::2]), tuple(words[2::2])
            )
        return views

    # S = K Q^T, transposed

    def scores(self, vectors: int) -> Value:
        """S[k, :] = scale * K[k, :] . packed Q, `keys` rows of K at a time."""
        e = self.e
        arguments = [POINTER, POINTER, POINTER, *[INT64] * 4, FLOAT]
        with e.function(f"scores_{vectors}", arguments) as (function, args):
            key, packed, out, key_row, key_element, head_dim, count, scale = args
            b = e.builder
            width = vectors * e.vector_bytes
            scales = e.splat(scale)

            def tile(keys: int) -> Callable[..., None]:
                def body(k: Value, _: list[Value]) -> None:
                    rows = [e.at(key, e.mul(e.add(k, i), key_row)) for i in range(keys)]

                    def accumulate(d: Value, total: list[Value]) -> list[Value]:
                        q = self.vectors_at(packed, d, vectors)
                        column = e.mul(d, key_element)
                        for i, row in enumerate(rows):
                            x = e.splat(e.load(e.at(row, column), FLOAT))
                            for j in range(vectors):
                                n = i * vectors + j
                                total[n] = e.fma(x, q[j], total[n])
                        return total

                    start = e.at(out, e.mul(k, width))
                    places = [e.at(start, n * e.vector_bytes) for n in range(keys * vectors)]
                    zeros = [e.const(0.0)] * len(places)

                    def chunk(d: Value, _: list[Value]) -> None:
                        stop = e.least(e.add(d, _CHUNK), head_dim)
                        for place, part in zip(
                            places, e.loop(d, stop, 1, zeros, accumulate), strict=True
                        ):
                            e.store_vector(b.fadd(e.load_vector(place), part), place)

                    first = e.loop(0, e.least(_CHUNK, head_dim), 1, zeros, accumulate)
                    for place, part in zip(places, first, strict=True):
                        e.store_vector(part, place)
                    e.loop(_CHUNK, head_dim, _CHUNK, [], chunk)
                    for place in places:
                        e.store_vector(b.fmul(e.load_vector(place), scales), place)

                return body

            whole = e.round_down(count, self.shape.keys)
            e.loop(0, whole, self.shape.keys, [], tile(self.shape.keys))
            e.loop(whole, count, 1, [], tile(1))
        return function

    def vectors_at(self, pointer: Value, row: Value, vectors: int) -> list[Value]:
        e = self.e
        start = e.at(pointer, e.mul(row, vectors * e.vector_bytes))
        return [e.load_vector(e.at(start, j * e.vector_bytes)) for j in range(vectors)]

    # P = exp(S - m), one vector of queries

    def softmax(self, name: str, masked: bool) -> Value:
        """One block of keys of one vector of queries: S becomes P; row maximum and sum advance.

        With `marked`, the weight of a forbidden pair is -0.0; no other weight is.
        """
        e, b = self.e, self.e.builder
        arguments = [POINTER, POINTER, POINTER, *[INT64] * 6, BIT]
        with e.function(name, arguments) as (function, args):
            arguments_, scores, stats, width, count, batch, head, first_row, kv_start, marked = args
            b = e.builder
            row_max, row_sum, rescale, lost = (e.at(stats, e.mul(width, i)) for i in range(STATS))
            old_max = e.load_vector(row_max)
            places = self.places(arguments_, batch, head, first_row)
            mods = self.score != SCORE
            may_forbid = masked or mods

            def finish(k: Value, carried: list[Value]) -> list[Value]:
                place = e.at(scores, e.mul(k, width))
                score = e.load_vector(place)
                inner = places.inside(e.add(kv_start, k), score)
                if mods:
                    score = inner.floats(self.score)
                if masked:
                    score = b.select(inner.condition(self.mask), score, e.const(-math.inf))
                e.store_vector(score, place)
                return [e.greatest(carried[0], score)]

            def largest(k: Value, carried: list[Value]) -> list[Value]:
                # Four maxima at a time; the last rows may be met twice.
                last = e.sub(count, 1)
                return [
                    e.greatest(
                        old, e.load_vector(e.at(scores, e.mul(e.least(e.add(k, i), last), width)))
                    )
                    for i, old in enumerate(carried)
                ]

            if may_forbid:
                if mods:
                    places.hoist(self.score)
                if masked:
                    places.hoist(self.mask)
                (new_max,) = e.loop(0, count, 1, [old_max], finish)
            else:
                a, c, d, f = e.loop(0, count, 4, [old_max] * 4, largest)
                new_max = e.greatest(e.greatest(a, c), e.greatest(d, f))
            # A row that has seen no key yet has maximum -inf; shift it by 0 instead.
            unseen = b.fcmp_ordered("==", new_max, e.const(-math.inf))
            shift = b.select(unseen, e.const(0.0), new_max)
            mark = b.select(marked, ir.Constant(FLOAT, -0.0), ir.Constant(FLOAT, 0.0))
            forbidden = e.splat(mark)

            def weigh(k: Value, carried: list[Value]) -> list[Value]:
                place = e.at(scores, e.mul(k, width))
                score = e.load_vector(place)
                weight = vector_math.exp_flushed(e, b.fsub(score, shift))
                if may_forbid:
                    never = b.fcmp_ordered("==", score, e.const(-math.inf))
                    weight = b.select(never, forbidden, weight)
                total = b.fadd(carried[0], weight)
                if self.spec.dropout:
                    weight = b.fmul(weight, self.factor(arguments_, places, e.add(kv_start, k)))
                e.store_vector(weight, place)
                return [total]

            def group(k: Value, carried: list[Value]) -> list[Value]:
                # Sums of sums: rounding errors grow with the length of a chain.
                (part,) = e.loop(k, e.least(e.add(k, 16), count), 1, [e.const(0.0)], weigh)
                return [b.fadd(carried[0], part)]

            (total,) = e.loop(0, count, 16, [e.const(0.0)], group)
            factor = vector_math.exp_flushed(e, b.fsub(old_max, shift))
            e.store_vector(new_max, row_max)
            # Compensated (Kahan 1965): a plain sum over thousands of blocks drifts.
            old_sum = b.fmul(e.load_vector(row_sum), factor)
            total = b.fsub(total, b.fmul(e.load_vector(lost), factor))
            new_sum = b.fadd(old_sum, total)
            e.store_vector(new_sum, row_sum)
            e.store_vector(b.fsub(b.fsub(new_sum, old_sum), total), lost)
            e.store_vector(factor, rescale)
        return function

    def places(self, arguments: Value, batch: Value, head: Value, first_row: Value) -> Expressions:
        """Where the lanes are; those beyond the last row repeat it."""
        e, b = self.e, self.e.builder
        whole = ir.IntType(self.int_bits)

        def lanes(scalar: Value) -> Value:
            return e.splat(scalar if self.int_bits == 64 else b.trunc(scalar, whole))

        last = lanes(e.sub(self.field(arguments, "rows"), 1))
        row = b.add(lanes(first_row), e.lane_numbers(whole))
        row = b.select(b.icmp_signed("<", row, last), row, last)
        if self.folded:
            q_len = lanes(self.field(arguments, "q_len"))
            head, row = b.add(lanes(head), b.sdiv(row, q_len)), b.srem(row, q_len)
        variables = {"batch": batch, "head": head, "q_index": row}
        return Expressions(e, self.tables(arguments), variables, self.int_bits)

    def factor(self, arguments: Value, places: Expressions, kv_index: Value) -> Value:
        """The dropout factor of each lane: 0 or 1 / (1 - p)."""
        e, b = self.e, self.e.builder
        wide = ir.VectorType(INT64, e.lanes)

        def lanes(value: Value) -> Value:
            if not is_vector(value):
                return e.splat(value)
            return value if value.type == wide else b.sext(value, wide)

        names = ("q_index", "head", "batch")
        counter = [lanes(kv_index), *(lanes(places.places[name]) for name in names)]
        word = first_word(e, counter, self.field(arguments, "dropout_seed"))
        kept = b.icmp_signed(">=", word, e.splat(self.field(arguments, "dropout_threshold")))
        factor = e.splat(self.float_field(arguments, "dropout_factor"))
        return b.select(kept, factor, e.const(0.0))

    # O = rescale * O + P^T V, transposed

    def values(self, vectors: int) -> Value:
        """Add one block of keys to O, `keys` columns of V at a time."""
        e = self.e
        arguments = [*[POINTER] * 4, *[INT64] * 4]
        with e.function(f"values_{vectors}", arguments) as (function, args):
            value, weights, rescale, out, value_row, value_element, v_head_dim, count = args
            factors = self.vectors_at(rescale, e.index(0), vectors)

            def tile(columns: int) -> Callable[..., None]:
                def body(d: Value, _: list[Value]) -> None:
                    starts = [
                        e.at(value, e.mul(e.add(d, i), value_element)) for i in range(columns)
                    ]

                    def accumulate(k: Value, total: list[Value]) -> list[Value]:
                        p = self.vectors_at(weights, k, vectors)
                        row = e.mul(k, value_row)
                        for i, start in enumerate(starts):
                            x = e.splat(e.load(e.at(start, row), FLOAT))
                            for j in range(vectors):
                                n = i * vectors + j
                                total[n] = e.fma(x, p[j], total[n])
                        return total

                    total = e.loop(0, count, 1, [e.const(0.0)] * (columns * vectors), accumulate)
                    self.advance(e.at(out, e.mul(d, vectors * e.vector_bytes)), factors, total)

                return body

            whole = e.round_down(v_head_dim, self.shape.keys)
            e.loop(0, whole, self.shape.keys, [], tile(self.shape.keys))
            e.loop(whole, v_head_dim, 1, [], tile(1))
        return function

    def advance(self, place: Value, factors: list[Value], totals: list[Value]) -> None:
        e = self.e
        for n, total in enumerate(totals):
            at = e.at(place, n * e.vector_bytes)
            e.store_vector(e.fma(e.load_vector(at), factors[n % len(factors)], total), at)

    def selected_values(self, vectors: int) -> Value:
        """The same for values that are not all finite: a weight of -0.0 leaves O alone."""
        e = self.e
        arguments = [*[POINTER] * 4, *[INT64] * 4]
        with e.function(f"selected_values_{vectors}", arguments) as (function, args):
            value, weights, rescale, out, value_row, value_element, v_head_dim, count = args
            b = e.builder
            factors = self.vectors_at(rescale, e.index(0), vectors)

            def column(d: Value, _: list[Value]) -> None:
                start = e.at(value, e.mul(d, value_element))

                def accumulate(k: Value, total: list[Value]) -> list[Value]:
                    x = e.splat(e.load(e.at(start, e.mul(k, value_row)), FLOAT))
                    following = []
                    for p, old in zip(self.vectors_at(weights, k, vectors), total, strict=True):
                        allowed = b.icmp_signed("!=", e.as_bits(p), e.const_bits(-(2**31)))
                        following.append(b.select(allowed, e.fma(x, p, old), old))
                    return following

                total = e.loop(0, count, 1, [e.const(0.0)] * vectors, accumulate)
                self.advance(e.at(out, e.mul(d, vectors * e.vector_bytes)), factors, total)

            e.loop(0, v_head_dim, 1, [], column)
        return function

    def all_finite(self) -> Value:
        """Whether the elements of a block of V are finite: x * 0 is 0 exactly then."""
        e = self.e
        with e.function("all_finite", [POINTER, *[INT64] * 4], BIT) as (function, args):
            value, value_row, value_element, v_head_dim, count = args
            b = e.builder
            last_row, last_vector = e.sub(count, 1), e.sub(v_head_dim, e.lanes)

            def rows(d: Value, load: Callable[[Value], Value], seen: list[Value]) -> list[Value]:
                def row(k: Value, seen: list[Value]) -> list[Value]:
                    # Four rows at a time; the last ones may be met twice.
                    following = []
                    for i, old in enumerate(seen):
                        place = e.mul(e.least(e.add(k, i), last_row), value_row)
                        x = load(e.at(value, place, e.mul(d, value_element)))
                        following.append(e.fma(x, ir.Constant(x.type, None), old))
                    return following

                return e.loop(0, count, 4, seen, row)

            plain = self.contiguous(value_element, v_head_dim)
            stop = b.select(plain, v_head_dim, e.index(0))
            zero, lanes = ir.Constant(FLOAT, 0.0), e.const(0.0)
            vectors = e.loop(
                0, stop, e.lanes, [lanes] * 4,
                lambda d, seen: rows(
                    e.least(d, last_vector), lambda p: e.load_vector(p, aligned=False), seen
                ),
            )  # fmt: skip
            scalars = e.loop(
                stop, v_head_dim, 1, [zero] * 4,
                lambda d, seen: rows(d, lambda p: e.load(p, FLOAT), seen),
            )  # fmt: skip
            total = vectors[0]
            for seen in (*vectors[1:], *map(e.splat, scalars)):
                total = b.fadd(total, seen)
            nan = e.is_nan(total)
            b.ret(b.icmp_unsigned("==", b.bitcast(nan, ir.IntType(e.lanes)),
                                  ir.Constant(ir.IntType(e.lanes), 0)))  # fmt: skip
        return function

    def contiguous(self, element: Value, dim: Value) -> Value:
        """Whether rows can be read a vector at a time."""
        e, b = self.e, self.e.builder
        adjacent = b.icmp_signed("==", element, e.index(4))
        return b.and_(adjacent, b.icmp_signed(">=", dim, e.index(e.lanes)))

    # Q in, O out

    def pack(self) -> Value:
        """One vector of queries, transposed; lanes beyond the last row repeat it."""
        e = self.e
        arguments = [POINTER, POINTER, POINTER, INT64, INT64]
        with e.function("pack", arguments) as (function, args):
            arguments_, query, packed, first_row, width = args
            b = e.builder
            names = ("query_head", "query_row", "query_element", "head_dim", "rows", "q_len")
            query_head, query_row, query_element, head_dim, count, q_len = (
                self.field(arguments_, name) for name in names
            )
            rows = []
            for i in range(e.lanes):
                row = e.least(e.add(first_row, i), e.sub(count, 1))
                head = e.index(0)
                if self.folded:
                    head, row = b.sdiv(row, q_len), b.srem(row, q_len)
                rows.append(e.at(query, e.mul(head, query_head), e.mul(row, query_row)))

            def put(d: Value, vector: Value) -> None:
                e.store_vector(vector, e.at(packed, e.mul(d, width)))

            def turn(d: Value, _: list[Value]) -> None:
                d = e.least(d, e.sub(head_dim, e.lanes))
                loaded = [e.load_vector(e.at(r, e.mul(d, 4)), aligned=False) for r in rows]
                for i, vector in enumerate(e.transpose(loaded)):
                    put(e.add(d, i), vector)

            def gather(d: Value, _: list[Value]) -> None:
                vector = ir.Constant(e.vector, ir.Undefined)
                for i, row in enumerate(rows):
                    x = e.load(e.at(row, e.mul(d, query_element)), FLOAT)
                    vector = e.insert(vector, x, i)
                put(d, vector)

            stop = b.select(self.contiguous(query_element, head_dim), head_dim, e.index(0))
            e.loop(0, stop, e.lanes, [], turn)
            e.loop(stop, head_dim, 1, [], gather)
        return function

    def unpack(self) -> Value:
        """One vector of queries: out = O / l, transposed back, and lse = m + log(l).

        Lanes beyond the last row hold what it holds and write it again. A row without keys has
        l = 0.
        """
        e = self.e
        arguments = [*[POINTER] * 4, *[INT64] * 3]
        with e.function("unpack", arguments) as (function, args):
            total, stats, out, lse, v_head_dim, width, count = args
            b = e.builder
            row_max, row_sum = e.load_vector(stats), e.load_vector(e.at(stats, width))
            empty = b.fcmp_ordered("==", row_sum, e.const(0.0))
            divisor = b.select(empty, e.const(1.0), row_sum)
            logarithm = b.fadd(row_max, vector_math.log(e, row_sum))
            logarithm = b.select(empty, e.const(-math.inf), logarithm)
            last = e.sub(count, 1)
            lanes = [e.least(i, last) for i in range(e.lanes)]
            rows = [e.at(out, e.mul(lane, e.mul(v_head_dim, 4))) for lane in lanes]
            for i, lane in enumerate(lanes):
                e.store(e.extract(logarithm, i), e.at(lse, e.mul(lane, 4)), 4)

            def take(d: Value) -> Value:
                # Adding 0 leaves one sign of zero.
                vector = e.load_vector(e.at(total, e.mul(d, width)))
                return b.fadd(b.fdiv(vector, divisor), e.const(0.0))

            def turn(d: Value, _: list[Value]) -> None:
                d = e.least(d, e.sub(v_head_dim, e.lanes))
                turned = e.transpose([take(e.add(d, i)) for i in range(e.lanes)])
                for row, vector in zip(rows, turned, strict=True):
                    e.store_vector(vector, e.at(row, e.mul(d, 4)), aligned=False)

            def scatter(d: Value, _: list[Value]) -> None:
                vector = take(d)
                for i, row in enumerate(rows):
                    e.store(e.extract(vector, i), e.at(row, e.mul(d, 4)), 4)

            stop = b.select(self.contiguous(e.index(4), v_head_dim), v_head_dim, e.index(0))
            e.loop(0, stop, e.lanes, [], turn)
            e.loop(stop, v_head_dim, 1, [], scatter)
        return function

    # One task, all tasks

    def attend(self, vectors: int, parts: dict[str, Value]) -> Value:
        """One block of queries over its runs of keys."""
        e = self.e
        scores, values = self.scores(vectors), self.values(vectors)
        selected = self.selected_values(vectors) if "all_finite" in parts else None
        with e.function(f"attend_{vectors}", [POINTER] * 3) as (function, args):
            arguments, task, scratch = args
            b = e.builder
            batch, head, first_row, first_run, last_run = self.record(task, TASK)
            names = ("group_size", "num_heads", "q_len", "rows", "head_dim", "v_head_dim", "runs")
            group_size, num_heads, q_len, rows, head_dim, v_head_dim, runs = (
                self.field(arguments, name) for name in names
            )
            count = e.sub(rows, first_row)
            kv_head = b.sdiv(head, group_size)
            key, key_row, key_element = self.operand(arguments, "key", batch, kv_head)
            value, value_row, value_element = self.operand(arguments, "value", batch, kv_head)
            query, _, _ = self.operand(arguments, "query", batch, head)
            scale = self.float_field(arguments, "scale")

            row = self.shape.vectors * e.vector_bytes
            width = vectors * e.vector_bytes
            packed = scratch
            total = e.at(packed, e.mul(head_dim, row))
            weights = e.at(total, e.mul(v_head_dim, row))
            stats = e.at(weights, BLOCK_KV * row)
            rescale = e.at(stats, 2 * width)

            def each_vector(body: Callable[[int, Value, Value], None]) -> None:
                """A vector beyond the last row repeats it."""
                for j in range(vectors):
                    first = e.least(j * e.lanes, e.sub(count, 1))
                    body(j * e.vector_bytes, first, e.sub(count, first))

            def begin(offset: int, first: Value, left: Value) -> None:
                to, row = e.at(packed, offset), e.add(first_row, first)
                b.call(parts["pack"], [arguments, query, to, row, e.index(width)])
                e.store_vector(e.const(-math.inf), e.at(stats, offset))
                for i in (1, 3):
                    e.store_vector(e.const(0.0), e.at(stats, offset + i * width))

            each_vector(begin)
            e.loop(
                0, e.mul(v_head_dim, width), e.vector_bytes, [],
                lambda i, _: e.store_vector(e.const(0.0), e.at(total, i)),
            )  # fmt: skip

            def block(kv_start: Value, keys: Value, partial: Value) -> None:
                k, v = (
                    e.at(base, e.mul(kv_start, stride))
                    for base, stride in ((key, key_row), (value, value_row))
                )
                layout = (key_row, key_element, head_dim, keys, scale)
                b.call(scores, [k, packed, weights, *layout])

                def softmax(name: str, marked: Value) -> None:
                    for j in range(vectors):
                        first = e.add(first_row, j * e.lanes)
                        at = (arguments, e.at(weights, j * e.vector_bytes),
                              e.at(stats, j * e.vector_bytes), e.index(width))  # fmt: skip
                        where = (keys, batch, head, first, kv_start, marked)
                        b.call(parts[name], [*at, *where])

                sizes = [value_row, value_element, v_head_dim, keys]

                def add(which: Value) -> None:
                    b.call(which, [v, weights, rescale, total, *sizes])

                def guarded(name: str) -> None:
                    finite = b.call(parts["all_finite"], [v, *sizes])
                    softmax(name, b.not_(finite))
                    e.choose(finite, lambda: add(values), lambda: add(selected))

                def full() -> None:
                    if self.score == SCORE:
                        softmax("full", ir.Constant(BIT, 0))
                        add(values)
                    else:
                        guarded("full")

                if self.mask == TRUE:
                    full()
                else:
                    e.choose(partial, lambda: guarded("partial"), full)

            def each_run(r: Value, _: list[Value]) -> None:
                start, stop, kind = self.record(
                    e.at(e.pointer(runs), e.mul(r, WORD * len(RUN))), RUN
                )
                partial = b.icmp_signed("!=", kind, e.index(0))
                e.loop(
                    start, stop, BLOCK_KV, [],
                    lambda k, _: block(k, e.least(BLOCK_KV, e.sub(stop, k)), partial),
                )  # fmt: skip

            e.loop(first_run, last_run, 1, [], each_run)

            place = e.add(e.mul(e.add(e.mul(batch, num_heads), head), q_len), first_row)
            out = e.at(e.pointer(self.field(arguments, "out")), e.mul(place, v_head_dim, 4))
            lse = e.at(e.pointer(self.field(arguments, "lse")), e.mul(place, 4))

            def end(offset: int, first: Value, left: Value) -> None:
                held = e.at(total, offset), e.at(stats, offset)
                to = e.at(out, e.mul(first, v_head_dim, 4)), e.at(lse, e.mul(first, 4))
                b.call(parts["unpack"], [*held, *to, v_head_dim, e.index(width), left])

            each_vector(end)
        return function

    def operand(
        self, arguments: Value, name: str, batch: Value, head: Value
    ) -> tuple[Value, Value, Value]:
        """First row of a head, and the byte strides of rows and elements."""
        e = self.e
        base, batches, stride, row, element = (
            self.field(arguments, f"{name}{part}")
            for part in ("", "_batches", "_head", "_row", "_element")
        )
        offset = e.load(e.at(e.pointer(batches), e.mul(batch, WORD)), INT64, WORD)
        return e.at(e.pointer(base), offset, e.mul(head, stride)), row, element

    def job(self) -> None:
        """`job(arguments, worker)`: tasks in the order of the table, taken from a counter."""
        e = self.e
        parts = {
            "pack": self.pack(),
            "unpack": self.unpack(),
            "full": self.softmax("full", False),
        }
        if self.mask != TRUE:
            parts["partial"] = self.softmax("partial", True)
        if self.mask != TRUE or self.score != SCORE:
            parts["all_finite"] = self.all_finite()
        one, many = (self.attend(v, parts) for v in (1, self.shape.vectors))
        with e.function("job", [POINTER, INT64], public=True) as (_, (arguments, worker)):
            b = e.builder
            names = ("limit", "tasks", "scratch", "scratch_bytes", "rows")
            limit, tasks, scratch, size, rows = (self.field(arguments, name) for name in names)
            memory = e.at(e.pointer(scratch), e.mul(worker, size))
            counter = b.bitcast(arguments, INT64.as_pointer())

            def take() -> tuple[Value, Value]:
                number = b.atomic_rmw("add", counter, e.index(1), "monotonic")
                return number, e.below(number, limit)

            def run(number: Value) -> None:
                task = e.at(e.pointer(tasks), e.mul(number, WORD * len(TASK)))
                first_row = self.record(task, TASK)[TASK.index("first_row")]
                few = e.below(e.sub(rows, first_row), e.lanes + 1)
                call = [arguments, task, memory]
                e.choose(few, lambda: b.call(one, call), lambda: b.call(many, call))

            e.take_while(take, run)
