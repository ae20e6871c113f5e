"""The part of a problem that the code of a kernel depends on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.language.bounds import bounds
from qkv.problem.language.expressions import (
    SCORE,
    Const,
    Kind,
    Load,
    Node,
    Op,
    Var,
    rebuilt,
    walk,
)
from qkv.problem.language.intervals import Interval
from qkv.problem.spec import Problem, Spec

Array = NDArray[Any]


def kernel_spec(spec: Spec) -> Spec:
    """The kernel takes sizes of rows at run time; rotation and sinks happen outside it."""
    return replace(spec.kernel_key, head_dim=0, v_head_dim=0, rotation=None, sinks=False)


def integer_bits(problem: Problem, from_calls: Iterable[Iterable[str]] = ()) -> int:
    """32 when every integer of the expressions is known to fit, else 64.

    Numbers of rows and heads always fit; integers that are read, computed or written as constants
    are bounded. `from_calls` names tables, those of each array that a call brings, which are not
    read: the next call brings others.
    """
    spec, tables = problem.spec, {name for names in from_calls for name in names}
    places, known = index_bounds(spec) | bounds_of_any(spec, tables), any_values(spec, tables)
    return bits_of(with_indices(spec, known), places, problem.operands.tables)


_ANY: Mapping[Kind, Node] = {
    "bool": Op("eq", "bool", (Var("kv_pos"), Const("int", 0))),
    "int": Var("kv_pos"),
    "float": SCORE,
}
"""What stands for any value. Positions have been replaced in the expressions of a problem."""


def any_values(spec: Spec, tables: Collection[str]) -> dict[str, Node]:
    """What stands for an entry of each of these tables, whose values are not known."""
    return {table.name: _ANY[table.kind] for table in spec.tables if table.name in tables}


def bounds_of_any(spec: Spec, tables: Collection[str]) -> dict[str, Interval]:
    """The bounds of what `any_values` gives for integers and truth values."""
    read = [np.iinfo(t.dtype) for t in spec.tables if t.name in tables and t.kind == "int"]
    low, high = min([0, *[int(i.min) for i in read]]), max([1, *[int(i.max) for i in read]])
    return {"kv_pos": Interval.of(low, high)}


def with_indices(spec: Spec, known: Mapping[str, Node]) -> list[Node]:
    """All that is computed of score and mask, if something else stands for reads of some tables:
    both, and the indices of these reads."""
    roots = [spec.score, spec.mask]
    loads = [n for n in walk(*roots) if isinstance(n, Load) and n.table in known]
    indices = [index for load in loads for index in load.indices]
    return [with_reads(node, known) for node in (*roots, *indices)]


def with_reads(node: Node, known: Mapping[str, Node]) -> Node:
    """The node with something else in the place of each read of some tables."""

    def replaced(n: Node, following: tuple[Node, ...]) -> Node:
        match n:
            case Load(table=table, kind=kind):
                return known[table] if table in known else Load(table, kind, following)
            case Op(name=name, kind=kind):
                return Op(name, kind, following)
        return n

    return rebuilt(node, replaced) if known else node


def index_bounds(spec: Spec) -> dict[str, Interval]:
    """Smallest and largest value of each variable that counts rows or heads."""
    sizes = {
        "q_index": spec.q_len,
        "kv_index": spec.kv_len,
        "head": spec.num_heads,
        "batch": spec.batch_size,
    }
    return {name: Interval.of(0, size - 1) for name, size in sizes.items()}


def bits_of(
    roots: Sequence[Node], places: Mapping[str, Interval], arrays: Mapping[str, Array]
) -> int:
    """`integer_bits` of some expressions, whose variables have these bounds."""
    nodes = list(walk(*roots))
    integers: list[Node] = [n for n in nodes if n.kind == "int" and not isinstance(n, Const)]
    # Constants beside floating numbers become such before they are lanes.
    operations = [n for n in nodes if isinstance(n, Op) and n.kind != "float"]
    integers += [
        arg
        for n in operations
        for arg in n.args
        if isinstance(arg, Const) and "float" not in [other.kind for other in n.args]
    ]
    for interval in bounds(integers, places, arrays):
        if interval.low.min() < -(2**31) or interval.high.max() >= 2**31:
            return 64
    return 32
