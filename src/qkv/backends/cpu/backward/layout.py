"""What calls must know of the kernels: what their code depends on, and the memory they need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from qkv.backends.cpu.compiler.compile import EmitFunction, Module
from qkv.backends.cpu.emit.argument_block import COMMON_FIELDS, operand_fields
from qkv.backends.cpu.forward.layout import STATS
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import round_to_chunks, round_to_vectors
from qkv.problem.language.derivative import ONE, derivative
from qkv.problem.language.expressions import SCORE, Load, walk
from qkv.problem.spec import Spec

BLOCK_KV = 128
"""Keys whose weights are held at once."""

AREAS = (
    "query", "grad_out", "query_sums", "query_rows", "grad_rows", "lse", "lse_rest",
    "delta", "weights", "score_grads", "products", "factors", "key_copy", "value_copy",
)  # fmt: skip
"""The areas of a worker's scratch memory, in this order."""

PAIR_AREAS = (
    "query_pairs", "grad_pairs", "key_pairs", "value_pairs", "query_rows_narrow",
    "grad_rows_narrow", "weights_narrow", "score_grads_narrow", "score_grad_pairs",
    "keys_interleaved",
)  # fmt: skip
"""Further areas of scratch that follow `AREAS` when the kernel multiplies pairs of bfloat16."""

FIELDS = (
    *COMMON_FIELDS,
    *operand_fields("query", "key", "value", "out", "grad_out"),
    "lse", "lse_rest", "grad_lse", "delta_rest", "row_sums", "row_bytes", "copy_key", "copy_value",
    "blocks", "runs", "q_blocks", "splits", "finished",
    "query_partials", "partial_bytes", "d_query", "add_query",
    "key_sums", "key_sum_row", "d_key", "round_key",
    "value_sums", "value_sum_row", "d_value", "round_value", "q_blocks_per_task", "sinks",
)  # fmt: skip
"""The words of the argument block; behind them follows where each area of scratch begins."""

TASK = ("batch", "kv_head", "start", "stop", "split")
"""The words of a task, which is a range of keys. Behind them follows, for each table with a
gradient, the byte at which the task's copy of that gradient begins."""


def further_areas(shape: TileShape) -> tuple[str, ...]:
    """The areas that follow `AREAS` with products of such a shape."""
    return PAIR_AREAS if shape.product == "pairs" else ()


def fields_with(areas: tuple[str, ...]) -> tuple[str, ...]:
    """The words of the argument block of a kernel with these areas."""
    return (*FIELDS, *(f"area_{name}" for name in areas))


def scratch_areas(shape: TileShape, head_dim: int, v_head_dim: int, item: int) -> dict[str, int]:
    """Bytes that each area takes."""
    block_q = shape.lanes * shape.vectors
    query, value = (round_to_vectors(dim, shape.lanes) * block_q for dim in (head_dim, v_head_dim))
    block = BLOCK_KV * block_q
    sizes = {
        "query": query,
        "grad_out": value,
        "query_sums": max(query, value),
        "query_rows": query,
        "grad_rows": value,
        # Room for the rows of `RowSums`, from which the delta correction computes lse.
        "lse": STATS * block_q,
        "lse_rest": block_q,
        "delta": 3 * block_q,
        "weights": block,
        "score_grads": block,
        "products": block,
        "factors": block,
        "key_copy": BLOCK_KV * round_to_vectors(head_dim, shape.lanes),
        "value_copy": BLOCK_KV * round_to_vectors(v_head_dim, shape.lanes),
        # Rows of pairs are padded to whole chunks, which are two vectors each.
        "query_pairs": query,
        "grad_pairs": value,
        "key_pairs": BLOCK_KV * round_to_chunks(head_dim) // 2,
        "value_pairs": BLOCK_KV * round_to_chunks(v_head_dim) // 2,
        "query_rows_narrow": query // 2,
        "grad_rows_narrow": value // 2,
        "weights_narrow": block // 2,
        "score_grads_narrow": block // 2,
        "score_grad_pairs": block // 2,
        "keys_interleaved": BLOCK_KV * round_to_chunks(head_dim) // 2,
    }
    return {name: sizes[name] * item for name in (*AREAS, *further_areas(shape))}


@dataclass(frozen=True, slots=True)
class TableGradient:
    """A table whose gradient is wanted, and whether it is added in float64."""

    name: str
    wide: bool


@dataclass(frozen=True, slots=True)
class BackwardKey:
    """Everything that the code of one kernel depends on.

    `rotated` queries and keys come in the type of computation. `out_dtype` is that of the output
    that is read, `grad_dtype` that of the gradients that are written. If the kernel
    `corrects_delta`, the delta correction has run before; if `wide`, dP is added in float64.
    `of_part` says that rows may see more keys than the problem has, so that what their dS add up
    to is not known.
    """

    spec: Spec
    shape: TileShape
    int_bits: int
    rotated: bool
    out_dtype: str
    grad_dtype: str
    tables: tuple[TableGradient, ...] = ()
    corrects_delta: bool = False
    wide: bool = False
    of_part: bool = False


class Traits(NamedTuple):
    """What a kernel does for its score mods and masks, whatever these are."""

    plain: bool
    """Whether there are no score mods, so that weights are computed with the products."""
    applies_chain_rule: bool
    """Whether score mods have derivatives, or a table has a gradient, so that dS is stored."""
    may_forbid: bool


def traits_of(key: BackwardKey) -> Traits:
    """The traits of a kernel."""
    score = key.spec.score
    applies = bool(loads_with_gradients(key)) or derivative(score) != ONE
    return Traits(score == SCORE, applies, key.spec.may_forbid)


def loads_with_gradients(key: BackwardKey) -> tuple[Load, ...]:
    """Where the score reads tables that get a gradient."""
    names = {table.name for table in key.tables}
    found = (node for node in walk(key.spec.score) if isinstance(node, Load))
    return tuple([node for node in found if node.table in names])


_EMIT_SUMS = EmitFunction("qkv.backends.cpu.backward.shared", "emit_sums")
_EMIT_PRODUCTS = EmitFunction("qkv.backends.cpu.backward.shared", "emit_products")


def shared_modules(key: BackwardKey, *, sums_rows: bool) -> tuple[Module, ...]:
    """The modules of `shared` that a kernel is linked with, or with `sums_rows` the correction."""
    spec, traits = key.spec.without_expressions, traits_of(key)
    same = replace(key, spec=spec, int_bits=32, tables=())
    of_sums = replace(same, corrects_delta=False, wide=False, of_part=False)
    products = replace(same, spec=replace(spec, dropout=key.spec.dropout))
    return (
        # These functions read only `may_forbid`; kernels that differ in the rest share them.
        Module(_EMIT_SUMS, (of_sums, traits._replace(plain=False, applies_chain_rule=False))),
        Module(_EMIT_PRODUCTS, (products, traits, sums_rows)),
    )


ROW_SUMS = ("row_max", "row_sum", "residual")
"""The arrays of m, l and r, in the order in which the kernel writes them."""
