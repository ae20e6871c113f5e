"""What all replays have: the argument block, the scores of blocks of keys, and `Reduction`.

A replay is a `Reduction` of these scores; `replay.kernel` says which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.packing import copy_rows_function
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes
from qkv.backends.cpu.forward.frame import ForwardFrame, ScoreVector
from qkv.backends.cpu.forward.layout import BLOCK_KV, RUN, TASK, ForwardKey
from qkv.backends.cpu.forward.rows import pack_function, rows_of_block
from qkv.backends.cpu.products.query_lanes import SumOrder, dot_rows, store_vectors
from qkv.backends.cpu.replay.layout import FIELDS, RANGE, ReplayKey
from qkv.problem.language.expressions import TRUE


def replay_frame(key: ReplayKey, block_kv: int = BLOCK_KV) -> ForwardFrame:
    """The frame of a replay: that of a forward pass without output."""
    real = "float64" if key.spec.dtype == "float64" else "float32"
    forward_key = ForwardKey(
        key.spec, key.shape, key.int_bits, key.pack_gqa, key.rotated, real, statistics=False
    )
    return ForwardFrame(forward_key, fields=FIELDS, block_kv=block_kv, plain=False)


class Areas(NamedTuple):
    """Addresses in a worker's scratch memory, for one block of queries."""

    packed: Value
    scores: Value
    state: Value
    key_copy: Value
    transposed: Value
    totals: Value


class QueryBlock(NamedTuple):
    """A block of queries: its task, and its areas for `vectors` vectors."""

    arguments: Value
    batch: Value
    head: Value
    first_row: Value
    first_key: Value
    vectors: int
    areas: Areas


class Reduction:
    """How one question is answered from the scores of one block of keys after the other.

    A question about rows has a state, some rows of numbers for each vector of queries. It takes the
    place of the statistics of the forward pass.
    """

    def __init__(self, frame: ForwardFrame) -> None:
        self.frame, self.e = frame, frame.e

    def keys_function(self, name: str, masked: bool) -> Value:
        """A function of `ScoreVector`: one vector of queries with a block of keys."""
        raise NotImplementedError

    def state(self, block: QueryBlock, vector: int) -> Value:
        """The state of a vector of the block."""
        return self.e.at(block.areas.state, vector * self.e.vector_bytes)

    def state_bytes(self, arguments: Value, row: int) -> Value:
        """Bytes of the states of a block, where one number of each query takes `row` bytes."""
        return self.e.index(0)

    def begin(self, block: QueryBlock) -> None:
        """Emit what comes before the first keys of a block of queries."""

    def finish_key_block(self, block: QueryBlock, kv_start: Value, count: Value) -> None:
        """Emit what follows each block of keys, for all vectors of a block of queries."""

    def write_rows(self, arguments: Value, state: Value, width: Value, rows: list[Value]) -> None:
        """Store what a vector found, lane by lane.

        `rows` are the rows of the lanes, counted through all batch rows and heads.
        """

    def write_function(self) -> Value:
        """A function `(arguments, state, width, batch, head, first_row)`.

        Lanes beyond the last row hold the same as that row, and write it again.
        """
        e = self.e
        with e.function("write", [POINTER] * 2 + [INT64] * 4) as (function, args):
            arguments, state, width, batch, head, first_row = args
            num_heads, q_len, rows = self.frame.words(arguments, "num_heads", "q_len", "rows")
            start, last = e.mul(e.add(e.mul(batch, num_heads), head), q_len), e.sub(rows, 1)
            lanes = [e.add(start, e.least(e.add(first_row, i), last)) for i in range(e.lanes)]
            self.write_rows(arguments, state, width, lanes)
        return function

    def end(self, block: QueryBlock, write: Value) -> None:
        """Write the states of a block of queries after its last keys."""
        e = self.e
        width = e.index(block.vectors * e.vector_bytes)
        for j in range(block.vectors):
            first = e.add(block.first_row, j * e.lanes)
            where = (width, block.batch, block.head, first)
            e.builder.call(write, [block.arguments, self.state(block, j), *where])

    @contextmanager
    def range_context(self, arguments: Value, scratch: Value, keys: list[Value]) -> Iterator[None]:
        """A context for all that is computed with a range of keys, given as `RANGE`."""
        yield


