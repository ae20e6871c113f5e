"""The forward kernel for float32 and float16 on machines with bfloat16 tiles.

Such a machine does some thirteen times as many products of bfloat16 as multiply-adds of float32:
both products of attention are sums of products of parts (`part_rows`). Sums are float32 as ever,
and everything between the products is as in `pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import Rows
from qkv.backends.cpu.emit.transpose import turned_bytes
from qkv.backends.cpu.forward.bf16_dot import PairForward
from qkv.backends.cpu.forward.kernel import BLOCK_MAX, STATS, ForwardKey, RowSums
from qkv.backends.cpu.forward.score_blocks import Buffers, Keys, Meeting, Together, Values
from qkv.backends.cpu.machine.tiling import Shape
from qkv.backends.cpu.products import matrix_unit
from qkv.backends.cpu.products.bfloat16 import CHUNK, chunks, whole
from qkv.backends.cpu.products.group_sums import GroupSums
from qkv.backends.cpu.products.matrix_unit import TILE_ROWS
from qkv.backends.cpu.products.prefetch import RowsAhead
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.factors import FLOAT_BYTES
from qkv.backends.cpu.split_bf16.overlap import PartMeeting
from qkv.backends.cpu.split_bf16.scores import PartScores
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec

BLOCK_KV = 128
"""Keys whose scores are held at once: they and their weights fit the nearest cache."""

_KEYS_BESIDE = 16
"""Keys that are weighed, or finished, beside one step of a product."""

_Finish: TypeAlias = Callable[[Value, list[Value]], list[Value]]


def part_scratch_bytes(spec: Spec, shape: Shape) -> int:
    """Memory of one worker: a block of scores, weights, V, K, copied rows and tables; Q, O and
    statistics of each block of queries."""
    width, parts = 4 * shape.block_q, shape.parts
    head_dim, v_head_dim = chunks(spec.head_dim), chunks(spec.v_head_dim)
    scores = BLOCK_KV * width + BLOCK_KV // 2 * parts * width
    rows = 2 * parts * (head_dim + v_head_dim) + FLOAT_BYTES * max(head_dim, v_head_dim)
    own = width * (parts * head_dim // 2 + v_head_dim + STATS + 1)
    turned = turned_bytes(spec, BLOCK_KV, width)
    total = non_finite.ODD_BYTES + scores + BLOCK_KV * rows + shape.together * own + turned
    return -(-total // 4096) * 4096


def emit_parts(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = PartForward(key)
    kernel.all_tasks()
    return str(kernel.e.module)


class PartForward(PairForward):
    def __init__(self, key: ForwardKey) -> None:
        super().__init__(key)
        self.block_kv = BLOCK_KV
        self.factors = PartScores(self, BLOCK_KV)
        self.split = self.factors.split
        self.weights_at = BLOCK_KV * self.width
        self.value_row = self.split.column_band
        self.unrolled = (2, 1)
        self.stats_rows = STATS + 1
        self.offsets = [j * self.e.vector_bytes for j in range(self.vectors)]
        """Of the vectors of a block of queries."""

    def place_of_pair(self, scores: Value, k: Value, width: Value) -> Value:
        return self.split.packed_row(self.e.at(scores, self.weights_at), k)

    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        self.split.store_pair(first, second, place)

    def clear_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        self.split.clear_pairs(weights, first, stop)

    # One task, all tasks

    def product(self, name: str, *, onto: bool) -> Value:
        """A function as `matrix_unit.add_products`."""
        products = self.split.products(of_weights=onto)
        return matrix_unit.add_products(self.e, name, self.vectors, onto=onto, products=products)

    # Vector units have time while tiles are multiplied

    def weigh_beside(self) -> Value:
        """A function `(rows, packed, scores, stats, scale, band, count, following, pairs, ahead)`.

        The weights of `count` keys for one block of queries, whose finished `scores` and `stats`
        are given, and the scores of `following` keys for another, which take their place. In each
        step 16 keys leave, and at most as many come, if a row of Q is at least two chunks. `ahead`
        is the place of `RowsAhead`.
        """
        e = self.e
        arguments = [*[POINTER] * 4, e.real, *[INT64] * 4, POINTER]
        with e.function("weigh_beside", arguments) as (function, args):
            rows, packed, scores, stats, factor, band, count, following, pairs, place = args
            b, width, ahead = e.builder, e.index(self.width), RowsAhead(e, place, BLOCK_KV)
            products, scale = self.split.products(), e.splat(factor)
            rows_of = []
            for offset in self.offsets:
                here = e.at(stats, offset)
                largest = b.fmul(e.load_vector(e.at(here, BLOCK_MAX * self.width)), scale)
                rows_of.append(RowSums(e, here, width, largest, statistics=self.statistics))

            def weigh(j: int, k: Value, carried: list[Value]) -> tuple[Value, list[Value]]:
                place = e.at(scores, e.mul(k, width), self.offsets[j])
                return rows_of[j].weigh(b.fmul(e.load_vector(place), scale), carried, None)

            steps = e.least(
                b.sdiv(count, e.index(_KEYS_BESIDE)),
                matrix_unit.steps_of(e, self.vectors, following, pairs),
            )
            number = sum(len(row.nothing) for row in rows_of)
            room = self.split.room((1 + BLOCK_KV // _KEYS_BESIDE) * number)
            sums = GroupSums(e, room, number)

            def weigh_group(group: Value, _: list[Value]) -> None:
                start = e.mul(group, _KEYS_BESIDE)
                stop = e.least(e.add(start, _KEYS_BESIDE), count)
                found: list[Value] = []
                for j, (offset, row) in enumerate(zip(self.offsets, rows_of, strict=True)):
                    here = e.at(scores, offset)
                    found += self.store_weights(
                        here, width, start, stop, row.nothing, partial(weigh, j)
                    )
                sums.keep(group, found)

            # These scores are gone when their turn comes.
            groups = b.sdiv(e.add(count, _KEYS_BESIDE - 1), e.index(_KEYS_BESIDE))
            e.loop(steps, groups, 1, [], weigh_group)
            running: list[list[Value]] = []

            def some(step: Value, group: int) -> None:
                """A share of the keys of this step."""
                if group == 0:
                    running[:] = [list(row.nothing) for row in rows_of]
                units = [(p, j) for p in range(_KEYS_BESIDE // 2) for j in range(self.vectors)]
                shares = len(products)
                start, stop = (len(units) * n // shares for n in (group, group + 1))
                for p, j in units[start:stop]:
                    k = e.add(e.mul(step, _KEYS_BESIDE), 2 * p)
                    first, running[j] = weigh(j, k, running[j])
                    second, running[j] = weigh(j, e.add(k, 1), running[j])
                    place = self.place_of_pair(e.at(scores, self.offsets[j]), k, width)
                    self.store_pair(first, second, place)
                if group == shares - 1:
                    sums.add([x for each in running for x in each])
                ahead.ask()

            matrix_unit.multiply(
                e, (rows, packed, scores, band, following, pairs), self.vectors, onto=False,
                products=products, beside=matrix_unit.Beside(steps, some),
            )  # fmt: skip
            # Group after group, as where weights are computed alone: bits are the same.
            e.loop(steps, groups, 1, [], lambda group, _: sums.add_kept(group))
            totals = iter(sums.values())
            for row in rows_of:
                row.advance([next(totals) for _ in row.nothing])
        return function

    def add_beside(self, name: str, *, masked: bool) -> Value:
        """A function `(*add_values, arguments, scores, stats, turned, batch, head, row, kv_start,
        following)`.

        Add the values of one block of queries, and finish the scores of another, `following` keys
        from `kv_start` on for queries from `row` on. In each step 16 keys are finished.
        """
        e = self.e
        adding, block = [*[POINTER] * 4, *[INT64] * 2], [*[POINTER] * 4, *[INT64] * 5]
        with e.function(name, adding + block) as (function, args):
            values, weights, rescale, out, v_head_dim, count = args[: len(adding)]
            *where, following = args[len(adding) :]
            b, stats = e.builder, where[2]
            self.before_adding(weights, rescale, out, v_head_dim, count)
            finish = self._finishing(where, following, masked)
            largest = [self._kept(e.const(-math.inf)) for _ in self.offsets]

            def keys(start: Value, stop: Value) -> None:
                def one(k: Value, seen: list[Value]) -> list[Value]:
                    return [each(k, [x])[0] for each, x in zip(finish, seen, strict=True)]

                seen = e.loop(start, stop, 1, [e.load_vector(place) for place in largest], one)
                for x, place in zip(seen, largest, strict=True):
                    e.store_vector(x, place)

            products = self.split.products(of_weights=True)
            pairs = b.ashr(whole(e, count), e.index(1))
            steps = e.least(
                b.sdiv(following, e.index(_KEYS_BESIDE)),
                matrix_unit.steps_of(e, self.vectors, v_head_dim, pairs),
            )

            def some(step: Value, group: int) -> None:
                """A share of the keys of this step."""
                shares = (_KEYS_BESIDE * n // len(products) for n in (group, group + 1))
                keys(*(e.add(e.mul(step, _KEYS_BESIDE), share) for share in shares))

            matrix_unit.multiply(
                e, (values, weights, out, e.index(self.value_row), v_head_dim, pairs),
                self.vectors, onto=True, products=products, beside=matrix_unit.Beside(steps, some),
            )  # fmt: skip
            keys(e.mul(steps, _KEYS_BESIDE), following)
            for offset, place in zip(self.offsets, largest, strict=True):
                block_max = e.at(stats, BLOCK_MAX * self.width + offset)
                e.store_vector(e.load_vector(place), block_max)
        return function

    def _finishing(self, block: Sequence[Value], count: Value, masked: bool) -> list[_Finish]:
        """What finishes the scores of one key, for each vector; of plain ones it only looks."""
        e = self.e
        arguments, scores, _, turned, batch, head, row, kv_start = block
        scale = e.splat(self.real_field(arguments, "scale"))
        bytes_turned = turned_bytes(self.spec, BLOCK_KV, e.vector_bytes)

        def look(here: Value, k: Value, seen: list[Value]) -> list[Value]:
            return [e.greatest(seen[0], e.load_vector(e.at(here, e.mul(k, self.width))))]

        found: list[_Finish] = []
        for j, offset in enumerate(self.offsets):
            here, own = e.at(scores, offset), e.at(turned, j * bytes_turned)
            if self.plain and not masked:
                found.append(partial(look, here))
                continue
            places = self.places(arguments, batch, head, e.add(row, j * e.lanes))
            width = e.index(self.width)
            found.append(self.finishing(places, scale, here, own, width, count, kv_start, masked))
        return found

    def _kept(self, x: Value) -> Value:
        """Where a vector is kept while registers are wanted."""
        place = self.split.room(1)
        self.e.store_vector(x, place)
        return place

    def meeting(self, task: Together) -> Meeting:
        return PartMeeting(self, task)

    def rows(self) -> dict[str, Value]:
        parts = self.factors.functions(self.dtypes.values())
        parts["split_columns"] = self.split.split_columns()
        parts["add_sifted"] = non_finite.add_sifted(self.split)
        if not self.spec.dropout:
            parts["weigh_beside"] = self.weigh_beside()
        parts["add_beside_full"] = self.add_beside("add_beside_full", masked=False)
        if self.mask != TRUE:
            parts["add_beside_partial"] = self.add_beside("add_beside_partial", masked=True)
        return parts

    def from_key(self, keys: Keys, k: Value) -> Value:
        e = self.e
        return e.at(keys.rows, e.mul(e.builder.sdiv(k, e.index(TILE_ROWS)), keys.row))

    def from_value(self, values: Value, k: Value) -> Value:
        e = self.e
        chunk = e.builder.sdiv(k, e.index(CHUNK))
        return e.at(values, e.mul(chunk, self.split.chunk_bytes))

    def buffers(self, scratch: Value, wide: Value, v_wide: Value) -> Buffers:
        e = self.e
        scores = e.at(scratch, non_finite.ODD_BYTES)
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
        odd = e.at(at.scores, -non_finite.ODD_BYTES)
        self.factors.split_keys(parts, here, count, head_dim, at.value_copy, at.key_copy, odd)
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
    ) -> Values:
        e = self.e
        here = Rows(e.at(rows.pointer, e.mul(kv_start, rows.row)), rows.row, rows.element)
        v, row = self.factors.floats(parts, "value", here, count, v_head_dim, at.value_copy)
        sifted = e.builder.call(parts["split_columns"], [v, row, count, v_head_dim, at.values])
        return Values(v, row, sifted)
