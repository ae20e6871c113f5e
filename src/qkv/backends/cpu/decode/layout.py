"""What calls of the kernel must know of it: what its code depends on, and the memory it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qkv.backends.cpu.compiler.compile import EmitFunction, Module
from qkv.backends.cpu.emit.argument_block import COMMON_FIELDS, WORD, operand_fields
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import (
    ROWS,
    TILE_BYTES,
    TILE_ROWS,
    round_to_pages,
    round_to_vectors,
)
from qkv.problem.spec import Spec


def page_fields(name: str) -> tuple[str, ...]:
    """Words of a paged operand: bytes and keys of a page, its table, and pages of a table row.

    Scales lie in the pages of the same table.
    """
    of_table = name.removesuffix("_scales")
    return (f"{name}_page", *(f"{of_table}_{part}" for part in ("page_size", "table", "slots")))


SCALES = ("key_scales", "value_scales")
"""The scales of quantised keys and values, operands whose rows have one element each."""

FIELDS = (
    *COMMON_FIELDS,
    *operand_fields("query", "key", "value"),
    "batch_size", "num_kv_heads", "rows", "panel", "out", "lse",
    "entropy", "max_score", "max_weight", "shared", "groups", "records", "q_shift",
    "not_finite", "workers",
    *operand_fields(*SCALES),
    *(f"{name}_batch" for name in ("query", "key", "value", *SCALES)),
    *(f"{name}_page" for name in ("key", "value", *SCALES)),
    *(
        f"{name}_{part}"
        for name in ("key", "value")
        for part in ("page_size", "table", "slots", "slot")
    ),
)  # fmt: skip
"""`shared` is memory for the tables that `plan` writes, which sets `tasks`, `groups` and `records`
to where these lie. An expression may read `q_shift` in place of a table of one number. Batch rows
of the key lie `key_batch` bytes apart, unless `key_batches` is a table of their offsets.
`not_finite` is that of the forward pass. `workers` is the number of threads that share the tasks.
Nothing reads `key_slot`, where prepared steps write the stride that stands behind `key_slots`.
"""

STATE = 4
"""Number of vectors that follow each row of O: row maximum m, row sum l, the rounding error of l,
and T = sum_k P[k] * (S[k] - m), which entropy is computed from."""

RECORD_ALIGNMENT = 64

CHUNK = 512
"""Number of keys of one task, unless a kv head would then have more than `MOST_CHUNKS` tasks."""

MOST_CHUNKS = 256

BLOCK_KV = 64
"""Number of keys whose products are added in one chain, and over which the mask is bounded."""

TILE_BLOCK_KV = 128
"""The most keys that are multiplied at once; those of a block of values have one unit."""

STRETCH_KV = 512
"""Number of keys whose scores are held at once. A large number means few updates of row maximum and
row sum, and long sequential reads of K and then of V."""

_PANEL = 128
"""The most rows that are multiplied with a stretch of keys at once, so that their scores stay in
the core's own cache."""

TASK = ("group", "start", "stop", "full")
"""Words of a task: the number of its group, its first key and the key after its last one, and 1 if
the mask allows every pair, else 0."""

GROUP = ("done", "first", "count", "keys")
"""Words of a group, which is a kv head of a batch row: how many of its tasks are done, its first
task, its number of tasks, and how many keys these have together."""


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


_EMIT_SHARED = EmitFunction("qkv.backends.cpu.decode.shared", "emit_shared")
_EMIT_VALUES = EmitFunction("qkv.backends.cpu.decode.shared", "emit_values")


def shared_modules(key: DecodeKey) -> tuple[Module, ...]:
    """The modules of `shared` that a kernel is linked with."""
    spec = replace(key.spec.without_expressions, key_storage=None, value_storage=None)
    same = replace(key, spec=spec, int_bits=32)
    return Module(_EMIT_SHARED, (same,)), Module(_EMIT_VALUES, (same, key.spec.may_forbid))


def panel_of(spec: Spec) -> int:
    """Rows that are multiplied with a stretch of keys at once: all panels have about this size."""
    rows = max(1, spec.group_size * spec.q_len)
    return -(-rows // -(-rows // _PANEL))


def chunk_of(kv_len: int) -> int:
    """Keys of one task."""
    return CHUNK * max(1, -(-kv_len // (CHUNK * MOST_CHUNKS)))


def record_bytes(spec: Spec, shape: TileShape) -> int:
    """Bytes of the result of a task: for each row O, padded to whole vectors, and its state."""
    width = round_to_vectors(spec.v_head_dim, shape.lanes) + STATE * shape.lanes
    row = -(-width * spec.compute_dtype.itemsize // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    return spec.group_size * spec.q_len * row


def shared_bytes(groups: int, kv_len: int, record: int) -> int:
    """Memory of the tables that `plan` writes, and of a record of `record` bytes for each task."""
    tasks = groups * -(-kv_len // chunk_of(kv_len))
    tables = WORD * (groups * len(GROUP) + tasks * len(TASK))
    return tables + RECORD_ALIGNMENT + tasks * record


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: Q; P, sums B, and factors of a panel; scales, K or V; tiles."""
    rows, dims = spec.group_size * spec.q_len, (spec.head_dim, spec.v_head_dim)
    width = round_to_vectors(spec.v_head_dim, shape.lanes) + shape.lanes
    each_row = STRETCH_KV + shape.products_at_once + width
    shared = 2 * STRETCH_KV + BLOCK_KV * max(dims) + rows * spec.head_dim
    size = (each_row * panel_of(spec) + shared) * spec.compute_dtype.itemsize
    stored = [each.dtype for each in (spec.key_storage, spec.value_storage) if each]
    if shape.byte_tiles and "int8" in stored:
        size += RECORD_ALIGNMENT + tile_bytes(rows, panel_of(spec), *dims)
    return round_to_pages(size)


def tile_bytes(rows: int, panel: int, head_dim: int, v_head_dim: int) -> int:
    """Memory of one worker for the areas of `TileAreas`."""
    tiles = -(-rows // panel) * -(-panel // ROWS)
    query = tiles * (TILE_BYTES + TILE_ROWS * head_dim)
    weights = TILE_BYTES + TILE_ROWS * TILE_BLOCK_KV
    values = (TILE_BLOCK_KV + TILE_BYTES) * v_head_dim
    return query + weights + TILE_ROWS * head_dim + TILE_BYTES * TILE_BLOCK_KV + values
