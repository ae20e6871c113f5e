"""Sums over keys as sums of groups, added in the order of the keys, whichever is computed first."""

from __future__ import annotations

from collections.abc import Sequence

from qkv.backends.cpu.emit.emitter import Emitter, Value
from qkv.backends.cpu.products.query_lanes import store_vectors, vectors_at


class GroupSums:
    """Totals of `number` sums, which begin with 0, and sums of groups that are added later.

    `room` has a vector for each total and for each sum of every group.
    """

    def __init__(self, e: Emitter, room: Value, number: int) -> None:
        self.e, self.totals, self.number = e, room, number
        self._deferred = e.at(room, number * e.vector_bytes)
        store_vectors(e, room, [e.const(0.0)] * number)

    def add(self, sums: Sequence[Value]) -> None:
        """Add the sums of the next group."""
        b = self.e.builder
        store_vectors(self.e, self.totals, list(map(b.fadd, self.values(), sums)))

    def defer(self, group: Value, sums: Sequence[Value]) -> None:
        """Keep the sums of a group that is to be added later."""
        store_vectors(self.e, self._address_of_group(group), sums)

    def add_deferred(self, group: Value) -> None:
        self.add(vectors_at(self.e, self._address_of_group(group), self.number))

    def values(self) -> list[Value]:
        return vectors_at(self.e, self.totals, self.number)

    def _address_of_group(self, group: Value) -> Value:
        return self.e.at(self._deferred, self.e.mul(group, self.number * self.e.vector_bytes))
