"""How JAX differentiates attention, in both directions.

Attention is a primitive of JAX, and its tangents are one call of another, `qkv_linear`. That one
stands for six functions, each linear in its last arrays, which come behind the inputs and what the
forward pass has kept:

    kind         from                        computes                                 transposed
    tangents     tangents of inputs          tangents of out, lse                     gradients
    gradients    grad_out[, grad_lse]        the wanted gradients                     tangents
    change       grad_out, grad_lse | moves  how the wanted gradients change          second
    second       grad_out, grad_lse | along  gradients of <along, gradients>          change
    bend         tangents | moves            how tangents of out, lse change          bend back
    bend back    tangents | grad_out, grad_lse   gradients of <grad, tangents>        bend

What stands before the bar is constant. Reverse mode is the transposed of forward mode: gradients
are all that it computes. `bend` itself is not computed, only its transposed is: this is reverse
mode over forward mode. What is refused is forward mode over forward mode, and a third derivative.

Dimensions of `jax.vmap` stand in front of all arrays, of size 1 where a constant array is the same
for all, as `qkv.bridges.jax.operations` takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from qkv.bridges.jax.operations import Operation
from qkv.bridges.jax.rules import Shapes, call_operation, shapes_of_results, stand_in, varying
from qkv.bridges.learnable import no_gradient
from qkv.call.binding.bound import BoundCall, Structure
from qkv.errors import UnsupportedError

__all__ = ["attend"]

KEPT = 3
"""Arrays that the forward pass has kept: out, perhaps before it was rounded, lse, lse_rest."""


_attention = Primitive("qkv_attention")
"""The primitive of attention. It is no `jax.custom_jvp`, because JAX forgets the rule of one where
a scan is differentiated twice."""
_linear = Primitive("qkv_linear")
_attention.multiple_results = _linear.multiple_results = True


# Attention


def attend(operation: Operation, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Output and lse, differentiable in all floating inputs but the frequencies of RoPE.

    The other results serve the backward pass alone and have no derivative: the rounding error of
    lse, and, if the operation says `backward`, an output of 16 bits as it was before rounding.
    """
    return tuple(_attention.bind(*inputs, operation=operation))


def _forward(*inputs: Any, operation: Operation) -> Any:
    shapes = shapes_of_results(operation, [*map(jax.typeof, inputs)])
    return call_operation(operation, shapes, inputs)


def _abstract_results(*inputs: Any, operation: Operation) -> Any:
    return [
        inputs[0].update(
            shape=like.shape, dtype=like.dtype, sharding=like.sharding, weak_type=False
        )
        for like in shapes_of_results(operation, inputs)
    ]


def _batch_attention(inputs: Any, axes: Any, *, operation: Operation) -> Any:
    inputs = _in_front(inputs, axes, len(inputs))
    results = _attention.bind(*inputs, operation=operation)
    return results, [0] * len(results)


def _jvp_of_attention(values: Any, moves: Any, *, operation: Operation) -> Any:
    along = tuple(n for n, move in enumerate(moves) if not _is_zero(move))
    _refuse_constants(operation, values, along)
    # Not _forward, because what is kept may be differentiated again.
    results = attend(replace(operation, backward=True), values)
    out, lse, rest, *unrounded = results
    kept = (unrounded[0] if unrounded else out, lse, rest)
    lead = _lead(operation, values)
    changes = _bind("tangents", replace(operation, along=along), (*values, *kept),
                  [_with_lead(moves[n], lead) for n in along])  # fmt: skip
    results = results if operation.backward else results[:3]
    others = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results[2:]]
    return results, (*changes, *others)


# Tangents, and what follows from them


def _bind(kind: str, operation: Operation, constant: Sequence[Any], linear: Sequence[Any]) -> Any:
    operation = replace(operation, backward=False)
    arrays = varying((*constant, *linear))
    return _linear.bind(*arrays, kind=kind, operation=operation, constants=len(constant))


