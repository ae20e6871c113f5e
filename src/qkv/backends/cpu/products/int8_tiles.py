"""Both products of decoding with rows of int8 on the matrix unit of x86 (AMX).

Q and the weights are not int8 numbers, so each of their rows is counted in a unit of its own, a
power of two, and the count is written with four digits of base 256, each of which is an int8:

    x[i] = unit * sum_t 256^t digit[t, i] + rest,    |rest| < unit <= 2^-29 max_i |x[i]|

Products of digits with rows of K or V are whole numbers, which the matrix unit adds without
rounding. Four rows are multiplied at once, since a tile has room for their sixteen rows of digits.

    S[i, k] = unit[i] * sum_t 256^t (sum_d digit[t, i, d] K[k, d])
    B[i, :] = unit[i] * sum_t 256^t (sum_k digit[t, i, k] V[k, :])

The rows of K are the left factor as they lie. Those of V are the right one, of which four rows
are interleaved byte by byte. A row that has no unit, because it is not finite or its elements are
very large or small, has unit 0 here, and its products are left to `RowProducts`. So no row depends
on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BYTE, FLOAT, INT32, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.products.layout import ROWS, TILE_BYTES, TILE_ROWS, TILE_SIZE
from qkv.backends.cpu.products.tile_instructions import tiles_of

DIGITS = 4
_FLOAT_BYTES = 4
_QUAD = 4
"""Bytes that the matrix unit multiplies with one another and adds."""
_BYTES = ir.VectorType(BYTE, TILE_BYTES)
_SMALLEST, _LARGEST = 31, 223
"""Biased exponents of the largest elements that a row with a unit may have."""
_HALVES = 0x00808080
"""128 in all digits but the last: added and taken away bit by bit, it makes bytes signed digits."""


class Int8Tiles:
    """Writes the functions of one kernel; `score_row` is as in `RowProducts`.

    `ahead` and `asked` say how far ahead of each row to prefetch, and how many bytes, as
    `RowProducts.prefetch_share` does; into the second-level cache, since the nearest one holds
    what is computed.
    """

    def __init__(self, e: Emitter, score_row: int) -> None:
        self.e, self.score_row = e, score_row

    # Digits

    def _unit(self, row: Value, live: Value, place: Value, largest: Value) -> tuple[Value, Value]:
        """What the elements of a row are divided by, as a factor, and the bits of this vector.

        `largest` are the bits of the largest magnitude; the unit is stored at `place`.
        """
        e, b = self.e, self.e.builder
        exponent = b.lshr(largest, ir.Constant(INT32, 23))
        is_zero = b.icmp_signed("==", largest, ir.Constant(INT32, 0))
        above = b.icmp_signed(">=", exponent, ir.Constant(INT32, _SMALLEST))
        below = b.icmp_signed("<=", exponent, ir.Constant(INT32, _LARGEST))
        exists = b.icmp_signed("<", row, live)
        usable = b.and_(exists, b.and_(above, below))

        def power(bits: Value, otherwise: float) -> Value:
            power_of_two = b.bitcast(b.shl(bits, ir.Constant(INT32, 23)), FLOAT)
            return b.select(usable, power_of_two, ir.Constant(FLOAT, otherwise))

        # Counts are below 2^30, so that the last digit is at most 64.
        unit = power(b.sub(exponent, ir.Constant(INT32, 29)), 0.0)
        unit = b.select(b.and_(exists, is_zero), ir.Constant(FLOAT, 1.0), unit)
        e.store(unit, e.at(place, e.mul(row, _FLOAT_BYTES)), _FLOAT_BYTES)
        return power(b.sub(ir.Constant(INT32, 283), exponent), 0.0), usable

    def _magnitude(self, x: Value, largest: Value) -> Value:
        e, b = self.e, self.e.builder
        bits = b.and_(e.as_bits(x), e.const_bits(2**31 - 1))
        return b.select(b.icmp_unsigned(">", bits, largest), bits, largest)

    def _largest(self, bits: Value) -> Value:
        e, b = self.e, self.e.builder

        def larger(x: Value, y: Value) -> Value:
            return b.select(b.icmp_unsigned(">", x, y), x, y)

        return e.extract(e.reduce(bits, larger), 0)

    def _digits(self, x: Value, factor: Value, usable: Value) -> Value:
        """The four digits of each element, as bytes of its lane, the smallest first."""
        e, b = self.e, self.e.builder
        x = b.select(usable, x, e.const(0.0))
        count = b.fptosi(b.fmul(x, e.splat(factor)), e.bits)
        return b.xor(b.add(count, e.const_bits(_HALVES)), e.const_bits(_HALVES))

    def _order(self, picks: Iterable[int]) -> Value:
        """The constant by which a shuffle takes these bytes."""
        return ir.Constant(ir.VectorType(INT32, TILE_BYTES), list(picks))

    def split_query_function(self) -> Value:
        """A function `(rows, live, head_dim, digits, units)` for one tile of `live` rows of Q.

        Each 64 elements are a tile of 16 rows, one for four elements; byte i of column 4 r + t is
        digit t of element i of row r.
        """
        e = self.e
        with e.function("split_query", [POINTER, INT64, INT64, POINTER, POINTER]) as (f, args):
            rows, live, head_dim, digits, units = args
            b = e.builder
            order = self._order(
                16 * lane + _QUAD * i + t
                for lane in range(4)
                for t in range(DIGITS)
                for i in range(_QUAD)
            )

            def split_row(r: Value, _: list[Value]) -> None:
                row = e.at(rows, e.mul(e.least(r, e.sub(live, 1)), head_dim, _FLOAT_BYTES))

                def load(d: Value) -> Value:
                    return e.load_vector(e.at(row, e.mul(d, _FLOAT_BYTES)), aligned=False)

                (bits,) = e.loop(
                    0, head_dim, e.lanes, [e.const_bits(0)],
                    lambda d, old: [self._magnitude(load(d), old[0])],
                )  # fmt: skip
                factor, usable = self._unit(r, live, units, self._largest(bits))

                def split_vector(d: Value, _: list[Value]) -> None:
                    digit_bits = b.bitcast(self._digits(load(d), factor, usable), _BYTES)
                    digit_bits = b.bitcast(b.shuffle_vector(digit_bits, digit_bits, order), e.bits)
                    column = e.at(digits, e.mul(d, TILE_ROWS), e.mul(r, _QUAD * DIGITS))
                    for lane in range(4):
                        part = e.lanes_from(digit_bits, DIGITS * lane, DIGITS)
                        e.store(part, e.at(column, lane * TILE_BYTES), _FLOAT_BYTES)

                e.loop(0, head_dim, e.lanes, [], split_vector)

            e.loop(0, ROWS, 1, [], split_row)
        return f

    def split_weights_function(self) -> Value:
        """A function `(weights, count, live, digits, units)` for one tile of `live` rows.

        Each 64 keys are a tile, whose row 4 r + t has digit t of the weights of row r.
        """
        e = self.e
        with e.function("split_weights", [POINTER, INT64, INT64, POINTER, POINTER]) as (f, args):
            weights, count, live, digits, units = args
            b = e.builder
            stop = e.round_down(e.add(count, TILE_BYTES - 1), TILE_BYTES)
            order = self._order(_QUAD * k + t for t in range(DIGITS) for k in range(e.lanes))

            def split_row(r: Value, _: list[Value]) -> None:
                row = e.at(weights, e.mul(e.least(r, e.sub(live, 1)), self.score_row))

                def load(k: Value) -> Value:
                    x = e.load_vector(e.at(row, e.mul(k, _FLOAT_BYTES)), aligned=False)
                    return b.select(e.first_lanes(e.sub(count, k)), x, e.const(0.0))

                (bits,) = e.loop(
                    0, count, e.lanes, [e.const_bits(0)],
                    lambda k, old: [self._magnitude(load(k), old[0])],
                )  # fmt: skip
                factor, usable = self._unit(r, live, units, self._largest(bits))

                def split_vector(k: Value, _: list[Value]) -> None:
                    digit_bits = self._digits(load(k), factor, usable)
                    tile = e.at(digits, e.mul(b.sdiv(k, e.index(TILE_BYTES)), TILE_SIZE))
                    place = e.at(tile, b.srem(k, e.index(TILE_BYTES)), e.mul(r, ROWS * TILE_BYTES))
                    digit_bits = b.bitcast(digit_bits, _BYTES)
                    digit_bits = b.bitcast(b.shuffle_vector(digit_bits, digit_bits, order), e.bits)
                    for t in range(DIGITS):
                        part = e.lanes_from(digit_bits, 4 * t, 4)
                        e.store(part, e.at(place, t * TILE_BYTES), 16)

                e.loop(0, stop, e.lanes, [], split_vector)

            e.loop(0, ROWS, 1, [], split_row)
        return f

    def _sum_digits(self, sums: Sequence[Value]) -> Value:
        """sum_t 256^t sums[t] of whole numbers; the largest is added last."""
        e = self.e
        total, *others = (e.builder.sitofp(x, e.vector) for x in sums)
        for t, x in enumerate(others, 1):
            total = e.fma(x, e.const(256.0**t), total)
        return total

    def _exchange(self, rows: Sequence[Value], half: int, lanes: int) -> list[Value]:
        """Exchange `lanes` lanes of rows that are `half` rows apart, as a transposition does."""
        e, exchanged = self.e, list(rows)
        for i in range(len(rows)):
            if i & half:
                continue
            for row, shift in ((i, 0), (i + half, lanes)):
                picks = [
                    e.lanes + j - lanes + shift if j & lanes else j + shift for j in range(e.lanes)
                ]
                exchanged[row] = e.builder.shuffle_vector(
                    rows[i], rows[i + half], e.shuffle_mask(picks)
                )
        return exchanged

    # S = Q K^T

    def scores_function(self) -> Value:
        """A function that gives S of `live` rows of Q with a segment of keys.

        `(key, digits, units, out, key_row, head_dim, count, live, sums, spare, ahead, asked)`:
        `sums` has room for 64 bytes of each key, `spare` for 16 rows. Behind the last key, up to
        15 elements of each row of S are overwritten.
        """
        e = self.e
        kinds = [*[POINTER] * 4, *[INT64] * 4, *[POINTER] * 2, *[INT64] * 2]
        with e.function("tile_scores", kinds) as (function, args):
            key, digits, units, out, key_row, head_dim, count, live, *rest = args
            sums, spare, ahead, asked = rest
            b, tiles, tile_row = e.builder, tiles_of(e), e.index(TILE_BYTES)

            def multiply_keys(k: Value, held: int) -> None:
                """16 keys; of Q, the first `held` chunks are in tiles."""
                rows, left = e.at(key, e.mul(k, key_row)), e.sub(count, k)
                short = e.below(left, TILE_ROWS)
                with b.if_then(short, likely=False):
                    self._copy(rows, key_row, left, head_dim, spare)
                place = b.select(short, spare, rows)
                row = b.select(short, head_dim, key_row)
                tiles.zero(0)

                def multiply_chunk(d: Value, query: int) -> None:
                    tiles.load(1, e.at(place, d), row)
                    if not held:
                        tiles.load(query, e.at(digits, e.mul(d, TILE_ROWS)), tile_row)
                    tiles.multiply_add_bytes(0, 1, query)
                    with b.if_then(e.below(d, asked)):
                        later = e.at(rows, ahead, d)
                        for i in range(TILE_ROWS):
                            e.prefetch(e.at(later, e.mul(i, key_row)), soon=False)

                for chunk in range(held):
                    multiply_chunk(e.index(chunk * TILE_BYTES), 4 + chunk)
                if not held:
                    e.loop(0, head_dim, TILE_BYTES, [], lambda d, _: multiply_chunk(d, 4))
                tiles.store(0, e.at(sums, e.mul(k, TILE_BYTES)), tile_row)

            def multiply_two_chunks() -> None:
                for chunk in range(2):
                    tiles.load(4 + chunk, e.at(digits, chunk * TILE_SIZE), tile_row)
                e.loop(0, count, TILE_ROWS, [], lambda k, _: multiply_keys(k, 2))

            e.choose(
                b.icmp_signed("==", head_dim, e.index(2 * TILE_BYTES)),
                multiply_two_chunks,
                lambda: e.loop(0, count, TILE_ROWS, [], lambda k, _: multiply_keys(k, 0)),
            )
            unit = e.load(units, ir.VectorType(FLOAT, ROWS), _FLOAT_BYTES)
            unit = [
                b.shuffle_vector(unit, unit, e.shuffle_mask([r] * e.lanes)) for r in range(ROWS)
            ]

            def finish_keys(k: Value, _: list[Value]) -> None:
                quads = []
                for first in range(0, TILE_ROWS, _QUAD):
                    place = e.at(sums, e.mul(e.add(k, first), TILE_BYTES))
                    # A row has the four sums of each row of Q; they become lanes of four keys.
                    keys = [e.load(e.at(place, i * TILE_BYTES), e.bits, 4) for i in range(_QUAD)]
                    quads.append(self._sum_digits(self._exchange(self._exchange(keys, 1, 1), 2, 2)))
                for r, x in enumerate(self._exchange(self._exchange(quads, 1, 4), 2, 8)):
                    with b.if_then(e.below(r, live)):
                        to = e.at(out, r * self.score_row, e.mul(k, _FLOAT_BYTES))
                        e.store_vector(b.fmul(x, unit[r]), to, aligned=False)

            e.loop(0, count, TILE_ROWS, [], finish_keys)
        return function

    def _copy(self, rows: Value, row: Value, count: Value, dim: Value, target: Value) -> None:
        """Copy rows of whole chunks of 64 bytes side by side."""
        e = self.e

        def copy_row(k: Value, _: list[Value]) -> None:
            start, to = e.at(rows, e.mul(k, row)), e.at(target, e.mul(k, dim))
            e.loop(
                0, dim, TILE_BYTES, [],
                lambda d, _: e.store(e.load(e.at(start, d), _BYTES), e.at(to, d), 1),
            )  # fmt: skip

        e.loop(0, count, 1, [], copy_row)

    def copy_function(self) -> Value:
        """A function `(rows, row, count, dim, to)` that copies rows side by side."""
        with self.e.function("copy_bytes", [POINTER, *[INT64] * 3, POINTER]) as (function, args):
            self._copy(*args)
        return function

    # B = P V

    def interleave_function(self) -> Value:
        """A function `(value, value_row, done, keys, dim, ahead, asked, target)`.

        Rows become the right factor of tiles, as keys `done`, a multiple of 4, and following. The
        last of them is repeated up to a multiple of 4. Each 64 keys are `dim / 16` tiles. In each
        64 columns, tile x has columns 16 l + 4 x + i, in the order of l and then of i.
        """
        e = self.e
        with e.function("interleave", [POINTER, *[INT64] * 6, POINTER]) as (function, args):
            value, value_row, done, keys, dim, ahead, asked, target = args
            b = e.builder

            def zip_lanes(x: Value, y: Value, size: int, upper: bool) -> Value:
                """Elements of `size` bytes of both in turns, from one half of each 16 bytes."""
                picks = []
                for lane in range(0, TILE_BYTES, 16):
                    for i in range(8 // size):
                        start = lane + 8 * upper + i * size
                        picks += [start + n for n in range(size)]
                        picks += [TILE_BYTES + start + n for n in range(size)]
                return b.shuffle_vector(x, y, self._order(picks))

            def interleave_quad(k: Value, last: Value | None) -> None:
                numbers = [e.add(k, i) for i in range(_QUAD)]
                if last is not None:
                    numbers = [e.least(number, last) for number in numbers]
                rows = [e.at(value, e.mul(number, value_row)) for number in numbers]
                at = e.add(done, k)
                chunk = e.mul(b.sdiv(at, e.index(TILE_BYTES)), dim, TILE_BYTES)
                quad = e.mul(b.srem(at, e.index(TILE_BYTES)), TILE_ROWS)

                def interleave_columns(d: Value, _: list[Value]) -> None:
                    with b.if_then(e.below(d, asked)):
                        for row in rows:
                            e.prefetch(e.at(row, ahead, d), soon=False)
                    x = [e.load(e.at(row, d), _BYTES) for row in rows]
                    for half in range(2):
                        low, high = (zip_lanes(x[i], x[i + 1], 1, bool(half)) for i in (0, 2))
                        for part in range(2):
                            tile = e.mul(e.add(d, 16 * (2 * half + part)), TILE_BYTES)
                            to = e.at(target, chunk, tile, quad)
                            e.store(zip_lanes(low, high, 2, bool(part)), to, TILE_BYTES)

                e.loop(0, dim, TILE_BYTES, [], interleave_columns)

            whole = e.round_down(keys, _QUAD)
            e.loop(0, whole, _QUAD, [], lambda k, _: interleave_quad(k, None))
            e.loop(whole, keys, _QUAD, [], lambda k, _: interleave_quad(k, e.sub(keys, 1)))
        return function

    def values_function(self) -> Value:
        """A function that adds the product of a block to `live` rows of B.

        `(digits, units, interleaved, block, block_row, dim, count, live, sums)`: `sums` has room
        for `dim / 16` tiles.
        """
        e = self.e
        kinds = [*[POINTER] * 4, *[INT64] * 4, POINTER]
        with e.function("tile_values", kinds) as (function, args):
            digits, units, interleaved, block, block_row, dim, count, live, sums = args
            b, tiles, tile_row = e.builder, tiles_of(e), e.index(TILE_BYTES)

            def multiply_columns(d: Value, _: list[Value]) -> None:
                column = e.mul(d, TILE_BYTES)
                for x in range(4):
                    tiles.zero(x)

                def multiply_keys(k: Value, _: list[Value]) -> None:
                    tiles.load(4, e.at(digits, e.mul(k, TILE_ROWS)), tile_row)
                    for x in range(4):
                        place = e.at(interleaved, e.mul(k, dim), column, x * TILE_SIZE)
                        tiles.load(5 + x % 2, place, tile_row)
                        tiles.multiply_add_bytes(x, 4, 5 + x % 2)

                e.loop(0, count, TILE_BYTES, [], multiply_keys)
                for x in range(4):
                    tiles.store(x, e.at(sums, column, x * TILE_SIZE), tile_row)

            e.loop(0, dim, TILE_BYTES, [], multiply_columns)

            def add_row(r: Value, _: list[Value]) -> None:
                unit = e.splat(e.load(e.at(units, e.mul(r, _FLOAT_BYTES)), FLOAT, _FLOAT_BYTES))

                def add_columns(d: Value, _: list[Value]) -> None:
                    products = []
                    for x in range(4):
                        tile = e.at(sums, e.mul(e.add(d, TILE_ROWS * x), TILE_BYTES))
                        place = e.at(tile, e.mul(r, DIGITS * TILE_BYTES))
                        each = [e.load(e.at(place, t * TILE_BYTES), e.bits, 4) for t in range(4)]
                        products.append(b.fmul(self._sum_digits(each), unit))
                    products = self._exchange(self._exchange(products, 1, 4), 2, 8)
                    to = e.at(block, e.mul(r, block_row), e.mul(d, _FLOAT_BYTES))
                    for i, x in enumerate(products):
                        at = e.at(to, i * e.vector_bytes)
                        e.store_vector(b.fadd(e.load_vector(at), x), at)

                e.loop(0, dim, TILE_BYTES, [], add_columns)

            e.loop(0, live, 1, [], add_row)
        return function
