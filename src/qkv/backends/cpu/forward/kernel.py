"""The forward kernel: online softmax with queries in lanes.

One task is a block of queries of one head, `vectors * lanes` rows at most. Where weights are
replayed for few queries, the heads that share a kv head are rows of one block (`pack_gqa`). Scores
are computed transposed, one vector of queries for each key, so that the maximum, the sum, the
rescaling and the mask of a row are all lane-wise:

    S[k, q] = score(scale * K[k, :] . Q[q, :])            -inf where the mask forbids the pair
    m'[q]   = max(m[q], max_k S[k, q])
    P[k, q] = exp(S[k, q] - m'[q])
    l[q]    = exp(m[q] - m'[q]) * l[q] + sum_k P[k, q]
    O[d, q] = exp(m[q] - m'[q]) * O[d, q] + sum_k V[k, d] * P[k, q]

for one block of keys after the other; then `out = O / l` and `lse = m + log(l)`, with the rounding
error of lse for the backward pass. On request the same pass gives max score, max weight and
entropy, from `T[q] = sum_k P[k, q] * (S[k, q] - m[q])`:

    max weight = 1 / l,    entropy = log(l) - T / l

Only Q is packed. K and V are read where they lie if they are of the type of computation and their
elements are adjacent; else each block of keys is first copied side by side.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"FlashAttention" (2022), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, POINTER, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.emit.packing import all_finite_function, copy_rows_function
from qkv.backends.cpu.forward.boundary_blocks import BoundaryBlock, BoundaryBlocks
from qkv.backends.cpu.forward.frame import ForwardFrame, ScoreVector
from qkv.backends.cpu.forward.layout import (
    BLOCK_KV,
    RUN,
    STATS,
    STATS_SUMS,
    TASK,
    ForwardKey,
    StatsRow,
    skips_keys_within_blocks,
)
from qkv.backends.cpu.forward.products import (
    scores_function,
    selected_values_function,
    values_function,
)
from qkv.backends.cpu.forward.rows import pack_function, rows_of_block, unpack_function
from qkv.backends.cpu.forward.softmax import softmax_function
from qkv.problem.language.expressions import TRUE


def emit_forward(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    frame = ForwardFrame(key)
    e, masked = frame.e, frame.mask != TRUE
    functions = {
        "pack": pack_function(frame),
        "unpack": unpack_function(frame),
        "full": softmax_function(frame, "full", False),
    }
    for dtype in sorted(set(frame.dtypes.values())):
        functions[f"copy {dtype}"] = copy_rows_function(e, dtype)
    if masked:
        functions["partial"] = softmax_function(frame, "partial", True)
    if masked or not frame.plain:
        functions["all_finite"] = all_finite_function(e)
    boundary = BoundaryBlocks(frame) if skips_keys_within_blocks(frame.mask) else None
    attend_one, attend_many = (
        attend_function(frame, v, functions, boundary) for v in (1, frame.shape.vectors)
    )

    def run_task(arguments: Value, number: Value, scratch: Value) -> None:
        tasks, rows = frame.pointer_field(arguments, "tasks"), frame.field(arguments, "rows")
        task = frame.record_at(tasks, number, TASK)
        first_row = frame.record(task, TASK)[TASK.index("first_row")]
        frame.call_for_rows(
            e.sub(rows, first_row), attend_one, attend_many, [arguments, task, scratch]
        )

    frame.emit_job(run_task)
    return str(e.module)


class _Areas(NamedTuple):
    """Addresses in a worker's scratch memory, in this order, for one block of queries."""

    packed: Value
    total: Value
    """The output, before it is divided by the row sums."""
    weights: Value
    stats: Value
    key_copy: Value
    value_copy: Value
    transposed: Value
    """Tables of one block of keys."""


def _areas_of(frame: ForwardFrame, scratch: Value, head_dim: Value, v_head_dim: Value) -> _Areas:
    e = frame.e
    row = frame.shape.vectors * e.vector_bytes
    total = e.at(scratch, e.mul(head_dim, row))
    weights = e.at(total, e.mul(v_head_dim, row))
    stats = e.at(weights, BLOCK_KV * row)
    key_copy = e.at(stats, STATS * row)
    value_copy = e.at(key_copy, e.mul(head_dim, BLOCK_KV * e.real_bytes))
    transposed = e.at(value_copy, e.mul(v_head_dim, BLOCK_KV * e.real_bytes))
    return _Areas(scratch, total, weights, stats, key_copy, value_copy, transposed)


