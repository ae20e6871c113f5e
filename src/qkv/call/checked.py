"""A checked call: its problem, the backend that will run it, and how results are returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays import ArrayLibrary, library_named, library_of
from qkv.arrays.views import view_beside
from qkv.backends import Choice, Differentiable, Preparing, check_results, choose
from qkv.call.binding.bound import BoundCall, UnboundCall
from qkv.errors import ArgumentError, QkvError
from qkv.partial import Partial, finish
from qkv.problem.building.check import Layout, check
from qkv.problem.spec import Origin, Problem
from qkv.variants.as_variant import as_variant

__all__ = ["CheckedCall", "check_call", "checked_problem", "views_of"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A problem, how its arrays came in, and the backend that will run it.

    Attributes
    ----------
    problem : Problem
    choice : Choice
        The backend, and why others were refused.
    library : ArrayLibrary
        That of the query.
    dtype : NumPy dtype
        That of query and output.
    layout : "bhld" or "blhd"
    ndim : int
        Dimensions of the output.
    variants : tuple of (given, known)
        Each variant as the caller gave it, and as the problem knows it.
    unbound : UnboundCall
        The call as its caller wrote it, of NumPy views, with the variant that holds each leaf.
    leaves, originals : tuple of arrays
        The leaves of the bound call, as NumPy views and as they were given.
    """

    problem: Problem
    choice: Choice
    library: ArrayLibrary
    dtype: np.dtype[Any]
    layout: Layout
    ndim: int
    variants: tuple[tuple[Any, Any], ...]
    unbound: UnboundCall
    leaves: tuple[Any, ...]
    originals: tuple[Any, ...]

    def compute(self, *, backward: bool = False) -> tuple[Any, Any, Partial]:
        """Output and lse as the caller knows them, and what a backward pass may read of them."""
        partial = self.run_for_backward() if backward else self.run()
        return self.output(partial), self.rows(partial.lse), partial

    def run(self) -> Partial:
        """Output and lse, sinks included, in the type of computation."""
        return self.with_sinks(self.choice.backend.run(self.problem))

    def run_for_backward(self) -> Partial:
        """The same where a backward pass may follow, if the backend has one."""
        backend = self.choice.backend
        run = backend.run_for_backward if isinstance(backend, Differentiable) else backend.run
        return self.with_sinks(run(self.problem))

    def with_sinks(self, partial: Partial) -> Partial:
        """Apply the sinks in the same way as the backend's prepared calls."""
        backend, sinks = self.choice.backend, self.problem.operands.sinks
        check_results(partial, self.problem.spec, backend)
        if sinks is not None and isinstance(backend, Preparing):
            return backend.add_sinks(self.problem, partial)
        return finish(partial, sinks)

    def output(self, partial: Partial) -> Any:
        """Output like the query: its library, dtype and layout."""
        with np.errstate(all="ignore"):
            out = np.asarray(self.arranged(partial.out), self.dtype, order="C")
        return self.library.restore(out)

    def kept(self, partial: Partial) -> Partial:
        """What the backward pass reads; prepared calls leave the same."""
        out = partial.unrounded
        if out is None:
            prepares = isinstance(self.choice.backend, Preparing)
            out = partial.out.astype(self.dtype, copy=False) if prepares else partial.out
        return Partial(out, partial.lse, partial.lse_rest)

    def arranged(self, out: Array) -> Array:
        """`(*batch_shape, num_heads, q_len, v_head_dim)` in the layout of the call."""
        if self.ndim == 2:
            return out.reshape(out.shape[-2:])
        return out.swapaxes(-3, -2) if self.layout == "blhd" else out

    def plain(self, out: Array) -> Array:
        """The inverse of `arranged`."""
        if self.ndim == 2:
            return out[None]
        return out.swapaxes(-3, -2) if self.layout == "blhd" else out

    def known_as(self, variant: Any) -> Any:
        """The object by which the problem knows a variant of this call."""
        return next((known for given, known in self.variants if given is variant), variant)

    def named(self, variant: Any, array: Any = None) -> tuple[Any, Any]:
        """A variant as the problem knows it, and the array of it that is named, if any.

        A number in its place is that of a leaf of the bound call.
        """
        if not isinstance(variant, int):
            place = next((n for n, a in enumerate(self.originals) if a is array), None)
            return self.known_as(variant), array if place is None else self.leaves[place]
        owners = self.unbound.owners
        if not 0 <= variant < len(owners):
            raise ArgumentError(
                f"{variant} is not a variant of this call.", action="Name the very object."
            )
        return owners[variant], self.leaves[variant]

    def holds(self, origin: Origin, variant: Any, array: Array) -> bool:
        """Whether a table has the entries of the array that `named` has found.

        If a number named it, a table counts for the first of several leaves that are one array:
        the library that differentiates adds up what these leaves have.
        """
        if not isinstance(variant, int):
            return origin.holds(array)
        others = [leaf for leaf in self.leaves if isinstance(leaf, np.ndarray)]
        for leaf in others:
            if origin.source is leaf:
                return leaf is array
        first = next((leaf for leaf in others if origin.holds(leaf)), None)
        return origin.holds(array) if first is None else first is array

    def arrays_of(self, variant: Any, array: Any = None) -> list[Any]:
        """The arrays that a variant, as the problem knows it, holds, or the named one of them."""
        owned = [a for a, o in zip(self.leaves, self.unbound.owners, strict=True) if o is variant]
        held = owned or list(getattr(variant, "__dict__", {}).values())
        return held if array is None else [own for own in held if own is array]

    def rows(self, array: Array, trailing: int = 0) -> Any:
        """A statistic `(..., num_heads, q_len)` with as many dimensions as the call has."""
        if self.ndim == 2:
            array = array.reshape(array.shape[array.ndim - trailing - 1 :])
        return self.library.restore(array)


