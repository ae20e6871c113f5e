"""The forward kernel for float32 and float16 on machines with bfloat16 tiles.

Such a machine does some thirteen times as many products of bfloat16 as multiply-adds of float32:
both products of attention are sums of products of parts (`part_rows`). Sums are float32 as ever,
and everything between the products is as in `pairs`.
"""

from __future__ import annotations

from functools import partial

from qkv.backends.cpu import matrix_unit, without_parts
from qkv.backends.cpu.bfloat16 import CHUNK, chunks
from qkv.backends.cpu.forward import BLOCK_MAX, STATS, ForwardKey, RowSums
from qkv.backends.cpu.frame import WORD, Rows, Shape
from qkv.backends.cpu.ir import INT64, POINTER, Value
from qkv.backends.cpu.matrix_unit import TILE_ROWS
from qkv.backends.cpu.packing import copy_rows
from qkv.backends.cpu.pairs import Buffers, Meeting, PairForward
from qkv.backends.cpu.part_rows import FLOAT_BYTES, PartRows
from qkv.backends.cpu.turning import turned_bytes
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec
from qkv.problem.tiles import TileKind

BLOCK_KV = 128
"""Keys whose scores are held at once: they and their weights fit the nearest cache."""

_KEYS_BESIDE = 16
"""Keys that are weighed beside one step of a product."""


