"""Operands and arrays of a call as tensors that torch's operators take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv._dynamo import constant_result, ends_graph
from qkv.arguments.array_errors import variable
from qkv.arrays import is_array, library_of
from qkv.arrays.torch_arrays import TorchArrays, check_dense
from qkv.arrays.views import view_beside
from qkv.call.binding.flatten import ARRAY_TYPES, NUMBER_TYPES
from qkv.errors import DTypeError, UnsupportedError

__all__ = [
    "LIBRARY",
    "PLAIN",
    "as_tensor",
    "autocast",
    "check_devices",
    "is_tracked",
    "kept_tensor",
    "operand",
    "tensor_in_graph",
    "view_of",
]

LIBRARY = TorchArrays()

PLAIN = (Tensor, torch.nn.Parameter)
ARRAY_TYPES.update(PLAIN)


def _number(traced: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float:
    """The number that stands for a traced one; torch notes that the graph holds for it alone.

    Nothing but its compiler and export reads the note. Whatever else traces, as `make_fx`, would
    give a graph that computes with this number for every size.
    """
    if not torch.compiler.is_compiling():
        raise UnsupportedError(
            f"a number made of traced sizes, {traced}, would be this call's in every later one.",
            action="Use torch.compile or torch.export, or pass an int or a float.",
        )
    return float(traced) if isinstance(traced, torch.SymFloat) else int(traced)


NUMBER_TYPES.update(dict.fromkeys((torch.SymInt, torch.SymFloat, torch.SymBool), _number))


def view_of(tensor: Tensor) -> Any:
    """The memory of a tensor as a NumPy array."""
    return LIBRARY.view(tensor, "a tensor")


def is_tracked(array: Any) -> bool:
    return isinstance(array, Tensor) and LIBRARY.is_tracked(array)


def as_tensor(array: Any, role: str = "an array of the call") -> Any:
    """An array of any library as a tensor of the same memory, where torch can have that."""
    if isinstance(array, Tensor):
        return array
    if torch.compiler.is_dynamo_compiling() and isinstance(array, np.ndarray):
        return tensor_in_graph(array)  # Dynamo can trace this check.
    if not is_array(array):
        return array
    seen = view_beside(LIBRARY, array, role)
    item = max(seen.itemsize, 1)
    as_is = seen.flags.writeable and all(s >= 0 and s % item == 0 for s in seen.strides)
    try:
        with torch._C._DisableFuncTorch():  # Its transforms would take it for one of theirs.
            if as_is:
                return LIBRARY.restore(seen)
            once = tuple([slice(None) if stride else slice(0, 1) for stride in seen.strides])
            return LIBRARY.restore(np.array(seen[once])).expand(seen.shape)
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"{role} has dtype {seen.dtype}, which torch does not have.",
            action=f"Convert it, as in {variable(role)}.astype('float32').",
        ) from error


def tensor_in_graph(array: Any) -> Tensor:
    """An array of NumPy as a tensor of the graph that Dynamo writes.

    Of arrays that were made outside, `torch.export` with strict=True keeps tensors without values.
    """
    if torch.compiler.is_exporting() and _graph_reads_numpy():
        _refuse_numpy()
    return torch.as_tensor(array, device="cpu")


@constant_result
def _graph_reads_numpy() -> bool:
    """Whether the graph that Dynamo writes reads an array of NumPy that was made outside of it."""
    from torch._dynamo.source import NumpyTensorSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    graph = InstructionTranslator.current_tx().output
    return any(isinstance(argument.source, NumpyTensorSource) for argument in graph.graphargs)


def _refuse_numpy() -> None:
    raise UnsupportedError(_NUMPY_IN_EXPORT, action=_TENSOR_INSTEAD)


_NUMPY_IN_EXPORT = (
    "this call is exported with strict=True and reads an array of NumPy, whose values torch does "
    "not keep."
)
_TENSOR_INSTEAD = (
    "Make it a tensor before, as in torch.as_tensor(array), or export with strict=False."
)
ends_graph(_refuse_numpy, reason=f"{_NUMPY_IN_EXPORT} {_TENSOR_INSTEAD}")


def operand(array: Any, role: str) -> Tensor:
    """An operand as a dense tensor."""
    tensor: Tensor = as_tensor(array, role)
    if not isinstance(tensor, Tensor):
        library_of(array, role, LIBRARY).view(array, role)  # This raises, as it is no array.
    check_dense(tensor, role)
    return tensor


def kept_tensor(tensor: Any, given: Any) -> Any:
    """The tensor of an array; a copy of a NumPy array that a backward pass may read again.

    torch notices that a tensor has changed since the forward pass, but not that an array has.
    """
    if not isinstance(given, np.ndarray) or not torch.is_grad_enabled():
        return tensor
    with torch._C._DisableFuncTorch():
        narrow = tensor[tuple([slice(None) if step else slice(0, 1) for step in tensor.stride()])]
        return narrow.clone().expand(tensor.shape) if tensor.numel() else tensor


def check_devices(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.device == key.device == value.device:
        raise UnsupportedError(
            "query, key and value are on different devices.",
            [("query", str(query.device)), ("key", str(key.device)), ("value", str(value.device))],
            "Move them to one, as in key.to(query.device).",
        )


def is_in_autocast(query: Tensor) -> bool:
    """Whether autocast is on for the device of a query."""
    device = query.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operands in the type that autocast asks for, as torch's own attention would take them."""
    if not is_in_autocast(query):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (
        t if t.dtype is torch.float64 else t.to(dtype) for t in (query, key, value)
    )
    return query, key, value
