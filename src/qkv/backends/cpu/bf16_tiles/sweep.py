"""All units of a task over their runs of keys, one stretch of keys after the other.

A stretch is up to `Layout.block_kv` neighbouring keys, of which K and V are laid out as tiles
once. The schedule says for pieces of it, blocks of `PLANNED_KEYS` keys or several blocks that all
units see alike, what each block of queries sees of them. Of a unit, neighbouring pieces are
computed at once: first those of which it sees every key, then those in which the mask decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.bf16_pairs.rows import Bf16Rows
from qkv.backends.cpu.bf16_pairs.score_blocks import BLOCK_RUN
from qkv.backends.cpu.bf16_tiles.layout import GROUP, PLANNED_KEYS, Sizes
from qkv.backends.cpu.bf16_tiles.tasks import Task, Tasks, UnitRows
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import rows_from
from qkv.backends.cpu.forward.layout import LAST_PARTIAL, QUARTERS
from qkv.problem.tiles import TileKind

_EVERY_FIRST_BIT = 0x5555555555555555
_PIECE = ("start", "stop", "quarter", "kinds", "first", "last")
"""Words of a piece: where it begins and ends in the stretch, the keys of a quarter, and the words
of its run."""
_MOST_PIECES = 16


class Stretch(NamedTuple):
    """A stretch of keys whose K and V lie as tiles."""

    start: Value
    count: Value
    value: Value
    value_row: Value
    has_non_finite: Value


class Keys(NamedTuple):
    """Neighbouring keys that one unit sees: of those before `unmasked` it sees all."""

    start: Value
    stop: Value
    unmasked: Value


class Sweep(ABC):
    """Emits a function that visits all keys with all units of a task."""

    def __init__(self, tasks: Tasks, sizes: Sizes, functions: dict[str, Value]) -> None:
        self.tasks, self.sizes, self.functions = tasks, sizes, functions
        self.frame, self.e = tasks.frame, tasks.e
        self.block_kv = tasks.layout.block_kv

    def function(self) -> Value:
        """A function `(arguments, task, scratch)`."""
        e, frame = self.e, self.frame
        with e.function("sweep", [POINTER] * 3, in_place=True) as (function, args):
            arguments, record, scratch = args
            b = e.builder
            task = self.tasks.task(arguments, record, scratch)
            first_run, last_run = task.runs
            pieces, state = e.stack_words(_MOST_PIECES * len(_PIECE)), e.stack_words(4)
            run_at, key_at, number_at, filled_at = (e.at(state, WORD * n) for n in range(4))
            runs = frame.pointer_field(arguments, "runs")

            def read(place: Value) -> Value:
                return e.load(place, INT64, WORD)

            def write(value: Value, place: Value) -> None:
                e.store(value, place, WORD)

            def next_run() -> tuple[Value, Value]:
                number = read(run_at)
                return number, e.below(number, last_run)

            def start_of(number: Value) -> Value:
                """Where run `number` begins, or 0 after the last run."""
                exists = e.below(number, last_run)
                own = frame.record_at(runs, b.select(exists, number, first_run), BLOCK_RUN)
                return b.select(exists, read(own), e.index(0))

            def begin_run(number: Value) -> None:
                write(number, run_at)
                write(start_of(number), key_at)

            begin_run(first_run)

            def visit_stretch(_: Value) -> None:
                start = read(key_at)
                write(e.index(0), number_at)
                write(e.index(0), filled_at)

                def next_piece() -> tuple[Value, Value]:
                    """The run of the next piece, if it has one that joins the others and fits."""
                    run, filled = read(run_at), read(filled_at)
                    joins = b.icmp_signed("==", read(key_at), e.add(start, filled))
                    keys = self._piece_keys(runs, run, first_run, last_run, read(key_at))
                    fits = e.below(e.add(filled, keys), self.block_kv + 1)
                    has_room = e.below(read(number_at), _MOST_PIECES)
                    more = b.and_(e.below(run, last_run), b.and_(joins, b.and_(fits, has_room)))
                    return run, more

                def take_piece(run: Value) -> None:
                    at, filled, number = read(key_at), read(filled_at), read(number_at)
                    keys = self._piece_keys(runs, run, first_run, last_run, at)
                    _, stop, *words = frame.record(runs, BLOCK_RUN, run)
                    after = e.add(filled, keys)
                    quarter = self._quarter(words)
                    piece = frame.record_at(pieces, number, _PIECE)
                    for n, word in enumerate((filled, after, quarter, *words)):
                        write(word, e.at(piece, WORD * n))
                    write(after, filled_at)
                    write(e.add(number, 1), number_at)
                    write(e.add(at, keys), key_at)
                    with b.if_then(b.icmp_signed("==", e.add(at, keys), stop)):
                        begin_run(e.add(run, 1))

                e.take_while(next_piece, take_piece)
                stretch = self.lay_out(task, start, read(filled_at), pieces, read(number_at))
                self.tasks.for_each_unit(
                    task,
                    lambda i, unit: self._visit_unit(
                        task, stretch, pieces, read(number_at), i, unit
                    ),
                )

            e.take_while(next_run, visit_stretch)
        return function

    def _is_whole(self, words: list[Value]) -> Value:
        """Whether every block of queries sees each quarter of a run alike, or none."""
        e, b = self.e, self.e.builder
        kinds, first, last = words
        every, shifted = e.index(_EVERY_FIRST_BIT), b.lshr(kinds, e.index(1))
        sees = b.and_(b.or_(kinds, shifted), every)
        all_quarters = b.or_(sees, b.shl(sees, e.index(1)))
        same = b.and_(
            b.icmp_signed("==", first, e.index(0)), b.icmp_signed("==", last, all_quarters)
        )
        last_partial = b.and_(b.and_(kinds, shifted), every)
        return b.and_(same, b.icmp_signed("==", last_partial, e.index(0)))

    def _quarter(self, words: list[Value]) -> Value:
        """Keys of a quarter of a piece; a whole piece is all in the first one."""
        e = self.e
        sizes = e.index(self.block_kv), e.index(PLANNED_KEYS // QUARTERS)
        return e.builder.select(self._is_whole(words), *sizes)

    def _piece_keys(
        self, runs: Value, run: Value, first_run: Value, last_run: Value, at: Value
    ) -> Value:
        """The number of keys of the piece of a run that begins with key `at`."""
        e, b = self.e, self.e.builder
        existing = b.select(e.below(run, last_run), run, first_run)
        _, stop, *words = self.frame.record(runs, BLOCK_RUN, existing)
        size = b.select(self._is_whole(words), e.index(self.block_kv), e.index(PLANNED_KEYS))
        return e.least(size, e.sub(stop, at))

    @abstractmethod
    def lay_out(
        self, task: Task, start: Value, count: Value, pieces: Value, number: Value
    ) -> Stretch:
        """Lay out K and V of a stretch as tiles; its `pieces` are so many in `number`."""

    @abstractmethod
    def compute(self, task: Task, stretch: Stretch, unit: UnitRows, keys: Keys) -> None:
        """Compute what one unit sees of a stretch."""

    def arguments(
        self, task: Task, stretch: Stretch, unit: UnitRows, keys: Keys, count: Value
    ) -> list[Value]:
        """The arguments of the functions of a unit, for its `count` keys."""
        e, b, areas, sizes = self.e, self.e.builder, task.areas, self.sizes
        group = b.sdiv(keys.start, e.index(GROUP))
        return [
            task.arguments, unit.packed, unit.total, unit.stats,
            e.at(areas["keys"], e.mul(group, sizes.key_bytes)),
            e.at(areas["values"], e.mul(group, sizes.value_bytes)),
            areas["scores"], areas["weights"], areas["transposed"],
            task.batch, task.head, unit.row, e.add(stretch.start, keys.start), count,
            b.sdiv(e.sub(keys.unmasked, keys.start), e.index(GROUP)), stretch.has_non_finite,
        ]  # fmt: skip

    def _visit_unit(
        self,
        task: Task,
        stretch: Stretch,
        pieces: Value,
        number: Value,
        i: Value,
        unit: UnitRows,
    ) -> None:
        """Join the pieces that one unit sees, and compute them."""
        e, b = self.e, self.e.builder
        shift = e.mul(b.sdiv(i, e.index(self.tasks.layout.units_of_block)), 2)

        def visit_piece(n: Value, held: list[Value]) -> list[Value]:
            is_end = b.icmp_signed("==", n, number)
            # After the last piece its words are read again, and not used.
            piece = b.select(is_end, e.index(0), n)
            seen, is_seen = self._seen_keys(self.frame.record(pieces, _PIECE, piece), shift)
            is_seen = b.and_(is_seen, b.not_(is_end))
            before = Keys(*held)
            all_before = b.icmp_signed("==", before.unmasked, before.stop)
            none_here = b.icmp_signed("==", seen.unmasked, seen.start)
            joins = b.and_(
                b.icmp_signed("==", before.stop, seen.start), b.or_(all_before, none_here)
            )
            is_some = e.below(before.start, before.stop)
            is_over = b.or_(is_end, b.and_(is_seen, b.not_(joins)))
            with b.if_then(b.and_(is_over, is_some)):
                self.compute(task, stretch, unit, before)
            joined = Keys(
                b.select(joins, before.start, seen.start),
                seen.stop,
                b.select(b.and_(joins, b.not_(all_before)), before.unmasked, seen.unmasked),
            )
            return [b.select(is_seen, new, old) for new, old in zip(joined, held, strict=True)]

        e.loop(0, e.add(number, 1), 1, [e.index(0)] * 3, visit_piece)

    def _seen_keys(self, piece: list[Value], shift: Value) -> tuple[Keys, Value]:
        """What a unit sees of a piece, and whether it sees any of it."""
        e, b = self.e, self.e.builder
        start, stop, quarter, *words = piece
        kind, first, last = (b.and_(b.lshr(word, shift), e.index(QUARTERS - 1)) for word in words)
        begin = e.add(start, e.mul(first, quarter))
        end = e.least(e.add(start, e.mul(e.add(last, 1), quarter)), stop)
        before_last = e.add(start, e.mul(last, quarter))
        is_full, is_last = (
            b.icmp_signed("==", kind, e.index(value)) for value in (TileKind.FULL, LAST_PARTIAL)
        )
        unmasked = b.select(is_full, end, b.select(is_last, before_last, begin))
        return Keys(begin, end, unmasked), b.icmp_signed("!=", kind, e.index(TileKind.EMPTY))


class Bf16Sweep(Sweep):
    """The sweep of rows of bfloat16."""

    def __init__(
        self, tasks: Tasks, rows: Bf16Rows, sizes: Sizes, functions: dict[str, Value]
    ) -> None:
        super().__init__(tasks, sizes, functions)
        self.rows = rows

    def lay_out(
        self, task: Task, start: Value, count: Value, pieces: Value, number: Value
    ) -> Stretch:
        """Lay out K and V. Where pairs may be forbidden, 0 replaces values that are not finite."""
        e, b, frame, functions = self.e, self.e.builder, self.frame, self.functions
        head_dim, v_head_dim = frame.words(task.arguments, "head_dim", "v_head_dim")
        areas = task.areas
        key, row = self.rows.with_adjacent_elements(
            functions, rows_from(e, task.key, start), count, head_dim, areas["key_copy"]
        )
        b.call(functions["pack_keys"], [key, row, count, head_dim, areas["keys"]])
        value, value_row = self.rows.with_adjacent_elements(
            functions, rows_from(e, task.value, start), count, v_head_dim, areas["value_copy"]
        )
        b.call(
            functions["transpose_values"], [value, value_row, count, v_head_dim, areas["values"]]
        )
        has_non_finite: Value = ir.Constant(BIT, 0)
        if "sift" in functions:
            sifted = count
            if frame.plain:

                def add_kinds(i: Value, seen: list[Value]) -> list[Value]:
                    kinds = frame.record(pieces, _PIECE, i)[_PIECE.index("kinds")]
                    return [b.or_(seen[0], kinds)]

                (kinds,) = e.loop(0, number, 1, [e.index(0)], add_kinds)
                partial = b.and_(kinds, e.index(_EVERY_FIRST_BIT))
                is_partial = b.icmp_signed("!=", partial, e.index(0))
                sifted = b.select(is_partial, count, e.index(0))
            has_non_finite = b.call(functions["sift"], [areas["values"], sifted])
        return Stretch(start, count, value, value_row, has_non_finite)

    def compute(self, task: Task, stretch: Stretch, unit: UnitRows, keys: Keys) -> None:
        e, b, functions = self.e, self.e.builder, self.functions
        count = e.sub(keys.stop, keys.start)
        given = self.arguments(task, stretch, unit, keys, count)
        b.call(functions["attend_to_keys"], given)
        if "add_non_finite" in functions:
            v_head_dim = self.frame.field(task.arguments, "v_head_dim")
            with b.if_then(stretch.has_non_finite, likely=False):
                rows = e.at(stretch.value, e.mul(keys.start, stretch.value_row))
                where = rows, stretch.value_row, task.areas["weights"], unit.total
                b.call(functions["add_non_finite"], [*where, v_head_dim, count])
