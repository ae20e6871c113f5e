"""The rows of few queries, summed again before the backward kernel.

The dS of a row add up to 0, if delta is the mean of dP by the very weights and products that they
are made of:

    dS[k, q] = P[k, q] * (dP[k, q] - delta[q]),   delta[q] = sum_k P[k, q] * dP[k, q]

The kernel takes delta from the output, which has other rounding errors, and was perhaps rounded to
16 bits. The error of delta is in every dS of the row, times its weight. In sums over many rows it
is below other errors; with few rows, each with one key that has nearly all the weight, gradients
may consist of nothing else. So keys are read twice, and this kernel only leaves, for each row,

    m[q] = max_k S[k, q]
    l[q] = sum_k exp(S[k, q] - m[q])
    r[q] = sum_k exp(S[k, q] - m[q]) * (dP[k, q] - delta[q])

of which lse = m + log(l), and r / l is what delta lacks. This kernel takes the place of a second
forward pass, which few queries would need in any case: their output comes from a kernel that adds
up scores in another order.
"""

from __future__ import annotations

import math

from qkv.backends.cpu.backward.block import sum_over_keys
from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.functions import block_functions
from qkv.backends.cpu.backward.kernel import (
    call_for_query_blocks,
    emit_tasks,
    query_block_call,
)
from qkv.backends.cpu.backward.layout import ROW_SUMS, BackwardKey
from qkv.backends.cpu.backward.query_block import QueryBlockPass
from qkv.backends.cpu.backward.shared import declare_shared
from qkv.backends.cpu.emit.emitter import POINTER, Value
from qkv.backends.cpu.emit.forbidden_pairs import FORBIDDEN_WEIGHT
from qkv.backends.cpu.forward.layout import STATS_SUMS, StatsRow
from qkv.backends.cpu.forward.softmax import RowSums

_RESIDUAL = StatsRow.T_SUM
"""r takes the place of T, the sum for the entropy, in the statistics of `RowSums`."""


def emit_delta_correction(key: BackwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left.

    It is linked with those of `shared`.
    """
    frame = BackwardFrame(key, sums_rows=True)
    functions = {
        **declare_shared(frame),
        **block_functions(frame, _weights_function, _residual_function),
    }
    query_block = query_block_call(frame, _RowSumsPass, functions)
    with frame.e.function("range_of_keys", [POINTER] * 3) as (range_of_keys, args):
        arguments, task, scratch = args
        call_for_query_blocks(frame, arguments, task, scratch, query_block)
    emit_tasks(frame, range_of_keys)
    return str(frame.e.module)


def _weights_function(frame: BackwardFrame, name: str, masked: bool) -> Value:
    """P = exp(S - m) of the products, forbidden pairs marked; m and l advance."""
    e = frame.e
    with frame.vector_function(name) as (function, at):
        b = e.builder
        places = frame.places(at)
        scale = e.splat(frame.real_field(at.arguments, "scale"))

        def finish_score(k: Value, largest: list[Value]) -> list[Value]:
            product = e.load_vector(e.at(at.products, e.mul(k, at.width)))
            inner = places.at_key(e.add(at.kv_start, k), b.fmul(product, scale))
            score = inner.floats(frame.score)
            if masked:
                score = b.select(inner.condition(frame.mask), score, e.const(-math.inf))
            e.store_vector(score, e.at(at.weights, e.mul(k, at.width)))
            return [e.greatest(largest[0], score)]

        places.hoist(frame.score)
        if masked:
            places.hoist(frame.mask)
        (largest,) = e.loop(0, at.count, 1, [e.const(-math.inf)], finish_score)
        row = RowSums(e, at.lse, at.width, largest, statistics=False)

        def weigh_key(k: Value) -> Value:
            place = e.at(at.weights, e.mul(k, at.width))
            score, forbidden = e.load_vector(place), e.const(FORBIDDEN_WEIGHT)
            weight, _ = row.weigh_key(score, row.zero_sums, forbidden)
            e.store_vector(weight, place)
            return weight

        row.advance([sum_over_keys(e, at.count, weigh_key)])
    return function


def _residual_function(frame: BackwardFrame) -> Value:
    """Rescale the residual of each row, and add the dS of one block of keys."""
    e = frame.e
    with frame.vector_function("chain") as (function, at):
        total = sum_over_keys(
            e, at.count, lambda k: e.load_vector(e.at(at.score_grads, e.mul(k, at.width)))
        )
        rescale = e.load_vector(e.at(at.lse, e.mul(at.width, StatsRow.RESCALE)))
        place = e.at(at.lse, e.mul(at.width, _RESIDUAL))
        e.store_vector(e.fma(e.load_vector(place), rescale, total), place)
    return function


class _RowSumsPass(QueryBlockPass):
    """Computes m, l and r of the rows of one block of queries."""

    def begin(self) -> None:
        e = self.e
        self.for_each_vector(self._pack_vector)

        def clear_sums(offset: Value, _: Value) -> None:
            (sums,) = self.areas("lse")
            for row in (StatsRow.ROW_MAX, *STATS_SUMS):
                start = -math.inf if row == StatsRow.ROW_MAX else 0.0
                e.store_vector(e.const(start), e.at(sums, offset, e.mul(self.width, row)))

        self.for_each_vector(clear_sums)

    def _add_gradients(
        self, key: tuple[Value, Value], kv_start: Value, count: Value, partial: Value
    ) -> None:
        """No gradient is computed."""

    def end(self) -> None:
        e = self.e
        size = self.field("row_bytes")
        split = self.frame.pointer_field(self.arguments, "row_sums")
        split = e.at(split, e.mul(self.split, size, len(ROW_SUMS)))
        first_row = e.mul(e.add(self.head_row, self.first_row), e.real_bytes)

        def write_sums(offset: Value, first: Value) -> None:
            for n, row in enumerate((StatsRow.ROW_MAX, StatsRow.ROW_SUM, _RESIDUAL)):
                sums = e.at(self.area["lse"], offset, e.mul(self.width, row))
                out = e.at(split, e.mul(size, n), first_row)
                where = out, first, e.sub(self.rows, 1), e.index(1)
                self.call("unpack", sums, self.width, *where)

        self.for_each_vector(write_sums)
