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

from llvmlite import ir

from qkv.backends.cpu import matrix_unit, without_parts
from qkv.backends.cpu.bfloat16 import CHUNK, chunks, whole
from qkv.backends.cpu.forward import BLOCK_MAX, STATS, ForwardKey, RowSums
from qkv.backends.cpu.frame import WORD, Rows, Shape
from qkv.backends.cpu.ir import INT64, POINTER, Value
from qkv.backends.cpu.matrix_unit import TILE_ROWS
from qkv.backends.cpu.meeting import Buffers, Keys, Meeting, Together
from qkv.backends.cpu.pairs import PairForward
from qkv.backends.cpu.part_rows import FLOAT_BYTES
from qkv.backends.cpu.part_scores import PartScores
from qkv.backends.cpu.turning import turned_bytes
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
        """A function `(rows, packed, scores, stats, scale, band, count, pairs)`.

        The weights of one block of queries, whose finished `scores` and `stats` are given, and the
        scores of another, which take their place. In each step 16 keys leave, and at most as many
        come, if a row of Q is at least two chunks.
        """
        e = self.e
        arguments = [*[POINTER] * 4, e.real, *[INT64] * 3]
        with e.function("weigh_beside", arguments) as (function, args):
            rows, packed, scores, stats, factor, band, count, pairs = args
            b, width = e.builder, e.index(self.width)
            products, scale = self.split.products(), e.splat(factor)
            sums = []
            for offset in self.offsets:
                here = e.at(stats, offset)
                largest = b.fmul(e.load_vector(e.at(here, BLOCK_MAX * self.width)), scale)
                sums.append(RowSums(e, here, width, largest, statistics=self.statistics))

            def weigh(j: int, k: Value, carried: list[Value]) -> tuple[Value, list[Value]]:
                place = e.at(scores, e.mul(k, width), self.offsets[j])
                return sums[j].weigh(b.fmul(e.load_vector(place), scale), carried, None)

            steps = b.sdiv(count, e.index(_KEYS_BESIDE))
            of_steps, of_rest = [], []
            for j, offset in enumerate(self.offsets):
                nothing, start = sums[j].nothing, e.mul(steps, _KEYS_BESIDE)
                # These scores are gone when their turn comes.
                rest = self.weigh_keys(
                    e.at(scores, offset), width, start, count, nothing, partial(weigh, j)
                )
                of_rest.append([self._kept(x) for x in rest])
                of_steps.append([self._kept(x) for x in nothing])
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
                    place = self.place_of_pair(e.at(scores, self.offsets[j]), k, width)
                    self.store_pair(first, second, place)
                if group == groups - 1:
                    for places, part in zip(of_steps, running, strict=True):
                        for place, x in zip(places, part, strict=True):
                            e.store_vector(b.fadd(e.load_vector(place), x), place)

            matrix_unit.multiply(
                e, (rows, packed, scores, band, count, pairs), self.vectors, onto=False,
                products=products, beside=matrix_unit.Beside(steps, some),
            )  # fmt: skip
            for row, *found in zip(sums, of_steps, of_rest, strict=True):
                # The rest comes last, as where weights are computed alone: bits are the same.
                both = zip(*found, strict=True)
                row.advance([b.fadd(*map(e.load_vector, places)) for places in both])
        return function

    def add_beside(self, name: str, *, masked: bool) -> Value:
        """A function `(*add_values, arguments, scores, stats, turned, batch, head, row, kv_start)`.

        Add the values of one block of queries, and finish the scores of another, whose first row is
        `row`. In each step 16 keys are finished, which takes no more steps than there are if values
        have more than one chunk.
        """
        e = self.e
        adding, block = [*[POINTER] * 4, *[INT64] * 2], [*[POINTER] * 4, *[INT64] * 4]
        with e.function(name, adding + block) as (function, args):
            values, weights, rescale, out, v_head_dim, count = args[: len(adding)]
            following = args[len(adding) :]
            b, stats = e.builder, following[2]
            self.before_adding(weights, rescale, out, v_head_dim, count)
            finish = self._finishing(following, count, masked)
            largest = [self._kept(e.const(-math.inf)) for _ in self.offsets]

            def keys(start: Value, stop: Value) -> None:
                def one(k: Value, seen: list[Value]) -> list[Value]:
                    return [each(k, [x])[0] for each, x in zip(finish, seen, strict=True)]

                seen = e.loop(start, stop, 1, [e.load_vector(place) for place in largest], one)
                for x, place in zip(seen, largest, strict=True):
                    e.store_vector(x, place)

            products = self.split.products(of_weights=True)
            steps = b.sdiv(count, e.index(_KEYS_BESIDE))

            def some(step: Value, group: int) -> None:
                """A share of the keys of this step."""
                shares = (_KEYS_BESIDE * n // len(products) for n in (group, group + 1))
                keys(*(e.add(e.mul(step, _KEYS_BESIDE), share) for share in shares))

            pairs = b.ashr(whole(e, count), e.index(1))
            matrix_unit.multiply(
                e, (values, weights, out, e.index(self.value_row), v_head_dim, pairs),
                self.vectors, onto=True, products=products, beside=matrix_unit.Beside(steps, some),
            )  # fmt: skip
            keys(e.mul(steps, _KEYS_BESIDE), count)
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

    def meet(self, task: Together, keys: Keys) -> None:
        """The next block is scored beside the weights of one, and finished beside its values."""
        e, b, meeting = self.e, self.e.builder, _PartMeeting(self, task, keys)
        with b.goto_entry_block():
            waiting = b.bitcast(b.alloca(INT64), POINTER)
        e.store(e.index(-1), waiting, WORD)

        def one(i: Value, _: list[Value]) -> None:
            with b.if_then(b.not_(meeting.is_empty(i))):
                before = e.load(waiting, INT64, WORD)
                some = b.icmp_signed(">=", before, e.index(0))

                def weigh_and_score() -> None:
                    with b.if_then(some):
                        meeting.weigh(before)
                    meeting.score(i)

                def add_and_finish() -> None:
                    with b.if_then(some):
                        meeting.add(before)
                    meeting.finish(i)

                if self.spec.dropout:
                    weigh_and_score()
                else:
                    can = b.and_(some, meeting.can_weigh_beside(e.greater(before, 0)))
                    e.choose(can, lambda: meeting.weigh_beside(before, i), weigh_and_score)
                can = b.and_(some, meeting.can_add_beside())
                e.choose(can, lambda: meeting.add_beside(before, i), add_and_finish)
                e.store(i, waiting, WORD)

        e.loop(0, task.count, 1, [], one)
        last = e.load(waiting, INT64, WORD)
        with b.if_then(b.icmp_signed(">=", last, e.index(0))):
            meeting.weigh(last)
            meeting.add(last)

    def rows(self) -> dict[str, Value]:
        parts = self.factors.functions(self.dtypes.values())
        parts["split_columns"] = self.split.split_columns()
        parts["add_sifted"] = without_parts.add_sifted(self.split)
        if not self.spec.dropout:
            parts["weigh_beside"] = self.weigh_beside()
        parts["add_beside_full"] = self.add_beside("add_beside_full", masked=False)
        if self.mask != TRUE:
            parts["add_beside_partial"] = self.add_beside("add_beside_partial", masked=True)
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
        odd = e.at(at.scores, -without_parts.ODD_BYTES)
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
    ) -> tuple[Value, Value, Value]:
        e = self.e
        here = Rows(e.at(rows.pointer, e.mul(kv_start, rows.row)), rows.row, rows.element)
        v, row = self.factors.floats(parts, "value", here, count, v_head_dim, at.value_copy)
        sifted = e.builder.call(parts["split_columns"], [v, row, count, v_head_dim, at.values])
        return v, row, sifted