def _run(*arrays: Any, kind: str, operation: Operation, constants: int) -> Any:
    """What is computed, by operations of `qkv.bridges.jax.operations`."""
    count = len(operation.ndims)
    shapes = _shapes(kind, operation, arrays)
    inputs, kept, more = _split(arrays, count, count + KEPT)
    if kind == "gradients":
        return call_operation(operation, shapes, arrays)
    if kind in {"tangents", "second"}:
        return call_operation(operation, shapes, (*inputs, *more))
    if kind == "bend back":
        tangents, cotangents = _split(more, len(more) - 2)
        return call_operation(operation, shapes, (*inputs, *cotangents, *tangents))
    if kind == "bend":
        raise UnsupportedError(
            "forward mode over forward mode was asked for; qkv has no such second derivative.",
            action="Put one of the two in reverse mode, as in jax.jacfwd(jax.grad(f)).",
        )
    grad_out, grad_lse, *moves = more
    moved = dict(zip(operation.along or (), moves, strict=True))
    own = {n: move for n, move in moved.items() if n < count}
    results = call_operation(
        replace(operation, along=tuple(own)), shapes, (*inputs, grad_out, grad_lse, *own.values())
    )
    if len(own) == len(moved):
        return results
    along = moved.get(count, jnp.zeros_like(grad_out)), *(moved[n] for n in moved if n > count)
    others = call_operation(
        replace(operation, along=None), shapes, (*inputs, *kept, *varying((inputs[0], *along))[1:])
    )
    return [a + b for a, b in zip(results, others, strict=True)]


def _results(kind: str, operation: Operation, arrays: Sequence[Any]) -> list[tuple[Any, Any]]:
    """An array with the shape of each result, but for dimensions of vmap, and the dtype of each."""
    count = len(operation.ndims)
    query, out, lse = arrays[0], arrays[count], arrays[count + 1]
    like_out = [(out, query.dtype), (lse, lse.dtype)]
    if kind in {"tangents", "bend"}:
        return like_out
    like = [(array, array.dtype) for array in arrays[:count]] + like_out
    return [like[n] for n in operation.wanted or ()]


def _lead(operation: Operation, arrays: Sequence[Any]) -> tuple[int, ...]:
    """The dimensions of vmap."""
    mapped = arrays[0].ndim - operation.ndims[0]
    return np.broadcast_shapes(*(array.shape[:mapped] for array in arrays))


def _shapes(kind: str, operation: Operation, arrays: Sequence[Any]) -> Shapes:
    lead = _lead(operation, arrays)
    return tuple(
        jax.ShapeDtypeStruct(
            (*lead, *like.shape[len(lead) :]), dtype, sharding=jax.typeof(like).sharding
        )
        for like, dtype in _results(kind, operation, arrays)
    )


def _abstract(*arrays: Any, kind: str, operation: Operation, constants: int) -> Any:
    """Types of the results: those of the arrays that they are like, axes of shard_map included."""
    lead = _lead(operation, arrays)
    return [
        like.update(shape=(*lead, *like.shape[len(lead) :]), dtype=dtype, weak_type=False)
        for like, dtype in _results(kind, operation, arrays)
    ]


def _batch(arrays: Any, axes: Any, *, constants: int, **fixed: Any) -> Any:
    arrays = _in_front(arrays, axes, constants)
    results = _linear.bind(*arrays, constants=constants, **fixed)
    return results, [0] * len(results)


def _in_front(arrays: Any, axes: Any, constants: int) -> list[Any]:
    """Arrays with one more dimension of vmap; constant ones that it does not map have size 1."""
    (size,) = {a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None}

    def in_front(n: int, array: Any, axis: int | None) -> Any:
        if axis is not None:
            return jnp.moveaxis(array, axis, 0)
        return jnp.broadcast_to(array, (1 if n < constants else size, *array.shape))

    return [in_front(n, *pair) for n, pair in enumerate(zip(arrays, axes, strict=True))]


def _with_lead(array: Any, lead: tuple[int, ...]) -> Any:
    """A linear array as large as the dimensions of vmap are, which may be 1 in constant ones."""
    return jnp.broadcast_to(array, (*lead, *array.shape[len(lead) :]))


