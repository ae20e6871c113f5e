"""`qkv.attention` while torch exports to ONNX, which knows no operator of qkv.

The call is written as operations of torch, those of `backend="torch"`, for which torch has
translations. They mean what every backend computes, empty rows and NaN behind masks included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv._dynamo import ends_graph
from qkv.call.binding.options import OptionValues
from qkv.errors import UnsupportedError

__all__ = ["as_torch_operations", "refuse_sizes"]

_UNKNOWN = "this call is exported to ONNX with sizes that are not known"
_INSTEAD = (
    "Export without dynamic_shapes, a program for each length; a mask then says which tokens are "
    "real"
)


def as_torch_operations(
    query: Any, key: Any, value: Any, variants: tuple[Any, ...], options: OptionValues
) -> tuple[tuple[Any, ...], OptionValues]:
    """Variants and options of the same call as operations of torch.

    Boolean masks become biases of 0 and -inf, because their values are not known yet.

    Raises
    ------
    UnsupportedError
        If a length is not known yet.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not all(type(size) is int for size in tensor.shape):
            refuse_sizes(f"{name} {tuple(tensor.shape)}")
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return tuple([_biased(v, dtype) for v in variants]), options._replace(backend="torch")


def refuse_sizes(seen: str = "") -> None:
    """Raise the error, or end Dynamo's graph with it, to which torch falls back."""
    raise UnsupportedError(f"{_UNKNOWN}.", [("seen", seen)] if seen else [], f"{_INSTEAD}.")


ends_graph(refuse_sizes, reason=f"{_UNKNOWN}. {_INSTEAD}")


def _biased(variant: Any, dtype: torch.dtype) -> Any:
    field = getattr(type(variant), "dense_field", None)
    array = getattr(variant, field) if field else variant
    if not isinstance(array, Tensor) or array.dtype is not torch.bool:
        return variant
    return torch.zeros(array.shape, dtype=dtype).masked_fill(~array, -torch.inf)
