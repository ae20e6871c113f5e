"""The decode kernel: few query rows against many keys, lanes along head_dim.

The query rows of all heads that share a kv head are the `rows` of one matrix Q, so that K and V are
read once. Keys are split into chunks, one task each, whatever the number of threads. A task goes
through its chunk stretch by stretch, and through many rows panel by panel:

    S[i, k] = score(scale * Q[i, :] . K[k, :])            -inf where the mask forbids the pair
    m'[i]   = max(m[i], max_k S[i, k])
    P[i, k] = exp(S[i, k] - m'[i])
    l[i]    = exp(m[i] - m'[i]) * l[i] + sum_k P[i, k]
    O[i, :] = exp(m[i] - m'[i]) * O[i, :] + sum_k P[i, k] * V[k, :]

where each sum over k adds up one sum for every block, and leaves (O, m, l) in a record. A counter
of each kv head shows which task is its last to finish. That task merges the records of all chunks
of the kv head, in the order of their keys:

    m = max_c m_c,   l = sum_c exp(m_c - m) l_c,   out = sum_c exp(m_c - m) O_c / l

so that results do not depend on which task finishes first. K and V of any type are widened as they
are loaded. The scale of a quantised key multiplies its scores, that of a value its weights. A
*segment* is rows of K or V with one stride: those of a block that lie in one page, or all of them.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"Flash-Decoding for long-context inference" (2023); Kwon et al., "PagedAttention" (2023).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from qkv.backends.cpu.decode.rows import DecodeFrame
from qkv.backends.cpu.decode.tasks import (
    BLOCK_KV,
    EMPTY,
    FULL,
    GROUP,
    PARTIAL,
    RECORD_ALIGNMENT,
    TASK,
    DecodeTasks,
)
from qkv.backends.cpu.decode.tile_blocks import TILE_BLOCK_KV, TileBlocks, tile_bytes
from qkv.backends.cpu.emit import storage, vector_math
from qkv.backends.cpu.emit.emitter import BIT, FLOAT, INT64, POINTER, Value
from qkv.backends.cpu.emit.expressions import Expressions, Neighbours
from qkv.backends.cpu.emit.packing import (
    all_finite_function,
    copy_rows_function,
    move_rows_function,
)
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.dim_lanes import RowProducts
from qkv.backends.cpu.products.tile_instructions import configure, release
from qkv.problem.expressions import SCORE, TRUE
from qkv.problem.spec import Spec

STRETCH_KV = 512
"""Number of keys whose scores are held at once. A large number means few updates of row maximum and
row sum, and long sequential reads of K and then of V."""
PART_KV = 32
"""Number of keys that all rows are multiplied with before the next keys of the block, if one tile
does not hold all rows."""
_PANEL = 128
"""The most rows that are multiplied with a stretch of keys at once, so that their scores stay in
the core's own cache."""


STATE = 4
"""Number of vectors that follow each row of O: row maximum m, row sum l, the rounding error of l,
and T = sum_k P[k] * (S[k] - m), which entropy is computed from."""


