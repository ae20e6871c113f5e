"""Arrays in memory of their own, for what is computed from them later."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.arrays import kind_of, library_of
from qkv.errors import QkvError
from qkv.process.forks import on_one_torch_thread

__all__ = ["handed_out", "own_copy"]


@on_one_torch_thread
def own_copy(array: Any) -> Any:
    """An equal array whose values nobody else can change; without gradients.

    Dimensions along which an array repeats itself (stride 0) do so in the copy too. Arrays that
    cannot be written to, as those of JAX, and tensors outside of main memory are given back.
    """
    kind = kind_of(array)
    if kind == "numpy" and isinstance(array, np.ndarray):
        copied = np.array(array[_once(array.strides)], order="K", subok=True)
        return copied if copied.shape == array.shape else np.broadcast_to(copied, array.shape)
    if kind == "torch" and _is_readable(array):
        detached = array.detach()
        return detached[_once(detached.stride())].clone().expand(detached.shape)
    return array


@on_one_torch_thread
def handed_out(array: Any) -> Any:
    """A copy for a caller, who may write to it; arrays that nobody can write to are given back."""
    kind = kind_of(array)
    if kind == "numpy":
        return np.array(array)
    return array.clone() if kind == "torch" else array


def _is_readable(tensor: Any) -> bool:
    """Whether there are values in main memory; what reads the tensor says why there are none."""
    try:
        library_of(tensor, "array").view(tensor, "array")
    except QkvError:
        return False
    return True


def _once(strides: tuple[int, ...]) -> tuple[slice, ...]:
    """An index that takes one entry of each dimension that repeats."""
    return tuple([slice(None) if stride else slice(0, 1) for stride in strides])
