"""The arrays of variants: which tables they are, and gradients in their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.arrays.views import view
from qkv.call.binding.bound import BoundCall
from qkv.errors import ArgumentError, UnsupportedError
from qkv.problem.backward import reads
from qkv.problem.building.builder import FLOATS
from qkv.problem.spec import Origin, Problem

__all__ = [
    "as_given",
    "briefly",
    "by_origin",
    "check_given",
    "made",
    "own_arrays",
    "wanted",
    "without_repeats",
]

Array = NDArray[Any]


def made(origin: Origin, variant: Any) -> bool:
    """Whether a variant, or the bare array in its place, is where values came from."""
    return origin.variant is variant or (
        isinstance(variant, np.ndarray) and getattr(origin.variant, "array", None) is variant
    )


def own_arrays(problem: Problem, variant: Any) -> tuple[list[tuple[str, Origin]], Origin | None]:
    """Tables of a variant with which the score changes, and the sinks if they are its."""
    spec, operands = problem.spec, problem.operands
    tables = [
        (table.name, operands.origins[table.name])
        for table in spec.tables
        if table.kind == "float"
        and made(operands.origins[table.name], variant)
        and reads(spec, frozenset({table.name}))
    ]
    sinks = operands.sink_origin
    if sinks is not None and not made(sinks, variant):
        sinks = None
    if not tables and sinks is None:
        raise ArgumentError(
            f"no score of this call changes with an array of {briefly(variant)}.",
            [("variants", spec.summary)],
            "Name variants of the call, the very objects, that hold floating numbers.",
        )
    return tables, sinks


def without_repeats(
    bound: BoundCall, wrt: Sequence[Any], given: Sequence[Any] | None = None
) -> BoundCall:
    """The call with copies of the arrays that are to have gradients and repeat their entries.

    An array that was broadcast, or expanded, has stride 0, and its entries are read as one. Each of
    them has a gradient of its own, which the library that broadcast it adds up.

    Parameters
    ----------
    bound : BoundCall
    wrt : sequence
        Numbers of leaves, or variants of `given`.
    given : sequence, optional
        The variants as the caller gave them.
    """
    numbers = {n for n in wrt if isinstance(n, int)}
    named = [v for v in wrt if not isinstance(v, int)]
    if named and given is not None:
        call = bound.unflatten()
        pairs = zip(given, call.variants, strict=True)
        known = {id(made) for variant, made in pairs if any(variant is v for v in named)}
        numbers |= {n for n, owner in enumerate(call.owners) if id(owner) in known}
    leaves = list(bound.leaves)
    for n in numbers:
        seen = view(leaves[n], bound.roles[n])
        if any(step == 0 and size > 1 for size, step in zip(seen.shape, seen.strides, strict=True)):
            leaves[n] = np.array(seen)
    changed = any(new is not old for new, old in zip(leaves, bound.leaves, strict=True))
    return bound._replace(leaves=leaves) if changed else bound


def wanted(problem: Problem, wrt: Sequence[Any]) -> tuple[list[tuple[str, Origin]], Origin | None]:
    """Tables whose gradients are wanted, and the sinks if theirs is."""
    tables: list[tuple[str, Origin]] = []
    sinks = None
    for variant in wrt:
        own, own_sinks = own_arrays(problem, variant)
        tables += [entry for entry in own if entry not in tables]
        sinks = own_sinks or sinks
    return tables, sinks


def by_origin(gradients: Sequence[tuple[Origin, Array]]) -> list[tuple[Origin, Array]]:
    """One gradient for each array: a variant that was given twice has the sum."""
    sums: dict[tuple[int, int], tuple[Origin, Array]] = {}
    for origin, gradient in gradients:
        place = id(origin.variant), origin.place
        sums[place] = (origin, sums[place][1] + gradient if place in sums else gradient)
    return list(sums.values())


def as_given(origin: Origin, gradient: Array) -> Array:
    """A gradient with shape and dtype of the array; of an entry that several rows or heads read,
    the sum."""
    source = origin.source
    if origin.broadcast_from is not None:
        gradient = gradient.reshape(origin.broadcast_shape)
    if gradient.size != source.size:
        inserted = tuple(range(gradient.ndim - source.ndim))
        gradient = gradient.sum(axis=inserted)
        repeated = [n for n, size in enumerate(source.shape) if size != gradient.shape[n]]
        gradient = gradient.sum(axis=tuple(repeated), keepdims=True)
    with np.errstate(all="ignore"):
        return np.asarray(gradient).reshape(source.shape).astype(source.dtype)


def check_given(variant: Any, origins: Sequence[Origin], arrays: Sequence[Any]) -> None:
    """Raise an error if a variant computed its tables, since theirs are not gradients of `arrays`.

    Parameters
    ----------
    variant : Variant
    origins : sequence of Origin
        Those of its floating tables.
    arrays : sequence
        The arrays that it holds.
    """
    floating = [a for a in arrays if isinstance(a, np.ndarray) and a.dtype.name in FLOATS]
    if not floating or any(origin.holds(array) for origin in origins for array in floating):
        return
    name = type(variant).__name__
    raise UnsupportedError(
        f"{name}.lower computes the array that scores read, and qkv has no gradient through that.",
        [("computed", f"{o.array.dtype} {o.array.shape}") for o in origins],
        f"Compute the array before {name} is made of it, or compute with its entries in lower, as "
        'in 2 * builder.per_head(self.slope, "slope").',
    )


def briefly(thing: Any) -> str:
    """An object as a few words of a message."""
    if isinstance(thing, np.ndarray):
        return f"a {thing.dtype} array {thing.shape}"
    return shown(thing, 80)
