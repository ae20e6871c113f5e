"""The rotation of an array of any library, for caches that store rotated keys."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.array_errors import no_array_error
from qkv.arguments.readable_checks import as_array
from qkv.errors import ArgumentError, DTypeError, ShapeError

__all__ = ["array_namespace", "cast", "check_positions", "promoting", "rotate"]

_HOST = (np.ndarray, np.generic, int, list, tuple, range)


def rotate(x: Any, positions: Any, inv_freq: Any, layout: str, attention_factor: float) -> Any:
    """Rotate pairs of the last axis of `x` by `positions * inv_freq`; see `RoPE.rotate`."""
    xp = array_namespace(x)
    if xp is np:
        x = np.asarray(x)  # For np.matrix, `*` would be a product of matrices.
    n = inv_freq.shape[0]
    if x.ndim == 0 or x.shape[-1] < 2 * n:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}; {2 * n} entries of its last axis are to be rotated.",
            action="Pass rows (..., head_dim) with head_dim of at least rotary_dim.",
        )
    with promoting(x):
        return _rotated(xp, x, _cos_and_sin(xp, x, positions, inv_freq, attention_factor), layout)


def _rotated(xp: Any, x: Any, cos_and_sin: tuple[Any, Any], layout: str) -> Any:
    """Pairs of the last axis of `x`, as many as there are angles, rotated by these."""
    cos, sin = cos_and_sin
    n = cos.shape[-1]
    rotated, rest = x[..., : 2 * n], x[..., 2 * n :]
    if layout == "half_split":
        a, b = rotated[..., :n], rotated[..., n:]
    else:
        a, b = rotated[..., ::2], rotated[..., 1::2]
    # Only NumPy needs errstate, and torch's compiler cannot trace it.
    with np.errstate(all="ignore") if isinstance(x, np.ndarray) else nullcontext():
        parts = [cast(part, x.dtype) for part in (a * cos - b * sin, a * sin + b * cos)]
    if layout == "half_split":
        return xp.concat([*parts, rest], axis=-1)
    return xp.concat([xp.stack(parts, axis=-1).reshape(rotated.shape), rest], axis=-1)


def promoting(x: Any) -> AbstractContextManager[Any]:
    """A context in which JAX promotes types and dimensions, even if it was told to refuse that."""
    # The first check is for torch's compiler, in which NumPy's arrays may have other attributes.
    if isinstance(x, np.ndarray) or not hasattr(x, "__array_namespace__"):
        return nullcontext()
    jax = sys.modules["jax"]
    contexts = ExitStack()
    contexts.enter_context(jax.numpy_dtype_promotion("standard"))
    contexts.enter_context(jax.numpy_rank_promotion("allow"))
    return contexts


def array_namespace(x: Any, name: str = "x") -> Any:
    """The array library of `x`, which must hold real floating numbers; errors call it `name`."""
    torch: Any = sys.modules.get("torch")
    # Another thread may be importing torch right now, and there are no tensors yet.
    if torch is not None and hasattr(torch, "Tensor") and isinstance(x, torch.Tensor):
        if x.is_nested or x.layout is not torch.strided:
            kind = "nested" if x.is_nested else x.layout
            action = f"Pass a dense one, or {name}.to_dense()."
            raise DTypeError(f"{name} is a {kind} tensor.", action=action)
        floating = x.is_floating_point() and x.dtype.itemsize > 1
        xp: Any = torch
    elif isinstance(x, np.ndarray) or (hasattr(x, "__array_namespace__") and hasattr(x, "shape")):
        # NumPy does not treat bfloat16 and other types of ml_dtypes as floating.
        floating = (x.dtype.kind == "f" and x.dtype.itemsize > 1) or x.dtype.name == "bfloat16"
        xp = np if isinstance(x, np.ndarray) else x.__array_namespace__()
    else:
        raise no_array_error(x, name)
    if not floating:
        raise DTypeError(
            f"{name} has dtype {x.dtype}, not a floating type of 16 bits or more.",
            action="Pass float64, float32, float16 or bfloat16.",
        )
    return xp


def cast(array: Any, dtype: Any) -> Any:
    """The array in another type of its library."""
    # The first check is for torch's compiler, in which NumPy's arrays lack some of what they have.
    has_astype = isinstance(array, np.ndarray) or hasattr(array, "astype")
    return array.astype(dtype) if has_astype else array.to(dtype)


def _cos_and_sin(xp: Any, x: Any, positions: Any, inv_freq: Any, factor: float) -> tuple[Any, Any]:
    """Cosines and sines that broadcast to `(*x.shape[:-1], pairs)`.

    They are in float64 where `x` is in the memory of this machine and its library computes in
    float64: each entry is then rounded once, as in `qkv.attention` itself.
    """
    where, frequencies = _on_host(positions), _on_host(inv_freq)
    check_positions(positions if where is None else where, x)
    if where is not None and frequencies is not None:
        angle = where[..., None].astype(np.float64) * frequencies.astype(np.float64)
        cos_sin = factor * np.cos(angle), factor * np.sin(angle)
        if xp.__name__ != "torch":
            return xp.asarray(cos_sin[0]), xp.asarray(cos_sin[1])
        wide = xp.float64 if x.device.type == "cpu" else _compute_dtype(xp, x)
        cos, sin = (xp.as_tensor(table, dtype=wide, device=x.device) for table in cos_sin)
        return cos, sin
    if xp.__name__ != "torch":
        angle = xp.asarray(positions)[..., None] * xp.asarray(inv_freq)
        return factor * xp.cos(angle), factor * xp.sin(angle)
    # Apple's devices have no float64.
    wide = xp.float32 if x.device.type == "mps" else xp.float64
    angle = xp.as_tensor(positions, device=x.device)[..., None].to(wide) * xp.as_tensor(
        inv_freq, device=x.device
    ).to(wide)
    if x.device.type != "cpu":
        wide = _compute_dtype(xp, x)
    return (factor * angle.cos()).to(wide), (factor * angle.sin()).to(wide)


def _compute_dtype(torch: Any, x: Any) -> Any:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _on_host(values: Any) -> NDArray[Any] | None:
    """The values as a NumPy array, if this can see them without waiting for a device."""
    if isinstance(values, _HOST):
        return as_array("positions", values)
    if hasattr(values, "__array_namespace__"):
        traced = isinstance(values, sys.modules["jax"].core.Tracer)
        return None if traced else np.asarray(values)
    try:
        if hasattr(values, "dtype") and hasattr(values, "shape"):
            return None
    except RuntimeError:  # A nested tensor has no shape.
        pass
    raise ArgumentError(
        f"positions are a {type(values).__name__}, not integers.",
        action="Pass an integer array that broadcasts to x.shape[:-1], such as np.arange(length).",
    )


def check_positions(positions: Any, x: Any) -> None:
    """Raise unless positions are integers that broadcast to the rows of `x`."""
    shape, name = tuple(positions.shape), str(positions.dtype).removeprefix("torch.")
    if not name.startswith(("int", "uint")) and 0 not in shape:
        raise DTypeError(
            f"positions have dtype {name}, not an integer type.",
            action="Pass an integer array that broadcasts to x.shape[:-1].",
        )
    rows = tuple(x.shape[:-1])
    # Compared one by one: NumPy's function would make constants of sizes that torch traces.
    pairs = zip(reversed(shape), reversed(rows), strict=False)
    if len(shape) > len(rows) or any(size != row and size != 1 for size, row in pairs):
        raise ShapeError(
            f"positions have shape {shape}, which does not broadcast to the rows of x, {rows}.",
            [("x", str(tuple(x.shape)))],
            "For (batch, heads, length, head_dim) pass positions of shape (length,), or "
            "(batch, 1, length).",
        )