def attend_function(
    frame: ForwardFrame, vectors: int, functions: dict[str, Value], boundary: BoundaryBlocks | None
) -> Value:
    """A function `(arguments, task, scratch)`: one block of queries over its runs of keys."""
    e = frame.e
    scores, values = scores_function(frame, vectors), values_function(frame, vectors)
    selected = selected_values_function(frame, vectors) if "all_finite" in functions else None
    with e.function(f"attend_{vectors}", [POINTER] * 3) as (function, args):
        arguments, task, scratch = args
        b = e.builder
        batch, head, first_row, first_run, last_run = frame.record(task, TASK)
        names = ("group_size", "num_heads", "q_len", "rows", "head_dim", "v_head_dim")
        group_size, num_heads, q_len, rows, head_dim, v_head_dim = (
            frame.field(arguments, name) for name in names
        )
        count = e.sub(rows, first_row)
        kv_head = b.sdiv(head, group_size)
        key = frame.operand(arguments, "key", batch, kv_head)
        value = frame.operand(arguments, "value", batch, kv_head)
        query = frame.operand(arguments, "query", batch, head)

        width = vectors * e.vector_bytes
        area = _areas_of(frame, scratch, head_dim, v_head_dim)
        rescale, block_max = (
            e.at(area.stats, row * width) for row in (StatsRow.RESCALE, StatsRow.BLOCK_MAX)
        )

        def for_each_vector(body: Callable[[Value, Value, Value], None]) -> None:
            """`body(offset, first, left)`; a vector beyond the last row repeats that row."""

            def visit_vector(j: Value, _: list[Value]) -> None:
                first = e.least(e.mul(j, e.lanes), e.sub(count, 1))
                body(e.mul(j, e.vector_bytes), first, e.sub(count, first))

            e.loop(0, vectors, 1, [], visit_vector)

        def begin_vector(offset: Value, first: Value, _: Value) -> None:
            to, row = e.at(area.packed, offset), e.add(first_row, first)
            b.call(functions["pack"], [arguments, query.pointer, to, row, e.index(width)])
            e.store_vector(e.const(-math.inf), e.at(area.stats, offset))
            for row_of_sums in STATS_SUMS:
                e.store_vector(e.const(0.0), e.at(area.stats, offset, row_of_sums * width))

        for_each_vector(begin_vector)
        e.clear(area.total, 0, e.mul(v_head_dim, width))

        def key_and_value_rows(kv_start: Value, keys: Value) -> tuple[Value, ...]:
            def rows_of(name: str, rows: RowView, dim: Value, copy: Value) -> tuple[Value, Value]:
                return rows_of_block(
                    frame, arguments, name, rows, kv_start, keys, dim, copy, functions
                )

            return (
                *rows_of("key", key, head_dim, area.key_copy),
                *rows_of("value", value, v_head_dim, area.value_copy),
            )

        def call_softmax(
            name: str, j: Value, place: Value, kv_start: Value, keys: Value, marked: Value
        ) -> None:
            offset, first = e.mul(j, e.vector_bytes), e.add(first_row, e.mul(j, e.lanes))
            b.call(
                functions[name],
                ScoreVector(
                    arguments, place, stats=e.at(area.stats, offset), transposed=area.transposed,
                    width=e.index(width), count=keys, batch=batch, head=head, first_row=first,
                    kv_start=kv_start, marked=marked,
                ),
            )  # fmt: skip

        def attend_together(name: str, kv_start: Value, keys: Value) -> None:
            """Attend to the same keys with all vectors of queries."""
            k, key_row, v, value_row = key_and_value_rows(kv_start, keys)
            sizes = (key_row, head_dim, keys, value_row, v_head_dim)
            b.call(scores, [k, area.packed, area.weights, block_max, v, *sizes])

            def compute_weights(marked: Value) -> None:
                def weigh_vector(j: Value, _: list[Value]) -> None:
                    place = e.at(area.weights, e.mul(j, e.vector_bytes))
                    call_softmax(name, j, place, kv_start, keys, marked)

                e.loop(0, vectors, 1, [], weigh_vector)

            def add_values(which: Value) -> None:
                places = v, area.weights, rescale, area.total
                b.call(which, [*places, value_row, v_head_dim, keys, e.index(width)])

            if name == "full" and frame.plain:
                compute_weights(ir.Constant(BIT, 0))
                add_values(values)
                return
            finite = b.call(functions["all_finite"], [v, value_row, keys, v_head_dim])
            compute_weights(b.not_(finite))
            e.choose(finite, lambda: add_values(values), lambda: add_values(selected))

        def attend_at_boundary(kv_start: Value, keys: Value) -> None:
            if not boundary:
                attend_together("partial", kv_start, keys)
                return

            def add_selected(v: Value, value_row: Value, count: Value) -> None:
                sizes = value_row, v_head_dim, count, e.index(width)
                b.call(selected, [v, area.weights, rescale, area.total, *sizes])

            boundary_block = BoundaryBlock(
                vectors=vectors, arguments=arguments, batch=batch, head=head, first_row=first_row,
                packed=area.packed, weights=area.weights, rescale=rescale, total=area.total,
                head_dim=head_dim, v_head_dim=v_head_dim, key_and_value_rows=key_and_value_rows,
                call_softmax=partial(call_softmax, "partial"), add_selected=add_selected,
                attend_together=partial(attend_together, "partial"),
            )  # fmt: skip
            boundary.attend(boundary_block, functions["all_finite"], kv_start, keys)

        def attend_to_block(kv_start: Value, keys: Value, is_partial: Value) -> None:
            def attend_to_all_keys() -> None:
                attend_together("full", kv_start, keys)

            if frame.mask == TRUE:
                attend_to_all_keys()
            else:
                e.choose(is_partial, lambda: attend_at_boundary(kv_start, keys), attend_to_all_keys)

        runs = frame.pointer_field(arguments, "runs")

        def attend_to_run(r: Value, _: list[Value]) -> None:
            start, stop, kind = frame.record(runs, RUN, r)
            is_partial = b.icmp_signed("!=", kind, e.index(0))
            e.loop(
                start, stop, BLOCK_KV, [],
                lambda k, _: attend_to_block(k, e.least(BLOCK_KV, e.sub(stop, k)), is_partial),
            )  # fmt: skip

        e.loop(first_run, last_run, 1, [], attend_to_run)
        place = e.add(e.mul(e.add(e.mul(batch, num_heads), head), q_len), first_row)

        def end_vector(offset: Value, first: Value, left: Value) -> None:
            held = e.at(area.total, offset), e.at(area.stats, offset), e.add(place, first)
            b.call(functions["unpack"], [arguments, *held, v_head_dim, e.index(width), left])

        for_each_vector(end_vector)
    return function
