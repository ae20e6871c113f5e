"""What calls must know of the kernels: what their code depends on, and the memory they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from qkv.backends.cpu.compiler.compile import EmitFunction, Module
from qkv.backends.cpu.emit.argument_block import COMMON_FIELDS, operand_fields
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import round_to_pages
from qkv.problem.language.expressions import TRUE, Load, Node, walk
from qkv.problem.spec import Spec

BLOCK_KV = 64
"""Number of keys whose scores are held at once, unless a kernel has another number of its own."""

HEADER = 64
"""Bytes for a few words before vectors, in the scratch memory of `ONLINE_SOFTMAX`."""

FIELDS = (
    *COMMON_FIELDS,
    *operand_fields("query", "key", "value"),
    "runs", "rows", "out", "unrounded", "lse", "lse_rest", "entropy", "max_score", "max_weight",
    "copy_key", "copy_value", "sign", "q_blocks", "q_blocks_per_task", "not_finite",
)  # fmt: skip
"""Words of the argument block. `scale` is not negative, because Q is packed times `sign`. Problems
that share a kernel differ in `q_blocks_per_task`; `q_blocks` are those of a head. `not_finite`
becomes 1 if any output may not be finite; it is not written where no sum can overflow."""


class StatsRow(IntEnum):
    """The rows of statistics of a block of queries in scratch memory, in this order."""

    ROW_MAX = 0
    ROW_SUM = 1
    RESCALE = 2
    """The factor by which the output is to be rescaled."""
    SUM_ERROR = 3
    """The rounding error of the row sum."""
    BLOCK_MAX = 4
    """The maximum of the current block of keys."""
    T_SUM = 5
    """T, of which entropy is computed (see `kernel`)."""


STATS = len(StatsRow)
"""Number of rows of statistics."""

STATS_SUMS = StatsRow.ROW_SUM, StatsRow.SUM_ERROR, StatsRow.T_SUM
"""The rows that are 0 before the first key."""

TASK = ("batch", "head", "first_row", "first_run", "last_run")
"""Words of a block of queries, which is a task or a part of one: its first row, and its runs."""

RUN = ("start", "stop", "partial")
"""Words of a run of keys: the first, the one after the last, and whether the mask forbids some."""

QUARTERS = 4
"""Parts of a block of keys, of which those that a block of queries sees are read."""

LAST_PARTIAL = 3
"""The kind of a block of keys of which all quarters that are seen are `TileKind.FULL` but the last.
Like that of `TileKind.PARTIAL`, and of no other kind, its lowest bit is 1."""


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """Everything that the code of one kernel depends on.

    If the operands were `rotated`, they are of the type of computation.
    """

    spec: Spec
    shape: TileShape
    int_bits: int
    pack_gqa: bool
    rotated: bool
    out_dtype: str
    statistics: bool


def skips_keys_within_blocks(mask: Node) -> bool:
    """Whether blocks at the boundary of this mask are cut down to the keys that may be seen.

    That evaluates the mask twice for some pairs, too slow if each pair has an element in a table.
    """
    reads = (node for node in walk(mask) if isinstance(node, Load))
    return mask != TRUE and not any({"q_index", "kv_index"} <= read.variables for read in reads)


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: P, one block of K, V and tables; Q, O and statistics of each block."""
    real_bytes, dims = spec.compute_dtype.itemsize, spec.head_dim + spec.v_head_dim
    shared = BLOCK_KV * (shape.block_q + dims) * real_bytes + HEADER
    own = (dims + STATS) * shape.block_q * real_bytes + HEADER
    transposed = transposed_bytes(spec, BLOCK_KV, shape.lanes * real_bytes)
    return round_to_pages(shared + shape.q_blocks_per_task * own + transposed)


class ForwardKernel(NamedTuple):
    """One of the forward kernels, as a forward pass uses it."""

    emit: EmitFunction
    """Writes the module."""
    scratch_bytes: Callable[[Spec, TileShape], int]
    """Memory in bytes that one worker needs."""
    block_kv: int
    """Keys whose scores are held at once."""
    shared: Callable[[ForwardKey], tuple[Module, ...]] = lambda _: ()
    """The modules that it is linked with, which are the same for every mask and score mod."""


_EMIT_SHARED = EmitFunction("qkv.backends.cpu.forward.shared", "emit_shared")
_EMIT_FORBIDDING = EmitFunction("qkv.backends.cpu.forward.shared", "emit_forbidding")


def shared_modules(key: ForwardKey) -> tuple[Module, ...]:
    """The modules of `shared` that a kernel is linked with."""
    same = replace(key, spec=key.spec.without_expressions, int_bits=32)
    of_all = Module(_EMIT_SHARED, (same,))
    return (of_all, Module(_EMIT_FORBIDDING, (same,))) if key.spec.may_forbid else (of_all,)


ONLINE_SOFTMAX = ForwardKernel(
    EmitFunction("qkv.backends.cpu.forward.kernel", "emit_forward"),
    scratch_bytes,
    BLOCK_KV,
    shared_modules,
)
"""The kernel for every dtype and machine."""
