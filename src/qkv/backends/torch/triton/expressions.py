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
import torch
from torch import Tensor

from qkv.backends.torch.triton.tables import Contents, as_read, contents
from qkv.problem.language.bounds import bounds
from qkv.problem.language.derivative import derivative
from qkv.problem.language.expressions import (
    SCORE,
    TRUE,
    Const,
    Load,
    Node,
    Op,
    Var,
    upwards,
    walk,
)
from qkv.problem.language.intervals import Interval
from qkv.problem.spec import Problem

__all__ = ["Expressions", "Functions", "expressions_of"]

_OPERATIONS: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "tl.div_rn({0}, {1})",
    "floordiv": "floored_quotient({0}, {1})", "mod": "floored_remainder({0}, {1})",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "neg": "{0} * {minus_one}", "abs": "tl.abs({0})",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "not": "{0} == 0", "where": "tl.where({0}, {1}, {2})",
    "exp": "exp({0})", "log": "tl.log({0})", "sqrt": "tl.sqrt_rn({0})", "tanh": "tanh({0})",
    "floor": "floored({0}, {index})",
}  # fmt: skip

_EXISTS = {"is_row": "q_index", "is_key": "kv_index"}
"""Arguments that say which rows and keys exist, and the indices that they are about."""

_HEAD = """
import triton
import triton.language as tl
from qkv.backends.torch.triton.kernels.elementary import (
    exp, block_of, floored, floored_quotient, floored_remainder, tanh,
)
"""

_FUNCTION = """
@triton.jit
def {name}(score, q_index, kv_index, is_row, is_key, head, batch, tables, strides):
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


@dataclass(frozen=True, slots=True)
class Expressions:
    """Score mods and mask as kernels take them: functions, tables on the device, and the type of
    integers."""

    functions: Functions
    tables: tuple[Tensor, ...]
    index: str

    @property
    def arguments(self) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """The tables, and the strides of all of them, as kernels take them."""
        return self.tables, tuple(stride for table in self.tables for stride in table.stride())


def expressions_of(problem: Problem, device: torch.device) -> Expressions:
    """The expressions of a problem; those that read small tables are kept for the next call."""
    spec, operands = problem.spec, problem.operands
    described = tuple((t.name, t.ndim) for t in spec.tables)
    sizes = spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len
    form = _Form(spec.score, spec.mask, described, sizes, _has_long_rows(problem), device)
    names = [name for name, _ in described]
    leaves = {n: operands.device_arrays[n] for n in names if n in operands.device_arrays}
    small = None if leaves else contents(operands.tables, names)
    return _made(form, operands.tables, leaves) if small is None else _kept(form, small)


@dataclass(frozen=True, slots=True)
class _Form:
    """What expressions depend on, beside their tables."""

    score: Node
    mask: Node
    tables: tuple[tuple[str, int], ...]
    sizes: tuple[int, int, int, int]
    has_long_rows: bool
    device: torch.device


@lru_cache(maxsize=32)
def _kept(form: _Form, tables: Contents) -> Expressions:
    return _made(form, tables.arrays(), {})


def _made(form: _Form, tables: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> Expressions:
    is_wide = form.has_long_rows or _has_large_integers(form, tables)
    index = "int64" if is_wide else "int32"
    return Expressions(
        _functions(form.score, form.mask, form.tables, index),
        tuple(as_read(tables[n], leaves.get(n), index, form.device) for n, _ in form.tables),
        index,
    )


def _has_long_rows(problem: Problem) -> bool:
    """Whether an entry of a head may lie 2^31 entries or more from its first one."""
    tensors = [problem.operands.device_arrays[name] for name in ("query", "key", "value")]
    widest = max(problem.spec.head_dim, problem.spec.v_head_dim)
    return any(t.shape[-2] * max(t.stride(-2), widest) >= 2**31 for t in tensors)


def _has_large_integers(form: _Form, tables: Mapping[str, Any]) -> bool:
    """Whether a whole number of an expression, or an index, may not fit into 32 bits."""
    if max((table.size for table in tables.values()), default=0) >= 2**31:
        return True
    whole: list[Node] = [n for n in walk(form.score, form.mask) if n.kind == "int"]
    names = "batch", "head", "q_index", "kv_index"
    variables = {
        name: Interval.of(0, size - 1) for name, size in zip(names, form.sizes, strict=True)
    }
    found = bounds(whole, variables, tables)
    return any((i.low <= -(2**31)).any() or (i.high >= 2**31).any() for i in found)


@lru_cache(maxsize=256)
def _functions(
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
            is_narrow = n.kind == "int" and index == "int64"
            known[n] = f"{n.name}.to(tl.int64)" if is_narrow else n.name
            continue
        if isinstance(n, Load):
            text = _load(n, places[n.table], first_stride[n.table], known)
        else:
            text = _operation(n, known, f"tl.{index}")
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
    read = {n.name for n in walk(*node.indices) if isinstance(n, Var)}
    # No table is read beyond its end, and what depends on rows alone is read once for a row.
    exists = [name for name, var in _EXISTS.items() if var in read]
    inside = f", mask={' & '.join(exists)}, other=0" if exists else ""
    loaded = f"tl.load({' + '.join([f'tables[{place}]', *terms])}{inside})"
    return f"({loaded} != 0)" if node.kind == "bool" else loaded


def _operation(node: Op, known: Mapping[Node, str], index: str) -> str:
    texts = _arguments(node, known)
    kinds = [arg.kind for arg in node.args]
    if node.kind == "bool" and "float" in kinds:
        # The interpreter makes no block of booleans from one of numbers without dimensions.
        texts = [
            text if isinstance(arg, Const) else f"block_of({text})"
            for text, arg in zip(texts, node.args, strict=True)
        ]
    # Triton's own negative of 0.0 is 0.0, and it takes small whole numbers as int32.
    minus_one = "-1.0" if node.kind == "float" else "-1"
    text = _OPERATIONS[node.name].format(*texts, index=index, minus_one=minus_one)
    return f"{text}.to({index})" if node.name == "where" and node.kind == "int" else text


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
