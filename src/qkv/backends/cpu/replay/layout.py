"""What calls must know of the kernels: what their code depends on, and the memory they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from qkv.backends.cpu.emit.argument_block import COMMON_FIELDS, operand_fields
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes
from qkv.backends.cpu.forward.layout import BLOCK_KV, STATS
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import round_to_pages
from qkv.problem.spec import Spec

Question: TypeAlias = Literal["sums", "top", "received", "blocks"]

FIELDS = (
    *COMMON_FIELDS,
    *operand_fields("query", "key"),
    "copy_key", "sign", "runs", "rows",
    "row_max", "log_sum",
    "k", "best", "indices",
    "blocks", "shift", "padded_rows", "received", "q_blocks_per_task",
    "unit", "first_vector", "first_unit", "units", "joined", "largest", "sums",
)  # fmt: skip
"""Words of the argument block. `shift` points to the numbers a and b of `replay.kernel`: a vector
of each for every vector of rows; a head has `padded_rows` rows."""

RANGE = ("batch", "head", "first_key", "last_key", "first_block", "last_block")
"""Words of a task of `received`. `first_block` and `last_block` are rows of `blocks`, each a
`TASK` of the forward pass."""


def state_rows(question: Question, k: int) -> int:
    """Numbers in the state of each query."""
    return {"sums": STATS, "top": 2 * (k + 1), "received": 0, "blocks": 0}[question]


def scratch_bytes(question: Question, spec: Spec, shape: TileShape, k: int, keys: int) -> int:
    """Memory of one worker: packed Q, S, states; one block of K and of tables; sums of keys."""
    real_bytes = spec.compute_dtype.itemsize
    rows = (spec.head_dim + BLOCK_KV + state_rows(question, k)) * shape.block_q
    totals = 2 * keys * shape.lanes if question == "received" else 0
    transposed = transposed_bytes(spec, BLOCK_KV, shape.lanes * real_bytes)
    size = (rows + BLOCK_KV * spec.head_dim + totals) * real_bytes + transposed
    return round_to_pages(size)


@dataclass(frozen=True, slots=True)
class ReplayKey:
    """Everything that the code of one replay depends on."""

    question: Question
    spec: Spec
    shape: TileShape
    int_bits: int
    pack_gqa: bool
    rotated: bool
