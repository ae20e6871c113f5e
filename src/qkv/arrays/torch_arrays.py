"""torch tensors on the CPU: their memory is used in place, strided or not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from qkv.arguments.array_errors import variable
from qkv.errors import DTypeError, ShapeError, UnsupportedError


def check_dense(array: torch.Tensor, role: str) -> None:
    """Raise for a tensor whose elements do not lie in memory with a stride for each dimension."""
    is_plain = type(array) is torch.Tensor and array.layout is torch.strided
    if is_plain and not (array.is_nested or array.is_quantized):
        return
    if is_lazy(array):
        raise DTypeError(
            f"{role} is a parameter that has no shape yet.",
            action="Run its module once, so that it learns its shapes.",
        )
    name = variable(role)
    if array.is_nested:
        raise DTypeError(
            f"{role} is a nested tensor, whose rows have lengths of their own.",
            action=f"Pass torch.nested.to_padded_tensor({role}, 0.0) with qkv.KeyLengths, or rows "
            "of all sequences in one tensor with qkv.Segments."
            if role in _OPERANDS
            else f"Pass a tensor of one shape, as torch.nested.to_padded_tensor makes of {name}.",
        )
    if array.layout is not torch.strided or array.is_quantized:
        dense = "dequantize" if array.is_quantized else "to_dense"
        raise DTypeError(
            f"{role} is a {array.layout} tensor of {array.dtype}, not a dense one.",
            action=f"Pass {name}.{dense}().",
        )


def check_beside(array: torch.Tensor, role: str, query: torch.Tensor) -> None:
    """Raise for an array of a call that is neither in main memory nor where the query is."""
    if array.device.type == "cpu" or array.device == query.device:
        return
    check_values(array, role)
    raise UnsupportedError(
        f"{role} is on {array.device} and query on {query.device}.",
        action=f"Move it there, as in {variable(role)}.to(query.device).",
    )


def check_values(array: torch.Tensor, role: str) -> None:
    """Raise for a tensor on meta, where only types and shapes are known."""
    if array.is_meta:
        raise UnsupportedError(
            f"{role} is on meta, where tensors have no values.",
            action=f"Pass {variable(role)} with values, as one that was made on the CPU has.",
        )


def check_loaded(module: torch.nn.Module, weights: Iterable[torch.Tensor]) -> None:
    """Raise for a module some of whose weights are on meta."""
    if any(weight.is_meta for weight in weights):
        raise UnsupportedError(
            f"weights of {type(module).__name__} are on the device meta: they are offloaded, or "
            "were never loaded.",
            action="Load the model into memory, without device_map or offloading.",
        )


def keeps_values() -> bool:
    """Whether torch traces with tensors that have values, as `torch.jit.trace` and `make_fx` do.

    What is read of such a tensor is a constant of the trace.
    """
    has_proxies = (_dispatch_modes() and _get_dispatch_mode(_PROXY) is not None) or _has_key(
        _PRE_DISPATCH
    )
    return has_proxies or _tracing_state() is not None


def is_readable(array: torch.Tensor) -> bool:
    """Whether a tensor has values, which torch does not hide while it traces or transforms."""
    return type(array) in _PLAIN and not (array.is_meta or _is_transformed(array))


class TorchArrays:
    """torch tensors, with bfloat16 through ml_dtypes; this module computes no gradients."""

    name = "torch"

    def view(self, array: Any, role: str) -> NDArray[Any]:
        """The tensor's memory as a NumPy array."""
        if keeps_values():
            raise UnsupportedError(
                f"torch traces this computation, which reads the memory of {role}: the result "
                "would be a constant of the trace.",
                action="Call it outside of the trace; the output of qkv.attention is traced.",
            )
        if type(array) in _PLAIN and array.dtype in _NUMPY_DTYPES:
            try:
                if array.data_ptr() or not array.numel():
                    plain = array.detach() if array.requires_grad else array
                    return _numpy_of(_own_if_small(plain, array))
            except (RuntimeError, TypeError, ValueError):
                pass  # The checks below raise an error that explains the reason.
        check_dense(array, role)
        name = variable(role)
        check_values(array, role)
        if array.device.type != "cpu":
            instead = (
                ", or call qkv.attention, which torch's own kernels can run where the tensors are"
            )
            raise UnsupportedError(
                f"{role} is on {array.device}; this computes on the CPU.",
                action=f"Pass {name}.cpu(){instead if role in _OPERANDS else ''}.",
            )
        try:
            plain = _own_if_small(array.detach().resolve_neg(), array)
            has_memory = bool(plain.data_ptr() or not plain.numel())
            memory = _numpy_of(plain)
        except ValueError as error:
            raise ShapeError(
                f"{role} has {array.ndim} dimensions, more than NumPy can have.",
                action=f"Join leading dimensions, as in {name}.flatten(0, -4).",
            ) from error
        except (RuntimeError, TypeError) as error:
            if type(error) is TypeError and type(array) in _PLAIN:
                raise DTypeError(
                    f"{role} has dtype {array.dtype}, which NumPy does not have.",
                    action=f"Convert it, as in {name}.float().",
                ) from error
            raise DTypeError(
                f"{role} is a {type(array).__name__} whose memory cannot be read.",
                [("torch says", str(error))],
                action="Pass a plain tensor with the same values.",
            ) from error
        if not has_memory:
            raise DTypeError(
                f"{role} of shape {tuple(array.shape)} has no memory: its storage has been freed.",
                action="Fill the tensor first; where a library shards parameters, gather them.",
            )
        return memory

    def restore(self, array: NDArray[Any]) -> Any:
        """A tensor in the array's memory."""
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(np.asarray(array))

    def described(self, array: Any) -> NDArray[Any]:
        """A NumPy array of the tensor's type and shape; its values are not read."""
        if not isinstance(array, torch.Tensor):
            return np.broadcast_to(np.zeros((), np.asarray(array).dtype), np.shape(array))
        known = _DTYPES.get(array.dtype)
        if known is None:
            one = self.view(torch.zeros((), dtype=array.dtype), "an operand")
        else:
            one = np.zeros((), known)
        return np.broadcast_to(one, tuple(array.shape))

    def on_host(self, array: Any, role: str, *, by_value: bool) -> NDArray[Any]:
        """The values in main memory; see `ArrayLibrary.on_host`."""
        if not isinstance(array, torch.Tensor):
            return np.asarray(array)
        if is_readable(array):
            with torch._C._DisableFuncTorch():  # Its transforms wrap what operations return.
                host = array.detach().cpu()
                if type(host) is torch.Tensor:
                    return self.view(host, role)
        if not by_value and (array.is_floating_point() or array.dtype is torch.bool):
            # `np.ascontiguousarray` would give a tensor without dimensions one.
            return np.asarray(self.described(array), order="C")
        raise UnsupportedError(
            "the values of an array are asked for while torch traces or transforms the call, "
            f"on {array.device} or with backend='torch'.",
            [(role, f"{array.dtype} {tuple(array.shape)}")],
            "Pass it as a floating bias (0 or -inf), or call attention outside of that.",
        )

    def is_tracked(self, array: Any) -> bool:
        """Whether autograd, in reverse or forward mode, or `torch.func` tracks the tensor."""
        return (
            (array.requires_grad and torch.is_grad_enabled())
            or _is_transformed(array)
            or (
                forward_ad._current_level >= 0 and forward_ad.unpack_dual(array).tangent is not None
            )
        )

    def in_words(self, advice: str) -> str:
        """Conversions as tensors have them, such as `key.to(query.dtype)`."""
        advice = re.sub(r"numpy\.asarray\((\w+), dtype='float32'\)", r"torch.as_tensor(\1)", advice)
        return re.sub(
            r"\.astype\(([^()]*)\)", lambda match: f".to({_dtype_name(match[1])})", advice
        )


