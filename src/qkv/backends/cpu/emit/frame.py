"""The parts that every kernel has: argument block, operands, tables, and the loop over tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit.argument_block import COUNTER_BYTES, WORD, operand_fields
from qkv.backends.cpu.emit.emitter import DOUBLE, FLOAT, INT64, POINTER, Emitter, Value, is_vector
from qkv.backends.cpu.emit.expressions.philox import random_word
from qkv.backends.cpu.emit.expressions.tables import TableView
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.problem.spec import Spec


class RowView(NamedTuple):
    """The rows of one head: the first one, and byte strides of rows and elements."""

    pointer: Value
    row: Value
    element: Value


def rows_from(e: Emitter, rows: RowView, first: Value) -> RowView:
    """The rows from row number `first` on."""
    return RowView(e.at(rows.pointer, e.mul(first, rows.row)), rows.row, rows.element)


class Frame:
    """Writes the parts of a kernel that do not depend on what it computes."""

    dtypes: dict[str, str]
    """The type in which each operand is read."""

    def __init__(
        self, name: str, spec: Spec, shape: TileShape, int_bits: int, fields: tuple[str, ...]
    ) -> None:
        real = DOUBLE if spec.dtype == "float64" else FLOAT
        self.e = Emitter(
            name, shape.lanes, real,
            halves=shape.halves, fused=shape.fused, emulated=shape.emulated,
            pairs_by=shape.pairs_by,
        )  # fmt: skip
        self.spec = spec
        self.shape = shape
        self.int_bits = int_bits
        self.fields = fields
        self.score, self.mask = spec.score, spec.mask

    # Arguments

    def _word(self, arguments: Value, name: str) -> Value:
        return self.e.at(arguments, COUNTER_BYTES + WORD * self.fields.index(name))

    def field(self, arguments: Value, name: str) -> Value:
        return self.e.load(self._word(arguments, name), INT64, WORD)

    def words(self, arguments: Value, *names: str) -> list[Value]:
        """Some fields of the argument block."""
        return [self.field(arguments, name) for name in names]

    def real_field(self, arguments: Value, name: str) -> Value:
        return self.e.load(self._word(arguments, name), self.e.real, WORD)

    def pointer_field(self, arguments: Value, name: str) -> Value:
        return self.e.pointer(self.field(arguments, name))

    def record_at(self, table: Value, number: Value, names: tuple[str, ...]) -> Value:
        """Where a row of a table of 64-bit words begins."""
        return self.e.at(table, self.e.mul(number, WORD * len(names)))

    def record(
        self, table: Value, names: tuple[str, ...], number: Value | None = None
    ) -> list[Value]:
        """The words of row `number` of a table, or of the row that `table` points to."""
        row = table if number is None else self.record_at(table, number, names)
        return [self.e.load(self.e.at(row, WORD * i), INT64, WORD) for i in range(len(names))]

    def tables(self, arguments: Value) -> dict[str, TableView]:
        e, views = self.e, {}
        offset = COUNTER_BYTES + WORD * len(self.fields)
        for spec in self.spec.tables:
            words = [
                e.load(e.at(arguments, offset + WORD * i), INT64, WORD)
                for i in range(1 + 2 * spec.ndim)
            ]
            offset += WORD * len(words)
            views[spec.name] = TableView(
                spec, e.pointer(words[0]), tuple(words[1::2]), tuple(words[2::2])
            )
        return views

    def operand(self, arguments: Value, name: str, batch: Value, head: Value) -> RowView:
        e = self.e
        base, batches, stride, row, element = (
            self.field(arguments, field) for field in operand_fields(name)
        )
        offset = self._offset_of_batch(arguments, name, batches, batch)
        return RowView(e.at(e.pointer(base), offset, e.mul(head, stride)), row, element)

    def _offset_of_batch(self, arguments: Value, name: str, batches: Value, batch: Value) -> Value:
        """Bytes to the rows of a batch row, from the table at the address `batches`."""
        e = self.e
        return e.load(e.at(e.pointer(batches), e.mul(batch, WORD)), INT64, WORD)

    def report_not_finite(self, arguments: Value, seen: Value) -> None:
        """Set the word `not_finite` if a lane of `seen` is NaN.

        Not for float16, unless it is int8 with large scales: no sum of its numbers overflows in
        float32.
        """
        if self.spec.dtype == "float16" and self.dtypes["value"] != "int8":
            return
        e = self.e
        with e.builder.if_then(e.any_lane(e.is_nan(seen)), likely=False):
            e.store(e.index(1), self._word(arguments, "not_finite"), WORD)

    # Tasks

    def emit_job(
        self,
        run: Callable[[Value, Value, Value], None],
        share: Callable[[Value, Value], Value] | None = None,
    ) -> None:
        """`job(arguments, worker)` takes tasks from the counter until none is left.

        `run(arguments, number, scratch)` emits one task; `scratch` is the worker's own. Tasks are
        taken one by one, or as many neighbours at once as `share(arguments, left)` says, of those
        that are left.
        """
        e = self.e
        with e.function("job", [POINTER, INT64], public=True) as (_, (arguments, worker)):
            limit = self.field(arguments, "limit")
            size = self.field(arguments, "scratch_bytes")
            scratch = e.at(self.pointer_field(arguments, "scratch"), e.mul(worker, size))

            def take(count: Value) -> tuple[Value, Value]:
                first = e.builder.atomic_rmw("add", arguments, count, "monotonic")
                return first, e.below(first, limit)

            def take_share() -> tuple[tuple[Value, Value], Value]:
                assert share is not None
                taken = e.builder.load_atomic(arguments, "monotonic", WORD, typ=INT64)
                count = e.larger_of(share(arguments, e.sub(limit, taken)), 1)
                first, more = take(count)
                return (first, e.least(e.add(first, count), limit)), more

            def run_share(numbers: tuple[Value, Value]) -> None:
                e.loop(*numbers, 1, [], lambda number, _: run(arguments, number, scratch))

            if share is None:
                e.take_while(lambda: take(e.index(1)), lambda n: run(arguments, n, scratch))
            else:
                e.take_while(take_share, run_share)

    def call_for_each_task(self, function: Value, words: tuple[str, ...]) -> None:
        """A `job` that calls `function(arguments, task, scratch)`; a task is a row of `words`."""

        def call_task(arguments: Value, number: Value, scratch: Value) -> None:
            task = self.record_at(self.pointer_field(arguments, "tasks"), number, words)
            self.e.builder.call(function, [arguments, task, scratch])

        self.emit_job(call_task)

    def call_for_rows(
        self, rows: Value, one_vector: Value, all_vectors: Value, arguments: list[Value]
    ) -> None:
        """Call `one_vector` if at most one vector of queries is left, else `all_vectors`."""
        e = self.e
        e.choose(
            e.below(rows, e.lanes + 1),
            lambda: e.builder.call(one_vector, arguments),
            lambda: e.builder.call(all_vectors, arguments),
        )  # fmt: skip

    # Dropout

    def dropout_factor(self, arguments: Value, places: Expressions, kv_index: Value) -> Value:
        """The dropout factor of each lane's weight: 0 or 1 / (1 - p)."""
        e, b = self.e, self.e.builder
        wide = ir.VectorType(INT64, e.lanes)

        def as_wide_lanes(value: Value) -> Value:
            if not is_vector(value):
                return e.splat(value)
            return value if value.type == wide else b.sext(value, wide)

        names = ("q_index", "head", "batch")
        counter = [as_wide_lanes(kv_index), *(as_wide_lanes(places.places[name]) for name in names)]
        word = random_word(e, counter, self.field(arguments, "dropout_seed"))
        is_kept = b.icmp_signed(">=", word, e.splat(self.field(arguments, "dropout_threshold")))
        factor = e.splat(self.real_field(arguments, "dropout_factor"))
        return b.select(is_kept, factor, e.const(0.0))

    def lane_numbers(self) -> Value:
        """0, 1, 2, ... in the width of lane integers."""
        return self.e.lane_numbers(ir.IntType(self.int_bits))

    def lane_integers(self, scalar: Value) -> Value:
        """A uniform integer in every lane, in the width of lane integers."""
        e = self.e
        if self.int_bits == 32:
            scalar = e.builder.trunc(scalar, ir.IntType(32))
        return e.splat(scalar)
