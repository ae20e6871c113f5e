"""What calls of the kernel must know of it: what its code depends on, and the memory it needs."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.backends.cpu.decode.rows import STATE
from qkv.backends.cpu.decode.tasks import BLOCK_KV, RECORD_ALIGNMENT
from qkv.backends.cpu.decode.tile_blocks import tile_bytes
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.problem.spec import Spec

STRETCH_KV = 512
"""Number of keys whose scores are held at once. A large number means few updates of row maximum and
row sum, and long sequential reads of K and then of V."""
_PANEL = 128
"""The most rows that are multiplied with a stretch of keys at once, so that their scores stay in
the core's own cache."""


def padded(dim: int, lanes: int) -> int:
    return -(-dim // lanes) * lanes


def panel_of(spec: Spec) -> int:
    """Rows that are multiplied with a stretch of keys at once: all panels have about this size."""
    rows = max(1, spec.group_size * spec.q_len)
    return -(-rows // -(-rows // _PANEL))


def record_bytes(spec: Spec, shape: TileShape) -> int:
    """Bytes of the result of a task: for each row O, padded to whole vectors, and its state."""
    width = padded(spec.v_head_dim, shape.lanes) + STATE * shape.lanes
    row = -(-width * spec.compute_dtype.itemsize // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    return spec.group_size * spec.q_len * row


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: Q; P, sums B, and factors of a panel; scales, K or V; tiles."""
    rows, dims = spec.group_size * spec.q_len, (spec.head_dim, spec.v_head_dim)
    width = padded(spec.v_head_dim, shape.lanes) + shape.lanes
    each_row = STRETCH_KV + shape.products_at_once + width
    shared = 2 * STRETCH_KV + BLOCK_KV * max(dims) + rows * spec.head_dim
    size = (each_row * panel_of(spec) + shared) * spec.compute_dtype.itemsize
    stored = [each.dtype for each in (spec.key_storage, spec.value_storage) if each]
    if shape.byte_tiles and "int8" in stored:
        size += RECORD_ALIGNMENT + tile_bytes(rows, panel_of(spec), *dims)
    return -(-size // 4096) * 4096


@dataclass(frozen=True, slots=True)
class DecodeKey:
    """Everything that the code of one kernel depends on.

    `dtypes` are those of query, key and value as they are read, `paged` says whether key and value
    lie in pages; int8 has scales.
    """

    spec: Spec
    shape: TileShape
    int_bits: int
    dtypes: tuple[str, str, str]
    paged: tuple[bool, bool]
    out_dtype: str
    statistics: bool
