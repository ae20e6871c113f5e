"""The backward kernel: one pass over recomputed weights, five products, queries in lanes.

One task is a range of keys of one kv head. For each block of keys, and every block of queries of
the heads that read this kv head, it computes, transposed as in the forward pass,

    S[k, q]   = score(scale * K[k, :] . Q[q, :])
    P[k, q]   = exp((S[k, q] - lse[q]) - rest[q])          0 where the mask forbids the pair
    dP[k, q]  = f[k, q] * V[k, :] . dO[q, :]               f: dropout factors
    dS[k, q]  = P[k, q] * (dP[k, q] - delta[q])            delta = rowsum(dO * O) - d lse
    dX[k, q]  = dS[k, q] * scale * d score / d product
    dQ[d, q] += sum_k K[k, d] * dX[k, q]
    dV[k, :] += sum_q f[k, q] * P[k, q] * dO[q, :]
    dK[k, :] += sum_q dX[k, q] * Q[q, :]

dK and dV belong to the task. dQ has a part for each range of keys; the worker that finishes the
last range of a kv head adds the parts, in the order of the ranges. A table that the score reads
gets `dS * d score / d entry` added where the entry was read.

Q and dO are packed for the first two products and transposed again for the last two, so
that nothing is transposed between products. On machines that multiply pairs of bfloat16, all
factors are made pairs of it (`gradient_sums.round_pairs_function`). A forbidden pair has P = -0.0,
no other pair has: its dX is 0 by selection, and where K, Q or dO is not finite a slower path leaves
it out of the sums.

Sources: Dao et al., "FlashAttention" (2022), algorithm 4; Dao, "FlashAttention-2" (2023), for
the parts over keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.functions import block_functions, query_block_function
from qkv.backends.cpu.backward.layout import TASK, BackwardKey
from qkv.backends.cpu.backward.query_block import QueryBlockPass
from qkv.backends.cpu.backward.shared import declare_shared
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import POINTER, Value
from qkv.backends.cpu.emit.storage import ITEM_BYTES
from qkv.backends.cpu.forward.layout import RUN
from qkv.backends.cpu.forward.layout import TASK as BLOCK

QueryBlockCall: TypeAlias = Callable[[Value, list[Value]], None]
"""Emits a call, given the number of rows that are left and the arguments of the function."""


def emit_backward(key: BackwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left.

    It is linked with those of `shared`.
    """
    frame = BackwardFrame(key)
    functions = {**declare_shared(frame), **block_functions(frame)}
    query_block = query_block_call(frame, QueryBlockPass, functions)
    emit_tasks(frame, key_range_function(frame, functions, query_block))
    return str(frame.e.module)


def _round_rows(
    frame: BackwardFrame,
    sums: Value,
    row: Value,
    count: Value,
    dim: Value,
    out: Value,
    add_partials: Value,
) -> None:
    """Write rows of sums in the gradient's type, side by side."""
    e = frame.e
    out_row = e.mul(dim, ITEM_BYTES[frame.grad_dtype])

    def round_row(k: Value, _: list[Value]) -> None:
        at = e.at(sums, e.mul(k, row)), e.at(out, e.mul(k, out_row))
        e.builder.call(add_partials, [at[0], e.index(0), e.index(1), dim, at[1]])

    e.loop(0, count, 1, [], round_row)


def query_block_call(
    frame: BackwardFrame, block_pass: type[QueryBlockPass], functions: dict[str, Value]
) -> QueryBlockCall:
    """Emits a call for one vector of queries or for many, by the number of rows that are left."""
    sizes = frame.shape.block_sizes
    all_sizes = [query_block_function(block_pass, frame, functions, size) for size in sizes]
    one, many = all_sizes[0], all_sizes[-1]
    if one is many:
        return lambda rows, arguments: frame.e.builder.call(one, arguments)
    return lambda rows, arguments: frame.call_for_rows(rows, one, many, arguments)


