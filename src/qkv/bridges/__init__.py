"""Attention as an operation of another library's own: what it differentiates, batches, compiles.

Each library has a module of operations, which say what is computed, and one of rules, how it is
differentiated and batched; all numbers come from qkv itself. Other libraries' operations take
arrays and constants, which are the leaves and the structure of a bound call
(`qkv.call.binding.bound`).

torch      tensors of torch
jax        arrays of JAX
learnable  scales that are learned, in either
"""

from __future__ import annotations

from typing import Any

from qkv.arrays import library_of_type
from qkv.process.forks import importing

__all__ = ["bridge_of"]

_loaded: dict[type, Any] = {}
"""The bridge of torch, by type of tensor. Importing what is imported takes longer than attention to
a few tokens."""


def bridge_of(type_of_array: type) -> Any:
    """The module whose `attention` a library's arrays have to go through, None for NumPy."""
    if type_of_array in _loaded:
        return _loaded[type_of_array]
    library = library_of_type(type_of_array)
    if library == "torch":
        # Without the lock, because Dynamo may trace this.
        from qkv.bridges.torch import calls as torch_calls

        _loaded.update(dict.fromkeys(torch_calls.PLAIN, torch_calls))
        return torch_calls
    if library == "jax":
        with importing():
            from qkv.bridges.jax import calls as jax_calls

        return jax_calls
    return None
