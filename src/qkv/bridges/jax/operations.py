"""The operations that XLA calls: a text, NumPy arrays to read, and arrays to fill.

    forward     inputs                                            -> out, lse, lse_rest[, unrounded]
    backward    inputs, out, lse, lse_rest, grad_out[, grad_lse]  -> the wanted gradients
    tangents    inputs, along                                     -> tangents of out, lse
    second      inputs, grad_out, grad_lse, along                 -> the wanted gradients

`inputs` are the leaves of a bound call: query, key, value and the arrays of its variants; `along`
tangents of some of them, or cotangents of gradients. `lse_rest` is what rounding took from lse, the
largest finite number where that is not known, since `jax_debug_nans` would stop at NaN.
The backward pass reads `unrounded`, the output before it was rounded to 16 bits, in its place.

Under `jax.vmap` every array has more dimensions in front, of size 1 where it is the same for all.
Where that means the same they become leading dimensions of one call; else there is one call for
each.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.call.attend import attend
from qkv.call.binding.bound import BoundCall, Structure
from qkv.call.derivatives.jvp import Tangents, second_vjp, tangents_of
from qkv.call.derivatives.pull_back import Residuals, pull_back
from qkv.errors import UnsupportedError

__all__ = ["PROCESS", "Operation", "compute"]

Array = NDArray[Any]

PROCESS = secrets.randbits(62) + 1
"""Tells this process from others: compiled code can be exported."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call as a constant of compiled code.

    Parameters
    ----------
    structure : str
        The text of a `qkv.call.binding.bound.Structure`.
    ndims : tuple of int
        Dimensions of query, key, value and arrays, without those of `jax.vmap`.
    layout : str
    wanted : tuple of int or None
        Of which of those a gradient is wanted, by number; None for the forward pass and tangents.
        For the second backward pass, two more are grad_out and grad_lse.
    along : tuple of int or None
        Of which of those there are tangents, or which gradients are differentiated; None for the
        forward and the first backward pass.
    uses_batch_index : bool
        A variant may read the flat index over leading dimensions: more of them would change it.
    process : int
        0, or the process whose objects the structure names.
    backward : bool
        Of the forward pass: whether a backward pass will follow.
    """

    structure: str
    ndims: tuple[int, ...]
    layout: str
    uses_batch_index: bool
    process: int
    wanted: tuple[int, ...] | None = None
    along: tuple[int, ...] | None = None
    backward: bool = False

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))


@lru_cache(maxsize=1024)
def _read(text: str) -> Operation:
    fields = json.loads(text)
    for name in ("ndims", "wanted", "along"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    return Operation(**fields)


def compute(text: str, inputs: Sequence[Array], results: Sequence[Array]) -> None:
    """Fill the results of an operation, given by its text."""
    operation = _read(text)
    if operation.process not in (0, PROCESS):
        raise UnsupportedError(
            "this was compiled in another process, with a score mod or a variant of one's own.",
            action="Trace it again here; functions cannot be saved with compiled code.",
        )
    if operation.along is None:
        run = _forward if operation.wanted is None else _backward
    else:
        run = _tangents if operation.wanted is None else _second
    added = inputs[0].ndim - operation.ndims[0]
    lead = results[0].shape[:added]
    if not added:
        run(operation, inputs, results)
    elif _is_one_call(operation, inputs, added):
        run(operation, _leading(operation, inputs, lead), results)
    else:
        for index in np.ndindex(lead):
            run(operation, [_row(a, index) for a in inputs], [r[(*index, ...)] for r in results])


def _row(array: Array, index: tuple[int, ...]) -> Array:
    """The part of an array for one place of `vmap`."""
    place = [i if size > 1 else 0 for i, size in zip(index, array.shape, strict=False)]
    where: Any = (*place, ...)
    row: Array = array[where]
    return row


def _is_one_call(operation: Operation, inputs: Sequence[Array], added: int) -> bool:
    """Whether the dimensions of `vmap` may become leading dimensions."""
    operands, count = operation.ndims[:3], len(operation.ndims)
    return (
        not operation.uses_batch_index
        and len(set(operands)) == 1
        and not any(3 <= n < count for n in (*(operation.wanted or ()), *(operation.along or ())))
        and all(set(array.shape[:added]) <= {1} for array in inputs[3:count])
    )


def _leading(operation: Operation, inputs: Sequence[Array], lead: tuple[int, ...]) -> list[Array]:
    """All arrays for one call; matrices get an axis of one head."""
    added, count = len(lead), len(operation.ndims)
    before_rows = added + (operation.layout == "blhd")
    # Whether each array behind the inputs has the shape of lse.
    if operation.along is None:
        rows: tuple[int, ...] = (1, 2, 4)
    else:
        rows = () if operation.wanted is None else (1,)

    def whole(array: Array, n: int) -> Array:
        array = np.broadcast_to(array, (*lead, *array.shape[added:]))
        if operation.ndims[0] > 2:
            return array
        return np.expand_dims(array, added if n - count in rows else before_rows)

    return [
        array.reshape(array.shape[added:]) if 3 <= n < count else whole(array, n)
        for n, array in enumerate(inputs)
    ]


def _forward(operation: Operation, inputs: Sequence[Array], results: Sequence[Array]) -> None:
    attended = attend(_bound(operation, inputs), backward=operation.backward)
    unrounded = attended.out if attended.unrounded is None else attended.unrounded
    arrays = attended.out, attended.lse, attended.lse_rest, unrounded
    for array, result in zip(arrays, results, strict=False):
        unknown = array is None
        result[...] = np.finfo(result.dtype).max if unknown else array.reshape(result.shape)


def _backward(operation: Operation, inputs: Sequence[Array], results: Sequence[Array]) -> None:
    count = len(operation.ndims)
    out, lse, lse_rest, grad_out = inputs[count : count + 4]
    grad_lse = inputs[count + 4] if len(inputs) > count + 4 else None
    wanted = operation.wanted or ()
    leaves = [n for n in wanted if n >= 3]
    unknown = lse_rest == np.finfo(lse_rest.dtype).max
    residuals = Residuals(out, lse, np.where(unknown, np.nan, lse_rest))
    gradients = pull_back(_bound(operation, inputs[:count]), residuals, grad_out, grad_lse, leaves)
    _fill(results, wanted, gradients, count)


def _tangents(operation: Operation, inputs: Sequence[Array], results: Sequence[Array]) -> None:
    count = len(operation.ndims)
    along = inputs[count:]
    tangents = tangents_of(_bound(operation, inputs[:count]), _direction(operation, along))
    for tangent, result in zip(tangents, results, strict=True):
        result[...] = tangent.reshape(result.shape)


def _second(operation: Operation, inputs: Sequence[Array], results: Sequence[Array]) -> None:
    count = len(operation.ndims)
    grad_out, grad_lse, *along = inputs[count:]
    wanted = operation.wanted or ()
    second = second_vjp(
        _bound(operation, inputs[:count]),
        grad_out=grad_out,
        grad_lse=grad_lse,
        tangents=_direction(operation, along),
        wrt=[n for n in wanted if 3 <= n < count],
    )
    _fill(results, wanted, second, count)


def _direction(operation: Operation, along: Sequence[Array]) -> Tangents:
    changes = dict(zip(operation.along or (), along, strict=True))
    own = [(n, None, change) for n, change in changes.items() if n >= 3]
    return Tangents(changes.get(0), changes.get(1), changes.get(2), own)


def _bound(operation: Operation, inputs: Sequence[Array]) -> BoundCall:
    return BoundCall(Structure.from_text(operation.structure), inputs)


def _fill(results: Sequence[Array], wanted: Sequence[int], gradients: Any, count: int) -> None:
    """The wanted gradients, in the place and type of the results; `count` inputs come first."""
    for n, result in zip(wanted, results, strict=True):
        if n < 3:
            gradient = (gradients.query, gradients.key, gradients.value)[n]
        elif n >= count:
            gradient = (gradients.grad_out, gradients.grad_lse)[n - count]
        else:
            gradient = gradients.of(n)
        with np.errstate(all="ignore"):
            result[...] = gradient.reshape(result.shape)
