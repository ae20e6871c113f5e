"""The functions of the forward kernel that are the same for every mask and score function.

They are modules of their own, with which kernels are linked: a kernel for another mask is compiled
in a third of the time, because most of its code is here.
"""

from __future__ import annotations

from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.packing import ALL_FINITE, all_finite_function, copy_rows_function
from qkv.backends.cpu.emit.structured_code import Signature
from qkv.backends.cpu.forward.boundary_blocks import steps_function, steps_signature
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import ForwardKey
from qkv.backends.cpu.forward.products import (
    scores_function,
    scores_signature,
    selected_values_function,
    values_function,
    values_signature,
)
from qkv.backends.cpu.forward.query_block import (
    begin_function,
    begin_signature,
    end_function,
    end_signature,
)
from qkv.backends.cpu.forward.rows import HOLD, hold_function, pack_function, unpack_function


def emit_shared(key: ForwardKey) -> str:
    """The module of the functions that every kernel needs."""
    frame = ForwardFrame(key)
    functions = {"pack": pack_function(frame), "unpack": unpack_function(frame)}
    for dtype in sorted(set(frame.dtypes.values())):
        functions[f"copy {dtype}"] = copy_rows_function(frame.e, dtype)
    shared = [hold_function(frame, functions)]
    for vectors in frame.block_sizes:
        shared += [
            scores_function(frame, vectors),
            values_function(frame, vectors),
            begin_function(frame, vectors, functions),
            end_function(frame, vectors, functions),
        ]
    return frame.e.sharing(shared)


def emit_forbidding(key: ForwardKey) -> str:
    """The module of the functions for blocks of keys of which pairs may be forbidden."""
    frame = ForwardFrame(key)
    shared = [all_finite_function(frame.e)]
    shared += [selected_values_function(frame, vectors) for vectors in frame.block_sizes]
    shared += [steps_function(frame, n) for n in range(1, frame.shape.vectors + 1)]
    return frame.e.sharing(shared)


def declare_shared(frame: ForwardFrame, *, may_forbid: bool) -> dict[str, Value]:
    """The functions of these modules, of the second one only with `may_forbid`, by name."""
    signatures: list[Signature] = [HOLD]
    for vectors in frame.block_sizes:
        signatures += [scores_signature(vectors), values_signature(vectors)]
        signatures += [begin_signature(vectors), end_signature(vectors)]
    if may_forbid:
        signatures.append(ALL_FINITE)
        signatures += [values_signature(n, selected=True) for n in frame.block_sizes]
        signatures += [steps_signature(n) for n in range(1, frame.shape.vectors + 1)]
    return {signature.name: frame.e.declare(signature) for signature in signatures}
