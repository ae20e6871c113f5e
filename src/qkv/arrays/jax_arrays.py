"""JAX arrays: read where they lie, and results in memory that JAX takes without a copy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from qkv.arguments.array_errors import variable
from qkv.errors import DTypeError, UnsupportedError

_ALIGNMENT = 64
"""Bytes. JAX copies what does not begin at a multiple of them."""


class JaxArrays:
    """JAX arrays with values; those that JAX only traces have none to look at."""

    name = "jax"

    def view(self, array: Any, role: str) -> NDArray[Any]:
        """The array's memory, read-only; from another device, a copy."""
        if not isinstance(array, jax.Array):
            raise _no_values(array, role)
        if isinstance(array, jax.core.Tracer):
            raise UnsupportedError(
                f"{role} is traced ({array.aval.str_short()}), and this looks at values.",
                action="Call it outside of jit, grad and vmap; under them, qkv.attention and "
                "qkv.jax.dot_product_attention work.",
            )
        refuse_keys(array, role)
        return np.asarray(array)

    def restore(self, array: NDArray[Any]) -> Any:
        """A JAX array of the same values, in 32 bits unless `jax_enable_x64` is set."""
        if array.ctypes.data % _ALIGNMENT or not array.flags.c_contiguous:
            array = aligned(array)
        made = jax.device_put(array)
        if isinstance(made, jax.core.Tracer):  # A function is traced in which this is a constant.
            with jax.ensure_compile_time_eval():
                made = jax.device_put(array)
        return made

    def described(self, array: Any) -> NDArray[Any]:
        """The array itself."""
        return self.view(array, "an array")

    def on_host(self, array: Any, role: str, *, by_value: bool) -> NDArray[Any]:
        """The array itself."""
        return self.view(array, role)

    def is_tracked(self, array: Any) -> bool:
        """Whether the array is traced: by jit, grad, vmap or scan."""
        return isinstance(array, jax.core.Tracer)

    def in_words(self, advice: str) -> str:
        """NumPy's methods are those of JAX arrays too; its functions are in `jax.numpy`."""
        return advice.replace("numpy.asarray", "jax.numpy.asarray")


def _no_values(given: Any, role: str) -> DTypeError:
    """The error for what JAX defines beside arrays: shapes, references, shardings."""
    name = variable(role)
    if isinstance(given, jax.ShapeDtypeStruct):
        action = f"Pass an array, or trace the call: jax.eval_shape(lambda {name}: ..., {name})."
    else:
        action = f"Pass an array; that of a jax.Ref is {name}[...]."
    return DTypeError(f"{role} is a {type(given).__name__}, not an array.", action=action)


def refuse_keys(array: jax.Array, role: str) -> None:
    """Raise for an array of keys of random numbers."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise DTypeError(
            f"{role} has dtype {array.dtype}, which is not of numbers.",
            action="Pass numbers; jax.random.bits(key) makes one of a key.",
        )


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """A dense copy that begins at a multiple of `_ALIGNMENT`."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
