"""The shapes of a trace's arrays, which follow from the sizes of its problem.

JSON has no lengths of what has no numbers: a list of no rows does not say how long a row would be.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qkv.inspection.traces.steps import Softmax
from qkv.inspection.traces.streaming import TileState
from qkv.inspection.traces.trace_fields import (
    MaskStage,
    RowGradients,
    ScoreStage,
    Slope,
    TracedGradients,
    TracedHead,
    TracedProblem,
    TracedRow,
    TraceFields,
)

__all__ = ["fitted"]

Array = NDArray[Any]
T = TypeVar("T", bound=TraceFields)

_PER_KEY = ("kv_len",)
_SHAPES: dict[type, dict[str, tuple[str, ...]]] = {
    TracedHead: {
        "kv_pos": _PER_KEY,
        **dict.fromkeys(("key", "rotated_key"), ("kv_len", "head_dim")),
        "value": ("kv_len", "v_head_dim"),
    },
    TracedRow: {
        **dict.fromkeys(("query", "rotated_query"), ("head_dim",)),
        "products": ("kv_len", "head_dim"),
        **dict.fromkeys(("raw", "scaled", "allowed", "scores", "factors"), _PER_KEY),
        "contributions": ("kv_len", "v_head_dim"),
        "output": ("v_head_dim",),
    },
    ScoreStage: {"scores": _PER_KEY},
    MaskStage: {"allowed": _PER_KEY},
    Softmax: dict.fromkeys(("shifted", "exp", "weights"), _PER_KEY),
    TileState: {
        **dict.fromkeys(("scores", "exp"), ("tile",)),
        "accumulator": ("v_head_dim",),
    },
    RowGradients: {
        "cotangent": ("v_head_dim",),
        "d_query": ("head_dim",),
        "jacobian": ("kv_len", "kv_len"),
        **dict.fromkeys(("d_weights", "d_scores", "d_scaled", "d_raw"), _PER_KEY),
    },
    Slope: {"values": _PER_KEY},
}
"""The arrays of each part that are no single number."""


def fitted(trace: T) -> T:
    """The trace with arrays of the shapes that its problem says, also where they hold no number.

    Raises
    ------
    ValueError
        An array has another shape, or there are not as many tokens as rows.
    """
    problem = trace.problem
    for name, tokens, length in (
        ("tokens", trace.tokens, problem.q_len),
        ("kv_tokens", trace.kv_tokens, problem.kv_len),
    ):
        if tokens is not None and len(tokens) != length:
            raise ValueError(f"{name} has {len(tokens)} entries, and the problem {length} rows")
    heads = tuple(_part(head, problem) for head in trace.heads)
    for row in (row for head in heads for row in head.rows):
        if not 0 <= row.q_index < problem.q_len:
            raise ValueError(f"q_index is {row.q_index}, and the problem has {problem.q_len} rows")
    gradient = None if trace.gradient is None else _gradient(trace.gradient, problem)
    return replace(trace, heads=heads, gradient=gradient)


def _part(part: Any, problem: TracedProblem) -> Any:
    """A part of a trace, and the parts in it."""
    if isinstance(part, tuple):
        return tuple(_part(each, problem) for each in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    shapes = _SHAPES[type(part)]
    changed: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, np.ndarray | np.generic):
            sizes = [
                part.stop - part.first
                if isinstance(part, TileState) and size == "tile"
                else getattr(problem, size)
                for size in shapes.get(field.name, ())
            ]
            changed[field.name] = _array(np.asarray(value), sizes, field.name)
        else:
            changed[field.name] = _part(value, problem)
    return replace(part, **changed)


def _array(array: Array, sizes: list[int], name: str) -> Any:
    if not array.size:
        array = array.reshape(array.shape + tuple(sizes[array.ndim :]))
    if array.shape != tuple(sizes):
        raise ValueError(f"{name} has shape {array.shape}, and the problem says {tuple(sizes)}")
    return array[()]


def _gradient(gradient: TracedGradients, problem: TracedProblem) -> TracedGradients:
    """Gradients in the layout of the arrays that were given, which the problem does not say."""
    arrays = {f.name: np.asarray(getattr(gradient, f.name)) for f in fields(gradient)}
    q, kv = (problem.num_heads, problem.q_len), (problem.num_kv_heads, problem.kv_len)
    dims = problem.v_head_dim, problem.head_dim, problem.head_dim, problem.v_head_dim
    ends = [(*rows, dim) for rows, dim in zip((q, q, kv, kv), dims, strict=True)]
    most = max((a.ndim for a in arrays.values() if a.size), default=len(problem.batch_shape) + 3)
    for order in ((0, 1, 2), (1, 0, 2)):
        wholes = [(*problem.batch_shape, *(end[axis] for axis in order)) for end in ends]
        found = {
            name: _within(array, whole, most)
            for (name, array), whole in zip(arrays.items(), wholes, strict=True)
        }
        known = {name: array for name, array in found.items() if array is not None}
        if len(known) == len(arrays):
            return replace(gradient, **known)
    shapes = ", ".join(str(array.shape) for array in arrays.values())
    raise ValueError(f"the gradients have shapes {shapes}, which the problem does not say")


def _within(array: Array, whole: tuple[int, ...], most: int) -> Array | None:
    """The array if its shape is the end of `whole`; where it was broadcast, lengths are 1."""
    for ndim in (array.ndim,) if array.size else range(most, array.ndim - 1, -1):
        end = whole[len(whole) - ndim :]
        if ndim <= len(whole) and all(
            size == has or (has == 1 and place < ndim - 3)
            for place, (has, size) in enumerate(zip(array.shape, end, strict=False))
        ):
            return array.reshape(array.shape + end[array.ndim :])
    return None
