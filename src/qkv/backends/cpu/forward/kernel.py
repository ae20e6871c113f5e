"""The forward kernel: online softmax with queries in lanes.

One task is a block of queries of one head, `vectors * lanes` rows at most; where weights are
replayed for few queries, the heads that share a kv head are rows of one *folded* block. Its scores
are computed transposed, one vector of queries for each key, so that the maximum, the sum, the
rescaling and the mask of a row are all lane-wise:

    S[k, q] = score(scale * K[k, :] . Q[q, :])            -inf where the mask forbids the pair
    m'[q]   = max(m[q], max_k S[k, q])
    P[k, q] = exp(S[k, q] - m'[q])
    l[q]    = exp(m[q] - m'[q]) * l[q] + sum_k P[k, q]
    O[d, q] = exp(m[q] - m'[q]) * O[d, q] + sum_k V[k, d] * P[k, q]

for one block of keys after the other; then `out = O / l` and `lse = m + log(l)`, with what rounding
takes from it for the backward pass. On request the same pass gives max score, max weight and
entropy, from `T[q] = sum_k P[k, q] * (S[k, q] - m[q])`:

    max weight = 1 / l,    entropy = log(l) - T / l

Only Q is packed. K and V are read where they lie if they are of the type of computation and their
elements adjacent; else each block of keys is first copied side by side.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"FlashAttention" (2022), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import BIT, CACHE_LINE, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.expressions import Expressions
from qkv.backends.cpu.emit.frame import COMMON_FIELDS, WORD, Frame, operand_fields
from qkv.backends.cpu.emit.packing import (
    all_finite,
    copy_rows,
    pack_rows,
    unpack_rows,
)
from qkv.backends.cpu.emit.storage import ITEM_BYTES, real_dtype
from qkv.backends.cpu.emit.transpose import (
    transpose_tables,
    transposed_bytes,
    transposed_loads,
    transposed_values,
)
from qkv.backends.cpu.forward.boundary_blocks import (
    BoundaryBlock,
    BoundaryBlocks,
    skips_within_blocks,
)
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.query_lanes import combine_rows, dot_rows, store_vectors, vectors_at
from qkv.problem.expressions import SCORE, TRUE, walk
from qkv.problem.spec import Spec

BLOCK_KV = 64
"""Number of keys whose scores are held at once."""

_SUM = 16
"""Number of weights that are added in one chain. Rounding errors grow with its length."""

FIELDS = (
    *COMMON_FIELDS,
    *operand_fields("query", "key", "value"),
    "runs", "rows", "out", "lse", "lse_rest", "entropy", "max_score", "max_weight", "copy_key",
    "copy_value", "sign", "q_blocks_per_task",
)  # fmt: skip
"""Words of the argument block. `scale` is not negative, because Q is packed times `sign`.
`q_blocks_per_task` differs from problem to problem while the kernel stays the same."""

STATS = 6
"""Number of rows of statistics: row maximum, row sum, rescaling factor, rounding error of the row
sum, maximum of the current block, and T."""
BLOCK_MAX = 4

SOFTMAX = [*[POINTER] * 4, *[INT64] * 6, BIT]
"""Types of the arguments of `softmax`: arguments, S, statistics, transposed tables, width, count,
batch, head, first row, first key, and whether the weights of forbidden pairs are marked."""

TASK = ("batch", "head", "first_row", "first_run", "last_run")
RUN = ("start", "stop", "partial")


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: packed Q, O, P and the statistics; one block of K, V and tables."""
    real_bytes = spec.compute_dtype.itemsize
    rows = spec.head_dim + spec.v_head_dim + BLOCK_KV + STATS
    copies = BLOCK_KV * (spec.head_dim + spec.v_head_dim)
    transposed = transposed_bytes(spec, BLOCK_KV, shape.lanes * real_bytes)
    return -(-((rows * shape.block_q + copies) * real_bytes + transposed) // 4096) * 4096


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """What the code of one kernel depends on.

    `rotated` operands come in the type of computation.
    """

    spec: Spec
    shape: TileShape
    int_bits: int
    folded: bool
    rotated: bool
    out_dtype: str
    statistics: bool


def emit_forward(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = Forward(key)
    kernel.all_tasks()
    return str(kernel.e.module)


class ForwardKernel(NamedTuple):
    """One of the forward kernels, as a forward pass uses it."""

    emit: Callable[[ForwardKey], str]
    """Writes the module."""
    scratch_bytes: Callable[[Spec, TileShape], int]
    """Memory in bytes that one worker needs."""
    block_kv: int
    """Keys whose scores are held at once."""


ONLINE_SOFTMAX = ForwardKernel(emit_forward, scratch_bytes, BLOCK_KV)
"""The kernel for every dtype and machine."""


class RowSums:
    """What one block of keys adds to the rows of one vector of queries.

    `largest` is their largest score in the block.
    """

    def __init__(
        self, e: Emitter, stats: Value, width: Value, largest: Value, *, statistics: bool
    ) -> None:
        b = e.builder
        self._e, self._statistics = e, statistics
        self._at = [e.at(stats, e.mul(width, i)) for i in range(STATS)]
        self._old_max = e.load_vector(self._at[0])
        self._new_max = e.greatest(self._old_max, largest)
        # A row that has seen no key yet has maximum -inf; shift it by 0 instead.
        unseen = b.fcmp_ordered("==", self._new_max, e.const(-math.inf))
        self._shift = b.select(unseen, e.const(0.0), self._new_max)
        self.nothing = [e.const(0.0)] * (1 + statistics)
        """Sums over no keys."""

    def weigh(
        self, score: Value, sums: list[Value], forbidden: Value | None
    ) -> tuple[Value, list[Value]]:
        """The weight of one key, and sums with it; `forbidden` weighs a score of -inf."""
        e, b = self._e, self._e.builder
        distance = b.fsub(score, self._shift)
        weight = vector_math.exp_flushed(e, distance)
        if forbidden is not None:
            never = b.fcmp_ordered("==", score, e.const(-math.inf))
            weight = b.select(never, forbidden, weight)
        following = [b.fadd(sums[0], weight)]
        if self._statistics:
            # What weighs nothing adds nothing, at whatever distance.
            added = e.fma(weight, distance, sums[1])
            following.append(b.select(vector_math.is_kept(e, distance), added, sums[1]))
        if len(sums) > len(self.nothing):
            rest = vector_math.rest_of_sum(e, sums[0], weight, following[0])
            following.append(b.fadd(sums[-1], rest))
        return weight, following

    def advance(self, sums: list[Value], rest: Value | None = None) -> None:
        """Row maximum, sum, and T, after the block; how the output is to be rescaled.

        `rest` is what rounding took from the block's sum, where that is known.
        """
        e, b = self._e, self._e.builder
        row_max, row_sum, rescale, lost, _, spread = self._at
        step = b.fsub(self._old_max, self._shift)
        factor = vector_math.exp_flushed(e, step)
        e.store_vector(self._new_max, row_max)
        if self._statistics:
            moved = b.fmul(e.load_vector(row_sum), e.greatest(e.const(-1e4), step))
            old_spread = b.fmul(b.fadd(e.load_vector(spread), moved), factor)
            e.store_vector(b.fadd(old_spread, sums[1]), spread)
        # Compensated (Kahan 1965): a plain sum over thousands of blocks drifts.
        old_sum = b.fmul(e.load_vector(row_sum), factor)
        total = b.fsub(sums[0], b.fmul(e.load_vector(lost), factor))
        new_sum = b.fadd(old_sum, total)
        e.store_vector(new_sum, row_sum)
        lost_here = b.fsub(b.fsub(new_sum, old_sum), total)
        e.store_vector(lost_here if rest is None else b.fsub(lost_here, rest), lost)
        e.store_vector(factor, rescale)


class Forward(Frame):
    def __init__(self, key: ForwardKey) -> None:
        super().__init__("qkv_forward", key.spec, key.shape, key.int_bits, FIELDS)
        self.folded = key.folded
        self.out_dtype = key.out_dtype
        self.statistics = key.statistics
        self.block_kv = BLOCK_KV
        operand_dtype = real_dtype(self.e) if key.rotated else key.spec.dtype
        self.dtypes = {"query": operand_dtype, "key": operand_dtype, "value": key.spec.dtype}
        self.plain = self.score == SCORE
        """No mods: scores are the scaled products."""
        self.steps: BoundaryBlocks | None = None

    # S = K Q^T, transposed

    def scores(self, vectors: int) -> Value:
        """S[k, :] = K[k, :] . packed Q, and the largest of each row.

        V is read by columns afterwards: its rows are asked for here, a few at a time.
        """
        e = self.e
        arguments = [*[POINTER] * 5, *[INT64] * 5]
        with e.function(f"scores_{vectors}", arguments) as (function, args):
            key, packed, out, block_max, value, key_row, head_dim, count, value_row, v_head_dim = (
                args
            )
            row_bytes = e.mul(v_head_dim, e.real_bytes)

            def fetch(row: Value) -> None:
                e.loop(
                    0, row_bytes, CACHE_LINE, [],
                    lambda offset, _: e.prefetch(e.at(row, offset)),
                )  # fmt: skip

            def finish(k: Value, products: list[Value], largest: list[Value]) -> list[Value]:
                for i in range(len(products) // vectors):
                    fetch(e.at(value, e.mul(e.add(k, i), value_row)))
                store_vectors(e, e.at(out, e.mul(k, vectors * e.vector_bytes)), products)
                largest = list(largest)
                for n, product in enumerate(products):
                    largest[n % vectors] = e.greatest(largest[n % vectors], product)
                return largest

            lowest = [e.const(-math.inf)] * vectors
            largest = dot_rows(
                e, key, key_row, count, packed, vectors, head_dim, self.shape.keys_of(vectors),
                lowest, finish,
            )  # fmt: skip
            store_vectors(e, block_max, largest)
        return function

    # P = exp(S - m), one vector of queries

    def softmax(self, name: str, masked: bool) -> Value:
        """One block of keys of one vector of queries: S becomes P; row maximum and sum advance.

        With `marked`, the weight of a forbidden pair is -0.0; no other weight is.
        """
        e = self.e
        with e.function(name, SOFTMAX) as (function, args):
            arguments_, scores, stats, transposed, width, count, batch, head, first_row = args[:9]
            kv_start, marked = args[9:]
            places = self.places(arguments_, batch, head, first_row)
            scale = e.splat(self.real_field(arguments_, "scale"))
            finished = masked or not self.plain
            if finished:
                largest = self.finish_scores(
                    places, scale, scores, transposed, width, count, kv_start, masked
                )
            else:
                largest = e.load_vector(e.at(stats, e.mul(width, BLOCK_MAX)))
            where = (arguments_, places, scores, stats, width, count, kv_start)
            self.weigh_scores(*where, largest, marked, finished=finished)
        return function

    def weigh_scores(
        self,
        arguments: Value,
        places: Expressions,
        scores: Value,
        stats: Value,
        width: Value,
        count: Value,
        kv_start: Value,
        largest: Value,
        marked: Value,
        *,
        finished: bool,
    ) -> None:
        """S becomes P; if it is not `finished`, it is to be scaled, and nothing is forbidden."""
        e, b = self.e, self.e.builder
        scale = forbidden = None
        if finished:
            zero = (ir.Constant(e.real, sign) for sign in (-0.0, 0.0))
            forbidden = e.splat(b.select(marked, *zero))
        else:
            scale = e.splat(self.real_field(arguments, "scale"))
            largest = b.fmul(largest, scale)
        row = RowSums(e, stats, width, largest, statistics=self.statistics)

        def weigh(k: Value, carried: list[Value]) -> tuple[Value, list[Value]]:
            score = e.load_vector(e.at(scores, e.mul(k, width)))
            if scale is not None:
                score = b.fmul(score, scale)
            weight, following = row.weigh(score, carried, forbidden)
            if self.spec.dropout:
                factor = self.drop(arguments, places, e.add(kv_start, k))
                weight = b.fmul(weight, factor)
            return weight, following

        self.weigh_keys(scores, width, count, row, weigh)

    def weigh_keys(
        self,
        scores: Value,
        width: Value,
        count: Value,
        row: RowSums,
        weigh: Callable[[Value, list[Value]], tuple[Value, list[Value]]],
    ) -> None:
        """Store the weights of a block of keys; row maximum and sum advance."""
        e, b = self.e, self.e.builder

        def group(k: Value, carried: list[Value]) -> list[Value]:
            # Sums of sums: rounding errors grow with the length of a chain.
            end = e.least(e.add(k, _SUM), count)
            functions = self.store_weights(scores, width, k, end, row.nothing, weigh)
            return [b.fadd(old, part) for old, part in zip(carried, functions, strict=True)]

        if self.shape.product == "tiles":
            row.advance(e.loop(0, count, _SUM, row.nothing, group))
            return
        # Whoever adds few weights hardly rounds: of one chain, what it loses is kept.
        few = b.select(e.below(count, _SUM + 1), count, e.index(0))
        sums = [*row.nothing, e.const(0.0)]
        *sums, rest = self.store_weights(scores, width, e.index(0), few, sums, weigh, few=True)
        row.advance(e.loop(few, count, _SUM, sums, group), rest)

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
        """Weights of keys from `start` on take the place of their scores; gives the sums.

        There may be few keys, so that long code does not pay.
        """
        e = self.e

        def one(k: Value, sums: list[Value]) -> list[Value]:
            weight, sums = weigh(k, sums)
            e.store_vector(weight, e.at(scores, e.mul(k, width)))
            return sums

        return e.loop(start, stop, 1, sums, one)

    def finish_scores(
        self,
        places: Expressions,
        scale: Value,
        scores: Value,
        transposed: Value,
        width: Value,
        count: Value,
        kv_start: Value,
        masked: bool,
    ) -> Value:
        """Scale, score mods and mask in place; the largest of each row."""
        e = self.e
        finish = self.finishing(places, scale, scores, transposed, width, count, kv_start, masked)
        (largest,) = e.loop(0, count, 1, [e.const(-math.inf)], finish)
        return largest

    def finishing(
        self,
        places: Expressions,
        scale: Value,
        scores: Value,
        transposed: Value,
        width: Value,
        count: Value,
        kv_start: Value,
        masked: bool,
    ) -> Callable[[Value, list[Value]], list[Value]]:
        """What finishes the scores of one key, given the largest so far."""
        e, b = self.e, self.e.builder
        loads = transposed_loads(self.spec)
        if not masked:
            read = set(walk(self.score))
            loads = tuple(load for load in loads if load in read)
        transpose_tables(e, places, loads, kv_start, count, self.block_kv, transposed)

        def finish(k: Value, carried: list[Value]) -> list[Value]:
            place = e.at(scores, e.mul(k, width))
            score = b.fmul(e.load_vector(place), scale)
            inner = places.inside(e.add(kv_start, k), score)
            inner.known.update(transposed_values(e, self.spec, loads, transposed, k, self.block_kv))
            if not self.plain:
                score = inner.floats(self.score)
            if masked:
                score = b.select(inner.condition(self.mask), score, e.const(-math.inf))
            e.store_vector(score, place)
            return [e.greatest(carried[0], score)]

        if not self.plain:
            places.hoist(self.score)
        if masked:
            places.hoist(self.mask)
        return finish

    def places(self, arguments: Value, batch: Value, head: Value, first_row: Value) -> Expressions:
        """Where the lanes are; those beyond the last row repeat it."""
        e, b = self.e, self.e.builder
        last = self.lane_integers(e.sub(self.field(arguments, "rows"), 1))
        numbers = e.lane_numbers(ir.IntType(self.int_bits))
        row = b.add(self.lane_integers(first_row), numbers)
        row = b.select(b.icmp_signed("<", row, last), row, last)
        if self.folded:
            q_len = self.lane_integers(self.field(arguments, "q_len"))
            head = b.add(self.lane_integers(head), b.sdiv(row, q_len))
            row = b.srem(row, q_len)
        variables = {"batch": batch, "head": head, "q_index": row}
        return Expressions(e, self.tables(arguments), variables, self.int_bits)

    # O = rescale * O + P^T V, transposed

    def values(self, vectors: int, across: int | None = None) -> Value:
        """Add one block of keys to O, for neighbouring ones of `across` vectors."""
        e, across = self.e, across or vectors
        arguments = [*[POINTER] * 4, *[INT64] * 3]
        with e.function(f"values_{vectors}_of_{across}", arguments) as (function, args):
            value, weights, rescale, out, value_row, v_head_dim, count = args
            factors = vectors_at(e, rescale, vectors)

            def finish(d: Value, sums: list[Value]) -> None:
                row = across * e.vector_bytes
                first = e.at(out, e.mul(d, row))
                for i in range(len(sums) // vectors):
                    own = sums[i * vectors : (i + 1) * vectors]
                    self.advance(e.at(first, i * row), factors, own)

            combine_rows(
                e, value, value_row, count, weights, vectors, v_head_dim,
                self.shape.keys_of(vectors), finish, across,
            )  # fmt: skip
        return function

    def advance(self, place: Value, factors: list[Value], totals: list[Value]) -> None:
        e = self.e
        for n, (factor, total) in enumerate(zip(factors, totals, strict=True)):
            at = e.at(place, n * e.vector_bytes)
            e.store_vector(e.fma(e.load_vector(at), factor, total), at)

    def selected_values(self, vectors: int) -> Value:
        """The same for values that are not all finite: a weight of -0.0 leaves O alone."""
        e = self.e
        arguments = [*[POINTER] * 4, *[INT64] * 3]
        with e.function(f"selected_values_{vectors}", arguments) as (function, args):
            value, weights, rescale, out, value_row, v_head_dim, count = args
            b = e.builder
            factors = vectors_at(e, rescale, vectors)
            marked = e.as_bits(e.const(-0.0))

            def column(d: Value, _: list[Value]) -> None:
                start = e.at(value, e.mul(d, e.real_bytes))

                def accumulate(k: Value, total: list[Value]) -> list[Value]:
                    x = e.splat(e.load(e.at(start, e.mul(k, value_row)), e.real, e.real_bytes))
                    following = []
                    for p, old in zip(vectors_at(e, weights, vectors, k), total, strict=True):
                        allowed = b.icmp_signed("!=", e.as_bits(p), marked)
                        following.append(b.select(allowed, e.fma(x, p, old), old))
                    return following

                total = e.loop(0, count, 1, [e.const(0.0)] * vectors, accumulate)
                self.advance(e.at(out, e.mul(d, vectors * e.vector_bytes)), factors, total)

            e.loop(0, v_head_dim, 1, [], column)
        return function

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
            sign = e.splat(self.real_field(arguments_, "sign"))
            rows = []
            for i in range(e.lanes):
                row = e.least(e.add(first_row, i), e.sub(count, 1))
                head = e.index(0)
                if self.folded:
                    head, row = b.sdiv(row, q_len), b.srem(row, q_len)
                rows.append(e.at(query, e.mul(head, query_head), e.mul(row, query_row)))
            pack_rows(
                e, rows, query_element, head_dim, self.dtypes["query"],
                lambda d, vector: e.store_vector(
                    b.fmul(vector, sign), e.at(packed, e.mul(d, width))
                ),
            )  # fmt: skip
        return function

    def is_wanted(self, arguments: Value, name: str) -> Value:
        """Whether there is an address to write to."""
        return self.e.builder.icmp_signed("!=", self.field(arguments, name), self.e.index(0))

    def unpack(self) -> Value:
        """One vector of queries: out = O / l, transposed back, lse = m + log(l), and statistics.

        Lanes beyond the last row hold what it holds and write it again. A row without keys has
        l = 0.
        """
        e = self.e
        arguments = [*[POINTER] * 3, *[INT64] * 4]
        with e.function("unpack", arguments) as (function, args):
            arguments_, total, stats, first, v_head_dim, width, count = args
            b = e.builder
            row_max, row_sum, _, lost, _, spread = (
                e.load_vector(e.at(stats, e.mul(width, i))) for i in range(STATS)
            )
            empty = b.fcmp_ordered("==", row_sum, e.const(0.0))
            divisor = b.select(empty, e.const(1.0), row_sum)
            share = b.fdiv(e.const(1.0), divisor)
            lowest = e.const(-math.inf)
            logarithm = vector_math.log(e, row_sum)
            lanes = [e.least(i, e.sub(count, 1)) for i in range(e.lanes)]

            def each(name: str, vector: Value) -> None:
                """Statistics are small: one element after the other."""
                start = e.at(self.pointer_field(arguments_, name), e.mul(first, e.real_bytes))
                for i, lane in enumerate(lanes):
                    e.store(
                        e.extract(vector, i), e.at(start, e.mul(lane, e.real_bytes)), e.real_bytes
                    )

            lse, rest = vector_math.add_log(e, row_max, row_sum, b.fneg(lost))
            with b.if_then(self.is_wanted(arguments_, "lse")):
                each("lse", b.select(empty, lowest, lse))
            with b.if_then(self.is_wanted(arguments_, "lse_rest")):
                each("lse_rest", b.select(empty, e.const(0.0), rest))
            if self.statistics:
                entropy = b.fsub(logarithm, b.fmul(spread, share))
                # Rounding may leave a sure choice a little below 0.
                below = b.fcmp_ordered("<", entropy, e.const(0.0))
                entropy = b.select(b.or_(empty, below), e.const(0.0), entropy)
                each("entropy", entropy)
                each("max_score", row_max)
                largest = b.fdiv(e.const(1.0), divisor)
                each("max_weight", b.select(empty, e.const(0.0), largest))

            row_bytes = e.mul(v_head_dim, ITEM_BYTES[self.out_dtype])
            out = e.at(self.pointer_field(arguments_, "out"), e.mul(first, row_bytes))

            def take(d: Value) -> Value:
                # Adding 0 leaves one sign of zero.
                vector = e.load_vector(e.at(total, e.mul(d, width)))
                return e.fma(vector, share, e.const(0.0))

            rows = [e.at(out, e.mul(lane, row_bytes)) for lane in lanes]
            unpack_rows(e, rows, v_head_dim, self.out_dtype, take)
        return function

    # One task, all tasks

    def attend(self, vectors: int, functions: dict[str, Value]) -> Value:
        """One block of queries over its runs of keys."""
        e = self.e
        scores, values = self.scores(vectors), self.values(vectors)
        selected = self.selected_values(vectors) if "all_finite" in functions else None
        with e.function(f"attend_{vectors}", [POINTER] * 3) as (function, args):
            arguments, task, scratch = args
            b = e.builder
            batch, head, first_row, first_run, last_run = self.record(task, TASK)
            names = ("group_size", "num_heads", "q_len", "rows", "head_dim", "v_head_dim")
            group_size, num_heads, q_len, rows, head_dim, v_head_dim = (
                self.field(arguments, name) for name in names
            )
            count = e.sub(rows, first_row)
            kv_head = b.sdiv(head, group_size)
            key = self.operand(arguments, "key", batch, kv_head)
            value = self.operand(arguments, "value", batch, kv_head)
            query = self.operand(arguments, "query", batch, head)

            row = self.shape.vectors * e.vector_bytes
            width = vectors * e.vector_bytes
            packed = scratch
            total = e.at(packed, e.mul(head_dim, row))
            weights = e.at(total, e.mul(v_head_dim, row))
            stats = e.at(weights, BLOCK_KV * row)
            rescale, block_max = e.at(stats, 2 * width), e.at(stats, 4 * width)
            key_copy = e.at(stats, STATS * row)
            value_copy = e.at(key_copy, e.mul(head_dim, BLOCK_KV * e.real_bytes))
            transposed = e.at(value_copy, e.mul(v_head_dim, BLOCK_KV * e.real_bytes))

            def each_vector(body: Callable[[int, Value, Value], None]) -> None:
                """A vector beyond the last row repeats it."""
                for j in range(vectors):
                    first = e.least(j * e.lanes, e.sub(count, 1))
                    body(j * e.vector_bytes, first, e.sub(count, first))

            def begin(offset: int, first: Value, left: Value) -> None:
                to, row = e.at(packed, offset), e.add(first_row, first)
                b.call(functions["pack"], [arguments, query.pointer, to, row, e.index(width)])
                e.store_vector(e.const(-math.inf), e.at(stats, offset))
                for i in (1, 3, 5):
                    e.store_vector(e.const(0.0), e.at(stats, offset + i * width))

            each_vector(begin)
            e.loop(
                0, e.mul(v_head_dim, width), e.vector_bytes, [],
                lambda i, _: e.store_vector(e.const(0.0), e.at(total, i)),
            )  # fmt: skip

            def rows_of(kv_start: Value, keys: Value) -> tuple[Value, ...]:
                return (
                    *self.block_of(
                        arguments, "key", key, kv_start, keys, head_dim, key_copy, functions
                    ),
                    *self.block_of(
                        arguments, "value", value, kv_start, keys, v_head_dim, value_copy, functions
                    ),
                )

            def softmax(
                name: str, j: int, place: Value, kv_start: Value, keys: Value, marked: Value
            ) -> None:
                offset, first = j * e.vector_bytes, e.add(first_row, j * e.lanes)
                at = (arguments, place, e.at(stats, offset), transposed, e.index(width))
                b.call(functions[name], [*at, keys, batch, head, first, kv_start, marked])

            def together(name: str, kv_start: Value, keys: Value) -> None:
                """All queries meet all keys."""
                k, key_row, v, value_row = rows_of(kv_start, keys)
                sizes = (key_row, head_dim, keys, value_row, v_head_dim)
                b.call(scores, [k, packed, weights, block_max, v, *sizes])

                def weigh(marked: Value) -> None:
                    for j in range(vectors):
                        place = e.at(weights, j * e.vector_bytes)
                        softmax(name, j, place, kv_start, keys, marked)

                def add(which: Value) -> None:
                    b.call(which, [v, weights, rescale, total, value_row, v_head_dim, keys])

                if name == "full" and self.plain:
                    weigh(ir.Constant(BIT, 0))
                    add(values)
                    return
                finite = b.call(functions["all_finite"], [v, value_row, keys, v_head_dim])
                weigh(b.not_(finite))
                e.choose(finite, lambda: add(values), lambda: add(selected))

            def partly(kv_start: Value, keys: Value) -> None:
                if not self.steps:
                    together("partial", kv_start, keys)
                    return

                def add_selected(v: Value, value_row: Value, count: Value) -> None:
                    held = v, weights, rescale, total, value_row, v_head_dim, count
                    b.call(selected, held)

                cut = BoundaryBlock(
                    vectors, arguments, batch, head, first_row, packed, weights, rescale, total,
                    head_dim, v_head_dim, rows_of, partial(softmax, "partial"),
                    add_selected, partial(together, "partial"),
                )  # fmt: skip
                self.steps.meet(cut, functions["all_finite"], kv_start, keys)

            def block(kv_start: Value, keys: Value, is_partial: Value) -> None:
                def full() -> None:
                    together("full", kv_start, keys)

                if self.mask == TRUE:
                    full()
                else:
                    e.choose(is_partial, lambda: partly(kv_start, keys), full)

            runs = self.pointer_field(arguments, "runs")

            def each_run(r: Value, _: list[Value]) -> None:
                start, stop, kind = self.record(e.at(runs, e.mul(r, WORD * len(RUN))), RUN)
                is_partial = b.icmp_signed("!=", kind, e.index(0))
                e.loop(
                    start, stop, BLOCK_KV, [],
                    lambda k, _: block(k, e.least(BLOCK_KV, e.sub(stop, k)), is_partial),
                )  # fmt: skip

            e.loop(first_run, last_run, 1, [], each_run)
            place = e.add(e.mul(e.add(e.mul(batch, num_heads), head), q_len), first_row)

            def end(offset: int, first: Value, left: Value) -> None:
                held = e.at(total, offset), e.at(stats, offset), e.add(place, first)
                b.call(functions["unpack"], [arguments, *held, v_head_dim, e.index(width), left])

            each_vector(end)
        return function

    def block_of(
        self,
        arguments: Value,
        name: str,
        rows: tuple[Value, Value, Value],
        kv_start: Value,
        keys: Value,
        dim: Value,
        copy: Value,
        functions: dict[str, Value],
    ) -> tuple[Value, Value]:
        """A block of K or V with adjacent elements: where it lies, or copied."""
        e, b = self.e, self.e.builder
        pointer, row, element = rows
        here = e.at(pointer, e.mul(kv_start, row))

        def side_by_side() -> None:
            copy_rows = functions[f"copy {self.dtypes[name]}"]
            b.call(copy_rows, [here, row, element, keys, dim, copy])

        if self.dtypes[name] != real_dtype(e):
            side_by_side()
            return copy, e.mul(dim, e.real_bytes)
        needed = b.icmp_signed("!=", self.field(arguments, f"copy_{name}"), e.index(0))
        with b.if_then(needed, likely=False):
            side_by_side()
        return b.select(needed, copy, here), b.select(needed, e.mul(dim, e.real_bytes), row)

    def all_tasks(self) -> None:
        e = self.e
        functions = {
            "pack": self.pack(),
            "unpack": self.unpack(),
            "full": self.softmax("full", False),
        }
        for dtype in sorted(set(self.dtypes.values())):
            functions[f"copy {dtype}"] = copy_rows(e, dtype)
        if self.mask != TRUE:
            functions["partial"] = self.softmax("partial", True)
        if self.mask != TRUE or not self.plain:
            functions["all_finite"] = all_finite(e)
        self.steps = BoundaryBlocks(self) if skips_within_blocks(self.mask) else None
        one, many = (self.attend(v, functions) for v in (1, self.shape.vectors))

        def run(arguments: Value, number: Value, scratch: Value) -> None:
            tasks, rows = self.pointer_field(arguments, "tasks"), self.field(arguments, "rows")
            task = e.at(tasks, e.mul(number, WORD * len(TASK)))
            first_row = self.record(task, TASK)[TASK.index("first_row")]
            few = e.below(e.sub(rows, first_row), e.lanes + 1)
            call = [arguments, task, scratch]
            e.choose(few, lambda: e.builder.call(one, call), lambda: e.builder.call(many, call))

        self.job(run)
