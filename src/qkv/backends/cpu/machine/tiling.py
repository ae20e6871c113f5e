"""How much of a problem one step of a kernel takes, chosen to fit the registers of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TileShape:
    """The tile that fits the registers of a machine, and how the machine computes.

    `lanes` is the number of elements of a vector, `vectors` the number of vectors of queries in a
    tile, and `keys` the number of keys.
    """

    lanes: int
    vectors: int
    keys: int
    halves: bool = False
    """Whether the machine converts float16."""
    fused: bool = True
    """Whether the machine multiplies and adds in one instruction (FMA)."""
    product: Literal["elements", "pairs", "tiles"] = "elements"
    """What one instruction multiplies: elements, or pairs or tiles of bfloat16."""
    pairs_by: Literal["vdpbf16ps", "bfdot"] = "vdpbf16ps"
    """The instruction that multiplies pairs, which says how products are added up and rounded."""
    quads: bool = False
    """Whether one instruction multiplies two pairs of two rows with those of two others."""
    byte_tiles: bool = False
    """Whether one instruction multiplies tiles of int8."""
    narrow_rows: tuple[str, ...] = ()
    """Types of 16 bits whose rows decoding multiplies without converting them."""
    row_products: int = 0
    """Number of products of rows that decoding computes at once; 0 means one for each lane."""
    value_keys: int = 0
    """Number of keys whose values decoding adds to all columns before the next keys; 0 means all of
    a block."""
    emulated: bool = False
    """Whether instructions that multiply bfloat16 are written out as ordinary vector code."""
    terms: int = 1
    """Number of bfloat16 terms that each operand is split into."""
    wide: bool = False
    """Whether products of a query and a key are added in float64 and rounded once."""
    q_blocks_per_task: int = 1
    """Number of blocks of queries in one task."""
    chunks: int = 0
    """Number of tiles of 32 elements along head_dim, for a kernel that is made for it."""
    value_tiles: int = 0
    """Number of tiles of 16 elements along v_head_dim, likewise."""
    nearest: bool = True
    """Whether rows that are read once are prefetched into the first-level cache."""
    reach: int = 4 * 1024
    """Number of bytes by which prefetching runs ahead."""
    narrow_reach: int = 0
    """The same for rows of 16 bits; 0 means the same number."""

    @property
    def block_q(self) -> int:
        return self.lanes * self.vectors

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Vectors of queries of the blocks for which kernels have code: one, and all of a tile."""
        return (1, self.vectors) if self.vectors > 1 else (1,)

    @property
    def products_at_once(self) -> int:
        """Number of products of rows that decoding computes at once, each in a vector."""
        return self.row_products or self.lanes

    def keys_of(self, vectors: int) -> int:
        """Keys, or columns, of a tile of fewer vectors: as many as fit, and are still addressed."""
        if vectors == self.vectors:
            return self.keys
        return min(8, 1 << (self.vectors * self.keys // vectors).bit_length() - 1)
