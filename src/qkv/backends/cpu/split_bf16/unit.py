"""32 queries over neighbouring keys, of which K and V lie in tiles of terms.

The keys are taken in groups of 32. A step multiplies tiles for two groups, and computes the
weights of a third between these products:

    scores of group i + 1   S = K Q^T        for 16 keys after the other
    weights of group i      P = exp(S - shift), truncated to terms
    output of group i - 1   O += V^T P       for 16 elements after the other

Sums of 16 rows and of all queries take two tiles. Two pairs of tiles take turns, so that one is
stored while the other is added to: stores that come together hold up the products.

Where rows have elements that cannot be split, all scores come first, and then the weights and the
output of one group after the other. The bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce

from qkv.backends.cpu.bf16_tiles.layout import GROUP, Sizes
from qkv.backends.cpu.bf16_tiles.shift import PAIRS, Group, ShiftedRows, if_any
from qkv.backends.cpu.bf16_tiles.unit import ARGUMENT_TYPES, ARGUMENTS
from qkv.backends.cpu.bf16_tiles.weights import Queries, Weights
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.forbidden_pairs import is_forbidden
from qkv.backends.cpu.emit.transpose import transpose_tables
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes, transposed_loads
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.products.bfloat16 import split_pairs
from qkv.backends.cpu.products.layout import TILE_BYTES, TILE_ROWS, TILE_SIZE
from qkv.backends.cpu.products.matrix_unit import Products
from qkv.backends.cpu.products.tile_instructions import TileInstructions, tiles_of
from qkv.backends.cpu.split_bf16.layout import SCORE_BYTES, VECTORS, WIDTH
from qkv.backends.cpu.split_bf16.terms import TermSplitter

_STORED_AFTER = 4
"""Products after which the sums before them are stored."""


class SplitWeights(Weights):
    """Weights truncated to terms. Scores are scaled first, with the rounding of other passes."""

    most_bits = 6
    """A weight may so be 64 at most. The error of an exponent grows with its size."""
    rounds = False
    is_scaled = True

    def __init__(self, frame: ForwardFrame, at: Queries, split: TermSplitter) -> None:
        super().__init__(frame, at)
        self._split = split

    def power_of_two(self, x: Value) -> Value:
        return vector_math.exp2_floored(self.e, x, precise=True)

    def _store_pair(self, bits: Sequence[Value], target: Value) -> None:
        first, second = map(self.e.as_floats, bits)
        self._split.store_pair(first, second, target)


def unit_function(
    name: str,
    emit: Callable[[UnitBody], None],
    frame: ForwardFrame,
    split: TermSplitter,
    sizes: Sizes,
) -> Value:
    """A function of `ARGUMENTS`, whose body `emit` writes."""
    with frame.e.function(name, ARGUMENT_TYPES) as (function, (*args, marked)):
        emit(UnitBody(frame, split, sizes, dict(zip(ARGUMENTS, args, strict=True)), marked))
    return function


class UnitBody:
    """The body of a function of a unit, while it is written; `at` are its arguments."""

    def __init__(
        self,
        frame: ForwardFrame,
        split: TermSplitter,
        sizes: Sizes,
        at: dict[str, Value],
        marked: Value,
    ) -> None:
        self.frame, self.e, self.split, self.sizes = frame, frame.e, split, sizes
        self.at, self.marked = at, marked
        self.tiles: TileInstructions = tiles_of(self.e)
        self.groups = self.e.builder.sdiv(self.e.add(at["count"], GROUP - 1), self.e.index(GROUP))
        self.rows: list[ShiftedRows] = []
        self.keeps_all = False
        """Whether scores and weights of all groups are kept, not those of two."""
        self._pair, self._since = 0, 0
        self._pending: list[tuple[int, Value]] = []

    def attend_in_steps(self) -> None:
        """Two groups of keys or more, without rows that cannot be split."""
        e, groups = self.e, self.groups
        self._begin_rows()
        self._multiply_keys(e.index(0), lambda: None)
        self._store_pending()
        last = e.sub(groups, 1)
        self._step(e.index(0), checked=True, values=False)
        middle = e.least(e.larger_of(self.at["unmasked"], 1), last)
        e.loop(1, middle, 1, [], lambda i, _: self._step(i, checked=False))
        e.loop(middle, last, 1, [], lambda i, _: self._step(i, checked=True))
        self._step(last, checked=True, scores=False)
        self._add_values(last, lambda: None)
        self._store_pending()

    def multiply_all_keys(self) -> None:
        """The scores of all groups."""
        self.keeps_all = True

        def multiply(i: Value, _: list[Value]) -> None:
            self._multiply_keys(i, lambda: None)
            self._store_pending()

        self.e.loop(0, self.groups, 1, [], multiply)

    def attend_in_turn(self) -> None:
        """The weights and the output of one group after the other."""
        self.keeps_all = True
        self._begin_rows()

        def attend(i: Value, _: list[Value]) -> None:
            for j, rows in enumerate(self.rows):
                shift = rows.shift(partial(self._largest_of, i, j))
                self._group(i, j, checked=True).weigh_in_loop(shift)
            self._check_shifts(i, checked=True)
            self._add_values(i, lambda: None)
            self._store_pending()

        self.e.loop(0, self.groups, 1, [], attend)

    # Groups of keys

    def _step(self, i: Value, *, checked: bool, scores: bool = True, values: bool = True) -> None:
        """Scores of group i + 1, weights of group i, output of group i - 1."""
        e, sizes = self.e, self.sizes
        groups = [self._group(i, j, checked=checked) for j in range(VECTORS)]
        shifts = [rows.shift(partial(self._largest_of, i, j)) for j, rows in enumerate(self.rows)]
        sums, done = [group.no_sums() for group in groups], 0
        of_scores, of_values = (len(self.split.products(of_weights=w)) for w in (False, True))
        products = VECTORS * (
            2 * sizes.chunks * of_scores * scores + sizes.value_tiles * of_values * values
        )
        shares = iter(range(1, products + 1))

        def weigh_share() -> None:
            nonlocal done
            stop = VECTORS * PAIRS * next(shares) // products
            for n in range(done, stop):
                j, p = divmod(n, PAIRS)
                sums[j] = groups[j].weigh(e.index(p), shifts[j], sums[j])
            done = stop

        if scores:
            self._multiply_keys(e.add(i, 1), weigh_share)
        if values:
            self._add_values(e.sub(i, 1), weigh_share)
        self._store_pending()
        for group, own in zip(groups, sums, strict=True):
            group.store_sums(own)
        self._check_shifts(i, checked=checked)

    def _check_shifts(self, i: Value, *, checked: bool) -> None:
        """Raise shifts that are too small, and add the sums of group i."""
        for j, rows in enumerate(self.rows):
            group, too_large = self._group(i, j, checked=checked), rows.too_large()

            def weigh_again(
                j: int = j,
                rows: ShiftedRows = rows,
                group: Group = group,
                too_large: Value = too_large,
            ) -> None:
                factor = rows.raise_shift(too_large, self._largest_of(i, j))
                self._rescale(j, factor)
                if self.keeps_all:
                    with self.e.builder.if_then(self.marked, likely=False):
                        self._rescale_weights(i, j, factor)
                group.weigh_in_loop(rows.shift_now())

            if_any(self.e, too_large, weigh_again)
            group.add_sums()

    def _rescale(self, j: int, factor: Value) -> None:
        """Rescale O, to which the values of all earlier groups are added."""
        e = self.e

        def scale(offset: Value, _: list[Value]) -> None:
            e.scale_vector(e.at(self.at["total"], offset), factor)

        stop = self.sizes.value_tiles * TILE_ROWS * WIDTH
        e.loop(j * TILE_BYTES, stop, WIDTH, [], scale)

    def _rescale_weights(self, i: Value, j: int, factor: Value) -> None:
        """Rescale the weights of groups before i: what of V cannot be split takes them at the end.

        The first term of a forbidden pair, which marks it, stays.
        """
        e, b, split = self.e, self.e.builder, self.split

        def scaled(first: Value, *others: Value) -> Value:
            forbidden = is_forbidden(e, first)
            return b.select(forbidden, first, b.fmul(reduce(b.fadd, others, first), factor))

        def scale_pair(k: Value, _: list[Value]) -> None:
            place = e.at(split.packed_row(self.at["weights"], k), j * TILE_BYTES)
            terms = [
                split_pairs(e, e.load_vector(e.at(place, n * split.term_bytes)))
                for n in range(split.terms)
            ]
            first, second = (scaled(*of_key) for of_key in zip(*terms, strict=True))
            split.store_pair(first, second, place)

        e.loop(0, e.mul(i, GROUP), 2, [], scale_pair)

    # Products

    def _multiply_keys(self, i: Value, meanwhile: Callable[[], None]) -> None:
        """The scores of group i. `meanwhile` is called after each product."""
        e, sizes = self.e, self.sizes
        keys = e.at(self.at["keys"], e.mul(i, sizes.key_bytes))
        for half in range(2):
            totals = self._take_turns()
            for tile in totals:
                self.tiles.zero(tile)
            for c in range(sizes.chunks):
                inside = c * sizes.terms
                left = e.at(keys, half * sizes.key_bytes // 2 + inside * TILE_SIZE)
                right = e.at(self.at["packed"], inside * TILE_ROWS * WIDTH)
                self._multiply(totals, left, right, self.split.products(), meanwhile)
            self._store_later(totals, e.at(self._scores_of(i), half * TILE_ROWS * WIDTH))

    def _add_values(self, i: Value, meanwhile: Callable[[], None]) -> None:
        """O += V^T P of group i."""
        e, sizes = self.e, self.sizes
        values = e.at(self.at["values"], e.mul(i, sizes.value_bytes))
        products = self.split.products(of_weights=True)
        for d in range(sizes.value_tiles):
            totals = self._take_turns()
            place = e.at(self.at["total"], d * TILE_ROWS * WIDTH)
            for j, tile in enumerate(totals):
                self.tiles.load(tile, e.at(place, j * TILE_BYTES), e.index(WIDTH))
            left = e.at(values, d * sizes.terms * TILE_SIZE)
            self._multiply(totals, left, self._weights_of(i), products, meanwhile)
            self._store_later(totals, place)

    def _multiply(
        self,
        totals: Sequence[int],
        left: Value,
        right: Value,
        products: Products,
        meanwhile: Callable[[], None],
    ) -> None:
        """Add the products of a tile in terms and of two tiles in terms."""
        e, tiles = self.e, self.tiles
        # The first term of the left factor is needed first and last.
        held: dict[int, int] = {}
        for x, y in products:
            tile = 4 if x == 0 else 5
            if held.get(tile) != x:
                tiles.load_once(tile, e.at(left, x * TILE_SIZE), e.index(TILE_BYTES))
                held[tile] = x
            for j, total in enumerate(totals):
                if held.get(6 + j) != y:
                    place = e.at(right, y * TILE_ROWS * WIDTH + j * TILE_BYTES)
                    tiles.load(6 + j, place, e.index(WIDTH))
                    held[6 + j] = y
                tiles.multiply_add(total, tile, 6 + j)
                self._since += 1
                if self._since == _STORED_AFTER:
                    self._store_pending()
                meanwhile()

    def _take_turns(self) -> tuple[int, int]:
        """The pair of tiles that is added to next."""
        self._pair, self._since = 1 - self._pair, 0
        return 2 * self._pair, 2 * self._pair + 1

    def _store_later(self, totals: Sequence[int], place: Value) -> None:
        self._store_pending()
        self._pending = [(t, self.e.at(place, j * TILE_BYTES)) for j, t in enumerate(totals)]

    def _store_pending(self) -> None:
        for tile, place in self._pending:
            self.tiles.store(tile, place, self.e.index(WIDTH))
        self._pending = []

    # Parts

    def _begin_rows(self) -> None:
        """What is known of the queries; tables with an entry for each pair are transposed."""
        e, frame, at = self.e, self.frame, self.at
        loads = transposed_loads(frame.spec)
        bytes_transposed = transposed_bytes(frame.spec, frame.block_kv, TILE_BYTES)
        for j in range(VECTORS):
            first_row = e.add(at["first_row"], j * TILE_ROWS)
            transposed = e.at(at["transposed"], j * bytes_transposed)
            if loads:
                places = frame.places(at["arguments"], at["batch"], at["head"], first_row)
                where = at["kv_start"], at["count"], frame.block_kv, transposed
                transpose_tables(e, places, loads, *where)
            queries = Queries(
                at["arguments"], at["scores"], transposed, at["batch"], at["head"], first_row,
                at["kv_start"], at["count"], self.marked,
            )  # fmt: skip
            weights = SplitWeights(frame, queries, self.split)
            stats = e.at(at["stats"], j * TILE_BYTES)
            self.rows.append(ShiftedRows(weights, stats, WIDTH))

    def _slot(self, i: Value) -> Value:
        return i if self.keeps_all else self.e.builder.and_(i, self.e.index(1))

    def _scores_of(self, i: Value) -> Value:
        return self.e.at(self.at["scores"], self.e.mul(self._slot(i), SCORE_BYTES))

    def _weights_of(self, i: Value) -> Value:
        group_bytes = self.sizes.terms * TILE_ROWS * WIDTH
        return self.e.at(self.at["weights"], self.e.mul(self._slot(i), group_bytes))

    def _largest_of(self, i: Value, j: int) -> Value:
        e = self.e
        scores = e.at(self._scores_of(i), j * TILE_BYTES)
        return self.rows[j].largest_of(scores, e.mul(i, GROUP), e.const(-math.inf))

    def _group(self, i: Value, j: int, *, checked: bool) -> Group:
        e = self.e
        scores, target = (
            e.at(x, j * TILE_BYTES) for x in (self._scores_of(i), self._weights_of(i))
        )
        return Group(self.rows[j], scores, target, e.mul(i, GROUP), checked=checked)
