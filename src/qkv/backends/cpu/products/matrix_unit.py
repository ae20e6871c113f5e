"""Products on the matrix unit of some x86 processors (AMX), of matrices made of bfloat16 tiles.

A tile is a register of 16 rows of 64 bytes. One instruction adds the product of two tiles to a
third, pairs of neighbouring bfloat16 being multiplied and added:

    C[m, n] += sum_p A[m, 2p] * B[p, 2n] + A[m, 2p+1] * B[p, 2n+1]        m, n, p < 16

Subnormal numbers count as zero in such products. The instructions, and their emulation, are those
of `tile_instructions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter, Value
from qkv.backends.cpu.products.layout import TILE_BYTES, TILE_ROWS, TILE_SIZE
from qkv.backends.cpu.products.tile_instructions import tiles_of

Products = tuple[tuple[int, int], ...]
"""Which products of terms are added: the number of a term of the left factor, and of the right."""


@dataclass(frozen=True, slots=True)
class SideWork:
    """Work for the vector units while tiles are multiplied, in equal steps.

    In each of the first `steps` steps, `emit(step, group)` is called after each of the products of
    terms, of which `group` is the number.
    """

    steps: Value
    emit: Callable[[Value, int], None]


def steps_of(e: Emitter, vectors: int, count: Value, pairs: Value) -> Value:
    """Number of steps of `multiply`, each of 32 rows, two vectors and 16 pairs."""
    b = e.builder
    blocks = b.sdiv(e.add(count, 2 * TILE_ROWS - 1), e.index(2 * TILE_ROWS))
    deep = b.sdiv(e.add(pairs, TILE_ROWS - 1), e.index(TILE_ROWS))
    return e.mul(blocks, -(-vectors // 2), deep)


def add_products(e: Emitter, name: str, vectors: int, *, onto: bool, products: Products) -> Value:
    """A function that does `multiply` with its arguments."""
    with e.function(name, [*[POINTER] * 3, *[INT64] * 3]) as (function, args):
        multiply(e, args, vectors, onto=onto, products=products)
    return function


def multiply(
    e: Emitter,
    args: Sequence[Value],
    vectors: int,
    *,
    onto: bool,
    products: Products,
    side_work: SideWork | None = None,
) -> None:
    """Emit a product of factors that are sums of bfloat16 terms:

        out[i, :] = (out[i, :] if onto else 0) + sum_ab sum_p rows[a][i, p] . packed[b][p, :]

    for the `products` a, b of a term of the left factor and one of the right, in this order for
    each 16 pairs of bfloat16; a term that two neighbours in `products` share is loaded once. `args`
    are (rows, packed, out, band, count, pairs). Both factors lie in the order in which they are
    read. `rows` are tiles of 16 rows and 16 pairs, one for each term, then the tiles of the next 16
    pairs; the next 16 rows lie `band` bytes on. `packed` has 16 rows of `vectors` vectors for each
    term, then the rows of the next 16 pairs.
    """
    rows, packed, out, band, count, pairs = args
    across = min(vectors, 2)
    terms = 1 + max(term for product in products for term in product)
    tile_row, out_row = e.index(TILE_BYTES), e.index(vectors * TILE_BYTES)
    totals = [[2 * m + n for n in range(across)] for m in range(2)]
    left, right = (4, 5), (6, 7)
    b, tiles = e.builder, tiles_of(e)

    def multiply_block(i: Value, _: list[Value]) -> None:
        bands = [e.mul(b.sdiv(i, e.index(TILE_ROWS)), band)]
        bands.append(e.add(bands[0], band))

        def multiply_strip(first: Value, _: list[Value]) -> None:
            """The sums of 32 rows and of as many vectors as tiles hold, from vector `first` on."""
            corner = e.at(out, e.mul(i, vectors * TILE_BYTES), e.mul(first, TILE_BYTES))
            places = [
                (tile, e.at(corner, m * vectors * TILE_SIZE, n * TILE_BYTES))
                for m in range(2)
                for n, tile in enumerate(totals[m])
            ]
            for tile, place in places:
                if onto:
                    tiles.load(tile, place, out_row)
                else:
                    tiles.zero(tile)

            def multiply_chunk(p: Value, _: list[Value]) -> None:
                # A chunk is 16 pairs along the summed dimension, as deep as a tile.
                here = e.mul(p, TILE_BYTES * terms)
                lefts = [e.at(rows, start, here) for start in bands]
                there = e.at(packed, e.mul(here, vectors))
                rights = [e.at(there, e.mul(e.add(first, n), TILE_BYTES)) for n in range(across)]

                def add_all_products(meanwhile: Callable[[int], None]) -> None:
                    held: tuple[int, int] = (-1, -1)
                    for group, (x, y) in enumerate(products):
                        if x != held[0]:
                            for tile, place in zip(left, lefts, strict=True):
                                tiles.load(tile, e.at(place, x * TILE_SIZE), tile_row)
                        if y != held[1]:
                            for tile, place in zip(right, rights, strict=False):
                                place = e.at(place, y * vectors * TILE_SIZE)
                                tiles.load(tile, place, out_row)
                        held = (x, y)
                        for m in range(2):
                            for n in range(across):
                                tiles.multiply_add(totals[m][n], left[m], right[n])
                        meanwhile(group)

                if side_work is None:
                    add_all_products(lambda _: None)
                    return
                blocks = e.mul(b.sdiv(i, e.index(2 * TILE_ROWS)), vectors // across)
                blocks = e.add(blocks, b.sdiv(first, e.index(across)))
                number = e.mul(blocks, b.sdiv(pairs, e.index(TILE_ROWS)))
                number = e.add(number, b.sdiv(p, e.index(TILE_ROWS)))
                emit = side_work.emit
                e.choose(
                    e.below(number, side_work.steps),
                    lambda: add_all_products(lambda group: emit(number, group)),
                    lambda: add_all_products(lambda _: None),
                )

            e.loop(0, pairs, TILE_ROWS, [], multiply_chunk)
            for tile, place in places:
                tiles.store(tile, place, out_row)

        e.loop(0, vectors, across, [], multiply_strip)

    e.loop(0, count, 2 * TILE_ROWS, [], multiply_block)