def _jvp(
    arrays: Any, moves: Any, *, kind: str, operation: Operation, constants: int
) -> tuple[Any, Any]:
    """The results follow from the inputs, so derivatives through them count with the inputs."""
    results = _linear.bind(*arrays, kind=kind, operation=operation, constants=constants)
    count = len(operation.ndims)
    constant, linear = _split(arrays, constants)
    of_inputs, _, of_constants, of_linear = _split(moves, count, count + KEPT, constants)
    lead = _lead(operation, arrays)
    followed = {n: _with_lead(move, lead) for n, move in enumerate(of_inputs) if not _is_zero(move)}
    moved = [n for n, move in enumerate(of_linear) if not _is_zero(move)]
    changes: list[Any] = []
    if kind not in {"tangents", "gradients"}:
        if followed or not all(map(_is_zero, of_constants)):
            raise UnsupportedError(
                "a third derivative of attention was asked for; qkv has the first and the second.",
                action="Stop one with jax.lax.stop_gradient, or write attention in jax.numpy.",
            )
        whole = map(ad.instantiate_zeros, of_linear)
        changes.append(_bind(kind, operation, constant, [*whole]))
    elif kind == "tangents":
        if moved:
            along = tuple((operation.along or ())[n] for n in moved)
            own = [of_linear[n] for n in moved]
            changes.append(_bind(kind, replace(operation, along=along), constant, own))
        if followed:
            bend = replace(operation, wanted=tuple(followed))
            changes.append(_bind("bend", bend, arrays, [*followed.values()]))
    elif followed:
        grad_out, grad_lse = (*linear, jnp.zeros_like(arrays[count + 1]))[:2]
        change = replace(operation, along=(*followed, *(count + n for n in moved)))
        own = [*followed.values(), *(of_linear[n] for n in moved)]
        changes.append(_bind("change", change, (*constant, grad_out, grad_lse), own))
    elif moved:
        own = [*map(ad.instantiate_zeros, of_linear)]
        changes.append(_bind(kind, operation, constant, own))
    if not changes:
        return results, [jnp.zeros_like(result) for result in results]
    return results, [sum(parts[1:], parts[0]) for parts in zip(*changes, strict=True)]


def _transpose(
    cotangents: Any, *arrays: Any, kind: str, operation: Operation, constants: int
) -> list[Any]:
    constant, linear = _split(arrays, constants)
    own = [n for n, cotangent in enumerate(cotangents) if not _is_zero(cotangent)]
    given = [cotangents[n] for n in own]
    along, wanted = operation.along, operation.wanted
    if not own:
        return [None] * len(arrays)
    of_gradients = kind not in {"tangents", "bend"}
    left = tuple((wanted or ())[n] for n in own) if of_gradients else None
    if kind == "tangents":
        grads = [ad.instantiate_zeros(cotangents[0]), *(cotangents[n] for n in own if n == 1)]
        gradients = replace(operation, wanted=along, along=None)
        derivatives = _bind("gradients", gradients, constant, grads)
    elif kind == "gradients":
        tangents = replace(operation, along=left, wanted=None)
        derivatives = _bind("tangents", tangents, constant, given)[: len(linear)]
    elif kind in {"change", "second"}:
        other = "second" if kind == "change" else "change"
        derivatives = _bind(other, replace(operation, along=left, wanted=along), constant, given)
    elif kind == "bend":
        derivatives = _bind(
            "bend back", operation, constant, [*map(ad.instantiate_zeros, cotangents)]
        )
    else:
        derivatives = _bind("bend", replace(operation, wanted=left), constant, given)
    # What is known is not transposed.
    of_linear = [
        cotangent if ad.is_undefined_primal(array) else None
        for array, cotangent in zip(linear, derivatives, strict=True)
    ]
    return [None] * constants + of_linear


_attention.def_impl(jax.jit(_forward, static_argnames="operation"))
_attention.def_abstract_eval(_abstract_results)
mlir.register_lowering(_attention, mlir.lower_fun(_forward, multiple_results=True))
batching.primitive_batchers[_attention] = _batch_attention
ad.primitive_jvps[_attention] = _jvp_of_attention

_linear.def_impl(jax.jit(_run, static_argnames=("kind", "operation", "constants")))
_linear.def_abstract_eval(_abstract)
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[_linear] = _batch
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose


def _is_zero(array: Any) -> bool:
    return isinstance(array, ad.Zero)


def _split(arrays: Sequence[Any], *at: int) -> list[Sequence[Any]]:
    return [arrays[a:b] for a, b in pairwise((0, *at, len(arrays)))]


def _refuse_constants(operation: Operation, values: Sequence[Any], wanted: Sequence[int]) -> None:
    """Raise an error if a gradient of an array without one is wanted: it would train nothing."""
    structure = Structure.from_text(operation.structure)
    leaves = list(map(stand_in, values))
    owners = BoundCall(structure, leaves).unflatten().owners
    for n in wanted:
        owner, leaf = owners[n], leaves[n]
        fields: dict[str, str] = {} if n < 3 else {"scale": "scale the query"}
        if owner is not None:
            constant: dict[str, str] = getattr(type(owner), "constant_fields", {})
            fields = {name: do for name, do in constant.items() if getattr(owner, name) is leaf}
        for name, instead in fields.items():
            what = name if owner is None else f"{name} of {type(owner).__name__}"
            raise no_gradient(what, f"jax.lax.stop_gradient({name})", instead)
