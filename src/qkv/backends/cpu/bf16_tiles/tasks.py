"""Tasks of the kernel: up to 64 units of 16 queries of one head, and a worker's memory for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qkv.backends.cpu.bf16_tiles.unit import GROUP, MOST_GROUPS, SCORE_BYTES, Sizes
from qkv.backends.cpu.bf16_tiles.weights import Row
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.emit.transpose import transposed_bytes
from qkv.backends.cpu.forward.frame import TASK, ForwardFrame
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.bfloat16 import CHUNK
from qkv.backends.cpu.products.tile_instructions import TILE_BYTES, TILE_ROWS, TILE_SIZE
from qkv.problem.spec import Spec

PLANNED_KEYS = 128
"""Keys of a block for which the schedule says what each unit sees of it."""
BLOCK_KV = MOST_GROUPS * GROUP
"""Keys that are laid out as tiles at once, where every unit sees all or none of them."""
UNITS_OF_BLOCK = 2
"""Units of a block of queries of the schedule."""


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: scores, weights, V, K, copied rows and tables; Q, O and statistics."""
    sizes = Sizes(shape.chunks, shape.value_tiles)
    own = shape.q_blocks_per_task * UNITS_OF_BLOCK * unit_bytes(sizes)
    copies = 2 * BLOCK_KV * CHUNK * (shape.chunks + -(-shape.value_tiles // 2))
    transposed = transposed_bytes(spec, BLOCK_KV, TILE_BYTES)
    total = sum(sizes_of_areas(sizes)) + copies + transposed + own
    return -(-total // 4096) * 4096


def sizes_of_areas(sizes: Sizes) -> tuple[int, int, int, int]:
    """Bytes of scores, weights, K and V of a block. One group of K more than is used is read."""
    return (
        MOST_GROUPS * SCORE_BYTES, MOST_GROUPS * TILE_SIZE,
        (MOST_GROUPS + 1) * sizes.key_bytes, MOST_GROUPS * sizes.value_bytes,
    )  # fmt: skip


def unit_bytes(sizes: Sizes) -> int:
    """Bytes of Q, O and statistics of 16 queries."""
    return (sizes.chunks + sizes.value_tiles) * TILE_SIZE + len(Row) * TILE_BYTES


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

    def __init__(self, frame: ForwardFrame, sizes: Sizes) -> None:
        self.frame, self.e, self.sizes = frame, frame.e, sizes

    def task(self, arguments: Value, task: Value, scratch: Value) -> Task:
        e, b, frame = self.e, self.e.builder, self.frame
        batch, head, first_row, first_run, last_run = frame.record(task, TASK)
        group_size, q_len, blocks = (
            frame.field(arguments, name) for name in ("group_size", "q_len", "q_blocks_per_task")
        )
        units = e.mul(blocks, UNITS_OF_BLOCK)
        kv_head = b.sdiv(head, group_size)
        left = e.add(e.sub(q_len, first_row), TILE_ROWS - 1)
        count = e.least(units, b.sdiv(left, e.index(TILE_ROWS)))
        names = ("scores", "weights", "keys", "values")
        areas, place = {}, scratch
        for name, size in zip(names, sizes_of_areas(self.sizes), strict=True):
            areas[name], place = place, e.at(place, size)
        areas["units"] = place
        place = e.at(place, e.mul(units, unit_bytes(self.sizes)))
        areas["key_copy"] = place
        place = e.at(place, 2 * BLOCK_KV * CHUNK * self.sizes.chunks)
        areas["value_copy"] = place
        areas["transposed"] = e.at(place, 2 * BLOCK_KV * CHUNK * -(-self.sizes.value_tiles // 2))
        return Task(
            arguments, batch, head, first_row, (first_run, last_run),
            frame.operand(arguments, "query", batch, head),
            frame.operand(arguments, "key", batch, kv_head),
            frame.operand(arguments, "value", batch, kv_head),
            count, areas,
        )  # fmt: skip

    def for_each_unit(self, task: Task, body: Callable[[Value, UnitRows], None]) -> None:
        e = self.e

        def visit(i: Value, _: list[Value]) -> None:
            packed = e.at(task.areas["units"], e.mul(i, unit_bytes(self.sizes)))
            total = e.at(packed, self.sizes.chunks * TILE_SIZE)
            stats = e.at(total, self.sizes.value_tiles * TILE_SIZE)
            body(i, UnitRows(e.add(task.first_row, e.mul(i, TILE_ROWS)), packed, total, stats))

        e.loop(0, task.count, 1, [], visit)

    def stat(self, unit: UnitRows, name: Row) -> Value:
        return self.e.at(unit.stats, name * TILE_BYTES)
