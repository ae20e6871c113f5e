"""The decode kernel: few query rows against many keys, lanes along head_dim.

The query rows of all heads that share a kv head are the `rows` of one matrix Q, so that K and V are
read once. Keys are split into chunks, one task each, whatever the number of threads. A task goes
through its chunk stretch by stretch, and through many rows panel by panel:

    S[i, k] = score(scale * Q[i, :] . K[k, :])            -inf where the mask forbids the pair
    m'[i]   = max(m[i], max_k S[i, k])
    P[i, k] = exp(S[i, k] - m'[i])
    l[i]    = exp(m[i] - m'[i]) * l[i] + sum_k P[i, k]
    O[i, :] = exp(m[i] - m'[i]) * O[i, :] + sum_k P[i, k] * V[k, :]

where each sum over k adds up one sum for every block, and leaves (O, m, l) in a record. A counter
of each kv head shows which task is its last to finish. That task merges the records of all chunks
of the kv head, in the order of their keys:

    m = max_c m_c,   l = sum_c exp(m_c - m) l_c,   out = sum_c exp(m_c - m) O_c / l

so that results do not depend on which task finishes first. K and V of any type are widened as they
are loaded, but for K and Q of bfloat16 where a machine multiplies pairs. The scale of a quantised
key multiplies its scores, that of a value its weights. A *segment* is rows of K or V with one
stride: those of a block that lie in one page, or all of them.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"Flash-Decoding for long-context inference" (2023); Kwon et al., "PagedAttention" (2023).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from llvmlite import ir

from qkv.backends.cpu.decode.layout import (
    BLOCK_KV,
    GROUP,
    RECORD_ALIGNMENT,
    STRETCH_KV,
    TASK,
    TILE_BLOCK_KV,
    DecodeKey,
)
from qkv.backends.cpu.decode.shared import SharedFunctions
from qkv.backends.cpu.decode.softmax import RowSoftmax
from qkv.backends.cpu.decode.tasks import EMPTY, FULL, PARTIAL, DecodeTasks
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.products.tile_instructions import configure, release
from qkv.problem.language.expressions import TRUE

_SHARES = 2
"""A thread takes 1 / (_SHARES * threads) of the tasks that are left at once, one at least. As they
are neighbours, it has prefetched the first rows of its next task itself."""


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A worker's memory: matrices of one panel, scales of one stretch, Q, a block moved, tiles."""

    weights: Value
    block: Value
    rescale: Value
    key_scales: Value
    value_scales: Value
    packed: Value
    moved: Value
    tiles: Value


def emit_decode(key: DecodeKey) -> str:
    """The module of one kernel.

    `plan(arguments)` writes the tasks and says how many keys they have, `job(arguments, worker)`
    runs tasks until none is left, and `step(arguments, most)` does both for at most so many keys.
    It is linked with the modules of `shared`.
    """
    kernel = _Decode(key)
    kernel.emit_functions()
    return str(kernel.e.module)


