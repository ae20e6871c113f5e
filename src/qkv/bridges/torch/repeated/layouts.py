"""What prepared calls ask of tensors before they read them, and the empty tensors of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qkv.bridges.torch.operands import PLAIN, view_of
from qkv.call.binding.bound import BoundCall
from qkv.call.repeated.forms import MAX_VALUE_BYTES

__all__ = [
    "ArrayValue",
    "are_dense",
    "array_value",
    "empty_maker",
    "gradients_wanted",
    "leaf_values",
]

ArrayValue: TypeAlias = tuple[np.dtype[Any], tuple[int, ...], bytes]
"""Type, shape and bytes: arrays of other types or shapes may have the same bytes."""


def leaf_values(bound: BoundCall) -> tuple[ArrayValue, ...] | None:
    """The arrays that are compared by value, None if these are too large."""
    if not bound.structure.by_value:
        return ()
    values = [array_value(bound.leaves[n]) for n in bound.structure.by_value]
    few = tuple([each for each in values if each is not None])
    return few if len(few) == len(values) else None


def array_value(array: Any) -> ArrayValue | None:
    """What an array that is compared by value is compared by; None if it is too large, or a
    gradient is wanted."""
    if isinstance(array, Tensor):
        if not array.is_cpu or array.nbytes > MAX_VALUE_BYTES or type(array) not in PLAIN:
            return None
        if array.requires_grad and torch.is_grad_enabled():
            return None
        array = view_of(array)
    if type(array) is not np.ndarray or array.nbytes > MAX_VALUE_BYTES:
        return None
    return array.dtype, array.shape, array.tobytes()


def gradients_wanted(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which of these tensors want gradients; nothing if none does."""
    if not torch.is_grad_enabled():
        return ()
    wanted = tuple([tensor.requires_grad for tensor in tensors])
    return wanted if True in wanted else ()


def are_dense(*tensors: Any) -> bool:
    """Whether these are tensors, dense numbers at an address."""
    for t in tensors:
        if type(t) is not Tensor or t.is_nested or not t.is_cpu or t.layout is not torch.strided:
            return False
        if t.is_neg():
            return False
    return True


def empty_maker(shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Makes dense tensors in main memory, whatever torch's default device is."""
    empty = _empty_of_compiled_code()
    if empty is not None:
        strides = torch.empty(shape, device="meta").stride()
        return partial(empty, tuple(shape), strides, dtype)
    # The quickest of what is documented: like one number that is expanded.
    number = torch.empty((), dtype=dtype, device="cpu")
    return partial(torch.empty_like, number.expand(shape))


@lru_cache(maxsize=1)
def _empty_of_compiled_code() -> Callable[..., Tensor] | None:
    """`empty(shape, strides, dtype)` of torch's compiled code, if it does what its name says."""
    try:
        guards: Any = torch._C._dynamo.guards
        made = guards._empty_strided_cpu((2, 3), (3, 1), torch.float16)
    except (AttributeError, TypeError):
        return None
    fits = made.shape == (2, 3) and made.stride() == (3, 1) and made.dtype is torch.float16
    return guards._empty_strided_cpu if fits and made.is_cpu else None