class _PartMeeting(Meeting):
    """Steps of two blocks of queries, beside each other; scores of what has no parts."""

    kernel: _PartForward

    def score(self, i: Value) -> None:
        super().score(i)
        self._mend(i)

    def can_weigh_beside(self, i: Value) -> Value:
        """Whether there are steps enough, and no weight is marked."""
        e, b = self.e, self.e.builder
        enough = e.below(CHUNK, self.task.head_dim)
        return b.and_(enough, b.not_(b.and_(self.keys.sifted, self.is_finished(i))))

    def weigh_beside(self, i: Value, following: Value) -> None:
        e, b, keys, task = self.e, self.e.builder, self.keys, self.task
        scale = self.kernel.real_field(task.arguments, "scale")
        scale = b.select(self.is_finished(i), ir.Constant(e.real, 1.0), scale)
        rows = [keys.rows, task.block(following).packed, self.scores, task.block(i).stats]
        b.call(self.parts["weigh_beside"], [*rows, scale, keys.row, keys.count, self.pairs])
        self._mend(following)

    def can_add_beside(self) -> Value:
        """Whether there are steps enough."""
        return self.e.below(CHUNK, self.task.v_head_dim)

    def add_beside(self, i: Value, following: Value) -> None:
        task, block = self.task, self.task.block(following)
        where = (task.batch, task.head, block.row, self.keys.start)
        args = [*self.adding(i), task.arguments, self.scores, block.stats, task.turned, *where]

        def call(name: str) -> None:
            self.e.builder.call(self.parts[name], args)

        self.by_kind(
            following,
            full=lambda: call("add_beside_full"),
            partial=lambda: call("add_beside_partial"),
        )
        self.add_sifted(i)

    def _mend(self, i: Value) -> None:
        """Scores of rows without parts."""
        e, task, keys, kernel = self.e, self.task, self.keys, self.kernel
        block, (pointer, row, element) = task.block(i), task.key
        odd = e.at(self.scores, -without_parts.ODD_BYTES)
        lanes = e.at(block.stats, STATS * kernel.width)
        key = Rows(e.at(pointer, e.mul(keys.start, row)), row, element)
        where = (block.row, keys.count, odd, lanes, self.scores)
        kernel.factors.mend(task.arguments, self.parts, key, task.query, *where)
