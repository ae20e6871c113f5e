"""The part of a problem that the code of a kernel depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from qkv.problem.language.bounds import bounds
from qkv.problem.language.expressions import Const, Load, Node, Op, walk
from qkv.problem.language.intervals import Interval
from qkv.problem.spec import Problem, Spec

Array = NDArray[Any]


def kernel_spec(spec: Spec) -> Spec:
    """The kernel takes sizes of rows at run time; rotation and sinks happen outside it."""
    return replace(spec.kernel_key, head_dim=0, v_head_dim=0, rotation=None, sinks=False)


def integer_bits(problem: Problem) -> int:
    """32 when every integer of the expressions is known to fit, else 64.

    Numbers of rows and heads always fit; integers that are read, computed or written as constants
    are bounded.
    """
    spec = problem.spec
    return bits_of([spec.score, spec.mask], index_bounds(spec), problem.operands.tables)


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
    integers: list[Node] = [n for n in nodes if n.kind == "int" and isinstance(n, Op | Load)]
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
