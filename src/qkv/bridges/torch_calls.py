"""`qkv.attention` of torch tensors: which way a call goes.

Where nobody can ask for derivatives and nothing looks on, qkv computes at once on the tensors'
memory. Else the call becomes an operation that torch differentiates, batches, traces or compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv._dynamo import ends_graph
from qkv.arrays import is_array, library_of
from qkv.arrays.torch_arrays import TorchArrays, check_dense
from qkv.arrays.views import view_beside
from qkv.backends import device_backend
from qkv.bridges import torch_functions as functions
from qkv.bridges.learnable import refuse_constants, with_scale
from qkv.bridges.torch_observers import looks_on
from qkv.bridges.torch_openmp import on_torch_threads
from qkv.bridges.torch_operators import contiguous
from qkv.bridges.torch_prepared import run_alike, run_prepared
from qkv.call.attend import attend
from qkv.call.bound import ARRAY_TYPES, BoundCall, Structure, bind
from qkv.call.device_call import check_device_call, is_device_call
from qkv.call.flatten import declared_fields
from qkv.call.merging import merge_parts
from qkv.call.options import OptionValues
from qkv.call.structure_text import hold, keep_for_good, names_objects
from qkv.errors import ArgumentError, QkvError, UnsupportedError
from qkv.problem.stored_rows import Paged, Quantized

__all__ = ["attention", "merge_in_graph", "run_alike"]


def attention(
    query: Any,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    options: OptionValues,
    return_lse: bool,
) -> Any:
    """See `qkv.attention`."""
    if isinstance(options.scale, Tensor) and _is_learned(options.scale, query):
        query, options = with_scale(query, options)
    if torch.compiler.is_dynamo_compiling():
        return _compiled(query, key, value, variants, options, return_lse)
    bound = bind(query, key, value, variants, options)
    try:
        found = run_prepared(bound, return_lse)
        if found is not None:
            return found
        with on_torch_threads():
            refuse_constants(variants, _is_tracked, ".detach()")
            return _attend(bound, return_lse)
    except QkvError as error:
        raise error.with_action(_LIBRARY.in_words(error.action)) from None


def _wants_gradient(array: Any) -> bool:
    return isinstance(array, Tensor) and array.requires_grad and torch.is_grad_enabled()


def _is_tracked(array: Any) -> bool:
    return isinstance(array, Tensor) and _LIBRARY.is_tracked(array)


def _is_learned(scale: Tensor, query: Any) -> bool:
    """Whether torch has to see what a scale does; one for each head is one of its operations."""
    if not isinstance(query, Tensor):
        return False
    compiling = torch.compiler.is_dynamo_compiling()
    return bool(scale.ndim) or compiling or _is_tracked(scale)


def _attend(bound: BoundCall, return_lse: bool) -> Any:
    """A call that was not prepared."""
    if not bound.structure.is_plain:
        query, key, value, *_ = bound.unflatten()
        _refuse_gradients(query, *_within(key), *_within(value))
        found = attend(bound)
        return (found.out, found.lse) if return_lse else found.out
    query, key, value = map(_operand, bound.leaves[:3], _ROLES)
    for leaf in bound.leaves[3:]:
        if isinstance(leaf, Tensor):
            check_dense(leaf, "an array of the call")
    operands = query, key, value
    leaves = _autocast(*operands)
    if is_device_call(bound):
        _check_devices(*leaves)
        tensors = tuple(map(_tensor, bound.leaves[3:]))
        return _on_device(BoundCall(bound.structure, (*leaves, *tensors)), return_lse)
    if _is_watched(*leaves, *bound.leaves[3:]):
        _check_devices(*leaves)
        query, key, value = map(_kept, leaves, bound.leaves)
        leaves = query, key, value
        tensors = tuple([_kept(_tensor(leaf), leaf) for leaf in bound.leaves[3:]])
        _refuse_half_fake(*leaves, *tensors)
        _hold_if_seen(bound.structure)
        try:
            out, lse = functions.attend(*leaves, tensors, bound.structure)
        except (NotImplementedError, TypeError) as error:
            _explain_subclasses(error, *leaves, *tensors)
            raise
        return (out, lse) if return_lse else out
    views = [view_beside(_LIBRARY, leaf, "an array of the call") for leaf in bound.leaves[3:]]
    seen = BoundCall(bound.structure, (*map(_LIBRARY.view, leaves, _ROLES), *views))
    attended = attend(seen, rows=return_lse)
    out = contiguous(_LIBRARY.restore(attended.out))
    return (out, contiguous(_LIBRARY.restore(attended.lse))) if return_lse else out


def _compiled(
    query: Any,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    options: OptionValues,
    return_lse: bool,
) -> Any:
    """The call while Dynamo reads it: variants of one's own and functions are constants."""
    if isinstance(key, (Paged, Quantized)) or isinstance(value, (Paged, Quantized)):
        raise UnsupportedError(
            "torch compiles this call, and paged or quantised rows are no tensors.",
            action="Call it outside of torch.compile, or gather the rows into a tensor first.",
        )
    _tell_dynamo()
    refuse_constants(variants, _wants_gradient, ".detach()")
    for variant in variants:
        if _stays_whole(variant) and _kept_number(variant) < 0:
            from qkv.bridges.torch_outside import attention_outside

            return attention_outside(query, key, value, variants, options, return_lse)
    bound = bind(query, key, value, variants, options, _keep)
    query, key, value, *tensors = [_tensor(leaf) for leaf in bound.leaves]
    operands = _autocast(query, key, value)
    text = _text(tuple(bound.structure))
    if torch.compiler.is_exporting() and _names_objects(text):
        _refuse_export()
    if not operands[0].is_cpu or _is_of_a_device(options.backend):
        return _attend_on_device(*operands, tensors, text, return_lse)
    out, lse = functions.attend(*operands, tensors, text)
    return (out, lse) if return_lse else out


