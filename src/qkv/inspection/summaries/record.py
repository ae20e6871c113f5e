"""The text of the record of one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError
from qkv.inspection.rendering.counts import counted
from qkv.inspection.rendering.tokens import require_names
from qkv.inspection.summaries.head_statistics import HeadStatistics, ReadRecord, ShownHeads, heads
from qkv.inspection.summaries.heads_text import PAIRS, summary_of_heads

__all__ = ["summary_of_record"]

Array = NDArray[Any]


def summary_of_record(record: ReadRecord, tokens: Sequence[str] | None, batch: int) -> str:
    """See `Record.summary`."""
    problem = record.problem
    spec, positions = problem.spec, problem.operands.positions
    if not (spec.batch_size and spec.num_heads and spec.q_len and spec.kv_len):
        return f"{record!r}: there is nothing to look at."
    if not 0 <= batch < spec.batch_size:
        raise ArgumentError(
            f"batch row {batch} does not exist.",
            action=f"Choose from 0 to {spec.batch_size - 1}."
            if spec.batch_size > 1
            else "There is one, 0.",
        )
    require_names(tokens, spec.kv_len)
    shifts = positions.q_shift, positions.kv_shift
    q_shift, kv_shift = (int(shift[batch if len(shift) > 1 else 0]) for shift in shifts)
    shown = ShownHeads(
        counted(spec.num_heads, "head"),
        None if tokens is None else tuple(tokens),
        record.variants,
        spec.q_len,
        spec.kv_len,
        spec.head_dim,
        spec.q_len,
        q_shift - kv_shift,
        batch,
        spec.batch_size,
    )

    def select(array: Any) -> Array:
        whole: Array = np.asarray(array)
        trailing = whole.shape[np.ndim(record.lse) :]
        row: Array = whole.reshape(spec.batch_size, spec.num_heads, spec.q_len, *trailing)[batch]
        return row

    statistics = HeadStatistics(record, select)
    return summary_of_heads(shown, statistics, heads(shown, statistics, PAIRS)).rstrip("\n")
