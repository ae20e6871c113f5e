"""What calls must know of the kernel for bfloat16 on matrix tiles: its sizes and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from qkv.backends.cpu.compiler.compile import EmitFunction
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes
from qkv.backends.cpu.forward.layout import ForwardKernel
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import (
    CHUNK,
    TILE_BYTES,
    TILE_ROWS,
    TILE_SIZE,
    round_to_pages,
)
from qkv.problem.spec import Spec

GROUP = CHUNK
"""Number of keys whose weights are computed together."""
MOST_GROUPS = 16
"""The most groups of keys of one unit."""
SCORE_BYTES = GROUP * TILE_BYTES
"""Scores of one group of keys."""
PLANNED_KEYS = 128
"""Keys of a block for which the schedule says what each unit sees of it."""
BLOCK_KV = MOST_GROUPS * GROUP
"""Keys that are laid out as tiles at once."""
_BLOCK_ROWS = 2 * TILE_ROWS
"""Queries of a block of the schedule."""


class Row(IntEnum):
    """Rows of statistics of 16 queries, those that `forward.rows.unpack_function` reads first."""

    ROW_MAX = 0
    """The shift, scaled."""
    ROW_SUM = 1
    SHIFT = 2
    """The shift as it is subtracted: not scaled where scores are not."""
    SUM_ERROR = 3
    LARGEST = 4
    """The largest score of all keys; kept where statistics are asked for."""
    T_SUM = 5
    GROUP_SUM = 6
    """The sum of the weights of one group of keys, and its part of T."""
    GROUP_T = 7
    OUT_SUM = 8
    """The sum of rounded weights, by which outputs are divided: where one key has nearly all the
    weight, the output is then its value, however the weight was rounded."""
    GROUP_OUT = 9


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tiles along head_dim, of 32 elements, and along v_head_dim, of 16, each in `terms`."""

    chunks: int
    value_tiles: int
    terms: int

    @classmethod
    def of(cls, shape: TileShape) -> Sizes:
        return cls(shape.chunks, shape.value_tiles, shape.terms)

    @property
    def key_bytes(self) -> int:
        """Bytes of K of one group."""
        return 2 * self.chunks * self.terms * TILE_SIZE

    @property
    def columns(self) -> int:
        """Tiles of V along v_head_dim: whole chunks of 32 elements are transposed."""
        return 2 * -(-self.value_tiles // 2)

    @property
    def value_bytes(self) -> int:
        """Bytes of V of one group."""
        return self.columns * self.terms * TILE_SIZE


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
        return round_to_pages(sum(self.areas.values()) + units)


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


BF16_TILES = ForwardKernel(
    EmitFunction("qkv.backends.cpu.bf16_tiles.kernel", "emit_bf16_tiles"),
    scratch_bytes,
    PLANNED_KEYS,
)
"""The forward kernel for bfloat16 on machines with matrix tiles."""