class _Decode:
    """Writes the functions of one kernel."""

    def __init__(self, key: DecodeKey) -> None:
        shared = SharedFunctions(key)
        self.frame, self.e, self.functions = shared.frame, shared.e, shared.declared()
        self.score_row, self.query_bytes = shared.score_row, shared.products.query_bytes
        self.blocks, self.tiles = shared.blocks, shared.tiles
        self.softmax = RowSoftmax(self.frame, key)

    # --- One chunk, and the merge of all of them -------------------------------------------------

    def scratch_areas(self, arguments: Value, scratch: Value) -> _Scratch:
        """The areas of scratch memory, in the order of `scratch_bytes`."""
        e = self.e
        rows, panel, head_dim, v_head_dim = self.frame.words(
            arguments, "rows", "panel", "head_dim", "v_head_dim"
        )
        block = e.at(scratch, e.mul(panel, self.score_row))
        rescale = e.at(block, e.mul(panel, self.frame.block_row_bytes(v_head_dim)))
        key_scales = e.at(rescale, e.mul(panel, e.vector_bytes))
        value_scales = e.at(key_scales, STRETCH_KV * e.real_bytes)
        packed = e.at(value_scales, STRETCH_KV * e.real_bytes)
        moved = e.at(packed, e.mul(rows, head_dim, e.real_bytes))
        size = e.mul(e.larger_of(head_dim, v_head_dim), BLOCK_KV * e.real_bytes)
        end = e.add(e.builder.ptrtoint(e.at(moved, size), INT64), RECORD_ALIGNMENT - 1)
        tiles = e.pointer(e.round_down(end, RECORD_ALIGNMENT))
        return _Scratch(scratch, block, rescale, key_scales, value_scales, packed, moved, tiles)

    def attend_stretch_function(self, functions: dict[str, Value]) -> Value:
        """A function that takes one panel of rows, from `first` on, through one stretch of keys.

        `(arguments, batch, kv_head, kv_start, count, first, record, scratch, partial)`.
        """
        e = self.e
        with e.function("attend_stretch", [POINTER, *[INT64] * 5, *[POINTER] * 2, BIT]) as (
            function,
            args,
        ):
            arguments, batch, kv_head, kv_start, count, first, record, scratch, partial = args
            b, false = e.builder, ir.Constant(BIT, 0)
            group_size, q_len, rows, panel, head_dim, v_head_dim = self.frame.words(
                arguments, "group_size", "q_len", "rows", "panel", "head_dim", "v_head_dim"
            )
            own = self.scratch_areas(arguments, scratch)
            block_row = self.frame.block_row_bytes(v_head_dim)
            panel_rows = e.least(panel, e.sub(rows, first))

            def for_each_block(name: str, matrix: Value, forbidden: Value) -> None:
                def multiply_blocks(function: str, most: Value | int, *more: Value) -> None:
                    def multiply_block(k: Value, _: list[Value]) -> None:
                        where = [arguments, batch, kv_head, e.add(kv_start, k)]
                        keys = e.least(most, e.sub(count, k))
                        weights = e.at(own.weights, e.mul(k, e.real_bytes))
                        matrices = [matrix, weights, own.moved]
                        b.call(functions[function], [*where, keys, panel_rows, *matrices, *more])
                        if name == "value":
                            e.loop(0, panel_rows, 1, [], add_block)

                    e.loop(0, count, most, [], multiply_block)

                most = self.blocks.most_keys(arguments, name)
                by_rows = functools.partial(multiply_blocks, name, most, forbidden)
                if self.tiles is None or name not in self.tiles.names:
                    by_rows()
                    return
                function = f"{name} tiles", TILE_BLOCK_KV
                by_tiles = functools.partial(multiply_blocks, *function, own.tiles, first)
                e.choose(self.tiles.usable(arguments, name), by_tiles, by_rows)

            def add_block(i: Value, _: list[Value]) -> None:
                """O = factor * O + B; the factor is then 1 for the other blocks of the stretch."""
                place = e.at(own.rescale, e.mul(i, e.vector_bytes))
                factor = e.load_vector(place)
                e.store_vector(e.const(1.0), place)
                total = e.at(record, e.mul(e.add(first, i), self.frame.record_row_bytes(block_row)))
                added = e.at(own.block, e.mul(i, block_row))

                def add_vector(d: Value, _: list[Value]) -> None:
                    to, more = e.at(total, d), e.at(added, d)
                    e.store_vector(e.fma(e.load_vector(to), factor, e.load_vector(more)), to)
                    e.store_vector(e.const(0.0), more)

                e.loop(0, block_row, e.vector_bytes, [], add_vector)

            def attend_values(name: str) -> None:
                def weigh_row(i: Value, seen: list[Value]) -> list[Value]:
                    row = e.add(first, i)
                    head = e.add(e.mul(kv_head, group_size), b.sdiv(row, q_len))
                    forbidden = b.call(
                        functions[name],
                        [arguments, e.at(own.weights, e.mul(i, self.score_row)),
                         self.frame.state_address(record, row, block_row),
                         e.at(own.rescale, e.mul(i, e.vector_bytes)), own.key_scales,
                         own.value_scales, count, kv_start, batch, head, b.srem(row, q_len)],
                    )  # fmt: skip
                    return [b.or_(seen[0], forbidden)]

                (forbidden,) = e.loop(0, panel_rows, 1, [false], weigh_row)
                for_each_block("value", own.block, forbidden)

            for_each_block("key", e.at(own.packed, e.mul(first, head_dim, self.query_bytes)), false)
            if self.frame.mask == TRUE:
                attend_values("full")
            else:
                e.choose(partial, lambda: attend_values("partial"), lambda: attend_values("full"))
        return function

    def attend_run_function(self, functions: dict[str, Value]) -> Value:
        """A function that takes all rows through neighbouring blocks of one kind.

        `(arguments, batch, kv_head, start, stop, kind, record, scratch)`.
        """
        e = self.e
        kinds = [POINTER, *[INT64] * 5, *[POINTER] * 2]
        with e.function("attend_run", kinds) as (function, args):
            arguments, batch, kv_head, start, stop, kind, record, scratch = args
            b = e.builder
            with b.if_then(b.icmp_signed("==", kind, e.index(EMPTY))):
                b.ret_void()
            partial = b.icmp_signed("==", kind, e.index(PARTIAL))
            rows, panel = self.frame.field(arguments, "rows"), self.frame.field(arguments, "panel")
            own = self.scratch_areas(arguments, scratch)

            def attend_stretch(k: Value, _: list[Value]) -> None:
                where = [arguments, batch, kv_head, k, e.least(STRETCH_KV, e.sub(stop, k))]
                for name, scales in (("key", own.key_scales), ("value", own.value_scales)):
                    if self.frame.is_quantised(name):
                        b.call(functions[f"{name} scales"], [*where, scales])

                def attend_rows(first: Value, _: list[Value]) -> None:
                    b.call(functions["attend stretch"], [*where, first, record, scratch, partial])

                e.loop(0, rows, panel, [], attend_rows)

            e.loop(start, stop, STRETCH_KV, [], attend_stretch)
        return function

    def attend_function(self, functions: dict[str, Value], tasks: DecodeTasks) -> Value:
        """A function `(arguments, task, record, scratch)` that writes the record of one chunk."""
        e = self.e
        with e.function("attend", [POINTER] * 4) as (function, args):
            arguments, task, record, scratch = args
            b = e.builder
            group, start, stop, full = self.frame.record(task, TASK)
            group_size, q_len, rows, panel, head_dim, v_head_dim, query_head, kv_heads = (
                self.frame.words(
                    arguments, "group_size", "q_len", "rows", "panel", "head_dim", "v_head_dim",
                    "query_head", "num_kv_heads",
                )
            )  # fmt: skip
            batch, kv_head = b.sdiv(group, kv_heads), b.srem(group, kv_heads)
            own = self.scratch_areas(arguments, scratch)
            block_row = self.frame.block_row_bytes(v_head_dim)

            query = self.frame.operand(arguments, "query", batch, e.mul(kv_head, group_size))
            head_bytes = e.mul(q_len, head_dim, self.query_bytes)

            def copy_head(g: Value, _: list[Value]) -> None:
                start = e.at(query.pointer, e.mul(g, query_head))
                target = e.at(own.packed, e.mul(g, head_bytes))
                rows_of_head = [start, query.row, query.element, q_len, head_dim, target]
                b.call(functions["copy query"], rows_of_head)

            e.loop(0, group_size, 1, [], copy_head)
            if self.tiles:
                self.tiles.split_query(functions, arguments, own.packed, own.tiles)
                configure(e)
            e.clear(own.block, 0, e.mul(panel, block_row))
            e.clear(record, 0, e.mul(rows, self.frame.record_row_bytes(block_row)))
            e.loop(
                0, rows, 1, [],
                lambda i, _: e.store_vector(
                    e.const(-math.inf), self.frame.state_address(record, i, block_row)
                ),
            )  # fmt: skip
            where = [arguments, batch, kv_head]

            def call_attend_run(start: Value, stop: Value, kind: Value) -> Value:
                return b.call(functions["attend run"], [*where, start, stop, kind, record, scratch])

            if self.frame.mask == TRUE:
                call_attend_run(start, stop, e.index(FULL))
            else:
                e.choose(
                    b.icmp_signed("!=", full, e.index(0)),
                    lambda: call_attend_run(start, stop, e.index(FULL)),
                    lambda: tasks.for_each_run(where, start, stop, call_attend_run),
                )
            if self.tiles:
                release(e)
        return function

    def emit_functions(self) -> None:
        e, functions = self.e, self.functions
        functions["full"] = self.softmax.function("full", False)
        if self.frame.mask != TRUE:
            functions["partial"] = self.softmax.function("partial", True)
        functions["attend stretch"] = self.attend_stretch_function(functions)
        functions["attend run"] = self.attend_run_function(functions)
        tasks = DecodeTasks(self.frame)
        attend, merge = self.attend_function(functions, tasks), functions["merge"]

        def run_task(arguments: Value, number: Value, scratch: Value) -> None:
            b = e.builder
            tasks = self.frame.pointer_field(arguments, "tasks")
            task = self.frame.record_at(tasks, number, TASK)
            group, *_ = self.frame.record(task, TASK)
            groups = self.frame.pointer_field(arguments, "groups")
            own = self.frame.record_at(groups, group, GROUP)
            _, first_record, count, _ = self.frame.record(own, GROUP)
            rows = self.frame.field(arguments, "rows")
            record_row = self.frame.record_row_bytes(
                self.frame.block_row_bytes(self.frame.field(arguments, "v_head_dim"))
            )
            record_bytes = e.mul(rows, record_row)
            records = self.frame.pointer_field(arguments, "records")
            b.call(attend, [arguments, task, e.at(records, e.mul(number, record_bytes)), scratch])
            done = b.atomic_rmw("add", own, e.index(1), "acq_rel")
            with b.if_then(b.icmp_signed("==", done, e.sub(count, 1))):
                first = e.at(records, e.mul(first_record, record_bytes))
                # In the output, `rows` rows of every group follow one another.
                first_row = e.mul(group, rows)

                def merge_row(i: Value, _: list[Value]) -> None:
                    record, row = e.at(first, e.mul(i, record_row)), e.add(first_row, i)
                    b.call(merge, [arguments, record, count, record_bytes, row, scratch])

                e.loop(0, rows, 1, [], merge_row)

        plan = tasks.plan_function()

        def share(arguments: Value, left: Value) -> Value:
            workers = self.frame.field(arguments, "workers")
            return e.builder.sdiv(left, e.mul(workers, _SHARES))

        self.frame.emit_job(run_task, share)
        tasks.emit_step(plan, e.module.globals["job"])