def part_scratch_bytes(spec: Spec, shape: Shape) -> int:
    """Memory of one worker: a block of scores, weights, V, K, copied rows and tables; Q, O and
    statistics of each block of queries."""
    width, parts = 4 * shape.block_q, shape.parts
    head_dim, v_head_dim = chunks(spec.head_dim), chunks(spec.v_head_dim)
    scores = BLOCK_KV * width + BLOCK_KV // 2 * parts * width
    rows = 2 * parts * (head_dim + v_head_dim) + FLOAT_BYTES * max(head_dim, v_head_dim)
    own = width * (parts * head_dim // 2 + v_head_dim + STATS + 1)
    turned = turned_bytes(spec, BLOCK_KV, 4 * shape.lanes)
    total = without_parts.ODD_BYTES + scores + BLOCK_KV * rows + shape.together * own + turned
    return -(-total // 4096) * 4096


def emit_parts(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = _PartForward(key)
    kernel.all_tasks()
    return str(kernel.e.module)


class _PartForward(PairForward):
    def __init__(self, key: ForwardKey) -> None:
        super().__init__(key)
        self.block_kv = BLOCK_KV
        self.split = PartRows(self.e, self.shape, BLOCK_KV)
        self.weights_at = BLOCK_KV * self.width
        self.value_row = self.split.column_band
        self.unrolled = (2, 1)
        self.stats_rows = STATS + 1

    def place_of_pair(self, scores: Value, k: Value, width: Value) -> Value:
        return self.split.packed_row(self.e.at(scores, self.weights_at), k)

    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        self.split.store_pair(first, second, place)

    def clear_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        self.split.clear_pairs(weights, first, stop)

    def pack_parts(self, parts: dict[str, Value]) -> Value:
        """One vector of queries as pairs of parts; lanes beyond the last row repeat it.

        Gives a bit for each query without parts.
        """
        e = self.e
        arguments = [POINTER, POINTER, POINTER, POINTER, INT64]
        with e.function("pack", arguments, INT64) as (function, args):
            arguments_, query, packed, copy, first_row = args
            names = ("query_row", "query_element", "head_dim", "rows")
            row, element, head_dim, rows = (self.field(arguments_, name) for name in names)
            last = e.least(e.lanes - 1, e.sub(e.sub(rows, first_row), 1))
            here = Rows(e.at(query, e.mul(first_row, row)), row, element)
            start, row = self.floats(parts, "query", here, e.add(last, 1), head_dim, copy)
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            sign = e.splat(self.real_field(arguments_, "sign"))
            e.builder.ret(self.split.pack(places, head_dim, packed, sign))
        return function

    def floats(
        self, parts: dict[str, Value], name: str, rows: Rows, count: Value, dim: Value, to: Value
    ) -> tuple[Value, Value]:
        """Rows of float32 with adjacent elements."""
        dtype = self.dtypes[name]
        return self.split.floats(dtype, parts[f"copy {dtype}"], rows, count, dim, to)

    def mend_scores(
        self,
        arguments: Value,
        parts: dict[str, Value],
        query: Rows,
        key: Rows,
        first_row: Value,
        count: Value,
        at: Buffers,
        stats: Value,
    ) -> None:
        e = self.e
        odd, lanes = e.at(at.scores, -without_parts.ODD_BYTES), e.at(stats, STATS * self.width)
        with e.builder.if_then(without_parts.any_without(self.split, odd, lanes), likely=False):
            last = e.sub(self.field(arguments, "rows"), 1)
            head_dim, sign = self.field(arguments, "head_dim"), self.real_field(arguments, "sign")
            rows = [*key, *query, first_row, last, head_dim, sign]
            e.builder.call(parts["mend"], [*rows, count, odd, lanes, at.scores])

    # One task, all tasks

    def product(self, name: str, *, onto: bool) -> Value:
        """A function as `matrix_unit.add_products`."""
        products = self.split.products(of_weights=onto)
        return matrix_unit.add_products(self.e, name, self.vectors, onto=onto, products=products)

    @property
    def beside(self) -> bool:
        """Whether weights can be computed while tiles are multiplied."""
        return self.plain and not self.spec.dropout

    def weigh_beside(self) -> Value:
        """A function `(arguments, rows, packed, scores, stats, band, count, pairs)`.

        The weights of one block of queries, whose `scores` and `stats` are given, and the scores of
        another, which take their place. Vector units have time while tiles are multiplied. In each
        step, 16 keys leave and at most as many come, if a row of Q is at least two chunks.
        """
        e = self.e
        arguments = [*[POINTER] * 5, *[INT64] * 3]
        with e.function("weigh_beside", arguments) as (function, args):
            arguments_, rows, packed, scores, stats, band, count, pairs = args
            b, width = e.builder, e.index(self.width)
            products = self.split.products()
            scale = e.splat(self.real_field(arguments_, "scale"))
            offsets = [j * e.vector_bytes for j in range(self.vectors)]
            sums = []
            for offset in offsets:
                here = e.at(stats, offset)
                largest = b.fmul(e.load_vector(e.at(here, BLOCK_MAX * self.width)), scale)
                sums.append(RowSums(e, here, width, largest, statistics=self.statistics))

            def weigh(j: int, k: Value, carried: list[Value]) -> tuple[Value, list[Value]]:
                place = e.at(scores, e.mul(k, width), offsets[j])
                return sums[j].weigh(b.fmul(e.load_vector(place), scale), carried, None)

            steps = b.sdiv(count, e.index(_KEYS_BESIDE))
            kept = []
            for j, offset in enumerate(offsets):
                start = e.mul(steps, _KEYS_BESIDE)
                found = self.weigh_keys(
                    e.at(scores, offset), width, start, count, sums[j].nothing, partial(weigh, j)
                )
                kept.append([self._kept(x) for x in found])
            running: list[list[Value]] = []

            def some(step: Value, group: int) -> None:
                """A share of the keys of this step."""
                if group == 0:
                    running[:] = [list(each.nothing) for each in sums]
                units = [(p, j) for p in range(_KEYS_BESIDE // 2) for j in range(self.vectors)]
                groups = len(products)
                start, stop = (len(units) * n // groups for n in (group, group + 1))
                for p, j in units[start:stop]:
                    k = e.add(e.mul(step, _KEYS_BESIDE), 2 * p)
                    first, running[j] = weigh(j, k, running[j])
                    second, running[j] = weigh(j, e.add(k, 1), running[j])
                    place = self.place_of_pair(e.at(scores, offsets[j]), k, width)
                    self.store_pair(first, second, place)
                if group == groups - 1:
                    for places, part in zip(kept, running, strict=True):
                        for place, x in zip(places, part, strict=True):
                            e.store_vector(b.fadd(e.load_vector(place), x), place)

            matrix_unit.multiply(
                e, (rows, packed, scores, band, count, pairs), self.vectors, onto=False,
                products=products, beside=matrix_unit.Beside(steps, some),
            )  # fmt: skip
            for row, places in zip(sums, kept, strict=True):
                row.advance([e.load_vector(place) for place in places])
        return function

    def _kept(self, x: Value) -> Value:
        """Where a vector is kept while registers are wanted."""
        place = self.split.room(1)
        self.e.store_vector(x, place)
        return place

    def meet(self, with_keys: Meeting) -> None:
        """Weights of one block of queries are computed beside the scores of the next."""
        if not self.beside:
            super().meet(with_keys)
            return
        e, b = self.e, self.e.builder
        with b.goto_entry_block():
            waiting = b.bitcast(b.alloca(INT64), POINTER)
        e.store(e.index(-1), waiting, WORD)

        def one(i: Value, _: list[Value]) -> None:
            with b.if_then(b.icmp_signed("!=", with_keys.kind(i), e.index(TileKind.EMPTY))):
                before = e.load(waiting, INT64, WORD)
                some = b.icmp_signed(">=", before, e.index(0))
                fits = b.icmp_signed(">=", with_keys.pairs, e.index(CHUNK))
                if self.mask != TRUE:
                    kind = with_keys.kind(e.greater(before, 0))
                    fits = b.and_(fits, b.icmp_signed("==", kind, e.index(TileKind.FULL)))

                def in_turn() -> None:
                    with b.if_then(some):
                        with_keys.weigh(before)
                    with_keys.score(i)

                e.choose(b.and_(some, fits), lambda: with_keys.weigh_beside(before, i), in_turn)
                with b.if_then(some):
                    with_keys.add(before)
                e.store(i, waiting, WORD)

        e.loop(0, with_keys.count, 1, [], one)
        last = e.load(waiting, INT64, WORD)
        with b.if_then(b.icmp_signed(">=", last, e.index(0))):
            with_keys.weigh(last)
            with_keys.add(last)

    def rows(self) -> dict[str, Value]:
        e = self.e
        parts = {f"copy {dtype}": copy_rows(e, dtype) for dtype in sorted({*self.dtypes.values()})}
        parts["split_rows"] = self.split.split_rows()
        parts["split_columns"] = self.split.split_columns()
        parts["pack"] = self.pack_parts(parts)
        key, query = self.dtypes["key"], self.dtypes["query"]
        parts["mend"] = without_parts.mend(self.split, "mend", key, query)
        parts["add_sifted"] = without_parts.add_sifted(self.split)
        if self.beside:
            parts["weigh_beside"] = self.weigh_beside()
        return parts

    def buffers(self, scratch: Value, wide: Value, v_wide: Value) -> Buffers:
        e = self.e
        scores = e.at(scratch, without_parts.ODD_BYTES)
        weights = e.at(scores, self.weights_at)
        values = e.at(weights, BLOCK_KV // 2 * self.parts * self.width)
        keys = e.at(values, e.mul(v_wide, self.value_row // TILE_ROWS))
        copy = e.at(keys, e.mul(wide, 2 * self.parts * BLOCK_KV))
        blocks = e.at(copy, e.mul(e.greater(wide, v_wide), FLOAT_BYTES * BLOCK_KV))
        return Buffers(scores, values, keys, copy, blocks)

    def block_of_keys(
        self,
        arguments: Value,
        parts: dict[str, Value],
        rows: Rows,
        kv_start: Value,
        count: Value,
        head_dim: Value,
        at: Buffers,
    ) -> tuple[Value, Value]:
        e = self.e
        here = Rows(e.at(rows.pointer, e.mul(kv_start, rows.row)), rows.row, rows.element)
        k, row = self.floats(parts, "key", here, count, head_dim, at.value_copy)
        odd = e.at(at.scores, -without_parts.ODD_BYTES)
        e.builder.call(parts["split_rows"], [k, row, count, head_dim, at.key_copy, odd])
        return at.key_copy, self.split.band(head_dim)

    def block_of_values(
        self,
        arguments: Value,
        parts: dict[str, Value],
        rows: Rows,
        kv_start: Value,
        count: Value,
        v_head_dim: Value,
        at: Buffers,
        kinds: Value,
    ) -> tuple[Value, Value, Value]:
        e = self.e
        here = Rows(e.at(rows.pointer, e.mul(kv_start, rows.row)), rows.row, rows.element)
        v, row = self.floats(parts, "value", here, count, v_head_dim, at.value_copy)
        sifted = e.builder.call(parts["split_columns"], [v, row, count, v_head_dim, at.values])
        return v, row, sifted