def _constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, which would import the compiler to set this."""
    # mypy does not know attributes of functions.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_constant_result(declared_fields)


def _keep_if_whole(variant: Any) -> int:
    """A number for a variant; none of one that Dynamo has no fields of, or that reads tensors."""
    if not vars(variant):
        return -1
    if hasattr(type(variant), "tree_flatten"):
        _, arrays = variant.tree_flatten()
        if any(isinstance(array, Tensor) for array in arrays):
            return -1
    return keep_for_good(variant)


_kept_number = _constant_result(_keep_if_whole)


def _keep(variant: Any) -> int:
    """Compiled code, and what it names, may live as long as the process. It takes score mods that
    were made outside it, and their arrays, as constants.
    """
    number: int = _kept_number(variant)
    if number < 0:
        raise ArgumentError(
            "a mask is made of a variant that is made inside of a function that torch compiles.",
            action="Make it before: compiled code takes such variants as constants.",
        )
    return number


def _stays_whole(variant: Any) -> bool:
    """Whether a variant declares nothing of what it holds; arrays are masks."""
    kind = None if isinstance(variant, (Tensor, np.ndarray)) else type(variant)
    return hasattr(kind, "lower") and getattr(kind, "roles", None) is None


def _is_device_backend(name: str) -> bool:
    return name != "auto" and device_backend(name) is not None


_is_of_a_device = _constant_result(_is_device_backend)


def _text_of_tuple(structure: tuple[Any, ...]) -> str:
    return Structure(*structure).text


_text = _constant_result(_text_of_tuple)


def _attend_on_device(
    query: Tensor, key: Tensor, value: Tensor, arrays: list[Tensor], text: str, return_lse: bool
) -> Any:
    """The call as one node of a graph that Dynamo writes: checks stay outside of what it reads."""
    bound = BoundCall(Structure.from_text(text), (query, key, value, *arrays))
    return _on_device(bound, return_lse)


@_constant_result
def _tell_dynamo() -> None:
    """Dynamo runs this before it reads a call that becomes a node: only now is it imported."""
    torch.compiler.allow_in_graph(_attend_on_device)
    torch.compiler.allow_in_graph(_merge_tensors)


def merge_in_graph(parts: tuple[tuple[Any, Any], ...], layout: Any) -> Any:
    """`qkv.merge` as one node of the graph that Dynamo writes; None if Dynamo does not read this.

    The node runs on stand-ins, where torch sees what it is made of.
    """
    if not torch.compiler.is_dynamo_compiling():
        return None
    for out, lse in parts:
        if not (isinstance(out, Tensor) and isinstance(lse, Tensor)):
            raise UnsupportedError(
                "torch compiles this call of merge, and a part is not of tensors.",
                action="Pass torch.as_tensor of its arrays.",
            )
    _tell_dynamo()
    return _merge_tensors(parts, layout)


def _merge_tensors(parts: Any, layout: Any) -> Any:
    return merge_parts(parts, layout, torch)


def _on_device(bound: BoundCall, return_lse: bool) -> Any:
    device = bound.leaves[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # Autocast converts the operands; scores and sums keep their own type.
        with torch.autocast(device, enabled=False):
            return _on_device(bound, return_lse)
    out, lse = check_device_call(bound).attend(lse=return_lse)
    return (out, lse) if return_lse else out


_names_objects = _constant_result(names_objects)


_NOT_PORTABLE = "this call is exported with a variant that only this process knows"
_INSTEAD = (
    "Make its class a dataclass with roles, in a module that can be imported; export a ScoreMod of "
    "operators and functions, whose arrays are tensors, with strict=False."
)


def _refuse_export() -> None:
    raise UnsupportedError(f"{_NOT_PORTABLE}.", action=_INSTEAD)


ends_graph(_refuse_export, reason=f"{_NOT_PORTABLE}. {_INSTEAD}")


def _hold_if_seen(structure: Structure) -> None:
    """Whatever looks on may write the text of the structure down."""
    if torch.compiler.is_exporting() and names_objects(structure.text):
        _refuse_export()
    if torch._C._len_torch_dispatch_stack() > 0:
        hold(structure)


def _refuse_gradients(*arrays: Any) -> None:
    """Better to hear that there are none than to train nothing."""
    if any(isinstance(array, Tensor) and _LIBRARY.is_tracked(array) for array in arrays):
        raise UnsupportedError(
            "torch differentiates this call, and paged or quantised rows have no way back.",
            action="Call it under torch.no_grad(), or gather the rows into a tensor first.",
        )


def _within(rows: Any) -> list[Any]:
    """The arrays that keys or values are read from."""
    match rows:
        case Paged(pages=pages):
            return _within(pages)
        case Quantized(values=values, scales=scales, offset=offset):
            return [values, scales, offset]
    return [rows]


def _tensor(array: Any) -> Any:
    """An array of any library as a tensor of the same memory, where torch can have that."""
    if isinstance(array, Tensor):
        return array
    if torch.compiler.is_dynamo_compiling() and isinstance(array, np.ndarray):
        return torch.as_tensor(array)  # Dynamo can trace this check.
    if not is_array(array):
        return array
    seen = view_beside(_LIBRARY, array, "an array of the call")
    dense = seen.flags.writeable and min(seen.strides, default=0) >= 0
    return _LIBRARY.restore(seen if dense else seen.copy())


def _operand(array: Any, role: str) -> Tensor:
    """An operand as a dense tensor."""
    tensor: Tensor = _tensor(array)
    if not isinstance(tensor, Tensor):
        library_of(array, role, _LIBRARY)  # Raises, because it is an array of none.
    check_dense(tensor, role)
    return tensor


def _kept(tensor: Any, given: Any) -> Any:
    """The tensor of an array; a copy of a NumPy array that a backward pass may read again.

    torch notices that a tensor has changed since the forward pass, but not that an array has.
    """
    if not isinstance(given, np.ndarray) or not torch.is_grad_enabled():
        return tensor
    narrow = tensor[tuple([slice(None) if step else slice(0, 1) for step in tensor.stride()])]
    return narrow.clone().expand(tensor.shape) if tensor.numel() else tensor


def _check_devices(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.device == key.device == value.device:
        raise UnsupportedError(
            "query, key and value are on different devices.",
            [("query", str(query.device)), ("key", str(key.device)), ("value", str(value.device))],
            "Move them to one, as in key.to(query.device).",
        )


def _explain_subclasses(error: Exception, *tensors: Any) -> None:
    """Tensors of classes of their own decide which operators they take."""
    names = {type(t).__name__ for t in tensors if isinstance(t, Tensor) and type(t) not in PLAIN}
    if names and "qkv" in str(error):
        raise UnsupportedError(
            f"{' and '.join(sorted(names))} refuses operators that it does not know.",
            [("torch says", str(error).splitlines()[0][:200])],
            "Pass plain tensors.",
        ) from error


def _refuse_half_fake(*tensors: Any) -> None:
    """Fake tensors beside real ones, which torch joins only inside a mode that makes them."""
    fake = [type(t).__module__ == "torch._subclasses.fake_tensor" for t in tensors]
    if any(fake) and not all(fake) and torch._C._len_torch_dispatch_stack() == 0:
        raise UnsupportedError(
            "fake tensors, which have no values, stand beside real ones.",
            [("fake", f"{sum(fake)} of {len(fake)} arrays of the call")],
            "Call attention inside their FakeTensorMode, or convert all arrays with it.",
        )


_LIBRARY = TorchArrays()
_ROLES = ("query", "key", "value")


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operands in the type that autocast asks for, as torch's own attention would take them."""
    device = query.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (
        t if t.dtype is torch.float64 else t.to(dtype) for t in (query, key, value)
    )
    return query, key, value


def _is_watched(*arrays: Any) -> bool:
    """Whether torch must see the operation, or changes what it is given."""
    tensors = [array for array in arrays if isinstance(array, Tensor)]
    return (
        looks_on()
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or any(type(t) not in PLAIN for t in tensors)
    )


PLAIN = (Tensor, torch.nn.Parameter)
ARRAY_TYPES.update(PLAIN)
