"""An array added to the scores."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.arguments.readable_checks import as_array
from qkv.errors import DTypeError, MaskLooksBooleanWarning
from qkv.problem.building.builder import Builder, Shape, kind_of_array
from qkv.problem.building.padding import padding_index
from qkv.problem.dense import Dense
from qkv.variants.base import Role, Variant


@dataclass(frozen=True, eq=False, repr=False)
class Bias(Variant):
    """`score + array`; an entry of exactly -inf forbids the pair. A bare floating array means this.

    Parameters
    ----------
    array : floating array that broadcasts to (..., num_heads, q_len, kv_len)
        Read in place, by row. A large finite entry such as -1e9 is ordinary arithmetic: a row
        that has nothing else still attends, uniformly.

    Raises
    ------
    DTypeError
        At the call, if the array is not of a floating type.
    ShapeError
        At the call, if it does not broadcast to the scores.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((2, 4))
    >>> bias = np.array([[0.0, -np.inf], [0.0, np.log(3.0)]])
    >>> qkv.inspect(x, x, x, qkv.Bias(bias)).weights[...]
    array([[1.  , 0.  ],
           [0.25, 0.75]])
    """

    roles: ClassVar[Mapping[str, Role]] = {"array": "in_place"}
    positions_only: ClassVar[bool] = True
    uses_batch_index: ClassVar[bool] = False

    array: ArrayLike

    def lower(self, builder: Builder) -> None:
        array = as_array("array", self.array)
        if kind_of_array(array, "a bias") != "float":
            index, lengths = padding_index(builder.shape.scores, array, "array")
            mask = f"qkv.Mask(array.astype(bool){index})" + (f" or {lengths}" if lengths else "")
            fact = f"a bias has dtype {array.dtype}, not a floating type."
            if array.dtype.kind != "b":  # A bare array need not be meant as a bias.
                fact = f"an array has dtype {array.dtype}; masks are bool, biases floating."
            raise DTypeError(
                fact,
                [("array", f"{array.dtype} {array.shape}")],
                f"Pass {mask} if 1 means may attend, or array.astype(np.float32){index} to add it "
                "to the scores.",
            )
        bias = builder.broadcast(array, "bias")
        builder.mask(bias != -np.inf)
        builder.mod(builder.score + bias)

    def naive(self, dense: Dense) -> None:
        bias = np.broadcast_to(dense.head_matrix(self.array), dense.scores.shape).astype(np.float64)
        dense.allowed &= ~np.isneginf(bias)
        dense.scores = dense.scores + bias

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Bias]:
        full = rng.normal(size=shape.scores).astype(np.float32)
        holes = rng.normal(size=(shape.q_len, shape.kv_len))
        holes[rng.random(holes.shape) < 0.3] = -np.inf
        finite = np.where(rng.random((shape.kv_len,)) < 0.5, float(np.finfo(np.float32).min), 0.0)
        return (cls(full), cls(holes), cls(finite))


SAMPLED_PER_AXIS, SAMPLED = 32, 4096
"""Entries of a bare array that are looked at: along one axis, and in all."""


def bias_from_array(array: NDArray[Any]) -> Bias:
    """The bias that a bare array means; warn if it looks like a boolean mask."""
    warn_of_zeros_and_ones(array)
    return Bias(array)


def warn_of_zeros_and_ones(array: NDArray[Any]) -> None:
    """Warn if a bare floating array looks like a boolean mask.

    A mask of zeros and ones added to the scores favours what it allows by a factor of e and forbids
    nothing. Evenly spaced entries are looked at, and all of them only if those hold zeros and ones
    and nothing else.
    """
    if array.dtype.kind in "iu" or array.dtype.names:
        return  # Integers are refused, with both fixes named.
    if _is_zeros_and_ones(array[_evenly_spaced(array.shape)]) and _is_zeros_and_ones(array):
        warnings.warn(
            f"a floating array of shape {array.shape} holds only 0 and 1, and is added to the "
            "scores: it forbids nothing. If it is a mask, pass mask.astype(bool), or mask.bool() "
            "of a torch tensor (True = may attend); if it is a bias, pass qkv.Bias(array).",
            MaskLooksBooleanWarning,
            stacklevel=_stacklevel_of_caller(),
        )


def _evenly_spaced(shape: tuple[int, ...]) -> tuple[slice, ...]:
    left, steps = SAMPLED, []
    for size in reversed(shape):
        steps.append(max(1, -(-size // min(SAMPLED_PER_AXIS, left))))
        left //= max(1, -(-size // steps[-1]))
        left = max(left, 1)
    return tuple(slice(None, None, step) for step in reversed(steps))


def _is_zeros_and_ones(array: NDArray[Any]) -> bool:
    """Whether there are both, and nothing else."""
    ones = array == 1
    count = np.count_nonzero(ones)
    return bool(0 < count < array.size and (ones | (array == 0)).all())


def _stacklevel_of_caller() -> int:
    """The `stacklevel` of whoever called the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).startswith("qkv."):
        level, frame = level + 1, frame.f_back
    return level


def _module_of(frame: FrameType) -> str:
    """A scope of `exec` may have no name, or any object as one."""
    return str(frame.f_globals.get("__name__"))
