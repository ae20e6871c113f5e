"""Sinks as a compiled pass of its own: they take their share after the softmax over the keys.

    out = out / (1 + exp(sink - lse)),   lse = log(exp(lse) + exp(sink))

as `qkv.partial.finish` has it, in float64 and rounded once to the type of storage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from qkv._threads import get_num_threads
from qkv.backends.cpu.compiler.compile import Kernel, build
from qkv.backends.cpu.emit import storage, vector_math
from qkv.backends.cpu.emit.emitter import DOUBLE, FLOAT, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.rows.row_pass import Block, address_of, each_head, words_of
from qkv.backends.cpu.threads import jobs

Array = NDArray[Any]

__all__ = ["FIELDS", "Sinks", "SinksKey", "emit_sinks"]

FIELDS = ("limit", "sinks", "keys_out", "keys_lse", "rest", "out", "lse", "heads", "length", "dim")
"""Words of the argument block after the counter. `keys_out` and `keys_lse` are of the keys alone;
`lse` may be where `keys_lse` is; `rest`, what rounding took from lse, is 0 if nobody wants it."""

_WORTH_A_THREAD = 2**16
"""Entries of the output that pay for waking one."""


@dataclass(frozen=True, slots=True)
class SinksKey:
    """What the kernel depends on: types of computation and of the output."""

    dtype: str
    out_dtype: str
    lanes: int
    halves: bool


def emit_sinks(key: SinksKey) -> str:
    """The module of one kernel; `job(arguments, worker)` takes the rows of a head for each task."""
    e = Emitter("sinks", key.lanes, DOUBLE, halves=key.halves)
    item, out_item = storage.ITEM_BYTES[key.dtype], storage.ITEM_BYTES[key.out_dtype]
    row = _row(e, key)

    def head(number: Value, fields: dict[str, Value]) -> None:
        b = e.builder
        which = b.srem(number, fields["heads"])
        sink = e.load(e.at(e.pointer(fields["sinks"]), e.mul(which, 8)), DOUBLE, 8)
        first = e.mul(number, fields["length"])
        wanted = b.icmp_signed("!=", fields["rest"], e.index(0))

        def one(r: Value, _: list[Value]) -> None:
            place = e.add(first, r)
            entries = e.mul(place, fields["dim"])
            b.call(
                row,
                [
                    e.at(e.pointer(fields["keys_out"]), e.mul(entries, item)),
                    e.at(e.pointer(fields["keys_lse"]), e.mul(place, item)),
                    e.at(e.pointer(fields["rest"]), e.mul(place, item)),
                    e.at(e.pointer(fields["out"]), e.mul(entries, out_item)),
                    e.at(e.pointer(fields["lse"]), e.mul(place, item)),
                    sink,
                    wanted,
                    fields["dim"],
                ],
            )

        e.loop(0, fields["length"], 1, [], one)

    each_head(e, FIELDS, head)
    return str(e.module)


def _row(e: Emitter, key: SinksKey) -> Value:
    """A function of one row: `(keys_out, keys_lse, rest, out, lse, sink, wanted, dim)`."""
    item, out_item = storage.ITEM_BYTES[key.dtype], storage.ITEM_BYTES[key.out_dtype]
    arguments = [*[POINTER] * 5, DOUBLE, ir.IntType(1), INT64]
    # Computed as vectors, of which lane 0 is used: the elementary functions are of vectors.
    with e.function("row", arguments) as (function, args):
        keys_out, keys_lse, rest, out, lse, sink, wanted, dim = args
        b = e.builder

        def wide(pointer: Value) -> Value:
            return e.splat(storage.load(e, pointer, key.dtype))

        place = e.words(e.lanes)
        e.store(ir.Constant(e.vector, None), place, 8)
        with b.if_then(wanted):
            e.store(wide(rest), place, 8)
        kept = b.fadd(wide(keys_lse), e.load(place, e.vector, 8))
        sinks, one, zero = e.splat(sink), e.const(1.0), e.const(0.0)
        lowest = e.const(-math.inf)
        away = b.fsub(sinks, kept)
        # Not exp(lse - new lse): where both are large, little is left of what tells them apart.
        no_keys = b.fcmp_ordered("==", kept, lowest)
        share = b.select(no_keys, zero, b.fdiv(one, b.fadd(one, vector_math.exp(e, away))))
        peak = b.select(b.fcmp_unordered("ugt", kept, sinks), kept, sinks)
        nearer = e.intrinsic("fabs", away)
        small = vector_math.exp(e, b.fneg(nearer))
        more = b.select(b.fcmp_ordered("==", peak, lowest), zero, _log1p(e, small))
        total = b.fadd(peak, more)
        stored = _rounded(e, total, key.dtype)
        e.store(_narrow(e, e.extract(stored, 0), key.dtype), lse, item)
        with b.if_then(wanted):
            lost = b.fadd(b.fsub(peak, stored), more)
            lost = b.select(b.fcmp_ordered("==", stored, lowest), zero, lost)
            e.store(_narrow(e, e.extract(lost, 0), key.dtype), rest, item)
        factor = e.extract(_rounded(e, share, key.dtype), 0)
        factors = e.splat(factor)

        def product(value: Value, by: Value) -> Value:
            exact = b.fmul(value, by)
            if key.dtype == "float64":
                return exact
            count = exact.type.count if isinstance(exact.type, ir.VectorType) else 0
            real = b.fptrunc(exact, ir.VectorType(FLOAT, count) if count else FLOAT)
            return _stored(e, real, key.out_dtype)

        def several(d: Value, _: list[Value]) -> None:
            value = storage.load(e, e.at(keys_out, e.mul(d, item)), key.dtype, e.lanes)
            e.store(product(value, factors), e.at(out, e.mul(d, out_item)), out_item)

        def single(d: Value, _: list[Value]) -> None:
            value = storage.load(e, e.at(keys_out, e.mul(d, item)), key.dtype)
            e.store(product(value, factor), e.at(out, e.mul(d, out_item)), out_item)

        # Vectors may not overlap: where `out` is `keys_out`, an entry would be scaled twice.
        stop = e.round_down(dim, e.lanes)
        e.loop(0, stop, e.lanes, [], several)
        e.loop(stop, dim, 1, [], single)
    return function


def _log1p(e: Emitter, x: Value) -> Value:
    """log(1 + x) for 0 <= x <= 1, also where 1 + x rounds x away."""
    b = e.builder
    one = e.const(1.0)
    total = b.fadd(one, x)
    lost = b.fsub(x, b.fsub(total, one))
    return b.fadd(vector_math.log(e, total), b.fdiv(lost, total))


def _rounded(e: Emitter, vector: Value, dtype: str) -> Value:
    """float64 numbers that the type can hold."""
    if dtype == "float64":
        return vector
    b = e.builder
    return b.fpext(b.fptrunc(vector, ir.VectorType(FLOAT, e.lanes)), e.vector)


def _narrow(e: Emitter, scalar: Value, dtype: str) -> Value:
    return scalar if dtype == "float64" else e.builder.fptrunc(scalar, FLOAT)


def _stored(e: Emitter, real: Value, dtype: str) -> Value:
    """float32 as the output holds it."""
    return real if dtype == "float32" else storage.narrow_float32(e, real, dtype)


@lru_cache(maxsize=16)
def _kernel(key: SinksKey, here: Host) -> Kernel:
    return Kernel(build(emit_sinks, (key,), here))


class Sinks:
    """Lets the sinks of a call take their share of results of one shape.

    Parameters
    ----------
    sinks : array (num_heads,)
    shape : tuple of int
        Of the output, `(*batch_shape, num_heads, q_len, v_head_dim)`.
    dtype, out_dtype : NumPy dtype
        Of the results over the keys alone, and of the output.
    """

    def __init__(
        self,
        sinks: Array,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        out_dtype: np.dtype[Any],
    ) -> None:
        wide = host().shape_of(np.dtype(np.float64))
        key = SinksKey(dtype.name, out_dtype.name, wide.lanes, wide.halves)
        self._kernel = _kernel(key, host())
        self._sinks = np.array(sinks, np.float64)
        *lead, heads, length, dim = shape
        self._count = math.prod(lead) * heads
        self._entries = self._count * length * dim
        self._fields = {
            "limit": self._count, "sinks": address_of(self._sinks), "heads": heads,
            "length": length, "dim": dim,
        }  # fmt: skip

    def __call__(
        self, keys_out: int, keys_lse: int, rest: int, out: int, lse: int, kept: Any
    ) -> None:
        """Compute at these addresses, of what `kept` keeps; `rest` 0 is none."""
        fields = {
            **self._fields, "keys_out": keys_out, "keys_lse": keys_lse, "rest": rest, "out": out,
            "lse": lse,
        }  # fmt: skip
        block = Block(words_of(FIELDS, fields), (kept, self._sinks))
        workers = min(get_num_threads(), self._count, self._entries // _WORTH_A_THREAD)
        if workers <= 1 and self._entries <= _WORTH_A_THREAD:
            self._kernel.brief_job(block.address, 0)
        else:
            jobs.run(self._kernel, block, max(1, workers))
