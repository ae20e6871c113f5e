"""What calls must know of the kernels of this package: their code, and the memory they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qkv.backends.cpu.backward.layout import BLOCK_KV
from qkv.backends.cpu.bf16_tiles.layout import GROUP, MOST_GROUPS, PLANNED_KEYS, Layout, Row, Sizes
from qkv.backends.cpu.compiler.compile import EmitFunction
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes
from qkv.backends.cpu.forward.layout import ForwardKernel
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import (
    CHUNK,
    TILE_BYTES,
    TILE_ROWS,
    round_to_chunks,
    round_to_pages,
)
from qkv.backends.cpu.replay.layout import Question, state_rows
from qkv.problem.spec import Spec

FLOAT_BYTES = 4
NON_FINITE_BYTES = 8192
"""Bytes of the list of rows of a left factor that cannot be split, with their number in front."""
VECTORS = 2
WIDTH = VECTORS * TILE_BYTES
"""Bytes of a number of each query."""
SCORE_BYTES = GROUP * WIDTH
"""Scores of one group of keys."""
UNSPLIT = len(Row)
"""The row of statistics that tells which queries cannot be split."""
_SPLIT_BYTES = 512 * 1024
"""Bytes of K and V in terms that leave room in the second-level cache."""
REPLAY_BLOCK_KV = 128
"""Number of keys whose scores replay holds at once."""

AREAS = (
    "non_finite_keys", "non_finite_values", "weights", "score_grads", "products", "factors",
    "weight_rows", "grad_rows", "grad_pairs", "key_rows", "key_columns", "value_rows", "copy",
    "key_sums", "value_sums",
    "query_packed", "query_transposed", "grad_packed", "grad_transposed", "query_sums", "rows",
)  # fmt: skip
"""The areas of a worker's scratch memory for the backward pass, in this order; each block of
queries has a part of those in the last line."""
QUERY_ROWS = ("lse", "lse_rest", "delta", "grad_lse", "query_non_finite", "grad_non_finite")
"""The rows of the area "rows", each one number or mark for each query."""


def layout_of(spec: Spec, shape: TileShape) -> Layout:
    """Scores, weights, V, K, copied rows and tables; Q, O and statistics of 32 queries."""
    sizes = Sizes.of(shape)
    group_bytes = sizes.key_bytes + sizes.value_bytes
    groups = MOST_GROUPS if MOST_GROUPS * group_bytes <= _SPLIT_BYTES else MOST_GROUPS // 2
    block_kv = groups * GROUP
    wide = max(sizes.chunks, -(-sizes.value_tiles // 2)) * CHUNK
    areas = {
        "unsplit": NON_FINITE_BYTES,
        "scores": groups * SCORE_BYTES,
        "weights": groups * sizes.terms * TILE_ROWS * WIDTH,
        "keys": groups * sizes.key_bytes,
        "values": groups * sizes.value_bytes,
        "copy": block_kv * FLOAT_BYTES * wide,
        "transposed": VECTORS * transposed_bytes(spec, block_kv, TILE_BYTES),
    }
    packed = sizes.chunks * sizes.terms * TILE_ROWS * WIDTH
    total = sizes.value_tiles * TILE_ROWS * WIDTH
    return Layout(block_kv, VECTORS, areas, packed, total, (UNSPLIT + 1) * WIDTH)


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker."""
    return layout_of(spec, shape).scratch_bytes(shape.q_blocks_per_task)


def replay_scratch_bytes(question: Question, spec: Spec, shape: TileShape, k: int) -> int:
    """Memory of one worker of replay: scores, K, copied rows and tables; Q and states."""
    width, wide = FLOAT_BYTES * shape.block_q, round_to_chunks(spec.head_dim)
    shared = REPLAY_BLOCK_KV * (width + (2 * shape.terms + FLOAT_BYTES) * wide)
    own = width * (shape.terms * wide // 2 + 1 + state_rows(question, k))
    transposed = transposed_bytes(spec, REPLAY_BLOCK_KV, FLOAT_BYTES * shape.lanes)
    total = NON_FINITE_BYTES + shared + transposed + shape.q_blocks_per_task * own
    return round_to_pages(total)


def split_areas(
    shape: TileShape, head_dim: int, v_head_dim: int, q_blocks_per_task: int
) -> dict[str, int]:
    """Bytes that each area takes, for `q_blocks_per_task` blocks of queries."""
    width, terms = FLOAT_BYTES * shape.block_q, shape.terms
    dim, v_dim = round_to_chunks(head_dim), round_to_chunks(v_head_dim)
    pairs, scores = BLOCK_KV // 2 * terms * width, BLOCK_KV * width
    keys, values = (2 * terms * BLOCK_KV * d for d in (dim, v_dim))
    key_sums, value_sums = (FLOAT_BYTES * BLOCK_KV * d for d in (dim, v_dim))
    query, grad = (q_blocks_per_task * terms * width // 2 * d for d in (dim, v_dim))
    sizes = {
        "non_finite_keys": NON_FINITE_BYTES,
        "non_finite_values": NON_FINITE_BYTES,
        # Two buffers each: one is read while the other is written.
        "weights": 2 * scores,
        "score_grads": 2 * scores,
        "products": scores,
        "factors": scores,
        "weight_rows": pairs,
        "grad_rows": pairs,
        "grad_pairs": pairs,
        "key_rows": keys,
        "key_columns": keys,
        "value_rows": values,
        "copy": max(key_sums, value_sums),
        "key_sums": key_sums,
        "value_sums": value_sums,
        "query_packed": query,
        "query_transposed": query,
        "grad_packed": grad,
        "grad_transposed": grad,
        "query_sums": q_blocks_per_task * width * dim,
        "rows": q_blocks_per_task * width * len(QUERY_ROWS),
    }
    return {name: sizes[name] for name in AREAS}


class ReplayKernel(NamedTuple):
    """A kernel that computes scores again."""

    emit: EmitFunction
    scratch_bytes: Callable[[Question, Spec, TileShape, int], int]
    """Memory in bytes that one worker needs."""


class BackwardKernel(NamedTuple):
    """A backward kernel."""

    emit: EmitFunction
    areas: Callable[[TileShape, int, int, int], dict[str, int]]
    """The areas of a worker's scratch, in bytes, given shape, head_dim, v_head_dim and the blocks
    of queries of one task."""


FORWARD = ForwardKernel(
    EmitFunction("qkv.backends.cpu.split_bf16.forward", "emit_split_forward"),
    scratch_bytes,
    PLANNED_KEYS,
)
REPLAY = ReplayKernel(
    EmitFunction("qkv.backends.cpu.split_bf16.replay", "emit_split_replay"), replay_scratch_bytes
)
BACKWARD = BackwardKernel(
    EmitFunction("qkv.backends.cpu.split_bf16.backward", "emit_split_backward"), split_areas
)
"""The backward kernel also serves bfloat16, which is a sum of one term."""
