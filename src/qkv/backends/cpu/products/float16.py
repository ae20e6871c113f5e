"""Products of float16 that are added to float32, without converting the factors (FEAT_FHM of Arm).

Where `Emitter.emulated`, the instruction is written out as the manual defines it.
"""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import HALF, INT16, Emitter, Value


def multiply_add_halves(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """total + x . y, where lane i adds elements i, and then elements i of the second half.

    Both factors have the bits of twice as many float16 numbers as there are lanes. FMLAL and FMLAL2
    round each sum once, as a multiply-add of the converted numbers does, so that no bit differs.
    """
    b, count = e.builder, 2 * e.lanes
    if e.emulated:
        raw = [b.bitcast(each, ir.VectorType(INT16, count)) for each in (x, y)]
        for first in (0, e.lanes):
            a, c = (storage.widen(e, e.lanes_from(r, first, e.lanes), "float16") for r in raw)
            total = e.fma(a, c, total)
        return total
    halves = [b.bitcast(each, ir.VectorType(HALF, count)) for each in (x, y)]
    for name in ("fmlal", "fmlal2"):
        full = f"llvm.aarch64.neon.{name}.v4f32.v8f16"
        total = e.machine_intrinsic(full, e.vector, total, *halves)
    return total
