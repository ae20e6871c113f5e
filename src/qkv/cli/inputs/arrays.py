"""The input of a command: arrays of a file or sample, reduced to the chosen rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.arguments.declarations import shown
from qkv.call.inspected import Inspected
from qkv.cli.variants import command_line_of, variants_of
from qkv.errors import ArgumentError
from qkv.files import read_arrays
from qkv.inspection.records import record_file
from qkv.inspection.records.non_finite import First
from qkv.inspection.summaries.head_statistics import HeadStatistics, ShownHeads
from qkv.problem.stored_rows import whole_rows

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class InputArrays:
    """Arrays as they were read, and their source.

    Those of a layer of a model, and of a saved record, bring variants and options along. `found` is
    the record, `notes` what there is to know of the text. `tokens` are those of the keys, and
    `q_tokens` those of the queries where they are of another sequence, none if they are not known.
    """

    query: Array
    key: Array
    value: Array
    tokens: tuple[str, ...] | None
    title: str
    source: str
    variants: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    found: Inspected | None = None
    notes: tuple[str, ...] = ()
    q_tokens: Sequence[str] | None = None

    @classmethod
    def from_file(cls, path: str) -> InputArrays:
        if record_file.is_record(path):
            return cls.of_record(record_file.load(path, "numpy"), path)
        arrays = read_arrays(path)
        return cls(arrays.query, arrays.key, arrays.value, arrays.tokens, path, path)

    @classmethod
    def of_record(cls, inspected: Inspected, path: str) -> InputArrays:
        """The arrays of a record of `path`, with heads before rows, whatever the layout was."""
        call = inspected.call
        spec, operands = call.problem.spec, call.problem.operands
        query, key, value = (
            whole_rows(rows, spec.compute_dtype)
            for rows in (operands.query, operands.key, operands.value)
        )
        names = ("scale", "q_offset", "kv_offset")
        options = {name: getattr(call.unbound.options, name) for name in names}
        variants = call.unbound.variants
        return cls(query, key, value, None, path, path, variants, options, inspected)

    def require_no_options(self, options: argparse.Namespace) -> None:
        """Complain of an option that would change what a saved record is of."""
        given = command_line_of(options.variants)
        given += ["--layout"] if options.layout != "bhld" else []
        given += ["--q-offset"] if options.q_offset is not None else []
        given += ["--scale"] if options.scale is not None else []
        if given:
            raise ArgumentError(
                f"{given[0]} goes with a file of arrays; {shown(self.source, 80)} is a saved "
                "record, which has its variants and options.",
                action="Leave it out.",
            )

    def first_position(self, batch: int) -> int:
        """The position of query row 0 of a record, counted from that of key row 0."""
        assert self.found is not None
        positions = self.found.call.problem.operands.positions
        q_shift, kv_shift = (
            int(shift[batch if len(shift) > 1 else 0])
            for shift in (positions.q_shift, positions.kv_shift)
        )
        return q_shift - kv_shift


@dataclass(frozen=True, slots=True, eq=False)
class CommandInput:
    """One batch row as `(num_heads, length, head_dim)`, with names and positions of its rows.

    `head`, `kv_head` and `q_index` say which of the given arrays come first here, `q_len`
    how many rows those had; `q_offset` is the position of the first row here. Variants that are not
    the same everywhere are computed over `given` as a whole, with `keywords`.
    """

    given: InputArrays
    query: Array
    key: Array
    value: Array
    variants: tuple[Any, ...]
    uniform: bool
    keywords: dict[str, Any]
    scale: float | None
    q_offset: int
    batch: int
    batch_size: int
    q_len: int
    head: int = 0
    kv_head: int = 0
    q_index: int = 0

    @classmethod
    def of(cls, given: InputArrays, options: argparse.Namespace) -> CommandInput:
        """Check the arrays and options, and take the batch row that is wanted."""
        if given.found is not None:
            given.require_no_options(options)
        variants = (*given.variants, *variants_of(options.variants))
        arrays = given.query, given.key, given.value
        keywords = {
            "scale": options.scale,
            "layout": options.layout,
            "q_offset": "start" if options.q_offset is None else options.q_offset,
            **given.options,
        }
        # `plan` checks the arrays, so that the code below can rely on their shapes.
        qkv.plan(*arrays, *variants, **keywords)
        lead = np.broadcast_shapes(*(array.shape[:-3] for array in arrays))
        batch_size = int(np.prod(lead, dtype=object))
        batch = checked_index(options.batch or 0, batch_size, "batch")
        query, key, value = (_one_batch(array, lead, batch, options.layout) for array in arrays)
        num_heads, q_len, kv_len = len(query), query.shape[1], key.shape[1]
        if not (num_heads and q_len and kv_len):
            raise ArgumentError(
                f"there is nothing to look at: num_heads={num_heads}, q_len={q_len}, "
                f"kv_len={kv_len}.",
                action="Give arrays with at least one head, one query and one key.",
            )
        if given.tokens is not None and len(given.tokens) != kv_len:
            raise ArgumentError(
                f"there are {len(given.tokens)} tokens for {kv_len} keys.",
                action="Give one token for each row of k.",
            )
        if given.found is not None:
            q_offset = given.first_position(batch)
        else:
            kv_lens = [v.kv_lens for v in variants if isinstance(v, qkv.KeyLengths)]
            real = [np.broadcast_to(lens, lead).reshape(-1)[batch] for lens in kv_lens]
            requested = keywords["q_offset"] if given.variants else options.q_offset
            q_offset = _offset(requested, q_len, kv_len, min([kv_len, *map(int, real)]))
            q_offset -= keywords.get("kv_offset", 0)
        return cls(
            given,
            query,
            key,
            value,
            variants,
            given.found is None
            and not given.variants
            and all(entry.option.uniform for entry in options.variants),
            keywords,
            keywords["scale"],
            q_offset,
            batch,
            batch_size,
            q_len,
        )

    def with_head(self, head: int) -> CommandInput:
        """Only one query head, and the key head that it reads."""
        head = checked_index(head, len(self.query), "head")
        kv_head = head // (len(self.query) // len(self.key))
        return replace(
            self,
            query=self.query[head : head + 1],
            key=self.key[kv_head : kv_head + 1],
            value=self.value[kv_head : kv_head + 1],
            head=self.head + head,
            kv_head=self.kv_head + kv_head,
        )

    def with_query(self, q_index: int) -> CommandInput:
        """Only one query row, at the position that it had."""
        q_index = checked_index(q_index, self.query.shape[1], "query")
        return replace(
            self,
            query=self.query[:, q_index : q_index + 1],
            q_offset=self.q_offset + q_index,
            q_index=self.q_index + q_index,
        )

    def inspected(self, progress: Callable[[int, int], object] | None = None) -> qkv.Record:
        """The record of these heads and rows, or of `given` where variants are not uniform."""
        if self.uniform:
            rows = self.query, self.key, self.value
            options: dict[str, Any] = {"scale": self.scale, "q_offset": self.q_offset}
        elif self.given.found is not None:
            return qkv.Record(self.given.found, progress)
        else:
            rows = self.given.query, self.given.key, self.given.value
            options = self.keywords
        return qkv.inspect(*rows, *self.variants, **options, progress=progress)

    def head_statistics(self, record: qkv.Record) -> HeadStatistics:
        """Statistics of the heads and rows of this problem, from what `inspected` returned."""
        if self.uniform:
            first = First(self.head, self.kv_head, self.q_index)
            return HeadStatistics(record, lambda array: array, first)
        heads = slice(self.head, self.head + self.query.shape[0])
        q_rows = slice(self.q_index, self.q_index + self.query.shape[1])

        def select(array: Array) -> Array:
            trailing = array.shape[record.entropy.ndim :]
            return array.reshape(self.batch_size, -1, self.q_len, *trailing)[
                self.batch, heads, q_rows
            ]

        return HeadStatistics(record, select)

    @property
    def shown(self) -> ShownHeads:
        """What the text of the heads says of them."""
        return ShownHeads(
            self.given.title,
            self.given.tokens,
            self.variants,
            self.q_len,
            self.key.shape[1],
            self.query.shape[2],
            self.query.shape[1],
            self.q_offset,
            self.batch,
            self.batch_size,
            self.head,
            self.q_index,
            self.given.notes,
            self.given.q_tokens,
        )

    @property
    def q_tokens(self) -> Sequence[str] | None:
        """Names of the query rows, if all have one."""
        names = [self.shown.q_token(i) for i in range(self.q_len)]
        return None if None in names else [name for name in names if name is not None]


def checked_index(index: int, count: int, what: str) -> int:
    """A row by number, from the end if negative."""
    if not -count <= index < count:
        raise ArgumentError(
            f"--{what} {index} does not exist.",
            action=f"Choose from 0 to {count - 1}."
            if count > 1
            else f"There is one {what}, 0."
            if count
            else f"There is no {what} at all.",
        )
    return index % count


def _one_batch(array: Array, lead: tuple[int, ...], batch: int, layout: str) -> Array:
    if array.ndim == 2:
        return array[None]
    row: Array = np.broadcast_to(array, (*lead, *array.shape[-3:]))[np.unravel_index(batch, lead)]
    return row if layout == "bhld" else row.swapaxes(0, 1)


def _offset(requested: int | str | None, q_len: int, kv_len: int, real: int) -> int:
    if requested is None and q_len != kv_len:
        raise ArgumentError(
            f"where do {q_len} queries stand among {kv_len} keys?",
            action="Pass --q-offset start, --q-offset end, or a position.",
        )
    return requested if isinstance(requested, int) else real - q_len if requested == "end" else 0
