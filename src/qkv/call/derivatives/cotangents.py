"""Check cotangents and tangents, and give gradients the form of the operands."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays import library_of
from qkv.arrays.views import view, view_beside
from qkv.call.checked import CheckedCall
from qkv.errors import DTypeError, ShapeError

__all__ = ["cotangent_of_lse", "cotangent_of_out", "fits", "like_operand", "shapes_of"]

Array = NDArray[Any]
Shape = tuple[int, ...]


def shapes_of(query: Any, key: Any, value: Any) -> tuple[Shape, Shape, Shape]:
    """Shapes of the operands as they were given; raises for what is not an array."""
    library = library_of(query, "query")
    shapes = [
        view_beside(library, array, role).shape
        for array, role in ((query, "query"), (key, "key"), (value, "value"))
    ]
    return shapes[0], shapes[1], shapes[2]


def cotangent_of_out(call: CheckedCall, shape: Shape, grad_out: Any) -> Array:
    """`grad_out` as an output of that shape, `(*batch_shape, num_heads, q_len, v_head_dim)`."""
    seen = view(grad_out, "grad_out")
    expected: Shape = shape
    if call.ndim == 2:
        expected = expected[-2:]
    elif call.layout == "blhd":
        expected = (*expected[:-3], expected[-2], expected[-3], expected[-1])
    fits(call, "grad_out", seen, expected, call.dtype, "the output")
    return call.plain(seen)


def cotangent_of_lse(call: CheckedCall, shape: Shape, dtype: np.dtype[Any], grad_lse: Any) -> Array:
    """`grad_lse` as an lse `(*batch_shape, num_heads, q_len)` of that type; zeros for None."""
    if grad_lse is None:
        return np.zeros(shape, dtype)
    seen = view(grad_lse, "grad_lse")
    fits(call, "grad_lse", seen, shape[-1:] if call.ndim == 2 else shape, dtype, "lse")
    return seen.reshape(shape)


def like_operand(call: CheckedCall, gradient: Array, shape: Shape) -> Any:
    """A gradient like the operand: leading dimensions that were broadcast are summed."""
    is_blhd = call.layout == "blhd" and len(shape) > 2
    plain = (1, *shape) if len(shape) == 2 else shape
    if is_blhd:
        plain = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    extra = gradient.ndim - len(plain)
    repeated = [
        axis
        for axis in range(gradient.ndim - 3)
        if axis < extra or (plain[axis - extra] == 1 and gradient.shape[axis] != 1)
    ]
    with np.errstate(all="ignore"):
        if repeated:
            gradient = gradient.sum(axis=tuple(repeated), keepdims=True)
        gradient = gradient.reshape(plain)
        gradient = gradient.swapaxes(-3, -2) if is_blhd else gradient
        return call.library.restore(np.asarray(gradient.reshape(shape), call.dtype, order="C"))


def fits(
    call: CheckedCall, role: str, seen: Array, shape: Shape, dtype: np.dtype[Any], other: str
) -> None:
    """Raise unless an array that goes along with another has its shape and dtype."""
    if seen.shape != shape:
        kind = "tangent" if "tangent" in role else "cotangent"
        raise ShapeError(
            f"{role} has shape {seen.shape}, {other} {shape}.",
            action=f"Pass a {kind} for each entry of {other}.",
        )
    if seen.dtype != dtype:
        raise DTypeError(
            f"{role} has dtype {seen.dtype}, {other} {dtype}.",
            action=call.library.in_words(f"Convert it, as in array.astype('{dtype}')."),
        )
