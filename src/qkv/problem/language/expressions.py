"""The small language in which variants say what they do to a score.

A *node* is a constant, a variable (`q_index`, `kv_index`, `q_pos`, `kv_pos`, `head`, `batch`,
`score`), a read from a table, or an operation. Nodes are immutable and hold no arrays, so they can
be cached, compared, compiled and written to files, and equal ones are one object.
`qkv.problem.language.symbols` is how they are written in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.arguments.declarations import is_integer
from qkv.errors import ArgumentError
from qkv.problem.language.nodes import (
    Const,
    Kind,
    Load,
    Node,
    Number,
    Op,
    Var,
    children,
    computed_first,
    fields_of,
    rebuilt,
    text,
    upwards,
    walk,
)

__all__ = [
    "FALSE", "OPERATIONS", "SCORE", "TRUE", "Const", "Kind", "Load", "Node", "Op", "Operation",
    "Var", "as_node", "children", "computed_first", "conjunction", "constant", "fields_of",
    "operation", "rebuilt", "substitute", "text", "upwards", "walk",
]  # fmt: skip


def _arithmetic(*kinds: Kind) -> Kind:
    return "float" if "float" in kinds else "int"


def _chosen(_condition: Kind, first: Kind, second: Kind) -> Kind:
    return "bool" if first == second == "bool" else _arithmetic(first, second)


@dataclass(frozen=True, slots=True)
class Operation:
    """The argument kinds, result kind and NumPy function of an operation."""

    arity: int
    takes: frozenset[Kind]
    gives: Callable[..., Kind]
    compute: Callable[..., Any]


_ANY: frozenset[Kind] = frozenset({"bool", "int", "float"})
_NUMBERS: frozenset[Kind] = frozenset({"int", "float"})
_INTEGERS: frozenset[Kind] = frozenset({"int"})
_BOOLEANS: frozenset[Kind] = frozenset({"bool"})


def _to_bool(*_: Kind) -> Kind:
    return "bool"


def _to_float(*_: Kind) -> Kind:
    return "float"


def _to_int(*_: Kind) -> Kind:
    return "int"


def _floor(value: Any) -> Any:
    """NaN gives 0 and what is too large saturates, so that an index has bounds."""
    limit = float(2**62)
    whole = np.clip(np.nan_to_num(np.floor(value), nan=0.0), -limit, limit)
    return whole.astype(np.int64)


OPERATIONS: Mapping[str, Operation] = {
    "add": Operation(2, _NUMBERS, _arithmetic, np.add),
    "sub": Operation(2, _NUMBERS, _arithmetic, np.subtract),
    "mul": Operation(2, _NUMBERS, _arithmetic, np.multiply),
    "div": Operation(2, _NUMBERS, _to_float, np.divide),
    "floordiv": Operation(2, _INTEGERS, _to_int, np.floor_divide),
    "mod": Operation(2, _INTEGERS, _to_int, np.mod),
    "min": Operation(2, _NUMBERS, _arithmetic, np.minimum),
    "max": Operation(2, _NUMBERS, _arithmetic, np.maximum),
    "neg": Operation(1, _NUMBERS, _arithmetic, np.negative),
    "abs": Operation(1, _NUMBERS, _arithmetic, np.abs),
    "lt": Operation(2, _NUMBERS, _to_bool, np.less),
    "le": Operation(2, _NUMBERS, _to_bool, np.less_equal),
    "eq": Operation(2, _NUMBERS, _to_bool, np.equal),
    "ne": Operation(2, _NUMBERS, _to_bool, np.not_equal),
    "and": Operation(2, _BOOLEANS, _to_bool, np.logical_and),
    "or": Operation(2, _BOOLEANS, _to_bool, np.logical_or),
    "not": Operation(1, _BOOLEANS, _to_bool, np.logical_not),
    "where": Operation(3, _ANY, _chosen, np.where),
    "exp": Operation(1, _NUMBERS, _to_float, np.exp),
    "log": Operation(1, _NUMBERS, _to_float, np.log),
    "sqrt": Operation(1, _NUMBERS, _to_float, np.sqrt),
    "tanh": Operation(1, _NUMBERS, _to_float, np.tanh),
    "floor": Operation(1, _NUMBERS, _to_int, _floor),
}
"""All operations. `floor` gives an integer; `a > b` and `a >= b` are `b < a` and `b <= a`."""


def constant(value: Number) -> Const:
    """The node of a number; a whole one beyond 64 bits, such as -10**30, is a floating one.

    Raises
    ------
    ArgumentError
        It is beyond the range of float64.
    """
    if isinstance(value, bool | np.bool_):
        return Const("bool", bool(value))
    if is_integer(value) and -(2**63) <= value < 2**63:
        return Const("int", int(value))
    try:
        return Const("float", float(value))
    except OverflowError:
        # The first digits would look like a number that is in the range.
        raise ArgumentError(
            f"a whole number of {int(value).bit_length()} bits is beyond the range of float64.",
            action="Use a smaller number.",
        ) from None


TRUE = constant(True)
FALSE = constant(False)
SCORE = Var("score")


def operation(name: str, *args: Node) -> Node:
    """Build an `Op`, turning booleans into integers where numbers are wanted, folding constants."""
    rule = OPERATIONS[name]
    if name == "where":
        condition, first, second = args
        if condition.kind != "bool":
            raise ArgumentError(
                f"the condition of where is {condition.kind}, not boolean.",
                action="Compare it first: np.where(x != 0, a, b).",
            )
        if first.kind != second.kind:
            first, second = _as_number(first), _as_number(second)
        args = (condition, first, second)
    elif rule.takes == _BOOLEANS:
        for arg in args:
            if arg.kind != "bool":
                raise ArgumentError(
                    f"&, | and ~ combine conditions; an argument is {arg.kind}.",
                    action="Compare it first, as in (q_pos >= kv_pos) & (kv_pos < 4).",
                )
    else:
        args = tuple(_as_number(arg) for arg in args)
        if rule.takes == _INTEGERS and any(arg.kind == "float" for arg in args):
            raise ArgumentError(
                "// and % take integers; an argument is a float.",
                action="Use np.floor(a / b), which gives an integer, instead.",
            )
    simpler = _simplify(name, args)
    if simpler is not None:
        return simpler
    kind = rule.gives(*(arg.kind for arg in args))
    return Op(name, kind, args)


def _as_number(node: Node) -> Node:
    if node.kind != "bool":
        return node
    if isinstance(node, Const):
        return constant(int(node.value))
    return Op("where", "int", (node, constant(1), constant(0)))


def _simplify(name: str, args: tuple[Node, ...]) -> Node | None:
    if name == "floor" and args[0].kind == "int":
        return args[0]
    if name in ("and", "or"):
        decisive, neutral = (FALSE, TRUE) if name == "and" else (TRUE, FALSE)
        if decisive in args:
            return decisive
        left = [arg for arg in args if arg != neutral]
        if len(left) < 2:
            return left[0] if left else neutral
    values = [arg.value for arg in args if isinstance(arg, Const)]
    if len(values) == len(args) and not (name in ("floordiv", "mod") and values[1] == 0):
        with np.errstate(all="ignore"):
            result = OPERATIONS[name].compute(*values)
        if OPERATIONS[name].gives(*(arg.kind for arg in args)) == "int":
            return constant(int(result))
        return constant(result.item() if isinstance(result, np.ndarray | np.generic) else result)
    return None


def substitute(node: Node, replacements: Mapping[str, Node]) -> Node:
    """The node with variables replaced."""

    def changed(n: Node, following: tuple[Node, ...]) -> Node:
        match n:
            case Var(name=name):
                return replacements.get(name, n)
            case Load(table=table, kind=kind):
                return Load(table, kind, following)
            case Op(name=name):
                return operation(name, *following)
        return n

    return rebuilt(node, changed)


def conjunction(nodes: Iterator[Node] | list[Node] | tuple[Node, ...]) -> Node:
    result: Node = TRUE
    for node in nodes:
        result = operation("and", result, node)
    return result


def as_node(value: Any) -> Node:
    """The node of what has one, a symbol of a score mod; itself; or a constant for a number."""
    if isinstance(value, Const | Load | Op | Var):
        return value
    own = getattr(value, "node", None)
    if isinstance(own, Const | Load | Op | Var):
        return own
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        if isinstance(value, float | np.floating) and math.isnan(value):
            raise ArgumentError(
                "NaN is not a constant that a score may use.", action="Write another number."
            )
        return constant(value)  # type: ignore[arg-type]  # NumPy scalars too
    number = getattr(value, "as_number", None)  # Of an array without dimensions.
    if number is not None:
        node: Node = number().node
        return node
    has_one = hasattr(value, "item") and not getattr(value, "shape", True)
    if has_one and not getattr(value, "requires_grad", False):
        return as_node(value.item())
    raise ArgumentError(
        f"{type(value).__name__} cannot be used in a score expression.",
        action="Use numbers, positions, the score, and elements of arrays.",
    )
