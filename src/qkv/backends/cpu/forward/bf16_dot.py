"""The forward kernel for bfloat16 on machines that multiply pairs of bfloat16.

It computes what `forward` says, in the same order, with two differences.

Both products add products of *pairs*, of neighbouring elements of Q and K in one, of neighbouring
keys in the other:

    S[k, q]  =  sum_p K[k, p] . Q[p, q]          p: two elements
    O[d, q] +=  sum_p V[d, p] . P[p, q]          p: two keys

The left factor has a row for each k or d, its pairs adjacent; the right factor is *packed*, a pair
of each query in a lane. Pairs of K are adjacent in memory; V is transposed, block by block of keys.
Weights are rounded to bfloat16 as they are packed; row sums are float32 sums of unrounded weights.

One task is several blocks of queries, so that they share transposed V. A run of blocks of keys says
for each block of queries whether it sees all of the keys, some or none.
"""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import rows_from
from qkv.backends.cpu.forward.bf16_rows import Bf16Rows
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import PAIRS_BLOCK_KV, ForwardKey
from qkv.backends.cpu.forward.pair_kernel import emit_pair_kernel
from qkv.backends.cpu.forward.score_blocks import (
    Buffers,
    KeyBlock,
    PairOperands,
    QueryBlocks,
    ValueBlock,
)
from qkv.backends.cpu.products.bfloat16 import join_pairs, present_elements
from qkv.backends.cpu.products.layout import CHUNK
from qkv.problem.language.expressions import TRUE

_PARTIAL_BITS = int("01" * CHUNK, 2)
"""A run's word of kinds has two bits for each block of queries. These are the bits that mark blocks
as partial."""
_V_ROW = 2 * PAIRS_BLOCK_KV
"""Bytes of one row of transposed V."""


def emit_bf16_dot(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    return emit_pair_kernel(Bf16Operands(ForwardFrame(key, block_kv=PAIRS_BLOCK_KV)))


class Bf16Operands(PairOperands):
    """Operands of bfloat16: K as it lies or copied, V transposed."""

    value_row = _V_ROW

    def __init__(self, frame: ForwardFrame) -> None:
        super().__init__(frame)
        self.rows = Bf16Rows(frame, self.vectors)

    def row_functions(self) -> dict[str, Value]:
        functions = {
            "copy": self.rows.copy_function(),
            "transpose_values": self.transpose_function(),
        }
        functions["pack"] = self.rows.pack_function(functions)
        if self.frame.mask != TRUE or not self.frame.plain:
            functions["sift"] = self.sift_function()
            functions["add_non_finite"] = self.rows.add_non_finite_function()
        return functions

    def transpose_function(self) -> Value:
        """A function `(rows, row, count, dim, to)`: V[keys, d] becomes [d, keys], whole chunks."""
        e, halves = self.e, self.rows
        arguments = [POINTER, *[INT64] * 3, POINTER]
        with e.function("transpose_values", arguments) as (function, args):
            rows, row, count, dim, target = args

            def transpose_keys(k: Value, _: list[Value]) -> None:
                def transpose_chunk(d: Value, _: list[Value]) -> None:
                    to = e.at(target, e.mul(d, _V_ROW), e.mul(k, 2))
                    present = present_elements(e, e.sub(dim, d))
                    halves.transpose_chunk(
                        e.at(rows, e.mul(d, 2)), row, k, count, present,
                        lambda i, pairs: e.store_vector(pairs, e.at(to, i * _V_ROW)),
                    )  # fmt: skip

                e.loop(0, dim, CHUNK, [], transpose_chunk)

            e.loop(0, count, CHUNK, [], transpose_keys)
        return function

    def product_function(self, name: str, *, onto: bool) -> Value:
        return self.rows.packed.product_function(name, onto=onto)

    def place_of_pair(self, scores: Value, k: Value, width: Value) -> Value:
        e = self.e
        return e.at(scores, e.mul(e.builder.ashr(k, e.index(1)), width))

    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        self.e.store_vector(join_pairs(self.e, first, second), place)

    def finish_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        e = self.e
        e.clear(weights, e.mul(first, self.width), e.mul(stop, self.width))
        self.rows.packed.finish(weights, stop)

    def sift_function(self) -> Value:
        """A function `(values, v_head_dim, count)`: whether any value is not finite.

        Values that are not finite become 0.
        """
        e = self.e
        with e.function("sift", [POINTER, INT64, INT64], BIT) as (function, args):
            values, v_head_dim, count = args
            b, none = e.builder, ir.Constant(ir.IntType(CHUNK), 0)

            def sift_row(d: Value, marks: list[Value]) -> list[Value]:
                def sift_chunk(k: Value, marks: list[Value]) -> list[Value]:
                    place = e.at(values, e.mul(d, _V_ROW), e.mul(k, 2))
                    return [self.rows.sift_halves(place, marks[0])]

                return e.loop(0, count, CHUNK, marks, sift_chunk)

            (marks,) = e.loop(0, v_head_dim, 1, [none], sift_row)
            b.ret(b.icmp_unsigned("!=", marks, none))
        return function

    def buffers(self, scratch: Value, head_dim: Value, v_head_dim: Value) -> Buffers:
        e = self.e
        values = e.at(scratch, PAIRS_BLOCK_KV * self.width)
        key_copy = e.at(values, e.mul(v_head_dim, _V_ROW))
        value_copy = e.at(key_copy, e.mul(head_dim, 2 * PAIRS_BLOCK_KV))
        blocks = e.at(value_copy, e.mul(v_head_dim, 2 * PAIRS_BLOCK_KV))
        return Buffers(scratch, values, key_copy, value_copy, blocks)

    def prepare_keys(self, task: QueryBlocks, kv_start: Value, count: Value) -> tuple[Value, Value]:
        here = rows_from(self.e, task.key, kv_start)
        functions, copy = task.functions, task.at.key_copy
        return self.rows.with_adjacent_elements(
            functions, here, count, task.head_dim, copy, whole_chunks=True
        )

    def prepare_values(
        self, task: QueryBlocks, kv_start: Value, count: Value, kinds: Value
    ) -> ValueBlock:
        """V transposed. Where pairs may be forbidden, 0 replaces values that are not finite."""
        e, b, functions, at, dim = self.e, self.e.builder, task.functions, task.at, task.v_head_dim
        here = rows_from(e, task.value, kv_start)
        v, row = self.rows.with_adjacent_elements(functions, here, count, dim, at.value_copy)
        b.call(functions["transpose_values"], [v, row, count, dim, at.values])
        has_non_finite: Value = ir.Constant(BIT, 0)
        if "sift" in functions:
            has_partial = b.icmp_signed("!=", b.and_(kinds, e.index(_PARTIAL_BITS)), e.index(0))
            if not self.frame.plain:
                has_partial = ir.Constant(BIT, 1)
            sifted_keys = b.select(has_partial, count, e.index(0))
            has_non_finite = b.call(functions["sift"], [at.values, dim, sifted_keys])
        return ValueBlock(v, row, has_non_finite)

    def keys_from(self, keys: KeyBlock, k: Value) -> Value:
        return self.e.at(keys.rows, self.e.mul(k, keys.row))

    def values_from(self, values: Value, k: Value) -> Value:
        return self.e.at(values, self.e.mul(k, 2))
