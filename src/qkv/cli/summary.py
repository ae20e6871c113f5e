"""The text of a record, as the command line prints it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.cli.head_statistics import heads
from qkv.cli.inputs import CommandInput, HeadStatistics, InputArrays
from qkv.cli.inspect_command import summary_of_heads
from qkv.cli.model_command import summary_of_model
from qkv.errors import ArgumentError
from qkv.inspection.model_record import ModelRecord
from qkv.inspection.record import Record
from qkv.problem.spec import Problem

__all__ = ["summary"]

Array = NDArray[Any]
_PAIRS = 3


def summary(shown: Record | ModelRecord, tokens: Sequence[str] | None, batch: int) -> str:
    """See `Record.summary` and `ModelRecord.summary`."""
    if isinstance(shown, ModelRecord):
        return summary_of_model(shown).rstrip("\n")
    problem = shown.problem
    spec = problem.spec
    if not (spec.batch_size and spec.num_heads and spec.q_len and spec.kv_len):
        return f"{shown!r}: there is nothing to look at."
    if not 0 <= batch < spec.batch_size:
        raise ArgumentError(
            f"batch row {batch} does not exist.",
            action=f"Choose from 0 to {spec.batch_size - 1}."
            if spec.batch_size > 1
            else "There is one, 0.",
        )
    if tokens is not None and len(tokens) != spec.kv_len:
        raise ArgumentError(
            f"there are {len(tokens)} tokens for {spec.kv_len} keys.",
            action="Give one token for each key.",
        )
    given = _input(shown, problem, None if tokens is None else tuple(tokens), batch)
    statistics = given.head_statistics()
    return summary_of_heads(given, statistics, heads(given, statistics, _PAIRS)).rstrip("\n")


@dataclass(frozen=True, slots=True, eq=False)
class _RecordInput(CommandInput):
    """One batch row of a record, which has its statistics already.

    The arrays have the sizes of those of the record, and are not read.
    """

    statistics: HeadStatistics | None = None

    def head_statistics(
        self, progress: Callable[[int, int], object] | None = None
    ) -> HeadStatistics:
        assert self.statistics is not None
        return self.statistics


def _input(
    record: Record, problem: Problem, tokens: tuple[str, ...] | None, batch: int
) -> CommandInput:
    spec, positions = problem.spec, problem.operands.positions
    number = np.zeros((), np.float32)
    query = np.broadcast_to(number, (spec.num_heads, spec.q_len, spec.head_dim))
    key = np.broadcast_to(number, (spec.num_kv_heads, spec.kv_len, spec.head_dim))
    value = np.broadcast_to(number, (spec.num_kv_heads, spec.kv_len, spec.v_head_dim))
    shifts = (positions.q_shift, positions.kv_shift)
    q_shift, kv_shift = (int(shift[batch if len(shift) > 1 else 0]) for shift in shifts)
    title = f"{spec.num_heads} heads"

    def select(array: Any) -> Array:
        seen: Array = np.asarray(array)
        trailing = seen.shape[np.ndim(record.lse) :]
        shape = spec.batch_size, spec.num_heads, spec.q_len, *trailing
        row: Array = seen.reshape(shape)[batch]
        return row

    return _RecordInput(
        InputArrays(query, key, value, tokens, title, title),
        query,
        key,
        value,
        record.variants,
        uniform=False,
        keywords={},
        scale=problem.operands.scale,
        q_offset=q_shift - kv_shift,
        batch=batch,
        batch_size=spec.batch_size,
        q_len=spec.q_len,
        statistics=HeadStatistics(record, select),
    )
