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

from qkv._dynamo import constant_result
from qkv.arrays import library_of_type
from qkv.process.forks import importing

__all__ = ["bridge_of"]

_bridges: dict[str | None, Any] = {None: None, "numpy": None}
"""The bridges that have been imported, by name of library."""
_names: dict[type, str] = {}
"""The library of plain tensors. To find it takes longer than attention to a few tokens."""


def bridge_of(type_of_array: type) -> Any:
    """The module whose `attention` a library's arrays have to go through, None for NumPy."""
    name = _library_with_bridge(type_of_array)
    return _bridges[name]


@constant_result
def _library_with_bridge(type_of_array: type) -> str | None:
    """The name of a library, whose bridge is among `_bridges` then.

    Dynamo runs this, and keeps the name. Code of which Dynamo reads that a bridge has yet to be
    imported is compiled again at the next call, when it has been.
    """
    if type_of_array in _names:
        return _names[type_of_array]
    library = library_of_type(type_of_array)
    if library not in _bridges:
        with importing():
            if library == "torch":
                from qkv.bridges.torch import calls as torch_calls

                _bridges[library] = torch_calls
                _names.update(dict.fromkeys(torch_calls.PLAIN, library))
            else:
                from qkv.bridges.jax import calls as jax_calls

                _bridges[library] = jax_calls
    return library