def check_call(
    bound: BoundCall, given: Sequence[Any] | None = None, *, backward: bool = False
) -> CheckedCall:
    """Check a bound call and choose its backend.

    Parameters
    ----------
    bound : BoundCall
    given : sequence, optional
        The variants as the caller gave them, if gradients are to be named by them.
    backward : bool
        Whether the backend must compute gradients too.

    Raises
    ------
    QkvError
        The first thing that is wrong.
    """
    library, leaves = views_of(bound)
    call = bound._replace(leaves=leaves).unflatten()
    if given is not None:
        call = _with_repeated(call, given)
    problem = checked_problem(call, library)
    return CheckedCall(
        problem,
        choose(problem.spec, call.options.backend, backward=backward),
        library,
        leaves[0].dtype,
        call.options.layout,
        max(operand.ndim for operand in (call.query, call.key, call.value)),
        tuple(zip(call.variants if given is None else given, call.variants, strict=True)),
        call,
        leaves,
        tuple(bound.leaves),
    )


def checked_problem(call: UnboundCall, library: ArrayLibrary) -> Problem:
    """The problem of a call of NumPy views; errors advise in the words of the caller's library."""
    options = call.options
    try:
        return check(
            call.query,
            call.key,
            call.value,
            tuple(map(as_variant, call.variants)),
            scale=options.scale,
            layout=options.layout,
            q_offset=options.q_offset,
            kv_offset=options.kv_offset,
        )
    except QkvError as error:
        raise error.with_action(library.in_words(error.action)) from None


def _with_repeated(call: UnboundCall, given: Sequence[Any]) -> UnboundCall:
    """A variant that was given twice is one object again, so that its gradients are added up."""
    first: dict[int, Any] = {}
    again: dict[int, Any] = {}
    variants = []
    for variant, original in zip(call.variants, given, strict=True):
        known = first.setdefault(id(original), variant)
        again[id(variant)] = known
        variants.append(known)
    owners = tuple([again.get(id(owner), owner) for owner in call.owners])
    return call._replace(variants=tuple(variants), owners=owners)


def views_of(bound: BoundCall) -> tuple[ArrayLibrary, tuple[Array, ...]]:
    """The query's library, and all leaves as NumPy views."""
    if all(type(leaf) is np.ndarray for leaf in bound.leaves):  # They are views of themselves.
        return library_named("numpy"), tuple(bound.leaves)
    library, kind = library_of(bound.leaves[0], "query"), type(bound.leaves[0])
    views: list[Any] = []
    try:
        for leaf in bound.leaves:
            if type(leaf) is np.ndarray:
                views.append(leaf)
            elif type(leaf) is kind:
                views.append(library.view(leaf, "an array"))
            else:
                views.append(view_beside(library, leaf, "an array"))
        return library, tuple(views)
    except QkvError:
        # The message needs the names of the arrays. Finding them takes longer than all else here,
        # so it is left until an array is refused.
        return library, tuple(map(partial(view_beside, library), bound.leaves, bound.roles))
