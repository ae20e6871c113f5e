"""Rows of queries packed, rows of the output unpacked, blocks of keys and values copied."""

from __future__ import annotations

import math

from llvmlite import ir

from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import Frame, RowView
from qkv.backends.cpu.emit.packing import pack_rows, unpack_rows
from qkv.backends.cpu.emit.storage import ITEM_BYTES, real_dtype
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import BLOCK_KV, StatsRow


def pack_function(frame: ForwardFrame) -> Value:
    """A function that transposes one vector of queries; lanes beyond the last row repeat it."""
    e = frame.e
    arguments = [POINTER, POINTER, POINTER, INT64, INT64]
    with e.function("pack", arguments) as (function, args):
        arguments_, query, packed, first_row, width = args
        b = e.builder
        query_head, query_row, query_element, head_dim, count, q_len = frame.words(
            arguments_, "query_head", "query_row", "query_element", "head_dim", "rows", "q_len"
        )
        sign = e.splat(frame.real_field(arguments_, "sign"))
        rows = []
        for i in range(e.lanes):
            row = e.least(e.add(first_row, i), e.sub(count, 1))
            head = e.index(0)
            if frame.pack_gqa:
                head, row = b.sdiv(row, q_len), b.srem(row, q_len)
            rows.append(e.at(query, e.mul(head, query_head), e.mul(row, query_row)))
        pack_rows(
            e, rows, query_element, head_dim, frame.dtypes["query"],
            lambda d, vector: e.store_vector(
                b.fmul(vector, sign), e.at(packed, e.mul(d, width))
            ),
        )  # fmt: skip
    return function


def unpack_function(frame: ForwardFrame, out_sum: int = StatsRow.ROW_SUM) -> Value:
    """A function for one vector of queries: out = O / l, transposed back, lse, and statistics.

    `out_sum` is the row of statistics by which the output is divided. Lanes beyond the last row
    repeat it, and write the same results to it. A row without keys has l = 0.
    """
    e = frame.e
    arguments = [*[POINTER] * 3, *[INT64] * 4]
    with e.function("unpack", arguments) as (function, args):
        arguments_, total, stats, first, v_head_dim, width, count = args
        b = e.builder
        row_max, row_sum, _, sum_error, _, t_sum = (
            e.load_vector(e.at(stats, e.mul(width, row))) for row in StatsRow
        )
        empty = b.fcmp_ordered("==", row_sum, e.const(0.0))
        divisor = b.select(empty, e.const(1.0), row_sum)
        share = b.fdiv(e.const(1.0), divisor)
        if out_sum != StatsRow.ROW_SUM:
            held = e.load_vector(e.at(stats, e.mul(width, out_sum)))
            out_share = b.fdiv(e.const(1.0), b.select(empty, e.const(1.0), held))
        else:
            out_share = share
        lowest = e.const(-math.inf)
        logarithm = vector_math.log(e, row_sum)
        lanes = [e.least(i, e.sub(count, 1)) for i in range(e.lanes)]

        def write_statistic(name: str, vector: Value) -> None:
            """Write one number of each row."""
            start = e.at(frame.pointer_field(arguments_, name), e.mul(first, e.real_bytes))
            e.store_where(e.first_lanes(e.least(count, e.lanes)), vector, start, e.real_bytes)

        lse, rest = vector_math.add_log(e, row_max, row_sum, b.fneg(sum_error))
        with b.if_then(frame.is_wanted(arguments_, "lse")):
            write_statistic("lse", b.select(empty, lowest, lse))
        with b.if_then(frame.is_wanted(arguments_, "lse_rest")):
            write_statistic("lse_rest", b.select(empty, e.const(0.0), rest))
        if frame.statistics:
            entropy = b.fsub(logarithm, b.fmul(t_sum, share))
            # Rounding may make the entropy of a single key slightly negative.
            is_negative = b.fcmp_ordered("<", entropy, e.const(0.0))
            entropy = b.select(b.or_(empty, is_negative), e.const(0.0), entropy)
            write_statistic("entropy", entropy)
            write_statistic("max_score", row_max)
            largest = b.fdiv(e.const(1.0), divisor)
            write_statistic("max_weight", b.select(empty, e.const(0.0), largest))

        def load_output(d: Value) -> Value:
            # Adding 0 turns -0.0 into 0.0.
            vector = e.load_vector(e.at(total, e.mul(d, width)))
            return e.fma(vector, out_share, e.const(0.0))

        def write_output(name: str, dtype: str) -> Value:
            row_bytes = e.mul(v_head_dim, ITEM_BYTES[dtype])
            start = e.at(frame.pointer_field(arguments_, name), e.mul(first, row_bytes))
            rows = [e.at(start, e.mul(lane, row_bytes)) for lane in lanes]
            return unpack_rows(e, rows, v_head_dim, dtype, load_output)

        frame.report_not_finite(arguments_, write_output("out", frame.out_dtype))
        if frame.out_dtype != real_dtype(e):
            with b.if_then(frame.is_wanted(arguments_, "unrounded")):
                write_output("unrounded", real_dtype(e))
    return function


