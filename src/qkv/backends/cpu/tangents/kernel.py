"""The kernel of second derivatives: each line of attention and its backward pass, and its tangent.

The formulas are those of `qkv.problem.second_derivatives`, transposed as in the other kernels:
queries are the lanes of vectors, and numbers of pairs lie key by key. One task is some blocks of
queries of the heads that read one kv head. Each block of queries goes through its keys twice:

- first for the sums over its rows, in float64, from the largest score so far,
- then for the tangents of output and dQ, which it keeps, and for those of dK and dV, which it adds
  to the sums of its task.

Scores and dP of the first blocks of keys are kept between the two, `kept_blocks`. Operands are
of the type of computation. As in the backward kernel, a forbidden pair is marked by its
weight, and where rows are not finite a slower path leaves it out of the sums.
"""

from __future__ import annotations

from qkv.backends.cpu.backward.block_of_queries import BlockCall
from qkv.backends.cpu.emit.emitter import POINTER, Value
from qkv.backends.cpu.forward.layout import TASK as BLOCK
from qkv.backends.cpu.tangents.block import drop_function, gradients_function, scores_function
from qkv.backends.cpu.tangents.frame import TangentFrame
from qkv.backends.cpu.tangents.layout import TASK, TangentKey
from qkv.backends.cpu.tangents.query_block import QueryBlockPass
from qkv.backends.cpu.tangents.rows import (
    add_rows_function,
    begin_rows_function,
    end_rows_function,
)
from qkv.backends.cpu.tangents.shared import declare_shared
from qkv.problem.language.expressions import TRUE


def emit_tangents(key: TangentKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left.

    It is linked with those of `shared`.
    """
    frame = TangentFrame(key)
    functions = declare_shared(frame)
    if not frame.plain:
        functions["full"] = scores_function(frame, "full", False)
    if frame.mask != TRUE:
        functions["partial"] = scores_function(frame, "partial", True)
    if frame.backward and frame.spec.dropout:
        functions["drop"] = drop_function(frame)
    functions["begin_rows"] = begin_rows_function(frame)
    functions["add_rows"] = add_rows_function(frame)
    functions["end_rows"] = end_rows_function(frame)
    functions["gradients"] = gradients_function(frame)
    blocks = [_query_block_function(frame, size, functions) for size in frame.shape.block_sizes]
    tables = tuple([table.name for table in frame.wanted_tables])
    frame.call_for_each_task(_task_function(frame, blocks[0], blocks[-1]), (*TASK, *tables))
    return str(frame.e.module)


def _query_block_function(frame: TangentFrame, vectors: int, functions: dict[str, Value]) -> Value:
    """A function `(arguments, task, block, scratch)` for blocks of `vectors` vectors of queries."""
    with frame.e.function(f"query_block_{vectors}", [POINTER] * 4) as (function, args):
        QueryBlockPass(frame, vectors, functions, BlockCall(*args)).emit()
    return function


def _task_function(frame: TangentFrame, one: Value, many: Value) -> Value:
    """A function `(arguments, task, scratch)`: some blocks of queries of each head of a group."""
    e = frame.e
    with e.function("blocks_of_queries", [POINTER] * 3) as (function, args):
        arguments, task, scratch = args
        batch, kv_head, first, last, _, is_first = frame.record(task, TASK)
        group_size, num_heads, q_len, q_blocks = frame.words(
            arguments, "group_size", "num_heads", "q_len", "q_blocks"
        )
        blocks = frame.pointer_field(arguments, "blocks")
        if frame.backward:
            with e.builder.if_then(e.builder.icmp_signed("!=", is_first, e.index(0))):
                _clear_sums(frame, arguments, task)
        head_row = e.add(e.mul(batch, num_heads), e.mul(kv_head, group_size))

        def call_for_head(h: Value, _: list[Value]) -> None:
            start = e.mul(h, q_blocks)

            def call_for_block(n: Value, _: list[Value]) -> None:
                block = frame.record_at(blocks, n, BLOCK)
                first_row = frame.record(block, BLOCK)[2]
                held = [arguments, task, block, scratch]
                frame.call_for_rows(e.sub(q_len, first_row), one, many, held)

            e.loop(e.add(start, first), e.add(start, last), 1, [], call_for_block)

        e.loop(head_row, e.add(head_row, group_size), 1, [], call_for_head)
    return function


def _clear_sums(frame: TangentFrame, arguments: Value, task: Value) -> None:
    """Write 0 to the sums of dK and dV that belong to a task."""
    e = frame.e
    batch, kv_head, _, _, split, _ = frame.record(task, TASK)
    group_size, num_heads, kv_len = frame.words(arguments, "group_size", "num_heads", "kv_len")
    kv_heads = e.builder.sdiv(num_heads, group_size)
    first = e.mul(e.add(e.mul(batch, kv_heads), kv_head), kv_len)
    for of in ("key", "value"):
        row, part = frame.words(arguments, f"{of}_sum_row", f"{of}_part")
        start = e.at(frame.pointer_field(arguments, f"{of}_sums"), e.mul(split, part))
        e.clear(e.at(start, e.mul(first, row)), 0, e.mul(kv_len, row))
