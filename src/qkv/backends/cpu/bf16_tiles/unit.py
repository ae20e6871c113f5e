"""One unit of the kernel: 16 queries over neighbouring keys, of which V and K lie in tiles.

It goes over the keys in groups of 32. A step multiplies tiles for two groups, and computes the
weights of a third between these products, so that the matrix unit and the vector units work at the
same time:

    scores of group i + 1   S = K Q^T        two tiles of 16 keys, stored as vectors of queries
    weights of group i      P = exp(S - shift)
    output of group i - 1   O += V^T P       the first 64 elements of O stay in four tiles

P of all keys of the unit is kept. The other elements of O, 64 at a time, are added afterwards.
Where weights take many instructions, all scores come first, then all weights, then the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from qkv.backends.cpu.bf16_tiles.layout import GROUP, MOST_GROUPS, SCORE_BYTES, Sizes
from qkv.backends.cpu.bf16_tiles.shift import PAIRS, Group, ShiftedRows, if_any
from qkv.backends.cpu.bf16_tiles.weights import MOST_BITS, Queries, Weights
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.transpose import transpose_tables
from qkv.backends.cpu.emit.transposed_loads import transposed_loads
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.products.layout import TILE_BYTES, TILE_SIZE
from qkv.backends.cpu.products.tile_instructions import TileInstructions, tiles_of
from qkv.problem.language.expressions import Op, walk

_HELD = 4
"""Tiles that hold O."""
MOST_OPERATIONS = 12
"""Operations of score mods and masks up to which weights are computed between products."""
_LONG = frozenset({"div", "exp", "floordiv", "log", "mod", "sqrt", "tanh"})
"""Operations that take many instructions, or cycles."""
_LEFT, _SCORES = 6, 7
"""The tile of a left factor, and that of scores."""


ARGUMENTS = (
    "arguments", "packed", "total", "stats", "keys", "values", "scores", "weights", "transposed",
    "batch", "head", "first_row", "kv_start", "count", "unmasked",
)  # fmt: skip
"""Arguments of the functions of a unit: nine addresses, six integers, and `marked`. `unmasked` is
the number of groups, from the first on, of which every query sees every key."""
ARGUMENT_TYPES = [*[POINTER] * 9, *[INT64] * 6, BIT]


def unit_function(frame: ForwardFrame, sizes: Sizes) -> Value:
    """A function of `ARGUMENTS`: weights of all keys of a unit; row sums and O are added to."""
    with frame.e.function("attend_to_keys", ARGUMENT_TYPES) as (function, (*args, marked)):
        _Body(frame, sizes, dict(zip(ARGUMENTS, args, strict=True)), marked).attend()
    return function


class _Body:
    """The body of the function of a unit, while it is written; `at` are its arguments."""

    def __init__(
        self, frame: ForwardFrame, sizes: Sizes, at: dict[str, Value], marked: Value
    ) -> None:
        self.frame, self.e, self.sizes = frame, frame.e, sizes
        self.at, self.marked = at, marked
        self.tiles: TileInstructions = tiles_of(self.e)
        self.row = self.e.index(TILE_BYTES)
        self.others_from = self.e.stack_words()
        """The first group whose weights are not yet multiplied with elements that are not held."""
        operations = [n.name for n in walk(frame.score, frame.mask) if isinstance(n, Op)]
        is_short = len(operations) <= MOST_OPERATIONS and _LONG.isdisjoint(operations)
        self.interleaves = is_short and not frame.spec.dropout
        """Whether weights are computed between products, all of a step written out."""

    def attend(self) -> None:
        e, b, at = self.e, self.e.builder, self.at
        groups = b.sdiv(e.add(at["count"], GROUP - 1), e.index(GROUP))
        e.store(e.index(0), self.others_from, WORD)
        self._load_queries()
        self._load_totals()
        self._transpose_tables()
        self.rows = ShiftedRows(Weights(self.frame, self._queries()), at["stats"])
        (self._attend_in_steps if self.interleaves else self._attend_in_phases)(groups)
        self._store_totals()
        self._add_other_values(groups)

    # Groups of keys

    def _attend_in_steps(self, groups: Value) -> None:
        """Products of tiles for two groups with the weights of a third between them."""
        e, unmasked = self.e, self.at["unmasked"]
        self._multiply_keys(e.index(0), lambda: None)
        e.loop(0, unmasked, 1, [], lambda i, _: self._step(i, checked=False))
        e.loop(unmasked, groups, 1, [], lambda i, _: self._step(i, checked=True))
        self._add_values(e.sub(groups, 1), lambda: None)

    def _attend_in_phases(self, groups: Value) -> None:
        """All scores, then all weights, then the output.

        While tiles are multiplied, and some time after, one of the two ports for multiply-adds is
        closed; and where weights take many instructions, a step that is written out is not decoded
        in time.
        """
        e, b, rows = self.e, self.e.builder, self.rows
        largest, factors = self.e.stack_vectors(MOST_GROUPS), self.e.stack_vectors(MOST_GROUPS)
        e.loop(0, groups, 1, [], lambda i, _: self._multiply_keys(i, lambda: None))
        unmasked, lowest = self.at["unmasked"], e.const(-math.inf)
        for start, stop, checked in ((0, unmasked, False), (unmasked, groups, True)):

            def finish(i: Value, _: list[Value], checked: bool = checked) -> None:
                maxima = self._largest_of(i, lowest, checked=checked, keep=True)
                e.store_vector(maxima, e.at(largest, e.mul(i, TILE_BYTES)))

            e.loop(start, stop, 1, [], finish)

        def weigh(i: Value, _: list[Value]) -> None:
            maxima = e.load_vector(e.at(largest, e.mul(i, TILE_BYTES)))
            bits = b.fmul(b.fsub(maxima, rows.shift(lambda: maxima)), rows.weights.factor)
            too_large = b.fcmp_ordered(">", bits, e.const(float(MOST_BITS)))
            place = e.at(factors, e.mul(i, TILE_BYTES))
            e.store_vector(e.const(1.0), place)
            if_any(e, too_large, lambda: e.store_vector(rows.raise_shift(too_large, maxima), place))
            group = self._group(i, checked=True, finished=True)
            group.weigh_in_loop(rows.shift_now())
            group.add_sums()

        def add(i: Value, _: list[Value]) -> None:
            factor = e.load_vector(e.at(factors, e.mul(i, TILE_BYTES)))
            changes = b.fcmp_unordered("!=", factor, e.const(1.0))
            if_any(e, changes, lambda: self._rescale(i, factor))
            self._add_values(i, lambda: None)

        e.loop(0, groups, 1, [], weigh)
        e.loop(0, groups, 1, [], add)

    def _step(self, i: Value, *, checked: bool) -> None:
        """Scores of group i + 1, weights of group i, output of group i - 1."""
        e, rows, group = self.e, self.rows, self._group(i, checked=checked)
        lowest = e.const(-math.inf)
        shift = rows.shift(lambda: self._largest_of(i, lowest))
        sums, done = group.no_sums(), 0
        products = 2 * self.sizes.chunks + min(_HELD, self.sizes.value_tiles)
        shares = iter(range(1, products + 1))

        def weigh_share() -> None:
            nonlocal sums, done
            stop = PAIRS * next(shares) // products
            for p in range(done, stop):
                sums = group.weigh(e.index(p), shift, sums)
            done = stop

        self._multiply_keys(e.add(i, 1), weigh_share)
        self._add_values(e.sub(i, 1), weigh_share, may_lack=True)
        group.store_sums(sums)
        too_large = rows.too_large()

        def weigh_again() -> None:
            largest = self._largest_of(i, lowest)
            self._rescale(i, rows.raise_shift(too_large, largest))
            group.weigh_in_loop(rows.shift_now())

        if_any(e, too_large, weigh_again)
        group.add_sums()

    def _rescale(self, i: Value, factor: Value) -> None:
        """Rescale O, to which the values of all groups before group i are added."""
        e = self.e
        self._store_totals()
        self._add_other_values(i)

        def scale(offset: Value, _: list[Value]) -> None:
            e.scale_vector(e.at(self.at["total"], offset), factor)

        e.loop(0, self.sizes.value_tiles * TILE_SIZE, TILE_BYTES, [], scale)
        self._load_totals()

    # Parts

    def _largest_of(
        self, i: Value, seen: Value, *, checked: bool = True, keep: bool = False
    ) -> Value:
        """The largest score of group i, or `seen` where that is larger."""
        scores, first = self._scores_of(i), self.e.mul(i, GROUP)
        return self.rows.largest_of(scores, first, seen, checked=checked, keep=keep)

    def _group(self, i: Value, *, checked: bool, finished: bool = False) -> Group:
        e = self.e
        target, first = e.at(self.at["weights"], e.mul(i, TILE_SIZE)), e.mul(i, GROUP)
        scores = self._scores_of(i)
        return Group(self.rows, scores, target, first, checked=checked, finished=finished)

    def _queries(self) -> Queries:
        at = self.at
        return Queries(
            at["arguments"], at["scores"], at["transposed"], at["batch"], at["head"],
            at["first_row"], at["kv_start"], at["count"], self.marked,
        )  # fmt: skip

    def _total_tile(self, d: int) -> Value:
        return self.e.at(self.at["total"], d * TILE_SIZE)

    def _scores_of(self, i: Value) -> Value:
        """Where the scores of group i are. In steps, those of two groups are needed at once."""
        slot = self.e.builder.and_(i, self.e.index(1)) if self.interleaves else i
        return self.e.at(self.at["scores"], self.e.mul(slot, SCORE_BYTES))

    def _load_totals(self) -> None:
        for d in range(min(_HELD, self.sizes.value_tiles)):
            self.tiles.load(d, self._total_tile(d), self.row)

    def _store_totals(self) -> None:
        for d in range(min(_HELD, self.sizes.value_tiles)):
            self.tiles.store(d, self._total_tile(d), self.row)

    def _load_queries(self) -> None:
        """Q stays in tiles 4 and 5 if it fits them."""
        if self.sizes.chunks <= 2:
            for c in range(self.sizes.chunks):
                self.tiles.load(4 + c, self.e.at(self.at["packed"], c * TILE_SIZE), self.row)

    def _transpose_tables(self) -> None:
        """Transpose the tables that have an entry for each pair."""
        frame, e, at = self.frame, self.e, self.at
        loads = transposed_loads(frame.spec)
        if not loads:
            return
        places = frame.places(at["arguments"], at["batch"], at["head"], at["first_row"])
        count = at["count"]
        transpose_tables(
            e, places, loads, at["kv_start"], count, frame.block_kv, at["transposed"]
        )  # fmt: skip

    def _multiply_keys(self, i: Value, meanwhile: Callable[[], None]) -> None:
        """The scores of group i. `meanwhile` is called after each product."""
        e, tiles, chunks = self.e, self.tiles, self.sizes.chunks
        keys = e.at(self.at["keys"], e.mul(i, self.sizes.key_bytes))
        scores = self._scores_of(i)
        if chunks <= 2:
            for half in range(2):
                tiles.zero(_SCORES)
                for c in range(chunks):
                    place = e.at(keys, (half * chunks + c) * TILE_SIZE)
                    tiles.load_once(_LEFT, place, self.row)
                    tiles.multiply_add(_SCORES, _LEFT, 4 + c)
                    meanwhile()
                tiles.store(_SCORES, e.at(scores, half * TILE_SIZE), self.row)
            return
        both = (_SCORES, 5)
        for tile in both:
            tiles.zero(tile)
        for c in range(chunks):
            tiles.load(4, e.at(self.at["packed"], c * TILE_SIZE), self.row)
            for half, tile in enumerate(both):
                place = e.at(keys, (half * chunks + c) * TILE_SIZE)
                tiles.load_once(_LEFT, place, self.row)
                tiles.multiply_add(tile, _LEFT, 4)
                meanwhile()
        for half, tile in enumerate(both):
            tiles.store(tile, e.at(scores, half * TILE_SIZE), self.row)

    def _add_values(
        self, i: Value, meanwhile: Callable[[], None], *, may_lack: bool = False
    ) -> None:
        """O += V^T P of group i, for the elements of O that are held; a group -1 adds zeros."""
        e, b, tiles = self.e, self.e.builder, self.tiles
        right = _SCORES if self.sizes.chunks <= 2 else 4
        weights = e.at(self.at["weights"], e.mul(i, TILE_SIZE))
        values, row, step = (
            e.at(self.at["values"], e.mul(i, self.sizes.value_bytes)),
            self.row,
            e.index(TILE_SIZE),
        )
        if may_lack:
            exists, zeros = b.icmp_signed(">=", i, e.index(0)), e.zeros_address()
            weights, values = (b.select(exists, place, zeros) for place in (weights, values))
            row, step = (b.select(exists, size, e.index(0)) for size in (row, step))
        tiles.load(right, weights, row)
        for d in range(min(_HELD, self.sizes.value_tiles)):
            tiles.load_once(_LEFT, e.at(values, e.mul(d, step)), row)
            tiles.multiply_add(d, _LEFT, right)
            meanwhile()

    def _add_other_values(self, stop: Value) -> None:
        """O += V^T P for elements of O that are not held, of groups up to `stop` not yet added."""
        e, tiles, count = self.e, self.tiles, self.sizes.value_tiles
        start = e.load(self.others_from, INT64, WORD)
        e.store(stop, self.others_from, WORD)
        for first in range(_HELD, count, _HELD):
            which = range(first, min(first + _HELD, count))
            for n, d in enumerate(which):
                tiles.load(n, self._total_tile(d), self.row)

            def add_group(i: Value, _: list[Value], which: range = which) -> None:
                tiles.load(4, e.at(self.at["weights"], e.mul(i, TILE_SIZE)), self.row)
                values = e.at(self.at["values"], e.mul(i, self.sizes.value_bytes))
                for n, d in enumerate(which):
                    tiles.load_once(_LEFT, e.at(values, d * TILE_SIZE), self.row)
                    tiles.multiply_add(n, _LEFT, 4)

            e.loop(start, stop, 1, [], add_group)
            for n, d in enumerate(which):
                tiles.store(n, self._total_tile(d), self.row)
        if self.sizes.chunks <= 2 and count > _HELD:
            self._load_queries()
