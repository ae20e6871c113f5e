"""The nodes of expressions: graphs without arrays, in which equal parts are one object."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Literal, Self, TypeAlias
from weakref import WeakValueDictionary

from qkv.process.forks import RenewedLock

__all__ = [
    "VARIABLES", "Const", "Kind", "Load", "Node", "Number", "Op", "Var", "children", "fields_of",
    "from_words", "in_words", "rebuilt", "text", "upwards", "walk",
]  # fmt: skip

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


class _Node:
    """What nodes have in common: there is one object for all equal ones.

    Expressions are graphs, in which a part that is used twice is one node with two users. Equal
    nodes are the same object, so that they are compared and hashed by identity, at no cost.

    Attributes
    ----------
    height : int
        Number of nodes on the longest path down from it.
    variables, tables : frozenset of str
        What the node or anything below it reads.
    """

    __match_args__: tuple[str, ...] = ()
    __slots__ = ("__weakref__", "height", "kind", "tables", "variables")

    kind: Kind
    height: int
    variables: frozenset[str]
    tables: frozenset[str]

    def __repr__(self) -> str:
        return f"<{text(self)}>"  # type: ignore[arg-type]  # every node is one of `Node`

    def __reduce__(self) -> tuple[Any, ...]:
        # A list of all nodes, since pickle would go down an expression by recursion.
        return from_words, (in_words(self),)  # type: ignore[arg-type]  # every node is one of `Node`

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: Any) -> Self:
        return self


def fields_of(node: _Node) -> tuple[Any, ...]:
    """What a node is made from, in the order of its class's arguments."""
    return tuple(getattr(node, name) for name in type(node).__match_args__)


_Key: TypeAlias = tuple[Any, ...]
_NODES: WeakValueDictionary[_Key, Any] = WeakValueDictionary()
_find = _NODES.get
_RECENT: deque[_Node] = deque(maxlen=4096)
"""Nodes that are kept alive, since calls like the last ones make them again."""
_EXCLUSIVE = RenewedLock()

_NOTHING: frozenset[str] = frozenset()


def _new(key: _Key, fields: tuple[Any, ...], parts: tuple[Node, ...], **own: Any) -> Any:
    """The one node of a key, from its fields, the nodes below it, and attributes of its own."""
    cls = key[0]
    made = object.__new__(cls)
    for name, value in zip(cls.__match_args__, fields, strict=True):
        setattr(made, name, value)
    made.height = 1 + max([part.height for part in parts], default=0)
    made.variables = _union([part.variables for part in parts])
    made.tables = _union([part.tables for part in parts])
    for name, value in own.items():
        setattr(made, name, value)
    with _EXCLUSIVE.lock:
        node = _NODES.setdefault(key, made)
    _RECENT.append(node)
    return node


def _union(parts: list[frozenset[str]]) -> frozenset[str]:
    """One of the sets if it holds all others: most of an expression reads the same."""
    whole = max(parts, key=len, default=_NOTHING)
    return whole if all(part <= whole for part in parts) else _NOTHING.union(*parts)


class Const(_Node):
    """A number written into the expression."""

    __match_args__ = ("kind", "value")
    __slots__ = ("value",)
    value: Number

    def __new__(cls, kind: Kind, value: Number) -> Const:
        # 0.0 and -0.0 are equal numbers, and NaN equals nothing; their digits tell them apart.
        key = (cls, kind, value.hex() if isinstance(value, float) else value)
        node: Const | None = _find(key)
        return node if node is not None else _new(key, (kind, value), ())


class Var(_Node):
    """One of `VARIABLES`."""

    __match_args__ = ("name",)
    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str) -> Var:
        key = (cls, name)
        node: Var | None = _find(key)
        if node is None:
            node = _new(key, (name,), (), kind=VARIABLES[name], variables=frozenset({name}))
        return node


class Load(_Node):
    """One element of a table; indices are integers, one for each dimension, zero-based."""

    __match_args__ = ("table", "kind", "indices")
    __slots__ = ("indices", "table")
    table: str
    indices: tuple[Node, ...]

    def __new__(cls, table: str, kind: Kind, indices: tuple[Node, ...]) -> Load:
        key = (cls, table, kind, indices)
        node: Load | None = _find(key)
        if node is None:
            below = _union([index.tables for index in indices])
            node = _new(key, (table, kind, indices), indices, tables=below | {table})
        return node


