"""How XLA is asked for an operation of `qkv.bridges.jax.operations`, and what it will give.

Each operation is one call of a foreign function, which XLA makes on its own memory; where XLA does
not take it (another device than the CPU), one of `jax.pure_callback`.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from qkv.bridges.jax.ffi import ANSWER_PATH, cancelled, handler
from qkv.bridges.jax.operations import Operation, compute
from qkv.call.binding.bound import BoundCall, Structure
from qkv.call.checked import check_call
from qkv.call.dispatch import checked
from qkv.errors import DTypeError, QkvError, ShapeError

__all__ = [
    "Shapes", "call_operation", "is_registered", "shapes_of_results", "sharding_like", "stand_in",
    "varying",
]  # fmt: skip

_TARGET = "qkv"
Shapes = tuple[jax.ShapeDtypeStruct, ...]


def call_operation(operation: Operation, shapes: Shapes, inputs: Sequence[Any]) -> Any:
    """Arrays of these shapes, in front of which the inputs may have the dimensions of `vmap`."""
    text = operation.text
    mapped = inputs[0].ndim - operation.ndims[0]
    plain = tuple(jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes)

    def foreign(*inputs: Any) -> Any:
        call = jax.ffi.ffi_call(_TARGET, plain, vmap_method="expand_dims")
        return call(*inputs, operation=text)

    def python(*inputs: Any) -> Any:
        on_host = partial(_on_host, operation, plain, mapped)
        return jax.pure_callback(on_host, plain, *inputs, vmap_method="expand_dims")

    if not is_registered():
        results = python(*inputs)
    elif jax.default_backend() == "cpu":
        results = foreign(*inputs)
    else:
        results = jax.lax.platform_dependent(*inputs, cpu=foreign, default=python)
    results = varying((inputs[0], *results))[1:]
    return [
        jax.reshard(result, shape.sharding) if any(shape.sharding.spec) else result
        for result, shape in zip(results, shapes, strict=True)
    ]


@lru_cache(maxsize=1)
def is_registered() -> bool:
    """Whether XLA takes the foreign function; the first question registers it."""
    try:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handler_address()), platform="cpu")
    except Exception:
        # This XLA has another version of the interface.
        return False
    return True


_handler = handler(compute)
"""Kept for good: compiled code has its address."""


def _handler_address() -> int:
    """The address that XLA is given: through a gate, so that a process can end while XLA runs."""
    try:
        from qkv.backends.cpu.threads.gate import Gate

        gate = Gate(_handler, ANSWER_PATH)
    except (ImportError, OSError, QkvError):
        return ctypes.cast(_handler, ctypes.c_void_p).value or 0
    # Runs before JAX shuts down its backends, because exit functions run in reverse order.
    atexit.register(gate.close, cancelled("qkv: the interpreter is ending"))
    return gate.address


def _on_host(operation: Operation, shapes: Shapes, mapped: int, *inputs: Any) -> tuple[Any, ...]:
    """`mapped` dimensions of `vmap` are in the shapes already."""
    arrays = [np.asarray(array) for array in inputs]
    added = arrays[0].ndim - operation.ndims[0]
    lead = np.broadcast_shapes(*(array.shape[:added] for array in arrays))
    results = tuple(np.empty((*lead, *shape.shape[mapped:]), shape.dtype) for shape in shapes)
    compute(operation.text, arrays, results)
    return results


# Shapes and dtypes, which are known while JAX traces


def stand_in(array: Any, mapped: int = 0) -> Any:
    """Zeros that take no memory, without the dimensions of vmap."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape[mapped:])


def shapes_of_results(operation: Operation, inputs: Sequence[Any]) -> Shapes:
    """The shapes and dtypes of what `attend` gives, from the types of its inputs.

    Errors that values have no part in are raised now, not by XLA.
    """
    mapped = inputs[0].ndim - operation.ndims[0]
    lead = np.broadcast_shapes(*(array.shape[:mapped] for array in inputs))
    query, key, value, *arrays = stand_ins = [stand_in(array, mapped) for array in inputs]
    bound = BoundCall(Structure.from_text(operation.structure), stand_ins)
    call = checked(query, key, value, (), bound.unflatten().options)
    try:
        check_call(bound)
    except QkvError as error:
        by_shape = isinstance(error, ShapeError | DTypeError) and not operation.process
        if by_shape or not arrays:
            raise
    spec = call.problem.spec
    rows: tuple[int, ...] = (*spec.batch_shape, spec.num_heads, spec.q_len)
    out = (*rows, spec.v_head_dim)
    if call.ndim == 2:
        rows, out = rows[-1:], out[-2:]
    elif operation.layout == "blhd":
        out = (*out[:-3], out[-2], out[-3], out[-1])

    def result(shape: tuple[int, ...], dtype: Any, *, is_lse: bool = False) -> jax.ShapeDtypeStruct:
        shape = (*lead, *shape)
        sharding = sharding_like(inputs[0], shape, operation.layout, is_lse=is_lse, mapped=mapped)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    lse = result(rows, spec.compute_dtype, is_lse=True)
    results = result(out, query.dtype), lse, lse
    if not operation.backward or query.dtype == spec.compute_dtype:
        return results
    return *results, result(out, spec.compute_dtype)


def sharding_like(
    query: Any, shape: Sequence[int], layout: str, *, is_lse: bool, mapped: int = 0
) -> NamedSharding:
    """How an output or lse is spread over devices: as the query is, where sizes are the same.

    The query is an array or a type; it and the result have `mapped` dimensions of `vmap`.
    """
    mesh, spec = query.sharding.mesh, query.sharding.spec
    spec = (*spec, *(None,) * (query.ndim - len(spec)))
    # For each dimension of the result, that of the query.
    dims = [*range(mapped), *range(mapped - len(shape) - is_lse, 0)]
    if is_lse:
        dims.pop()
        if layout == "blhd" and len(shape) > mapped + 1:
            dims[-2:] = reversed(dims[-2:])
    axes = [
        spec[d] if -d <= query.ndim and query.shape[d] == size else None
        for size, d in zip(shape, dims, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*axes))


def _varying_axes(array: Any) -> frozenset[str]:
    """Axes of `shard_map` along which an array is not the same on every device."""
    kind = jax.typeof(array)
    manual = getattr(kind, "manual_axis_type", None)  # The name since JAX 0.10.
    return frozenset(manual.varying if manual else getattr(kind, "vma", ()))


def varying(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays that all differ between devices where one does: one call is made on each.

    JAX adds up the gradients of those that did not.
    """
    axes = frozenset[str]().union(*map(_varying_axes, arrays))

    def cast(array: Any) -> Any:
        more = tuple(sorted(axes - _varying_axes(array)))
        return jax.lax.pcast(array, more, to="varying") if more else array

    return tuple(map(cast, arrays))
