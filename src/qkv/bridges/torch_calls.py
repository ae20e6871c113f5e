"""`qkv.attention` of torch tensors: which way a call goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.bridges import torch_compiled, torch_eager
from qkv.bridges.learnable import with_scale
from qkv.bridges.torch_compiled import merge_in_graph
from qkv.bridges.torch_operands import PLAIN, is_tracked
from qkv.bridges.torch_prepared import run_alike
from qkv.call.options import OptionValues

__all__ = ["PLAIN", "attention", "merge_in_graph", "run_alike"]


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
        return torch_compiled.attention(query, key, value, variants, options, return_lse)
    return torch_eager.attention(query, key, value, variants, options, return_lse)


def _is_learned(scale: Tensor, query: Any) -> bool:
    """Whether torch has to see what a scale does; one for each head is one of its operations."""
    if not isinstance(query, Tensor):
        return False
    compiling = torch.compiler.is_dynamo_compiling()
    return bool(scale.ndim) or compiling or is_tracked(scale)
