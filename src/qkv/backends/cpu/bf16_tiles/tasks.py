"""Tasks: units of neighbouring queries of one head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qkv.backends.cpu.bf16_tiles.layout import Layout
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import TASK
from qkv.backends.cpu.products.layout import TILE_BYTES


class Task(NamedTuple):
    """One task, as a function of it knows it."""

    arguments: Value
    batch: Value
    head: Value
    first_row: Value
    runs: tuple[Value, Value]
    query: RowView
    key: RowView
    value: RowView
    count: Value
    """Number of units."""
    areas: dict[str, Value]


class UnitRows(NamedTuple):
    """One unit: its first row, packed Q, O and statistics."""

    row: Value
    packed: Value
    total: Value
    stats: Value


class Tasks:
    """Emits what functions of one kernel know of a task."""

    def __init__(self, frame: ForwardFrame, layout: Layout) -> None:
        self.frame, self.e, self.layout = frame, frame.e, layout

    def task(self, arguments: Value, task: Value, scratch: Value) -> Task:
        e, b, frame, layout = self.e, self.e.builder, self.frame, self.layout
        batch, head, first_row, first_run, last_run = frame.record(task, TASK)
        group_size, q_len, blocks = frame.words(
            arguments, "group_size", "q_len", "q_blocks_per_task"
        )
        units = e.mul(blocks, layout.units_of_block)
        kv_head = b.sdiv(head, group_size)
        left = e.add(e.sub(q_len, first_row), layout.rows - 1)
        count = e.least(units, b.sdiv(left, e.index(layout.rows)))
        areas, place = {}, scratch
        for name, size in layout.areas.items():
            areas[name], place = place, e.at(place, size)
        areas["units"] = place
        return Task(
            arguments, batch, head, first_row, (first_run, last_run),
            frame.operand(arguments, "query", batch, head),
            frame.operand(arguments, "key", batch, kv_head),
            frame.operand(arguments, "value", batch, kv_head),
            count, areas,
        )  # fmt: skip

    def for_each_unit(self, task: Task, body: Callable[[Value, UnitRows], None]) -> None:
        e, layout = self.e, self.layout

        def visit(i: Value, _: list[Value]) -> None:
            packed = e.at(task.areas["units"], e.mul(i, layout.unit_bytes))
            total = e.at(packed, layout.packed)
            stats = e.at(total, layout.total)
            body(i, UnitRows(e.add(task.first_row, e.mul(i, layout.rows)), packed, total, stats))

        e.loop(0, task.count, 1, [], visit)

    def stat(self, unit: UnitRows, name: int, vector: int = 0) -> Value:
        return self.e.at(unit.stats, name * self.layout.width + vector * TILE_BYTES)
