"""The largest weight and the sum of the weights of blocks of pairs: a map of one head's weights.

A replay, as `replay.kernel` has it, whose tasks are blocks of queries. Each vector of queries reads
its keys, and the weights of `unit` keys at a time are reduced to two numbers: for each lane, or
where lanes are `joined`, for all of them. So the memory for a pair is `2 / unit` numbers,
or `2 / (lanes * unit)`.
"""

from __future__ import annotations

from collections.abc import Callable

from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.products.query_lanes import vectors_at
from qkv.backends.cpu.replay.kernel import shift_address, weights_function
from qkv.backends.cpu.replay.layout import ReplayKey
from qkv.backends.cpu.replay.reduction import QueryBlock, Reduction, emit_range_tasks, replay_frame


def emit_weight_blocks(key: ReplayKey) -> str:
    """The module of the kernel; `job(arguments, worker)` runs tasks until none is left."""
    frame = replay_frame(key)
    emit_range_tasks(BlocksReduction(frame))
    return str(frame.e.module)


class BlocksReduction(Reduction):
    """The largest weight and the sum of each unit of keys, combined with what is in memory.

    `largest` and `sums` have a row for each vector of queries from `first_vector` on, and `units`
    columns, one for each `unit` keys from `first_unit` on. An entry is a number, or a vector where
    lanes are not joined.
    """

    def keys_function(self, name: str, masked: bool) -> Value:
        return weights_function(self.frame, name, masked)

    def state(self, block: QueryBlock, vector: int) -> Value:
        return shift_address(self.frame, block, vector)

    def finish_key_block(self, block: QueryBlock, kv_start: Value, count: Value) -> None:
        """Reduce the weights of a block of keys, unit by unit."""
        e, b, arguments = self.e, self.e.builder, block.arguments
        unit, units = self.frame.field(arguments, "unit"), self.frame.field(arguments, "units")
        stop = e.add(kv_start, count)
        vector = b.sdiv(block.first_row, e.index(e.lanes))
        row = e.sub(vector, self.frame.field(arguments, "first_vector"))

        def without_nan(weight: Value) -> Value:
            """The weight, or 0 in the place of NaN."""
            return b.select(b.fcmp_ordered("ord", weight, weight), weight, e.const(0.0))

        def reduce_unit(n: Value, _: list[Value]) -> None:
            first = e.sub(e.larger_of(e.mul(n, unit), kv_start), kv_start)
            last = e.sub(e.least(e.mul(e.add(n, 1), unit), stop), kv_start)

            def reduce_key(k: Value, carried: list[Value]) -> list[Value]:
                weights = vectors_at(e, block.areas.scores, block.vectors, k)
                weights = [without_nan(weight) for weight in weights]
                largest, sums = carried[: block.vectors], carried[block.vectors :]
                return [
                    *(e.greatest(old, new) for old, new in zip(largest, weights, strict=True)),
                    *(b.fadd(old, new) for old, new in zip(sums, weights, strict=True)),
                ]

            nothing = [e.const(0.0)] * (2 * block.vectors)
            reductions = e.loop(first, last, 1, nothing, reduce_key)
            column = e.sub(n, self.frame.field(arguments, "first_unit"))
            for name, combine, values in (
                ("largest", e.greatest, reductions[: block.vectors]),
                ("sums", b.fadd, reductions[block.vectors :]),
            ):
                start = self.frame.pointer_field(arguments, name)
                for j, value in enumerate(values):
                    place = e.add(e.mul(e.add(row, j), units), column)
                    self._combine(arguments, start, place, value, combine)

        first_unit = b.sdiv(kv_start, unit)
        last_unit = b.sdiv(e.add(e.sub(stop, 1), unit), unit)
        e.loop(first_unit, last_unit, 1, [], reduce_unit)

    def _combine(
        self,
        arguments: Value,
        start: Value,
        place: Value,
        value: Value,
        combine: Callable[[Value, Value], Value],
    ) -> None:
        """Combine a value with the one in memory."""
        e = self.e

        def combine_all_lanes() -> None:
            at = e.at(start, e.mul(place, e.real_bytes))
            old = e.splat(e.load(at, e.real, e.real_bytes))
            e.store(e.extract(combine(old, e.reduce(value, combine)), 0), at, e.real_bytes)

        def combine_each_lane() -> None:
            at = e.at(start, e.mul(place, e.vector_bytes))
            e.store_vector(combine(e.load_vector(at, aligned=False), value), at, aligned=False)

        joined = e.below(0, self.frame.field(arguments, "joined"))
        e.choose(joined, combine_all_lanes, combine_each_lane)
