"""How much of a problem one step of a kernel takes, chosen to fit the registers of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TileShape:
    """What fits the registers of a machine: lanes of a vector, vectors and keys of one tile."""

    lanes: int
    vectors: int
    keys: int
    halves: bool = False
    """Whether the machine converts float16."""
    fused: bool = True
    """Whether it multiplies and adds in one instruction."""
    product: Literal["elements", "pairs", "tiles"] = "elements"
    """What one instruction multiplies; pairs and tiles are of bfloat16."""
    terms: int = 1
    """Numbers of bfloat16 whose sum an operand is, where it is of another type."""
    q_blocks_per_task: int = 1
    """Blocks of queries that are one task."""
    nearest: bool = True
    """Whether rows that are read once are best asked for into the nearest cache."""
    reach: int = 12 * 1024
    """How many bytes ahead."""

    @property
    def block_q(self) -> int:
        return self.lanes * self.vectors

    def keys_of(self, vectors: int) -> int:
        """Keys, or columns, of a tile of fewer vectors: as many as fit, and are still addressed."""
        if vectors == self.vectors:
            return self.keys
        return min(8, 1 << (self.vectors * self.keys // vectors).bit_length() - 1)
