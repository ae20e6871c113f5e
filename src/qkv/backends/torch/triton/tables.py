"""Tables of a problem: as values that calls can be recognised by, and as kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.arrays.torch_arrays import TorchArrays

__all__ = ["Contents", "as_read", "contents", "hold", "on_device"]

LARGEST = 2**16
"""Bytes of tables up to which what is made of them is kept for calls with the same."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Contents:
    """Small tables as a value that can be compared and hashed."""

    parts: tuple[tuple[str, str, tuple[int, ...], bytes], ...]

    def arrays(self) -> dict[str, Array]:
        return {
            name: np.frombuffer(content, dtype).reshape(shape)
            for name, dtype, shape, content in self.parts
        }


def contents(tables: Mapping[str, Array], names: Iterable[str]) -> Contents | None:
    """What some tables hold; None if that is much, or of a type that NumPy has no word for."""
    chosen = [(name, tables[name]) for name in sorted(names)]
    if sum(table.nbytes for _, table in chosen) > LARGEST:
        return None
    if any(table.dtype.kind not in "biuf" for _, table in chosen):
        return None
    return Contents(tuple((n, t.dtype.str, t.shape, t.tobytes()) for n, t in chosen))


def as_read(array: Array, leaf: Tensor | None, index: str, device: torch.device) -> Tensor:
    """A table in the type in which kernels read it; `leaf` is its tensor, if it has one."""
    if leaf is None:
        tensor: Tensor = TorchArrays().restore(np.array(array, order="C"))
    else:
        tensor = leaf.detach().reshape((1,) * (array.ndim - leaf.ndim) + tuple(leaf.shape))
        for axis, size in enumerate(array.shape):
            tensor = tensor.narrow(axis, 0, size)  # A broadcast axis is read once.
    if tensor.is_floating_point():
        tensor = tensor.float()
    elif tensor.dtype is not torch.bool:
        tensor = tensor.to(getattr(torch, index))
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if index == "int32" and last >= 2**31:  # A part of a larger tensor.
        tensor = tensor.contiguous()
    return on_device(tensor, device)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, where every stream may read it from now on."""
    moved = tensor.to(device)
    if device.type == "cuda" and moved is not tensor:
        torch.cuda.current_stream(device).synchronize()
    return moved


def hold(*tensors: Tensor) -> None:
    """Keep memory of what was kept for other calls until this stream has read it."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
