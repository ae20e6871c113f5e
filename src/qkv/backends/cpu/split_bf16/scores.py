"""S = K Q^T with split operands, as the forward pass and the replay of its scores compute it.

Queries are packed once, and a block of keys is split once for many blocks of queries. Scores of
rows that cannot be split are computed one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import RowView, rows_from
from qkv.backends.cpu.emit.packing import copy_rows
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.factors import SplitFactors


class SplitScores:
    """Writes the functions of one kernel; they find the operands in its arguments."""

    def __init__(self, frame: ForwardFrame) -> None:
        self.frame, self.e = frame, frame.e
        self.split = SplitFactors(frame.e, frame.shape, frame.block_kv)

    def functions(self, dtypes: Iterable[str]) -> dict[str, Value]:
        """The functions by name, with copies for rows of these dtypes."""
        of, split = self.frame.dtypes, self.split
        functions = {f"copy {dtype}": copy_rows(self.e, dtype) for dtype in sorted({*dtypes})}
        functions["split_rows"] = split.split_rows()
        functions["pack"] = self._pack(functions)
        functions["recompute"] = non_finite.recompute(split, "recompute", of["key"], of["query"])
        return functions

    def _pack(self, functions: dict[str, Value]) -> Value:
        """One vector of queries as pairs of terms; lanes beyond the last row repeat it.

        Gives a bit for each query that cannot be split.
        """
        e, frame = self.e, self.frame
        arguments = [POINTER, POINTER, POINTER, POINTER, INT64]
        with e.function("pack", arguments, INT64) as (function, args):
            arguments_, query, packed, copy, first_row = args
            names = ("query_row", "query_element", "head_dim", "rows")
            row, element, head_dim, rows = (frame.field(arguments_, name) for name in names)
            last = e.least(e.lanes - 1, e.sub(e.sub(rows, first_row), 1))
            here = rows_from(e, RowView(query, row, element), first_row)
            start, row = self.floats(functions, "query", here, e.add(last, 1), head_dim, copy)
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            sign = e.splat(frame.real_field(arguments_, "sign"))
            e.builder.ret(self.split.pack(places, head_dim, packed, sign))
        return function

    def floats(
        self,
        functions: dict[str, Value],
        name: str,
        rows: RowView,
        count: Value,
        dim: Value,
        to: Value,
    ) -> tuple[Value, Value]:
        """Rows of float32 with adjacent elements."""
        dtype = self.frame.dtypes[name]
        return self.split.floats(dtype, functions[f"copy {dtype}"], rows, count, dim, to)

    def split_keys(
        self,
        functions: dict[str, Value],
        rows: RowView,
        count: Value,
        head_dim: Value,
        copy: Value,
        to: Value,
        non_finite_rows: Value,
    ) -> None:
        """Rows of K as tiles; `non_finite_rows` is what `recompute` is to be given."""
        k, row = self.floats(functions, "key", rows, count, head_dim, copy)
        self.e.builder.call(functions["split_rows"], [k, row, count, head_dim, to, non_finite_rows])

    def recompute(
        self,
        arguments: Value,
        functions: dict[str, Value],
        key: RowView,
        query: RowView,
        first_row: Value,
        start: Value,
        stop: Value,
        non_finite_rows: Value,
        lanes: Value,
        scores: Value,
    ) -> None:
        """Scores of rows that cannot be split, keys from `start` to `stop`.

        `key` begins with the block, and so would `scores`; `lanes` is of its queries.
        """
        e, frame = self.e, self.frame
        some = non_finite.any_non_finite(self.split, non_finite_rows, lanes)
        with e.builder.if_then(some, likely=False):
            last = e.sub(frame.field(arguments, "rows"), 1)
            head_dim, sign = (
                frame.field(arguments, "head_dim"),
                frame.real_field(arguments, "sign"),
            )
            rows = [*key, *query, first_row, last, head_dim, sign]
            e.builder.call(
                functions["recompute"], [*rows, start, stop, non_finite_rows, lanes, scores]
            )
