"""Calls on tensors like an earlier one: nothing is looked at but types, shapes, strides, addresses.

As `qkv._recall` does for NumPy arrays, whose prepared calls these are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from qkv._recall import KEPT, prepared
from qkv.arrays.torch_arrays import TorchArrays
from qkv.backends import AddressedCall, generation

__all__ = ["recall", "remember"]

_view = TorchArrays().view
_known: dict[Hashable, tuple[AddressedCall, tuple[int, ...], torch.dtype]] = {}


def likeness(query: Tensor, key: Tensor, value: Tensor, *said: Any) -> Hashable | None:
    """What calls that are like one another have in common; None if their memory is not all."""
    for tensor in (query, key, value):
        if not tensor.is_cpu or tensor.is_neg() or tensor.layout is not torch.strided:
            return None
    return (
        query.dtype, query.shape, query.stride(),
        key.dtype, key.shape, key.stride(),
        value.dtype, value.shape, value.stride(),
        said, generation(),
    )  # fmt: skip


def recall(like: Hashable, query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Output and lse, or None if the call is like none that is known."""
    try:
        call, shape, lse_dtype = _known[like]
    except (KeyError, TypeError):  # unknown, or a variant that holds an array
        return None
    out = torch.empty(shape, dtype=query.dtype)
    lse = torch.empty(shape[:-1], dtype=lse_dtype)
    tensors = query, key, value, out, lse
    q, k, v, o, rows = [t.data_ptr() for t in tensors]
    if not call.run(q, k, v, o, rows, tensors):
        del _known[like]
        return None
    return out, lse


def remember(like: Hashable, tensors: tuple[Tensor, ...], said: tuple[Any, ...], out: Any) -> None:
    """Keep a call whose NumPy arrays have been prepared for."""
    call = prepared(*(_view(t, "operand") for t in tensors), *said)
    if isinstance(call, AddressedCall):
        while len(_known) >= KEPT:
            _known.pop(next(iter(_known)), None)
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        _known[like] = call, tuple(out.shape), wide