def _scores_function(frame: ForwardFrame, vectors: int) -> Value:
    """S[k, :] = K[k, :] . packed Q."""
    e = frame.e
    with e.function(f"scores_{vectors}", [POINTER] * 3 + [INT64] * 3) as (function, args):
        key, packed, out, key_row, head_dim, count = args

        def store_key(k: Value, products: list[Value], _: list[Value]) -> list[Value]:
            store_vectors(e, e.at(out, e.mul(k, vectors * e.vector_bytes)), products)
            return []

        dot_rows(
            e, key, key_row, count, packed, vectors, head_dim, frame.shape.keys, [], store_key,
            SumOrder(wide=frame.shape.wide),
        )  # fmt: skip
    return function


def areas_of(reduction: Reduction, arguments: Value, scratch: Value) -> Areas:
    frame, e = reduction.frame, reduction.e
    head_dim = frame.field(arguments, "head_dim")
    row = frame.shape.block_q * e.real_bytes
    scores = e.at(scratch, e.mul(head_dim, row))
    state = e.at(scores, BLOCK_KV * row)
    key_copy = e.at(state, reduction.state_bytes(arguments, row))
    transposed = e.at(key_copy, e.mul(head_dim, BLOCK_KV * e.real_bytes))
    totals = e.at(transposed, transposed_bytes(frame.spec, BLOCK_KV, e.vector_bytes))
    return Areas(scratch, scores, state, key_copy, transposed, totals)


def query_block_function(reduction: Reduction, vectors: int, functions: dict[str, Value]) -> Value:
    """A function for one block of queries and its keys from `first_key` to `last_key`."""
    frame, e = reduction.frame, reduction.e
    scores = _scores_function(frame, vectors)
    with e.function(f"query_block_{vectors}", [POINTER] * 3 + [INT64] * 2) as (function, args):
        arguments, task, scratch, first_key, last_key = args
        b = e.builder
        batch, head, first_row, first_run, last_run = frame.record(task, TASK)
        areas = areas_of(reduction, arguments, scratch)
        block = QueryBlock(arguments, batch, head, first_row, first_key, vectors, areas)
        width = e.index(vectors * e.vector_bytes)
        head_dim = frame.field(arguments, "head_dim")
        query = frame.operand(arguments, "query", batch, head)
        kv_head = b.sdiv(head, frame.field(arguments, "group_size"))
        key = frame.operand(arguments, "key", batch, kv_head)
        runs = frame.pointer_field(arguments, "runs")

        def run_in_range(r: Value) -> tuple[Value, Value, Value]:
            start, stop, kind = frame.record(runs, RUN, r)
            return e.larger_of(start, first_key), e.least(stop, last_key), kind

        def pack_queries() -> None:
            for j in range(vectors):
                to = e.at(areas.packed, j * e.vector_bytes)
                first = e.add(first_row, j * e.lanes)
                b.call(functions["pack"], [arguments, query.pointer, to, first, width])

        def reduce_keys(name: str, kv_start: Value, keys: Value) -> None:
            for j in range(vectors):
                scores_at = e.at(areas.scores, j * e.vector_bytes)
                first = e.add(first_row, j * e.lanes)
                b.call(
                    functions[name],
                    ScoreVector(
                        arguments, scores_at, reduction.state(block, j), areas.transposed, width,
                        count=keys, batch=batch, head=head, first_row=first, kv_start=kv_start,
                        marked=ir.Constant(BIT, 0),
                    ),
                )  # fmt: skip

        def reduce_key_block(kv_start: Value, keys: Value, partial: Value) -> None:
            k, key_row = rows_of_block(
                frame, arguments, "key", key, kv_start, keys, head_dim, areas.key_copy, functions
            )
            b.call(scores, [k, areas.packed, areas.scores, key_row, head_dim, keys])
            if frame.mask == TRUE:
                reduce_keys("full", kv_start, keys)
            else:
                e.choose(
                    partial,
                    lambda: reduce_keys("partial", kv_start, keys),
                    lambda: reduce_keys("full", kv_start, keys),
                )
            reduction.finish_key_block(block, kv_start, keys)

        def reduce_run(r: Value, _: list[Value]) -> None:
            start, stop, kind = run_in_range(r)
            partial = b.icmp_signed("!=", kind, e.index(0))
            e.loop(
                start, stop, BLOCK_KV, [],
                lambda k, _: reduce_key_block(k, e.least(BLOCK_KV, e.sub(stop, k)), partial),
            )  # fmt: skip

        def count_run(r: Value, count: list[Value]) -> list[Value]:
            start, stop, _ = run_in_range(r)
            return [e.add(count[0], e.larger_of(e.sub(stop, start), 0))]

        (count,) = e.loop(first_run, last_run, 1, [e.index(0)], count_run)
        reduction.begin(block)
        with b.if_then(e.below(0, count)):
            pack_queries()
            e.loop(first_run, last_run, 1, [], reduce_run)
        if "write" in functions:
            reduction.end(block, functions["write"])
    return function


