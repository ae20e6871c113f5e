"""The tasks of a decoding step, written by the kernel itself.

Keys are split into *chunks* by absolute position, and each chunk of each kv head that may hold an
allowed pair is a task. `plan` bounds the mask over every chunk, then over the blocks of chunks that
are neither empty nor full, and writes one row of `TASK` for each chunk that remains. This takes a
few microseconds at most, because `plan` looks up only single elements of tables. A task bounds the
mask over each of its blocks once more, and then looks up many elements of a dense mask too.

    chunk = CHUNK * ceil(kv_len / (CHUNK * MOST_CHUNKS))
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.decode.layout import (
    BLOCK_KV,
    CHUNK,
    GROUP,
    MOST_CHUNKS,
    RECORD_ALIGNMENT,
    TASK,
)
from qkv.backends.cpu.emit.argument_block import COUNTER_BYTES, WORD
from qkv.backends.cpu.emit.emitter import DOUBLE, INT64, POINTER, Value
from qkv.backends.cpu.emit.expressions.mask_bounds import MaskBounds
from qkv.backends.cpu.emit.frame import Frame
from qkv.problem.language.expressions import FALSE, TRUE

MOST_READS = 1024
"""The most elements of a table that are read to bound the mask over one block."""

EMPTY, PARTIAL, FULL = range(3)
"""Kinds of a block: no pair in it is allowed, some are, or all are."""


class DecodeTasks:
    """Writes the functions that find out which keys a kernel reads."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.e = frame.e
        self._kind_of_block = self._kind_function()

    def block_kind(self, where: list[Value], start: Value, stop: Value, most_reads: int) -> Value:
        """EMPTY, PARTIAL or FULL, for the keys from `start` to `stop` and all queries of a kv head.

        `where` is the argument block, the batch row and the kv head.
        """
        e = self.e
        if self.frame.mask in (TRUE, FALSE):
            return e.index(FULL if self.frame.mask == TRUE else EMPTY)
        reads = ir.Constant(DOUBLE, float(most_reads))
        return e.builder.call(self._kind_of_block, [*where, start, stop, reads])

    def for_each_run(
        self,
        where: list[Value],
        start: Value,
        stop: Value,
        attend: Callable[[Value, Value, Value], object],
    ) -> None:
        """`attend(start, stop, kind)` for each run of neighbouring blocks of a kind, EMPTY too."""
        e, b = self.e, self.e.builder

        def extend_run(k: Value, run: list[Value]) -> list[Value]:
            begin, kind = run
            following = self.block_kind(where, k, e.least(e.add(k, BLOCK_KV), stop), MOST_READS)
            changed = b.icmp_signed("!=", kind, following)
            with b.if_then(changed):
                attend(begin, k, kind)
            return [b.select(changed, k, begin), following]

        last = e.loop(start, stop, BLOCK_KV, [start, e.index(EMPTY)], extend_run)
        attend(last[0], stop, last[1])

    def plan_function(self) -> Value:
        """`plan(arguments)` writes all tasks, and returns how many keys they have together."""
        e = self.e
        chunk_keys = self._chunk_keys_function()
        write_tasks, copy_tasks = (
            self._group_tasks_function(chunk_keys),
            self._copy_tasks_function(),
        )
        with e.function("plan", [POINTER], INT64, public=True) as (function, (arguments,)):
            b = e.builder
            batches, kv_heads, kv_len, shared = self.frame.words(
                arguments, "batch_size", "num_kv_heads", "kv_len", "shared"
            )
            chunk = self._chunk_size(kv_len)
            count = e.mul(batches, kv_heads)
            chunks = b.sdiv(e.add(kv_len, e.sub(chunk, 1)), chunk)
            tasks = e.add(shared, e.mul(count, WORD * len(GROUP)))
            records = e.add(tasks, e.mul(count, chunks, WORD * len(TASK)), RECORD_ALIGNMENT - 1)
            self._write_field(arguments, "groups", shared)
            self._write_field(arguments, "tasks", tasks)
            self._write_field(arguments, "records", e.round_down(records, RECORD_ALIGNMENT))
            mask_variables = self.frame.mask.variables

            def plan_group(number: Value, carried: list[Value]) -> list[Value]:
                first, keys = carried
                # `source` is the first group with the same mask, whose tasks are copied.
                batch, kv_head = b.sdiv(number, kv_heads), b.srem(number, kv_heads)
                source = e.add(
                    e.mul(batch, kv_heads) if "batch" in mask_variables else 0,
                    kv_head if "head" in mask_variables else 0,
                )
                row = self._group_address(arguments, number)
                words = [e.index(0), first]
                for i, word in enumerate(words):
                    e.store(word, e.at(row, WORD * i), WORD)
                e.choose(
                    b.icmp_signed("==", source, number),
                    lambda: b.call(write_tasks, [arguments, batch, kv_head, chunk, number]),
                    lambda: b.call(copy_tasks, [arguments, source, number]),
                )
                own_tasks, own_keys = (e.load(e.at(row, WORD * i), INT64, WORD) for i in (2, 3))
                return [e.add(first, own_tasks), e.add(keys, own_keys)]

            tasks_in_all, keys = e.loop(0, count, 1, [e.index(0), e.index(0)], plan_group)
            self._write_field(arguments, "limit", tasks_in_all)
            e.store(e.index(0), arguments, WORD)
            b.ret(keys)
        return function

    def emit_step(self, plan: Value, job: Value) -> None:
        """`step(arguments, most)` plans, and runs all tasks if they have at most `most` keys."""
        e = self.e
        kinds = [POINTER, INT64]
        with e.function("step", kinds, INT64, public=True) as (_, (arguments, most)):
            b = e.builder
            keys = b.call(plan, [arguments])
            with b.if_then(b.icmp_signed("<=", keys, most)):
                b.call(job, [arguments, e.index(0)])
            b.ret(keys)

    # Functions

    def _kind_function(self) -> Value:
        """A function `(arguments, batch, kv_head, start, stop, most_reads)` that gives a kind."""
        e, frame = self.e, self.frame
        kinds = [POINTER, *[INT64] * 4, DOUBLE]
        with e.function("kind", kinds, INT64) as (function, args):
            arguments, batch, kv_head, start, stop, most_reads = args
            b = e.builder
            group_size, q_len = frame.words(arguments, "group_size", "q_len")
            head = e.mul(kv_head, group_size)
            # Bounds over all query heads of the kv head: where their masks differ, it is partial.
            places = {
                "q_index": (e.index(0), e.sub(q_len, 1)),
                "kv_index": (start, e.sub(stop, 1)),
                "batch": (batch, batch),
                "head": (head, e.sub(e.add(head, group_size), 1)),
            }
            bounds = MaskBounds(e, frame.tables(arguments), places, most_reads)
            certain, possible = bounds.truth(frame.mask)
            some = b.select(possible, e.index(PARTIAL), e.index(EMPTY))
            b.ret(b.select(certain, e.index(FULL), some))
        return function

    def _chunk_keys_function(self) -> Value:
        """A function `(arguments, batch, kv_head, start, stop)` that gives 2 n + full.

        n is the number of keys in blocks that may hold an allowed pair; full is 1 if all pairs are
        allowed.
        """
        e = self.e
        with e.function("chunk_keys", [POINTER, *[INT64] * 4], INT64) as (function, args):
            *where, start, stop = args
            b = e.builder
            kind = self.block_kind(where, start, stop, 1)
            with b.if_then(b.icmp_signed("==", kind, e.index(FULL))):
                b.ret(e.add(e.mul(2, e.sub(stop, start)), 1))
            with b.if_then(b.icmp_signed("==", kind, e.index(EMPTY))):
                b.ret(e.index(0))

            def count_block(k: Value, keys: list[Value]) -> list[Value]:
                until = e.least(e.add(k, BLOCK_KV), stop)
                empty = b.icmp_signed("==", self.block_kind(where, k, until, 1), e.index(EMPTY))
                return [e.add(keys[0], b.select(empty, e.index(0), e.sub(until, k)))]

            (keys,) = e.loop(start, stop, BLOCK_KV, [e.index(0)], count_block)
            b.ret(e.mul(2, keys))
        return function

    def _group_tasks_function(self, chunk_keys: Value) -> Value:
        """A function `(arguments, batch, kv_head, chunk, number)` that writes a group's tasks."""
        e = self.e
        with e.function("classify", [POINTER, *[INT64] * 4]) as (function, args):
            arguments, batch, kv_head, chunk, number = args
            b = e.builder
            kv_len = self.frame.field(arguments, "kv_len")
            group = self._group_address(arguments, number)
            first = e.load(e.at(group, WORD), INT64, WORD)

            def plan_chunk(start: Value, carried: list[Value]) -> list[Value]:
                count, keys = carried
                stop = e.least(e.add(start, chunk), kv_len)
                keys_and_full = b.call(chunk_keys, [arguments, batch, kv_head, start, stop])
                own_keys = b.ashr(keys_and_full, e.index(1))
                full = b.and_(keys_and_full, e.index(1))
                # If no pair of the chunk is allowed, the next chunk overwrites this task.
                self._write_task(arguments, e.add(first, count), number, start, stop, full)
                is_task = b.zext(e.below(0, own_keys), INT64)
                return [e.add(count, is_task), e.add(keys, own_keys)]

            count, keys = e.loop(0, kv_len, chunk, [e.index(0), e.index(0)], plan_chunk)
            is_empty = b.icmp_signed("==", count, e.index(0))
            with b.if_then(is_empty):
                # A group without keys has one task, which writes the output of its rows.
                self._write_task(arguments, first, number, e.index(0), e.index(0), e.index(1))
            e.store(b.select(is_empty, e.index(1), count), e.at(group, 2 * WORD), WORD)
            e.store(keys, e.at(group, 3 * WORD), WORD)
        return function

    def _copy_tasks_function(self) -> Value:
        """A function `(arguments, source, number)` that copies the tasks of an earlier group."""
        e = self.e
        with e.function("repeat", [POINTER, INT64, INT64]) as (function, args):
            arguments, source, number = args
            group, other = (
                self._group_address(arguments, number),
                self._group_address(arguments, source),
            )
            _, first, count, keys = self.frame.record(other, GROUP)
            own_first = e.load(e.at(group, WORD), INT64, WORD)

            def copy_task(i: Value, _: list[Value]) -> None:
                _, start, stop, full = self.frame.record(
                    self._task_address(arguments, e.add(first, i)), TASK
                )
                self._write_task(arguments, e.add(own_first, i), number, start, stop, full)

            e.loop(0, count, 1, [], copy_task)
            e.store(count, e.at(group, 2 * WORD), WORD)
            e.store(keys, e.at(group, 3 * WORD), WORD)
        return function

    # Tables

    def _chunk_size(self, kv_len: Value) -> Value:
        e, most = self.e, CHUNK * MOST_CHUNKS
        times = e.builder.sdiv(e.add(kv_len, most - 1), e.index(most))
        return e.mul(CHUNK, e.larger_of(1, times))

    def _group_address(self, arguments: Value, number: Value) -> Value:
        groups = self.frame.pointer_field(arguments, "groups")
        return self.frame.record_at(groups, number, GROUP)

    def _task_address(self, arguments: Value, number: Value) -> Value:
        tasks = self.frame.pointer_field(arguments, "tasks")
        return self.frame.record_at(tasks, number, TASK)

    def _write_task(self, arguments: Value, number: Value, *words: Value) -> None:
        task = self._task_address(arguments, number)
        for i, word in enumerate(words):
            self.e.store(word, self.e.at(task, WORD * i), WORD)

    def _write_field(self, arguments: Value, name: str, word: Value) -> None:
        at = COUNTER_BYTES + WORD * self.frame.fields.index(name)
        self.e.store(word, self.e.at(arguments, at), WORD)
