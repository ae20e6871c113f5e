"""Sizes to which the operands of products are padded: chunks of bfloat16, and matrix tiles."""

from __future__ import annotations

CHUNK = 32
"""Number of bfloat16 elements in one vector, which is one row of a tile. Copied rows are padded to
whole chunks."""


def round_to_chunks(dim: int) -> int:
    """`dim` rounded up to whole chunks."""
    return -(-dim // CHUNK) * CHUNK


TILES = 8
"""Tile registers of a processor."""

TILE_ROWS = 16

TILE_BYTES = 64
"""Bytes of one row of a tile."""

TILE_SIZE = TILE_ROWS * TILE_BYTES
"""Bytes of a tile."""

ROWS = 4
"""Rows of Q or of weights that one tile holds the digits of."""
