"""The forward kernel for bfloat16 on matrix tiles (AMX): what a task begins and ends with.

One task is up to 64 *units* of 16 queries of one head. K and V of neighbouring keys are laid out as
tiles once for all of them: K by rows, V transposed. Then each unit goes over the keys that it sees
(`sweep`, `unit`). What a run of keys says of each block of queries is as in
`bf16_pairs.score_blocks`: whether it sees all of the keys, some or none, and between which quarters
of a block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from qkv.backends.cpu.bf16_pairs.rows import Bf16Rows
from qkv.backends.cpu.bf16_tiles.layout import BLOCK_KV, Layout, Row, Sizes, layout_of
from qkv.backends.cpu.bf16_tiles.rows import TileRows
from qkv.backends.cpu.bf16_tiles.sweep import Bf16Sweep, Sweep
from qkv.backends.cpu.bf16_tiles.tasks import Task, Tasks, UnitRows
from qkv.backends.cpu.bf16_tiles.unit import unit_function
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import POINTER, Value
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import TASK, ForwardKey
from qkv.backends.cpu.forward.rows import unpack_function
from qkv.backends.cpu.products import tile_instructions
from qkv.backends.cpu.products.layout import TILE_BYTES, TILE_ROWS
from qkv.backends.cpu.threads.floating_mode import flushing
from qkv.problem.language.expressions import TRUE


def emit_bf16_tiles(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    frame = ForwardFrame(key, block_kv=BLOCK_KV)
    _Bf16Kernel(frame, layout_of(frame.spec, frame.shape)).emit()
    return str(frame.e.module)


class TileKernel(ABC):
    """Writes the functions of one kernel."""

    out_sum = Row.ROW_SUM
    """The row of statistics by which outputs are divided."""
    is_scaled = True
    """Whether shifts and largest scores are kept scaled."""

    def __init__(self, frame: ForwardFrame, layout: Layout) -> None:
        self.frame, self.e, self.layout = frame, frame.e, layout
        self.tasks = Tasks(frame, layout)
        self.functions: dict[str, Value] = {}

    def emit(self) -> None:
        self.functions["unpack"] = unpack_function(self.frame, self.out_sum)
        self.functions["sweep"] = self.sweep().function()
        self.frame.call_for_each_task(self._attend_function(), TASK)

    @abstractmethod
    def sweep(self) -> Sweep:
        """The sweep of all units, of which `function` is called; adds functions."""

    @abstractmethod
    def pack(self, task: Task, unit: UnitRows, j: int, row: Value) -> None:
        """Pack vector j of the queries of a unit, which begins with query `row`."""

    # Tasks

    def _attend_function(self) -> Value:
        """A function `(arguments, task, scratch)`: the units of one task."""
        e, frame, functions = self.e, self.frame, self.functions
        with e.function("attend", [POINTER] * 3, in_place=True) as (function, args):
            arguments, record, scratch = args
            b = e.builder
            tile_instructions.configure(e)
            task = self.tasks.task(arguments, record, scratch)
            q_len, v_head_dim = (
                frame.field(arguments, "q_len"),
                frame.field(arguments, "v_head_dim"),
            )

            def begin(_: Value, unit: UnitRows) -> None:
                for j in range(self.layout.vectors):
                    row = e.add(unit.row, j * TILE_ROWS)
                    self.pack(task, unit, j, e.least(row, e.sub(q_len, 1)) if j else row)
                    for name in (Row.ROW_MAX, Row.SHIFT, Row.LARGEST):
                        e.store_vector(e.const(-math.inf), self.tasks.stat(unit, name, j))
                    for name in (Row.ROW_SUM, Row.SUM_ERROR, Row.T_SUM, Row.OUT_SUM):
                        e.store_vector(e.const(0.0), self.tasks.stat(unit, name, j))
                self._for_each_vector_of_output(
                    unit, 0, TILE_BYTES, lambda place: e.store_vector(e.const(0.0), place)
                )

            self.tasks.for_each_unit(task, begin)
            self.call_sweep(args)
            place = e.mul(
                e.add(e.mul(task.batch, frame.field(arguments, "num_heads")), task.head), q_len
            )

            def end(_: Value, unit: UnitRows) -> None:
                for j in range(self.layout.vectors):
                    if frame.statistics:
                        self._rebase(arguments, unit, j)
                    row = e.add(unit.row, j * TILE_ROWS)
                    row = e.least(row, e.sub(q_len, 1)) if j else row
                    held = e.at(unit.total, j * TILE_BYTES), self.tasks.stat(unit, Row.ROW_MAX, j)
                    where = e.add(place, row), v_head_dim, e.index(self.layout.width)
                    left = e.sub(q_len, row)
                    b.call(functions["unpack"], [arguments, *held, *where, left])

            self.tasks.for_each_unit(task, end)
            tile_instructions.release(e)
        return function

    def call_sweep(self, args: Sequence[Value]) -> None:
        self.e.builder.call(self.functions["sweep"], args)

    def _for_each_vector_of_output(
        self, unit: UnitRows, start: int, step: int, body: Callable[[Value], None]
    ) -> None:
        e = self.e
        e.loop(start, self.layout.total, step, [], lambda i, _: body(e.at(unit.total, i)))

    def _rebase(self, arguments: Value, unit: UnitRows, j: int) -> None:
        """Make the largest score the shift, by which statistics are defined."""
        e, b = self.e, self.e.builder
        names = (Row.ROW_MAX, Row.LARGEST, Row.ROW_SUM, Row.SUM_ERROR, Row.T_SUM, Row.OUT_SUM)
        shift, largest, row_sum, error, t_sum, out_sum = (
            e.load_vector(self.tasks.stat(unit, name, j)) for name in names
        )
        unseen = b.fcmp_ordered("==", largest, e.const(-math.inf))
        if not self.is_scaled:
            scale = e.splat(self.frame.real_field(arguments, "scale"))
            largest = b.select(unseen, largest, b.fmul(largest, scale))
        change = b.select(unseen, e.const(0.0), b.fsub(shift, largest))
        factor = vector_math.exp_flushed(e, change)
        after = {
            Row.ROW_MAX: largest,
            Row.ROW_SUM: b.fmul(row_sum, factor),
            Row.SUM_ERROR: b.fmul(error, factor),
            Row.T_SUM: b.fmul(e.fma(row_sum, change, t_sum), factor),
            Row.OUT_SUM: b.fmul(out_sum, factor),
        }
        for name, vector in after.items():
            e.store_vector(vector, self.tasks.stat(unit, name, j))

        def scale_vector(place: Value) -> None:
            e.scale_vector(place, factor)

        self._for_each_vector_of_output(unit, j * TILE_BYTES, self.layout.width, scale_vector)


class _Bf16Kernel(TileKernel):
    """The kernel of rows of bfloat16."""

    out_sum = Row.OUT_SUM

    def __init__(self, frame: ForwardFrame, layout: Layout) -> None:
        super().__init__(frame, layout)
        self.is_scaled = not frame.plain

    def sweep(self) -> Sweep:
        frame, functions = self.frame, self.functions
        sizes, rows = Sizes.of(frame.shape), Bf16Rows(frame, 1)
        functions["copy"] = rows.copy_function()
        functions["pack"] = rows.pack_function(functions)
        tile_rows = TileRows(rows, sizes)
        functions["pack_keys"] = tile_rows.pack_keys_function()
        functions["transpose_values"] = tile_rows.transpose_values_function()
        if frame.mask != TRUE or not frame.plain:
            functions["sift"] = tile_rows.sift_function()
            functions["add_non_finite"] = rows.add_non_finite_function()
        functions["attend_to_keys"] = unit_function(frame, sizes)
        return Bf16Sweep(self.tasks, rows, sizes, functions)

    def pack(self, task: Task, unit: UnitRows, j: int, row: Value) -> None:
        where = [task.query.pointer, unit.packed, task.areas["key_copy"], row]
        self.e.builder.call(self.functions["pack"], [task.arguments, *where])

    def call_sweep(self, args: Sequence[Value]) -> None:
        with nullcontext() if self.e.emulated else flushing(self.e):
            super().call_sweep(args)
