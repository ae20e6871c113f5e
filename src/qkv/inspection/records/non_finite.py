"""Which rows of weights are NaN, and which entry of which operand is the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.scores import Scores
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import StoredRows

__all__ = ["First", "NonFinite", "non_finite", "sentences_of_nan"]

Array = NDArray[Any]
_NAMED = 5
"""Heads whose names are given."""
_BLOCK = 512
"""Rows, and keys, whose scores are computed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class NonFinite:
    """The rows whose weights are NaN.

    Attributes
    ----------
    rows : boolean array (..., num_heads, q_len)
        True where the lse is NaN or plus infinity, so that no weight is a number.
    reasons : tuple of str
        What holds NaN or infinity, where first, which rows that reaches, and what to do; empty if
        everything is finite. NaN that a mask hides is no reason.
    """

    rows: Any
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.reasons)


@dataclass(frozen=True, slots=True)
class First:
    """What a caller calls the first query head, key head and query row of a problem."""

    head: int = 0
    kv_head: int = 0
    q_index: int = 0


def non_finite(
    problem: Problem, lse: Array, output: Array, first: First | None = None
) -> tuple[Array, tuple[str, ...]]:
    """Rows `(batch, num_heads, q_len)` without weights, and the reasons.

    Parameters
    ----------
    problem : Problem
    lse : array (*batch_shape, num_heads, q_len)
    output : array (*batch_shape, num_heads, q_len, v_head_dim)
    first : First, optional
        Where the problem is a part of what the caller knows.
    """
    first = first or First()
    of_queries, of_keys = (first.head, first.q_index), (first.kv_head, 0)
    spec, operands = problem.spec, problem.operands
    shape = spec.batch_size, spec.num_heads, spec.q_len
    bad = ~(np.isfinite(lse) | np.isneginf(lse)).reshape(shape)
    reasons: list[str] = []
    if bad.any():
        of_query = _wrong(operands.query, spec.batch_size)
        of_key = _wrong(operands.key, spec.batch_size)
        by_query = bad & of_query.any(axis=-1)
        # Where the query is not finite, a key need not be the reason: a mask may hide it.
        by_key, seen = _that_see(problem, bad & ~by_query, np.any(of_key, axis=-1))
        of_key &= seen[..., None]
        if by_query.any():
            what = f"{_count(by_query, first)} no weights. Mend these rows, or leave them out."
            reasons.append(f"{_first('query', operands.query, of_query, of_queries)}: {what}")
        if by_key.any():
            what = f"{_count(by_key, first)} no weights. Mend these keys, or hide them by a mask."
            reasons.append(f"{_first('key', operands.key, of_key, of_keys)}: {what}")
        rest = bad & ~by_query & ~by_key
        if rest.any():
            reasons.append(_of_scores(problem, rest, _count(rest, first)))
    # Without weights a row has no output, whatever the values are.
    of_rows = np.asarray(output, np.float64).reshape(*shape, spec.v_head_dim)
    if not np.isfinite(of_rows[~bad]).all():
        of_value = _wrong(operands.value, spec.batch_size)
        if of_value.any():
            reasons.append(
                f"{_first('value', operands.value, of_value, of_keys)}: outputs that read it are "
                "not finite, and the weights shown here do not depend on it. Mend these values, or "
                "hide their keys by a mask."
            )
    return bad, tuple(reasons)


def _that_see(problem: Problem, rows: Array, wrong: Array) -> tuple[Array, Array]:
    """Which rows see a key that is not finite, and keys of each kv head that some row sees.

    `rows` is `(batch, num_heads, q_len)`, `wrong` and the second result `(batch, num_kv_heads,
    kv_len)`. Each row is followed up to the first block of keys in which it sees one.
    """
    scores = Scores(problem, problem.spec.compute_dtype)
    that_see, seen = np.zeros_like(rows), np.zeros_like(wrong)
    for batch, head in np.argwhere(rows.any(axis=-1)):
        kv_head = head // problem.spec.group_size
        keys, left = np.flatnonzero(wrong[batch, kv_head]), np.flatnonzero(rows[batch, head])
        for block in np.split(keys, range(_BLOCK, len(keys), _BLOCK)):
            found = np.zeros(len(left), bool)
            for start in range(0, len(left), _BLOCK):
                part = slice(start, start + _BLOCK)
                allowed = ~np.isneginf(scores.tile(batch, head, left[part], block))
                found[part] = allowed.any(axis=1)
                seen[batch, kv_head, block] |= allowed.any(axis=0)
            that_see[batch, head, left[found]] = True
            left = left[~found]
    return that_see, seen


