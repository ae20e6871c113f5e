"""Sizes to which operands and their memory are padded: vectors, chunks, matrix tiles, pages."""

from __future__ import annotations

CHUNK = 32
"""Number of bfloat16 elements in one vector, which is one row of a tile. Copied rows are padded to
whole chunks."""


def round_to_chunks(dim: int) -> int:
    """`dim` rounded up to whole chunks."""
    return _round_up(dim, CHUNK)


def round_to_vectors(dim: int, lanes: int) -> int:
    """`dim` rounded up to whole vectors."""
    return _round_up(dim, lanes)


def round_to_pages(size: int) -> int:
    """Bytes rounded up to whole pages of memory."""
    return _round_up(size, 4096)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


TILES = 8
"""Tile registers of a processor."""

TILE_ROWS = 16

TILE_BYTES = 64
"""Bytes of one row of a tile."""

TILE_SIZE = TILE_ROWS * TILE_BYTES
"""Bytes of a tile."""

ROWS = 4
"""Rows of Q or of weights that one tile holds the digits of."""
