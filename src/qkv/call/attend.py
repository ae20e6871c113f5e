"""Run a bound call of arrays in memory: prepared if it repeats an earlier one, else checked.

Two calls are alike if their structures are equal, and the types, shapes and strides of their
arrays, and the values of those arrays that are compared by value. A call that is like an earlier
one writes addresses into a prepared block of arguments and runs. The latest call of each structure
is tried first, since looking a call up takes longer than a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv._dynamo import ends_graph
from qkv.backends import (
    AddressedCall,
    Prepared,
    Preparing,
    RepeatedCall,
    RepeatingCall,
    generation,
)
from qkv.call.bound import BoundCall
from qkv.call.cache import CALLS, Key
from qkv.call.checked import CheckedCall, check_call
from qkv.call.decoding import decoding_step, prepare_step
from qkv.call.flatten import without_arrays
from qkv.call.keys import call_key, heads_first, in_place, leaf_keys
from qkv.partial import Partial

__all__ = ["Attended", "addressed", "attend", "prepared_for_backward"]

Array = NDArray[Any]


class Attended(NamedTuple):
    """Results as arrays of the query's library.

    `lse` and `lse_rest` (the rounding error of lse, None if unknown) are undefined unless they were
    requested. `unrounded` is for the backward pass: a NumPy array in the type of computation and in
    the layout of the call, None if the output is of that type, or is all that there is. `call` and
    `partial`, what the backward pass reads, are set if the call was checked.
    """

    out: Any
    lse: Any
    lse_rest: Array | None
    unrounded: Array | None = None
    call: CheckedCall | None = None
    partial: Partial | None = None


def attend(
    bound: BoundCall,
    *,
    rows: bool = True,
    backward: bool = False,
    differentiable: bool = False,
    given: Sequence[Any] | None = None,
) -> Attended:
    """Output and lse of a bound call.

    Parameters
    ----------
    bound : BoundCall
    rows : bool
        Whether lse is wanted.
    backward : bool
        Whether a backward pass will follow.
    differentiable : bool
        Whether a backend that computes no gradients is to be refused.
    given : sequence, optional
        The variants as the caller gave them.
    """
    latest = None if backward else _latest_key(bound)
    if latest is not None:
        repeated = CALLS.get(latest)
        if repeated is not None:
            found = _repeat(repeated, bound, rows)
            if found is not None:
                return found
    views = heads_first(bound)
    step = key = None
    if views is not None:
        step = decoding_step(bound, views, backward)
        if step is not None:
            known = CALLS.get(step.key)
            if known is not None:
                found = known.run(views, rows, step, bound)
                if found is not None:
                    if step.q_offset is None:
                        _remember(latest, known.repeated)
                    return _restored((*found, None), bound)
                CALLS.discard(step.key)
        key = call_key(bound, views, "backward" if backward else "forward")
        ready = None if key is None else CALLS.get(key)
        if key is not None and ready is not None:
            found = ready.call(*views, rows, in_place(bound))
            if found is not None:
                _remember(latest, ready.repeated)
                return _restored(found, bound)
            CALLS.discard(key)
    call = check_call(bound, given, backward=differentiable)
    if bound.structure.is_known and not (step is not None and prepare_step(step, bound, call)):
        _prepare(key, bound, call, backward)
    partial = call.run_for_backward() if backward else call.run()
    out, lse = call.output(partial), call.rows(partial.lse)
    kept = call.kept(partial)
    unrounded = None if kept.out.dtype == call.dtype else call.arranged(kept.out)
    return Attended(out, lse, partial.lse_rest, unrounded, call, kept)


ends_graph(attend, "qkv.attention of NumPy arrays")


def addressed(bound: BoundCall) -> AddressedCall | None:
    """The prepared call for calls like this one without a backward pass, given addresses."""
    found = _prepared(bound, "forward")
    if found is None:
        return None
    call = found.repeated or found.call
    return call if isinstance(call, AddressedCall) else None


def prepared_for_backward(bound: BoundCall) -> Prepared | None:
    """The prepared call for calls like this one that a backward pass follows."""
    found = _prepared(bound, "backward")
    return None if found is None else found.call


def _prepared(bound: BoundCall, purpose: str) -> _PreparedCall | None:
    views = heads_first(bound)
    key = None if views is None else call_key(bound, views, purpose)
    return None if key is None else CALLS.get(key)


# Preparing


class _PreparedCall(NamedTuple):
    """A prepared call, and one that checks arrays by itself, if there is one."""

    call: Prepared
    repeated: RepeatedCall | None


def _prepare(key: Key | None, bound: BoundCall, call: CheckedCall, backward: bool) -> None:
    """Prepare for more calls like this one, once there has been another."""
    backend = call.choice.backend
    if key is None or call.ndim == 2 or not isinstance(backend, Preparing) or CALLS.is_new(key):
        return
    checked = bound._replace(leaves=call.leaves)
    ready = backend.prepare(call.problem, backward, in_place(checked))
    if ready is not None:
        repeated = ready.repeated() if isinstance(ready, RepeatingCall) else None
        CALLS.insert(without_arrays(key), _PreparedCall(ready, repeated))


def _repeat(repeated: RepeatedCall, bound: BoundCall, rows: bool) -> Attended | None:
    """The results of the latest call of this structure, if the arrays are like those it had."""
    query, key, value = bound.leaves[:3]
    if not type(query) is type(key) is type(value) is np.ndarray:
        return None
    if bound.structure.options[1] == "bhld":
        found = repeated(query, key, value, rows)
        return None if found is None else Attended(*found)
    views = heads_first(bound)
    found = None if views is None else repeated(*views, rows)
    return None if found is None else _restored(found, bound)


def _latest_key(bound: BoundCall) -> Key | None:
    """Where the latest call is kept that is alike but for dtypes, shapes and strides of operands.

    None if arrays of variants are read in place.
    """
    structure, leaves = bound
    if len(leaves) == 3:
        return "latest", structure, generation()
    if len(structure.by_value) != len(leaves) - 3 or structure.lengths or structure.per_step:
        return None
    values = leaf_keys(bound)
    return None if values is None else ("latest", structure, generation(), *values)


def _remember(latest: Key | None, repeated: RepeatedCall | None) -> None:
    """Try this call first when there is another one of the same structure."""
    if latest is None or CALLS.replace(latest, repeated) or repeated is None:
        return
    CALLS.insert(without_arrays(latest), repeated)


def _restored(found: tuple[Any, Any, Any, Any], bound: BoundCall) -> Attended:
    out, lse, rest, unrounded = found
    if bound.structure.options[1] == "blhd":
        out = np.ascontiguousarray(out.swapaxes(-3, -2))
        unrounded = None if unrounded is None else unrounded.swapaxes(-3, -2)
    return Attended(out, lse, rest, unrounded)