def _of_scores(problem: Problem, wrong: Array, rows: str) -> str:
    """Why weights are NaN in rows `wrong` (batch, num_heads, q_len) with finite query and key."""
    sinks = problem.operands.sinks
    if sinks is not None and (np.isnan(sinks) | np.isposinf(sinks)).any():
        return f"The sinks hold NaN or plus infinity: {rows} no weights. Mend them."
    for name, table in problem.operands.tables.items():
        if table.dtype.kind not in "biu":
            values = np.asarray(table, np.float64)
            if np.isnan(values).any() or np.isposinf(values).any():
                label = next(t.label for t in problem.spec.tables if t.name == name)
                return (
                    f"{label} holds NaN or plus infinity: {rows} no weights. "
                    "Mend it; minus infinity is what forbids a pair."
                )
    compute = problem.spec.compute_dtype
    at = np.argwhere(wrong)[0]
    if not _is_finite_in_float64(problem, *at):
        without_mods = replace(problem, spec=replace(problem.spec, scores=()))
        is_made = _is_finite_in_float64(without_mods, *at)
        action = "Mend the score mod." if is_made else "Divide query or scale."
        return f"Scores are not finite in float64 either: {rows} no weights. {action}"
    return (
        f"Scores overflow {compute}, although the queries and the keys that they see are finite: "
        f"{rows} no weights. Divide query or scale, or inspect them as float64. qkv.explain "
        "computes in float64, so its numbers are finite where these are not."
    )


def _is_finite_in_float64(problem: Problem, batch: int, head: int, row: int) -> bool:
    """Whether float64 has the scores of a query row without NaN and plus infinity."""
    scores = Scores(problem, np.dtype(np.float64))
    for start in range(0, problem.spec.kv_len, _BLOCK):
        keys = slice(start, min(start + _BLOCK, problem.spec.kv_len))
        tile = scores.tile(batch, head, np.array([row]), keys)
        if (np.isnan(tile) | np.isposinf(tile)).any():
            return False
    return True


def _wrong(array: Any, batch_size: int) -> Array:
    """Whether each entry is NaN or infinite, `(batch, heads, length, dim)`."""
    if isinstance(array, StoredRows):
        return np.zeros((batch_size, 1, 1, 1), bool)
    wrong = ~np.isfinite(np.asarray(array, np.float64))
    return wrong.reshape(batch_size, *wrong.shape[-3:])


def _first(name: str, array: Any, wrong: Array, first: tuple[int, int]) -> str:
    return f"{name} holds {_number(array, wrong)} first at {_place(wrong, first)}"


def _place(wrong: Array, first: tuple[int, int]) -> str:
    batch, head, row, dim = (int(n) for n in np.argwhere(wrong)[0])
    of_batch = f"batch {batch}, " if wrong.shape[0] > 1 else ""
    return f"{of_batch}head {first[0] + head}, row {first[1] + row}, dim {dim}"


def _number(array: Any, wrong: Array) -> str:
    number = float(np.asarray(array).reshape(wrong.shape)[tuple(np.argwhere(wrong)[0])])
    return "NaN" if np.isnan(number) else "infinity" if number > 0 else "minus infinity"


def _count(rows: Array, first: First) -> str:
    """How many rows, and where the first are."""
    batch, head, _ = (int(n) for n in np.argwhere(rows)[0])
    numbers = [int(n) + first.q_index for n in np.flatnonzero(rows[batch, head])]
    shown = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    of_batch = f"batch {batch}, " if rows.shape[0] > 1 else ""
    total, head = int(rows.sum()), head + first.head
    if total == 1:
        return f"query row {shown} of {of_batch}head {head} has"
    return f"{total} query rows (of {of_batch}head {head}: {shown}) have"


def sentences_of_nan(heads: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many heads of a model have weights that are NaN, and which, if any have.

    `heads` are rows of `ModelRecord.heads()`, of layers that have a query that is not padding.
    """
    wrong = [f"{of['layer']}.{of['head']}" for of in heads if np.isnan(of["entropy"])]
    if not wrong:
        return []
    names = ", ".join(wrong[:_NAMED]) + (", ..." if len(wrong) > _NAMED else "")
    where = f"{len(wrong)} of {len(heads)} heads have weights that are NaN (layer.head {names})"
    return [f"{where} and no kind: look for NaN or infinity in the parameters of the model."]