class Op(_Node):
    """An operation of `OPERATIONS` on its arguments."""

    __match_args__ = ("name", "kind", "args")
    __slots__ = ("args", "name")
    name: str
    args: tuple[Node, ...]

    def __new__(cls, name: str, kind: Kind, args: tuple[Node, ...]) -> Op:
        key = (cls, name, kind, args)
        node: Op | None = _find(key)
        return node if node is not None else _new(key, (name, kind, args), args)


Node: TypeAlias = Const | Var | Load | Op


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Load(indices=indices):
            return indices
        case Op(args=args):
            return args
        case _:
            return ()


def walk(*roots: Node) -> Iterator[Node]:
    """The nodes and everything below them, each once, users before what they use."""
    seen: set[Node] = set()
    waiting = list(reversed(roots))
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting.extend(reversed(children(node)))


def upwards(node: Node, known: Container[Node] = ()) -> Iterator[Node]:
    """The node and everything below it, each once, after all that it uses.

    What is `known`, which may grow meanwhile, is left out with what only it uses. Whoever computes
    a value for each node in this order needs no recursion.
    """
    done: set[Node] = set()
    waiting = [(node, False)]
    while waiting:
        n, is_entered = waiting.pop()
        if is_entered:
            yield n
        elif n not in done and n not in known:
            done.add(n)
            waiting.append((n, True))
            waiting.extend((child, False) for child in reversed(children(n)))


_DEEPEST = 64


def computed_first(node: Node, known: Container[Node]) -> list[Node]:
    """Parts to compute before `node`, in order, so that no recursion is deeper than `_DEEPEST`.

    There are none in expressions that are no deeper than that, as almost all are.
    """
    if node.height <= _DEEPEST:
        return []
    return [n for n in upwards(node, known) if n.height % _DEEPEST == 0 and n is not node]


def rebuilt(node: Node, change: Callable[[Node, tuple[Node, ...]], Node]) -> Node:
    """The node built anew from the bottom; `change` is given a node and its new children."""
    new: dict[Node, Node] = {}
    for n in upwards(node):
        new[n] = change(n, tuple([new[child] for child in children(n)]))
    return new[node]


def in_words(root: Node) -> list[Any]:
    """An expression as JSON values: a list of steps, which may name earlier ones by number."""
    places: dict[Node, int] = {}
    steps: list[Any] = []
    step: list[Any]
    for node in upwards(root):
        match node:
            case Const(kind=kind, value=value):
                step = ["const", kind, value.hex() if isinstance(value, float) else value]
            case Var(name=name):
                step = ["var", name]
            case Load(table=table, kind=kind, indices=indices):
                step = ["load", table, kind, [places[i] for i in indices]]
            case Op(name=name, kind=kind, args=args):
                step = ["op", name, kind, [places[a] for a in args]]
        places[node] = len(steps)
        steps.append(step)
    return steps


def from_words(steps: list[Any]) -> Node:
    """The expression that `in_words` wrote."""
    made: list[Node] = []
    for what, *rest in steps:
        if what == "const":
            kind, value = rest
            made.append(Const(kind, float.fromhex(value) if isinstance(value, str) else value))
        elif what == "var":
            made.append(Var(rest[0]))
        elif what == "load":
            table, kind, indices = rest
            made.append(Load(table, kind, tuple([made[i] for i in indices])))
        else:
            name, kind, args = rest
            made.append(Op(name, kind, tuple([made[a] for a in args])))
    return made[-1]


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%",
    "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip


_LONGEST_TEXT = 2000


def text(node: Node) -> str:
    """The node as a formula, for messages and reports; the beginning of a very long one."""
    written: list[str] = []
    length = 0
    waiting: list[Node | str] = [node]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, str):
            waiting.extend(reversed(_pieces(part)))
            continue
        written.append(part)
        length += len(part)
        if length > _LONGEST_TEXT:
            return "".join(written)[:_LONGEST_TEXT] + " ..."
    return "".join(written)


def _pieces(node: Node) -> list[Node | str]:
    """The formula of a node, with those of its children still to be written."""
    match node:
        case Const(value=value):
            return [f"{value:g}" if isinstance(value, float) else str(value)]
        case Var(name=name):
            return [name]
        case Op(name=name, args=args) if name in _INFIX:
            return ["(", args[0], f" {_INFIX[name]} ", args[1], ")"]
    opening, closing = (f"{node.table}[", "]") if isinstance(node, Load) else (f"{node.name}(", ")")
    listed: list[Node | str] = []
    for child in children(node):
        listed += [", ", child] if listed else [child]
    return [opening, *listed, closing]
