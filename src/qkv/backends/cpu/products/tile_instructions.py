"""The instructions of the matrix unit (AMX), and the same written out for machines without one.

There are eight tiles, registers of 16 rows of 64 bytes. `configure` gives them their size before a
thread uses them, and `release` empties them. `multiply_add` adds the product of two tiles of
bfloat16 to a tile of float32, in this order (Intel, "Architectures Software Developer's Manual",
volume 2, TDPBF16PS, 2024), for each row m and column n:

    even = odd = 0
    for p in 0 .. 15:
        even = fma(A[m, 2p],     B[p, 2n],     even)
        odd  = fma(A[m, 2p + 1], B[p, 2n + 1], odd)
    C[m, n] = C[m, n] + (even + odd)

`multiply_add_bytes` adds the product of two tiles of int8 to a tile of int32 (TDPBSSD):

    C[m, n] = C[m, n] + sum_p sum_i A[m, 4p + i] * B[p, 4n + i]

Each operation on floats rounds to nearest, ties to even, whatever the thread's rounding mode; it
takes subnormal operands for zeros of their sign, and gives such zeros instead of subnormal results.
"""

from __future__ import annotations

import struct
from typing import Protocol

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BYTE, FLOAT, INT32, INT64, POINTER, VOID, Emitter, Value
from qkv.backends.cpu.products.bfloat16 import flushed, multiply_add, split_pairs
from qkv.backends.cpu.products.layout import TILE_BYTES, TILE_ROWS, TILE_SIZE, TILES


class TileInstructions(Protocol):
    """The eight tiles, by their numbers; rows in memory are `row` bytes apart."""

    def zero(self, tile: int) -> None: ...

    def load(self, tile: int, place: Value, row: Value) -> None: ...

    def load_once(self, tile: int, place: Value, row: Value) -> None: ...

    def store(self, tile: int, place: Value, row: Value) -> None: ...

    def multiply_add(self, total: int, left: int, right: int) -> None: ...

    def multiply_add_bytes(self, total: int, left: int, right: int) -> None: ...


def configure(e: Emitter) -> None:
    """Give all eight tiles their full size; to be called before a thread uses a tile."""
    if e.emulated:
        return
    setting = struct.pack("<BB14x8H16x8B8x", 1, 0, *[TILE_BYTES] * TILES, *[TILE_ROWS] * TILES)
    kind = ir.ArrayType(BYTE, len(setting))
    constant = e.constant_in_memory("tile_sizes", ir.Constant(kind, bytearray(setting)))
    e.machine_intrinsic("llvm.x86.ldtilecfg", VOID, constant)


def release(e: Emitter) -> None:
    """Empty the tiles of this thread, so that a task switch need not save them."""
    if not e.emulated:
        e.machine_intrinsic("llvm.x86.tilerelease", VOID)


def tiles_of(e: Emitter) -> TileInstructions:
    """The tiles for the function that is being emitted; no tile holds anything yet."""
    return EmulatedTiles(e) if e.emulated else MatrixUnit(e)


class MatrixUnit:
    """The instructions themselves."""

    def __init__(self, e: Emitter) -> None:
        self._e = e

    def zero(self, tile: int) -> None:
        self._emit("tilezero", tile)

    def load(self, tile: int, place: Value, row: Value) -> None:
        self._emit("tileloadd64", tile, place, row)

    def load_once(self, tile: int, place: Value, row: Value) -> None:
        """Load what will not be needed again soon, which leaves more of the first-level cache."""
        self._emit("tileloaddt164", tile, place, row)

    def store(self, tile: int, place: Value, row: Value) -> None:
        self._emit("tilestored64", tile, place, row)

    def multiply_add(self, total: int, left: int, right: int) -> None:
        self._emit("tdpbf16ps", total, left, right)

    def multiply_add_bytes(self, total: int, left: int, right: int) -> None:
        self._emit("tdpbssd", total, left, right)

    def _emit(self, instruction: str, *args: Value | int) -> None:
        """Emit an instruction; arguments of type int are numbers of tiles."""
        values = [ir.Constant(BYTE, arg) if isinstance(arg, int) else arg for arg in args]
        self._e.machine_intrinsic(f"llvm.x86.{instruction}", VOID, *values)


