"""Partial sums of gradients, added up in order and rounded."""

from __future__ import annotations

from collections.abc import Callable

from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.emit.storage import ITEM_BYTES, real_dtype


def add_partials_function(frame: BackwardFrame) -> Value:
    """out[i] = sum of partial gradients in order, rounded: `count` numbers side by side."""
    e = frame.e
    dtype = frame.grad_dtype
    arguments = [POINTER, INT64, INT64, INT64, POINTER]
    with e.function("add_partials", arguments) as (function, args):
        partials, stride, number, count, out = args
        b = e.builder

        def adding(lanes: int) -> Callable[[Value, list[Value]], None]:
            def add_up(i: Value, _: list[Value]) -> None:
                start = e.at(partials, e.mul(i, e.real_bytes))

                def load_partial(n: Value) -> Value:
                    return storage.load(e, e.at(start, e.mul(n, stride)), real_dtype(e), lanes)

                first = [load_partial(e.index(0))]
                (total,) = e.loop(1, number, 1, first, lambda n, s: [b.fadd(s[0], load_partial(n))])
                storage.store(e, total, e.at(out, e.mul(i, ITEM_BYTES[dtype])), dtype)

            return add_up

        whole = e.round_down(count, e.lanes)
        e.loop(0, whole, e.lanes, [], adding(e.lanes))
        e.loop(whole, count, 1, [], adding(0))
    return function
