"""Whether tensors are like earlier ones, asked of torch in one call.

torch's compiler guards its code by this question: about type, dtype, device, layout, shape,
strides, and whether gradients are wanted. Asking for each of them takes six times as long. It is
not documented, so it is tried before it is relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qkv.process.forks import importing

__all__ = ["Guard", "form_guard", "gradient_guard", "guard"]

Guard: TypeAlias = Callable[..., bool]
"""Whether query, key, value and as many more as there were are alike."""


def guard(query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Guard:
    """A guard for tensors like these that want no gradients.

    It always says no where torch cannot tell. Key and value are one object if these are, and so is
    the query then.
    """
    if not _can_tell():
        return _says_no
    if key is not value:
        return _guard(query, key, value, *more)
    # Guards of torch take tensors that are one object for a sign that code must be compiled anew.
    if query is key:
        one = _guard(query, *more)
        return lambda query, key, value, *more: query is key is value and one(query, *more)
    two = _guard(query, key, *more)
    return lambda query, key, value, *more: key is value and two(query, key, *more)


def form_guard(*tensors: Tensor) -> Guard:
    """A guard for tensors of any sizes and strides, of which no two are one object."""
    return _guard(*tensors, any_size=True) if _can_tell() else _says_no


def gradient_guard(*tensors: Tensor) -> Guard:
    """A guard for tensors of these sizes and strides, which want gradients as these do.

    No two of them are one object.
    """
    if not _can_tell():
        return _says_no
    return _guard(*tensors, wanted=[tensor.requires_grad for tensor in tensors])


def _says_no(*tensors: Tensor) -> bool:
    return False


def _guard(*tensors: Tensor, any_size: bool = False, wanted: Sequence[bool] = ()) -> Guard:
    with importing():
        from torch._C._dynamo.guards import TensorGuards

    tensors = tuple(tensor.detach() for tensor in tensors)
    for tensor, wants_gradient in zip(tensors, wanted, strict=False):
        tensor.requires_grad_(wants_gradient)
    sizes: Any = [[None] * t.ndim if any_size else list(t.shape) for t in tensors]
    strides: Any = [[None] * t.ndim if any_size else list(t.stride()) for t in tensors]
    made = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Guard = made.check
    return check


@lru_cache(maxsize=1)
def _can_tell() -> bool:
    """Whether this torch has such guards, and they see all that they must."""
    tensors = [torch.empty(2, 3, 4, device="cpu") for _ in range(3)]
    try:
        fits = _guard(*tensors)
        return fits(*tensors) and not any(
            fits(*tensors[:place], other, *tensors[place + 1 :])
            for place in range(3)
            for other in _others(tensors[place])
        )
    except (ImportError, RuntimeError, SystemError, TypeError):
        return False


def _others(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors that are unlike it, each in one way."""
    yield torch.nn.Parameter(tensor, requires_grad=False)
    yield tensor.double()
    yield tensor.to("meta")
    yield tensor.to_sparse()
    yield tensor[:1]
    yield tensor.mT.contiguous().mT
    yield torch.ops.aten._neg_view(tensor)
    yield tensor.detach().requires_grad_()
