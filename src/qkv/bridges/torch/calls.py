"""`qkv.attention` of torch tensors: which way a call goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.arrays import is_array
from qkv.bridges.learnable import with_scale
from qkv.bridges.torch import compiled, eager
from qkv.bridges.torch.operands import (
    LIBRARY,
    PLAIN,
    autocast,
    is_in_autocast,
    is_tracked,
    operand,
)
from qkv.bridges.torch.repeated.prepared import run_alike, run_prepared, run_step_of_span
from qkv.bridges.torch.score_mods import begins_in_the_bridge
from qkv.call.binding.bound import bind
from qkv.call.binding.options import OptionValues
from qkv.call.repeated.cache import CALLS
from qkv.errors import QkvError

__all__ = [
    "PLAIN", "attention", "attention_to_span", "in_autocast", "merge", "run_alike",
]  # fmt: skip


def attention(
    query: Any,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    options: OptionValues,
    return_lse: bool,
) -> Any:
    """See `qkv.attention`."""
    if torch.compiler.is_dynamo_compiling() and begins_in_the_bridge():
        return compiled.leave(attention, query, key, value, variants, options, return_lse)
    if isinstance(options.scale, Tensor) and _is_learned(options.scale, query):
        query, options = with_scale(query, options)
    if torch.compiler.is_dynamo_compiling():
        return compiled.attention(query, key, value, variants, options, return_lse, attention)
    bound = bind(query, key, value, variants, options)
    try:
        entry = CALLS.entry(bound.structure)
        if entry is not None:
            results = run_prepared(entry, bound, return_lse)
            if results is not None:
                return results
        return eager.attention(bound, variants, return_lse)
    except QkvError as error:
        raise error.with_action(LIBRARY.in_words(error.action)) from None


def in_autocast(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """What `attention` computes with under autocast; keys in pages or as int8 stay as they are."""
    given = query, key, value
    if not isinstance(query, Tensor) or not is_in_autocast(query) or not all(map(is_array, given)):
        return given
    return autocast(*map(operand, given, ("query", "key", "value")))


def attention_to_span(
    query: Any,
    key: Any,
    value: Any,
    span: tuple[int, int],
    variants: tuple[Any, ...],
    options: OptionValues,
    return_lse: bool,
) -> Any:
    """`attention` to the keys from the first of `span` to before the second, if a decoding step is
    prepared for it; else None. Views of them are not needed, and take longer than a short step.
    """
    if torch.compiler.is_dynamo_compiling() or isinstance(options.scale, Tensor):
        return None
    bound = bind(query, key, value, variants, options)
    entry = CALLS.entry(bound.structure)
    return None if entry is None else run_step_of_span(entry, bound, span, return_lse)


def merge(parts: tuple[tuple[Any, Any], ...], layout: Any) -> Any:
    """`qkv.merge` where torch has to see what it is made of; None elsewhere."""
    if torch.compiler.is_dynamo_compiling():
        return compiled.merge(parts, layout)
    return eager.merge(parts, layout)


def _is_learned(scale: Tensor, query: Any) -> bool:
    """Whether torch has to see what a scale does; one for each head is one of its operations."""
    if not isinstance(query, Tensor):
        return False
    compiling = torch.compiler.is_dynamo_compiling()
    return bool(scale.ndim) or compiling or is_tracked(scale)
