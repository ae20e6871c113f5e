"""The tile shape of kernels on matrix tiles, for the sizes of a problem."""

from __future__ import annotations

from dataclasses import replace

from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import CHUNK, TILE_ROWS
from qkv.problem.spec import Spec

_TASKS_OF_THREAD = 4
"""Tasks for each thread, so that threads end at about the same time."""
_LEAST_BLOCKS = 4
"""The fewest blocks of queries of one task, so that laying out K and V pays."""
_LONG_TASK = 2e10
"""Operations of one task for which Ctrl-C may wait."""


def tiles_shape(
    spec: Spec, shape: TileShape, threads: int, least_of_thread: int = _LEAST_BLOCKS
) -> TileShape:
    """The tile shape with the sizes of this problem, and the blocks of queries of one task.

    More queries share K and V laid out as tiles, but make fewer tasks. A task has
    `least_of_thread` blocks if each thread gets as many. Bits do not depend on it.
    """
    blocks = spec.batch_size * spec.num_heads * -(-spec.q_len // shape.block_q)
    operations = 2.0 * (spec.head_dim + spec.v_head_dim) * shape.block_q * spec.kv_len
    least = max(_LEAST_BLOCKS, min(blocks // threads, least_of_thread))
    most = min(blocks // (_TASKS_OF_THREAD * threads), int(_LONG_TASK / operations))
    return replace(
        shape,
        chunks=-(-spec.head_dim // CHUNK),
        value_tiles=-(-spec.v_head_dim // TILE_ROWS),
        q_blocks_per_task=min(max(most, least), shape.q_blocks_per_task),
    )
