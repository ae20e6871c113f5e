"""The few operations on whole arrays that orders need, for NumPy, torch and JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays import namespace

__all__ = ["concatenated", "taken"]


def taken(array: Any, numbers: NDArray[np.int64], axis: int) -> Any:
    """The entries with these numbers along an axis."""
    if hasattr(array, "index_select"):
        import torch

        index = torch.from_numpy(numbers).to(array.device)
        return array.index_select(axis % array.ndim, index)
    return namespace(array, "array").take(array, numbers, axis=axis)


def concatenated(arrays: Sequence[Any], axis: int) -> Any:
    """The arrays one after another along an axis."""
    return namespace(arrays[0], "array").concatenate(list(arrays), axis=axis)