def query_block_call(reduction: Reduction, functions: dict[str, Value]) -> Callable[..., None]:
    """Emits one call of `query_block_function`, for one vector of queries or for many."""
    frame, e = reduction.frame, reduction.e
    one, many = (query_block_function(reduction, v, functions) for v in (1, frame.shape.vectors))

    def call_query_block(arguments: Value, task: Value, *rest: Value) -> None:
        first_row = frame.record(task, TASK)[TASK.index("first_row")]
        left = e.sub(frame.field(arguments, "rows"), first_row)
        frame.call_for_rows(left, one, many, [arguments, task, *rest])

    return call_query_block


def vector_functions(reduction: Reduction) -> dict[str, Value]:
    """The functions of one vector of queries."""
    frame = reduction.frame
    functions = {"pack": pack_function(frame), "full": reduction.keys_function("full", False)}
    functions[f"copy {frame.dtypes['key']}"] = copy_rows_function(frame.e, frame.dtypes["key"])
    if frame.mask != TRUE:
        functions["partial"] = reduction.keys_function("partial", True)
    return functions


def emit_row_tasks(reduction: Reduction) -> None:
    """The `job` of a question about rows: a task is a block of queries."""
    frame, e = reduction.frame, reduction.e
    functions = vector_functions(reduction)
    call = query_block_call(reduction, {**functions, "write": reduction.write_function()})

    def run_task(arguments: Value, number: Value, scratch: Value) -> None:
        task = frame.record_at(frame.pointer_field(arguments, "tasks"), number, TASK)
        call(arguments, task, scratch, e.index(0), frame.field(arguments, "kv_len"))

    frame.emit_job(run_task)


def emit_range_tasks(reduction: Reduction) -> None:
    """The `job` of a question about keys: a task is a range of keys, or of blocks of queries."""
    frame, e = reduction.frame, reduction.e
    call = query_block_call(reduction, vector_functions(reduction))

    def run_task(arguments: Value, number: Value, scratch: Value) -> None:
        tasks = frame.pointer_field(arguments, "tasks")
        keys = frame.record(tasks, RANGE, number)
        _, _, first_key, last_key, first_block, last_block = keys
        with reduction.range_context(arguments, scratch, keys):
            blocks = frame.pointer_field(arguments, "blocks")

            def call_for_block(n: Value, _: list[Value]) -> None:
                block = frame.record_at(blocks, n, TASK)
                call(arguments, block, scratch, first_key, last_key)

            e.loop(first_block, last_block, 1, [], call_for_block)

    frame.emit_job(run_task)
