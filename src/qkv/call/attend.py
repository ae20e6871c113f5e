"""Run a bound call of arrays in memory: prepared if it repeats an earlier one, else checked.

Two calls are alike if their structures are equal, and the types, shapes and strides of their
arrays, and the values of those arrays that are compared by value. A call that is like an earlier
one writes addresses into a prepared block of arguments and runs. Decoding steps whose variants
depend on positions only are alike whatever their number of keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.backends import AnyLengthSteps, Prepared, Preparing, PreparingSteps, generation
from qkv.call.bound import BoundCall
from qkv.call.cache import CALLS, Key
from qkv.call.checked import CheckedCall, check_call
from qkv.call.flatten import add_length_keys, without_arrays
from qkv.partial import Partial
from qkv.problem.builder import INDEX_LIMIT
from qkv.problem.spec import Problem

__all__ = [
    "AnyLengthCall", "Attended", "Step", "attend", "call_key", "decoding_step", "heads_first",
    "in_place", "prepared",
]  # fmt: skip

Array = NDArray[Any]

MAX_VALUE_BYTES = 2**15
"""Largest array, in bytes, that is compared by value; calls with larger ones are always checked."""
MAX_DECODE_QUERIES = 16
"""Query rows of a decoding step."""


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
    views = heads_first(bound)
    step = key = None
    if views is not None:
        step = decoding_step(bound, views, backward)
        if step is not None:
            known = CALLS.get(step.key)
            if known is not None:
                found = known.run(views, rows, step, bound)
                if found is not None:
                    return _restored((*found, None), bound)
                CALLS.discard(step.key)
        key = call_key(bound, views, "backward" if backward else "forward")
        ready = None if key is None else CALLS.get(key)
        if key is not None and ready is not None:
            found = ready(*views, rows, in_place(bound))
            if found is not None:
                return _restored(found, bound)
            CALLS.discard(key)
    call = check_call(bound, given, backward=differentiable)
    if bound.structure.is_known and not (step is not None and _prepare_step(step, bound, call)):
        _prepare(key, bound, call, backward)
    partial = call.run_for_backward() if backward else call.run()
    out, lse = call.output(partial), call.rows(partial.lse)
    kept = call.kept(partial)
    unrounded = None if kept.out.dtype == call.dtype else call.arranged(kept.out)
    return Attended(out, lse, partial.lse_rest, unrounded, call, kept)


def prepared(bound: BoundCall) -> Prepared | None:
    """The prepared call for calls like this one without a backward pass, or None."""
    views = heads_first(bound)
    key = None if views is None else call_key(bound, views, "forward")
    found: Prepared | None = None if key is None else CALLS.get(key)
    return found


# Keys


def heads_first(bound: BoundCall) -> tuple[Array, Array, Array] | None:
    """Query, key and value with heads before rows, None if they are not plain NumPy arrays."""
    structure = bound.structure
    query, key, value = bound.leaves[:3]
    if not (type(query) is type(key) is type(value) is np.ndarray and structure.is_plain):
        return None
    if structure.options[1] == "bhld":
        return query, key, value
    if structure.options[1] != "blhd" or min(query.ndim, key.ndim, value.ndim) < 3:
        return None
    return query.swapaxes(-3, -2), key.swapaxes(-3, -2), value.swapaxes(-3, -2)


def call_key(bound: BoundCall, views: tuple[Array, Array, Array], purpose: str) -> Key | None:
    """The cache key of a call, which repeated calls share; None if it cannot be prepared."""
    structure, leaves = bound
    query, key, value = views
    scale, _, *other_options = structure.options
    if len(leaves) == 3:
        leaf_keys: Any = ()
    else:
        leaf_keys = _leaf_keys(bound)
        if leaf_keys is None:
            return None
    return (
        purpose, generation(), structure.variants, scale, *other_options, structure.by_value,
        query.dtype, query.shape, query.strides,
        key.dtype, key.shape, key.strides,
        value.dtype, value.shape, value.strides,
        *leaf_keys,
    )  # fmt: skip


def _leaf_keys(bound: BoundCall, kv_len: int | None = None) -> list[Hashable] | None:
    """The part of a cache key for the arrays of variants and options.

    With `kv_len` the call is a decoding step: arrays that are read in place may be as long as there
    are keys, and have any strides, and those that each step has its own of any size.
    """
    by_value = bound.structure.by_value
    keys: list[Hashable] = []
    is_step = kv_len is not None
    lengths = bound.structure.lengths if is_step else ()
    per_step = bound.structure.per_step if is_step else ()
    for n, array in enumerate(bound.leaves[3:], start=3):
        if type(array) is not np.ndarray:
            return None
        if n in lengths:
            keys.append((array.dtype, array.shape))
        elif n in per_step:
            keys.append((array.dtype, array.ndim))
        elif n not in by_value:
            sizes: Hashable = array.shape, array.strides
            if is_step:
                sizes = tuple([None if size == kv_len else size for size in array.shape])
            keys.append((array.dtype, sizes))
        elif array.nbytes <= MAX_VALUE_BYTES:
            keys.append((array.dtype, array.shape, array.tobytes()))
        else:
            return None
    return keys


def in_place(bound: BoundCall, is_step: bool = False) -> tuple[Any, ...]:
    """The arrays of variants that are read in place, by a decoding step if it is one."""
    if len(bound.leaves) == 3:
        return ()
    by_value: Any = bound.structure.by_value
    if is_step and bound.structure.per_step:
        by_value = set(by_value).difference(bound.structure.per_step)
    return tuple([a for n, a in enumerate(bound.leaves[3:], start=3) if n not in by_value])


# Preparing


def _prepare(key: Key | None, bound: BoundCall, call: CheckedCall, backward: bool) -> None:
    """Prepare for more calls like this one, once there has been another."""
    backend = call.choice.backend
    if key is None or call.ndim == 2 or not isinstance(backend, Preparing) or CALLS.is_new(key):
        return
    checked = bound._replace(leaves=call.leaves)
    ready = backend.prepare(call.problem, backward, in_place(checked))
    if ready is not None:
        CALLS.insert(without_arrays(key), ready)


def _restored(found: tuple[Any, Any, Any, Any], bound: BoundCall) -> Attended:
    out, lse, rest, unrounded = found
    if bound.structure.options[1] == "blhd":
        out = np.ascontiguousarray(out.swapaxes(-3, -2))
        unrounded = None if unrounded is None else unrounded.swapaxes(-3, -2)
    return Attended(out, lse, rest, unrounded)


# Decoding steps


class Step(NamedTuple):
    """A call as a decoding step.

    Attributes
    ----------
    key : Key
        The cache key that steps of other lengths share.
    q_offset : int or None
        The position of the queries, if a number was given.
    any_length : bool
        Whether all lengths share it. Otherwise those do for which variants have the same
        `length_key`.
    """

    key: Key
    q_offset: int | None
    any_length: bool


class AnyLengthCall(NamedTuple):
    """A prepared call for any number of keys.

    Attributes
    ----------
    steps : AnyLengthSteps
    at_end : bool
        Whether the last query stands at the last key.
    lengths : int
        How many arrays of each step come from its numbers of keys: none, these numbers, or also
        where the queries of each batch row stand.
    """

    steps: AnyLengthSteps
    at_end: bool
    lengths: int = 0

    def q_shift(self, given: int | None, q_len: int, kv_len: int) -> int:
        """The position of query row 0; `given` is the number that the call said, if any."""
        if given is not None:
            return given
        return kv_len - q_len if self.at_end else 0

    def run(
        self,
        views: tuple[Array, Array, Array],
        rows: bool,
        step: Step,
        bound: BoundCall,
    ) -> Any:
        """The results of a step, None if something is not as it was prepared for."""
        query, key, value = views
        q_len, kv_len = query.shape[-2], key.shape[-2]
        q_shift = self.q_shift(step.q_offset, q_len, kv_len)
        arrays = in_place(bound, is_step=True)
        if self.lengths:
            lens = bound.leaves[bound.structure.lengths[0]].astype(np.int64)
            if lens.min() < 0 or lens.max() > kv_len:
                return None  # The checked call raises the error.
            batch_shape = query.shape[:-3]
            if lens.shape != batch_shape:
                lens = np.broadcast_to(lens, batch_shape)
            lens = lens.reshape(-1)
            if self.at_end and len(lens) == 1:
                q_shift = int(lens[0]) - q_len
            ends = (lens - q_len,) if self.lengths == 2 else ()
            arrays = (*arrays, lens, *ends)
        return self.steps(query, key, value, rows, q_shift, arrays)


def decoding_step(
    bound: BoundCall, views: tuple[Array, Array, Array], backward: bool = False
) -> Step | None:
    """A call as a decoding step, if it can be one."""
    query, key, value = views
    if query.ndim < 3 or key.ndim != query.ndim:
        return None
    q_len, kv_len = query.shape[-2], key.shape[-2]
    # With equal lengths the positions need not be given, so such calls are no decoding steps.
    if not (0 < q_len <= MAX_DECODE_QUERIES and q_len != kv_len > 0):
        return None
    structure = bound.structure
    scale, _, q_offset, kv_offset, backend = structure.options
    if (
        value.shape[:-1] != key.shape[:-1]
        or key.shape[:-3] != query.shape[:-3]
        or not (q_offset is None or type(q_offset) is int or type(q_offset) is str)
    ):
        return None
    length_keys: list[Hashable] = []
    if not all(add_length_keys(tree, kv_len, length_keys) for tree in structure.variants):
        return None
    q_position = None
    if type(q_offset) is int:
        if abs(q_offset) > INDEX_LIMIT:
            return None
        q_position, q_offset = q_offset, int
    leaf_keys = _leaf_keys(bound, kv_len)
    if leaf_keys is None or len(structure.lengths) > 1:
        return None
    return Step(
        (
            "backward step" if backward else "step", generation(), structure.variants,
            scale, q_offset, kv_offset, backend,
            query.dtype, query.shape, key.dtype, key.shape[:-2], key.shape[-1], value.dtype,
            value.shape[-1], *leaf_keys, *length_keys,
        ),
        q_position,
        not length_keys,
    )  # fmt: skip


def _prepare_step(step: Step, bound: BoundCall, call: CheckedCall) -> bool:
    """Prepare for more steps like this one, once there has been another; whether that can be."""
    backend, problem = call.choice.backend, call.problem
    align = problem.operands.positions.align
    # Whether a number and "start" or "end" agree depends on the lengths.
    if step.q_offset is not None and align is not None:
        return False
    if not isinstance(backend, PreparingSteps):
        return False
    if CALLS.is_new(step.key):
        return True
    arrays = in_place(bound._replace(leaves=call.leaves), is_step=True)
    from_lengths = _from_lengths(problem) if bound.structure.lengths else []
    if bound.structure.lengths and not from_lengths:
        return False
    ready = backend.prepare_any_length(problem, (*arrays, *from_lengths))
    if ready is not None:
        found = AnyLengthCall(ready, align == "end", len(from_lengths))
        CALLS.insert(without_arrays(step.key), found)
    return ready is not None


def _from_lengths(problem: Problem) -> list[Array]:
    """The tables `(batch,)` of the numbers of keys, and of where they put the queries, if they do.

    None of them if they are not the only such tables.
    """
    labels = {table.name: table.label for table in problem.spec.tables}
    origins, tables = problem.operands.origins, problem.operands.tables
    found: list[Array] = []
    for label in ("kv_lens", "q_offset"):
        arrays = [
            origins[name].array for name in tables if labels[name] == label and tables[name].ndim
        ]
        if len(arrays) > 1 or (label == "kv_lens" and not arrays):
            return []
        found += arrays
    has_q_offset = len(found) == 2
    return [] if has_q_offset and problem.operands.positions.align != "end" else found
