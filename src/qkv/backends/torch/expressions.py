"""Expressions as operations of torch, on the device of the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from qkv.problem.language.expressions import (
    Const,
    Load,
    Node,
    Op,
    Var,
    children,
    constant,
    operation,
    rebuilt,
    upwards,
    walk,
)

__all__ = ["TensorEvaluation", "with_chosen_pieces"]


def _floor(x: Tensor) -> Tensor:
    """The floor as `OPERATIONS` defines it: NaN gives 0, and what is too large saturates."""
    whole = x.floor().nan_to_num(0.0, torch.inf, -torch.inf)
    return whole.clamp(-(2.0**62), 2.0**62).to(torch.int64)


_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floordiv": partial(torch.div, rounding_mode="floor"), "mod": torch.remainder,
    "min": torch.minimum, "max": torch.maximum, "neg": torch.neg, "abs": torch.abs,
    "lt": torch.lt, "le": torch.le, "eq": torch.eq, "ne": torch.ne,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": torch.where, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "tanh": torch.tanh, "floor": _floor,
}  # fmt: skip


@dataclass(slots=True)
class TensorEvaluation:
    """Values of expressions on a device.

    Where `allowed` is given, what floating tables hold for other pairs is read as 0, so that no
    gradient comes back from these.
    """

    variables: Mapping[str, Tensor]
    tables: Mapping[str, Tensor]
    dtype: torch.dtype
    allowed: Tensor | None = None

    def value(self, node: Node) -> Tensor:
        order = list(upwards(node))
        users = Counter(child for n in order for child in children(n))
        known: dict[Node, Tensor] = {}
        for n in order:
            if not isinstance(n, Const):
                known[n] = self._value(n, known)
            for child in children(n):
                users[child] -= 1
                if not users[child]:  # Its memory is free again.
                    known.pop(child, None)
        return self._constant(node) if isinstance(node, Const) else known[node]

    def _constant(self, node: Const) -> Tensor:
        dtype = self.dtype if node.kind == "float" else None
        return torch.tensor(node.value, dtype=dtype, device=self.variables["q_index"].device)

    def _value(self, node: Var | Load | Op, known: Mapping[Node, Tensor]) -> Tensor:
        match node:
            case Var(name=name):
                return self.variables[name]
            case Load(table=table, kind=kind, indices=indices):
                tensor = self.tables[table]
                # A constant index stays an int, because reading it from the device is slow.
                index = tuple(int(i.value) if isinstance(i, Const) else known[i] for i in indices)
                entries = tensor[index] if indices else tensor
                # Narrow integers would wrap around, and torch computes with no wide unsigned ones.
                if kind == "int":
                    return entries.to(torch.int64)
                if self.allowed is None or not entries.is_floating_point():
                    return entries
                return torch.where(self.allowed, entries, 0.0)
        name, args = node.name, node.args
        values = [self._constant(a) if isinstance(a, Const) else known[a] for a in args]
        if "float" in [arg.kind for arg in args] or (node.kind == "float" and name != "where"):
            values = [
                v.to(self.dtype) if arg.kind == "int" else v
                for v, arg in zip(values, args, strict=True)
            ]
        return _OPERATIONS[name](*values)


_WITHOUT_BOUND = frozenset({"div", "log", "sqrt", "exp"})
"""Operations whose slope may be infinite or NaN."""

_MOST_NODES = 1000
"""Nodes from which on the pieces of a choice stay as they are. Each choice among choices would
double their number."""


def with_chosen_pieces(node: Node) -> Node:
    """The expression with the same values, in which pieces that are not chosen read 0.

    torch multiplies the gradient of such a piece, 0, with its slope, and 0 * NaN is NaN. What a
    piece reads is therefore chosen by the same condition as the piece.
    """
    return rebuilt(node, _choose_pieces)


def _choose_pieces(node: Node, args: tuple[Node, ...]) -> Node:
    match node:
        case Load(table=table, kind=kind):
            return Load(table, kind, args)
        case Op(name="where", kind="float") if _may_be_steep(args[1:]):
            return _where(*args)
        case Op(name="min" | "max" as name, kind="float") if _may_be_steep(args):
            less, more = args if name == "min" else args[::-1]
            mean = operation("add", *(operation("mul", constant(0.5), arg) for arg in args))
            others = _where(operation("lt", more, less), args[1], mean)
            return _where(operation("lt", less, more), args[0], others)
        case Op(name=name, kind=kind):
            return Op(name, kind, args)
    return node


def _may_be_steep(pieces: Sequence[Node]) -> bool:
    """Whether the slope of one of these pieces may be infinite or NaN; False if they are large."""
    parts = list(islice(walk(*pieces), _MOST_NODES))
    operations = [part for part in parts if isinstance(part, Op)]
    reads = any(isinstance(part, Load) and part.kind == "float" for part in parts)
    steep = any(
        (part.name in _WITHOUT_BOUND and not isinstance(part.args[-1], Const))
        or (reads and part.name == "mul")
        for part in operations
    )
    return steep and len(parts) < _MOST_NODES


def _where(condition: Node, first: Node, second: Node) -> Node:
    otherwise = operation("not", condition)
    pieces = _read_where(condition, first), _read_where(otherwise, second)
    return operation("where", condition, *pieces)


def _read_where(condition: Node, piece: Node) -> Node:
    """The piece, which reads 0 for floating numbers where the condition does not hold."""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        match node:
            case Load(table=table, kind=kind):
                node = Load(table, kind, args)
            case Op(name=name, kind=kind):
                return Op(name, kind, args)
        reads = isinstance(node, Var | Load) and node.kind == "float"
        return operation("where", condition, node, constant(0.0)) if reads else node

    return rebuilt(piece, change)
