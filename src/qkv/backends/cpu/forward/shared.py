"""The functions of the forward kernel that are the same for every mask and score function.

They are modules of their own, with which kernels are linked: a kernel for another mask is compiled
in a third of the time, because most of its code is here.
"""

from __future__ import annotations

from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.packing import all_finite_function, copy_rows_function
from qkv.backends.cpu.emit.structured_code import Maker, written
from qkv.backends.cpu.forward.boundary_blocks import steps_function
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import ForwardKey
from qkv.backends.cpu.forward.products import (
    scores_function,
    selected_values_function,
    values_function,
)
from qkv.backends.cpu.forward.query_block import begin_function, end_function
from qkv.backends.cpu.forward.rows import hold_function, pack_function, unpack_function


def emit_shared(key: ForwardKey) -> str:
    """The module of the functions that every kernel needs."""
    frame = ForwardFrame(key)
    functions = {"pack": pack_function(frame), "unpack": unpack_function(frame)}
    for dtype in sorted(set(frame.dtypes.values())):
        functions[f"copy {dtype}"] = copy_rows_function(frame.e, dtype)
    return frame.e.sharing(_of_every_kernel(frame, written, functions))


def emit_forbidding(key: ForwardKey) -> str:
    """The module of the functions for blocks of keys of which pairs may be forbidden."""
    frame = ForwardFrame(key)
    return frame.e.sharing(_of_forbidding(frame, written))


def declare_shared(frame: ForwardFrame, *, may_forbid: bool) -> dict[str, Value]:
    """The functions of these modules, of the second one only with `may_forbid`, by name."""
    shared = _of_every_kernel(frame, frame.e.declared, {})
    if may_forbid:
        shared += _of_forbidding(frame, frame.e.declared)
    return {function.name: function for function in shared}


def _of_every_kernel(frame: ForwardFrame, make: Maker, functions: dict[str, Value]) -> list[Value]:
    shared = [make(hold_function, frame, functions)]
    for vectors in frame.shape.block_sizes:
        shared += [
            make(scores_function, frame, vectors),
            make(values_function, frame, vectors),
            make(begin_function, frame, vectors, functions),
            make(end_function, frame, vectors, functions),
        ]
    return shared


def _of_forbidding(frame: ForwardFrame, make: Maker) -> list[Value]:
    return [
        make(all_finite_function, frame.e),
        *(make(selected_values_function, frame, vectors) for vectors in frame.shape.block_sizes),
        *(make(steps_function, frame, n) for n in range(1, frame.shape.vectors + 1)),
    ]
