"""Checks of the arguments of layers, where the errors of torch would not say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn

from qkv.arguments.declarations import shown
from qkv.arrays.torch_arrays import check_dense
from qkv.call.binding.unknown_keywords import keyword_error
from qkv.errors import ArgumentError, DTypeError, KeywordError, ShapeError
from qkv.variants.base import Variant

__all__ = [
    "Device",
    "FloatingType",
    "first_line",
    "require_fitting",
    "require_tensors",
    "unknown_of_layer",
]


def _device(name: str, given: Any) -> torch.device | None:
    if given is None:
        return None
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name}={shown(given)} is not a device on which torch makes tensors here.",
            [("torch says", first_line(error))],
            f"Pass {name} as torch.device('cpu'), or as another one that this machine has.",
        ) from error
    return device


def _dtype(name: str, given: Any) -> torch.dtype | None:
    if given is None or (isinstance(given, torch.dtype) and given in _DTYPES):
        return given
    raise DTypeError(
        f"{name}={shown(given)} is not a type that weights can have here.",
        action=f"Pass one of {', '.join(map(str, _DTYPES))}.",
    )


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Device: TypeAlias = Annotated[Any, _device]
"""What torch takes for a device, or None."""
FloatingType: TypeAlias = Annotated[Any, _dtype]
"""A type that rows and weights can have, or None."""


def first_line(error: BaseException) -> str:
    """The kind of an exception, and how its message begins."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.120}"


def require_tensors(**given: Any) -> None:
    """Refuse what is not a tensor, or one whose rows have lengths of their own."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            action = f"Pass torch.as_tensor({name}), or call qkv.attention."
            if isinstance(tensor, Variant) and name in ("key", "value"):
                action = (
                    f"Variants follow key and value: layer(query, key, value, {shown(tensor)})."
                )
            raise DTypeError(f"{name} is a {type(tensor).__name__}, not a tensor.", action=action)
        if tensor.is_nested:
            check_dense(tensor, name)


def require_fitting(name: str, rows: Tensor, projection: nn.Module) -> None:
    """Refuse rows that a projection cannot be multiplied with.

    Only the number of dimensions is checked where a projection was replaced (adapters, quantized
    weights) or has hooks, because these may convert rows or weights before the product.
    """
    if rows.ndim < 2:
        raise ShapeError(
            f"{name} has {rows.ndim} dimensions.",
            [(name, str(tuple(rows.shape)))],
            "Pass a tensor (..., length, width).",
        )
    changed = projection._forward_pre_hooks or "forward" in vars(projection)
    if type(projection) is not nn.Linear or changed:
        return
    weight = projection.weight
    if rows.shape[-1] != projection.in_features:
        raise ShapeError(
            f"{name} has rows of length {rows.shape[-1]}; those of its projection have "
            f"{projection.in_features}.",
            [(name, str(tuple(rows.shape))), ("weight", str(tuple(weight.shape)))],
            "Pass rows of that length, or make the layer with another embed_dim or kv_dim.",
        )
    kind = rows.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if rows.dtype != weight.dtype and not (autocast and rows.is_floating_point()):
        raise DTypeError(
            f"{name} has dtype {rows.dtype}; the weights of its projection have {weight.dtype}.",
            action=f"Pass {name}.to({weight.dtype}), or convert the layer.",
        )
    if rows.device != weight.device:
        raise ArgumentError(
            f"{name} is on {rows.device}; the weights of its projection are on {weight.device}.",
            action=f"Pass {name}.to({str(weight.device)!r}), or move the layer.",
        )


_KNOWN = ("num_kv_heads", "causal", "rope", "alibi", "dropout", "bias", "kv_dim", "device", "dtype")


def unknown_of_layer(unknown: Mapping[str, Any]) -> KeywordError:
    """What to raise for keywords that `MultiHeadAttention` is not made with."""
    close = get_close_matches(next(iter(unknown)), _KNOWN, 1)
    action = f"Pass {close[0]}= instead." if close else "Pass only keywords from this list."
    widths = [unknown[name] for name in ("kdim", "vdim") if isinstance(unknown.get(name), int)]
    if "batch_first" in unknown:
        moved = "" if unknown["batch_first"] is True else ", and pass rows.transpose(0, 1)"
        action = f"Leave it out{moved}: the batch always comes first."
    elif widths:
        given = "kv_dim" if widths[0] != widths[-1] else f"kv_dim={widths[0]}"
        action = f"Pass {given}, the width of key and value."
    fact = keyword_error("MultiHeadAttention", unknown, _KNOWN).fact
    return KeywordError(fact, [("keywords", ", ".join(_KNOWN))], action)