def _numpy_of(plain: torch.Tensor) -> NDArray[Any]:
    """The memory of a tensor that autograd does not follow."""
    memory: NDArray[Any]
    if plain.dtype is torch.bfloat16:
        memory = plain.view(torch.int16).numpy().view(_BFLOAT16)
    else:
        memory = plain.numpy()
    return memory


def _own_if_small(memory: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, or a copy of that of a small parameter, such as sinks or slopes.

    torch cannot resize what NumPy has had a view of, and FSDP frees parameters between layers.
    """
    is_small = type(array) is torch.nn.Parameter and array.numel() <= _SMALL
    return memory.clone() if is_small and memory.data_ptr() else memory


_SMALL = 2**16
"""Numbers that are copied in no time; large parameters are read in place."""


def _dtype_name(written: str) -> str:
    """What torch calls a type of NumPy: 'float32', np.float32, bool, int."""
    name = written.strip("'").removeprefix("np.")
    return name if "." in name else f"torch.{name}"


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES = {
    torch.float64: np.dtype("float64"),
    torch.float32: np.dtype("float32"),
    torch.float16: np.dtype("float16"),
    torch.bfloat16: _BFLOAT16,
    torch.bool: np.dtype(bool),
}
_NUMPY_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_get_dispatch_mode = torch._C._get_dispatch_mode
_has_key = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_tracing_state = torch._C._get_tracing_state
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_OPERANDS = ("query", "key", "value")
