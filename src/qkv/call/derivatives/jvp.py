"""`jvp`, attention along a direction, and the gradients of that: second derivatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv._dynamo import ends_graph
from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import checked_flag
from qkv.arrays.views import view
from qkv.backends import TwiceDifferentiable
from qkv.call.binding.bound import BoundCall, bind
from qkv.call.binding.options import Options, option_values, with_options
from qkv.call.binding.variant_arrays import (
    briefly,
    by_origin,
    check_given,
    own_arrays,
    wanted,
    without_repeats,
)
from qkv.call.checked import CheckedCall, check_call
from qkv.call.derivatives.cotangents import cotangent_of_lse, cotangent_of_out, fits, shapes_of
from qkv.call.derivatives.gradients import Gradients, arranged
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.partial import Partial
from qkv.problem.building.builder import FLOATS
from qkv.problem.second_derivatives.passes import (
    Cotangents,
    SecondDerivatives,
    second_derivatives,
)
from qkv.problem.second_derivatives.tangents import OperandTangents
from qkv.problem.spec import Origin
from qkv.problem.stored_rows import plain

__all__ = ["SecondGradients", "Tangents", "jvp", "second_vjp"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tangents:
    """A direction, `(dq, dk, dv, ...)`: how each array of a call changes; None does not.

    Parameters
    ----------
    query, key, value : array, optional
        Like the operand, in its layout.
    of_variants : sequence of (variant, array, tangent)
        `tangent` has the shape of the variant's own array. `array` says which one that is if a
        `ScoreMod` reads several; otherwise it may be None.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> cap = qkv.Softcap(2.0)
    >>> along = qkv.Tangents(query=np.ones((3, 4)), of_variants=[(cap, None, np.array(1.0))])
    """

    query: Any = None
    key: Any = None
    value: Any = None
    of_variants: Sequence[tuple[Any, Any, Any]] = ()


@ends_graph
@with_options
def jvp(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    tangents: Tangents,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> tuple[Any, Any]:
    """Attention and its Jacobian-vector product: how the output changes along a direction.

        ds[i, j] = scale * (dq[i] . k[j] + q[i] . dk[j]), continued through the score variants
        dlse[i]  = sum_j w[i, j] ds[i, j]
        dout[i]  = sum_j w[i, j] * (dv[j] + (ds[i, j] - dlse[i]) v[j])

    with w the weights of the forward pass.

    Parameters
    ----------
    query, key, value, *variants, scale, layout, q_offset, kv_offset, return_lse, backend
        As for `attention`. Tangents are compiled with the backend `cpu`, and in NumPy otherwise.
    tangents : Tangents
        The direction.

    Returns
    -------
    out : array or (array, array)
        What `attention` returns; with `return_lse`, `(output, lse)`.
    out_tangent : array or (array, array)
        Like `out`.

    Raises
    ------
    QkvError
        As `attention` does; ShapeError, DTypeError or ArgumentError for tangents that do not fit.

    Notes
    -----
    Keys are read twice, for row sums and for the rest: at most `12 head_dim + 4 v_head_dim`
    operations for each pair in a tile that is not empty, and fewer where scores are kept. Memory
    grows with the lengths, never with their product.
    Rows without keys have tangents 0. Source: each line of `attention`, differentiated.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> q, v = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0], [3.0]])
    >>> out, out_tangent = qkv.jvp(q, q, v, tangents=qkv.Tangents(query=np.ones_like(q), value=v))
    >>> out_tangent.round(3)
    array([[1.66],
           [2.34]])
    """
    bound = bind(query, key, value, variants, option_values("jvp", options))
    return_lse = checked_flag("return_lse", return_lse)
    call, direction = _checked(bound, tangents, variants)
    moved = _moved(call, direction)
    partial = call.run_for_backward()
    out = call.output(partial), call.rows(partial.lse)
    return (out, moved) if return_lse else (out[0], moved[0])


def _entries(tangents: Tangents) -> Sequence[tuple[Any, Any, Any]]:
    """What a caller has given as `of_variants`, if it is a sequence of three each."""
    given = tangents.of_variants
    if not isinstance(given, list | tuple) or not all(
        isinstance(entry, list | tuple) and len(entry) == 3 for entry in given
    ):
        raise ArgumentError(
            f"of_variants={shown(given)} is not a list of (variant, array, tangent).",
            action="Pass of_variants=[(variant, None, tangent)].",
        )
    return given


def tangents_of(bound: BoundCall, tangents: Tangents) -> tuple[Any, Any]:
    """How output and lse of a bound call change."""
    return _moved(*_checked(bound, tangents))


def _checked(
    bound: BoundCall, tangents: Tangents, given: Sequence[Any] | None = None
) -> tuple[CheckedCall, OperandTangents]:
    """The call and the direction; `given` as for `check_call`."""
    if isinstance(tangents, Tangents):
        bound = without_repeats(bound, [entry[0] for entry in _entries(tangents)], given)
    call = _check(bound, given)
    return call, _direction(call, tangents, _shapes(call))


def _moved(call: CheckedCall, direction: OperandTangents) -> tuple[Any, Any]:
    tangents = _second_derivatives(call, direction).forward
    return call.output(Partial(tangents.out, tangents.lse)), call.rows(tangents.lse)


def _check(bound: BoundCall, given: Sequence[Any] | None) -> CheckedCall:
    if not bound.structure.is_plain:
        operands = bound.unflatten()
        # Raises for objects that are not arrays.
        shapes_of(operands.query, operands.key, operands.value)
    return check_call(bound, given, backward=True)


def _shapes(call: CheckedCall) -> tuple[tuple[int, ...], ...]:
    return tuple([leaf.shape for leaf in call.leaves[:3]])


class SecondGradients(Gradients):
    """Gradients of `<grad_out, out tangent> + <grad_lse, lse tangent>`.

    Attributes
    ----------
    query, key, value : array
        As in `Gradients`, and so is `of`.
    grad_out, grad_lse : array
        With respect to the cotangents: the tangents of output and lse.
    """

    def __init__(self, gradients: Gradients, grad_out: Any, grad_lse: Any) -> None:
        vars(self).update(vars(gradients))
        self.grad_out = grad_out
        self.grad_lse = grad_lse


def second_vjp(
    bound: BoundCall,
    *,
    grad_out: Any,
    tangents: Tangents,
    grad_lse: Any = None,
    wrt: Iterable[Any] = (),
    given: Sequence[Any] | None = None,
) -> SecondGradients:
    """The vector-Jacobian product of the pullback of `vjp`, and its Jacobian-vector product.

    The pullback maps operands, variants' arrays and cotangents to gradients. For cotangents of
    these gradients, `tangents`, this gives

        d / d x  (<grad_out, out tangent> + <grad_lse, lse tangent>)

    for x each of query, key, value, the arrays of the variants in `wrt`, grad_out and grad_lse.
    The Hessian is symmetric: the same numbers are how the pullback's gradients change along
    `tangents`, while grad_out and grad_lse stay. (In these two the pullback is linear.)

    Parameters
    ----------
    bound : BoundCall
    grad_out, grad_lse, wrt
        As for the pullback of `vjp`.
    given : sequence, optional
        The variants as the caller gave them.
    tangents : Tangents
        The direction, or cotangents of the pullback's gradients.

    Notes
    -----
    Keys are read twice, for row sums and for the tangent of the backward pass: at most
    `20 head_dim + 14 v_head_dim` operations for each pair in a tile that is not empty, and fewer
    where scores are kept. Memory as for `vjp`.
    """
    wrt = tuple(wrt)
    changing = [entry[0] for entry in tangents.of_variants]
    call = _check(without_repeats(bound, [*wrt, *changing], given), given)
    shapes = _shapes(call)
    direction = _direction(call, tangents, shapes)
    tables, sinks = wanted(call.problem, [call.named(variant)[0] for variant in wrt])
    spec = call.problem.spec
    of_rows = (*spec.batch_shape, spec.num_heads, spec.q_len)
    cotangents = Cotangents(
        cotangent_of_out(call, (*of_rows, spec.v_head_dim), grad_out),
        cotangent_of_lse(call, of_rows, spec.compute_dtype, grad_lse),
        frozenset(name for name, _ in tables),
    )
    second = _second_derivatives(call, direction, cotangents)
    assert second.gradients is not None
    assert second.sinks is not None
    own = by_origin([(origin, second.gradients.tables[name]) for name, origin in tables])
    if sinks is not None:
        own.append((sinks, second.sinks))
    gradients = arranged(call, second.gradients, shapes, own)
    moved = Partial(second.forward.out, second.forward.lse)
    return SecondGradients(gradients, call.output(moved), call.rows(moved.lse))


def _second_derivatives(
    call: CheckedCall, direction: OperandTangents, cotangents: Cotangents | None = None
) -> SecondDerivatives:
    """Second derivatives by the backend of the call, or in NumPy if that leaves them to it."""
    backend, found = call.choice.backend, None
    if isinstance(backend, TwiceDifferentiable):
        found = backend.second_derivatives(call.problem, direction, cotangents)
    return found or second_derivatives(call.problem, direction, cotangents)


# Directions


def _direction(
    call: CheckedCall, tangents: Tangents, shapes: tuple[tuple[int, ...], ...]
) -> OperandTangents:
    """Tangents as the problem holds its values."""
    if not isinstance(tangents, Tangents):
        raise ArgumentError(
            f"tangents is a {type(tangents).__name__}, not a qkv.Tangents.",
            action="Write tangents=qkv.Tangents(query=..., key=..., value=...).",
        )
    operands = call.problem.operands
    query, key, value = (
        _of_operand(call, role, tangent, shape, plain(operand))
        for role, tangent, shape, operand in zip(
            ("query", "key", "value"),
            (tangents.query, tangents.key, tangents.value),
            shapes,
            (operands.query, operands.key, operands.value),
            strict=True,
        )
    )
    tables: dict[str, Array] = {}
    sinks = None
    for variant, array, tangent in tangents.of_variants:
        seen = view(tangent, "a tangent")
        own = call.named(variant, array)[1]
        for name, origin in _places(call, variant, array):
            _check_own(call, seen, origin.source if own is None else own, variant)
            if name in tables or (name is None and sinks is not None):
                raise ArgumentError(
                    f"the tangents name the array of {briefly(variant)} twice.",
                    action="Name each array once, with the sum of its tangents.",
                )
            if name is None:
                sinks = np.broadcast_to(seen.astype(np.float64), call.problem.spec.num_heads)
            else:
                of_rows = (
                    seen
                    if origin.broadcast_from is None
                    else np.broadcast_to(seen, origin.broadcast_shape)
                )
                tables[name] = of_rows.reshape(operands.tables[name].shape)
    return OperandTangents(query, key, value, tables, sinks)


def _of_operand(
    call: CheckedCall, role: str, tangent: Any, shape: tuple[int, ...], operand: Array
) -> Array:
    """`(*batch_shape, heads, length, dim)`, like the operand; zeros for None."""
    if tangent is None:
        return np.broadcast_to(np.zeros((), call.dtype), operand.shape)
    seen = view(tangent, f"the tangent of {role}")
    fits(call, f"the tangent of {role}", seen, shape, call.dtype, role)
    if seen.ndim > 2 and call.layout == "blhd":
        seen = seen.swapaxes(-3, -2)
    return np.broadcast_to(seen, operand.shape)


def _places(call: CheckedCall, variant: Any, array: Any) -> Iterator[tuple[str | None, Origin]]:
    """The tables, by name, in which the problem reads a variant's array; None for sinks."""
    given, (variant, array) = variant, call.named(variant, array)
    tables, sinks = own_arrays(call.problem, variant)
    places: list[tuple[str | None, Origin]] = [*tables]
    if sinks is not None:
        places.append((None, sinks))
    check_given(variant, [origin for _, origin in places], call.arrays_of(variant, array))
    if array is not None and any(origin.holds(array) for _, origin in places):
        return iter([place for place in places if call.holds(place[1], given, array)])
    if array is not None:
        places = []
    if len({origin.place for _, origin in places}) == 1:
        return iter(places)
    count = f"{len(places)} arrays" if places else "no such array"
    raise ArgumentError(
        f"{briefly(variant)} has {count}.",
        [(f"array {n}", f"{o.array.dtype} {o.array.shape}") for n, (_, o) in enumerate(places)],
        "Name the very array that it reads: (variant, array, tangent).",
    )


def _check_own(call: CheckedCall, tangent: Array, array: Array, variant: Any) -> None:
    if tangent.shape != array.shape:
        raise ShapeError(
            f"a tangent has shape {tangent.shape}, the array of {briefly(variant)} {array.shape}.",
            action="Pass a tangent for each entry of the array.",
        )
    if tangent.dtype.name not in FLOATS:
        raise DTypeError(
            f"the tangent of an array of {briefly(variant)} has dtype {tangent.dtype}.",
            action=call.library.in_words("Convert it, as in tangent.astype('float64')."),
        )
