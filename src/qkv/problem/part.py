"""A part of a problem: some of its rows and heads, which mean what they mean in the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import UnsupportedError
from qkv.problem.language.expressions import Node, Var, substitute
from qkv.problem.language.symbols import Expr, Table
from qkv.problem.spec import Angles, Positions, Problem, Spec, Stage, TableSpec
from qkv.problem.stored_rows import Rows, storage_of

__all__ = ["PartOf", "check_parts", "placeholder"]

Array = NDArray[Any]

_NAMES = {"q_index": "part_q", "kv_index": "part_kv", "head": "part_head"}
"""The table that holds where the part begins, for each variable of expressions."""


def placeholder(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array without memory of its own, for an operand that no process holds whole."""
    return np.broadcast_to(np.zeros((), dtype), shape)


@dataclass(frozen=True, slots=True)
class PartOf:
    """Which rows and heads of a problem a part has; parts differ in values, not in structure.

    Row i of the part's query is row `q_rows[i]` of the problem: masks, biases and positions are
    read there. The same holds for keys and heads. Sinks are left out, since they belong to the
    whole: they are applied to what `qkv.partial.merge` makes of all parts.

    Attributes
    ----------
    q_rows, kv_rows : range
    heads, kv_heads : range
        Neighbouring heads; `kv_heads` are those that `heads` read.
    """

    q_rows: range
    kv_rows: range
    heads: range
    kv_heads: range

    def of(self, whole: Problem, query: Array, key: Rows, value: Rows) -> Problem:
        """The problem of these rows.

        Parameters
        ----------
        whole : Problem
            Its query, key and value are not read.
        query : array (*batch_shape, heads of the part, q_len of the part, head_dim)
        key, value : array or StoredRows, alike

        Raises
        ------
        UnsupportedError
            If the problem drops weights, which it does by row numbers of whole arrays.
        """
        spec, operands = whole.spec, whole.operands
        check_parts(spec)
        replacements, tables, arrays = self._substitution(whole)
        return Problem(
            replace(
                spec,
                num_heads=len(self.heads),
                num_kv_heads=len(self.kv_heads),
                q_len=len(self.q_rows),
                kv_len=len(self.kv_rows),
                scores=_substituted(spec.scores, replacements),
                masks=_substituted(spec.masks, replacements),
                tables=(*spec.tables, *tables),
                sinks=False,
                key_storage=storage_of(key),
                value_storage=storage_of(value),
            ),
            replace(
                operands,
                query=query,
                key=key,
                value=value,
                tables={**operands.tables, **arrays},
                positions=_positions(operands.positions, self.q_rows, self.kv_rows),
                angles=_angles(operands.angles, self.q_rows, self.kv_rows),
                sinks=None,
                sink_origin=None,
            ),
        )

    def _substitution(
        self, whole: Problem
    ) -> tuple[dict[str, Node], list[TableSpec], dict[str, Array]]:
        """What rows and heads stand for in the expressions, and the tables with their numbers."""
        spec = whole.spec
        read = spec.mask.variables | spec.score.variables
        nodes: dict[str, Node] = {}
        tables: list[TableSpec] = []
        arrays: dict[str, Array] = {}
        for variable, rows in (
            ("q_index", self.q_rows), ("kv_index", self.kv_rows), ("head", self.heads),
        ):  # fmt: skip
            if variable not in read:
                continue
            name = _NAMES[variable]
            start = Table(name, "int", ())[()]
            row = Expr(Var(variable))
            nodes[variable] = ((row if rows.step == 1 else row * rows.step) + start).node
            tables.append(TableSpec(name, f"first {variable}", "int", "int64", 0))
            arrays[name] = np.array(rows.start, np.int64)
        return nodes, tables, arrays


def check_parts(spec: Spec) -> None:
    """Raise UnsupportedError if a problem has no parts, since it drops weights."""
    if spec.dropout:
        raise UnsupportedError(
            "Dropout numbers the rows of a whole problem, and this is a part of one.",
            action="Leave Dropout out, or use it where one process holds the sequence.",
        )


def _substituted(stages: tuple[Stage, ...], nodes: Mapping[str, Node]) -> tuple[Stage, ...]:
    return tuple([Stage(stage.label, substitute(stage.node, nodes)) for stage in stages])


def _positions(whole: Positions, q_rows: range, kv_rows: range) -> Positions:
    q_rank, q_shift = _ranks(whole.q_rank, whole.q_shift, q_rows)
    kv_rank, kv_shift = _ranks(whole.kv_rank, whole.kv_shift, kv_rows)
    return Positions(q_rank, kv_rank, q_shift, kv_shift, whole.align)


def _ranks(rank: Array | int, shift: Array, rows: range) -> tuple[Array | int, Array]:
    if not isinstance(rank, int):
        return rank[:, rows.start : rows.stop : rows.step], shift
    if rows.step == 1:
        return len(rows), shift + rows.start
    return np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)[None], shift


def _angles(whole: Angles | None, q_rows: range, kv_rows: range) -> Angles | None:
    if whole is None:
        return None
    return replace(
        whole,
        q_pos=whole.q_pos[:, q_rows.start : q_rows.stop : q_rows.step],
        kv_pos=whole.kv_pos[:, kv_rows.start : kv_rows.stop : kv_rows.step],
    )
