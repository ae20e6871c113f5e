"""Expressions on NumPy arrays: what every readable path uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.expressions import OPERATIONS, Const, Load, Node, Op, Var

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
    known: dict[Node, Any] = {}

    def value(n: Node) -> Any:
        if n in known:
            return known[n]
        match n:
            case Const(kind="float", value=v):
                with np.errstate(over="ignore"):
                    result: Any = dtype.type(v)
            case Const(value=v):
                result = v
            case Var(name=name):
                result = variables[name]
            case Load(table=table, kind=kind, indices=indices):
                result = tables[table][tuple(value(i) for i in indices)]
                if kind == "float":
                    result = _narrowed(np.asarray(result), dtype)
                elif kind == "int":
                    result = np.asarray(result).astype(np.int64)
            case Op():
                result = _apply(n)
        known[n] = result
        return result

    def _apply(op: Op) -> Any:
        rule = OPERATIONS[op.name]
        args = [value(arg) for arg in op.args]
        kinds = [arg.kind for arg in op.args]
        if "float" in kinds or (op.kind == "float" and op.name != "where"):
            args = [
                np.asarray(arg).astype(dtype, copy=False) if kind == "int" else arg
                for arg, kind in zip(args, kinds, strict=True)
            ]
        with np.errstate(all="ignore"):
            return rule.compute(*args)

    return value(node)


def _narrowed(values: Array, dtype: np.dtype[Any]) -> Array:
    """Table elements in the type of computation; what is finite stays finite."""
    if values.dtype.itemsize <= dtype.itemsize:
        return values.astype(dtype, copy=False)
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    limit = np.finfo(dtype).max
    return np.where(np.isinf(values), narrow, np.clip(narrow, -limit, limit))
