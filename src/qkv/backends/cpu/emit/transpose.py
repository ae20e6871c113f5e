"""Transposed blocks of tables that have an entry for every pair, as dense masks and biases do.

Kernels have queries in the lanes of a vector, but the entries of neighbouring queries are a whole
row of the table apart, so that reading them one by one takes longer than the matrix products. Here
rows are read as vectors of neighbouring keys, transposed in registers, and stored as one vector of
queries for each key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BYTE, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.problem.language.expressions import Load, Node
from qkv.problem.spec import Spec


def transpose_tables(
    e: Emitter,
    places: Expressions,
    loads: Sequence[Load],
    kv_start: Value,
    count: Value,
    block_kv: int,
    target: Value,
) -> None:
    """Write the entries of `count` keys from `kv_start` on, a vector for each key and load."""
    b = e.builder
    for n, load in enumerate(loads):
        table = places.tables[load.table]
        uniform, varying = places.at_key(kv_start, e.const(0.0)).entry_offset(load, table)
        assert varying is not None
        rows = e.stack_words(e.lanes)
        for i in range(e.lanes):
            row = e.at(table.pointer, e.extract(varying, i), uniform)
            e.store(b.ptrtoint(row, INT64), e.at(rows, WORD * i), WORD)
        here = e.at(target, n * block_kv * e.vector_bytes)
        b.call(_transpose_function(e, table.spec.dtype), [rows, table.strides[-1], count, here])


def _transpose_function(e: Emitter, dtype: str) -> Value:
    """A function `(rows, element, count, target)` that writes a vector for each of `count` keys.

    `rows` are the addresses of one row for each lane, `element` is the byte stride from key to key.
    """
    name = f"lay_down_{dtype}"
    if (known := e.module.globals.get(name)) is not None:
        return known
    item = 1 if dtype == "bool" else storage.ITEM_BYTES[dtype]
    with e.function(name, [POINTER, INT64, INT64, POINTER]) as (function, args):
        places, element, count, target = args
        b = e.builder
        rows = [e.pointer(e.load(e.at(places, WORD * i), INT64, WORD)) for i in range(e.lanes)]
        is_long = b.icmp_signed(">=", count, e.index(e.lanes))
        side_by_side = b.and_(is_long, b.icmp_signed("==", element, e.index(item)))

        def store_key(k: Value, vector: Value) -> None:
            e.store(vector, e.at(target, e.mul(k, e.vector_bytes)), e.vector_bytes)

        def transpose_keys(k: Value, _: list[Value]) -> None:
            # The last step ends with the last key, so it may repeat keys of the step before it.
            k = e.least(k, e.sub(count, e.lanes))
            loaded = [_load_entries(e, e.at(row, e.mul(k, item)), dtype, e.lanes) for row in rows]
            for i, vector in enumerate(e.transpose(loaded)):
                store_key(e.add(k, i), vector)

        def gather_key(k: Value, _: list[Value]) -> None:
            first = _load_entries(e, e.at(rows[0], e.mul(k, element)), dtype)
            vector = ir.Constant(ir.VectorType(first.type, e.lanes), ir.Undefined)
            for i, row in enumerate(rows):
                entry = first if i == 0 else _load_entries(e, e.at(row, e.mul(k, element)), dtype)
                vector = e.insert(vector, entry, i)
            store_key(k, vector)

        stop = b.select(side_by_side, count, e.index(0))
        e.loop(0, stop, e.lanes, [], transpose_keys)
        e.loop(stop, count, 1, [], gather_key)
    return function


def transposed_values(
    e: Emitter, spec: Spec, loads: Sequence[Load], source: Value, k: Value, block_kv: int
) -> Mapping[Node, Value]:
    """The values of the loads for one key of the block."""
    dtypes = {table.name: table.dtype for table in spec.tables}
    known: dict[Node, Value] = {}
    for n, load in enumerate(loads):
        place = e.at(source, n * block_kv * e.vector_bytes, e.mul(k, e.vector_bytes))
        if dtypes[load.table] == "bool":
            bits = e.load(place, e.bits, e.vector_bytes)
            known[load] = e.builder.icmp_unsigned("!=", bits, e.const_bits(0))
        else:
            known[load] = e.load_vector(place)
    return known


def _load_entries(e: Emitter, pointer: Value, dtype: str, lanes: int = 0) -> Value:
    """Numbers as reals; booleans as integers of the same width."""
    if dtype != "bool":
        return storage.load(e, pointer, dtype, lanes)
    raw = e.load(pointer, ir.VectorType(BYTE, lanes) if lanes else BYTE)
    return e.builder.zext(raw, ir.VectorType(e.real_bits, lanes) if lanes else e.real_bits)
