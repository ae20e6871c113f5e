"""What the functions of a backward kernel agree on: its key, argument block and scratch memory.

Functions for one vector of queries have the arguments `VectorArguments`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from qkv.backends.cpu.emit.emitter import FLOAT, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.backends.cpu.emit.frame import COMMON_FIELDS, Frame, operand_fields
from qkv.backends.cpu.emit.storage import real_dtype
from qkv.backends.cpu.forward.boundary_blocks import skips_keys_within_blocks
from qkv.backends.cpu.forward.frame import STATS
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.bfloat16 import multiply_add_pairs, round_to_chunks
from qkv.backends.cpu.products.query_lanes import (
    MultiplyAdd,
)
from qkv.problem.language.derivative import ONE, derivative
from qkv.problem.language.expressions import SCORE, TRUE, Load, walk
from qkv.problem.spec import Spec

BLOCK_KV = 128
"""Keys whose weights are held at once."""
_CHAIN_OF_PRODUCTS = 8
"""After a delta correction, so many products are added one after the other before these sums are
added."""
AREAS = (
    "query", "grad_out", "query_sums", "query_rows", "grad_rows", "lse", "lse_rest",
    "delta", "weights", "score_grads", "products", "factors", "key_copy", "value_copy",
)  # fmt: skip
"""The areas of a worker's scratch memory, in this order."""
PAIR_AREAS = ("query_pairs", "grad_pairs", "key_pairs", "value_pairs")
"""Further areas of scratch that follow `AREAS` when the kernel multiplies pairs of bfloat16."""
DELTA_REST = 2
"""The row, in the area of delta, that holds what the sum of its two halves lacks."""
EXPECTED_SUM = 1
"""The row, in the area of lse, that holds what the dS of each query should add up to."""

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


def padded_dim(dim: int, lanes: int) -> int:
    """`dim` rounded up to whole vectors, as rows of sums have it."""
    return -(-dim // lanes) * lanes


def fields_with(areas: tuple[str, ...]) -> tuple[str, ...]:
    """The words of the argument block of a kernel with these areas."""
    return (*FIELDS, *(f"area_{name}" for name in areas))


def scratch_areas(shape: TileShape, head_dim: int, v_head_dim: int, item: int) -> dict[str, int]:
    """Bytes that each area takes."""
    block_q = shape.lanes * shape.vectors
    query, value = (padded_dim(dim, shape.lanes) * block_q for dim in (head_dim, v_head_dim))
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
        "key_copy": BLOCK_KV * padded_dim(head_dim, shape.lanes),
        "value_copy": BLOCK_KV * padded_dim(v_head_dim, shape.lanes),
        # Rows of pairs are padded to whole chunks, which are two vectors each.
        "query_pairs": query,
        "grad_pairs": value,
        "key_pairs": BLOCK_KV * round_to_chunks(head_dim) // 2,
        "value_pairs": BLOCK_KV * round_to_chunks(v_head_dim) // 2,
    }
    names = (*AREAS, *PAIR_AREAS) if shape.product == "pairs" else AREAS
    return {name: sizes[name] * item for name in names}


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


class VectorArguments(NamedTuple):
    """The arguments of a function for one vector of queries and one block of keys.

    `weights`, `products`, `factors` and `score_grads` hold `count` vectors, `width` bytes apart;
    `rows` is how many lanes are queries.
    """

    arguments: Value
    task: Value
    products: Value
    weights: Value
    factors: Value
    score_grads: Value
    lse: Value
    lse_rest: Value
    width: Value
    count: Value
    batch: Value
    head: Value
    first_row: Value
    rows: Value
    kv_start: Value


VECTOR_AREAS = VectorArguments._fields[2:8]


class BackwardFrame(Frame):
    """What all functions of a backward kernel know and agree on.

    `area_names` are those of a worker's scratch. With `sums_rows` it is the frame of the
    delta correction.
    """

    def __init__(
        self, key: BackwardKey, area_names: tuple[str, ...] = AREAS, *, sums_rows: bool = False
    ) -> None:
        self.in_pairs = key.shape.product == "pairs"
        """Whether the first two products are of pairs of bfloat16."""
        self.area_names = (*area_names, *(PAIR_AREAS if self.in_pairs else ()))
        fields = fields_with(self.area_names)
        super().__init__("qkv_backward", key.spec, key.shape, key.int_bits, fields)
        operand_dtype = real_dtype(self.e) if key.rotated else key.spec.dtype
        self.dtypes = {
            "query": operand_dtype, "key": operand_dtype, "value": key.spec.dtype,
            "grad_out": key.spec.dtype, "out": key.out_dtype,
        }  # fmt: skip
        self.grad_dtype = key.grad_dtype
        self.wanted_tables = key.tables
        self.plain = self.score == SCORE and not sums_rows
        """Whether weights are computed with the products; otherwise from stored products."""
        self.slope = derivative(self.score)
        names = {table.name for table in key.tables}
        read = (n for n in walk(self.score) if isinstance(n, Load) and n.table in names)
        self.loads = tuple(read)
        self.applies_chain_rule = bool(self.loads) or self.slope != ONE or sums_rows
        """Whether score mods have derivatives, or a table has a gradient, so that dS is stored."""
        self.may_forbid = self.mask != TRUE or self.score != SCORE
        self.wide = key.wide and self.e.real == FLOAT
        """Whether dP is added in float64."""
        self.chain_of_products = _CHAIN_OF_PRODUCTS if key.corrects_delta else None
        self.has_delta_rest = key.corrects_delta and not sums_rows
        self.skips_keys_within_blocks = key.shape.product != "tiles" and skips_keys_within_blocks(
            self.mask
        )
        """Whether each vector of queries computes only its own keys in partial blocks."""
        self.corrects_sums = not (key.shape.product == "tiles" or key.corrects_delta or key.of_part)
        """Whether dS of rows that see a single block of keys is corrected to add up exactly."""

    @contextmanager
    def vector_function(self, name: str) -> Iterator[tuple[Value, VectorArguments]]:
        pointers = 2 + len(VECTOR_AREAS)
        types = [*[POINTER] * pointers, *[INT64] * (len(VectorArguments._fields) - pointers)]
        with self.e.function(name, types) as (function, args):
            yield function, VectorArguments(*args)

    def product_terms(self, dim: Value) -> tuple[Value, MultiplyAdd]:
        """How many terms the first two products have (pairs count once), and how they are added."""
        if self.in_pairs:
            return self.e.builder.sdiv(self.e.add(dim, 1), self.e.index(2)), multiply_add_pairs
        return dim, Emitter.fma

    def places(self, at: VectorArguments) -> Expressions:
        return self.expressions_of_rows(at.arguments, at.batch, at.head, at.first_row, at.rows)

    def expressions_of_rows(
        self, arguments: Value, batch: Value, head: Value, first_row: Value, rows: Value
    ) -> Expressions:
        """Expressions of the rows in the lanes; lanes beyond the last row repeat it."""
        e, b = self.e, self.e.builder
        numbers = self.lane_numbers()
        last = self.lane_integers(e.sub(rows, 1))
        lane = b.select(b.icmp_signed("<", numbers, last), numbers, last)
        row = b.add(self.lane_integers(first_row), lane)
        where = {"batch": batch, "head": head, "q_index": row}
        return Expressions(e, self.tables(arguments), where, self.int_bits)

    def is_forbidden(self, weight: Value) -> Value:
        """Which lanes' pairs are forbidden: they have weight -0.0, and no other pair has."""
        e = self.e
        return e.builder.icmp_signed("==", e.as_bits(weight), e.as_bits(e.const(-0.0)))
