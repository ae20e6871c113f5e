"""What the tile backward kernel does with one block of queries and one block of keys.

As in all kernels for many queries, scores are transposed: they have one row for each key. A chunk
is 32 neighbouring queries, which is what one row of a tile holds when P or dX is a left factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Flag, auto
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from qkv.backends.cpu.backward.block import chain_rule_function, weights_function
from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.functions import vector_functions
from qkv.backends.cpu.backward.gradient_sums import add_vectors
from qkv.backends.cpu.backward.layout import BLOCK_KV
from qkv.backends.cpu.backward.query_rows import pack_function, unpack_function
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, INT16, INT64, POINTER, Value
from qkv.backends.cpu.emit.forbidden_pairs import FORBIDDEN_BFLOAT16, FORBIDDEN_WEIGHT, is_forbidden
from qkv.backends.cpu.emit.packing import copy_rows_function
from qkv.backends.cpu.emit.storage import load, real_dtype
from qkv.backends.cpu.products import matrix_unit
from qkv.backends.cpu.products.bfloat16 import emit_round_to_chunks
from qkv.backends.cpu.products.layout import CHUNK, TILE_BYTES, TILE_ROWS, TILE_SIZE
from qkv.backends.cpu.products.query_lanes import vectors_at
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.layout import FLOAT_BYTES, QUERY_ROWS
from qkv.backends.cpu.split_bf16.terms import TermSplitter
from qkv.problem.language.expressions import TRUE

_PANEL = 2
"""Number of vectors in one row of a tile."""
_KEYS_BESIDE = 8
"""Number of keys whose weights are computed during one step of a product."""


class BlockPair(NamedTuple):
    """Addresses for one block of queries and one block of keys: of arguments, and of areas."""

    arguments: Value
    rows: Value
    weights: Value
    score_grads: Value
    factors: Value
    weight_rows: Value
    grad_rows: Value
    grad_pairs: Value


_BLOCK_PAIR = [POINTER] * len(BlockPair._fields)
_ComputePair = Callable[[Value, int], tuple[Value, Value]]
"""Emits P and dX of a key and a vector of queries."""


class Stage(Flag):
    """What one function computes of a pair."""

    WEIGHTS = auto()
    """P from S."""
    GRADIENTS = auto()
    """dS from P and dP, times scale if no mod is between; P becomes P times its dropout factor."""
    SPLIT = auto()
    """P and dX as terms."""
    ALL = WEIGHTS | GRADIENTS | SPLIT

    @property
    def function(self) -> str:
        """The name of its function."""
        return f"stage_{self.value}"


class SplitBlock:
    """Emits the functions of one block of queries and one block of keys."""

    def __init__(self, frame: BackwardFrame) -> None:
        self.frame, self.e, self.shape = frame, frame.e, frame.shape
        self.split = TermSplitter(self.e, self.shape, BLOCK_KV)
        self.width, self.vectors = self.split.width, self.shape.vectors
        self.panels = TermSplitter(self.e, replace(self.shape, vectors=_PANEL), BLOCK_KV)
        """Layout of right factors and sums whose rows are keys; a row of a tile is two vectors."""
        self.has_left_out = frame.dtypes["out"] != frame.dtypes["grad_out"]
        """Whether the output has more digits than the sum of its terms."""
        self.row_band = self.shape.block_q // CHUNK * self.split.chunk_bytes
        """Bytes from the tiles of P or dX of 16 keys to those of the next 16."""

    # Rows

    def pack_terms(self) -> Value:
        """One vector of rows as pairs of terms; lanes beyond the last row repeat it."""
        e = self.e
        arguments = [POINTER, *[INT64] * 4, POINTER]
        with e.function("pack", arguments, INT64) as (function, args):
            rows, row, first, last, dim, packed = args
            places = [
                e.at(rows, e.mul(e.least(e.add(first, i), last), row)) for i in range(e.lanes)
            ]
            e.builder.ret(self.split.pack_rows(places, dim, packed, None))
        return function

    def add_left_out(self) -> Value:
        """A function `(out, out_row, grad, grad_row, count, dim, products)`.

        Adds to the product of each query's rows of O and dO what the terms of O lack: the output
        was not rounded to 16 bits, and has more digits than its terms.
        """
        e, split = self.e, self.split
        arguments = [*[POINTER, INT64] * 2, INT64, INT64, POINTER]
        with e.function("add_left_out", arguments) as (function, args):
            out, out_row, grad, grad_row, count, dim, products = args

            def correct_query(i: Value, _: list[Value]) -> None:
                starts = e.at(out, e.mul(i, out_row)), e.at(grad, e.mul(i, grad_row))

                def add_elements(d: Value, total: list[Value]) -> list[Value]:
                    x, y = (split.load_elements(start, d, dim) for start in starts)
                    return [e.fma(split.left_out(x), y, total[0])]

                (total,) = e.loop(0, dim, e.lanes, [e.const(0.0)], add_elements)
                lacking = e.extract(e.reduce(total, e.builder.fadd), 0)
                place = e.at(products, e.mul(i, self.width), e.mul(i, FLOAT_BYTES))
                product = e.load(place, e.real, FLOAT_BYTES)
                e.store(e.builder.fadd(product, lacking), place, FLOAT_BYTES)

            e.loop(0, count, 1, [], correct_query)
        return function

    # P, dS and dX

    def stage_function(self, stage: Stage) -> Value:
        """A function `(*BlockPair, start, count)`: a stage for keys from `start` on.

        Keys are counted through all chunks of queries: key k of chunk c is number c * count + k.
        """
        e = self.e
        with e.function(stage.function, [*_BLOCK_PAIR, INT64, INT64]) as (function, args):
            *places, start, count = args
            block = BlockPair(*places)

            def compute_chunk(c: Value, _: list[Value]) -> None:
                begin = e.least(e.larger_of(e.sub(start, e.mul(c, count)), 0), count)
                compute = self.pair_computation(block, c, stage)

                def store_key(k: Value, _: list[Value]) -> None:
                    for j in range(_PANEL):
                        place = self.place_of_pair(k, c, j)
                        weight, grad = compute(k, j)
                        e.store_vector(weight, e.at(block.weights, place))
                        e.store_vector(grad, e.at(block.score_grads, place))

                if Stage.SPLIT in stage:
                    e.loop(begin, count, 2, [], lambda k, _: self.store_terms(block, compute, k, c))
                else:
                    e.loop(begin, count, 1, [], store_key)

            e.loop(0, self.chunks, 1, [], compute_chunk)
            if Stage.SPLIT in stage:
                pairs, end = (
                    e.builder.ashr(x, e.index(1)) for x in (count, emit_round_to_chunks(e, count))
                )
                is_odd = e.builder.trunc(e.builder.and_(count, e.index(1)), BIT)
                with e.builder.if_then(is_odd, likely=False):
                    self.split.clear_second(block.grad_pairs, e.sub(count, 1))
                pairs = e.add(pairs, e.builder.zext(is_odd, INT64))
                self.split.clear_pairs(block.grad_pairs, pairs, end)
        return function

    def last_stage(self, kind: str) -> Stage:
        """The stage in which P and dX of a full or partial block are split."""
        if self.frame.plain and kind == "full":
            return Stage.ALL
        return Stage.SPLIT if self.frame.applies_chain_rule else Stage.GRADIENTS | Stage.SPLIT

    def overlapped_stage_function(self) -> Value:
        """A function `(*BlockPair, start, *product) -> start`: all stages, from `start` on.

        It computes as many keys as there is time for while tiles of other blocks are multiplied,
        and returns the first key that is left. `product` are arguments of `matrix_unit.multiply`.
        """
        e = self.e
        arguments = [*_BLOCK_PAIR, INT64, *[POINTER] * 3, *[INT64] * 3]
        with e.function("beside", arguments, INT64) as (function, args):
            *places, start = args[: len(_BLOCK_PAIR) + 1]
            block, product = BlockPair(*places), args[len(places) + 1 :]
            count, pairs = product[4:]
            b, products = e.builder, self.split.products()
            # All keys of a step must belong to one chunk of queries.
            whole_steps = b.icmp_signed("==", b.srem(count, e.index(_KEYS_BESIDE)), e.index(0))
            left = e.sub(e.mul(count, self.chunks), start)
            wanted = b.select(whole_steps, b.sdiv(left, e.index(_KEYS_BESIDE)), e.index(0))
            steps = e.least(wanted, matrix_unit.steps_of(e, self.vectors, count, pairs))
            running: list[Any] = []

            def compute_share(step: Value, group: int) -> None:
                """Compute a share of the keys of this step."""
                if group == 0:
                    first = e.add(start, e.mul(step, _KEYS_BESIDE))
                    chunk = b.sdiv(first, count)
                    compute = self.pair_computation(block, chunk, Stage.ALL)
                    running[:] = [e.sub(first, e.mul(chunk, count)), chunk, compute]
                first, chunk, compute = running
                units, groups = _KEYS_BESIDE // 2, len(products)
                for n in range(units * group // groups, units * (group + 1) // groups):
                    self.store_terms(block, compute, e.add(first, 2 * n), chunk)

            matrix_unit.multiply(
                e, product, self.vectors, onto=False, products=products,
                side_work=matrix_unit.SideWork(steps, compute_share),
            )  # fmt: skip
            b.ret(e.add(start, e.mul(steps, _KEYS_BESIDE)))
        return function

    def place_of_pair(self, k: Value, chunk: Value, j: int) -> Value:
        """Byte offset of the scores of a key and a vector of a chunk of queries."""
        e = self.e
        return e.add(e.mul(k, self.width), e.mul(chunk, self.panels.width), j * e.vector_bytes)

    def pair_computation(self, of: BlockPair, chunk: Value, stage: Stage) -> _ComputePair:
        """Emits P and dX of one key and one vector of a chunk of queries."""
        e, b = self.e, self.e.builder
        dropout = bool(self.frame.spec.dropout)
        scale = e.splat(self.frame.real_field(of.arguments, "scale"))
        rows = e.at(of.rows, e.mul(chunk, self.panels.width))
        lse, rest, delta, grad_lse = (
            vectors_at(e, e.at(rows, QUERY_ROWS.index(name) * self.width), _PANEL)
            for name in ("lse", "lse_rest", "delta", "grad_lse")
        )

        def compute_pair(k: Value, j: int) -> tuple[Value, Value]:
            place = self.place_of_pair(k, chunk, j)
            weight, gradient = (e.load_vector(e.at(x, place)) for x in (of.weights, of.score_grads))
            if Stage.WEIGHTS in stage:
                less_lse = b.fsub(b.fsub(b.fmul(weight, scale), lse[j]), rest[j])
                weight = vector_math.exp_flushed(e, less_lse)
            forbidden = is_forbidden(e, weight)
            if Stage.GRADIENTS in stage:
                factor = e.load_vector(e.at(of.factors, place)) if dropout else None
                if factor is not None:
                    gradient = b.fmul(gradient, factor)
                gradient = b.fadd(b.fsub(gradient, delta[j]), grad_lse[j])
                share = weight if self.frame.applies_chain_rule else b.fmul(weight, scale)
                # Adding 0.0 turns -0.0, which would mark a forbidden pair, into 0.0.
                gradient = e.fma(share, gradient, e.const(0.0))
                if factor is not None:
                    weight = b.fmul(weight, factor)
            else:
                gradient = b.fadd(gradient, e.const(0.0))
            if Stage.SPLIT in stage and self.frame.may_forbid and Stage.WEIGHTS not in stage:
                gradient = b.select(forbidden, e.const(FORBIDDEN_WEIGHT), gradient)
            return weight, gradient

        return compute_pair

    @property
    def chunks(self) -> int:
        """Number of chunks of queries; a row of P or dX is a row of as many tiles."""
        return self.vectors // _PANEL

    def store_terms(self, of: BlockPair, compute: _ComputePair, k: Value, chunk: Value) -> None:
        """Store P and dX of an even key and the next, with a chunk of queries, as terms."""
        e, split = self.e, self.split
        start, grads = self.place_in_rows(k, chunk), []
        for n in range(2):
            vectors = [compute(e.add(k, n), j) for j in range(_PANEL)]
            weight, grad = (split.truncated_terms(both) for both in zip(*vectors, strict=True))
            place = e.add(start, n * TILE_BYTES)
            split.store_terms(weight, e.at(of.weight_rows, place))
            split.store_terms(grad, e.at(of.grad_rows, place))
            grads.append(grad)
        packed = e.at(split.packed_row(of.grad_pairs, k), e.mul(chunk, self.panels.width))
        for j in range(_PANEL):
            pairs = [(first[j], second[j]) for first, second in zip(*grads, strict=True)]
            split.store_term_pairs(pairs, e.at(packed, j * e.vector_bytes))

    def place_in_rows(self, k: Value, chunk: Value) -> Value:
        """The byte offset of a row of P or dX among its tiles."""
        e, b = self.e, self.e.builder
        band = e.mul(b.sdiv(k, e.index(TILE_ROWS)), self.row_band)
        inside = e.mul(b.and_(k, e.index(TILE_ROWS - 1)), TILE_BYTES)
        return e.add(band, e.mul(chunk, self.split.chunk_bytes), inside)

    # dV and dK

    def add_by_keys(self) -> Value:
        """A function `(left, right, sums, dim, count)`: a product for each panel of columns."""
        e = self.e
        with e.function("add_by_keys", [*[POINTER] * 3, INT64, INT64]) as (function, args):
            left, transposed, sums, dim, count = args

            def multiply_panel(d: Value, _: list[Value]) -> None:
                number = e.builder.sdiv(d, e.index(CHUNK))
                right = e.at(transposed, e.mul(number, self.chunks * self.panels.panel_bytes))
                out = e.at(sums, e.mul(number, BLOCK_KV * self.panels.width))
                band, pairs = e.index(self.row_band), e.index(self.shape.block_q // 2)
                matrix_unit.multiply(
                    e, (left, right, out, band, count, pairs), _PANEL, onto=True,
                    products=self.split.products(of_weights=True),
                )  # fmt: skip

            e.loop(0, dim, CHUNK, [], multiply_panel)
        return function

    def add_non_finite_rows(self, name: str, dtype: str) -> Value:
        """A function `(*rows, first, last, non_finite_rows, left, sums, dim, count)`.

        Adds what `transpose_rows` left out: the elements that cannot be split, in the rows that
        `non_finite_rows` marks. A forbidden pair adds nothing: 0 * inf would be NaN.
        """
        e, split = self.e, self.split
        rows = [POINTER, *[INT64] * 4]
        with e.function(name, [*rows, *[POINTER] * 3, INT64, INT64]) as (function, args):
            source, row, element, first, last, non_finite_rows, left, sums, dim, count = args
            b = e.builder

            def add_row(lane: Value, _: list[Value]) -> None:
                vector = b.sdiv(lane, e.index(e.lanes))
                word = e.load(e.at(non_finite_rows, e.mul(vector, e.vector_bytes)), INT64, WORD)
                mark = b.and_(b.lshr(word, e.sub(lane, e.mul(vector, e.lanes))), e.index(1))
                here = e.at(source, e.mul(e.add(first, lane), row))

                def add_element(d: Value, _: list[Value]) -> None:
                    x = load(e, e.at(here, e.mul(d, element)), dtype)
                    marks = split.huge_lanes(split.magnitude(e.splat(x)))
                    panel = b.sdiv(d, e.index(CHUNK))
                    inside = e.mul(e.sub(d, e.mul(panel, CHUNK)), FLOAT_BYTES)
                    column = e.at(sums, e.mul(panel, BLOCK_KV * self.panels.width), inside)

                    def add_to_key(k: Value, _: list[Value]) -> None:
                        chunk = b.sdiv(lane, e.index(CHUNK))
                        inside = e.mul(e.sub(lane, e.mul(chunk, CHUNK)), 2)
                        place = e.at(left, self.place_in_rows(k, chunk), inside)
                        upper = e.load(place, INT16, 2)
                        weight = load(e, place, "bfloat16")
                        for n in range(1, split.terms):
                            term = load(e, e.at(place, n * TILE_SIZE), "bfloat16")
                            weight = b.fadd(weight, term)
                        mark_of_pair = ir.Constant(INT16, FORBIDDEN_BFLOAT16)
                        with b.if_then(b.icmp_unsigned("!=", upper, mark_of_pair)):
                            to = e.at(column, e.mul(k, self.panels.width))
                            total = e.load(to, e.real, FLOAT_BYTES)
                            e.store(e.fma(x, weight, total), to, FLOAT_BYTES)

                    some = b.icmp_unsigned("!=", marks, ir.Constant(marks.type, 0))
                    e.loop(0, b.select(some, count, e.index(0)), 1, [], add_to_key)

                marked = b.icmp_signed("!=", mark, e.index(0))
                e.loop(0, b.select(marked, dim, e.index(0)), 1, [], add_element)

            e.loop(0, e.add(e.sub(last, first), 1), 1, [], add_row)
        return function

    def add_sums(self) -> Value:
        """A function `(sums, to, row, dim, count)`: add the sums of a block to those in memory."""
        e = self.e
        with e.function("add_sums", [*[POINTER] * 2, *[INT64] * 3]) as (function, args):
            sums, to, row, dim, count = args

            def add_key(k: Value, _: list[Value]) -> None:
                start, end = e.at(sums, e.mul(k, self.panels.width)), e.at(to, e.mul(k, row))

                def add_elements(d: Value, _: list[Value]) -> None:
                    panel = e.round_down(d, CHUNK)
                    inside = e.mul(e.sub(d, panel), FLOAT_BYTES)
                    place = e.at(start, e.mul(panel, BLOCK_KV * self.panels.width // CHUNK), inside)
                    add_vectors(e, e.at(end, e.mul(d, FLOAT_BYTES)), [e.load_vector(place)])

                e.loop(0, dim, e.lanes, [], add_elements)

            e.loop(0, count, 1, [], add_key)
        return function

    # One task

    def functions(self) -> dict[str, Value]:
        e, split, real = self.e, self.split, real_dtype(self.e)
        multiply = partial(matrix_unit.add_products, e, vectors=self.vectors)
        functions = {
            "unpack": unpack_function(self.frame),
            f"pack {real}": pack_function(self.frame, real),
            "pack": self.pack_terms(),
            "transpose_rows": self.panels.transpose_rows(self.shape.block_q),
            "split_rows": split.split_rows(),
            "split_columns": split.split_columns(),
            "scores": multiply(name="scores", onto=False, products=split.products()),
            "add_by_queries": multiply(
                name="add_by_queries", onto=True, products=split.products(of_weights=True)
            ),
            "add_by_keys": self.add_by_keys(),
            "add_sums": self.add_sums(),
            "add_non_finite": non_finite.add_non_finite(split),
        }
        if self.has_left_out:
            functions["add_left_out"] = self.add_left_out()
        for dtype in sorted({*self.frame.dtypes.values()}):
            functions[f"copy {dtype}"] = copy_rows_function(e, dtype)
        for left, right in (("key", "query"), ("value", "grad_out"), ("out", "grad_out")):
            name = self.recompute_name(left, right)
            if name not in functions:
                functions[name] = non_finite.recompute(
                    split, name, self.frame.dtypes[left], self.frame.dtypes[right]
                )
        for name in ("query", "grad_out"):
            dtype = self.frame.dtypes[name]
            function = f"add_non_finite_rows {dtype}"
            if function not in functions:
                functions[function] = self.add_non_finite_rows(function, dtype)
        functions |= vector_functions(self.frame, weights_function, chain_rule_function)
        stages = {self.last_stage("full")}
        if self.frame.mask != TRUE:
            stages |= {self.last_stage("partial"), *([Stage.WEIGHTS] if self.frame.plain else [])}
        if self.frame.applies_chain_rule:
            stages.add(Stage.GRADIENTS)
        for stage in sorted(stages, key=lambda stage: stage.value):
            functions[stage.function] = self.stage_function(stage)
        if self.frame.plain:
            functions["beside"] = self.overlapped_stage_function()
        return functions

    def recompute_name(self, left: str, right: str) -> str:
        return f"recompute {self.frame.dtypes[left]} {self.frame.dtypes[right]}"
