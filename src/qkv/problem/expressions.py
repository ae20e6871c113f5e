"""The small language in which variants say what they do to a score.

A *node* is immutable, hashable data: a constant, a variable (`q_index`, `kv_index`, `q_pos`,
`kv_pos`, `head`, `batch`, `score`), a read from a table, or an operation. Nodes hold no arrays, so
they can be cached, compared, compiled and written to files. An `Expr` is the face that code which
builds nodes sees: it has Python's operators and answers NumPy's functions, so that a score mod
reads like the formula in its paper:

    np.where(q_pos >= kv_pos, cap * np.tanh(score / cap), -np.inf)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from qkv.errors import ArgumentError

Kind: TypeAlias = Literal["bool", "int", "float"]
Number: TypeAlias = bool | int | float

VARIABLES: Mapping[str, Kind] = {
    "q_index": "int",
    "kv_index": "int",
    "q_pos": "int",
    "kv_pos": "int",
    "head": "int",
    "batch": "int",
    "score": "float",
}


@dataclass(frozen=True, slots=True)
class Const:
    """A number written into the expression."""

    kind: Kind
    value: Number


@dataclass(frozen=True, slots=True)
class Var:
    """One of `VARIABLES`."""

    name: str

    @property
    def kind(self) -> Kind:
        return VARIABLES[self.name]


@dataclass(frozen=True, slots=True)
class Load:
    """One element of a table; indices are integers, one for each dimension, zero-based."""

    table: str
    kind: Kind
    indices: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of `OPERATIONS` on its arguments."""

    name: str
    kind: Kind
    args: tuple[Node, ...]


Node: TypeAlias = Const | Var | Load | Op


def _arithmetic(*kinds: Kind) -> Kind:
    return "float" if "float" in kinds else "int"


def _chosen(_condition: Kind, first: Kind, second: Kind) -> Kind:
    return "bool" if first == second == "bool" else _arithmetic(first, second)


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operation takes, gives and computes; integer division and remainder floor."""

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
    """NaN gives 0 and what is too large saturates, so that an index stays provable."""
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
"""All operations. `floor` gives an integer; comparisons with > and >= are `lt` and `le` turned."""


def constant(value: Number) -> Const:
    if isinstance(value, bool | np.bool_):
        return Const("bool", bool(value))
    if isinstance(value, int | np.integer):
        return Const("int", int(value))
    return Const("float", float(value))


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
    if name == "and":
        if FALSE in args:
            return FALSE
        left = [arg for arg in args if arg != TRUE]
        if len(left) < 2:
            return left[0] if left else TRUE
    if name == "or":
        if TRUE in args:
            return TRUE
        left = [arg for arg in args if arg != FALSE]
        if len(left) < 2:
            return left[0] if left else FALSE
    values = [arg.value for arg in args if isinstance(arg, Const)]
    if len(values) == len(args) and not (name in ("floordiv", "mod") and values[1] == 0):
        with np.errstate(all="ignore"):
            result = OPERATIONS[name].compute(*values)
        if OPERATIONS[name].gives(*(arg.kind for arg in args)) == "int":
            return constant(int(result))
        return constant(result.item() if isinstance(result, np.ndarray | np.generic) else result)
    return None


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Load(indices=indices):
            return indices
        case Op(args=args):
            return args
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it."""
    yield node
    for child in children(node):
        yield from walk(child)


def variables(node: Node) -> frozenset[str]:
    return frozenset(n.name for n in walk(node) if isinstance(n, Var))


def tables(node: Node) -> frozenset[str]:
    return frozenset(n.table for n in walk(node) if isinstance(n, Load))


def substitute(node: Node, replacements: Mapping[str, Node]) -> Node:
    """The node with variables replaced."""
    match node:
        case Var(name=name):
            return replacements.get(name, node)
        case Load(table=table, kind=kind, indices=indices):
            return Load(table, kind, tuple(substitute(i, replacements) for i in indices))
        case Op(name=name, args=args):
            return operation(name, *(substitute(arg, replacements) for arg in args))
        case _:
            return node


def conjunction(nodes: Iterator[Node] | list[Node] | tuple[Node, ...]) -> Node:
    result: Node = TRUE
    for node in nodes:
        result = operation("and", result, node)
    return result


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%",
    "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip


def text(node: Node) -> str:
    """The node as a formula, for messages and reports."""
    match node:
        case Const(value=value):
            return f"{value:g}" if isinstance(value, float) else str(value)
        case Var(name=name):
            return name
        case Load(table=table, indices=indices):
            return f"{table}[{', '.join(map(text, indices))}]"
        case Op(name=name, args=args) if name in _INFIX:
            return f"({text(args[0])} {_INFIX[name]} {text(args[1])})"
        case Op(name=name, args=args):
            return f"{name}({', '.join(map(text, args))})"


