"""Score mods and masks as functions of Triton, written as text.

A kernel is one Python function for all problems, and takes these functions as constants. What
depends on rows alone, Triton's compiler takes out of the loop over keys.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np

from qkv.problem.language.derivative import derivative
from qkv.problem.language.expressions import SCORE, TRUE, Const, Load, Node, Op, Var, upwards

__all__ = ["Functions", "functions"]

_OPERATIONS: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "tl.div_rn({0}, {1})",
    "floordiv": "floored_quotient({0}, {1})", "mod": "floored_remainder({0}, {1})",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "neg": "-{0}", "abs": "tl.abs({0})",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "not": "{0} == 0", "where": "tl.where({0}, {1}, {2})",
    "exp": "tl.exp({0})", "log": "tl.log({0})", "sqrt": "tl.sqrt_rn({0})", "tanh": "tanh({0})",
    "floor": "floored({0}, {index})",
}  # fmt: skip

_HEAD = """
import triton
import triton.language as tl
from qkv.backends.torch.triton.kernels.elementary import (
    floored, floored_quotient, floored_remainder, tanh,
)
"""

_FUNCTION = """
@triton.jit
def {name}(score, q_index, kv_index, head, batch, tables, strides):
{lines}
    return {result}
"""


@dataclass(frozen=True, slots=True)
class Functions:
    """What one problem does to a score.

    Attributes
    ----------
    modify, slope, allows : triton.JITFunction
        The score after the mods, its derivative by the score, and whether a pair is allowed.
    modifies, masks : bool
        Whether there is a score mod and a mask.
    """

    modify: Any
    slope: Any
    allows: Any
    modifies: bool
    masks: bool


@lru_cache(maxsize=256)
def functions(
    score: Node, mask: Node, tables: tuple[tuple[str, int], ...], index: str
) -> Functions:
    """The functions of a problem.

    Parameters
    ----------
    score, mask : Node
    tables : tuple of (name, ndim)
        In the order in which kernels are given the tables.
    index : str
        The type of integers, "int32" or "int64".
    """
    nodes = {"modify": score, "slope": derivative(score), "allows": mask}
    source = _HEAD + "".join(
        _function(name, node, tables, index).lstrip("\n") for name, node in nodes.items()
    )
    made = _defined(source)
    return Functions(made["modify"], made["slope"], made["allows"], score != SCORE, mask != TRUE)


def _function(name: str, node: Node, tables: Sequence[tuple[str, int]], index: str) -> str:
    """One function, a line for each operation."""
    places = {table: place for place, (table, _) in enumerate(tables)}
    first_stride = dict(
        zip(places, np.cumsum([0, *(ndim for _, ndim in tables)]).tolist(), strict=False)
    )
    known: dict[Node, str] = {}
    lines: list[str] = []
    for n in upwards(node):
        if isinstance(n, Const):
            known[n] = _constant(n)
            continue
        if isinstance(n, Var):
            known[n] = n.name
            continue
        if isinstance(n, Load):
            text = _load(n, places[n.table], first_stride[n.table], known)
        else:
            text = _OPERATIONS[n.name].format(*_arguments(n, known), index=f"tl.{index}")
        known[n] = f"x{len(lines)}"
        lines.append(f"    {known[n]} = {text}")
    result = known[node]
    if isinstance(node, Const):
        dtype = {"bool": "tl.int1", "int": f"tl.{index}", "float": "tl.float32"}[node.kind]
        result = f"tl.full((1, 1), {result}, {dtype})"
    return _FUNCTION.format(name=name, lines="\n".join(lines), result=result)


def _constant(node: Const) -> str:
    if node.kind != "float":
        return repr(int(node.value))
    with np.errstate(over="ignore"):
        value = float(np.float32(node.value))  # Else Triton would compute in float64.
    smallest = float(np.finfo(np.float32).tiny)
    if not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if value == 0 or abs(value) >= smallest else "0.0"


def _load(node: Load, place: int, first_stride: int, known: Mapping[Node, str]) -> str:
    terms = [
        f"{known[index]} * strides[{first_stride + axis}]"
        for axis, index in enumerate(node.indices)
        if not (isinstance(index, Const) and index.value == 0)
    ]
    loaded = f"tl.load({' + '.join([f'tables[{place}]', *terms])})"
    return f"({loaded} != 0)" if node.kind == "bool" else loaded


def _arguments(node: Op, known: Mapping[Node, str]) -> list[str]:
    """Arguments, as floating numbers where one of them or the result is one."""
    texts = [known[arg] for arg in node.args]
    kinds = [arg.kind for arg in node.args]
    if "float" not in kinds and (node.kind != "float" or node.name == "where"):
        return texts
    return [
        text if kind != "int" else f"{float(int(text))!r}" if isinstance(arg, Const)
        else f"{text}.to(tl.float32)"
        for text, kind, arg in zip(texts, kinds, node.args, strict=True)
    ]  # fmt: skip


def _defined(source: str) -> dict[str, Any]:
    """The functions of a text. Triton reads it again from `linecache`, as from a file."""
    name = f"<qkv expressions {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    found: dict[str, Any] = {"__name__": "qkv.backends.torch.triton.written"}
    exec(compile(source, name, "exec"), found)
    return found
