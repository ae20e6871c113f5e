"""`qkv.attention` of torch tensors while Dynamo, torch's compiler, reads the call."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv._dynamo import constant_result
from qkv.backends import device_backend
from qkv.bridges.learnable import refuse_constants
from qkv.bridges.torch import score_mods
from qkv.bridges.torch.eager import attend_on_device, refuse_export
from qkv.bridges.torch.onnx import refuse_sizes
from qkv.bridges.torch.operands import as_tensor, autocast, is_tracked
from qkv.bridges.torch.operations import functions
from qkv.call.binding.bound import BoundCall, Structure, bind
from qkv.call.binding.flatten import declared_fields, slots_of
from qkv.call.binding.options import OptionValues
from qkv.call.binding.structure_text import keep_for_good, names_objects
from qkv.call.binding.undeclared import arrays_in
from qkv.call.merging import merge_parts
from qkv.errors import ArgumentError, QkvError, UnsupportedError
from qkv.problem.stored_rows import Paged, Quantized

__all__ = ["attention", "leave", "merge"]


def attention(
    query: Any,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    options: OptionValues,
    return_lse: bool,
    outside: Callable[..., Any],
) -> Any:
    """The call while Dynamo reads it: variants of one's own and functions are constants.

    `outside` takes the same call where it cannot be part of a graph.
    """
    if isinstance(key, (Paged, Quantized)) or isinstance(value, (Paged, Quantized)):
        raise UnsupportedError(
            "torch compiles this call, and paged or quantised rows are not tensors.",
            action="Call it outside of torch.compile, or gather the rows into a tensor first.",
        )
    if _is_differentiated_inside():
        return _leave_to_derivatives(outside, query, key, value, variants, options, return_lse)
    _tell_dynamo()
    if _is_for_onnx():
        refuse_sizes()
    refuse_constants(variants, _wants_gradient)
    given = [_with_functions(variant) for variant in variants]
    if any(variant is None for variant in given):
        return leave(outside, query, key, value, variants, options, return_lse)
    variants = tuple(given)
    bound = bind(query, key, value, variants, options, _keep)
    query, key, value, *tensors = [as_tensor(leaf) for leaf in bound.leaves]
    operands = autocast(query, key, value)
    text = _text(tuple(bound.structure))
    if torch.compiler.is_exporting() and _names_objects(text):
        refuse_export()
    if not operands[0].is_cpu or _is_of_a_device(options.backend):
        return _node(*operands, tensors, text, return_lse)
    out, lse = functions.attend(*operands, tensors, text)
    return (out, lse) if return_lse else out


@constant_result
def _is_differentiated_inside() -> bool:
    """Whether `torch.func` or forward mode differentiates what Dynamo reads.

    An operator has no derivative of its own there: tangents of its results would be zeros.
    """
    kinds = torch._C._functorch.TransformType
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return torch.autograd.forward_ad._current_level >= 0 or any(
        transform.key() in (kinds.Grad, kinds.Jvp) for transform in transforms
    )


def _leave_to_derivatives(function: Callable[..., Any], *given: Any) -> Any:
    from qkv.bridges.torch.outside import differentiate_outside

    return differentiate_outside(function, *given)


def leave(function: Callable[..., Any], *given: Any) -> Any:
    """A call where it cannot be part of a graph."""
    from qkv.bridges.torch.outside import call_outside

    return call_outside(function, *given)


def _with_functions(variant: Any) -> Any:
    """A variant as a graph can hold it, None if it cannot.

    If it was made before, and reads no tensors, it is a constant as long as the numbers that it
    reads are the same, or read where the graph runs. Else its functions are read.
    """
    whole = _stays_whole(variant)
    made_before = whole and _kept_number(variant) >= 0
    if not isinstance(variant, np.ndarray) and hasattr(type(variant), "with_functions"):
        if not made_before:
            return variant.with_functions(score_mods.read)
        text = _constant_text(variant)
        made = None
        if text is not None:
            made = variant.with_functions(partial(score_mods.read_made_before, text))
        return variant if made is None else made
    return variant if made_before or not whole else None


@constant_result
def _constant_text(variant: Any) -> str | None:
    """The expression of a function that reads only what is known to stay, as text.

    It is empty if attributes of objects are read, None if arrays are, which graphs do not copy.
    """
    static, arrays = variant.tree_flatten()
    if arrays:
        return None
    return "" if getattr(static, "constants", None) is None else json.dumps(static.in_words())


@constant_result
def _is_for_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def _wants_gradient(array: Any) -> bool:
    return isinstance(array, Tensor) and array.requires_grad and torch.is_grad_enabled()


constant_result(declared_fields)
constant_result(slots_of)


@constant_result
def _kept_number(variant: Any) -> int:
    """A number for a variant; none of one that Dynamo has no fields of, or that reads tensors."""
    if not getattr(variant, "__dict__", None) or any(is_tracked(a) for _, a in arrays_in(variant)):
        return -1
    if hasattr(type(variant), "tree_flatten"):
        try:
            _, arrays = variant.tree_flatten()
        except QkvError:
            return -1  # The call says it to its caller, where torch does not add words of its own.
        if any(isinstance(array, Tensor) for array in arrays):
            return -1
    return keep_for_good(variant)


def _keep(variant: Any) -> int:
    """Compiled code, and what it names, may live as long as the process. It takes score mods that
    were made outside it, and their arrays, as constants.
    """
    number = _kept_number(variant)
    if number < 0:
        raise ArgumentError(
            "a mask is made of a variant that is made inside of a function that torch compiles.",
            action="Make it before: compiled code takes such variants as constants.",
        )
    return number


def _stays_whole(variant: Any) -> bool:
    """Whether a variant declares nothing of what it holds; arrays are masks."""
    if isinstance(variant, (Tensor, np.ndarray)):
        return False
    kind = type(variant)
    return hasattr(kind, "lower") and getattr(kind, "roles", None) is None


@constant_result
def _is_of_a_device(name: str) -> bool:
    return name != "auto" and device_backend(name) is not None


@constant_result
def _text(structure: tuple[Any, ...]) -> str:
    return Structure(*structure).text


def _node(
    query: Tensor, key: Tensor, value: Tensor, arrays: list[Tensor], text: str, return_lse: bool
) -> Any:
    """The call as one node of a graph that Dynamo writes: checks stay outside of what it reads."""
    bound = BoundCall(Structure.from_text(text), (query, key, value, *arrays))
    return attend_on_device(bound, return_lse)


@constant_result
def _tell_dynamo() -> None:
    """Dynamo runs this before it reads a call that becomes a node: only now is it imported."""
    torch.compiler.allow_in_graph(_node)
    torch.compiler.allow_in_graph(_merge_tensors)


def merge(parts: tuple[tuple[Any, Any], ...], layout: Any) -> Any:
    """`qkv.merge` as one node of the graph that Dynamo writes.

    The node runs on stand-ins, where torch sees what it is made of.
    """
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


_names_objects = constant_result(names_objects)
