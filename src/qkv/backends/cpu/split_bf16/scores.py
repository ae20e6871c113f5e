"""S = K Q^T with split operands, as the forward pass and the replay of its scores compute it.

Queries are packed once, and a block of keys is split once for many blocks of queries. Scores of
rows that cannot be split are computed one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import RowView, rows_from
from qkv.backends.cpu.emit.packing import copy_rows_function
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.factors import SplitFactors


class SplitScores:
    """Writes functions of one kernel, which find the operands in its arguments, and calls them.

    `dtypes` are those of rows that may have to be copied.
    """

    def __init__(self, frame: ForwardFrame, dtypes: Iterable[str]) -> None:
        self.frame, self.e = frame, frame.e
        self.split = split = SplitFactors(frame.e, frame.shape, frame.block_kv)
        of = frame.dtypes
        self.functions = {
            f"copy {dtype}": copy_rows_function(self.e, dtype) for dtype in sorted({*dtypes})
        }
        self.functions["split_rows"] = split.split_rows()
        self.functions["pack"] = self._pack()
        self.functions["recompute"] = non_finite.recompute(
            split, "recompute", of["key"], of["query"]
        )

    def _pack(self) -> Value:
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
            start, row = self.floats("query", here, e.add(last, 1), head_dim, copy)
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            sign = e.splat(frame.real_field(arguments_, "sign"))
            e.builder.ret(self.split.pack(places, head_dim, packed, sign))
        return function

    def floats(
        self, name: str, rows: RowView, count: Value, dim: Value, to: Value
    ) -> tuple[Value, Value]:
        """Rows of float32 with adjacent elements: where they lie, and bytes from row to row."""
        dtype = self.frame.dtypes[name]
        return self.split.floats(dtype, self.functions[f"copy {dtype}"], rows, count, dim, to)

    def split_keys(
        self, rows: RowView, count: Value, head_dim: Value, copy: Value, to: Value, unsplit: Value
    ) -> None:
        """Rows of K as tiles; `unsplit` is what `recompute` is to be given as such."""
        k, row = self.floats("key", rows, count, head_dim, copy)
        where = [k, row, count, head_dim, to, unsplit]
        self.e.builder.call(self.functions["split_rows"], where)

    def recompute(
        self,
        arguments: Value,
        key: RowView,
        query: RowView,
        first_row: Value,
        keys: tuple[Value, Value],
        unsplit: Value,
        lanes: Value,
        scores: Value,
    ) -> None:
        """Scores of rows that cannot be split, for some `keys`: the first one, and where they end.

        `key` begins with the block, and so would `scores`; `lanes` is of its queries.
        """
        e, frame = self.e, self.frame
        some = non_finite.any_non_finite(self.split, unsplit, lanes)
        with e.builder.if_then(some, likely=False):
            last = e.sub(frame.field(arguments, "rows"), 1)
            head_dim = frame.field(arguments, "head_dim")
            sign = frame.real_field(arguments, "sign")
            rows = [*key, *query, first_row, last, head_dim, sign]
            e.builder.call(self.functions["recompute"], [*rows, *keys, unsplit, lanes, scores])
