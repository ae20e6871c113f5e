"""Expressions on NumPy arrays: what every readable path uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.language.expressions import OPERATIONS, Const, Load, Node, Op, Var, upwards

Array = NDArray[Any]


def evaluate(
    node: Node,
    variables: Mapping[str, Any],
    tables: Mapping[str, Array],
    dtype: np.dtype[Any],
) -> Any:
    """The value of `node`, broadcast over its variables.

    `variables` holds integers or integer arrays (and the scores, of `dtype`) that broadcast with
    one another; floating arithmetic runs in `dtype`, integer arithmetic in int64.
    """
    return _Evaluation(variables, tables, dtype).value(node)


class _Evaluation:
    """Values of nodes, each computed once.

    A recursive closure would be a reference cycle, which would keep the arrays of a tile until the
    next garbage collection; an object is none.
    """

    def __init__(
        self, variables: Mapping[str, Any], tables: Mapping[str, Array], dtype: np.dtype[Any]
    ) -> None:
        self.variables, self.tables, self.dtype = variables, tables, dtype
        self.known: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        for n in upwards(node, self.known):
            self.known[n] = self._value(n)
        return self.known[node]

    def _value(self, n: Node) -> Any:
        match n:
            case Const(kind="float", value=v):
                with np.errstate(over="ignore"):
                    return self.dtype.type(v)
            case Const(value=v):
                return v
            case Var(name=name):
                return self.variables[name]
            case Load(table=table, kind=kind, indices=indices):
                read = self.tables[table][tuple([self.known[i] for i in indices])]
                if kind == "float":
                    return _narrowed(np.asarray(read), self.dtype)
                return np.asarray(read).astype(np.int64) if kind == "int" else read
            case Op():
                return self._apply(n)

    def _apply(self, op: Op) -> Any:
        rule = OPERATIONS[op.name]
        args = [self.known[arg] for arg in op.args]
        kinds = [arg.kind for arg in op.args]
        if "float" in kinds or (op.kind == "float" and op.name != "where"):
            args = [
                np.asarray(arg).astype(self.dtype, copy=False) if kind == "int" else arg
                for arg, kind in zip(args, kinds, strict=True)
            ]
        with np.errstate(all="ignore"):
            return rule.compute(*args)


def _narrowed(values: Array, dtype: np.dtype[Any]) -> Array:
    """Table elements in the type of computation; what is finite stays finite."""
    if values.dtype.itemsize <= dtype.itemsize:
        return values.astype(dtype, copy=False)
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    limit = np.finfo(dtype).max
    return np.where(np.isinf(values), narrow, np.clip(narrow, -limit, limit))
