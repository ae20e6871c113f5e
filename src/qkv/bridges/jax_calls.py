"""`qkv.attention` of JAX arrays: which way a call goes.

Arrays that have values are computed with at once, on their own memory. What JAX traces (jit, grad,
vmap, scan) becomes an operation of compiled code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qkv._recall import attend
from qkv._statement import state
from qkv.arrays import is_array, library_of, view_beside
from qkv.arrays.jax_arrays import JaxArrays
from qkv.bridges import jax_rules as rules
from qkv.bridges.jax_operations import PROCESS, Operation
from qkv.errors import DTypeError, UnsupportedError
from qkv.problem.rows import Paged, Quantized

__all__ = ["attention"]


def attention(
    query: Any,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    scale: float | None,
    layout: Any,
    q_offset: Any,
    kv_offset: Any,
    return_lse: bool,
    backend: str,
) -> Any:
    """As `qkv.attention`."""
    keywords = {
        "scale": scale,
        "layout": layout,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "backend": backend,
    }
    said = state(variants, is_array, **keywords)
    if any(isinstance(array, jax.core.Tracer) for array in (query, key, value, *said.arrays)):
        operands = (_operand(query, "query"), _operand(key, "key"), _operand(value, "value"))
        inputs = rules.varying((*operands, *map(jnp.asarray, said.arrays)))
        operation = Operation(
            statement=said.text,
            ndims=tuple(array.ndim for array in inputs),
            layout=layout,
            knows_batch=bool(said.named) or "'Dropout'" in said.text,
            process=PROCESS if said.named else 0,
        )
        _named.extend(said.named)
        found = rules.attend(operation, inputs)[:2]
        return found if return_lse else found[0]
    if isinstance(key, Paged | Quantized) or isinstance(value, Paged | Quantized):
        found = attend(query, key, value, variants, **keywords)[:2]
        return found if return_lse else found[0]
    operands = (_view(query, "query"), _view(key, "key"), _view(value, "value"))
    out, lse, _ = attend(*operands, variants, **keywords)
    return (_like(query, out), _like(query, lse)) if return_lse else _like(query, out)


_view = partial(view_beside, JaxArrays())


def _like(query: Any, array: Any) -> Any:
    """A result as an array of the query's library, on its device."""
    made = library_of(query, "query").restore(array)
    if isinstance(query, jax.Array) and query.devices() != made.devices():
        return jax.device_put(made, query.sharding)
    return made


_named: list[Any] = []
"""What compiled code names; it may run as long as the process lives."""


def _operand(array: Any, role: str) -> Any:
    """An operand as JAX has it; NumPy's 64 bits are not rounded to 32 on the way."""
    if isinstance(array, Paged | Quantized):
        raise UnsupportedError(
            f"{role} is {type(array).__name__}, and JAX traces this call.",
            action="Call it outside of jit, or gather the rows first.",
        )
    if isinstance(array, jax.Array):
        return array
    seen = _view(array, role)
    made = jnp.asarray(seen)
    if made.dtype != seen.dtype:
        raise DTypeError(
            f"{role} is a NumPy array of {seen.dtype}, which JAX makes {made.dtype}.",
            action=f"Pass jnp.asarray({role}), or set jax_enable_x64.",
        )
    return made