_UFUNCS: Mapping[Any, str] = {
    np.add: "add",
    np.subtract: "sub",
    np.multiply: "mul",
    np.true_divide: "div",
    np.floor_divide: "floordiv",
    np.remainder: "mod",
    np.minimum: "min",
    np.maximum: "max",
    np.negative: "neg",
    np.absolute: "abs",
    np.less: "lt",
    np.less_equal: "le",
    np.equal: "eq",
    np.not_equal: "ne",
    np.logical_and: "and",
    np.logical_or: "or",
    np.logical_not: "not",
    np.bitwise_and: "and",
    np.bitwise_or: "or",
    np.invert: "not",
    np.exp: "exp",
    np.log: "log",
    np.sqrt: "sqrt",
    np.tanh: "tanh",
    np.floor: "floor",
}


class Expr:
    """A node with Python's operators; what score mods and `lower` compute with."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"Expr({text(self.node)})"

    def __bool__(self) -> bool:
        raise ArgumentError(
            "a condition on positions or scores has no single truth value.",
            [("condition", text(self.node))],
            "Write np.where(condition, a, b) instead of if, and &, |, ~ instead of and, or, not.",
        )

    def _refuse_number(self) -> Any:
        raise ArgumentError(
            "a position or score has no single value here.",
            [("expression", text(self.node))],
            "Use operators and np.where, np.exp, np.tanh, ... rather than float(), int() or math.",
        )

    __float__ = __int__ = __index__ = __len__ = __iter__ = _refuse_number

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            return NotImplemented
        if ufunc in (np.greater, np.greater_equal):
            turned = np.less if ufunc is np.greater else np.less_equal
            return self.__array_ufunc__(turned, method, *inputs[::-1])
        name = _UFUNCS.get(ufunc)
        if name is None:
            raise ArgumentError(
                f"np.{ufunc.__name__} is not part of the expression language.",
                [("has", ", ".join(sorted(f"np.{u.__name__}" for u in _UFUNCS)) + ", np.where")],
                "Write it with these.",
            )
        return build(name, *inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.where and len(args) == 3 and not kwargs:
            return build("where", *args)
        if func is np.clip and len(args) == 3 and not kwargs:
            return build("max", build("min", args[0], args[2]), args[1])
        raise ArgumentError(
            f"np.{func.__name__} is not part of the expression language.",
            [("has", "np.where(condition, a, b), np.clip(x, low, high) and arithmetic")],
            "Write it with these.",
        )

    def __add__(self, other: Any) -> Expr:
        return build("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return build("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return build("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return build("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return build("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return build("mul", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return build("div", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return build("div", other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return build("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return build("floordiv", other, self)

    def __mod__(self, other: Any) -> Expr:
        return build("mod", self, other)

    def __rmod__(self, other: Any) -> Expr:
        return build("mod", other, self)

    def __neg__(self) -> Expr:
        return build("neg", self)

    def __abs__(self) -> Expr:
        return build("abs", self)

    def __lt__(self, other: Any) -> Expr:
        return build("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return build("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return build("lt", other, self)

    def __ge__(self, other: Any) -> Expr:
        return build("le", other, self)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return build("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return build("ne", self, other)

    def __and__(self, other: Any) -> Expr:
        return build("and", self, other)

    def __rand__(self, other: Any) -> Expr:
        return build("and", other, self)

    def __or__(self, other: Any) -> Expr:
        return build("or", self, other)

    def __ror__(self, other: Any) -> Expr:
        return build("or", other, self)

    def __invert__(self) -> Expr:
        return build("not", self)


def as_node(value: Any) -> Node:
    """The node of an `Expr`, or a constant for a plain number."""
    if isinstance(value, Expr):
        return value.node
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        if isinstance(value, float | np.floating) and math.isnan(value):
            raise ArgumentError("NaN is not a constant that a score may use.")
        return constant(value)  # type: ignore[arg-type]
    raise ArgumentError(
        f"{type(value).__name__} cannot be used in a score expression.",
        action="Use numbers, positions, the score, and elements of arrays.",
    )


def build(name: str, *args: Any) -> Expr:
    """`operation` on anything that `as_node` takes."""
    return Expr(operation(name, *map(as_node, args)))


class Table:
    """An array inside the language: indexed by expressions, one integer for each dimension."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("kind", "name", "shape")

    def __init__(self, name: str, kind: Kind, shape: tuple[int, ...]) -> None:
        self.name = name
        self.kind = kind
        self.shape = shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Expr:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != len(self.shape):
            raise ArgumentError(
                f"a table of {self.ndim} dimensions was read with {len(indices)} indices.",
                [("table", f"{self.name} {self.shape}")],
                "Give one integer index for each dimension.",
            )
        nodes = []
        for i, size in zip(indices, self.shape, strict=True):
            node = as_node(i)
            if node.kind != "int":
                raise ArgumentError(
                    f"a table index is {node.kind}, not an integer.",
                    [("table", self.name), ("index", text(node))],
                    "Use np.floor(x), which gives an integer.",
                )
            if isinstance(node, Const) and node.value < 0:
                node = constant(node.value + size)
            nodes.append(node)
        return Expr(Load(self.name, self.kind, tuple(nodes)))
