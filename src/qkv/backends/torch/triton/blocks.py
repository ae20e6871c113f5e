"""Sizes of tiles, fixed for each form of a problem.

Timing them at the first call would change the order of sums, and so the bits, from one process to
the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from qkv.problem.language.expressions import SCORE, Load, Var, walk
from qkv.problem.spec import Spec

__all__ = ["LARGE", "Blocks", "backward_blocks", "forward_blocks", "is_large", "is_wide", "padded"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a tile, how many warps compute it, and how many tiles are read ahead."""

    block_q: int
    block_kv: int
    warps: int
    stages: int


# fmt: off
_LARGE: Mapping[tuple[str, int], tuple[Blocks, Blocks]] = {
    ("forward", 64): (Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 2)),
    ("forward", 128): (Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2)),
    ("forward", 256): (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
    ("queries", 64): (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2)),
    ("queries", 128): (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
    ("queries", 256): (Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
    ("keys", 64): (Blocks(64, 128, 8, 2), Blocks(32, 128, 8, 2)),
    ("keys", 128): (Blocks(32, 128, 8, 2), Blocks(16, 128, 8, 2)),
    ("keys", 256): (Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
}
"""Tiles of numbers of 16 bits on cards of which `is_large` holds: by the kernel and the longest row
that they are for, one where scores are products alone, and one where they are changed. Each is the
largest whose numbers fit into registers and shared memory, as `tools/triton_kernels.py` shows."""

_OTHER: Mapping[tuple[str, int], tuple[Blocks, Blocks]] = {
    ("forward", 64): (Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 2)),
    ("forward", 128): (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
    ("forward", 256): (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    ("queries", 64): (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
    ("queries", 128): (Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2)),
    ("queries", 256): (Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
    ("keys", 64): (Blocks(32, 128, 8, 2), Blocks(16, 128, 8, 2)),
    ("keys", 128): (Blocks(64, 64, 8, 2), Blocks(32, 64, 8, 2)),
    ("keys", 256): (Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
}
"""`_LARGE` for cards with 99 KiB of shared memory or more."""
# fmt: on


LARGE = 9, 10
"""The first number of the compute capability of cards of which `is_large` holds."""


def is_large(device: torch.device) -> bool:
    """Whether a GPU has 227 KiB of shared memory, from which its matrix units read.

    Such are Hopper and Blackwell, except for graphics cards. Without a GPU they are assumed.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device)[0] in LARGE


def padded(dim: int) -> int:
    """The power of two that holds a row, 16 or more, since products take no less."""
    return max(16, 1 << (dim - 1).bit_length())


def is_wide(spec: Spec) -> bool:
    """Whether scores are products of float32 numbers; rotated rows are not rounded to 16 bits."""
    return spec.dtype == "float32" or spec.rotation is not None


def forward_blocks(spec: Spec, *, large: bool) -> Blocks:
    """Tiles of the forward pass; few queries get tiles of 16 rows."""
    dim = max(padded(spec.head_dim), padded(spec.v_head_dim))
    has_few_rows = spec.q_len * packed_heads(spec) <= 16
    if is_wide(spec):
        return Blocks(16 if has_few_rows else 32, 32 if dim <= 128 else 16, 4, 1)
    if has_few_rows:
        return Blocks(16, 128 if dim <= 64 else 64 if dim <= 128 else 32, 4, 2)
    return _blocks(spec, "forward", dim, large)


def packed_heads(spec: Spec) -> int:
    """How many query heads, which read the same keys, share a block of the forward pass."""
    group = max(spec.group_size, 1)
    return group if spec.q_len * group <= 16 else 1


def backward_blocks(spec: Spec, *, of_keys: bool, large: bool) -> Blocks:
    """Tiles of the pass for queries, or for keys, which holds two sums and has smaller tiles."""
    dim = max(padded(spec.head_dim), padded(spec.v_head_dim))
    if is_wide(spec):
        rows = 32 if dim <= 128 else 16
        return Blocks(rows, rows, 8 if dim == 128 else 4, 1)
    return _blocks(spec, "keys" if of_keys else "queries", dim, large)


def _blocks(spec: Spec, kernel: str, dim: int, large: bool) -> Blocks:
    changed = spec.score != SCORE or spec.dropout
    blocks = (_LARGE if large else _OTHER)[kernel, max(dim, 64)][changed]
    # Tables with an entry for each pair are read ahead into shared memory too.
    if _bytes_of_pair(spec) > (12 if large else 5):
        return replace(blocks, stages=1)
    return blocks


def _bytes_of_pair(spec: Spec) -> int:
    """Bytes that a pair of a query and a key reads from tables."""
    loads = {n for n in walk(spec.score, spec.mask) if isinstance(n, Load)}
    return sum(
        1 if load.kind == "bool" else 4
        for load in loads
        if {"q_index", "kv_index"} <= {n.name for n in walk(load) if isinstance(n, Var)}
    )
