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
from qkv.backends.cpu.split_bf16.terms import TermSplitter


class SplitScores:
    """Emits functions of one kernel, which find the operands in its arguments, and calls of them.

    `dtypes` are the dtypes of rows that may have to be copied, `columns` is as in `TermSplitter`.
    """

    def __init__(self, frame: ForwardFrame, dtypes: Iterable[str], columns: int = 0) -> None:
        self.frame, self.e = frame, frame.e
        self.split = split = TermSplitter(frame.e, frame.shape, frame.block_kv, columns)
        of = frame.dtypes
        self.functions = {
            f"copy {dtype}": copy_rows_function(self.e, dtype) for dtype in sorted({*dtypes})
        }
        self.functions["split_rows"] = split.split_rows()
        self.functions["pack"] = self._pack_function()
        self.functions["recompute"] = non_finite.recompute(
            split, "recompute", of["key"], of["query"]
        )

    def _pack_function(self) -> Value:
        """One vector of queries as pairs of terms; lanes beyond the last row repeat it.

        Gives a bit for each query that cannot be split.
        """
        e, frame = self.e, self.frame
        arguments = [POINTER, POINTER, POINTER, POINTER, INT64]
        with e.function("pack", arguments, INT64) as (function, args):
            arguments_, query, packed, copy, first_row = args
            row, element, head_dim, rows = frame.words(
                arguments_, "query_row", "query_element", "head_dim", "rows"
            )
            last = e.least(e.lanes - 1, e.sub(e.sub(rows, first_row), 1))
            here = rows_from(e, RowView(query, row, element), first_row)
            start, row = self.float_rows("query", here, e.add(last, 1), head_dim, copy)
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            sign = e.splat(frame.real_field(arguments_, "sign"))
            e.builder.ret(self.split.pack_rows(places, head_dim, packed, sign))
        return function

    def float_rows(
        self, name: str, rows: RowView, count: Value, dim: Value, to: Value
    ) -> tuple[Value, Value]:
        """Rows of float32 with adjacent elements: where they lie, and bytes from row to row."""
        dtype = self.frame.dtypes[name]
        return self.split.float_rows(dtype, self.functions[f"copy {dtype}"], rows, count, dim, to)

    def split_keys(
        self,
        rows: RowView,
        count: Value,
        head_dim: Value,
        copy: Value,
        to: Value,
        non_finite_rows: Value,
    ) -> None:
        """Split rows of K into tiles, and list those that cannot be split in `non_finite_rows`."""
        k, row = self.float_rows("key", rows, count, head_dim, copy)
        where = [k, row, count, head_dim, to, non_finite_rows]
        self.e.builder.call(self.functions["split_rows"], where)

    def recompute(
        self,
        arguments: Value,
        key: RowView,
        query: RowView,
        first_row: Value,
        keys: tuple[Value, Value],
        non_finite_rows: Value,
        lanes: Value,
        scores: Value,
    ) -> None:
        """Recompute the scores of rows that cannot be split, for keys from `keys[0]` to `keys[1]`.

        `key` and `scores` begin at key 0 of the block; `lanes` marks queries that cannot be split.
        """
        e, frame = self.e, self.frame
        needed = non_finite.any_non_finite(self.split, non_finite_rows, lanes)
        with e.builder.if_then(needed, likely=False):
            last = e.sub(frame.field(arguments, "rows"), 1)
            head_dim = frame.field(arguments, "head_dim")
            sign = frame.real_field(arguments, "sign")
            rows = [*key, *query, first_row, last, head_dim, sign]
            e.builder.call(
                self.functions["recompute"], [*rows, *keys, non_finite_rows, lanes, scores]
            )
