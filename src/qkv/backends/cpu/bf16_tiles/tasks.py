"""Tasks: units of neighbouring queries of one head, and a worker's memory for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from qkv.backends.cpu.bf16_tiles.shift import GROUP
from qkv.backends.cpu.bf16_tiles.unit import MOST_GROUPS, SCORE_BYTES, Sizes
from qkv.backends.cpu.bf16_tiles.weights import Row
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import TASK
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import CHUNK, TILE_BYTES, TILE_ROWS, TILE_SIZE
from qkv.problem.spec import Spec

PLANNED_KEYS = 128
"""Keys of a block for which the schedule says what each unit sees of it."""
BLOCK_KV = MOST_GROUPS * GROUP
"""Keys that are laid out as tiles at once."""
_BLOCK_ROWS = 2 * TILE_ROWS
"""Queries of a block of the schedule."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A worker's memory: `areas` for a block of keys, then the units of a task.

    A unit is so many `vectors` of 16 queries; `packed`, `total` and `stats` are the bytes of its Q,
    of its O and of its statistics.
    """

    block_kv: int
    vectors: int
    areas: dict[str, int]
    packed: int
    total: int
    stats: int

    @property
    def width(self) -> int:
        """Bytes of a number of each query."""
        return self.vectors * TILE_BYTES

    @property
    def rows(self) -> int:
        """Queries of a unit."""
        return self.vectors * TILE_ROWS

    @property
    def units_of_block(self) -> int:
        """Units of a block of queries of the schedule."""
        return _BLOCK_ROWS // self.rows

    @property
    def unit_bytes(self) -> int:
        return self.packed + self.total + self.stats

    def scratch_bytes(self, q_blocks_per_task: int) -> int:
        """Memory of one worker."""
        units = q_blocks_per_task * self.units_of_block * self.unit_bytes
        return -(-(sum(self.areas.values()) + units) // 4096) * 4096


def layout_of(spec: Spec, shape: TileShape) -> Layout:
    """Scores, weights, V, K, copied rows and tables; Q, O and statistics of 16 queries."""
    sizes = Sizes.of(shape)
    areas = {
        "scores": MOST_GROUPS * SCORE_BYTES,
        "weights": MOST_GROUPS * TILE_SIZE,
        # One group of K more than is used is read.
        "keys": (MOST_GROUPS + 1) * sizes.key_bytes,
        "values": MOST_GROUPS * sizes.value_bytes,
        "key_copy": 2 * BLOCK_KV * CHUNK * sizes.chunks,
        "value_copy": 2 * BLOCK_KV * CHUNK * -(-sizes.value_tiles // 2),
        "transposed": transposed_bytes(spec, BLOCK_KV, TILE_BYTES),
    }
    packed, total = sizes.chunks * TILE_SIZE, sizes.value_tiles * TILE_SIZE
    return Layout(BLOCK_KV, 1, areas, packed, total, len(Row) * TILE_BYTES)


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker."""
    return layout_of(spec, shape).scratch_bytes(shape.q_blocks_per_task)


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
