"""The replay of scores for problems whose forward pass multiplied split operands.

It answers the same questions about each row as `replay.kernel`, from scores whose bits are those of
the forward pass. As there, one task is several blocks of queries, so that a block of keys is split
once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, POINTER, Value
from qkv.backends.cpu.emit.frame import rows_from
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes
from qkv.backends.cpu.forward.layout import RUN, TASK
from qkv.backends.cpu.products import matrix_unit, tile_instructions
from qkv.backends.cpu.products.bfloat16 import emit_round_to_chunks
from qkv.backends.cpu.replay.kernel import SumsReduction, TopReduction
from qkv.backends.cpu.replay.layout import ReplayKey
from qkv.backends.cpu.replay.reduction import Areas, QueryBlock, Reduction, replay_frame
from qkv.backends.cpu.split_bf16.layout import FLOAT_BYTES, NON_FINITE_BYTES, REPLAY_BLOCK_KV
from qkv.backends.cpu.split_bf16.scores import SplitScores
from qkv.problem.language.expressions import TRUE
from qkv.problem.tiles import TileKind


def emit_split_replay(key: ReplayKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    frame = replay_frame(key, REPLAY_BLOCK_KV)
    reduction = (TopReduction if key.question == "top" else SumsReduction)(frame)
    scores = SplitScores(frame, (frame.dtypes["query"], frame.dtypes["key"]))
    e, split, masked = frame.e, scores.split, frame.mask != TRUE
    functions = dict(scores.functions)
    functions["scores"] = matrix_unit.add_products(
        e, "scores", split.vectors, onto=False, products=split.products()
    )
    functions["full"] = reduction.keys_function("full", False)
    functions["write"] = reduction.write_function()
    if masked:
        functions["partial"] = reduction.keys_function("partial", True)
    frame.call_for_each_task(_task_function(reduction, scores, functions), TASK)
    return str(e.module)


def _task_function(
    reduction: Reduction, split_scores: SplitScores, functions: dict[str, Value]
) -> Value:
    """A function `(arguments, task, scratch)`: some blocks of queries with blocks of keys."""
    frame, e, split = reduction.frame, reduction.e, split_scores.split
    vectors, width, block_q = split.vectors, split.width, frame.shape.block_q
    with e.function("task", [POINTER] * 3) as (function, args):
        arguments, task, scratch = args
        b = e.builder
        tile_instructions.configure(e)
        batch, head, first_row, first_run, last_run = frame.record(task, TASK)
        group_size, q_len, head_dim, q_blocks_per_task = frame.words(
            arguments, "group_size", "q_len", "head_dim", "q_blocks_per_task"
        )
        query = frame.operand(arguments, "query", batch, head)
        key = frame.operand(arguments, "key", batch, b.sdiv(head, group_size))

        wide = emit_round_to_chunks(e, head_dim)
        scores = e.at(scratch, NON_FINITE_BYTES)
        keys = e.at(scores, REPLAY_BLOCK_KV * width)
        copy = e.at(keys, e.mul(wide, 2 * split.terms * REPLAY_BLOCK_KV))
        transposed = e.at(copy, e.mul(wide, FLOAT_BYTES * REPLAY_BLOCK_KV))
        blocks = e.at(transposed, transposed_bytes(frame.spec, REPLAY_BLOCK_KV, e.vector_bytes))
        lanes_at = e.mul(wide, split.terms * width // 2)
        state_at = e.add(lanes_at, width)
        block_bytes = e.add(state_at, reduction.state_bytes(arguments, width))
        left = e.add(e.sub(q_len, first_row), block_q - 1)
        count = e.least(q_blocks_per_task, b.sdiv(left, e.index(block_q)))

        def block_at(i: Value) -> QueryBlock:
            packed = e.at(blocks, e.mul(i, block_bytes))
            row = e.add(first_row, e.mul(i, block_q))
            areas = Areas(packed, scores, e.at(packed, state_at), copy, transposed, blocks)
            return QueryBlock(arguments, batch, head, row, e.index(0), vectors, areas)

        def for_each_block(body: Callable[[QueryBlock], None]) -> None:
            e.loop(0, count, 1, [], lambda i, _: body(block_at(i)))

        def begin_block(block: QueryBlock) -> None:
            for j in range(vectors):
                row = e.least(e.add(block.first_row, j * e.lanes), e.sub(q_len, 1))
                offset = j * e.vector_bytes
                packed = e.at(block.areas.packed, offset)
                lanes = b.call(functions["pack"], [arguments, query.pointer, packed, copy, row])
                e.store(lanes, e.at(block.areas.packed, lanes_at, offset), WORD)
            reduction.begin(block)

        def reduce_keys(name: str, block: QueryBlock, kv_start: Value, number: Value) -> None:
            for j in range(vectors):
                place = e.at(scores, j * e.vector_bytes)
                first = e.add(block.first_row, j * e.lanes)
                at = (arguments, place, reduction.state(block, j), transposed, e.index(width))
                where = (number, batch, head, first, kv_start, ir.Constant(BIT, 0))
                b.call(functions[name], [*at, *where])

        def reduce_key_block(kv_start: Value, number: Value, kinds: Value) -> None:
            here = rows_from(e, key, kv_start)
            split_scores.split_keys(here, number, head_dim, copy, keys, scratch)
            band, pairs = split.band_bytes(head_dim), b.ashr(wide, e.index(1))

            def reduce_query_block(i: Value, _: list[Value]) -> None:
                block = block_at(i)
                kind = b.and_(b.lshr(kinds, e.mul(i, 2)), e.index(3))

                def compute_scores() -> None:
                    packed = block.areas.packed
                    b.call(functions["scores"], [keys, packed, scores, band, number, pairs])
                    where = (block.first_row, (e.index(0), number), scratch)
                    lanes = e.at(packed, lanes_at)
                    split_scores.recompute(arguments, here, query, *where, lanes, scores)

                with b.if_then(b.icmp_signed("!=", kind, e.index(TileKind.EMPTY))):
                    compute_scores()
                    if frame.mask == TRUE:
                        reduce_keys("full", block, kv_start, number)
                    else:
                        e.choose(
                            b.icmp_signed("==", kind, e.index(TileKind.PARTIAL)),
                            lambda: reduce_keys("partial", block, kv_start, number),
                            lambda: reduce_keys("full", block, kv_start, number),
                        )

            e.loop(0, count, 1, [], reduce_query_block)

        def reduce_run(r: Value, _: list[Value]) -> None:
            start, stop, kinds = frame.record(frame.pointer_field(arguments, "runs"), RUN, r)
            e.loop(
                start, stop, REPLAY_BLOCK_KV, [],
                lambda k, _: reduce_key_block(k, e.least(REPLAY_BLOCK_KV, e.sub(stop, k)), kinds),
            )  # fmt: skip

        for_each_block(begin_block)
        e.loop(first_run, last_run, 1, [], reduce_run)
        for_each_block(lambda block: reduction.end(block, functions["write"]))
        tile_instructions.release(e)
    return function
