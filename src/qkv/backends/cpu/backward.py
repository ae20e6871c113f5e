"""The backward kernel: one pass over recomputed weights, five products, queries in lanes.

One task is a range of keys of one kv head. It meets every block of queries of the heads that read
this kv head, and for each block of keys computes, transposed as in the forward pass,

    S[k, q]   = score(scale * K[k, :] . Q[q, :])
    P[k, q]   = exp(S[k, q] - lse[q])                      0 where the mask forbids the pair
    dP[k, q]  = f[k, q] * V[k, :] . dO[q, :]               f: dropout factors
    dS[k, q]  = P[k, q] * (dP[k, q] - delta[q])            delta = rowsum(dO * O) - d lse
    dX[k, q]  = dS[k, q] * scale * d score / d product
    dQ[d, q] += sum_k K[k, d] * dX[k, q]
    dV[k, :] += sum_q f[k, q] * P[k, q] * dO[q, :]
    dK[k, :] += sum_q dX[k, q] * Q[q, :]

dK and dV belong to the task. dQ is a part for each range of keys; whoever finishes the last range
of a kv head adds its parts, in the order of the ranges. A table that the score reads gets
`dS * d score / d entry` added where the entry was read.

Q and dO are packed for the first two products and turned back, side by side, for the last two, so
that nothing is transposed between products. A forbidden pair has P = -0.0, no other pair has: its
dX is 0 by selection, and where K, Q or dO is not finite a slower path leaves it out of the sums.

Sources: Dao et al., "FlashAttention" (2022), algorithm 4; Dao, "FlashAttention-2" (2023), for
the parts over keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu import storage, vector_math
from qkv.backends.cpu.expressions import Expressions, TableView
from qkv.backends.cpu.forward import RUN
from qkv.backends.cpu.forward import TASK as BLOCK
from qkv.backends.cpu.frame import (
    COMMON_FIELDS,
    COUNTER_BYTES,
    WORD,
    Frame,
    Rows,
    Shape,
    operand_fields,
)
from qkv.backends.cpu.ir import BIT, DOUBLE, INT64, POINTER, Value
from qkv.backends.cpu.packing import all_finite, copy_rows, pack_rows, unpack_rows
from qkv.backends.cpu.products import combine_rows, dot_rows, store_vectors, vectors_at
from qkv.backends.cpu.storage import ITEM_BYTES, real_dtype
from qkv.problem.derivative import ONE, derivative
from qkv.problem.expressions import SCORE, TRUE, Load, variables, walk
from qkv.problem.spec import Spec

BLOCK_KV = 128
"""Keys whose weights are held at once."""

AREAS = (
    "query", "grad_out", "query_sums", "query_rows", "grad_rows", "shift", "log_sum", "delta",
    "weights", "score_grads", "products", "factors", "key_copy", "value_copy",
)  # fmt: skip
"""What a worker's scratch holds, in this order."""

FIELDS = (
    *COMMON_FIELDS,
    *operand_fields("query", "key", "value", "out", "grad_out"),
    "scale_rest", "shift", "log_sum", "grad_lse", "copy_key", "copy_value",
    "blocks", "runs", "q_blocks", "splits", "finished",
    "query_parts", "part_bytes", "d_query", "add_query",
    "key_sums", "key_sum_row", "d_key", "round_key",
    "value_sums", "value_sum_row", "d_value", "round_value",
    *(f"area_{name}" for name in AREAS),
)  # fmt: skip
"""`scale_rest` is what rounding took from `scale`."""

TASK = ("batch", "kv_head", "start", "stop", "split")
"""Behind these, for each table with a gradient, where the task's copy of it begins, in bytes."""


