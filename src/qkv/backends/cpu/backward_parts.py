"""The backward kernel for float32 and float16 on machines with bfloat16 tiles.

It computes what `backward` says, with all five products as sums of products of parts
(`part_rows`). Each of K, Q and dO is a factor twice, once along its rows and once across them, and
lies in parts both ways; so does dX, while P and V are needed one way:

    S[k, q]    =  sum_d K[k, d] . Q[d, q]          K as tiles, Q packed
    dP[k, q]   =  sum_d V[k, d] . dO[d, q]         V as tiles, dO packed
    dQ[d, q]  +=  sum_k K[d, k] . dX[k, q]         K by columns, dX packed as pairs of keys
    dV[k, d]  +=  sum_q P[k, q] . dO[q, d]         P as tiles, dO packed as pairs of queries
    dK[k, d]  +=  sum_q dX[k, q] . Q[q, d]         dX as tiles, Q packed as pairs of queries

A block of queries is one tile across, so that each row of P and dX is one row of a tile. Several
blocks are packed before they meet a block of keys, which is split once for all of them.

delta is a product of parts as well, of O and dO, added up in the order of dP: if one key has all
the weight they are equal. dX is -0.0 where the mask forbids the pair and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

from llvmlite import ir

from qkv.backends.cpu import matrix_unit, vector_math, without_parts
from qkv.backends.cpu.backward import Backward
from qkv.backends.cpu.backward_block import BLOCK_KV, BackwardKey
from qkv.backends.cpu.backward_rows import MeetingOfKeys
from qkv.backends.cpu.bfloat16 import CHUNK, chunks, whole
from qkv.backends.cpu.frame import WORD, Rows, Shape
from qkv.backends.cpu.ir import BIT, INT16, INT64, POINTER, Value
from qkv.backends.cpu.matrix_unit import TILE_BYTES, TILE_ROWS
from qkv.backends.cpu.packing import copy_rows
from qkv.backends.cpu.part_rows import FLOAT_BYTES, PartRows
from qkv.backends.cpu.products import vectors_at
from qkv.backends.cpu.storage import load, real_dtype
from qkv.problem.expressions import TRUE
from qkv.problem.tiles import TileKind

_OF_BLOCK = ("query_packed", "query_turned", "grad_packed", "grad_turned", "query_sums", "rows")
"""What each of the blocks of queries has."""
_ROWS = ("lse", "lse_rest", "delta", "grad_lse", "query_odd", "grad_odd")
_SHARED = (
    "odd_keys", "odd_values", "weights", "score_grads", "products", "factors",
    "weight_rows", "grad_rows", "grad_pairs", "key_rows", "key_columns", "value_rows", "copy",
    "key_sums", "value_sums",
)  # fmt: skip


_PANEL = 2
"""Vectors of a row of a tile."""
_KEYS_BESIDE = 8
"""Whose weights are computed beside one step of a product."""


class _OfPairs(NamedTuple):
    """What is known and computed of a block of queries and one of keys."""

    arguments: Value
    rows: Value
    weights: Value
    grads: Value
    factors: Value
    weight_rows: Value
    grad_rows: Value
    grad_pairs: Value


_OF_PAIRS = (
    "rows", "weights", "score_grads", "factors", "weight_rows", "grad_rows", "grad_pairs",
)  # fmt: skip
"""The areas of these."""
_Pair = Callable[[Value, int], tuple[Value, Value]]
"""Of a key and a vector of queries, P and dX."""


class _Product(NamedTuple):
    """A product along the elements of rows of both factors, and the areas it needs."""

    left: str
    right: str
    rows: str
    packed: str
    out: str
    odd: str
    lanes: str


def part_areas(shape: Shape, head_dim: int, v_head_dim: int, together: int) -> dict[str, int]:
    """Bytes that each area takes, with so many blocks of queries."""
    width, parts = FLOAT_BYTES * shape.block_q, shape.parts
    dim, v_dim = chunks(head_dim), chunks(v_head_dim)
    pairs, scores = BLOCK_KV // 2 * parts * width, BLOCK_KV * width
    keys, values = (2 * parts * BLOCK_KV * d for d in (dim, v_dim))
    key_sums, value_sums = (FLOAT_BYTES * BLOCK_KV * d for d in (dim, v_dim))
    query, grad = (together * parts * width // 2 * d for d in (dim, v_dim))
    odd = without_parts.ODD_BYTES
    shared = (odd, odd, *[2 * scores] * 2, *[scores] * 2, *[pairs] * 3, keys, keys, values,
              max(key_sums, value_sums), key_sums, value_sums)  # fmt: skip
    own = query, query, grad, grad, together * width * dim, together * width * len(_ROWS)
    return dict(zip((*_SHARED, *_OF_BLOCK), (*shared, *own), strict=True))


def emit_backward_parts(key: BackwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = PartBackward(key)
    kernel.all_tasks()
    return str(kernel.e.module)


class PartBackward(Backward):
    area_names = (*_SHARED, *_OF_BLOCK)

    def __init__(self, key: BackwardKey) -> None:
        super().__init__(key)
        self.split = PartRows(self.e, self.shape, BLOCK_KV)
        self.width, self.vectors = self.split.width, self.shape.vectors
        self.panels = PartRows(self.e, replace(self.shape, vectors=_PANEL), BLOCK_KV)
        """Of right factors and sums with keys for rows: a row of a tile is two vectors."""
        self.row_band = self.shape.block_q // CHUNK * self.split.chunk_bytes
        """From the tiles of P or dX of 16 keys to those of the next."""

    # Rows

    def pack_parts(self) -> Value:
        """One vector of rows as pairs of parts; lanes beyond the last row repeat it."""
        e = self.e
        arguments = [POINTER, *[INT64] * 4, POINTER]
        with e.function("pack", arguments, INT64) as (function, args):
            rows, row, first, last, dim, packed = args
            places = [
                e.at(rows, e.mul(e.least(e.add(first, i), last), row)) for i in range(e.lanes)
            ]
            e.builder.ret(self.split.pack(places, dim, packed, None))
        return function

    # P, dS and dX

    def keys_of_block(self, name: str, *, weigh: bool, grade: bool, lay: bool) -> Value:
        """What is done for each pair of one block, of these three.

        `weigh`: P of S. `grade`: dS of P and dP, times scale if no mod is between; P times its
        factor of dropout. `lay`: P and dX in parts.
        """
        e = self.e
        with e.function(name, [*[POINTER] * 8, INT64, INT64]) as (function, args):
            block, start, count = _OfPairs(*args[:8]), *args[8:]

            def chunk(c: Value, _: list[Value]) -> None:
                begin = e.least(e.greater(e.sub(start, e.mul(c, count)), 0), count)
                pair = self.pair(block, c, weigh=weigh, grade=grade, lay=lay)

                def store(k: Value, _: list[Value]) -> None:
                    for j in range(_PANEL):
                        place = self.place_of_pair(k, c, j)
                        for of, x in zip((block.weights, block.grads), pair(k, j), strict=True):
                            e.store_vector(x, e.at(of, place))

                if lay:
                    e.loop(begin, count, 2, [], lambda k, _: self.lay(block, pair, k, c))
                else:
                    e.loop(begin, count, 1, [], store)

            e.loop(0, self.chunks, 1, [], chunk)
            if lay:
                pairs, end = (e.builder.ashr(x, e.index(1)) for x in (count, whole(e, count)))
                odd = e.builder.trunc(e.builder.and_(count, e.index(1)), BIT)
                with e.builder.if_then(odd, likely=False):
                    self.split.drop_second(block.grad_pairs, e.sub(count, 1))
                pairs = e.add(pairs, e.builder.zext(odd, INT64))
                self.split.clear_pairs(block.grad_pairs, pairs, end)
        return function

    def all_beside(self) -> Value:
        """A function `(*_OfPairs, start, *product) -> start`: P and dX of keys from `start` on.

        As many as there is time for while tiles of other blocks are multiplied; gives the first key
        that is left. Keys are counted on from chunk to chunk of queries. `product` are the
        arguments of `matrix_unit.multiply`.
        """
        e = self.e
        arguments = [*[POINTER] * 8, INT64, *[POINTER] * 3, *[INT64] * 3]
        with e.function("all_beside", arguments, INT64) as (function, args):
            block, start, product = _OfPairs(*args[:8]), args[8], args[9:]
            count, pairs = product[4:]
            b, products = e.builder, self.split.products()
            # A step must not go from one chunk to the next.
            whole_steps = b.icmp_signed("==", b.srem(count, e.index(_KEYS_BESIDE)), e.index(0))
            left = e.sub(e.mul(count, self.chunks), start)
            wanted = b.select(whole_steps, b.sdiv(left, e.index(_KEYS_BESIDE)), e.index(0))
            steps = e.least(wanted, matrix_unit.steps_of(e, self.vectors, count, pairs))
            running: list[Any] = []

            def some(step: Value, group: int) -> None:
                """A share of the keys of this step."""
                if group == 0:
                    first = e.add(start, e.mul(step, _KEYS_BESIDE))
                    chunk = b.sdiv(first, count)
                    pair = self.pair(block, chunk, weigh=True, grade=True, lay=True)
                    running[:] = [e.sub(first, e.mul(chunk, count)), chunk, pair]
                first, chunk, pair = running
                units, groups = _KEYS_BESIDE // 2, len(products)
                for n in range(units * group // groups, units * (group + 1) // groups):
                    self.lay(block, pair, e.add(first, 2 * n), chunk)

            matrix_unit.multiply(
                e, product, self.vectors, onto=False, products=products,
                beside=matrix_unit.Beside(steps, some),
            )  # fmt: skip
            b.ret(e.add(start, e.mul(steps, _KEYS_BESIDE)))
        return function

    def place_of_pair(self, k: Value, chunk: Value, j: int) -> Value:
        """Of the scores of a key and a vector of a chunk of queries, in bytes."""
        e = self.e
        return e.add(e.mul(k, self.width), e.mul(chunk, self.panels.width), j * e.vector_bytes)

    def pair(self, of: _OfPairs, chunk: Value, *, weigh: bool, grade: bool, lay: bool) -> _Pair:
        """P and dX of one key and one vector of a chunk of queries."""
        e, b = self.e, self.e.builder
        dropout = bool(self.spec.dropout)
        scale = e.splat(self.real_field(of.arguments, "scale"))
        rows = e.at(of.rows, e.mul(chunk, self.panels.width))
        lse, rest, delta, grad_lse = (
            vectors_at(e, e.at(rows, _ROWS.index(name) * self.width), _PANEL)
            for name in ("lse", "lse_rest", "delta", "grad_lse")
        )

        def pair(k: Value, j: int) -> tuple[Value, Value]:
            place = self.place_of_pair(k, chunk, j)
            weight, found = (e.load_vector(e.at(x, place)) for x in (of.weights, of.grads))
            if weigh:
                distance = b.fsub(b.fsub(b.fmul(weight, scale), lse[j]), rest[j])
                weight = vector_math.exp_flushed(e, distance)
            forbidden = self.forbidden(weight)
            if grade:
                factor = e.load_vector(e.at(of.factors, place)) if dropout else None
                if factor is not None:
                    found = b.fmul(found, factor)
                found = b.fadd(b.fsub(found, delta[j]), grad_lse[j])
                share = weight if self.chained else b.fmul(weight, scale)
                # + 0.0: what is allowed is never -0.0.
                found = e.fma(share, found, e.const(0.0))
                if factor is not None:
                    weight = b.fmul(weight, factor)
            else:
                found = b.fadd(found, e.const(0.0))
            if lay and self.may_forbid and not weigh:
                found = b.select(forbidden, e.const(-0.0), found)
            return weight, found

        return pair

    @property
    def chunks(self) -> int:
        """Of queries: a row of P or dX is a row of as many tiles."""
        return self.vectors // _PANEL

    def lay(self, of: _OfPairs, pair: _Pair, k: Value, chunk: Value) -> None:
        """P and dX of an even key and the next, with a chunk of queries, in parts."""
        e, split = self.e, self.split
        start, grads = self.place_in_rows(k, chunk), []
        for n in range(2):
            vectors = [pair(e.add(k, n), j) for j in range(_PANEL)]
            weight, grad = (split.cut(both) for both in zip(*vectors, strict=True))
            place = e.add(start, n * TILE_BYTES)
            split.put_cut(weight, e.at(of.weight_rows, place))
            split.put_cut(grad, e.at(of.grad_rows, place))
            grads.append(grad)
        packed = e.at(split.packed_row(of.grad_pairs, k), e.mul(chunk, self.panels.width))
        for j in range(_PANEL):
            pairs = [(first[j], second[j]) for first, second in zip(*grads, strict=True)]
            split.put_pairs(pairs, e.at(packed, j * e.vector_bytes))

    def place_in_rows(self, k: Value, chunk: Value) -> Value:
        """Where a row of P or dX begins, in bytes."""
        e, b = self.e, self.e.builder
        band = e.mul(b.sdiv(k, e.index(TILE_ROWS)), self.row_band)
        inside = e.mul(b.and_(k, e.index(TILE_ROWS - 1)), TILE_BYTES)
        return e.add(band, e.mul(chunk, self.split.chunk_bytes), inside)

    # dV and dK

    def add_by_keys(self) -> Value:
        """A function `(left, turned, sums, dim, count)`: a product for each panel of columns."""
        e = self.e
        with e.function("add_by_keys", [*[POINTER] * 3, INT64, INT64]) as (function, args):
            left, turned, sums, dim, count = args

            def panel(d: Value, _: list[Value]) -> None:
                number = e.builder.sdiv(d, e.index(CHUNK))
                right = e.at(turned, e.mul(number, self.chunks * self.panels.panel_bytes))
                out = e.at(sums, e.mul(number, BLOCK_KV * self.panels.width))
                band, pairs = e.index(self.row_band), e.index(self.shape.block_q // 2)
                matrix_unit.multiply(
                    e, (left, right, out, band, count, pairs), _PANEL, onto=True,
                    products=self.split.products(of_weights=True),
                )  # fmt: skip

            e.loop(0, dim, CHUNK, [], panel)
        return function

    def add_odd_rows(self, name: str, dtype: str) -> Value:
        """A function `(*rows, first, last, odd, left, sums, dim, count)`.

        Adds what `turn_rows` left out: the elements without parts of the rows that `odd` marks. A
        factor of -0.0 adds nothing.
        """
        e, split = self.e, self.split
        rows = [POINTER, *[INT64] * 4]
        with e.function(name, [*rows, *[POINTER] * 3, INT64, INT64]) as (function, args):
            source, row, element, first, last, odd, left, sums, dim, count = args
            b = e.builder

            def each(lane: Value, _: list[Value]) -> None:
                vector = b.sdiv(lane, e.index(e.lanes))
                word = e.load(e.at(odd, e.mul(vector, e.vector_bytes)), INT64, WORD)
                bit = b.and_(b.lshr(word, e.sub(lane, e.mul(vector, e.lanes))), e.index(1))
                here = e.at(source, e.mul(e.add(first, lane), row))

                def elements(d: Value, _: list[Value]) -> None:
                    x = load(e, e.at(here, e.mul(d, element)), dtype)
                    marks = split.huge(split.magnitude(e.splat(x)))
                    panel = b.sdiv(d, e.index(CHUNK))
                    inside = e.mul(e.sub(d, e.mul(panel, CHUNK)), FLOAT_BYTES)
                    column = e.at(sums, e.mul(panel, BLOCK_KV * self.panels.width), inside)

                    def key(k: Value, _: list[Value]) -> None:
                        chunk = b.sdiv(lane, e.index(CHUNK))
                        inside = e.mul(e.sub(lane, e.mul(chunk, CHUNK)), 2)
                        place = e.at(left, self.place_in_rows(k, chunk), inside)
                        upper = e.load(place, INT16, 2)
                        weight = load(e, place, "bfloat16")
                        for n in range(1, split.parts):
                            part = load(e, e.at(place, n * matrix_unit.TILE_SIZE), "bfloat16")
                            weight = b.fadd(weight, part)
                        with b.if_then(b.icmp_unsigned("!=", upper, ir.Constant(INT16, 1 << 15))):
                            to = e.at(column, e.mul(k, self.panels.width))
                            total = e.load(to, e.real, FLOAT_BYTES)
                            e.store(e.fma(x, weight, total), to, FLOAT_BYTES)

                    some = b.icmp_unsigned("!=", marks, ir.Constant(marks.type, 0))
                    e.loop(0, b.select(some, count, e.index(0)), 1, [], key)

                marked = b.icmp_signed("!=", bit, e.index(0))
                e.loop(0, b.select(marked, dim, e.index(0)), 1, [], elements)

            e.loop(0, e.add(e.sub(last, first), 1), 1, [], each)
        return function

    def add_sums(self) -> Value:
        """A function `(sums, to, row, dim, count)`: what a block of keys got, to all it got."""
        e = self.e
        with e.function("add_sums", [*[POINTER] * 2, *[INT64] * 3]) as (function, args):
            sums, to, row, dim, count = args

            def key(k: Value, _: list[Value]) -> None:
                start, end = e.at(sums, e.mul(k, self.panels.width)), e.at(to, e.mul(k, row))

                def elements(d: Value, _: list[Value]) -> None:
                    panel = e.round_down(d, CHUNK)
                    inside = e.mul(e.sub(d, panel), FLOAT_BYTES)
                    place = e.at(start, e.mul(panel, BLOCK_KV * self.panels.width // CHUNK), inside)
                    self.advance(e.at(end, e.mul(d, FLOAT_BYTES)), [e.load_vector(place)])

                e.loop(0, dim, e.lanes, [], elements)

            e.loop(0, count, 1, [], key)
        return function

    # One task

    def parts(self) -> dict[str, Value]:
        e, split, real = self.e, self.split, real_dtype(self.e)
        multiply = partial(matrix_unit.add_products, e, vectors=self.vectors)
        found = {
            "unpack": self.unpack(),
            f"pack {real}": self.pack(real),
            "pack": self.pack_parts(),
            "turn_rows": self.panels.turn_rows(self.shape.block_q),
            "split_rows": split.split_rows(),
            "split_columns": split.split_columns(),
            "scores": multiply(name="scores", onto=False, products=split.products()),
            "add_by_queries": multiply(
                name="add_by_queries", onto=True, products=split.products(of_weights=True)
            ),
            "add_by_keys": self.add_by_keys(),
            "add_sums": self.add_sums(),
            "add_sifted": without_parts.add_sifted(split),
        }
        for dtype in sorted({*self.dtypes.values()}):
            found[f"copy {dtype}"] = copy_rows(e, dtype)
        for left, right in (("key", "query"), ("value", "grad_out"), ("out", "grad_out")):
            name = self.name_of_mend(left, right)
            if name not in found:
                found[name] = without_parts.mend(split, name, self.dtypes[left], self.dtypes[right])
        for name in ("query", "grad_out"):
            odd = f"add_odd {self.dtypes[name]}"
            if odd not in found:
                found[odd] = self.add_odd_rows(odd, self.dtypes[name])
        if not self.plain:
            found["full"] = self.weigh("full", masked=False)
        if self.mask != TRUE:
            found["partial"] = self.weigh("partial", masked=True)
        if self.spec.dropout:
            found["dropout"] = self.dropout()
        keys_of_block = self.keys_of_block
        if self.plain:
            found["all"] = keys_of_block("all", weigh=True, grade=True, lay=True)
            found["all_beside"] = self.all_beside()
            if self.mask != TRUE:
                found["weigh"] = keys_of_block("weigh", weigh=True, grade=False, lay=False)
        if self.chained:
            found["chain"] = self.chain()
            found["grade"] = keys_of_block("grade", weigh=False, grade=True, lay=False)
            found["lay"] = keys_of_block("lay", weigh=False, grade=False, lay=True)
        elif self.may_forbid:
            found["grade and lay"] = keys_of_block(
                "grade and lay", weigh=False, grade=True, lay=True
            )
        return found

    def name_of_mend(self, left: str, right: str) -> str:
        return f"mend {self.dtypes[left]} {self.dtypes[right]}"

    def meeting(self, parts: dict[str, Value]) -> Callable[[Value, list[Value]], None]:
        e = self.e
        with e.function("meet", [POINTER] * 4) as (function, args):
            matrix_unit.configure(e)
            meeting = _Blocks(self, self.vectors, parts, *args)
            meeting.begin()
            meeting.all_blocks(meeting.add_block)
            meeting.end()
            matrix_unit.release(e)
        return lambda _, arguments: e.builder.call(function, arguments)


class _Blocks(MeetingOfKeys):
    """Emits the meeting of some blocks of queries and the keys of one task."""

    kernel: PartBackward

    def __init__(self, kernel: PartBackward, *arguments: object) -> None:
        super().__init__(kernel, *arguments)  # type: ignore[arg-type]
        e, b, split = self.e, self.e.builder, kernel.split
        block_q = kernel.shape.block_q
        self.q_len = self.field("q_len")
        left = e.add(e.sub(self.q_len, self.first_row), block_q - 1)
        self.count = e.least(self.field("together"), b.sdiv(left, e.index(block_q)))
        self.wide = {name: whole(e, dim) for name, dim in self.dims.items()}
        half = split.parts * split.width // 2
        query, grad = (e.mul(self.wide[name], half) for name in ("query", "grad_out"))
        sums, rows = e.mul(self.wide["query"], split.width), e.index(len(_ROWS) * split.width)
        self.strides = dict(zip(_OF_BLOCK, (query, query, grad, grad, sums, rows), strict=True))

    def block(self, i: Value, turn: Value) -> _Blocks:
        """One of them, with one of two rooms for S and dP."""
        e, block_q = self.e, self.kernel.shape.block_q
        here = copy(self)
        here.area = dict(self.area)
        for name, stride in self.strides.items():
            here.area[name] = e.at(self.area[name], e.mul(i, stride))
        for n, name in enumerate(_ROWS):
            here.area[name] = e.at(here.area["rows"], n * self.kernel.width)
        for name in ("weights", "score_grads"):
            size = BLOCK_KV * self.kernel.width
            here.area[name] = e.at(self.area[name], e.mul(turn, size))
        here.first_row = e.add(self.first_row, e.mul(i, block_q))
        here.rows = e.least(e.sub(self.q_len, here.first_row), block_q)
        return here

    def each_block(self, body: Callable[[_Blocks], None]) -> None:
        self.e.loop(0, self.count, 1, [], lambda i, _: body(self.block(i, self.e.index(0))))

    # Rows

    def _floats(self, name: str, rows: Rows, first: Value, count: Value) -> tuple[Value, Value]:
        kernel, e = self.kernel, self.e
        here = Rows(e.at(rows.pointer, e.mul(first, rows.row)), rows.row, rows.element)
        dtype = kernel.dtypes[name]
        copying, to = self.functions[f"copy {dtype}"], self.area["copy"]
        return kernel.split.floats(dtype, copying, here, count, self.dims[name], to)

    def _products(self) -> tuple[_Product, ...]:
        scores = "weights" if self.kernel.plain else "products"
        return (
            _Product("key", "query", "key_rows", "query_packed", scores, "odd_keys", "query_odd"),
            _Product("value", "grad_out", "value_rows", "grad_packed", "score_grads",
                     "odd_values", "grad_odd"),
        )  # fmt: skip

    def _factors(self, product: _Product, count: Value) -> list[Value]:
        """The arguments of `matrix_unit.multiply`."""
        e, of = self.e, product.left
        pairs = e.builder.ashr(self.wide[of], e.index(1))
        held = self.areas(product.rows, product.packed, product.out)
        return [*held, self.kernel.split.band(self.dims[of]), count, pairs]

    def _mend(self, product: _Product, first: Value, count: Value) -> None:
        """Products that tiles could not take, of rows of the left factor from `first` on."""
        e, kernel, left = self.e, self.kernel, product.left
        marks = self.areas(product.odd, product.lanes)
        with e.builder.if_then(without_parts.any_without(kernel.split, *marks), likely=False):
            head = self.head if left == "out" else self.kv_head
            rows, others = (
                kernel.operand(self.arguments, name, self.batch, of)
                for name, of in ((left, head), (product.right, self.head))
            )
            here = Rows(e.at(rows.pointer, e.mul(first, rows.row)), rows.row, rows.element)
            where = self.first_row, self.last, self.dims[left], ir.Constant(e.real, 1.0), count
            name = kernel.name_of_mend(left, product.right)
            self.call(name, *here, *others, *where, *marks, self.area[product.out])

    def begin(self) -> None:
        """Q and dO in parts both ways, delta."""
        self.dims["out"], self.wide["out"] = self.dims["value"], self.wide["value"]
        self.each_block(lambda block: block.pack())

    def pack(self) -> None:
        e, kernel = self.e, self.kernel
        for name, short in (("query", "query"), ("grad_out", "grad")):
            rows = kernel.operand(self.arguments, name, self.batch, self.head)
            start, row = self._floats(name, rows, self.first_row, self.rows)
            for j in range(self.vectors):
                where = e.index(j * e.lanes), e.sub(self.rows, 1), self.dims[name]
                packed = e.at(self.area[f"{short}_packed"], j * e.vector_bytes)
                odd = self.call("pack", start, row, *where, packed)
                e.store(odd, e.at(self.area[f"{short}_odd"], j * e.vector_bytes), WORD)
            turned = self.area[f"{short}_turned"]
            self.call("turn_rows", start, row, self.rows, self.dims[name], turned)
        self.each_vector(self._pack_rows_of_sums)
        self._delta()
        sums = e.mul(self.wide["query"], kernel.width)
        kernel.fill(self.area["query_sums"], e.index(0), sums)

    def _pack_rows_of_sums(self, offset: Value, first: Value) -> None:
        for name in ("lse", "lse_rest", "grad_lse"):
            self._pack_column(offset, first, name, name)

    def _delta(self) -> None:
        """The diagonal of O dO^T."""
        e, kernel = self.e, self.kernel
        rows = kernel.operand(self.arguments, "out", self.batch, self.head)
        start, row = self._floats("out", rows, self.first_row, self.rows)
        held = self.areas("key_rows", "odd_keys")
        self.call("split_rows", start, row, self.rows, self.dims["out"], *held)
        product = _Product(
            "out", "grad_out", "key_rows", "grad_packed", "weights", "odd_keys", "grad_odd"
        )
        self.call("scores", *self._factors(product, self.rows))
        self._mend(product, self.first_row, self.rows)

        def diagonal(lane: Value, _: list[Value]) -> None:
            own, column = e.least(lane, e.sub(self.rows, 1)), e.mul(lane, FLOAT_BYTES)
            x = e.load(
                e.at(self.area["weights"], e.mul(own, kernel.width), column), e.real, FLOAT_BYTES
            )
            e.store(x, e.at(self.area["delta"], column), FLOAT_BYTES)

        e.loop(0, kernel.shape.block_q, 1, [], diagonal)

    # Keys

    def add_block(self, kv_start: Value, count: Value, kind: Value) -> None:
        """One block of keys meets every block of queries that sees some of it."""
        e = self.e
        v, v_row = self._floats("value", self.values, kv_start, count)
        held = self.areas("value_rows", "odd_values")
        self.call("split_rows", v, v_row, count, self.dims["value"], *held)
        key = self._floats("key", self.keys, kv_start, count)
        held = self.areas("key_rows", "odd_keys")
        self.call("split_rows", *key, count, self.dims["key"], *held)
        sifted = self.call("split_columns", *key, count, self.dims["key"], self.area["key_columns"])
        for name in ("key", "value"):
            self._clear_sums(name, count)

        self._meet_all(kv_start, count, kind, key, sifted)
        for name in ("key", "value"):
            row = self.field(f"{name}_sum_row")
            pointer = self.kernel.pointer_field(self.arguments, f"{name}_sums")
            to = e.at(pointer, e.mul(e.add(self.kv_row, kv_start), row))
            self.call("add_sums", self.area[f"{name}_sums"], to, row, self.dims[name], count)

    def _clear_sums(self, name: str, count: Value) -> None:
        e, width = self.e, self.kernel.panels.width
        rows = e.mul(whole(e, count), width)

        def panel(d: Value, _: list[Value]) -> None:
            start = e.mul(d, BLOCK_KV * width // CHUNK)
            self.kernel.fill(self.area[f"{name}_sums"], start, e.add(start, rows))

        e.loop(0, self.dims[name], CHUNK, [], panel)

    def _meet_all(
        self, kv_start: Value, count: Value, kinds: Value, key: tuple[Value, Value], sifted: Value
    ) -> None:
        """Each block of queries in turn: what is between its products, beside those of the next."""
        e, b = self.e, self.e.builder
        with b.goto_entry_block():
            waiting, turn = (b.bitcast(b.alloca(INT64), POINTER) for _ in range(2))
        e.store(e.index(-1), waiting, WORD)
        e.store(e.index(0), turn, WORD)

        def is_kind(i: Value, kind: TileKind) -> Value:
            own = b.and_(b.lshr(kinds, e.mul(i, 2)), e.index(3))
            return b.icmp_signed("==", own, e.index(kind))

        def one(i: Value, _: list[Value]) -> None:
            with b.if_then(b.not_(is_kind(i, TileKind.EMPTY))):
                before, now = e.load(waiting, INT64, WORD), e.load(turn, INT64, WORD)
                then = e.sub(1, now)
                some = b.icmp_signed(">=", before, e.index(0))
                earlier, here = self.block(e.greater(before, 0), then), self.block(i, now)

                def in_turn() -> None:
                    with b.if_then(some):
                        earlier.compute(kv_start, count, is_kind(before, TileKind.PARTIAL))
                    here.multiply(kv_start, count)

                if self.kernel.plain:
                    e.choose(
                        b.and_(some, is_kind(e.greater(before, 0), TileKind.FULL)),
                        lambda: earlier.compute_beside(here, kv_start, count),
                        in_turn,
                    )
                else:
                    in_turn()
                with b.if_then(some):
                    earlier.add(count, key, sifted)
                e.store(i, waiting, WORD)
                e.store(then, turn, WORD)

        e.loop(0, self.count, 1, [], one)
        last = e.load(waiting, INT64, WORD)
        with b.if_then(b.icmp_signed(">=", last, e.index(0))):
            block = self.block(last, e.sub(1, e.load(turn, INT64, WORD)))
            block.compute(kv_start, count, is_kind(last, TileKind.PARTIAL))
            block.add(count, key, sifted)

    def multiply(self, kv_start: Value, count: Value) -> None:
        """S and dP."""
        for product in self._products():
            self.call("scores", *self._factors(product, count))
            self._mend(product, kv_start, count)

    def compute_beside(self, following: _Blocks, kv_start: Value, count: Value) -> None:
        """P and dX of this block beside S and dP of the following one."""
        if self.kernel.spec.dropout:
            self._by_vector("dropout", kv_start, count)
        start: Value = self.e.index(0)
        held = self.arguments, *self.areas(*_OF_PAIRS)
        for product in following._products():
            start = self.call("all_beside", *held, start, *following._factors(product, count))
            following._mend(product, kv_start, count)
        self.call("all", *held, start, count)

    def compute(self, kv_start: Value, count: Value, partial: Value) -> None:
        """P and dX in parts, of S and dP."""
        kernel = self.kernel

        def compute(name: str) -> None:
            self.call(name, self.arguments, *self.areas(*_OF_PAIRS), self.e.index(0), count)

        def forbid(name: str) -> None:
            if kernel.plain:
                compute("weigh")
            self._by_vector(name, kv_start, count)
            if kernel.chained:
                compute("grade")
                self._by_vector("chain", kv_start, count)
                compute("lay")
            else:
                compute("grade and lay")

        def full() -> None:
            if kernel.plain:
                compute("all")
            else:
                forbid("full")

        if kernel.spec.dropout:
            self._by_vector("dropout", kv_start, count)
        if kernel.mask == TRUE:
            full()
        else:
            self.e.choose(partial, lambda: forbid("partial"), full)

    def add(self, count: Value, key: tuple[Value, Value], sifted: Value) -> None:
        """To dQ, dV and dK."""
        e, kernel = self.e, self.kernel
        pairs = e.builder.ashr(e.add(count, 1), e.index(1))
        band, dim = e.index(kernel.split.column_band), self.dims["query"]
        held = self.areas("key_columns", "grad_pairs", "query_sums")
        self.call("add_by_queries", *held, band, dim, pairs)
        with e.builder.if_then(sifted, likely=False):
            held = self.areas("grad_pairs", "query_sums")
            self.call("add_sifted", *key, *held, dim, count)
        self._add_by_keys("value", "weight_rows", "grad_out", "grad", count)
        self._add_by_keys("key", "grad_rows", "query", "query", count)

    def _add_by_keys(self, of: str, left: str, name: str, short: str, count: Value) -> None:
        """dV of P and dO, or dK of dX and Q."""
        e, kernel = self.e, self.kernel
        dim, sums = self.dims[name], f"{of}_sums"
        self.call("add_by_keys", *self.areas(left, f"{short}_turned", sums), dim, count)
        nothing = e.index(0)
        words = [e.load(e.at(self.area[f"{short}_odd"], j * e.vector_bytes), INT64, WORD)
                 for j in range(self.vectors)]  # fmt: skip
        some = e.builder.icmp_signed("!=", reduce(e.builder.or_, words), nothing)
        with e.builder.if_then(some, likely=False):
            rows = kernel.operand(self.arguments, name, self.batch, self.head)
            where = self.first_row, e.sub(e.add(self.first_row, self.rows), 1)
            held = self.areas(f"{short}_odd", left, sums)
            self.call(f"add_odd {kernel.dtypes[name]}", *rows, *where, *held, dim, count)

    def end(self) -> None:
        """The task's part of dQ."""
        self.each_block(lambda block: super().end())
