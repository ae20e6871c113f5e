"""S = K Q^T as products of parts: what the forward pass and the replay of its scores share.

Queries are packed once, a block of keys is split for many of them; scores of rows without parts are
computed one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import Rows
from qkv.backends.cpu.emit.packing import copy_rows
from qkv.backends.cpu.forward.kernel import Forward
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.factors import PartRows


class PartScores:
    """Writes the functions of one kernel; they find the operands in its arguments."""

    def __init__(self, kernel: Forward, block_kv: int) -> None:
        self.kernel, self.e = kernel, kernel.e
        self.split = PartRows(kernel.e, kernel.shape, block_kv)

    def functions(self, dtypes: Iterable[str]) -> dict[str, Value]:
        """By name; rows of these types can be copied."""
        of, split = self.kernel.dtypes, self.split
        parts = {f"copy {dtype}": copy_rows(self.e, dtype) for dtype in sorted({*dtypes})}
        parts["split_rows"] = split.split_rows()
        parts["pack"] = self._pack(parts)
        parts["mend"] = non_finite.mend(split, "mend", of["key"], of["query"])
        return parts

    def _pack(self, parts: dict[str, Value]) -> Value:
        """One vector of queries as pairs of parts; lanes beyond the last row repeat it.

        Gives a bit for each query without parts.
        """
        e, kernel = self.e, self.kernel
        arguments = [POINTER, POINTER, POINTER, POINTER, INT64]
        with e.function("pack", arguments, INT64) as (function, args):
            arguments_, query, packed, copy, first_row = args
            names = ("query_row", "query_element", "head_dim", "rows")
            row, element, head_dim, rows = (kernel.field(arguments_, name) for name in names)
            last = e.least(e.lanes - 1, e.sub(e.sub(rows, first_row), 1))
            here = Rows(e.at(query, e.mul(first_row, row)), row, element)
            start, row = self.floats(parts, "query", here, e.add(last, 1), head_dim, copy)
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            sign = e.splat(kernel.real_field(arguments_, "sign"))
            e.builder.ret(self.split.pack(places, head_dim, packed, sign))
        return function

    def floats(
        self, parts: dict[str, Value], name: str, rows: Rows, count: Value, dim: Value, to: Value
    ) -> tuple[Value, Value]:
        """Rows of float32 with adjacent elements."""
        dtype = self.kernel.dtypes[name]
        return self.split.floats(dtype, parts[f"copy {dtype}"], rows, count, dim, to)

    def split_keys(
        self,
        parts: dict[str, Value],
        rows: Rows,
        count: Value,
        head_dim: Value,
        copy: Value,
        to: Value,
        odd: Value,
    ) -> None:
        """Rows of K as tiles; `odd` is what `mend` is to be given."""
        k, row = self.floats(parts, "key", rows, count, head_dim, copy)
        self.e.builder.call(parts["split_rows"], [k, row, count, head_dim, to, odd])

    def mend(
        self,
        arguments: Value,
        parts: dict[str, Value],
        key: Rows,
        query: Rows,
        first_row: Value,
        start: Value,
        stop: Value,
        odd: Value,
        lanes: Value,
        scores: Value,
    ) -> None:
        """Scores of rows without parts, keys from `start` to `stop`.

        `key` begins with the block, and so would `scores`; `lanes` is of its queries.
        """
        e, kernel = self.e, self.kernel
        some = non_finite.any_without(self.split, odd, lanes)
        with e.builder.if_then(some, likely=False):
            last = e.sub(kernel.field(arguments, "rows"), 1)
            head_dim, sign = (
                kernel.field(arguments, "head_dim"),
                kernel.real_field(arguments, "sign"),
            )
            rows = [*key, *query, first_row, last, head_dim, sign]
            e.builder.call(parts["mend"], [*rows, start, stop, odd, lanes, scores])
