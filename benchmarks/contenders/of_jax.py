"""JAX: `jax.nn.dot_product_attention`, compiled, in its own order (batch, length, heads, dim)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders import Prepared
from benchmarks.problems.reference import Inputs
from benchmarks.problems.workloads import Workload
from qkv.errors import UnsupportedError

__all__ = ["prepare"]

Array = NDArray[Any]


def prepare(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """Prepare a call with JAX's own words for masks; the threads are set before it is loaded."""
    import jax

    options = _options(workload)
    arrays = tuple(map(_turned, (inputs.query, inputs.key, inputs.value)))

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, **options)

    if inputs.grad_out is not None:
        return _both(attend, arrays, _turned(inputs.grad_out))
    compiled = jax.jit(attend)
    return Prepared(lambda: compiled(*arrays).block_until_ready(), lambda out: {"out": _array(out)})


def _both(attend: Any, arrays: tuple[Any, ...], grad_out: Any) -> Prepared:
    import jax

    def both(arrays: Any, grad_out: Any) -> Any:
        out, pullback = jax.vjp(attend, *arrays)
        return (out, *pullback(grad_out))

    compiled = jax.jit(both)

    def read(results: Any) -> dict[str, Array]:
        return dict(zip(("out", "query", "key", "value"), map(_array, results), strict=True))

    return Prepared(lambda: jax.block_until_ready(compiled(arrays, grad_out)), read)


def _options(workload: Workload) -> dict[str, Any]:
    rule = workload.rule
    if rule.name == "all":
        return {}
    if rule.name == "causal":
        return {"is_causal": True}
    if rule.name == "window":
        return {"local_window_size": (rule.parameters[0] - 1, 0)}
    if rule.name == "key lengths":
        return {"key_value_seq_lengths": np.array(rule.parameters, np.int32)}
    raise UnsupportedError(f"it has no words for {rule.name}.")


def _turned(array: Array) -> Any:
    import jax

    return jax.device_put(np.ascontiguousarray(array.swapaxes(1, 2)))


def _array(result: Any) -> Array:
    array = np.asarray(result)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    return np.asarray(array).swapaxes(1, 2)
