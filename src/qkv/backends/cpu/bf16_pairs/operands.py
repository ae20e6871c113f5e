"""The operands of the kernel: K as it lies or copied, V transposed, weights as pairs of keys."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.bf16_pairs.layout import BLOCK_KV
from qkv.backends.cpu.bf16_pairs.rows import Bf16Rows
from qkv.backends.cpu.bf16_pairs.score_blocks import Buffers, QueryBlocks, ValueBlock
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.frame import rows_from
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.softmax import WeightOfKey
from qkv.backends.cpu.products.bfloat16 import join_pairs, present_elements
from qkv.backends.cpu.products.layout import CHUNK
from qkv.problem.language.expressions import TRUE

V_ROW = 2 * BLOCK_KV
"""Bytes of one row of transposed V."""
_PARTIAL_BITS = int("01" * CHUNK, 2)
"""A run's word of kinds has two bits for each block of queries. These are the bits that mark blocks
as partial."""
_UNROLLED = 4, 2, 1
"""Numbers of keys whose weights one step of a loop computes, for the main loop and the loops over
the keys that it leaves."""


class Bf16Operands:
    """Emits what reads, packs and multiplies the operands of one kernel."""

    def __init__(self, frame: ForwardFrame) -> None:
        self.frame, self.e = frame, frame.e
        self.vectors = frame.shape.vectors
        self.width = self.vectors * self.e.vector_bytes
        self.rows = Bf16Rows(frame, self.vectors)

    def row_functions(self) -> dict[str, Value]:
        """The functions that read and pack rows."""
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
                    to = e.at(target, e.mul(d, V_ROW), e.mul(k, 2))
                    present = present_elements(e, e.sub(dim, d))
                    halves.transpose_chunk(
                        e.at(rows, e.mul(d, 2)), row, k, count, present,
                        lambda i, pairs: e.store_vector(pairs, e.at(to, i * V_ROW)),
                    )  # fmt: skip

                e.loop(0, dim, CHUNK, [], transpose_chunk)

            e.loop(0, count, CHUNK, [], transpose_keys)
        return function

    def finish_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        """Set pairs of weights to 0, which pad the last chunk, and make a right factor of all."""
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
                    place = e.at(values, e.mul(d, V_ROW), e.mul(k, 2))
                    return [self.rows.sift_halves(place, marks[0])]

                return e.loop(0, count, CHUNK, marks, sift_chunk)

            (marks,) = e.loop(0, v_head_dim, 1, [none], sift_row)
            b.ret(b.icmp_unsigned("!=", marks, none))
        return function

    def buffers(self, scratch: Value, head_dim: Value, v_head_dim: Value) -> Buffers:
        """The buffers in a worker's memory; head dimensions are padded to whole chunks."""
        e = self.e
        values = e.at(scratch, BLOCK_KV * self.width)
        key_copy = e.at(values, e.mul(v_head_dim, V_ROW))
        value_copy = e.at(key_copy, e.mul(head_dim, 2 * BLOCK_KV))
        blocks = e.at(value_copy, e.mul(v_head_dim, 2 * BLOCK_KV))
        return Buffers(scratch, values, key_copy, value_copy, blocks)

    def prepare_keys(self, task: QueryBlocks, kv_start: Value, count: Value) -> tuple[Value, Value]:
        """K as the left factor of the scores, and the bytes of its rows."""
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

    def store_weights(
        self,
        e: Emitter,
        scores: Value,
        width: Value,
        start: Value,
        stop: Value,
        sums: list[Value],
        weight_of_key: WeightOfKey,
        *,
        short: bool = False,
    ) -> list[Value]:
        """`softmax.store_weights` for pairs: two keys share a lane, an odd last one with 0."""

        def store_keys(count: int) -> Callable[[Value, list[Value]], list[Value]]:
            def store_step(k: Value, sums: list[Value]) -> list[Value]:
                weights = []
                for i in range(count):
                    weight, sums = weight_of_key(e.add(k, i), sums)
                    weights.append(weight)
                weights += [e.const(0.0)] * (count % 2)
                for p in range(0, len(weights), 2):
                    pair = e.builder.ashr(e.add(k, p), e.index(1))
                    place = e.at(scores, e.mul(pair, width))
                    e.store_vector(join_pairs(e, weights[p], weights[p + 1]), place)
                return sums

            return store_step

        for size in _UNROLLED[short:]:
            end = e.sub(stop, e.builder.srem(e.sub(stop, start), e.index(size)))
            sums = e.loop(start, end, size, sums, store_keys(size))
            start = end
        return sums
