"""Attention as an operation of another library's own: what it differentiates, batches, compiles.

Each library has a module of operations, which say what is computed, and one of rules, how it is
differentiated and batched; all numbers come from qkv itself. Other libraries' operations take
arrays and constants, which are the leaves and the structure of a bound call (`qkv.call.bound`).

torch_calls, jax_calls
                which way a call goes: computed at once, or as an operation
torch_eager, torch_compiled
                the two ways of tensors, the second while torch's compiler reads the call
torch_operands  operands and arrays of a call as tensors
torch_operators, jax_operations
                the operations: a text and arrays in, arrays out
torch_functions, jax_derivatives
                how they are differentiated and batched
jax_rules       how XLA is asked for an operation, and what it will give
torch_groups, torch_batches
                parts of torch_functions: groups of tensors, and `torch.vmap`
torch_prepared  calls like an earlier one, found by the form of NumPy views
torch_runs      how prepared calls run on tensors: one pass, a decoding step, both passes
torch_layouts   what prepared calls ask of tensors, and the empty tensors of results
torch_observers whether torch traces, transforms or converts what operations are given
torch_passes    prepared forward and backward passes, which torch_functions carries
torch_onnx      calls while torch exports to ONNX
torch_score_mods
                functions of scores and positions that torch's compiler reads
torch_outside   attention between two graphs of torch's compiler
learnable       scales that are learned
torch_guards    whether tensors are like earlier ones
torch_openmp    the threads of torch, on which calls of tensors run
jax_ffi         how XLA calls a function of Python
"""

from __future__ import annotations

from typing import Any

from qkv._forks import importing
from qkv.arrays import library_of_type

__all__ = ["bridge_of"]

_loaded: dict[type, Any] = {}
"""By type of array. Importing what is imported takes longer than attention to a few tokens."""


def bridge_of(type_of_array: type) -> Any:
    """The module whose `attention` a library's arrays have to go through, None for NumPy."""
    if type_of_array in _loaded:
        return _loaded[type_of_array]
    library = library_of_type(type_of_array)
    if library == "torch":
        # Without the lock, because Dynamo may trace this.
        from qkv.bridges import torch_calls

        _loaded.update(dict.fromkeys(torch_calls.PLAIN, torch_calls))
        return torch_calls
    if library == "jax":
        with importing():
            from qkv.bridges import jax_calls

        return jax_calls
    return None