def is_copied(frame: Frame, arguments: Value, name: str) -> Value:
    """Whether rows of K or V are copied before they are used: as `e.real`, side by side."""
    if frame.dtypes[name] != real_dtype(frame.e):
        return ir.Constant(BIT, 1)
    return frame.e.builder.icmp_signed(
        "!=", frame.field(arguments, f"copy_{name}"), frame.e.index(0)
    )


def hold_function(frame: Frame, functions: dict[str, Value]) -> Value:
    """A function that copies rows of K and V, but for those of which the worker holds copies.

    Rows that follow the held ones are added to these, as long as all are of one block of keys.
    """
    e = frame.e
    of_operand = [POINTER, INT64, INT64, POINTER]
    arguments = [POINTER, POINTER, *of_operand, *of_operand, INT64, INT64]
    with e.function("hold", arguments) as (function, args):
        arguments_, held, *operands, kv_start, keys = args
        b = e.builder
        places = [e.at(held, i * WORD) for i in range(2)]
        first, stop = (e.load(place, INT64, WORD) for place in places)
        kv_stop = e.add(kv_start, keys)
        follows = b.and_(b.icmp_signed("<=", first, kv_start), b.icmp_signed("<=", kv_start, stop))
        follows = b.and_(follows, e.below(e.sub(kv_stop, first), BLOCK_KV + 1))
        first, stop = (b.select(follows, old, kv_start) for old in (first, stop))

        def copy_rows() -> None:
            for i, name in enumerate(("key", "value")):
                pointer, row, element, copy = operands[4 * i : 4 * i + 4]
                dim = frame.field(arguments_, ("head_dim", "v_head_dim")[i])
                with b.if_then(is_copied(frame, arguments_, name)):
                    to = e.at(copy, e.mul(e.sub(stop, first), dim, e.real_bytes))
                    rows = e.at(pointer, e.mul(stop, row)), row, element, e.sub(kv_stop, stop)
                    b.call(functions[f"copy {frame.dtypes[name]}"], [*rows, dim, to])
            for place, key in zip(places, (first, kv_stop), strict=True):
                e.store(key, place, WORD)

        with b.if_then(e.below(stop, kv_stop)):
            copy_rows()
    return function


def rows_of_block(
    frame: Frame,
    arguments: Value,
    name: str,
    rows: RowView,
    kv_start: Value,
    keys: Value,
    dim: Value,
    copy: Value,
    functions: dict[str, Value],
) -> tuple[Value, Value]:
    """Address and row stride of a block of K or V with adjacent elements, copied if it must be."""
    e, b = frame.e, frame.e.builder
    pointer, row, element = rows
    here = e.at(pointer, e.mul(kv_start, row))

    needed = is_copied(frame, arguments, name)
    with b.if_then(needed):
        copy_rows = functions[f"copy {frame.dtypes[name]}"]
        b.call(copy_rows, [here, row, element, keys, dim, copy])
    return b.select(needed, copy, here), b.select(needed, e.mul(dim, e.real_bytes), row)
