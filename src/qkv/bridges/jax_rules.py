"""How JAX runs, batches and differentiates attention.

    function     computes                                     its derivative is
    attend       out, lse, lse_rest[, unrounded]              gradients
    gradients    gradients of what JAX follows, and no more   _second
    _second      gradients of <along, gradients>              refused, by JAX

Each becomes one call of a foreign function, which XLA makes on its own memory; where XLA does not
take it (another device than the CPU), one of `jax.pure_callback`. Since attention has a
`custom_vjp`, `jax.jvp` and what is made of it are refused by JAX.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from qkv.bridges.jax_ffi import ANSWER_PATH, cancelled, handler
from qkv.bridges.jax_operations import Operation, compute
from qkv.call.bound import BoundCall, Structure
from qkv.call.checked import check_call
from qkv.call.dispatch import checked
from qkv.call.options import OptionValues
from qkv.errors import DTypeError, QkvError, ShapeError, UnsupportedError

__all__ = ["attend", "varying"]

_TARGET = "qkv"
Shapes = tuple[jax.ShapeDtypeStruct, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(operation: Operation, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Output and lse, differentiable in all floating inputs but the frequencies of RoPE.

    The other results serve the backward pass alone and have no derivative: the rounding error of
    lse, and, if the operation says `backward`, an output of 16 bits as it was before rounding.
    """
    found: tuple[Any, ...] = _forward(operation, *inputs)
    return found


def _attend_forward(operation: Operation, inputs: Any) -> Any:
    followed, values = _differentiated_flags(inputs), _values_of(inputs)
    _refuse_constants(operation, values, _numbers_followed(followed))
    # Not _forward, because the residuals may be differentiated again.
    results = attend(replace(operation, backward=True), values)
    out, lse, rest, *unrounded = results
    kept = (unrounded[0] if unrounded else out, lse, rest)
    return results if operation.backward else results[:3], (values, kept, followed)


def _attend_backward(operation: Operation, kept: Any, cotangents: Any) -> Any:
    values, results, followed = kept
    grad_out, grad_lse, *_ = cotangents
    nothing = varying((results[0], jnp.zeros(results[0].shape, values[0].dtype)))[1]
    along = (nothing if _is_zero(grad_out) else grad_out,)
    along += () if _is_zero(grad_lse) else (grad_lse,)
    wanted = replace(operation, wanted=_numbers_followed(followed))
    found = gradients(wanted, values, results, along)
    return (_with_none_elsewhere(found, followed),)


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradients(operation: Operation, inputs: Any, results: Any, cotangents: Any) -> Any:
    """The wanted gradients, along grad_out and perhaps grad_lse; linear in these.

    The results follow from the inputs, so gradients through them are counted with the inputs.
    """
    return _backward(operation, *inputs, *results, *cotangents)


def _gradients_forward(operation: Operation, inputs: Any, results: Any, cotangents: Any) -> Any:
    groups = _values_of(inputs), _values_of(results), _values_of(cotangents)
    followed = _differentiated_flags(inputs), _differentiated_flags(cotangents)
    _refuse_constants(operation, groups[0], _numbers_followed(followed[0]))
    return gradients(operation, *groups), (*groups, followed)


def _gradients_backward(operation: Operation, kept: Any, along: Any) -> Any:
    inputs, (_, lse, _), cotangents, (of_inputs, of_cotangents) = kept
    changes = [
        (n, change)
        for n, change in zip(operation.wanted or (), along, strict=True)
        if not _is_zero(change)
    ]
    grad_out, grad_lse = (*cotangents, _zeros_like(lse))[:2]
    wanted = _numbers_followed((*of_inputs, *of_cotangents))
    second = replace(operation, along=tuple(n for n, _ in changes), wanted=wanted)
    found = _second(second, *inputs, grad_out, grad_lse, *(change for _, change in changes))
    places = _with_none_elsewhere(found, (*of_inputs, *of_cotangents))
    return places[: len(inputs)], None, places[len(inputs) :]


gradients.defvjp(_gradients_forward, _gradients_backward, symbolic_zeros=True)


def _values_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(entry.value for entry in inputs)


