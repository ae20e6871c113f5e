"""The functions of backward kernels that many masks and score functions have in common.

They are modules of their own, with which kernels are linked, the delta correction too: a kernel for
another mask is compiled sooner, because much of its code is here.
"""

from __future__ import annotations

from qkv.backends.cpu.backward.block import (
    correct_sums_function,
    drop_weights_function,
    products_function,
    score_gradients_function,
)
from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.gradient_sums import (
    key_sums_function,
    query_sums_function,
    round_pairs_function,
    selected_key_sums_function,
    selected_query_sums_function,
    transpose_function,
)
from qkv.backends.cpu.backward.layout import BackwardKey, Traits
from qkv.backends.cpu.backward.partials import add_partials_function
from qkv.backends.cpu.backward.query_rows import (
    delta_function,
    narrow_function,
    pack_function,
    pair_rows_function,
    unpack_function,
)
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.packing import all_finite_function, copy_rows_function
from qkv.backends.cpu.emit.storage import real_dtype
from qkv.backends.cpu.emit.structured_code import Maker, written


def emit_sums(key: BackwardKey, traits: Traits) -> str:
    """The module of the functions for rows, and of the products that add to gradients."""
    frame = BackwardFrame(key, traits=traits)
    return frame.e.sharing(list(_sums(frame, written).values()))


def emit_products(key: BackwardKey, traits: Traits, sums_rows: bool) -> str:
    """The module of the functions that compute P and dS of one block of queries and keys."""
    frame = BackwardFrame(key, traits=traits, sums_rows=sums_rows)
    return frame.e.sharing(list(_products(frame, written).values()))


def declare_shared(frame: BackwardFrame) -> dict[str, Value]:
    """The functions of both modules; those for some vectors of queries have a number."""
    return {**_sums(frame, frame.e.declared), **_products(frame, frame.e.declared)}


def _sums(frame: BackwardFrame, make: Maker) -> dict[str, Value]:
    e = frame.e
    functions = {
        "add_partials": make(add_partials_function, frame),
        "delta": make(delta_function, frame),
        "unpack": make(unpack_function, frame),
        "transpose": make(transpose_function, frame),
        "key_sums": make(key_sums_function, frame),
    }
    for dtype in sorted({real_dtype(e), *frame.dtypes.values()}):
        functions[f"pack {dtype}"] = make(pack_function, frame, dtype)
    for dtype in sorted({frame.dtypes["key"], frame.dtypes["value"]}):
        functions[f"copy {dtype}"] = make(copy_rows_function, e, dtype)
    for vectors in frame.shape.block_sizes:
        functions[f"query_sums {vectors}"] = make(query_sums_function, frame, vectors)
    if frame.in_pairs:
        functions["pair"] = make(pair_rows_function, frame)
        functions["narrow"] = make(narrow_function, frame)
        if not frame.shape.quads:
            functions["interleave"] = make(frame.packed_pairs().interleave_function, "interleave")
        for vectors in frame.shape.block_sizes:
            functions[f"round_pairs {vectors}"] = make(round_pairs_function, frame, vectors)
    if frame.may_forbid:
        functions |= _selected_sums(frame, make)
    return functions


def _selected_sums(frame: BackwardFrame, make: Maker) -> dict[str, Value]:
    """Functions for rows that may not be finite, of which pairs are forbidden."""
    functions = {
        "all_finite": make(all_finite_function, frame.e),
        "selected_key_sums": make(selected_key_sums_function, frame),
    }
    for vectors in frame.shape.block_sizes:
        write = selected_query_sums_function
        functions[f"selected_query_sums {vectors}"] = make(write, frame, vectors)
    if frame.in_pairs:
        functions["pair_finite"] = make(pair_rows_function, frame, finite=True)
        functions["narrow_finite"] = make(narrow_function, frame, finite=True)
    return functions


def _products(frame: BackwardFrame, make: Maker) -> dict[str, Value]:
    functions = {}
    for vectors in frame.shape.block_sizes:
        functions[f"products {vectors}"] = make(products_function, frame, vectors)
        functions[f"score_gradients {vectors}"] = make(score_gradients_function, frame, vectors)
    if frame.corrects_sums:
        functions["correct_sums"] = make(correct_sums_function, frame)
    if frame.spec.dropout:
        functions["drop_weights"] = make(drop_weights_function, frame)
    return functions
