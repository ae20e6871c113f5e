"""What the functions of a backward kernel agree on: its key, argument block and scratch memory.

Functions for one vector of queries have the arguments `VectorArguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from qkv.backends.cpu.backward.layout import (
    AREAS,
    BackwardKey,
    Traits,
    fields_with,
    further_areas,
    loads_with_gradients,
    traits_of,
)
from qkv.backends.cpu.emit.emitter import FLOAT, INT64, POINTER, Value
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.backends.cpu.emit.frame import Frame
from qkv.backends.cpu.emit.storage import real_dtype
from qkv.backends.cpu.forward.layout import skips_keys_within_blocks
from qkv.backends.cpu.products.packed_pairs import PackedPairs, packed_pairs
from qkv.backends.cpu.products.query_lanes import IN_ORDER, SumOrder, dot_rows
from qkv.problem.language.derivative import derivative

_CHAIN_OF_PRODUCTS = 8
"""The number of products that a kernel which corrects delta adds one after the other, before it
adds these sums."""
DELTA_REST = 2
"""The row, in the area of delta, that holds what the sum of its two halves lacks."""
EXPECTED_SUM = 1
"""The row, in the area of lse, that holds what the dS of each query should add up to."""


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
    delta correction. What the kernel does for score mods and masks is said by `traits`, those of
    the key by default.
    """

    def __init__(
        self,
        key: BackwardKey,
        area_names: tuple[str, ...] = AREAS,
        *,
        sums_rows: bool = False,
        traits: Traits | None = None,
    ) -> None:
        self.in_pairs = key.shape.product == "pairs"
        """Whether products are of pairs of bfloat16, with P and dX rounded."""
        self.area_names = (*area_names, *further_areas(key.shape))
        fields = fields_with(self.area_names)
        super().__init__("qkv_backward", key.spec, key.shape, key.int_bits, fields)
        self.elements_of_term = self.packed_pairs().elements if self.in_pairs else 1
        operand_dtype = real_dtype(self.e) if key.rotated else key.spec.dtype
        self.dtypes = {
            "query": operand_dtype, "key": operand_dtype, "value": key.spec.dtype,
            "grad_out": key.spec.dtype, "out": key.out_dtype,
        }  # fmt: skip
        self.grad_dtype = key.grad_dtype
        self.wanted_tables = key.tables
        traits = traits or traits_of(key)
        self.plain = traits.plain and not sums_rows
        """Whether weights are computed with the products; otherwise from stored products."""
        self.slope, self.loads = derivative(self.score), loads_with_gradients(key)
        self.applies_chain_rule = traits.applies_chain_rule or sums_rows
        """Whether score mods have derivatives, or a table has a gradient, so that dS is stored."""
        self.may_forbid = traits.may_forbid
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

    def packed_pairs(self, vectors: int = 1) -> PackedPairs:
        """How Q and dO are packed and multiplied, if they are `in_pairs`."""
        return packed_pairs(self.e, self.shape, vectors)

    def number_of_terms(self, dim: Value) -> Value:
        """How many terms a row of the first two products has; an element is one, or 2 or 4 are."""
        size = self.elements_of_term
        if size == 1:
            return dim
        return self.e.builder.sdiv(self.e.add(dim, size - 1), self.e.index(size))

    def dot_rows(
        self,
        rows: Value,
        row: Value,
        count: Value,
        packed: Value,
        vectors: int,
        dim: Value,
        finish: Callable[[Value, list[Value], list[Value]], list[Value]],
        sums: SumOrder = IN_ORDER,
    ) -> None:
        """`query_lanes.dot_rows` of rows with `dim` elements, multiplied in terms."""
        e, b = self.e, self.e.builder
        if self.in_pairs:
            pairs = b.sdiv(e.add(dim, 1), e.index(2))
            self.packed_pairs(vectors).dot_rows(
                rows, row, count, packed, pairs, finish, sums.means_of_half
            )
            return
        keys = self.shape.keys_of(vectors)
        dot_rows(e, rows, row, count, packed, vectors, dim, keys, [], finish, sums)

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

    def finite_part(self, x: Value) -> Value:
        """x, or 0 where it is infinite or NaN."""
        return self.e.builder.select(self._is_finite(x), x, self.e.const(0.0))

    def not_among_products(self, x: Value) -> Value:
        """The part of x that products left out, to be added where pairs are allowed.

        Products of bfloat16 leave out what is not finite, so that all other bits do not depend on
        what is forbidden. Other products leave out all of x.
        """
        if not self.in_pairs:
            return x
        return self.e.builder.select(self._is_finite(x), self.e.const(0.0), x)

    def _is_finite(self, x: Value) -> Value:
        b, zero = self.e.builder, self.e.const(0.0)
        return b.fcmp_ordered("ord", b.fmul(x, zero), zero)
