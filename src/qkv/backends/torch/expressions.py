"""Expressions as operations of torch, on the device of the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qkv.problem.language.expressions import Const, Load, Node, Op, Var, children, upwards

__all__ = ["TensorEvaluation"]


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