def _differentiated_flags(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Whether JAX differentiates each input, as static structure: () or None."""
    return tuple(() if entry.perturbed else None for entry in inputs)


def _with_none_elsewhere(found: Sequence[Any], followed: Sequence[Any]) -> tuple[Any, ...]:
    rest = iter(found)
    return tuple(None if entry is None else next(rest) for entry in followed)


def _zeros_like(array: Any) -> Any:
    return varying((array, jnp.zeros(array.shape, array.dtype)))[1]


def _numbers_followed(followed: Sequence[Any]) -> tuple[int, ...]:
    return tuple(n for n, entry in enumerate(followed) if entry is not None)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


@partial(jax.jit, static_argnums=0, inline=True)
def _forward(operation: Operation, *inputs: Any) -> Any:
    return _call_operation(operation, _shapes_of_results(operation, inputs), inputs)


@partial(jax.jit, static_argnums=0, inline=True)
def _backward(operation: Operation, *inputs: Any) -> Any:
    shapes = tuple(
        jax.ShapeDtypeStruct(inputs[n].shape, inputs[n].dtype) for n in operation.wanted or ()
    )
    return _call_operation(operation, shapes, inputs)


@partial(jax.jit, static_argnums=0, inline=True)
def _second(operation: Operation, *inputs: Any) -> Any:
    like = (*inputs[: len(operation.ndims)], *inputs[len(operation.ndims) :][:2])
    shapes = tuple(
        jax.ShapeDtypeStruct(like[n].shape, like[n].dtype) for n in operation.wanted or ()
    )
    return _call_operation(operation, shapes, inputs)


def _call_operation(operation: Operation, shapes: Shapes, inputs: Sequence[Any]) -> Any:
    text = operation.text

    def foreign(*inputs: Any) -> Any:
        call = jax.ffi.ffi_call(_TARGET, shapes, vmap_method="expand_dims")
        return call(*inputs, operation=text)

    def python(*inputs: Any) -> Any:
        on_host = partial(_on_host, operation, shapes)
        return jax.pure_callback(on_host, shapes, *inputs, vmap_method="expand_dims")

    if not _is_registered():
        results = python(*inputs)
    elif jax.default_backend() == "cpu":
        results = foreign(*inputs)
    else:
        results = jax.lax.platform_dependent(*inputs, cpu=foreign, default=python)
    return varying((inputs[0], *results))[1:]


@lru_cache(maxsize=1)
def _is_registered() -> bool:
    """Whether XLA takes the foreign function; it is registered with the first call."""
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


def _on_host(operation: Operation, shapes: Shapes, *inputs: Any) -> tuple[Any, ...]:
    arrays = [np.asarray(array) for array in inputs]
    added = arrays[0].ndim - operation.ndims[0]
    lead = np.broadcast_shapes(*(array.shape[:added] for array in arrays))
    results = tuple(np.empty((*lead, *shape.shape), shape.dtype) for shape in shapes)
    compute(operation.text, arrays, results)
    return results


# Shapes and dtypes, which are known while JAX traces


def _stand_in(array: Any) -> Any:
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _shapes_of_results(operation: Operation, inputs: Sequence[Any]) -> Shapes:
    """Of what `attend` gives; errors that values have no part in are raised now, not by XLA."""
    query, key, value, *arrays = stand_ins = list(map(_stand_in, inputs))
    bound = BoundCall(Structure.from_text(operation.structure), stand_ins)
    options = OptionValues(layout=operation.layout, backend=bound.unflatten().options.backend)
    call = checked(query, key, value, (), options)
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
    lse = jax.ShapeDtypeStruct(rows, spec.compute_dtype)
    results = jax.ShapeDtypeStruct(out, query.dtype), lse, lse
    if not operation.backward or query.dtype == spec.compute_dtype:
        return results
    return *results, jax.ShapeDtypeStruct(out, spec.compute_dtype)


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
        if not more:
            return array
        lax: Any = jax.lax
        # Before JAX 0.8, `pcast` to varying was called `pvary`.
        return (
            lax.pcast(array, more, to="varying")
            if hasattr(lax, "pcast")
            else lax.pvary(array, more)
        )

    return tuple(map(cast, arrays))


def _refuse_constants(operation: Operation, values: Sequence[Any], wanted: Sequence[int]) -> None:
    """Raise an error if a gradient of an array without one is wanted: it would train nothing."""
    structure = Structure.from_text(operation.structure)
    owners = BoundCall(structure, list(map(_stand_in, values))).unflatten().owners
    for n in wanted:
        owner = owners[n]
        constant: tuple[str, ...] = getattr(owner, "constant_fields", ())
        if n >= 3 and (owner is None or constant):
            what = "scale" if owner is None else f"{constant[0]} of {type(owner).__name__}"
            raise UnsupportedError(
                f"a gradient of {what} was asked for; qkv has none.",
                action=f"Stop it with jax.lax.stop_gradient({what.split()[0]})"
                + (", or scale the query." if what == "scale" else "."),
            )
