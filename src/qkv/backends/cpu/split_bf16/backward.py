"""The backward kernel for machines with matrix tiles (AMX), for float32, float16 and bfloat16.

It computes what `backward.kernel` computes, with the same formulas. All five matrix products are
sums of products of bfloat16 terms (`terms`): a float32 is split into three terms, a float16 into
two, and a bfloat16 is one term. K, Q and dO are each needed as a left and as a right factor, so
they are laid out both ways, and so is dX. P and V are needed one way only:

    S[k, q]    =  sum_d K[k, d] . Q[d, q]          K as tiles, Q packed
    dP[k, q]   =  sum_d V[k, d] . dO[d, q]         V as tiles, dO packed
    dQ[d, q]  +=  sum_k K[d, k] . dX[k, q]         K by columns, dX packed as pairs of keys
    dV[k, d]  +=  sum_q P[k, q] . dO[q, d]         P as tiles, dO packed as pairs of queries
    dK[k, d]  +=  sum_q dX[k, q] . Q[q, d]         dX as tiles, Q packed as pairs of queries

Several blocks of queries are packed first. Each block of keys is then split once and used with all
these blocks. The vector units compute P and dX of one block of queries while the tiles multiply S
and dP of the next one.

delta is computed from split O and dO too, in the same order of additions as dP, so that the two are
equal where one key has all the weight. dX is -0.0 where the mask forbids a pair, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import reduce
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.backward.block_of_queries import BlockCall
from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.kernel import emit_tasks, key_range_function
from qkv.backends.cpu.backward.layout import BLOCK_KV, BackwardKey
from qkv.backends.cpu.backward.partials import add_partials_function
from qkv.backends.cpu.backward.query_block import QueryBlockPass
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import RowView, rows_from
from qkv.backends.cpu.products import tile_instructions
from qkv.backends.cpu.products.bfloat16 import emit_round_to_chunks
from qkv.backends.cpu.products.layout import CHUNK
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.backward_block import BlockPair, SplitBlock, Stage
from qkv.backends.cpu.split_bf16.layout import AREAS, FLOAT_BYTES, QUERY_ROWS
from qkv.problem.language.expressions import TRUE
from qkv.problem.tiles import TileKind


def emit_split_backward(key: BackwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    frame = BackwardFrame(key, AREAS)
    e, block = frame.e, SplitBlock(frame)
    functions = {"add_partials": add_partials_function(frame), **block.functions()}
    with e.function("query_block", [POINTER] * 4) as (query_block, args):
        tile_instructions.configure(e)
        _QueryBlocks(block, functions, BlockCall(*args)).emit()
        tile_instructions.release(e)

    def call_query_block(_: Value, arguments: list[Value]) -> None:
        e.builder.call(query_block, arguments)

    emit_tasks(frame, key_range_function(frame, functions, call_query_block))
    return str(e.module)


class _Product(NamedTuple):
    """A product of rows of two operands, `left` and `right`, and the names of its areas."""

    left: str
    right: str
    rows: str
    packed: str
    out: str
    non_finite_rows: str
    lanes: str


class _QueryBlocks(QueryBlockPass):
    """Emits what is computed for some blocks of queries and the keys of one task."""

    def __init__(self, code: SplitBlock, functions: dict[str, Value], call: BlockCall) -> None:
        super().__init__(code.frame, code.vectors, functions, call)
        self.code = code
        e, b, split = self.e, self.e.builder, code.split
        block_q = code.shape.block_q
        self.q_len = self.field("q_len")
        left = e.add(e.sub(self.q_len, self.first_row), block_q - 1)
        self.count = e.least(self.field("q_blocks_per_task"), b.sdiv(left, e.index(block_q)))
        self.wide = {name: emit_round_to_chunks(e, dim) for name, dim in self.dims.items()}
        half = split.terms * split.width // 2
        query, grad = (e.mul(self.wide[name], half) for name in ("query", "grad_out"))
        self.strides = {
            "query_packed": query,
            "query_transposed": query,
            "grad_packed": grad,
            "grad_transposed": grad,
            "query_sums": e.mul(self.wide["query"], split.width),
            "rows": e.index(len(QUERY_ROWS) * split.width),
        }
        """Bytes from the area of one block of queries to that of the next."""

    def block_at(self, i: Value, buffer: Value) -> _QueryBlocks:
        """Block `i` of these blocks, with one of two buffers for S and dP."""
        e, block_q = self.e, self.frame.shape.block_q
        here = copy(self)
        here.area = dict(self.area)
        for name, stride in self.strides.items():
            here.area[name] = e.at(self.area[name], e.mul(i, stride))
        for n, name in enumerate(QUERY_ROWS):
            here.area[name] = e.at(here.area["rows"], n * self.code.width)
        for name in ("weights", "score_grads"):
            size = BLOCK_KV * self.code.width
            here.area[name] = e.at(self.area[name], e.mul(buffer, size))
        here.first_row = e.add(self.first_row, e.mul(i, block_q))
        here.rows = e.least(e.sub(self.q_len, here.first_row), block_q)
        return here

    def for_each_block(self, body: Callable[[_QueryBlocks], None]) -> None:
        self.e.loop(0, self.count, 1, [], lambda i, _: body(self.block_at(i, self.e.index(0))))

    # --- Rows ------------------------------------------------------------------------------------

    def _float_rows(
        self, name: str, rows: RowView, first: Value, count: Value, to: Value | None = None
    ) -> tuple[Value, Value]:
        frame, code = self.frame, self.code
        here = rows_from(self.e, rows, first)
        dtype = frame.dtypes[name]
        copying, to = self.functions[f"copy {dtype}"], to or self.area["copy"]
        return code.split.float_rows(dtype, copying, here, count, self.dims[name], to)

    def _products(self) -> tuple[_Product, ...]:
        scores = "weights" if self.frame.plain else "products"
        return (
            _Product(
                "key", "query", rows="key_rows", packed="query_packed", out=scores,
                non_finite_rows="non_finite_keys", lanes="query_non_finite",
            ),
            _Product(
                "value", "grad_out", rows="value_rows", packed="grad_packed", out="score_grads",
                non_finite_rows="non_finite_values", lanes="grad_non_finite",
            ),
        )  # fmt: skip

    def _multiply_arguments(self, product: _Product, count: Value) -> list[Value]:
        """The arguments of `matrix_unit.multiply`."""
        e, of = self.e, product.left
        pairs = e.builder.ashr(self.wide[of], e.index(1))
        held = self.areas(product.rows, product.packed, product.out)
        return [*held, self.code.split.band_bytes(self.dims[of]), count, pairs]

    def _recompute(self, product: _Product, first: Value, count: Value) -> None:
        """Recompute products of rows that cannot be split; left rows begin at `first`."""
        e, frame, code, left = self.e, self.frame, self.code, product.left
        marks = self.areas(product.non_finite_rows, product.lanes)
        with e.builder.if_then(non_finite.any_non_finite(code.split, *marks), likely=False):
            head = self.head if left == "out" else self.kv_head
            rows, others = (
                frame.operand(self.arguments, name, self.batch, of)
                for name, of in ((left, head), (product.right, self.head))
            )
            here = RowView(e.at(rows.pointer, e.mul(first, rows.row)), rows.row, rows.element)
            where = self.first_row, self.last, self.dims[left], ir.Constant(e.real, 1.0)
            name = code.recompute_name(left, product.right)
            span = e.index(0), count
            self.call(name, *here, *others, *where, *span, *marks, self.area[product.out])

    def begin(self) -> None:
        """Split Q and dO into terms in both layouts, and compute delta."""
        self.dims["out"], self.wide["out"] = self.dims["value"], self.wide["value"]
        self.for_each_block(lambda block: block.pack_queries())

    def pack_queries(self) -> None:
        e, frame, code = self.e, self.frame, self.code
        for name, short in (("query", "query"), ("grad_out", "grad")):
            rows = frame.operand(self.arguments, name, self.batch, self.head)
            start, row = self._float_rows(name, rows, self.first_row, self.rows)
            for j in range(self.vectors):
                where = e.index(j * e.lanes), e.sub(self.rows, 1), self.dims[name]
                packed = e.at(self.area[f"{short}_packed"], j * e.vector_bytes)
                non_finite_rows = self.call("pack", start, row, *where, packed)
                e.store(
                    non_finite_rows,
                    e.at(self.area[f"{short}_non_finite"], j * e.vector_bytes),
                    WORD,
                )
            transposed = self.area[f"{short}_transposed"]
            self.call("transpose_rows", start, row, self.rows, self.dims[name], transposed)
        self.for_each_vector(self._pack_columns)
        self._compute_delta()
        sums = e.mul(self.wide["query"], code.width)
        e.clear(self.area["query_sums"], 0, sums)

    def _pack_columns(self, offset: Value, first: Value) -> None:
        for name in ("lse", "lse_rest", "grad_lse"):
            self._pack_column(offset, first, name, name)

    def _compute_delta(self) -> None:
        """delta is the diagonal of O dO^T."""
        e, frame, code = self.e, self.frame, self.code
        rows = frame.operand(self.arguments, "out", self.batch, self.head)
        start, row = self._float_rows("out", rows, self.first_row, self.rows)
        held = self.areas("key_rows", "non_finite_keys")
        self.call("split_rows", start, row, self.rows, self.dims["out"], *held)
        product = _Product(
            "out", "grad_out", rows="key_rows", packed="grad_packed", out="weights",
            non_finite_rows="non_finite_keys", lanes="grad_non_finite",
        )  # fmt: skip
        self.call("scores", *self._multiply_arguments(product, self.rows))
        if code.has_left_out:
            # A block of queries is at most half of what "copy" has room for.
            to = e.at(self.area["copy"], e.mul(self.frame.shape.block_q, self.dims["out"], 4))
            rows = frame.operand(self.arguments, "grad_out", self.batch, self.head)
            grad = self._float_rows("grad_out", rows, self.first_row, self.rows, to)
            where = self.rows, self.dims["out"], self.area["weights"]
            self.call("add_left_out", start, row, *grad, *where)
        self._recompute(product, self.first_row, self.rows)

        def store_delta(lane: Value, _: list[Value]) -> None:
            own, column = e.least(lane, e.sub(self.rows, 1)), e.mul(lane, FLOAT_BYTES)
            x = e.load(
                e.at(self.area["weights"], e.mul(own, code.width), column), e.real, FLOAT_BYTES
            )
            e.store(x, e.at(self.area["delta"], column), FLOAT_BYTES)

        e.loop(0, frame.shape.block_q, 1, [], store_delta)

    # --- Keys ------------------------------------------------------------------------------------

    def add_block(self, kv_start: Value, count: Value, kind: Value) -> None:
        """Split one block of keys, and take every block of queries that sees some of it."""
        e = self.e
        v, v_row = self._float_rows("value", self.values, kv_start, count)
        held = self.areas("value_rows", "non_finite_values")
        self.call("split_rows", v, v_row, count, self.dims["value"], *held)
        key = self._float_rows("key", self.keys, kv_start, count)
        held = self.areas("key_rows", "non_finite_keys")
        self.call("split_rows", *key, count, self.dims["key"], *held)
        has_non_finite = self.call(
            "split_columns", *key, count, self.dims["key"], self.area["key_columns"]
        )
        for name in ("key", "value"):
            self._clear_gradient_sums(name, count)

        self._take_query_blocks(kv_start, count, kind, key, has_non_finite)
        for name in ("key", "value"):
            row = self.field(f"{name}_sum_row")
            pointer = self.frame.pointer_field(self.arguments, f"{name}_sums")
            to = e.at(pointer, e.mul(e.add(self.kv_row, kv_start), row))
            self.call("add_sums", self.area[f"{name}_sums"], to, row, self.dims[name], count)

    def _clear_gradient_sums(self, name: str, count: Value) -> None:
        e, width = self.e, self.code.panels.width
        rows = e.mul(emit_round_to_chunks(e, count), width)

        def clear_panel(d: Value, _: list[Value]) -> None:
            start = e.mul(d, BLOCK_KV * width // CHUNK)
            self.e.clear(self.area[f"{name}_sums"], start, e.add(start, rows))

        e.loop(0, self.dims[name], CHUNK, [], clear_panel)

    def _take_query_blocks(
        self,
        kv_start: Value,
        count: Value,
        kinds: Value,
        key: tuple[Value, Value],
        has_non_finite: Value,
    ) -> None:
        """One block of queries after the other: tiles multiply S and dP while vector units compute
        P and dX of the block before."""
        e, b = self.e, self.e.builder
        waiting, buffer = e.stack_words(), e.stack_words()
        e.store(e.index(-1), waiting, WORD)
        e.store(e.index(0), buffer, WORD)

        def is_kind(i: Value, kind: TileKind) -> Value:
            own = b.and_(b.lshr(kinds, e.mul(i, 2)), e.index(3))
            return b.icmp_signed("==", own, e.index(kind))

        def take_block(i: Value, _: list[Value]) -> None:
            with b.if_then(b.not_(is_kind(i, TileKind.EMPTY))):
                before, now = e.load(waiting, INT64, WORD), e.load(buffer, INT64, WORD)
                other = e.sub(1, now)
                has_earlier = b.icmp_signed(">=", before, e.index(0))
                earlier = self.block_at(e.larger_of(before, 0), other)
                here = self.block_at(i, now)

                def compute_then_multiply() -> None:
                    with b.if_then(has_earlier):
                        earlier.compute(kv_start, count, is_kind(before, TileKind.PARTIAL))
                    here.multiply(kv_start, count)

                if self.frame.plain:
                    e.choose(
                        b.and_(has_earlier, is_kind(e.larger_of(before, 0), TileKind.FULL)),
                        lambda: earlier.compute_beside(here, kv_start, count),
                        compute_then_multiply,
                    )
                else:
                    compute_then_multiply()
                with b.if_then(has_earlier):
                    earlier.add_gradients(count, key, has_non_finite)
                e.store(i, waiting, WORD)
                e.store(other, buffer, WORD)

        e.loop(0, self.count, 1, [], take_block)
        last = e.load(waiting, INT64, WORD)
        with b.if_then(b.icmp_signed(">=", last, e.index(0))):
            block = self.block_at(last, e.sub(1, e.load(buffer, INT64, WORD)))
            block.compute(kv_start, count, is_kind(last, TileKind.PARTIAL))
            block.add_gradients(count, key, has_non_finite)

    def multiply(self, kv_start: Value, count: Value) -> None:
        """Multiply S and dP of this block of queries and a block of keys."""
        for product in self._products():
            self.call("scores", *self._multiply_arguments(product, count))
            self._recompute(product, kv_start, count)

    def compute_beside(self, following: _QueryBlocks, kv_start: Value, count: Value) -> None:
        """Compute P and dX of this block while tiles multiply S and dP of the following one."""
        start: Value = self.e.index(0)
        self._call_first_stages("full", kv_start, count)
        pair = self._block_pair()
        for product in following._products():
            start = self.call(
                "beside", *pair, start, *following._multiply_arguments(product, count)
            )
            following._recompute(product, kv_start, count)
        self.call(Stage.ALL.function, *pair, start, count)

    def compute(self, kv_start: Value, count: Value, partial: Value) -> None:
        """Compute P and dX from S and dP, and split them into terms."""

        def compute_kind(kind: str) -> None:
            self._call_first_stages(kind, kv_start, count)
            self._call_stage(self.code.last_stage(kind), count)

        self._by_kind(partial, compute_kind)

    def _by_kind(self, partial: Value, body: Callable[[str], None]) -> None:
        if self.frame.mask == TRUE:
            body("full")
        else:
            self.e.choose(partial, lambda: body("partial"), lambda: body("full"))

    def _call_first_stages(self, kind: str, kv_start: Value, count: Value) -> None:
        """Call all stages but the last, which splits P and dX."""
        frame = self.frame
        if frame.spec.dropout:
            self._call_by_vector("dropout", kv_start, count)
        if frame.plain and kind == "partial":
            self._call_stage(Stage.WEIGHTS, count)
        if not frame.plain or kind == "partial":
            self._call_by_vector(kind, kv_start, count)
        if frame.applies_chain_rule:
            self._call_stage(Stage.GRADIENTS, count)
            self._call_by_vector("chain_rule", kv_start, count)

    def _call_stage(self, stage: Stage, count: Value) -> None:
        self.call(stage.function, *self._block_pair(), self.e.index(0), count)

    def _block_pair(self) -> BlockPair:
        return BlockPair(self.arguments, *self.areas(*BlockPair._fields[1:]))

    def add_gradients(self, count: Value, key: tuple[Value, Value], has_non_finite: Value) -> None:
        """Add this block of queries with a block of keys to dQ, dV and dK."""
        e, code = self.e, self.code
        pairs = e.builder.ashr(e.add(count, 1), e.index(1))
        band, dim = e.index(code.split.column_band), self.dims["query"]
        held = self.areas("key_columns", "grad_pairs", "query_sums")
        self.call("add_by_queries", *held, band, dim, pairs)
        with e.builder.if_then(has_non_finite, likely=False):
            held = self.areas("grad_pairs", "query_sums")
            self.call("add_non_finite", *key, *held, dim, count)
        self._add_key_gradient("value", "weight_rows", "grad_out", "grad", count)
        self._add_key_gradient("key", "grad_rows", "query", "query", count)

    def _add_key_gradient(self, of: str, left: str, name: str, short: str, count: Value) -> None:
        """Add to dV, from P and dO, or to dK, from dX and Q."""
        e, frame = self.e, self.frame
        dim, sums = self.dims[name], f"{of}_sums"
        self.call("add_by_keys", *self.areas(left, f"{short}_transposed", sums), dim, count)
        nothing = e.index(0)
        words = [e.load(e.at(self.area[f"{short}_non_finite"], j * e.vector_bytes), INT64, WORD)
                 for j in range(self.vectors)]  # fmt: skip
        some = e.builder.icmp_signed("!=", reduce(e.builder.or_, words), nothing)
        with e.builder.if_then(some, likely=False):
            rows = frame.operand(self.arguments, name, self.batch, self.head)
            where = self.first_row, e.sub(e.add(self.first_row, self.rows), 1)
            held = self.areas(f"{short}_non_finite", left, sums)
            self.call(f"add_non_finite_rows {frame.dtypes[name]}", *rows, *where, *held, dim, count)

    def end(self) -> None:
        """Write the task's part of dQ."""
        self.for_each_block(lambda block: super().end())