def call_for_query_blocks(
    frame: BackwardFrame, arguments: Value, task: Value, scratch: Value, query_block: QueryBlockCall
) -> None:
    """Call `query_block` for each block of queries that may attend to some key of the task."""
    e = frame.e
    batch, kv_head, start, stop, _ = frame.record(task, TASK)
    group_size, num_heads, q_len, q_blocks = frame.words(
        arguments, "group_size", "num_heads", "q_len", "q_blocks"
    )
    blocks = frame.pointer_field(arguments, "blocks")
    runs = frame.pointer_field(arguments, "runs")

    def count_keys(r: Value, counts: list[Value]) -> list[Value]:
        first, end, _ = frame.record(runs, RUN, r)
        keys = e.sub(e.least(end, stop), e.larger_of(first, start))
        return [e.add(counts[0], e.larger_of(keys, e.index(0)))]

    def call_for_block(n: Value, _: list[Value]) -> None:
        block = frame.record_at(blocks, n, BLOCK)
        _, _, first_row, first_run, last_run = frame.record(block, BLOCK)
        (keys,) = e.loop(first_run, last_run, 1, [e.index(0)], count_keys)
        with e.builder.if_then(e.below(0, keys)):
            query_block(e.sub(q_len, first_row), [arguments, task, block, scratch])

    head_row = e.add(e.mul(batch, num_heads), e.mul(kv_head, group_size))
    e.loop(
        e.mul(head_row, q_blocks), e.mul(e.add(head_row, group_size), q_blocks), 1, [],
        call_for_block,
    )  # fmt: skip


def key_range_function(
    frame: BackwardFrame, functions: dict[str, Value], query_block: QueryBlockCall
) -> Value:
    """A function `(arguments, task, scratch)`: one task, which is a range of keys."""
    e = frame.e
    with e.function("range_of_keys", [POINTER] * 3) as (function, args):
        arguments, task, scratch = args
        b = e.builder
        batch, kv_head, start, stop, _ = frame.record(task, TASK)
        group_size, num_heads, q_len, kv_len, splits = frame.words(
            arguments, "group_size", "num_heads", "q_len", "kv_len", "splits"
        )
        kv_head_row = e.add(e.mul(batch, b.sdiv(num_heads, group_size)), kv_head)
        kv_row = e.add(e.mul(kv_head_row, kv_len), start)
        keys = e.sub(stop, start)
        dims = {"key": frame.field(arguments, "head_dim"),
                "value": frame.field(arguments, "v_head_dim")}  # fmt: skip
        sums = {}
        for name in dims:
            row = frame.field(arguments, f"{name}_sum_row")
            pointer = frame.pointer_field(arguments, f"{name}_sums")
            sums[name] = e.at(pointer, e.mul(kv_row, row)), row
            e.clear(sums[name][0], 0, e.mul(keys, row))
        call_for_query_blocks(frame, arguments, task, scratch, query_block)

        head_row = e.add(e.mul(batch, num_heads), e.mul(kv_head, group_size))
        item = ITEM_BYTES[frame.grad_dtype]
        for name, dim in dims.items():
            pointer, row = sums[name]
            out = e.at(frame.pointer_field(arguments, f"d_{name}"), e.mul(kv_row, dim, item))
            rounds = b.icmp_signed("!=", frame.field(arguments, f"round_{name}"), e.index(0))
            with b.if_then(rounds):
                _round_rows(frame, pointer, row, keys, dim, out, functions["add_partials"])
        adds = b.icmp_signed("!=", frame.field(arguments, "add_query"), e.index(0))
        with b.if_then(adds):
            finished = frame.pointer_field(arguments, "finished")
            counter = e.at(finished, e.mul(kv_head_row, WORD))
            before = b.atomic_rmw("add", counter, e.index(1), "acq_rel")
            with b.if_then(b.icmp_signed("==", before, e.sub(splits, 1))):
                place = e.mul(head_row, q_len, dims["key"])
                b.call(
                    functions["add_partials"],
                    [
                        e.at(frame.pointer_field(arguments, "query_partials"),
                             e.mul(place, e.real_bytes)),
                        frame.field(arguments, "partial_bytes"),
                        splits,
                        e.mul(group_size, q_len, dims["key"]),
                        e.at(frame.pointer_field(arguments, "d_query"), e.mul(place, item)),
                    ],
                )  # fmt: skip
    return function


def emit_tasks(frame: BackwardFrame, range_of_keys: Value) -> None:
    """Emit the `job` of the module, which runs tasks until none is left."""
    tables = tuple([table.name for table in frame.wanted_tables])
    frame.call_for_each_task(range_of_keys, (*TASK, *tables))
