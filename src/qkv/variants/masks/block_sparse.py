"""A boolean for each block of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from qkv.arguments.declarations import checked_size
from qkv.arguments.readable_checks import as_array
from qkv.errors import DTypeError, ShapeError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(MaskVariant):
    """Row i may attend to key j where `mask[..., i // block_q, j // block_kv]` is True.

    Parameters
    ----------
    mask : boolean array (..., num_heads, ceil(q_len / block_q), ceil(kv_len / block_kv))
        Broadcast over batch and heads.
    block_q, block_kv : int
        Rows of one block.

    Raises
    ------
    ArgumentError
        If a block is not a whole number of 1 or more rows.
    DTypeError, ShapeError
        At the call, if the mask is not boolean or has another number of blocks.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((4, 8))
    >>> blocks = np.array([[True, False], [True, True]])
    >>> qkv.inspect(x, x, x, qkv.BlockSparse(blocks, 2, 2)).weights[:, 2]
    array([0.  , 0.  , 0.25, 0.25])
    """

    roles: ClassVar[Mapping[str, Role]] = {
        "mask": "per_step",
        "block_q": "static",
        "block_kv": "static",
    }
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    mask: ArrayLike
    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            checked_size(name, getattr(self, name))

    def lower(self, builder: Builder) -> None:
        mask = as_array("mask", self.mask)
        if mask.dtype != bool:
            raise DTypeError(
                f"the block mask has dtype {mask.dtype}, not bool.",
                action="Pass mask.astype(bool); True means that the block may attend.",
            )
        shape, block_q, block_kv = builder.shape, int(self.block_q), int(self.block_kv)
        q_blocks, kv_blocks = -(-shape.q_len // block_q), -(-shape.kv_len // block_kv)
        if mask.ndim < 2 or mask.shape[-2:] != (q_blocks, kv_blocks):
            raise ShapeError(
                f"the block mask has shape {mask.shape}; its last two sizes must be "
                f"({q_blocks}, {kv_blocks}).",
                [
                    ("query", f"q_len={shape.q_len}, block_q={block_q}"),
                    ("key", f"kv_len={shape.kv_len}, block_kv={block_kv}"),
                ],
                "Give one entry for each block, the last one perhaps shorter.",
            )
        builder.mask(
            builder.broadcast(
                mask,
                "block mask",
                (
                    ("num_heads", shape.num_heads, builder.head),
                    ("q_blocks", q_blocks, builder.q_index // block_q),
                    ("kv_blocks", kv_blocks, builder.kv_index // block_kv),
                ),
            )
        )

    def naive(self, dense: Dense) -> None:
        blocks = dense.head_matrix(self.mask)
        block_q, block_kv = int(self.block_q), int(self.block_kv)
        whole = np.repeat(np.repeat(blocks, block_q, axis=0), block_kv, axis=1)
        dense.allowed &= whole[: dense.allowed.shape[0], : dense.allowed.shape[1]]

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[BlockSparse]:
        made = []
        for block_q, block_kv, heads in ((4, 8, 1), (64, 32, shape.num_heads)):
            size = (heads, -(-shape.q_len // block_q), -(-shape.kv_len // block_kv))
            made.append(cls(rng.random(size) < 0.6, block_q, block_kv))
        return made