def padded(dim: int, lanes: int) -> int:
    return -(-dim // lanes) * lanes


def panel_of(spec: Spec) -> int:
    """Rows that are multiplied with a stretch of keys at once: all panels have about this size."""
    rows = max(1, spec.group_size * spec.q_len)
    return -(-rows // -(-rows // _PANEL))


def record_bytes(spec: Spec, shape: TileShape) -> int:
    """Bytes of the result of a task: for each row O, padded to whole vectors, and its state."""
    width = padded(spec.v_head_dim, shape.lanes) + STATE * shape.lanes
    row = -(-width * spec.compute_dtype.itemsize // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    return spec.group_size * spec.q_len * row


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: Q; P, sums B, and factors of a panel; scales, K or V; tiles."""
    rows, dims = spec.group_size * spec.q_len, (spec.head_dim, spec.v_head_dim)
    each_row = STRETCH_KV + padded(spec.v_head_dim, shape.lanes) + 2 * shape.lanes
    shared = 2 * STRETCH_KV + BLOCK_KV * max(dims) + rows * spec.head_dim
    size = (each_row * panel_of(spec) + shared) * spec.compute_dtype.itemsize
    stored = [each.dtype for each in (spec.key_storage, spec.value_storage) if each]
    if shape.byte_tiles and "int8" in stored:
        size += RECORD_ALIGNMENT + tile_bytes(rows, panel_of(spec), *dims)
    return -(-size // 4096) * 4096


@dataclass(frozen=True, slots=True)
class DecodeKey:
    """Everything that the code of one kernel depends on.

    `dtypes` are those of query, key and value as they are read, `paged` says whether key and value
    lie in pages; int8 has scales.
    """

    spec: Spec
    shape: TileShape
    int_bits: int
    dtypes: tuple[str, str, str]
    paged: tuple[bool, bool]
    out_dtype: str
    statistics: bool


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A worker's memory: matrices of one panel, scales of one stretch, Q, a block moved, tiles."""

    weights: Value
    block: Value
    rescale: Value
    key_scales: Value
    value_scales: Value
    packed: Value
    moved: Value
    tiles: Value


def emit_decode(key: DecodeKey) -> str:
    """The module of one kernel.

    `plan(arguments)` writes the tasks and says how many keys they have, `job(arguments, worker)`
    runs tasks until none is left, and `step(arguments, most)` does both for at most so many keys.
    """
    kernel = _Decode(key)
    kernel.emit_functions()
    return str(kernel.e.module)


class _Decode:
    """Writes the functions of one kernel."""

    def __init__(self, key: DecodeKey) -> None:
        self.frame = DecodeFrame(key.spec, key.shape, key.int_bits, key.dtypes, key.paged)
        self.e = self.frame.e
        self.out_dtype = key.out_dtype
        self.statistics = key.statistics
        self.plain = self.frame.score == SCORE
        """Whether there are no score mods, so that scores are the scaled products."""
        self.may_forbid = not self.plain or self.frame.mask != TRUE
        self.score_row = (STRETCH_KV + self.e.lanes) * self.e.real_bytes
        """Bytes of a row of S, with room behind it for a vector."""
        self.products = RowProducts(self.e, *key.dtypes[1:], self.score_row, key.shape)
        has_tiles = key.shape.byte_tiles and self.e.real == FLOAT and "int8" in key.dtypes
        self.tiles = TileBlocks(self.frame, self.products) if has_tiles else None

    def is_quantised(self, name: str) -> bool:
        return self.frame.dtypes[name] == "int8"

    # --- P = exp(S - m) --------------------------------------------------------------------------

    def softmax_function(self, name: str, masked: bool) -> Value:
        """A function for one row of one stretch: S becomes P; row maximum and sum are updated.

        It returns whether a pair is forbidden, whose weight is then -0.0; no other weight is.
        """
        e = self.e
        arguments = [*[POINTER] * 6, *[INT64] * 5]
        with e.function(name, arguments, BIT) as (function, args):
            arguments_, scores, state, rescale, key_scales, value_scales = args[:6]
            count, kv_start, batch, head, q_index = args[6:]
            b = e.builder
            row_max, row_sum, error, t_sum = (e.at(state, i * e.vector_bytes) for i in range(STATE))
            places = Expressions(
                e, self.frame.tables(arguments_),
                {"batch": batch, "head": head, "q_index": q_index}, self.frame.int_bits,
            )  # fmt: skip
            block_max = self._finish_scores(
                arguments_, places, scores, key_scales, count, kv_start, masked
            )
            old_max, block_max = e.load_vector(row_max), e.reduce(block_max, e.greatest)
            new_max = e.greatest(old_max, block_max)
            # A row that has seen no key has maximum -inf; shifted by it, -inf would become NaN.
            is_unseen = b.fcmp_ordered("==", new_max, e.const(-math.inf))
            shift = b.select(is_unseen, e.const(0.0), new_max)
            no_lanes = ir.Constant(ir.VectorType(BIT, e.lanes), None)

            def weigh_vector(k: Value, carried: list[Value]) -> list[Value]:
                place = e.at(scores, e.mul(k, e.real_bytes))
                score = e.load_vector(place)
                exponent = b.fsub(score, shift)
                is_forbidden = b.fcmp_ordered("==", score, e.const(-math.inf))
                weight = vector_math.exp_flushed(e, exponent)
                if self.may_forbid:
                    weight = b.select(is_forbidden, e.const(0.0), weight)
                total = b.fadd(carried[0], weight)
                lost = vector_math.error_of_sum(e, carried[0], weight, total)
                following = [total, b.fadd(carried[1], lost)]
                if self.statistics:
                    # T += weight * exponent, except where the weight is 0: 0 * -inf would be NaN.
                    added = e.fma(weight, exponent, carried[2])
                    adds = vector_math.exp_is_nonzero(e, exponent)
                    following.append(b.select(adds, added, carried[2]))
                if self.is_quantised("value"):
                    weight = b.fmul(
                        weight, e.load_vector(e.at(value_scales, e.mul(k, e.real_bytes)))
                    )
                if self.frame.spec.dropout:
                    index = self._key_numbers(e.add(kv_start, k), e.add(kv_start, count))
                    weight = b.fmul(weight, self.frame.dropout_factor(arguments_, places, index))
                if self.may_forbid:
                    weight = b.select(is_forbidden, e.const(-0.0), weight)
                    exists = e.first_lanes(e.sub(count, k))
                    following.append(b.or_(carried[-1], b.and_(is_forbidden, exists)))
                e.store_vector(weight, place)
                return following

            # The sum of the weights, what rounding took from it, and the sum for T.
            zeros = [e.const(0.0)] * (2 + self.statistics)

            def weigh_block(k: Value, carried: list[Value]) -> list[Value]:
                stop = e.least(e.add(k, BLOCK_KV), count)
                of_block = e.loop(k, stop, e.lanes, zeros + carried[len(zeros) :], weigh_vector)
                following = [*map(b.fadd, carried, of_block[: len(zeros)]), *of_block[len(zeros) :]]
                lost = vector_math.error_of_sum(e, carried[0], of_block[0], following[0])
                following[1] = b.fadd(following[1], lost)
                return following

            sums = e.loop(0, count, BLOCK_KV, zeros + [no_lanes] * self.may_forbid, weigh_block)
            max_change = b.fsub(old_max, shift)
            factor = vector_math.exp_flushed(e, max_change)
            e.store_vector(new_max, row_max)
            e.store_vector(factor, rescale)
            if self.statistics:
                # Before the first key the change is -inf, but 0 * -inf would be NaN.
                rebased = b.fmul(e.load_vector(row_sum), e.greatest(e.const(-1e4), max_change))
                old_t_sum = b.fmul(b.fadd(e.load_vector(t_sum), rebased), factor)
                e.store_vector(b.fadd(old_t_sum, sums[2]), t_sum)
            self._add_compensated(row_sum, error, factor, sums[0], sums[1])
            forbidden: Value = ir.Constant(BIT, 0)
            if self.may_forbid:
                lanes = ir.IntType(e.lanes)
                forbidden = b.icmp_unsigned("!=", b.bitcast(sums[-1], lanes), ir.Constant(lanes, 0))
            b.ret(forbidden)
        return function

    def _add_compensated(
        self, row_sum: Value, error: Value, factor: Value, more: Value, lost: Value
    ) -> None:
        """row_sum = factor * row_sum + more + lost: a plain sum over many blocks drifts.

        `error` becomes what the row sum has too much.
        """
        e, b = self.e, self.e.builder
        old = b.fmul(e.load_vector(row_sum), factor)
        lost = b.fsub(lost, b.fmul(e.load_vector(error), factor))
        new = b.fadd(old, more)
        lost = b.fadd(lost, vector_math.error_of_sum(e, old, more, new))
        e.store_vector(new, row_sum)
        e.store_vector(b.fneg(lost), error)

    def _key_numbers(self, first: Value, stop: Value) -> Value:
        """Numbers of keys in the lanes, from `first` on; lanes from `stop` on repeat the last."""
        e, b = self.e, self.e.builder
        last = self.frame.lane_integers(e.sub(stop, 1))
        index = b.add(self.frame.lane_integers(first), self.frame.lane_numbers())
        return b.select(b.icmp_signed("<", index, last), index, last)

    def _finish_scores(
        self,
        arguments: Value,
        places: Expressions,
        scores: Value,
        key_scales: Value,
        count: Value,
        kv_start: Value,
        masked: bool,
    ) -> Value:
        """Apply scales of keys, score mods and mask in place; gives each lane's largest score."""
        e, b = self.e, self.e.builder
        scale = e.splat(self.frame.real_field(arguments, "scale"))
        stop = e.add(kv_start, count)

        def finish_vector(k: Value, carried: list[Value]) -> list[Value]:
            place = e.at(scores, e.mul(k, e.real_bytes))
            score = b.fmul(e.load_vector(place), scale)
            if self.is_quantised("key"):
                score = b.fmul(score, e.load_vector(e.at(key_scales, e.mul(k, e.real_bytes))))
            first, left = e.add(kv_start, k), e.sub(count, k)
            beside = Neighbours(first, b.icmp_signed(">=", left, e.index(e.lanes)))
            inner = places.at_key(self._key_numbers(first, stop), score, beside)
            if not self.plain:
                score = inner.floats(self.frame.score)
            is_allowed = e.first_lanes(left)
            if masked:
                is_allowed = b.and_(is_allowed, inner.condition(self.frame.mask))
            score = b.select(is_allowed, score, e.const(-math.inf))
            e.store_vector(score, place)
            return [e.greatest(carried[0], score)]

        if not self.plain:
            places.hoist(self.frame.score)
        if masked:
            places.hoist(self.frame.mask)
        (largest,) = e.loop(0, count, e.lanes, [e.const(-math.inf)], finish_vector)
        return largest

    # --- All rows of Q ---------------------------------------------------------------------------

    def for_each_tile(
        self, rows: Value, tiles: Sequence[int], call: Callable[[int, Value], object]
    ) -> None:
        """`call(size, first_row)` for all rows, in tiles of the sizes in `tiles`."""
        e = self.e
        start = e.index(0)
        for size in tiles:

            def call_tile(i: Value, _: list[Value], size: int = size) -> None:
                call(size, i)

            stop = e.round_down(rows, size)
            e.loop(start, stop, size, [], call_tile)
            start = stop

    # --- Products --------------------------------------------------------------------------------

    def block_function(self, name: str, functions: dict[str, Value]) -> Value:
        """A function that multiplies Q with a block of K, or weights with a block of V.

        `(arguments, batch, kv_head, kv_start, count, rows, matrix, weights, moved, forbidden)`.
        """
        e, item = self.e, storage.ITEM_BYTES[self.frame.dtypes[name]]
        arguments, score_row = [POINTER, *[INT64] * 5, *[POINTER] * 3, BIT], self.score_row
        with e.function(f"{name}_block", arguments) as (function, args):
            arguments_, batch, kv_head, kv_start, count, rows, *matrices, forbidden = args
            b, (matrix, weights, moved) = e.builder, matrices
            place = self.frame.operand(arguments_, name, batch, kv_head)
            pages = self.frame.pages(arguments_, name, batch)
            dim = self.frame.field(arguments_, "head_dim" if name == "key" else "v_head_dim")
            scattered = b.icmp_signed("!=", place.element, e.index(item))

            block_row = self.block_row_bytes(dim)
            only = b.icmp_signed("==", self.frame.field(arguments_, "kv_len"), e.index(1))
            step, total = e.index(PART_KV), self.frame.bytes_of(arguments_, name)
            for size in self.products.tiles:
                is_one_tile = b.icmp_signed("==", rows, e.index(size))
                step = b.select(is_one_tile, e.index(BLOCK_KV), step)

            def multiply_tiles(*segment: Value) -> None:
                pointer, row, scores, keys, done = segment

                def multiply_part(k: Value, _: list[Value]) -> None:
                    here, to = e.at(pointer, e.mul(k, row)), e.at(scores, e.mul(k, e.real_bytes))
                    count, first = e.least(step, e.sub(keys, k)), e.add(kv_start, done, k)
                    place = [arguments_, batch, kv_head]
                    ahead = self.frame.page_ahead(name, place, here, first, count)

                    def multiply_tile(size: int, i: Value) -> None:
                        stop, p = e.add(i, size), e.at(to, e.mul(i, score_row))
                        prefetch = self.products.prefetch_share(
                            row, e.mul(dim, item), i, stop, rows, step, total, ahead
                        )
                        if name == "key":
                            q = e.at(matrix, e.mul(i, dim, e.real_bytes))
                            place = [here, q, p, row, dim, count]
                            b.call(functions[f"scores {size}"], [*place, *prefetch, only])
                        else:
                            o = e.at(matrix, e.mul(i, block_row))
                            place = [here, p, o, row, block_row, dim, count]
                            b.call(functions[f"values {size}"], [*place, *prefetch])

                    self.for_each_tile(rows, self.products.tiles, multiply_tile)

                e.loop(0, keys, step, [], multiply_part)

            def multiply_selected(*segment: Value) -> None:
                pointer, row, scores, keys, _ = segment

                def multiply_row(_: int, i: Value) -> None:
                    p, to = e.mul(i, score_row), e.mul(i, block_row)
                    place = [pointer, e.at(scores, p), e.at(matrix, to)]
                    b.call(functions["selected"], [*place, row, dim, keys])

                self.for_each_tile(rows, [1], multiply_row)

            def multiply(*where: Value) -> None:
                if name == "key" or "all_finite" not in functions:
                    multiply_tiles(*where)
                    return
                pointer, row, _, keys, _ = where

                def multiply_checked() -> None:
                    finite = b.call(functions["all_finite"], [pointer, row, keys, dim])
                    e.choose(
                        finite, lambda: multiply_tiles(*where), lambda: multiply_selected(*where)
                    )

                e.choose(forbidden, multiply_checked, lambda: multiply_tiles(*where))

            def multiply_segment(pointer: Value, done: Value, keys: Value) -> None:
                with b.if_then(scattered, likely=False):
                    b.call(
                        functions[f"move {name}"],
                        [pointer, place.row, place.element, keys, dim, moved],
                    )
                here = b.select(scattered, moved, pointer)
                row = b.select(scattered, e.mul(dim, item), place.row)
                multiply(here, row, e.at(weights, e.mul(done, e.real_bytes)), keys, done)

            self.frame.for_each_segment(name, place, pages, kv_start, count, multiply_segment)
        return function

    def block_row_bytes(self, v_head_dim: Value) -> Value:
        """Bytes of a row of O in whole vectors."""
        e = self.e
        return e.mul(e.round_down(e.add(v_head_dim, e.lanes - 1), e.lanes), e.real_bytes)

    # --- One chunk, and the merge of all of them -------------------------------------------------

    def record_row_bytes(self, block_row: Value) -> Value:
        """Bytes of one row of a record: a row of O and its state."""
        e = self.e
        size = e.add(block_row, STATE * e.vector_bytes + RECORD_ALIGNMENT - 1)
        return e.round_down(size, RECORD_ALIGNMENT)

    def clear_bytes(self, pointer: Value, size: Value) -> None:
        e = self.e
        e.loop(
            0, size, e.vector_bytes, [],
            lambda i, _: e.store_vector(e.const(0.0), e.at(pointer, i)),
        )  # fmt: skip

    def scratch_areas(self, arguments: Value, scratch: Value) -> _Scratch:
        """The areas of scratch memory, in the order of `scratch_bytes`."""
        e = self.e
        names = "rows", "panel", "head_dim", "v_head_dim"
        rows, panel, head_dim, v_head_dim = (self.frame.field(arguments, name) for name in names)
        block = e.at(scratch, e.mul(panel, self.score_row))
        rescale = e.at(block, e.mul(panel, self.block_row_bytes(v_head_dim)))
        key_scales = e.at(rescale, e.mul(panel, e.vector_bytes))
        value_scales = e.at(key_scales, STRETCH_KV * e.real_bytes)
        packed = e.at(value_scales, STRETCH_KV * e.real_bytes)
        moved = e.at(packed, e.mul(rows, head_dim, e.real_bytes))
        size = e.mul(e.larger_of(head_dim, v_head_dim), BLOCK_KV * e.real_bytes)
        end = e.add(e.builder.ptrtoint(e.at(moved, size), INT64), RECORD_ALIGNMENT - 1)
        tiles = e.pointer(e.round_down(end, RECORD_ALIGNMENT))
        return _Scratch(scratch, block, rescale, key_scales, value_scales, packed, moved, tiles)

    def state_address(self, record: Value, row: Value, block_row: Value) -> Value:
        """Where the state of a row lies, behind its row of O."""
        return self.e.at(record, self.e.mul(row, self.record_row_bytes(block_row)), block_row)

    def attend_stretch_function(self, functions: dict[str, Value]) -> Value:
        """A function that takes one panel of rows, from `first` on, through one stretch of keys.

        `(arguments, batch, kv_head, kv_start, count, first, record, scratch, partial)`.
        """
        e = self.e
        with e.function("attend_stretch", [POINTER, *[INT64] * 5, *[POINTER] * 2, BIT]) as (
            function,
            args,
        ):
            arguments, batch, kv_head, kv_start, count, first, record, scratch, partial = args
            b, false = e.builder, ir.Constant(BIT, 0)
            names = "group_size", "q_len", "rows", "panel", "head_dim", "v_head_dim"
            group_size, q_len, rows, panel, head_dim, v_head_dim = (
                self.frame.field(arguments, name) for name in names
            )
            own = self.scratch_areas(arguments, scratch)
            block_row = self.block_row_bytes(v_head_dim)
            panel_rows = e.least(panel, e.sub(rows, first))

            def for_each_block(name: str, matrix: Value, forbidden: Value) -> None:
                def multiply_blocks(function: str, most: int, *more: Value) -> None:
                    def multiply_block(k: Value, _: list[Value]) -> None:
                        where = [arguments, batch, kv_head, e.add(kv_start, k)]
                        keys = e.least(most, e.sub(count, k))
                        weights = e.at(own.weights, e.mul(k, e.real_bytes))
                        matrices = [matrix, weights, own.moved]
                        b.call(functions[function], [*where, keys, panel_rows, *matrices, *more])
                        if name == "value":
                            e.loop(0, panel_rows, 1, [], add_block)

                    e.loop(0, count, most, [], multiply_block)

                by_rows = functools.partial(multiply_blocks, name, BLOCK_KV, forbidden)
                if self.tiles is None or name not in self.tiles.names:
                    by_rows()
                    return
                function = f"{name} tiles", TILE_BLOCK_KV
                by_tiles = functools.partial(multiply_blocks, *function, own.tiles, first)
                e.choose(self.tiles.usable(arguments, name), by_tiles, by_rows)

            def add_block(i: Value, _: list[Value]) -> None:
                """O = factor * O + B; the factor is then 1 for the other blocks of the stretch."""
                place = e.at(own.rescale, e.mul(i, e.vector_bytes))
                factor = e.load_vector(place)
                e.store_vector(e.const(1.0), place)
                total = e.at(record, e.mul(e.add(first, i), self.record_row_bytes(block_row)))
                added = e.at(own.block, e.mul(i, block_row))

                def add_vector(d: Value, _: list[Value]) -> None:
                    to, more = e.at(total, d), e.at(added, d)
                    e.store_vector(e.fma(e.load_vector(to), factor, e.load_vector(more)), to)
                    e.store_vector(e.const(0.0), more)

                e.loop(0, block_row, e.vector_bytes, [], add_vector)

            def attend_values(name: str) -> None:
                def weigh_row(i: Value, seen: list[Value]) -> list[Value]:
                    row = e.add(first, i)
                    head = e.add(e.mul(kv_head, group_size), b.sdiv(row, q_len))
                    forbidden = b.call(
                        functions[name],
                        [arguments, e.at(own.weights, e.mul(i, self.score_row)),
                         self.state_address(record, row, block_row),
                         e.at(own.rescale, e.mul(i, e.vector_bytes)), own.key_scales,
                         own.value_scales, count, kv_start, batch, head, b.srem(row, q_len)],
                    )  # fmt: skip
                    return [b.or_(seen[0], forbidden)]

                (forbidden,) = e.loop(0, panel_rows, 1, [false], weigh_row)
                for_each_block("value", own.block, forbidden)

            for_each_block("key", e.at(own.packed, e.mul(first, head_dim, e.real_bytes)), false)
            if self.frame.mask == TRUE:
                attend_values("full")
            else:
                e.choose(partial, lambda: attend_values("partial"), lambda: attend_values("full"))
        return function

    def attend_run_function(self, functions: dict[str, Value]) -> Value:
        """A function that takes all rows through neighbouring blocks of one kind.

        `(arguments, batch, kv_head, start, stop, kind, record, scratch)`.
        """
        e = self.e
        kinds = [POINTER, *[INT64] * 5, *[POINTER] * 2]
        with e.function("attend_run", kinds) as (function, args):
            arguments, batch, kv_head, start, stop, kind, record, scratch = args
            b = e.builder
            with b.if_then(b.icmp_signed("==", kind, e.index(EMPTY))):
                b.ret_void()
            partial = b.icmp_signed("==", kind, e.index(PARTIAL))
            rows, panel = self.frame.field(arguments, "rows"), self.frame.field(arguments, "panel")
            own = self.scratch_areas(arguments, scratch)

            def attend_stretch(k: Value, _: list[Value]) -> None:
                where = [arguments, batch, kv_head, k, e.least(STRETCH_KV, e.sub(stop, k))]
                for name, scales in (("key", own.key_scales), ("value", own.value_scales)):
                    if self.is_quantised(name):
                        b.call(functions[f"{name} scales"], [*where, scales])

                def attend_rows(first: Value, _: list[Value]) -> None:
                    b.call(functions["attend stretch"], [*where, first, record, scratch, partial])

                e.loop(0, rows, panel, [], attend_rows)

            e.loop(start, stop, STRETCH_KV, [], attend_stretch)
        return function

    def attend_function(self, functions: dict[str, Value], tasks: DecodeTasks) -> Value:
        """A function `(arguments, task, record, scratch)` that writes the record of one chunk."""
        e = self.e
        with e.function("attend", [POINTER] * 4) as (function, args):
            arguments, task, record, scratch = args
            b = e.builder
            group, start, stop, full = self.frame.record(task, TASK)
            names = (
                "group_size", "q_len", "rows", "panel", "head_dim", "v_head_dim", "query_head",
                "num_kv_heads",
            )  # fmt: skip
            group_size, q_len, rows, panel, head_dim, v_head_dim, query_head, kv_heads = (
                self.frame.field(arguments, name) for name in names
            )
            batch, kv_head = b.sdiv(group, kv_heads), b.srem(group, kv_heads)
            own = self.scratch_areas(arguments, scratch)
            block_row = self.block_row_bytes(v_head_dim)

            query = self.frame.operand(arguments, "query", batch, e.mul(kv_head, group_size))
            head_bytes = e.mul(q_len, head_dim, e.real_bytes)

            def copy_head(g: Value, _: list[Value]) -> None:
                start = e.at(query.pointer, e.mul(g, query_head))
                target = e.at(own.packed, e.mul(g, head_bytes))
                rows_of_head = [start, query.row, query.element, q_len, head_dim, target]
                b.call(functions["copy query"], rows_of_head)

            e.loop(0, group_size, 1, [], copy_head)
            if self.tiles:
                self.tiles.split_query(functions, arguments, own.packed, own.tiles)
                configure(e)
            self.clear_bytes(own.block, e.mul(panel, block_row))
            self.clear_bytes(record, e.mul(rows, self.record_row_bytes(block_row)))
            e.loop(
                0, rows, 1, [],
                lambda i, _: e.store_vector(
                    e.const(-math.inf), self.state_address(record, i, block_row)
                ),
            )  # fmt: skip
            where = [arguments, batch, kv_head]

            def call_attend_run(start: Value, stop: Value, kind: Value) -> Value:
                return b.call(functions["attend run"], [*where, start, stop, kind, record, scratch])

            if self.frame.mask == TRUE:
                call_attend_run(start, stop, e.index(FULL))
            else:
                e.choose(
                    b.icmp_signed("!=", full, e.index(0)),
                    lambda: call_attend_run(start, stop, e.index(FULL)),
                    lambda: tasks.for_each_run(where, start, stop, call_attend_run),
                )
            if self.tiles:
                release(e)
        return function

    def merge_function(self) -> Value:
        """A function `(arguments, records, count, record_bytes, row, total)` that merges one row.

        `records` is where the row lies in the first record, `row` its number among all rows of the
        output, `total` is scratch memory. A row without keys has l = 0.
        """
        e = self.e
        arguments = [POINTER, POINTER, INT64, INT64, INT64, POINTER]
        with e.function("merge", arguments) as (function, args):
            arguments_, records, count, record_bytes, row, total = args
            b = e.builder
            v_head_dim = self.frame.field(arguments_, "v_head_dim")
            block_row = self.block_row_bytes(v_head_dim)

            def load_softmax_state(c: Value) -> list[Value]:
                start = e.at(records, e.mul(c, record_bytes), block_row)
                return [e.load_vector(e.at(start, i * e.vector_bytes)) for i in range(STATE)]

            lowest, zero = e.const(-math.inf), e.const(0.0)
            (row_max,) = e.loop(
                0, count, 1, [lowest], lambda c, old: [e.greatest(old[0], load_softmax_state(c)[0])]
            )
            is_unseen = b.fcmp_ordered("==", row_max, lowest)
            shift = b.select(is_unseen, zero, row_max)
            self.clear_bytes(total, block_row)

            def add_record(c: Value, sums: list[Value]) -> list[Value]:
                own_max, own_sum, sum_error, t_sum = load_softmax_state(c)
                exponent = b.fsub(own_max, shift)
                weight = vector_math.exp_flushed(e, exponent)
                out = e.at(records, e.mul(c, record_bytes))

                def add_vector(d: Value, _: list[Value]) -> None:
                    to = e.at(total, d)
                    e.store_vector(
                        e.fma(weight, e.load_vector(e.at(out, d)), e.load_vector(to)), to
                    )

                e.loop(0, block_row, e.vector_bytes, [], add_vector)
                added = b.fmul(weight, own_sum)
                row_sum = b.fadd(sums[0], added)
                rest = b.fsub(
                    vector_math.error_of_sum(e, sums[0], added, row_sum), b.fmul(weight, sum_error)
                )
                following = [row_sum, b.fadd(sums[1], rest)]
                if self.statistics:
                    rebased = e.fma(own_sum, e.greatest(e.const(-1e4), exponent), t_sum)
                    following.append(e.fma(weight, rebased, sums[2]))
                return following

            row_sum, rest, *t_sum = e.loop(0, count, 1, [zero] * (2 + self.statistics), add_record)
            row_sum, rest = vector_math.sum_of_lanes(e, row_sum, rest)
            t_sum = [e.reduce(x, b.fadd) for x in t_sum]
            empty = b.fcmp_ordered("==", row_sum, zero)
            divisor = b.select(empty, e.const(1.0), row_sum)
            statistics = row_max, row_sum, rest, empty, divisor, t_sum
            self._write_statistics(arguments_, row, *statistics)
            self._write_row(arguments_, row, total, divisor)
        return function

    def _write_statistics(
        self,
        arguments: Value,
        row: Value,
        row_max: Value,
        row_sum: Value,
        rest: Value,
        empty: Value,
        divisor: Value,
        t_sum: list[Value],
    ) -> None:
        """lse = m + log(l), and entropy = log(l) - T / l."""
        e, b = self.e, self.e.builder

        def write_first_lane(name: str, vector: Value) -> None:
            at = e.at(self.frame.pointer_field(arguments, name), e.mul(row, e.real_bytes))
            e.store(e.extract(vector, 0), at, e.real_bytes)

        zero, lowest = e.const(0.0), e.const(-math.inf)
        with b.if_then(b.icmp_signed("!=", self.frame.field(arguments, "lse"), e.index(0))):
            lse, _ = vector_math.add_log(e, row_max, row_sum, rest)
            write_first_lane("lse", b.select(empty, lowest, lse))
        if self.statistics:
            logarithm = vector_math.log(e, row_sum)
            entropy = b.fsub(logarithm, b.fdiv(t_sum[0], divisor))
            # Rounding may make the entropy of a single key slightly negative.
            is_negative = b.fcmp_ordered("<", entropy, zero)
            write_first_lane("entropy", b.select(b.or_(empty, is_negative), zero, entropy))
            write_first_lane("max_score", row_max)
            write_first_lane("max_weight", b.select(empty, zero, b.fdiv(e.const(1.0), divisor)))

    def _write_row(self, arguments: Value, row: Value, total: Value, divisor: Value) -> None:
        """out = O / l, rounded; adding 0 turns -0.0 into 0.0."""
        e, b, item = self.e, self.e.builder, storage.ITEM_BYTES[self.out_dtype]
        v_head_dim = self.frame.field(arguments, "v_head_dim")
        out = e.at(self.frame.pointer_field(arguments, "out"), e.mul(row, v_head_dim, item))

        def write_vector(d: Value, seen: list[Value]) -> list[Value]:
            x = b.fdiv(e.load_vector(e.at(total, e.mul(d, e.real_bytes))), divisor)
            x = b.fadd(x, e.const(0.0))
            storage.store(e, x, e.at(out, e.mul(d, item)), self.out_dtype)
            return [e.fma(x, e.const(0.0), seen[0])]

        def write_element(d: Value, seen: list[Value]) -> list[Value]:
            zero = ir.Constant(e.real, 0.0)
            x = e.load(e.at(total, e.mul(d, e.real_bytes)), e.real, e.real_bytes)
            x = b.fadd(b.fdiv(x, e.extract(divisor, 0)), zero)
            storage.store(e, x, e.at(out, e.mul(d, item)), self.out_dtype)
            return [e.fma(x, zero, seen[0])]

        whole = e.round_down(v_head_dim, e.lanes)
        (seen,) = e.loop(0, whole, e.lanes, [e.const(0.0)], write_vector)
        (last,) = e.loop(whole, v_head_dim, 1, [ir.Constant(e.real, 0.0)], write_element)
        self.frame.report_not_finite(arguments, b.fadd(seen, e.splat(last)))

    def emit_functions(self) -> None:
        e = self.e
        functions = {"copy query": copy_rows_function(e, self.frame.dtypes["query"])}
        for rows in self.products.tiles:
            functions[f"scores {rows}"] = self.products.scores_function(rows)
            functions[f"values {rows}"] = self.products.values_function(rows)
        for name in ("key", "value"):
            functions[f"move {name}"] = move_rows_function(
                e, name, storage.ITEM_BYTES[self.frame.dtypes[name]]
            )
        if self.may_forbid and not self.is_quantised("value"):
            functions["all_finite"] = all_finite_function(e, self.frame.dtypes["value"])
            functions["selected"] = self.products.selected_values_function()
        for name in ("key", "value"):
            functions[name] = self.block_function(name, functions)
            if self.is_quantised(name):
                functions[f"{name} scales"] = self.frame.copy_scales_function(name)
        if self.tiles:
            self.tiles.emit_functions(functions)
        functions["full"] = self.softmax_function("full", False)
        if self.frame.mask != TRUE:
            functions["partial"] = self.softmax_function("partial", True)
        functions["attend stretch"] = self.attend_stretch_function(functions)
        functions["attend run"] = self.attend_run_function(functions)
        tasks = DecodeTasks(self.frame)
        attend, merge = self.attend_function(functions, tasks), self.merge_function()

        def run_task(arguments: Value, number: Value, scratch: Value) -> None:
            b = e.builder
            tasks = self.frame.pointer_field(arguments, "tasks")
            task = self.frame.record_at(tasks, number, TASK)
            group, *_ = self.frame.record(task, TASK)
            groups = self.frame.pointer_field(arguments, "groups")
            own = self.frame.record_at(groups, group, GROUP)
            _, first_record, count, _ = self.frame.record(own, GROUP)
            rows = self.frame.field(arguments, "rows")
            record_row = self.record_row_bytes(
                self.block_row_bytes(self.frame.field(arguments, "v_head_dim"))
            )
            record_bytes = e.mul(rows, record_row)
            records = self.frame.pointer_field(arguments, "records")
            b.call(attend, [arguments, task, e.at(records, e.mul(number, record_bytes)), scratch])
            done = b.atomic_rmw("add", own, e.index(1), "acq_rel")
            with b.if_then(b.icmp_signed("==", done, e.sub(count, 1))):
                first = e.at(records, e.mul(first_record, record_bytes))
                # In the output, `rows` rows of every group follow one another.
                first_row = e.mul(group, rows)

                def merge_row(i: Value, _: list[Value]) -> None:
                    record, row = e.at(first, e.mul(i, record_row)), e.add(first_row, i)
                    b.call(merge, [arguments, record, count, record_bytes, row, scratch])

                e.loop(0, rows, 1, [], merge_row)

        plan = tasks.plan_function()
        self.frame.emit_job(run_task)
        tasks.emit_step(plan, e.module.globals["job"])