def padded(dim: int, lanes: int) -> int:
    """Rows of sums are whole vectors."""
    return -(-dim // lanes) * lanes


def scratch_areas(shape: Shape, head_dim: int, v_head_dim: int) -> dict[str, int]:
    """Numbers that each area holds."""
    block_q = shape.lanes * shape.vectors
    query, value = (padded(dim, shape.lanes) * block_q for dim in (head_dim, v_head_dim))
    block = BLOCK_KV * block_q
    copies = (BLOCK_KV * padded(dim, shape.lanes) for dim in (head_dim, v_head_dim))
    sizes = (query, value, max(query, value), query, value, *[block_q] * 3, *[block] * 4, *copies)
    return dict(zip(AREAS, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class TableGradient:
    """A table whose gradient is wanted, and whether it is added in float64."""

    name: str
    wide: bool


@dataclass(frozen=True, slots=True)
class BackwardKey:
    """What the code of one kernel depends on.

    `rotated` queries and keys come in the type of computation. `out_dtype` is that of the output
    that is read, `grad_dtype` that of the gradients that are written.
    """

    spec: Spec
    shape: Shape
    int_bits: int
    rotated: bool
    out_dtype: str
    grad_dtype: str
    tables: tuple[TableGradient, ...] = ()


def emit_backward(key: BackwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = _Backward(key)
    kernel.all_tasks()
    return str(kernel.e.module)


class _Queries(NamedTuple):
    """Where the lanes of one vector of queries stand."""

    batch: Value
    head: Value
    first_row: Value


class _Backward(Frame):
    def __init__(self, key: BackwardKey) -> None:
        super().__init__("qkv_backward", key.spec, key.shape, key.int_bits, FIELDS)
        turned = real_dtype(self.e) if key.rotated else key.spec.dtype
        self.dtypes = {
            "query": turned, "key": turned, "value": key.spec.dtype,
            "grad_out": key.spec.dtype, "out": key.out_dtype,
        }  # fmt: skip
        self.grad_dtype = key.grad_dtype
        self.wanted = key.tables
        self.plain = self.score == SCORE
        self.slope = derivative(self.score)
        names = {table.name for table in key.tables}
        read = (n for n in walk(self.score) if isinstance(n, Load) and n.table in names)
        self.loads = tuple(dict.fromkeys(read))
        self.chained = bool(self.loads) or self.slope != ONE
        self.may_forbid = self.mask != TRUE or not self.plain

    # P, one block of keys

    def products(self, vectors: int) -> Value:
        """P[k, :] = exp(scale * K[k, :] . packed Q - lse); with mods, the products alone."""
        e = self.e
        arguments = [*[POINTER] * 6, *[INT64] * 3]
        with e.function(f"products_{vectors}", arguments) as (function, args):
            arguments_, key, packed, shift, log_sum, out, key_row, head_dim, count = args
            shifts, sums = (vectors_at(e, rows, vectors) for rows in (shift, log_sum))
            scale, rest = (e.splat(self.real_field(arguments_, n)) for n in ("scale", "scale_rest"))

            def weight(n: int, product: Value) -> Value:
                distance = e.fma(product, scale, b.fneg(shifts[n % vectors]))
                distance = e.fma(product, rest, distance)
                return vector_math.exp_flushed(e, b.fsub(distance, sums[n % vectors]))

            b = e.builder

            def finish(k: Value, products: list[Value], _: list[Value]) -> list[Value]:
                if self.plain:
                    products = [weight(n, product) for n, product in enumerate(products)]
                store_vectors(e, e.at(out, e.mul(k, vectors * e.vector_bytes)), products)
                return []

            dot_rows(e, key, key_row, count, packed, vectors, head_dim, self.shape.keys, [], finish)
        return function

    def weigh(self, name: str, masked: bool) -> Value:
        """One vector of queries: mods and mask make P of the products; -0.0 where forbidden."""
        e = self.e
        arguments = [*[POINTER] * 5, *[INT64] * 6]
        with e.function(name, arguments) as (function, args):
            arguments_, products, weights, shift, log_sum, width, count, *queries, kv_start = args
            b = e.builder
            places = self.places(arguments_, _Queries(*queries))
            scale = e.splat(self.real_field(arguments_, "scale"))
            shifts, sums = e.load_vector(shift), e.load_vector(log_sum)

            def each(k: Value, _: list[Value]) -> None:
                place = e.at(weights, e.mul(k, width))
                kv_index = e.add(kv_start, k)
                if self.plain:
                    weight = e.load_vector(place)
                    allowed = places.inside(kv_index, e.const(0.0)).condition(self.mask)
                else:
                    product = e.load_vector(e.at(products, e.mul(k, width)))
                    inner = places.inside(kv_index, b.fmul(product, scale))
                    score = inner.floats(self.score)
                    distance = b.fsub(b.fsub(score, shifts), sums)
                    weight = vector_math.exp_flushed(e, distance)
                    allowed = b.fcmp_unordered("!=", score, e.const(-math.inf))
                    if masked:
                        allowed = b.and_(allowed, inner.condition(self.mask))
                e.store_vector(b.select(allowed, weight, e.const(-0.0)), place)

            if not self.plain:
                places.hoist(self.score)
            if masked:
                places.hoist(self.mask)
            e.loop(0, count, 1, [], each)
        return function

    def dropout(self) -> Value:
        """One vector of queries: the factors of its weights."""
        e = self.e
        arguments = [POINTER, POINTER, *[INT64] * 6]
        with e.function("dropout", arguments) as (function, args):
            arguments_, factors, width, count, *queries, kv_start = args
            places = self.places(arguments_, _Queries(*queries))
            e.loop(
                0, count, 1, [],
                lambda k, _: e.store_vector(
                    self.drop(arguments_, places, e.add(kv_start, k)),
                    e.at(factors, e.mul(k, width)),
                ),
            )  # fmt: skip
        return function

    def places(self, arguments: Value, queries: _Queries) -> Expressions:
        """Where the lanes are; those beyond the last row repeat it."""
        e, b = self.e, self.e.builder
        last = self.lane_integers(e.sub(self.field(arguments, "q_len"), 1))
        numbers = e.lane_numbers(ir.IntType(self.int_bits))
        row = b.add(self.lane_integers(queries.first_row), numbers)
        row = b.select(b.icmp_signed("<", row, last), row, last)
        variables = {"batch": queries.batch, "head": queries.head, "q_index": row}
        return Expressions(e, self.tables(arguments), variables, self.int_bits)

    def forbidden(self, weight: Value) -> Value:
        """Which lanes' pairs are forbidden: -0.0 has a bit of its own."""
        e = self.e
        return e.builder.icmp_signed("==", e.as_bits(weight), e.as_bits(e.const(-0.0)))

    # dS and dX, one block of keys

    def score_gradients(self, vectors: int) -> Value:
        """dS[k, :] = P * (f * V[k, :] . packed dO - delta), times scale if no mod is between.

        With dropout, P becomes f * P.
        """
        e = self.e
        arguments = [*[POINTER] * 7, *[INT64] * 3]
        with e.function(f"score_gradients_{vectors}", arguments) as (function, args):
            (arguments_, value, packed, delta, weights, factors, out,
             value_row, v_head_dim, count) = args  # fmt: skip
            b = e.builder
            scale = e.splat(self.real_field(arguments_, "scale"))
            means = vectors_at(e, delta, vectors)

            def gradient(place: Value, product: Value, mean: Value) -> Value:
                weight = e.load_vector(e.at(weights, place))
                if self.spec.dropout:
                    factor = e.load_vector(e.at(factors, place))
                    product = b.fmul(product, factor)
                    e.store_vector(b.fmul(weight, factor), e.at(weights, place))
                share = weight if self.chained else b.fmul(weight, scale)
                found = b.fmul(share, b.fsub(product, mean))
                if self.may_forbid:
                    found = b.select(self.forbidden(weight), e.const(0.0), found)
                return found

            def finish(k: Value, products: list[Value], _: list[Value]) -> list[Value]:
                for n, product in enumerate(products):
                    place = e.add(e.mul(k, vectors * e.vector_bytes), n * e.vector_bytes)
                    found = gradient(place, product, means[n % vectors])
                    e.store_vector(found, e.at(out, place))
                return []

            dot_rows(
                e, value, value_row, count, packed, vectors, v_head_dim, self.shape.keys, [], finish
            )
        return function

    def chain(self) -> Value:
        """One vector of queries: table gradients from dS, then dX in its place."""
        e = self.e
        arguments = [*[POINTER] * 5, *[INT64] * 7]
        with e.function("chain", arguments) as (function, args):
            arguments_, task, products, weights, grads, width, count, *queries, kv_start, rows = (
                args
            )
            b = e.builder
            places = self.places(arguments_, _Queries(*queries))
            scale = e.splat(self.real_field(arguments_, "scale"))
            views = self.table_gradients(arguments_, task)
            real_lanes = b.icmp_signed(
                "<", e.lane_numbers(ir.IntType(self.int_bits)), self.lane_integers(rows)
            )
            fixed = [load for load in self.loads if _is_fixed(load)]
            slopes = {load: derivative(self.score, load) for load in self.loads}

            def each(k: Value, sums: list[Value]) -> list[Value]:
                at = e.mul(k, width)
                found = e.load_vector(e.at(grads, at))
                product = b.fmul(e.load_vector(e.at(products, at)), scale)
                forbidden = self.forbidden(e.load_vector(e.at(weights, at)))
                counts = b.and_(b.not_(forbidden), real_lanes)
                inner = places.inside(e.add(kv_start, k), product)
                following: list[Value] = []
                for load, slope in slopes.items():
                    share = b.select(counts, b.fmul(found, inner.floats(slope)), e.const(0.0))
                    if load in fixed:
                        following.append(b.fadd(sums[len(following)], share))
                    else:
                        self.scatter(inner, load, views[load.table], share)
                turned = b.fmul(b.fmul(found, scale), inner.floats(self.slope))
                e.store_vector(b.select(forbidden, e.const(0.0), turned), e.at(grads, at))
                return following

            places.hoist(self.score)
            sums = e.loop(0, count, 1, [e.const(0.0)] * len(fixed), each)
            for load, total in zip(fixed, sums, strict=True):
                self.scatter(places, load, views[load.table], total)
        return function

    def scatter(self, places: Expressions, load: Load, view: TableView, share: Value) -> None:
        """Add each lane's share where it read the table, one lane after the other."""
        e, b = self.e, self.e.builder
        wide = next(table.wide for table in self.wanted if table.name == load.table)
        kind = DOUBLE if wide else e.real

        def add(pointer: Value, number: Value) -> None:
            if kind != e.real:
                number = b.fpext(number, kind)
            e.store(b.fadd(e.load(pointer, kind), number), pointer, 1)

        uniform, varying = places.place(load, view)
        start = e.at(view.pointer, uniform)
        shares = [e.extract(share, lane) for lane in range(e.lanes)]
        if varying is None:
            while len(shares) > 1:
                shares = [b.fadd(*pair) for pair in zip(shares[::2], shares[1::2], strict=True)]
            add(start, shares[0])
            return
        for lane, number in enumerate(shares):
            add(e.at(start, e.extract(varying, lane)), number)

    def table_gradients(self, arguments: Value, task: Value) -> dict[str, TableView]:
        """The task's copies of the gradients of tables, as the expressions index the tables."""
        e = self.e
        views = self.tables(arguments)
        word = len(self.fields) + sum(1 + 2 * table.ndim for table in self.spec.tables)
        found = {}
        for n, table in enumerate(self.wanted):
            view = views[table.name]
            base, *strides = (
                e.load(e.at(arguments, COUNTER_BYTES + WORD * (word + i)), INT64, WORD)
                for i in range(1 + view.spec.ndim)
            )
            word += 1 + len(strides)
            copy = e.load(e.at(task, WORD * (len(TASK) + n)), INT64, WORD)
            pointer = e.at(e.pointer(base), copy)
            found[table.name] = TableView(view.spec, pointer, view.sizes, tuple(strides))
        return found

    # dQ += dX^T K, transposed

    def query_sums(self, vectors: int) -> Value:
        """Add one block of keys to dQ."""
        e = self.e
        arguments = [*[POINTER] * 4, *[INT64] * 3]
        with e.function(f"query_sums_{vectors}", arguments) as (function, args):
            key, grads, _, sums, key_row, head_dim, count = args

            def finish(d: Value, found: list[Value]) -> None:
                self.advance(e.at(sums, e.mul(d, vectors * e.vector_bytes)), found)

            combine_rows(e, key, key_row, count, grads, vectors, head_dim, self.shape.keys, finish)
        return function

    def selected_query_sums(self, vectors: int) -> Value:
        """The same for keys that are not all finite: forbidden pairs are left out."""
        e = self.e
        arguments = [*[POINTER] * 4, *[INT64] * 3]
        with e.function(f"selected_query_sums_{vectors}", arguments) as (function, args):
            key, grads, weights, sums, key_row, head_dim, count = args
            b = e.builder

            def column(d: Value, _: list[Value]) -> None:
                start = e.at(key, e.mul(d, e.real_bytes))

                def step(k: Value, totals: list[Value]) -> list[Value]:
                    x = e.splat(e.load(e.at(start, e.mul(k, key_row)), e.real, e.real_bytes))
                    pairs = zip(
                        vectors_at(e, grads, vectors, k),
                        vectors_at(e, weights, vectors, k),
                        totals,
                        strict=True,
                    )
                    return [
                        b.select(self.forbidden(weight), old, e.fma(x, grad, old))
                        for grad, weight, old in pairs
                    ]

                found = e.loop(0, count, 1, [e.const(0.0)] * vectors, step)
                self.advance(e.at(sums, e.mul(d, vectors * e.vector_bytes)), found)

            e.loop(0, head_dim, 1, [], column)
        return function

    def advance(self, place: Value, found: list[Value]) -> None:
        e = self.e
        for n, vector in enumerate(found):
            at = e.at(place, n * e.vector_bytes)
            old = e.load_vector(at, aligned=False)
            e.store_vector(e.builder.fadd(old, vector), at, aligned=False)

    # dV += (f P) dO and dK += dX Q

    def column(self, vectors: int, v: Value, columns: Value) -> tuple[Value, Value]:
        """Where vector v of a turned row lies: bytes to that of row 0, and from row to row.

        As many neighbouring vectors as fit the registers are the columns of one matrix; those
        that are left over are matrices of one column.
        """
        e, b = self.e, self.e.builder
        together = self.shape.vectors
        size = vectors * e.lanes * e.vector_bytes
        beside = b.srem(v, e.index(together))
        start = e.add(e.mul(e.sub(v, beside), size), e.mul(beside, e.vector_bytes))
        among = e.below(v, e.round_down(columns, together))
        return (
            b.select(among, start, e.mul(v, size)),
            b.select(among, e.index(together * e.vector_bytes), e.index(e.vector_bytes)),
        )

    def turn(self, vectors: int) -> Value:
        """Packed rows side by side again, for products over queries."""
        e = self.e
        with e.function(f"turn_{vectors}", [POINTER, POINTER, INT64]) as (function, args):
            packed, out, columns = args

            def each(v: Value, _: list[Value]) -> None:
                start, row = self.column(vectors, v, columns)
                first = e.at(packed, e.mul(v, e.lanes * vectors * e.vector_bytes))
                for j in range(vectors):
                    tile = [
                        e.load_vector(e.at(first, (i * vectors + j) * e.vector_bytes))
                        for i in range(e.lanes)
                    ]
                    for i, vector in enumerate(e.transpose(tile)):
                        to = e.at(out, start, e.mul(row, j * e.lanes + i))
                        e.store_vector(vector, to)

            e.loop(0, columns, 1, [], each)
        return function

    def key_sums(self, vectors: int) -> Value:
        """sums[k, :] += sum_q left[k, q] * rows[q, :], for the rows that there are."""
        e = self.e
        arguments = [*[POINTER] * 4, *[INT64] * 4]
        with e.function(f"key_sums_{vectors}", arguments) as (function, args):
            left, rows, _, sums, sum_row, columns, count, row_count = args
            size = vectors * e.lanes * e.vector_bytes

            def tile(together: int, keys: int) -> Callable[[Value, list[Value]], None]:
                def body(v: Value, _: list[Value]) -> None:
                    first = e.at(sums, e.mul(v, e.vector_bytes))

                    def finish(k: Value, found: list[Value], _: list[Value]) -> list[Value]:
                        for i in range(0, len(found), together):
                            row = e.mul(e.add(k, i // together), sum_row)
                            self.advance(e.at(first, row), found[i : i + together])
                        return []

                    dot_rows(
                        e, left, e.index(vectors * e.vector_bytes), count,
                        e.at(rows, e.mul(v, size)), together, row_count, keys, [], finish,
                    )  # fmt: skip

                return body

            together, keys = self.shape.vectors, self.shape.keys
            whole = e.round_down(columns, together)
            e.loop(0, whole, together, [], tile(together, keys))
            e.loop(whole, columns, 1, [], tile(1, keys * together))
        return function

    def selected_key_sums(self, vectors: int) -> Value:
        """The same for rows that are not all finite: forbidden pairs are left out."""
        e = self.e
        arguments = [*[POINTER] * 4, *[INT64] * 4]
        with e.function(f"selected_key_sums_{vectors}", arguments) as (function, args):
            left, rows, weights, sums, sum_row, columns, count, row_count = args
            b = e.builder
            mark = ir.Constant(e.whole, 1 << 8 * e.real_bytes - 1)

            def each(v: Value, _: list[Value]) -> None:
                start, row = self.column(vectors, v, columns)

                def key(k: Value, _: list[Value]) -> None:
                    across = e.mul(k, vectors * e.vector_bytes)

                    def step(q: Value, totals: list[Value]) -> list[Value]:
                        at = e.add(across, e.mul(q, e.real_bytes))
                        bits = e.load(e.at(weights, at), e.whole, e.real_bytes)
                        x = e.splat(e.load(e.at(left, at), e.real, e.real_bytes))
                        vector = e.load_vector(e.at(rows, start, e.mul(q, row)))
                        allowed = b.icmp_unsigned("!=", bits, mark)
                        return [b.select(allowed, e.fma(x, vector, totals[0]), totals[0])]

                    found = e.loop(0, row_count, 1, [e.const(0.0)], step)
                    place = e.at(sums, e.mul(k, sum_row), e.mul(v, e.vector_bytes))
                    self.advance(place, found)

                e.loop(0, count, 1, [], key)

            e.loop(0, columns, 1, [], each)
        return function

    # Rows in

    def pack(self, dtype: str) -> Value:
        """One vector of rows, transposed; lanes beyond the last row repeat it."""
        e = self.e
        arguments = [POINTER, *[INT64] * 5, POINTER, INT64]
        with e.function(f"pack_{dtype}", arguments) as (function, args):
            pointer, row, element, first, last, dim, packed, width = args
            rows = [
                e.at(pointer, e.mul(e.least(e.add(first, i), last), row)) for i in range(e.lanes)
            ]
            pack_rows(
                e, rows, element, dim, dtype,
                lambda d, vector: e.store_vector(vector, e.at(packed, e.mul(d, width))),
            )  # fmt: skip
        return function

    def finish_rows(self) -> Value:
        """One vector of queries: delta = rowsum(dO * O) - d lse, which `delta` holds before."""
        e = self.e
        with e.function("finish_rows", [*[POINTER] * 3, INT64, INT64]) as (function, args):
            grad_out, out, delta, dim, width = args

            def step(d: Value, total: list[Value]) -> list[Value]:
                a, b = (e.load_vector(e.at(rows, e.mul(d, width))) for rows in (grad_out, out))
                return [e.fma(a, b, total[0])]

            (total,) = e.loop(0, dim, 1, [e.const(0.0)], step)
            e.store_vector(e.builder.fsub(total, e.load_vector(delta)), delta)
        return function

    # Sums out

    def add_parts(self) -> Value:
        """out[i] = sum over parts, in their order, rounded: `count` numbers side by side."""
        e = self.e
        dtype = self.grad_dtype
        arguments = [POINTER, INT64, INT64, INT64, POINTER]
        with e.function("add_parts", arguments) as (function, args):
            parts, stride, number, count, out = args
            b = e.builder

            def total(lanes: int) -> Callable[[Value, list[Value]], None]:
                def body(i: Value, _: list[Value]) -> None:
                    start = e.at(parts, e.mul(i, e.real_bytes))

                    def load(n: Value) -> Value:
                        return storage.load(e, e.at(start, e.mul(n, stride)), real_dtype(e), lanes)

                    (found,) = e.loop(
                        1, number, 1, [load(e.index(0))], lambda n, s: [b.fadd(s[0], load(n))]
                    )
                    storage.store(e, found, e.at(out, e.mul(i, ITEM_BYTES[dtype])), dtype)

                return body

            whole = e.round_down(count, e.lanes)
            e.loop(0, whole, e.lanes, [], total(e.lanes))
            e.loop(whole, count, 1, [], total(0))
        return function

    def unpack(self) -> Value:
        """One vector of queries: rows of a part of dQ; lanes beyond the last row write it again."""
        e = self.e
        arguments = [POINTER, INT64, POINTER, INT64, INT64, INT64]
        with e.function("unpack", arguments) as (function, args):
            sums, width, out, first, last, dim = args
            row = e.mul(dim, e.real_bytes)
            rows = [e.at(out, e.mul(e.least(e.add(first, i), last), row)) for i in range(e.lanes)]
            unpack_rows(
                e, rows, dim, real_dtype(e), lambda d: e.load_vector(e.at(sums, e.mul(d, width)))
            )
        return function

    # One block of queries, one task, all tasks

    def meet(self, vectors: int, parts: dict[str, Value]) -> Value:
        """One block of queries and the keys of one task."""
        e = self.e
        products, grads = self.products(vectors), self.score_gradients(vectors)
        query_sums, key_sums = self.query_sums(vectors), self.key_sums(vectors)
        if self.may_forbid:
            selected_query_sums = self.selected_query_sums(vectors)
            selected_key_sums = self.selected_key_sums(vectors)
        turn = self.turn(vectors)
        with e.function(f"meet_{vectors}", [POINTER] * 4) as (function, args):
            arguments, task, block, scratch = args
            b = e.builder
            batch, kv_head, start, stop, split = self.record(task, TASK)
            _, head, first_row, first_run, last_run = self.record(block, BLOCK)
            num_heads, q_len, head_dim, v_head_dim = (
                self.field(arguments, n) for n in ("num_heads", "q_len", "head_dim", "v_head_dim")
            )
            area = {n: e.at(scratch, self.field(arguments, f"area_{n}")) for n in AREAS}
            width = vectors * e.vector_bytes
            last = e.sub(q_len, 1)
            rows_left = e.least(e.sub(q_len, first_row), vectors * e.lanes)
            row = e.add(e.mul(e.add(e.mul(batch, num_heads), head), q_len), first_row)

            def each_vector(body: Callable[[Value, Value], None]) -> None:
                """`body(offset, first)`: bytes to the vector, and its first query of the block."""
                e.loop(
                    0, vectors, 1, [],
                    lambda j, _: body(e.mul(j, e.vector_bytes), e.mul(j, e.lanes)),
                )  # fmt: skip

            def begin(offset: Value, first: Value) -> None:
                first = e.add(first_row, first)

                def pack(name: str, rows: Rows, dim: Value, to: Value) -> None:
                    where = (first, last, dim, e.at(to, offset), e.index(width))
                    b.call(parts[f"pack {name}"], [rows.pointer, rows.row, rows.element, *where])

                for name, dim, to in (
                    ("query", head_dim, "query"),
                    ("grad_out", v_head_dim, "grad_out"),
                    ("out", v_head_dim, "query_sums"),
                ):
                    rows = self.operand(arguments, name, batch, head)
                    pack(self.dtypes[name], rows, dim, area[to])
                for name, to in (("shift", "shift"), ("log_sum", "log_sum"), ("grad_lse", "delta")):
                    head_start = e.mul(e.sub(row, first_row), e.real_bytes)
                    pointer = e.at(self.pointer_field(arguments, name), head_start)
                    column = Rows(pointer, e.index(e.real_bytes), e.index(0))
                    pack(real_dtype(e), column, e.index(1), area[to])
                held = (area[n] for n in ("grad_out", "query_sums", "delta"))
                at = [e.at(pointer, offset) for pointer in held]
                b.call(parts["finish_rows"], [*at, v_head_dim, e.index(width)])

            each_vector(begin)
            columns = {}
            for name, dim in (("query", head_dim), ("grad_out", v_head_dim)):
                columns[name] = b.sdiv(e.add(dim, e.lanes - 1), e.index(e.lanes))
                end = e.mul(columns[name], e.lanes * width)
                self.fill(area[name], e.mul(dim, width), end)
            self.fill(area["query_sums"], e.index(0), e.mul(head_dim, width))
            b.call(turn, [area["query"], area["query_rows"], columns["query"]])
            b.call(turn, [area["grad_out"], area["grad_rows"], columns["grad_out"]])
            finite: Value = ir.Constant(BIT, 1)
            if self.may_forbid:
                shape = e.index(width), vectors * e.lanes
                finite = b.and_(
                    b.call(
                        parts["all_finite"], [area["query"], shape[0], head_dim, e.index(shape[1])]
                    ),
                    b.call(
                        parts["all_finite"],
                        [area["grad_out"], shape[0], v_head_dim, e.index(shape[1])],
                    ),
                )
            key, value = (self.operand(arguments, n, batch, kv_head) for n in ("key", "value"))
            kv_row = e.mul(
                e.add(
                    e.mul(batch, b.sdiv(num_heads, self.field(arguments, "group_size"))), kv_head
                ),
                self.field(arguments, "kv_len"),
            )

            def block_of_keys(kv_start: Value, keys: Value, partial: Value) -> None:
                k, key_row = self.block_of(arguments, "key", key, kv_start, keys, head_dim,
                                           area["key_copy"], parts)  # fmt: skip
                v, value_row = self.block_of(arguments, "value", value, kv_start, keys, v_head_dim,
                                             area["value_copy"], parts)  # fmt: skip
                out = area["weights"] if self.plain else area["products"]
                held = (area[n] for n in ("query", "shift", "log_sum"))
                b.call(products, [arguments, k, *held, out, key_row, head_dim, keys])

                def by_vector(name: str, *areas: str, first_arguments: tuple[Value, ...] = (),
                              more: Callable[[Value], tuple[Value, ...]] = lambda first: ()) -> None:  # fmt: skip
                    def body(offset: Value, first: Value) -> None:
                        at = [e.at(area[n], offset) for n in areas]
                        where = (batch, head, e.add(first_row, first), kv_start)
                        b.call(
                            parts[name],
                            [arguments, *first_arguments, *at, e.index(width), keys, *where,
                             *more(first)],
                        )  # fmt: skip

                    each_vector(body)

                def weigh(name: str) -> None:
                    by_vector(name, "products", "weights", "shift", "log_sum")

                if self.mask == TRUE:
                    if not self.plain:
                        weigh("full")
                elif self.plain:
                    with b.if_then(partial):
                        weigh("partial")
                else:
                    e.choose(partial, lambda: weigh("partial"), lambda: weigh("full"))
                if self.spec.dropout:
                    by_vector("dropout", "factors")
                held = (area[n] for n in ("grad_out", "delta", "weights", "factors", "score_grads"))
                b.call(grads, [arguments, v, *held, value_row, v_head_dim, keys])
                if self.chained:
                    by_vector(
                        "chain", "products", "weights", "score_grads", first_arguments=(task,),
                        more=lambda first: (e.sub(rows_left, first),),
                    )  # fmt: skip

                def add_query(which: Value) -> None:
                    held = (area[n] for n in ("score_grads", "weights", "query_sums"))
                    b.call(which, [k, *held, key_row, head_dim, keys])

                def add_keys(which: Value) -> None:
                    for name, left, rows, queries in (
                        ("value", "weights", "grad_rows", "grad_out"),
                        ("key", "score_grads", "query_rows", "query"),
                    ):
                        sum_row = self.field(arguments, f"{name}_sum_row")
                        sums = e.at(
                            self.pointer_field(arguments, f"{name}_sums"),
                            e.mul(e.add(kv_row, kv_start), sum_row),
                        )
                        held = (area[left], area[rows], area["weights"], sums, sum_row)
                        b.call(which, [*held, columns[queries], keys, rows_left])

                def add() -> None:
                    add_query(query_sums)
                    add_keys(key_sums)

                def add_selected() -> None:
                    keys_finite = b.call(parts["all_finite"], [k, key_row, keys, head_dim])
                    e.choose(
                        keys_finite,
                        lambda: add_query(query_sums),
                        lambda: add_query(selected_query_sums),
                    )
                    e.choose(
                        finite, lambda: add_keys(key_sums), lambda: add_keys(selected_key_sums)
                    )

                if not self.may_forbid:
                    add()
                elif self.plain:
                    e.choose(partial, add_selected, add)
                else:
                    add_selected()

            runs = self.pointer_field(arguments, "runs")

            def each_run(r: Value, _: list[Value]) -> None:
                first, end, kind = self.record(e.at(runs, e.mul(r, WORD * len(RUN))), RUN)
                partial = b.icmp_signed("!=", kind, e.index(0))
                end = e.least(end, stop)
                e.loop(
                    self.most(first, start), end, BLOCK_KV, [],
                    lambda k, _: block_of_keys(k, e.least(BLOCK_KV, e.sub(end, k)), partial),
                )  # fmt: skip

            e.loop(first_run, last_run, 1, [], each_run)
            part = e.at(
                self.pointer_field(arguments, "query_parts"),
                e.mul(split, self.field(arguments, "part_bytes")),
                e.mul(row, head_dim, e.real_bytes),
            )

            def end(offset: Value, first: Value) -> None:
                sums = e.at(area["query_sums"], offset)
                where = (part, first, e.sub(rows_left, 1), head_dim)
                b.call(parts["unpack"], [sums, e.index(width), *where])

            each_vector(end)
        return function

    def fill(self, pointer: Value, start: Value, stop: Value) -> None:
        """Zeros from byte `start` to byte `stop`, whole vectors."""
        e = self.e
        e.loop(
            start, stop, e.vector_bytes, [],
            lambda i, _: e.store_vector(e.const(0.0), e.at(pointer, i), aligned=False),
        )  # fmt: skip

    def most(self, a: Value, b: Value) -> Value:
        return self.e.builder.select(self.e.below(a, b), b, a)

    def block_of(
        self,
        arguments: Value,
        name: str,
        rows: Rows,
        kv_start: Value,
        keys: Value,
        dim: Value,
        copy: Value,
        parts: dict[str, Value],
    ) -> tuple[Value, Value]:
        """A block of K or V with adjacent elements: where it lies, or copied."""
        e, b = self.e, self.e.builder
        here = e.at(rows.pointer, e.mul(kv_start, rows.row))

        def side_by_side() -> None:
            copy_rows = parts[f"copy {self.dtypes[name]}"]
            b.call(copy_rows, [here, rows.row, rows.element, keys, dim, copy])

        if self.dtypes[name] != real_dtype(e):
            side_by_side()
            return copy, e.mul(dim, e.real_bytes)
        needed = b.icmp_signed("!=", self.field(arguments, f"copy_{name}"), e.index(0))
        with b.if_then(needed, likely=False):
            side_by_side()
        return b.select(needed, copy, here), b.select(needed, e.mul(dim, e.real_bytes), rows.row)

    def range_of_keys(self, parts: dict[str, Value]) -> Value:
        """One task."""
        e = self.e
        few, many = (self.meet(v, parts) for v in (1, self.shape.vectors))
        with e.function("range_of_keys", [POINTER] * 3) as (function, args):
            arguments, task, scratch = args
            b = e.builder
            batch, kv_head, start, stop, _ = self.record(task, TASK)
            group_size, num_heads, q_len, kv_len, q_blocks, splits = (
                self.field(arguments, n)
                for n in ("group_size", "num_heads", "q_len", "kv_len", "q_blocks", "splits")
            )
            kv_head_row = e.add(e.mul(batch, b.sdiv(num_heads, group_size)), kv_head)
            kv_row = e.add(e.mul(kv_head_row, kv_len), start)
            keys = e.sub(stop, start)
            dims = {"key": self.field(arguments, "head_dim"),
                    "value": self.field(arguments, "v_head_dim")}  # fmt: skip
            sums = {}
            for name in dims:
                row = self.field(arguments, f"{name}_sum_row")
                pointer = self.pointer_field(arguments, f"{name}_sums")
                sums[name] = e.at(pointer, e.mul(kv_row, row)), row
                self.fill(sums[name][0], e.index(0), e.mul(keys, row))
            blocks = self.pointer_field(arguments, "blocks")
            runs = self.pointer_field(arguments, "runs")
            first_head = e.mul(kv_head, group_size)

            def keys_of_run(r: Value, found: list[Value]) -> list[Value]:
                first, end, _ = self.record(e.at(runs, e.mul(r, WORD * len(RUN))), RUN)
                met = e.sub(e.least(end, stop), self.most(first, start))
                return [e.add(found[0], self.most(met, e.index(0)))]

            def each_block(n: Value, _: list[Value]) -> None:
                block = e.at(blocks, e.mul(n, WORD * len(BLOCK)))
                _, _, first_row, first_run, last_run = self.record(block, BLOCK)
                (met,) = e.loop(first_run, last_run, 1, [e.index(0)], keys_of_run)
                with b.if_then(e.below(0, met)):
                    call = [arguments, task, block, scratch]
                    e.choose(
                        e.below(e.sub(q_len, first_row), e.lanes + 1),
                        lambda: b.call(few, call), lambda: b.call(many, call),
                    )  # fmt: skip

            head_row = e.add(e.mul(batch, num_heads), first_head)
            e.loop(
                e.mul(head_row, q_blocks), e.mul(e.add(head_row, group_size), q_blocks), 1, [],
                each_block,
            )  # fmt: skip

            item = ITEM_BYTES[self.grad_dtype]
            for name, dim in dims.items():
                pointer, row = sums[name]
                out = e.at(self.pointer_field(arguments, f"d_{name}"), e.mul(kv_row, dim, item))
                rounds = b.icmp_signed("!=", self.field(arguments, f"round_{name}"), e.index(0))
                with b.if_then(rounds):
                    self.round_rows(pointer, row, keys, dim, out, parts["add_parts"])
            adds = b.icmp_signed("!=", self.field(arguments, "add_query"), e.index(0))
            with b.if_then(adds):
                counter = b.bitcast(
                    e.at(self.pointer_field(arguments, "finished"), e.mul(kv_head_row, WORD)),
                    INT64.as_pointer(),
                )
                before = b.atomic_rmw("add", counter, e.index(1), "acq_rel")
                with b.if_then(b.icmp_signed("==", before, e.sub(splits, 1))):
                    place = e.mul(head_row, q_len, dims["key"])
                    b.call(
                        parts["add_parts"],
                        [
                            e.at(self.pointer_field(arguments, "query_parts"),
                                 e.mul(place, e.real_bytes)),
                            self.field(arguments, "part_bytes"),
                            splits,
                            e.mul(group_size, q_len, dims["key"]),
                            e.at(self.pointer_field(arguments, "d_query"), e.mul(place, item)),
                        ],
                    )  # fmt: skip
        return function

    def round_rows(
        self, sums: Value, row: Value, count: Value, dim: Value, out: Value, add_parts: Value
    ) -> None:
        """Rows of sums as the gradient's type, side by side."""
        e = self.e
        out_row = e.mul(dim, ITEM_BYTES[self.grad_dtype])

        def each(k: Value, _: list[Value]) -> None:
            at = e.at(sums, e.mul(k, row)), e.at(out, e.mul(k, out_row))
            e.builder.call(add_parts, [at[0], e.index(0), e.index(1), dim, at[1]])

        e.loop(0, count, 1, [], each)

    def all_tasks(self) -> None:
        e = self.e
        parts = {
            "finish_rows": self.finish_rows(),
            "unpack": self.unpack(),
            "add_parts": self.add_parts(),
        }
        for dtype in sorted({real_dtype(e), *self.dtypes.values()}):
            parts[f"pack {dtype}"] = self.pack(dtype)
        for dtype in sorted({self.dtypes["key"], self.dtypes["value"]}):
            parts[f"copy {dtype}"] = copy_rows(e, dtype)
        if not self.plain:
            parts["full"] = self.weigh("full", masked=False)
        if self.mask != TRUE:
            parts["partial"] = self.weigh("partial", masked=True)
        if self.spec.dropout:
            parts["dropout"] = self.dropout()
        if self.chained:
            parts["chain"] = self.chain()
        if self.may_forbid:
            parts["all_finite"] = all_finite(e)
        task_of = self.range_of_keys(parts)

        def run(arguments: Value, number: Value, scratch: Value) -> None:
            size = WORD * (len(TASK) + len(self.wanted))
            task = e.at(self.pointer_field(arguments, "tasks"), e.mul(number, size))
            e.builder.call(task_of, [arguments, task, scratch])

        self.job(run)


def _is_fixed(load: Load) -> bool:
    """Whether all pairs of a block read the same entry."""
    return not {"q_index", "kv_index", "score"} & set().union(*map(variables, load.indices))
