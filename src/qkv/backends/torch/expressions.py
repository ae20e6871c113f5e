"""Expressions as operations of torch, on the device of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qkv.problem.expressions import Const, Load, Node, Op, Var

__all__ = ["TensorEvaluation"]

_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floordiv": partial(torch.div, rounding_mode="floor"), "mod": torch.remainder,
    "min": torch.minimum, "max": torch.maximum, "neg": torch.neg, "abs": torch.abs,
    "lt": torch.lt, "le": torch.le, "eq": torch.eq, "ne": torch.ne,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": torch.where, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "tanh": torch.tanh, "floor": lambda x: x.floor().to(torch.int64),
}  # fmt: skip


@dataclass(slots=True)
class TensorEvaluation:
    """Values of expressions on a device."""

    variables: Mapping[str, Tensor]
    tables: Mapping[str, Tensor]
    dtype: torch.dtype

    def value(self, node: Node) -> Tensor:
        match node:
            case Const(kind=kind, value=number):
                device = self.variables["q_index"].device
                dtype = self.dtype if kind == "float" else None
                return torch.tensor(number, dtype=dtype, device=device)
            case Var(name=name):
                return self.variables[name]
            case Load(table=table, indices=indices):
                tensor = self.tables[table]
                # A constant index stays an int, because reading it from the device is slow.
                index = tuple(
                    int(i.value) if isinstance(i, Const) else self.value(i) for i in indices
                )
                return tensor[index] if indices else tensor
            case Op(name=name, kind=kind, args=args):
                values = [self.value(arg) for arg in args]
                if "float" in [arg.kind for arg in args] or (kind == "float" and name != "where"):
                    values = [
                        v.to(self.dtype) if arg.kind == "int" else v
                        for v, arg in zip(values, args, strict=True)
                    ]
                return _OPERATIONS[name](*values)
        raise AssertionError(node)
