"""A task of the forward kernel: neighbouring blocks of queries of one head, which share keys.

All of them attend to one block of keys before any goes on to the next one. So K and V come from the
nearest caches for all but the first, and where they must be copied to be multiplied, they are
copied once. Each block of queries has runs of keys of its own: its sums do not depend on its
neighbours.
"""

from __future__ import annotations

from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import BLOCK_KV, TASK
from qkv.backends.cpu.forward.query_block import NO_KEY, QueryBlockFunctions, areas_of


def task_function(
    frame: ForwardFrame, one_vector: QueryBlockFunctions, all_vectors: QueryBlockFunctions
) -> Value:
    """A function `(arguments, number, scratch)`: the blocks of queries of a task, by number."""
    e = frame.e
    with e.function("attend", [POINTER, INT64, POINTER]) as (function, args):
        arguments, number, scratch = args
        b = e.builder
        rows, q_blocks, per_task = frame.words(arguments, "rows", "q_blocks", "q_blocks_per_task")
        tasks = frame.pointer_field(arguments, "tasks")
        # No copies of keys are held yet: those in scratch may be of another head.
        for i in range(2):
            e.store(e.index(0), e.at(scratch, i * WORD), WORD)

        begin, advance, end = zip(one_vector, all_vectors, strict=True)

        def call(step: tuple[Value, Value], first: Value, i: Value, *rest: Value) -> None:
            first_row = frame.record(frame.record_at(first, i, TASK), TASK)[TASK.index("first_row")]
            where = [arguments, first, scratch, i, *rest]
            frame.call_for_rows(e.sub(rows, first_row), *step, where)

        def attend_alone() -> None:
            first, i = frame.record_at(tasks, number, TASK), e.index(0)
            call(begin, first, i)
            call(advance, first, i, e.index(NO_KEY))
            call(end, first, i)

        def attend_together() -> None:
            per_head = b.sdiv(e.add(q_blocks, e.sub(per_task, 1)), per_task)
            head, own = b.sdiv(number, per_head), e.mul(b.srem(number, per_head), per_task)
            first = frame.record_at(tasks, e.add(e.mul(head, q_blocks), own), TASK)
            count = e.least(per_task, e.sub(q_blocks, own))

            def for_each_block(step: tuple[Value, Value], *rest: Value) -> None:
                e.loop(0, count, 1, [], lambda i, _: call(step, first, i, *rest))

            def next_block_of_keys() -> tuple[Value, Value]:
                """Where the keys after the next block begin, and whether there is a next block."""

                def next_key(i: Value, lowest: list[Value]) -> list[Value]:
                    place = areas_of(frame, arguments, scratch, i).next_key
                    return [e.least(lowest[0], e.load(place, INT64, WORD))]

                (key,) = e.loop(0, count, 1, [e.index(NO_KEY)], next_key)
                after = e.add(e.round_down(key, BLOCK_KV), BLOCK_KV)
                return after, e.below(key, NO_KEY)

            for_each_block(begin)
            e.take_while(next_block_of_keys, lambda stop: for_each_block(advance, stop))
            for_each_block(end)

        e.choose(e.below(1, per_task), attend_together, attend_alone)
    return function
