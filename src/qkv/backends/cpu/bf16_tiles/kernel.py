"""The forward kernel for bfloat16 on matrix tiles (AMX): what a task begins and ends with.

One task is up to 64 *units* of 16 queries of one head. K and V of neighbouring keys are laid out as
tiles once for all of them: K by rows, V transposed. Then each unit goes over the keys that it sees
(`sweep`, `unit`). What a run of keys says of each block of queries is as in `forward.score_blocks`:
whether it sees all of the keys, some or none, and between which quarters of a block.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

from qkv.backends.cpu.bf16_tiles.rows import TileRows
from qkv.backends.cpu.bf16_tiles.sweep import Sweep
from qkv.backends.cpu.bf16_tiles.tasks import (
    BLOCK_KV,
    PLANNED_KEYS,
    Tasks,
    UnitRows,
    scratch_bytes,
)
from qkv.backends.cpu.bf16_tiles.unit import Sizes, unit_function
from qkv.backends.cpu.bf16_tiles.weights import Row
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import POINTER, Value
from qkv.backends.cpu.forward.bf16_rows import Bf16Rows
from qkv.backends.cpu.forward.frame import TASK, ForwardFrame, ForwardKey
from qkv.backends.cpu.forward.kernel import ForwardKernel
from qkv.backends.cpu.forward.rows import unpack_function
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products import tile_instructions
from qkv.backends.cpu.products.bfloat16 import CHUNK
from qkv.backends.cpu.products.tile_instructions import TILE_BYTES, TILE_ROWS, TILE_SIZE
from qkv.backends.cpu.threads.floating_mode import flushing
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec

_TASKS_OF_THREAD = 4
"""Tasks for each thread, so that threads end at about the same time."""
_LEAST_BLOCKS = 4
"""The fewest blocks of queries of one task, so that laying out K and V pays."""
_LONG_TASK = 2e10
"""Operations of one task for which Ctrl-C may wait."""


def emit_bf16_tiles(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    frame = ForwardFrame(key, block_kv=BLOCK_KV)
    _Kernel(frame).emit()
    return str(frame.e.module)


class _Kernel:
    """Writes the functions of one kernel."""

    def __init__(self, frame: ForwardFrame) -> None:
        self.frame, self.e = frame, frame.e
        self.sizes = Sizes(frame.shape.chunks, frame.shape.value_tiles)
        self.rows, self.tasks = Bf16Rows(frame, 1), Tasks(frame, self.sizes)

    def emit(self) -> None:
        rows = self.rows
        self.functions = {"copy": rows.copy_function()}
        self.functions["pack"] = rows.pack_function(self.functions)
        self.functions["unpack"] = unpack_function(self.frame, Row.OUT_SUM)
        tile_rows = TileRows(rows, self.sizes)
        self.functions["pack_keys"] = tile_rows.pack_keys_function()
        self.functions["transpose_values"] = tile_rows.transpose_values_function()
        if self.frame.mask != TRUE or not self.frame.plain:
            self.functions["sift"] = tile_rows.sift_function()
            self.functions["add_non_finite"] = rows.add_non_finite_function()
        self.functions["attend_to_keys"] = unit_function(self.frame, self.sizes)
        self.functions["sweep"] = Sweep(self.tasks, rows, self.functions).function()
        self.frame.call_for_each_task(self._attend_function(), TASK)

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
                where = [task.query.pointer, unit.packed, task.areas["key_copy"], unit.row]
                b.call(functions["pack"], [arguments, *where])
                for name in (Row.ROW_MAX, Row.SHIFT, Row.LARGEST):
                    e.store_vector(e.const(-math.inf), self.tasks.stat(unit, name))
                self._clear_sums(unit)

            self.tasks.for_each_unit(task, begin)
            with nullcontext() if e.emulated else flushing(e):
                b.call(functions["sweep"], args)
            place = e.mul(
                e.add(e.mul(task.batch, frame.field(arguments, "num_heads")), task.head), q_len
            )

            def end(_: Value, unit: UnitRows) -> None:
                if frame.statistics:
                    self._rebase(arguments, unit)
                held = unit.total, unit.stats, e.add(place, unit.row)
                left = e.sub(q_len, unit.row)
                b.call(
                    functions["unpack"], [arguments, *held, v_head_dim, e.index(TILE_BYTES), left]
                )

            self.tasks.for_each_unit(task, end)
            tile_instructions.release(e)
        return function

    def _clear_sums(self, unit: UnitRows) -> None:
        e = self.e
        for name in (Row.ROW_SUM, Row.SUM_ERROR, Row.T_SUM, Row.OUT_SUM):
            e.store_vector(e.const(0.0), self.tasks.stat(unit, name))
        e.loop(
            0, self.sizes.value_tiles * TILE_SIZE, TILE_BYTES, [],
            lambda i, _: e.store_vector(e.const(0.0), e.at(unit.total, i)),
        )  # fmt: skip

    def _rebase(self, arguments: Value, unit: UnitRows) -> None:
        """Make the largest score the shift, by which statistics are defined."""
        e, b = self.e, self.e.builder
        names = (Row.ROW_MAX, Row.LARGEST, Row.ROW_SUM, Row.SUM_ERROR, Row.T_SUM, Row.OUT_SUM)
        shift, largest, row_sum, error, t_sum, out_sum = (
            e.load_vector(self.tasks.stat(unit, name)) for name in names
        )
        unseen = b.fcmp_ordered("==", largest, e.const(-math.inf))
        if self.frame.plain:
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
            e.store_vector(vector, self.tasks.stat(unit, name))

        def scale_row(i: Value, _: list[Value]) -> None:
            place = e.at(unit.total, i)
            e.store_vector(b.fmul(e.load_vector(place), factor), place)

        e.loop(0, self.sizes.value_tiles * TILE_SIZE, TILE_BYTES, [], scale_row)


def tiles_shape(spec: Spec, shape: TileShape, threads: int) -> TileShape:
    """The tile shape with the sizes of this problem, and the blocks of queries of one task.

    More queries share K and V laid out as tiles, but make fewer tasks. Bits do not depend on it.
    """
    blocks = spec.batch_size * spec.num_heads * -(-spec.q_len // shape.block_q)
    operations = 2.0 * (spec.head_dim + spec.v_head_dim) * shape.block_q * spec.kv_len
    most = min(blocks // (_TASKS_OF_THREAD * threads), int(_LONG_TASK / operations))
    return replace(
        shape,
        chunks=-(-spec.head_dim // CHUNK),
        value_tiles=-(-spec.v_head_dim // TILE_ROWS),
        q_blocks_per_task=min(max(most, _LEAST_BLOCKS), shape.q_blocks_per_task),
    )


BF16_TILES = ForwardKernel(emit_bf16_tiles, scratch_bytes, PLANNED_KEYS)
"""The forward kernel for bfloat16 on machines with matrix tiles."""
