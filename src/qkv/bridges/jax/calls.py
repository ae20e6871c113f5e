"""`qkv.attention` of JAX arrays: which way a call goes.

Arrays that have values are computed with at once, on their own memory. What JAX traces (jit, grad,
vmap, scan) becomes an operation of compiled code.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from qkv.arguments.array_errors import variable
from qkv.arrays import library_of
from qkv.arrays.jax_arrays import JaxArrays, refuse_keys
from qkv.arrays.views import view_beside
from qkv.bridges.jax import derivatives
from qkv.bridges.jax.operations import PROCESS, Operation
from qkv.bridges.jax.pytrees import with_constants
from qkv.bridges.jax.rules import sharding_like, varying
from qkv.bridges.learnable import refuse_undeclared, with_scale
from qkv.call.attend import attend
from qkv.call.binding.bound import BoundCall, bind
from qkv.call.binding.options import OptionValues
from qkv.call.binding.structure_text import hold
from qkv.call.checked import views_of
from qkv.errors import DTypeError, UnsupportedError
from qkv.positions.rotation import promoting
from qkv.problem.stored_rows import Paged, Quantized

__all__ = ["array_of_jax", "attention", "scaled"]


def attention(
    query: Any,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    options: OptionValues,
    return_lse: bool,
) -> Any:
    """See `qkv.attention`."""
    query, options = scaled(query, options)
    bound = bind(query, key, value, variants, options)
    structure, leaves = bound
    refuse_undeclared(structure, _is_traced)
    if any(map(_is_traced, leaves)):
        bound = bind(query, key, value, tuple(map(with_constants, variants)), options)
        structure, leaves = bound
        _check_types(bound)
        operands = (_operand(query, "query"), _operand(key, "key"), _operand(value, "value"))
        inputs = varying((*operands, *map(array_of_jax, leaves[3:], bound.roles[3:])))
        hold(structure)
        operation = Operation(
            structure=structure.text,
            ndims=tuple(array.ndim for array in inputs),
            layout=options.layout,
            uses_batch_index=structure.uses_batch_index,
            process=0 if structure.is_portable else PROCESS,
        )
        results = derivatives.attend(operation, inputs)[:2]
        return results if return_lse else results[0]
    if not structure.is_plain:
        attended = attend(bound)
        return (attended.out, attended.lse) if return_lse else attended.out
    _, views = views_of(bound)
    out, lse, *_ = attend(BoundCall(structure, views), rows=return_lse)
    placed = _like(query, out, options.layout)
    return (placed, _like(query, lse, options.layout, is_lse=True)) if return_lse else placed


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)


def scaled(query: Any, options: OptionValues) -> tuple[Any, OptionValues]:
    """The query times a scale that JAX traces, or one for each head, and options without it."""
    scale = options.scale
    of_jax = isinstance(query, jax.Array) and isinstance(scale, jax.Array)
    if of_jax and (scale.ndim or isinstance(scale, jax.core.Tracer)):
        with promoting(query):
            return with_scale(query, options)
    return query, options


def _like(query: Any, array: Any, layout: str, *, is_lse: bool = False) -> Any:
    """A result as an array of the query's library, on its devices."""
    made = library_of(query, "query").restore(array)
    if not isinstance(query, jax.Array) or query.devices() == made.devices():
        return made
    sharding = query.sharding
    if isinstance(sharding, NamedSharding):
        sharding = sharding_like(query, made.shape, layout, is_lse=is_lse)
    return jax.device_put(made, sharding)


def _check_types(bound: BoundCall) -> None:
    """Raise for keys of random numbers, and for sizes that are symbols of `jax.export`."""
    for role, array in zip(bound.roles, bound.leaves, strict=True):
        if isinstance(array, jax.Array):
            refuse_keys(array, role)
        shape = getattr(array, "shape", ())
        if not all(isinstance(size, int) for size in shape):
            raise UnsupportedError(
                f"{role} has the symbolic shape ({', '.join(map(str, shape))}); JAX can trace "
                "this call for sizes that are numbers.",
                action="Export it once for each shape that you need.",
            )


def _operand(array: Any, role: str) -> Any:
    """An operand as JAX has it; NumPy's 64 bits are not rounded to 32 on the way."""
    if isinstance(array, Paged | Quantized):
        raise UnsupportedError(
            f"{role} is {type(array).__name__}, and JAX traces this call.",
            action="Call it outside of jit, or gather the rows first.",
        )
    if isinstance(array, jax.Array):
        return jnp.asarray(array)  # Numbers that JAX traces are no arrays yet.
    seen, made = _converted(array, role)
    if made.dtype != seen.dtype:
        raise DTypeError(
            f"{role} is a NumPy array of {seen.dtype}, which JAX makes {made.dtype}.",
            action=f"Pass jnp.asarray({role}), or set jax_enable_x64.",
        )
    return made


def array_of_jax(array: Any, role: str) -> Any:
    """An array of a variant as JAX has it; whole numbers stay what they are."""
    if isinstance(array, jax.Array):
        return jnp.asarray(array)  # Numbers that JAX traces are no arrays yet.
    seen, made = _converted(array, role)
    is_narrower = seen.dtype.kind in "iu" and made.dtype != seen.dtype
    if is_narrower and not np.array_equal(seen, seen.astype(made.dtype)):
        raise DTypeError(
            f"{role} is a NumPy array of {seen.dtype}, which JAX makes {made.dtype}; it holds "
            f"numbers from {seen.min()} to {seen.max()}.",
            action=f"Use numbers of {made.dtype}, or set jax_enable_x64.",
        )
    return made


def _converted(array: Any, role: str) -> tuple[Any, Any]:
    """An array of another library as NumPy and as JAX have it."""
    seen = view_beside(JaxArrays(), array, role)
    try:
        return seen, jnp.asarray(seen)
    except (TypeError, jax.errors.JaxRuntimeError) as error:
        raise DTypeError(
            f"{role} has dtype {seen.dtype}, which JAX does not have.",
            action=f"Convert it, as in {variable(role)}.astype('float32').",
        ) from error