class EmulatedTiles:
    """Eight buffers of 1 KiB on the stack; each instruction is a call of a function.

    One thing differs from the processor: an exact result from (1 - 2^-24) 2^-126 on and below
    (1 - 2^-25) 2^-126 rounds to 2^-126 here and to 0 there.
    """

    def __init__(self, e: Emitter) -> None:
        self._e = e
        self._buffers = e.stack_vectors(TILES * TILE_ROWS)

    def zero(self, tile: int) -> None:
        e = self._e
        zeros = e.zeros_address()
        e.builder.call(self._copy(), [zeros, e.index(0), self._at(tile), e.index(TILE_BYTES)])

    def load(self, tile: int, place: Value, row: Value) -> None:
        e = self._e
        e.builder.call(self._copy(), [place, row, self._at(tile), e.index(TILE_BYTES)])

    load_once = load

    def store(self, tile: int, place: Value, row: Value) -> None:
        e = self._e
        e.builder.call(self._copy(), [self._at(tile), e.index(TILE_BYTES), place, row])

    def multiply_add(self, total: int, left: int, right: int) -> None:
        places = [self._at(tile) for tile in (total, left, right)]
        self._e.builder.call(self._multiply_add(), places)

    def multiply_add_bytes(self, total: int, left: int, right: int) -> None:
        places = [self._at(tile) for tile in (total, left, right)]
        self._e.builder.call(self._multiply_add_bytes(), places)

    def _at(self, tile: int) -> Value:
        return self._e.at(self._buffers, tile * TILE_SIZE)

    def _copy(self) -> Value:
        """A function `(from, row, to, to_row)` that copies 16 rows of 64 bytes."""
        e, name = self._e, "copy_tile"
        if (known := e.module.globals.get(name)) is not None:
            return known
        with e.function(name, [POINTER, INT64, POINTER, INT64]) as (function, args):
            source, row, target, to_row = args

            def copy_row(m: Value, _: list[Value]) -> None:
                # As integers: a float of a signaling NaN might not be copied bit by bit.
                bits = e.load(e.at(source, e.mul(m, row)), e.bits)
                e.store(bits, e.at(target, e.mul(m, to_row)), 1)

            e.loop(0, TILE_ROWS, 1, [], copy_row)
        return function

    def _multiply_add(self) -> Value:
        """A function `(total, left, right)` of the addresses of three tiles."""
        e, name = self._e, "multiply_add_tiles"
        if (known := e.module.globals.get(name)) is not None:
            return known
        with e.function(name, [POINTER] * 3) as (function, args):
            total, left, right = args
            halves = e.stack_vectors(4 * TILE_ROWS)
            places = {tile: e.at(halves, n * 2 * TILE_SIZE) for n, tile in enumerate("ab")}

            def split_row(i: Value, _: list[Value]) -> None:
                for tile, source in (("a", left), ("b", right)):
                    row = e.mul(i, TILE_BYTES)
                    pair = split_pairs(e, e.load_vector(e.at(source, row)))
                    for half, x in enumerate(pair):
                        e.store_vector(flushed(e, x), e.at(places[tile], row, half * TILE_SIZE))

            def multiply_row(m: Value, _: list[Value]) -> None:
                row = e.mul(m, TILE_BYTES)

                def add_pair(p: Value, sums: list[Value]) -> list[Value]:
                    new_sums = []
                    for half, x in enumerate(sums):
                        start = e.at(places["a"], row, half * TILE_SIZE)
                        a = e.splat(e.load(e.at(start, e.mul(p, 4)), FLOAT, 4))
                        b = e.load_vector(e.at(places["b"], e.mul(p, TILE_BYTES), half * TILE_SIZE))
                        new_sums.append(multiply_add(e, a, b, x))
                    return new_sums

                even, odd = e.loop(0, TILE_ROWS, 1, [e.const(0.0)] * 2, add_pair)
                both = flushed(e, e.builder.fadd(even, odd))
                before = flushed(e, e.load_vector(e.at(total, row)))
                e.store_vector(flushed(e, e.builder.fadd(before, both)), e.at(total, row))

            e.loop(0, TILE_ROWS, 1, [], split_row)
            e.loop(0, TILE_ROWS, 1, [], multiply_row)
        return function

    def _multiply_add_bytes(self) -> Value:
        """A function `(total, left, right)` of the addresses of three tiles."""
        e, name = self._e, "multiply_add_byte_tiles"
        if (known := e.module.globals.get(name)) is not None:
            return known
        with e.function(name, [POINTER] * 3) as (function, args):
            total, left, right = args
            b = e.builder

            def multiply_row(m: Value, _: list[Value]) -> None:
                row = e.mul(m, TILE_BYTES)

                def add_quad(p: Value, sums: list[Value]) -> list[Value]:
                    y = e.load(e.at(right, e.mul(p, TILE_BYTES)), e.bits)
                    total = sums[0]
                    for i in range(4):
                        x = e.load(e.at(left, row, e.mul(p, 4), i), BYTE)
                        y_i = b.ashr(b.shl(y, e.const_bits(24 - 8 * i)), e.const_bits(24))
                        total = b.add(total, b.mul(e.splat(b.sext(x, INT32)), y_i))
                    return [total]

                place = e.at(total, row)
                (new_row,) = e.loop(0, TILE_ROWS, 1, [e.load(place, e.bits)], add_quad)
                e.store(new_row, place, TILE_BYTES)

            e.loop(0, TILE_ROWS, 1, [], multiply_row)
        return function
