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

import math
from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.bf16_pairs.layout import BLOCK_KV
from qkv.backends.cpu.bf16_pairs.operands import V_ROW, Bf16Operands
from qkv.backends.cpu.bf16_pairs.score_blocks import (
    BLOCK_RUN,
    KeyBlock,
    QueryBlockMemory,
    QueryBlocks,
    ScoreBlocks,
)
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import STATS, STATS_SUMS, TASK, ForwardKey, StatsRow
from qkv.backends.cpu.forward.rows import unpack_function
from qkv.backends.cpu.forward.softmax import finish_scores, scores_to_weights
from qkv.backends.cpu.products.bfloat16 import emit_round_to_chunks
from qkv.backends.cpu.products.query_lanes import store_vectors, vectors_at
from qkv.problem.language.expressions import TRUE


def emit_bf16_pairs(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    frame = ForwardFrame(key, block_kv=BLOCK_KV)
    operands = Bf16Operands(frame)
    product_function = operands.rows.packed.product_function
    functions = {
        **operands.row_functions(),
        "scores": product_function("scores", onto=False),
        "unpack": unpack_function(frame),
        "add_values": add_values_function(operands, product_function("products", onto=True)),
    }
    masked = frame.mask != TRUE
    if frame.plain:
        functions["block_max"] = block_max_function(operands)
        functions["weights_plain"] = weights_function(operands, "weights_plain", finished=False)
    else:
        functions["finish_full"] = finish_function(frame, "finish_full", masked=False)
    if masked:
        functions["finish_partial"] = finish_function(frame, "finish_partial", masked=True)
    if masked or not frame.plain:
        functions["weights_finished"] = weights_function(
            operands, "weights_finished", finished=True
        )
    frame.call_for_each_task(attend_function(operands, functions), TASK)
    return str(frame.e.module)


def block_max_function(operands: Bf16Operands) -> Value:
    """A function `(scores, block_max, count)`: the largest score of each query."""
    e, at_once = operands.e, 4
    with e.function("block_max", [POINTER, POINTER, INT64]) as (function, args):
        scores, largest, count = args

        def compare_keys(k: Value, seen: list[Value]) -> list[Value]:
            # Beyond the last key, the last key is read again.
            rows = [e.least(e.add(k, i), e.sub(count, 1)) for i in range(at_once)]
            vectors = [v for row in rows for v in vectors_at(e, scores, operands.vectors, row)]
            return list(map(e.greatest, seen, vectors))

        lowest = [e.const(-math.inf)] * (at_once * operands.vectors)
        seen = e.loop(0, count, at_once, lowest, compare_keys)
        for i in range(operands.vectors, len(seen)):
            seen[i % operands.vectors] = e.greatest(seen[i % operands.vectors], seen[i])
        store_vectors(e, largest, seen[: operands.vectors])
    return function


def finish_function(frame: ForwardFrame, name: str, *, masked: bool) -> Value:
    """A function of `ScoreVector`: S is finished, and each query's largest score is stored."""
    e = frame.e
    with frame.vector_function(name) as (function, at):
        places = frame.places_at(at)
        scale = e.splat(frame.real_field(at.arguments, "scale"))
        largest = finish_scores(frame, at, places, scale, masked)
        e.store_vector(largest, e.at(at.stats, e.mul(at.width, StatsRow.BLOCK_MAX)))
    return function


def weights_function(operands: Bf16Operands, name: str, *, finished: bool) -> Value:
    """A function of `ScoreVector`: S becomes P; row maximum and row sum are updated."""
    frame, e = operands.frame, operands.e
    with frame.vector_function(name) as (function, at):
        places = frame.places_at(at)
        largest = e.load_vector(e.at(at.stats, e.mul(at.width, StatsRow.BLOCK_MAX)))
        scores_to_weights(frame, at, places, largest, operands.store_weights, finished=finished)
    return function


def add_values_function(operands: Bf16Operands, add: Value) -> Value:
    """A function `(values, weights, rescale, out, v_head_dim, count)`: O = rescale * O + V^T P."""
    e = operands.e
    with e.function("add_values", [*[POINTER] * 4, INT64, INT64]) as (function, args):
        values, weights, rescale, out, v_head_dim, count = args
        b = e.builder
        pairs = e.add(b.ashr(e.sub(count, 1), e.index(1)), 1)
        operands.finish_pairs(weights, pairs, b.ashr(emit_round_to_chunks(e, count), e.index(1)))
        factors = vectors_at(e, rescale, operands.vectors)
        any_rescaled = ir.Constant(BIT, 0)
        for factor in factors:
            changes = b.fcmp_unordered("!=", factor, e.const(1.0))
            any_rescaled = b.or_(any_rescaled, e.any_lane(changes))

        def rescale_row(d: Value, _: list[Value]) -> None:
            place = e.at(out, e.mul(d, operands.width))
            held = vectors_at(e, place, operands.vectors)
            store_vectors(e, place, list(map(b.fmul, held, factors)))

        e.loop(0, b.select(any_rescaled, v_head_dim, e.index(0)), 1, [], rescale_row)
        b.call(add, [values, weights, out, e.index(V_ROW), v_head_dim, pairs])
    return function


def attend_function(operands: Bf16Operands, functions: dict[str, Value]) -> Value:
    """A function `(arguments, task, scratch)`: some blocks of queries over their runs of keys."""
    frame, e = operands.frame, operands.e
    vectors, width, block_q = operands.vectors, operands.width, frame.shape.block_q
    with e.function("attend", [POINTER] * 3) as (function, args):
        arguments, task, scratch = args
        b = e.builder
        batch, head, first_row, first_run, last_run = frame.record(task, TASK)
        group_size, num_heads, q_len, head_dim, v_head_dim, q_blocks_per_task = frame.words(
            arguments, "group_size", "num_heads", "q_len", "head_dim", "v_head_dim",
            "q_blocks_per_task",
        )  # fmt: skip
        kv_head = b.sdiv(head, group_size)
        query = frame.operand(arguments, "query", batch, head)
        key = frame.operand(arguments, "key", batch, kv_head)
        value = frame.operand(arguments, "value", batch, kv_head)

        padded_head_dim, padded_v_head_dim = (
            emit_round_to_chunks(e, head_dim),
            emit_round_to_chunks(e, v_head_dim),
        )
        at = operands.buffers(scratch, padded_head_dim, padded_v_head_dim)
        total_at = e.mul(padded_head_dim, width // 2)
        stats_at = e.add(total_at, e.mul(padded_v_head_dim, width))
        block_bytes = e.add(stats_at, STATS * width)
        left = e.add(e.sub(q_len, first_row), block_q - 1)
        count = e.least(q_blocks_per_task, b.sdiv(left, e.index(block_q)))
        transposed = e.at(at.blocks, e.mul(q_blocks_per_task, block_bytes))

        def block_at(i: Value) -> QueryBlockMemory:
            packed = e.at(at.blocks, e.mul(i, block_bytes))
            row = e.add(first_row, e.mul(i, block_q))
            return QueryBlockMemory(packed, e.at(packed, total_at), e.at(packed, stats_at), row)

        def for_each_block(body: Callable[[QueryBlockMemory], None]) -> None:
            e.loop(0, count, 1, [], lambda i, _: body(block_at(i)))

        def for_each_vector(row: Value, body: Callable[[int, Value], None]) -> None:
            """`body(offset, row)` for each vector; one beyond the last row repeats that row."""
            for j in range(vectors):
                body(j * e.vector_bytes, e.least(e.add(row, j * e.lanes), e.sub(q_len, 1)))

        def begin_block(block: QueryBlockMemory) -> None:
            stats = block.stats

            def begin_vector(offset: int, row: Value) -> None:
                where = [query.pointer, e.at(block.packed, offset), at.key_copy, row]
                b.call(functions["pack"], [arguments, *where])
                e.store_vector(e.const(-math.inf), e.at(stats, offset))
                for row_of_sums in STATS_SUMS:
                    e.store_vector(e.const(0.0), e.at(stats, offset + row_of_sums * width))

            for_each_vector(block.row, begin_vector)
            e.clear(block.total, 0, e.mul(padded_v_head_dim, width))

        for_each_block(begin_block)
        blocks = QueryBlocks(
            functions, arguments, batch=batch, head=head, key=key, value=value, head_dim=head_dim,
            v_head_dim=v_head_dim, count=count, block=block_at, at=at, transposed=transposed,
        )  # fmt: skip
        score_blocks = ScoreBlocks(frame, blocks)

        def attend_to_keys(
            kv_start: Value, keys: Value, kinds: Value, first: Value, last: Value
        ) -> None:
            factor, row = operands.prepare_keys(blocks, kv_start, keys)
            values = operands.prepare_values(blocks, kv_start, keys, kinds)
            block = KeyBlock(kv_start, keys, kinds, first, last, factor, row)
            score_blocks.add_keys(block, values)

        runs, size = frame.pointer_field(arguments, "runs"), frame.block_kv

        def attend_to_run(r: Value, _: list[Value]) -> None:
            start, stop, *seen = frame.record(runs, BLOCK_RUN, r)
            e.loop(
                start, stop, size, [],
                lambda k, _: attend_to_keys(k, e.least(size, e.sub(stop, k)), *seen),
            )  # fmt: skip

        e.loop(first_run, last_run, 1, [], attend_to_run)
        place = e.mul(e.add(e.mul(batch, num_heads), head), q_len)

        def end_block(block: QueryBlockMemory) -> None:
            def end_vector(offset: int, row: Value) -> None:
                held = e.at(block.total, offset), e.at(block.stats, offset), e.add(place, row)
                last = e.sub(q_len, row)
                b.call(functions["unpack"], [arguments, *held, v_head_dim, e.index(width), last])

            for_each_vector(block.row, end_vector)

        for_each_block(end_block)
    return function
