"""The forward kernel for float32 and float16 on machines with matrix tiles (AMX).

Such a machine multiplies about thirteen times as many bfloat16 numbers in a second as float32
numbers. So both matrix products of attention are computed as sums of products of bfloat16 terms
(`terms`). Sums are float32. Tasks and the sweep over keys are those of `bf16_tiles`, with units of
32 queries (`unit`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from qkv.backends.cpu.bf16_tiles.kernel import TileKernel
from qkv.backends.cpu.bf16_tiles.layout import GROUP, Sizes
from qkv.backends.cpu.bf16_tiles.sweep import Keys, Stretch, Sweep
from qkv.backends.cpu.bf16_tiles.tasks import Task, Tasks, UnitRows
from qkv.backends.cpu.bf16_tiles.unit import MOST_OPERATIONS
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.frame import rows_from
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import ForwardKey
from qkv.backends.cpu.products.layout import TILE_BYTES
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.layout import UNSPLIT, WIDTH, layout_of
from qkv.backends.cpu.split_bf16.scores import SplitScores
from qkv.backends.cpu.split_bf16.unit import UnitBody, unit_function
from qkv.backends.cpu.threads.floating_mode import flushing
from qkv.problem.language.expressions import Op, walk


def emit_split_forward(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    layout = layout_of(key.spec, key.shape)
    frame = ForwardFrame(key, block_kv=layout.block_kv)
    _SplitKernel(frame, layout).emit()
    return str(frame.e.module)


class _SplitKernel(TileKernel):
    """Operands as terms of bfloat16 in the layout of tiles."""

    def sweep(self) -> Sweep:
        frame, functions = self.frame, self.functions
        sizes = Sizes.of(frame.shape)
        scores = SplitScores(frame, frame.dtypes.values(), sizes.columns)
        split = scores.split
        functions.update(scores.functions)
        functions["split_columns"] = split.split_columns()
        functions["add_non_finite"] = non_finite.add_non_finite(split)
        bodies: dict[str, Callable[[UnitBody], None]] = {}
        operations = sum(isinstance(node, Op) for node in walk(frame.score, frame.mask))
        if operations <= MOST_OPERATIONS and not frame.spec.dropout:
            bodies["attend_in_steps"] = UnitBody.attend_in_steps
        bodies["multiply_keys"] = UnitBody.multiply_all_keys
        bodies["attend_in_turn"] = UnitBody.attend_in_turn
        for name, emit in bodies.items():
            functions[name] = unit_function(name, emit, frame, split, sizes)
        return _SplitSweep(self.tasks, scores, sizes, functions)

    def pack(self, task: Task, unit: UnitRows, j: int, row: Value) -> None:
        e = self.e
        where = [task.query.pointer, e.at(unit.packed, j * TILE_BYTES), task.areas["copy"], row]
        unsplit = e.builder.call(self.functions["pack"], [task.arguments, *where])
        e.store(unsplit, self.tasks.stat(unit, UNSPLIT, j), WORD)


class _SplitSweep(Sweep):
    """The sweep of rows in terms."""

    def __init__(
        self, tasks: Tasks, scores: SplitScores, sizes: Sizes, functions: dict[str, Value]
    ) -> None:
        super().__init__(tasks, sizes, functions)
        self.scores, self.split = scores, scores.split

    def lay_out(
        self, task: Task, start: Value, count: Value, pieces: Value, number: Value
    ) -> Stretch:
        e, frame, areas = self.e, self.frame, task.areas
        head_dim, v_head_dim = frame.words(task.arguments, "head_dim", "v_head_dim")
        key, value = (rows_from(e, rows, start) for rows in (task.key, task.value))
        copy = areas["copy"]
        self.scores.split_keys(key, count, head_dim, copy, areas["keys"], areas["unsplit"])
        v, row = self.scores.float_rows("value", value, count, v_head_dim, copy)
        where = [v, row, count, v_head_dim, areas["values"]]
        has_non_finite = e.builder.call(self.functions["split_columns"], where)
        return Stretch(start, count, v, row, has_non_finite)

    def compute(self, task: Task, stretch: Stretch, unit: UnitRows, keys: Keys) -> None:
        e, b, functions, areas = self.e, self.e.builder, self.functions, task.areas
        count = e.sub(keys.stop, keys.start)
        given = self.arguments(task, stretch, unit, keys, count)

        def call(name: str) -> None:
            with nullcontext() if e.emulated else flushing(e):
                b.call(functions[name], given)

        def attend_in_turn() -> None:
            b.call(functions["multiply_keys"], given)
            self._recompute(task, stretch, unit, keys)
            call("attend_in_turn")
            with b.if_then(stretch.has_non_finite, likely=False):
                v_head_dim = self.frame.field(task.arguments, "v_head_dim")
                rows = e.at(stretch.value, e.mul(keys.start, stretch.value_row))
                where = rows, stretch.value_row, areas["weights"], unit.total
                b.call(functions["add_non_finite"], [*where, v_head_dim, count])

        if "attend_in_steps" not in functions:
            # Steps of so many instructions would take long to compile.
            attend_in_turn()
            return
        lanes = self.tasks.stat(unit, UNSPLIT)
        in_turn = b.or_(
            stretch.has_non_finite,
            non_finite.any_non_finite(self.split, areas["unsplit"], lanes),
        )
        in_turn = b.or_(in_turn, e.below(count, GROUP + 1))
        e.choose(in_turn, attend_in_turn, lambda: call("attend_in_steps"))

    def _recompute(self, task: Task, stretch: Stretch, unit: UnitRows, keys: Keys) -> None:
        """Recompute the scores of rows that cannot be split."""
        e, areas = self.e, task.areas
        scores = e.at(areas["scores"], e.sub(0, e.mul(keys.start, WIDTH)))
        self.scores.recompute(
            task.arguments, rows_from(e, task.key, stretch.start), task.query, unit.row,
            (keys.start, keys.stop), areas["unsplit"], self.tasks.stat(unit, UNSPLIT), scores,
        )  # fmt: skip
