"""Sizes of tiles, fixed for each form of a problem.

Timing them at the first call would change the order of sums, and so the bits, from one process to
the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv.problem.spec import Spec

__all__ = ["Blocks", "backward_blocks", "forward_blocks", "is_wide", "padded"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a tile, how many warps compute it, and how many tiles are read ahead."""

    block_q: int
    block_kv: int
    warps: int
    stages: int


def padded(dim: int) -> int:
    """The power of two that holds a row, 16 or more, since products take no less."""
    return max(16, 1 << (dim - 1).bit_length())


def is_wide(spec: Spec) -> bool:
    """Whether scores are products of float32 numbers; rotated rows are not rounded to 16 bits."""
    return spec.dtype == "float32" or spec.rotation is not None


def forward_blocks(spec: Spec) -> Blocks:
    """Tiles of the forward pass; few queries get tiles of 16 rows."""
    dim = max(padded(spec.head_dim), padded(spec.v_head_dim))
    rows = spec.q_len * packed_heads(spec)
    if is_wide(spec):
        return Blocks(16 if rows <= 16 else 64, 32 if dim > 64 else 64, 4, 2)
    if rows <= 16:
        return Blocks(16, 64 if dim > 128 else 128, 4, 2)
    if dim <= 64:
        return Blocks(128, 64, 4, 3)
    return Blocks(128, 64, 8, 3 if dim <= 128 else 2)


def packed_heads(spec: Spec) -> int:
    """How many query heads, which read the same keys, share a block of the forward pass."""
    group = max(spec.group_size, 1)
    return group if spec.q_len * group <= 16 else 1


def backward_blocks(spec: Spec, *, of_keys: bool) -> Blocks:
    """Tiles of the pass for queries, or for keys, which holds two sums and has smaller tiles."""
    dim = max(padded(spec.head_dim), padded(spec.v_head_dim))
    if is_wide(spec) or dim > 128:
        return Blocks(32, 32, 4, 1)
    if of_keys:
        return Blocks(64 if dim <= 64 else 32, 128 if dim <= 64 else 64, 8 if dim <= 64 else 4, 2)
    return Blocks(128 if dim <= 64 else 64, 64, 8 if dim <= 64 else 4, 2)
