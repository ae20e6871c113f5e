"""The forward kernel for float32 and float16 on machines with matrix tiles (AMX).

Such a machine multiplies about thirteen times as many bfloat16 numbers in a second as float32
numbers. So both matrix products of attention are computed as sums of products of bfloat16 terms
(`terms`). Sums are float32, and all that happens between the products is as in
`forward.bf16_dot`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import rows_from
from qkv.backends.cpu.emit.transpose import transposed_bytes
from qkv.backends.cpu.forward.frame import STATS, ForwardFrame, ForwardKey, ScoreVector, StatsRow
from qkv.backends.cpu.forward.pair_kernel import emit_pair_kernel, rescale_output
from qkv.backends.cpu.forward.score_blocks import (
    Buffers,
    KeyBlock,
    PairOperands,
    QueryBlocks,
    ScoreBlocks,
    ValueBlock,
)
from qkv.backends.cpu.forward.softmax import RowSums, finish_key_function
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products import matrix_unit
from qkv.backends.cpu.products.bfloat16 import CHUNK, emit_round_to_chunks, round_to_chunks
from qkv.backends.cpu.products.group_sums import GroupSums
from qkv.backends.cpu.products.prefetch import Prefetcher
from qkv.backends.cpu.products.tile_instructions import TILE_ROWS
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.overlap import OverlappedScoreBlocks
from qkv.backends.cpu.split_bf16.scores import SplitScores
from qkv.backends.cpu.split_bf16.terms import FLOAT_BYTES
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec

BLOCK_KV = 128
"""Number of keys whose scores are held at once. Scores and weights of a block fit the first-level
cache."""

_KEYS_BESIDE = 16
"""Number of keys whose weights are computed, or whose scores are finished, during one step of a
product."""

_Finish: TypeAlias = Callable[[Value, list[Value]], list[Value]]


def split_scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: a block of scores, weights, V, K, copied rows and tables; Q, O and
    statistics of each block of queries."""
    width, terms = 4 * shape.block_q, shape.terms
    head_dim, v_head_dim = round_to_chunks(spec.head_dim), round_to_chunks(spec.v_head_dim)
    scores = BLOCK_KV * width + BLOCK_KV // 2 * terms * width
    rows = 2 * terms * (head_dim + v_head_dim) + FLOAT_BYTES * max(head_dim, v_head_dim)
    own = width * (terms * head_dim // 2 + v_head_dim + STATS + 1)
    transposed = transposed_bytes(spec, BLOCK_KV, width)
    total = (
        non_finite.NON_FINITE_BYTES
        + scores
        + BLOCK_KV * rows
        + shape.q_blocks_per_task * own
        + transposed
    )
    return -(-total // 4096) * 4096


def emit_split_forward(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    return emit_pair_kernel(SplitOperands(ForwardFrame(key, block_kv=BLOCK_KV)))


class SplitOperands(PairOperands):
    """Operands as terms of bfloat16 in the layout of tiles."""

    unrolled = (2, 1)
    stats_rows = STATS + 1

    def __init__(self, frame: ForwardFrame) -> None:
        super().__init__(frame)
        self.split_scores = SplitScores(frame, frame.dtypes.values())
        self.split = self.split_scores.split
        self.terms = self.split.terms
        self.weights_at = BLOCK_KV * self.width
        self.value_row = self.split.column_band
        self.offsets = [j * self.e.vector_bytes for j in range(self.vectors)]
        """Byte offsets of the vectors of a block of queries."""

    def place_of_pair(self, scores: Value, k: Value, width: Value) -> Value:
        return self.split.packed_row(self.e.at(scores, self.weights_at), k)

    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        self.split.store_pair(first, second, place)

    def clear_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        self.split.clear_pairs(weights, first, stop)

    def product_function(self, name: str, *, onto: bool) -> Value:
        """A function as `matrix_unit.add_products`."""
        products = self.split.products(of_weights=onto)
        return matrix_unit.add_products(self.e, name, self.vectors, onto=onto, products=products)

    # Vector units have time while tiles are multiplied

    def overlapped_weights_function(self) -> Value:
        """A function `(rows, packed, scores, stats, scale, band, count, following, pairs, ahead)`.

        The weights of `count` keys for one block of queries, whose finished `scores` and `stats`
        are given, and the scores of `following` keys for another, which take their place. In each
        step 16 keys leave, and at most as many come, if a row of Q is at least two chunks. `ahead`
        is the place of `Prefetcher`.
        """
        e = self.e
        arguments = [*[POINTER] * 4, e.real, *[INT64] * 4, POINTER]
        with e.function("weights_overlapped", arguments) as (function, args):
            rows, packed, scores, stats, factor, band, count, following, pairs, place = args
            b, width, ahead = e.builder, e.index(self.width), Prefetcher(e, place, BLOCK_KV)
            products, scale = self.split.products(), e.splat(factor)
            rows_of = []
            for offset in self.offsets:
                here = e.at(stats, offset)
                largest = b.fmul(e.load_vector(e.at(here, StatsRow.BLOCK_MAX * self.width)), scale)
                rows_of.append(RowSums(e, here, width, largest, statistics=self.frame.statistics))

            def weigh_key(j: int, k: Value, carried: list[Value]) -> tuple[Value, list[Value]]:
                place = e.at(scores, e.mul(k, width), self.offsets[j])
                return rows_of[j].weigh_key(b.fmul(e.load_vector(place), scale), carried, None)

            steps = e.least(
                b.sdiv(count, e.index(_KEYS_BESIDE)),
                matrix_unit.steps_of(e, self.vectors, following, pairs),
            )
            number = sum(len(row.zero_sums) for row in rows_of)
            room = self.split.allocate_vectors((1 + BLOCK_KV // _KEYS_BESIDE) * number)
            sums = GroupSums(e, room, number)

            def weigh_group(group: Value, _: list[Value]) -> None:
                start = e.mul(group, _KEYS_BESIDE)
                stop = e.least(e.add(start, _KEYS_BESIDE), count)
                found: list[Value] = []
                for j, (offset, row) in enumerate(zip(self.offsets, rows_of, strict=True)):
                    here = e.at(scores, offset)
                    found += self.store_weights(
                        e, here, width, start, stop, row.zero_sums, partial(weigh_key, j)
                    )
                sums.defer(group, found)

            # The product overwrites these scores, so their weights are computed before it.
            groups = b.sdiv(e.add(count, _KEYS_BESIDE - 1), e.index(_KEYS_BESIDE))
            e.loop(steps, groups, 1, [], weigh_group)
            running: list[list[Value]] = []

            def weigh_share(step: Value, group: int) -> None:
                """Weigh a share of the keys of this step."""
                if group == 0:
                    running[:] = [list(row.zero_sums) for row in rows_of]
                units = [(p, j) for p in range(_KEYS_BESIDE // 2) for j in range(self.vectors)]
                shares = len(products)
                start, stop = (len(units) * n // shares for n in (group, group + 1))
                for p, j in units[start:stop]:
                    k = e.add(e.mul(step, _KEYS_BESIDE), 2 * p)
                    first, running[j] = weigh_key(j, k, running[j])
                    second, running[j] = weigh_key(j, e.add(k, 1), running[j])
                    place = self.place_of_pair(e.at(scores, self.offsets[j]), k, width)
                    self.store_pair(first, second, place)
                if group == shares - 1:
                    sums.add([x for each in running for x in each])
                ahead.prefetch_row()

            matrix_unit.multiply(
                e, (rows, packed, scores, band, following, pairs), self.vectors, onto=False,
                products=products, side_work=matrix_unit.SideWork(steps, weigh_share),
            )  # fmt: skip
            # Groups are added in the order in which `scores_to_weights` adds them: same bits.
            e.loop(steps, groups, 1, [], lambda group, _: sums.add_deferred(group))
            totals = iter(sums.values())
            for row in rows_of:
                row.advance([next(totals) for _ in row.zero_sums])
        return function

    def overlapped_add_function(self, name: str, *, masked: bool) -> Value:
        """A function `(*add_values, arguments, scores, stats, transposed, batch, head, row,
        kv_start, following)`.

        Add the values of one block of queries, and finish the scores of another, `following` keys
        from `kv_start` on for queries from `row` on. In each step 16 keys are finished.
        """
        e = self.e
        adding, block = [*[POINTER] * 4, *[INT64] * 2], [*[POINTER] * 4, *[INT64] * 5]
        with e.function(name, adding + block) as (function, args):
            values, weights, rescale, out, v_head_dim, count = args[: len(adding)]
            *where, following = args[len(adding) :]
            b, stats = e.builder, where[2]
            rescale_output(self, weights, rescale, out, v_head_dim, count)
            finish = self._score_finishers(where, following, masked)
            largest = [self._spilled(e.const(-math.inf)) for _ in self.offsets]

            def finish_keys(start: Value, stop: Value) -> None:
                def finish_scores_of_key(k: Value, maxima: list[Value]) -> list[Value]:
                    return [each(k, [x])[0] for each, x in zip(finish, maxima, strict=True)]

                first_maxima = [e.load_vector(place) for place in largest]
                maxima = e.loop(start, stop, 1, first_maxima, finish_scores_of_key)
                for x, place in zip(maxima, largest, strict=True):
                    e.store_vector(x, place)

            products = self.split.products(of_weights=True)
            pairs = b.ashr(emit_round_to_chunks(e, count), e.index(1))
            steps = e.least(
                b.sdiv(following, e.index(_KEYS_BESIDE)),
                matrix_unit.steps_of(e, self.vectors, v_head_dim, pairs),
            )

            def finish_share(step: Value, group: int) -> None:
                """Finish a share of the keys of this step."""
                shares = (_KEYS_BESIDE * n // len(products) for n in (group, group + 1))
                finish_keys(*(e.add(e.mul(step, _KEYS_BESIDE), share) for share in shares))

            matrix_unit.multiply(
                e, (values, weights, out, e.index(self.value_row), v_head_dim, pairs),
                self.vectors, onto=True, products=products,
                side_work=matrix_unit.SideWork(steps, finish_share),
            )  # fmt: skip
            finish_keys(e.mul(steps, _KEYS_BESIDE), following)
            for offset, place in zip(self.offsets, largest, strict=True):
                block_max = e.at(stats, StatsRow.BLOCK_MAX * self.width + offset)
                e.store_vector(e.load_vector(place), block_max)
        return function

    def _score_finishers(self, block: Sequence[Value], count: Value, masked: bool) -> list[_Finish]:
        """Functions that emit how the scores of one key are finished, one for each vector.

        Scores without mods and mask are only compared with the largest so far.
        """
        e = self.e
        arguments, scores, stats, transposed, batch, head, row, kv_start = block
        scale = e.splat(self.frame.real_field(arguments, "scale"))
        bytes_transposed = transposed_bytes(self.frame.spec, BLOCK_KV, e.vector_bytes)

        def compare_key(here: Value, k: Value, seen: list[Value]) -> list[Value]:
            return [e.greatest(seen[0], e.load_vector(e.at(here, e.mul(k, self.width))))]

        found: list[_Finish] = []
        for j, offset in enumerate(self.offsets):
            here, own = e.at(scores, offset), e.at(transposed, j * bytes_transposed)
            if self.frame.plain and not masked:
                found.append(partial(compare_key, here))
                continue
            at = ScoreVector(
                arguments, here, stats, own, e.index(self.width), count=count, batch=batch,
                head=head, first_row=e.add(row, j * e.lanes), kv_start=kv_start,
                marked=ir.Constant(BIT, 0),
            )  # fmt: skip
            found.append(
                finish_key_function(self.frame, at, self.frame.places_at(at), scale, masked)
            )
        return found

    def _spilled(self, x: Value) -> Value:
        """The address of a vector that is stored because registers are scarce."""
        place = self.split.allocate_vectors(1)
        self.e.store_vector(x, place)
        return place

    def score_blocks(self, task: QueryBlocks) -> ScoreBlocks:
        return OverlappedScoreBlocks(self, self.split_scores, task)

    def row_functions(self) -> dict[str, Value]:
        functions = {
            **self.split_scores.functions,
            "split_columns": self.split.split_columns(),
            "add_non_finite": non_finite.add_non_finite(self.split),
        }
        if not self.frame.spec.dropout:
            functions["weights_overlapped"] = self.overlapped_weights_function()
        functions["add_overlapped_full"] = self.overlapped_add_function(
            "add_overlapped_full", masked=False
        )
        if self.frame.mask != TRUE:
            functions["add_overlapped_partial"] = self.overlapped_add_function(
                "add_overlapped_partial", masked=True
            )
        return functions

    def keys_from(self, keys: KeyBlock, k: Value) -> Value:
        e = self.e
        return e.at(keys.rows, e.mul(e.builder.sdiv(k, e.index(TILE_ROWS)), keys.row))

    def values_from(self, values: Value, k: Value) -> Value:
        e = self.e
        chunk = e.builder.sdiv(k, e.index(CHUNK))
        return e.at(values, e.mul(chunk, self.split.chunk_bytes))

    def buffers(self, scratch: Value, wide: Value, v_wide: Value) -> Buffers:
        e = self.e
        scores = e.at(scratch, non_finite.NON_FINITE_BYTES)
        weights = e.at(scores, self.weights_at)
        values = e.at(weights, BLOCK_KV // 2 * self.terms * self.width)
        keys = e.at(values, e.mul(v_wide, self.value_row // TILE_ROWS))
        copy = e.at(keys, e.mul(wide, 2 * self.terms * BLOCK_KV))
        blocks = e.at(copy, e.mul(e.larger_of(wide, v_wide), FLOAT_BYTES * BLOCK_KV))
        return Buffers(scores, values, keys, copy, blocks)

    def prepare_keys(self, task: QueryBlocks, kv_start: Value, count: Value) -> tuple[Value, Value]:
        at, dim = task.at, task.head_dim
        here = rows_from(self.e, task.key, kv_start)
        unsplit = self.e.at(at.scores, -non_finite.NON_FINITE_BYTES)
        self.split_scores.split_keys(here, count, dim, at.value_copy, at.key_copy, unsplit)
        return at.key_copy, self.split.band_bytes(dim)

    def prepare_values(
        self, task: QueryBlocks, kv_start: Value, count: Value, kinds: Value
    ) -> ValueBlock:
        e, at, dim = self.e, task.at, task.v_head_dim
        here = rows_from(e, task.value, kv_start)
        v, row = self.split_scores.float_rows("value", here, count, dim, at.value_copy)
        where = [v, row, count, dim, at.values]
        has_non_finite = e.builder.call(task.functions["split_columns"], where)
        return ValueBlock(v, row, has_non_finite)
