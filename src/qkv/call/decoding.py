"""Decoding steps: calls that are alike whatever their number of keys.

That is so if their variants depend on positions only.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.backends import AnyLengthSteps, PreparingSteps, RepeatedCall, RepeatingSteps, generation
from qkv.call.bound import BoundCall
from qkv.call.cache import CALLS, Key
from qkv.call.checked import CheckedCall
from qkv.call.flatten import add_length_keys, without_arrays
from qkv.call.keys import in_place, leaf_keys
from qkv.problem.builder import INDEX_LIMIT
from qkv.problem.spec import Problem

__all__ = ["MAX_DECODE_QUERIES", "AnyLengthCall", "Step", "decoding_step", "prepare_step"]

Array = NDArray[Any]

MAX_DECODE_QUERIES = 16
"""Query rows of a decoding step."""


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
    repeated : RepeatedCall or None
        The same for steps without a position given, asking by itself whether arrays are as
        expected, if it can.
    """

    steps: AnyLengthSteps
    at_end: bool
    lengths: int = 0
    repeated: RepeatedCall | None = None

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
    of_leaves = leaf_keys(bound, kv_len)
    if of_leaves is None or len(structure.lengths) > 1:
        return None
    return Step(
        (
            "backward step" if backward else "step", generation(), structure.variants,
            scale, q_offset, kv_offset, backend,
            query.dtype, query.shape, key.dtype, key.shape[:-2], key.shape[-1], value.dtype,
            value.shape[-1], *of_leaves, *length_keys,
        ),
        q_position,
        not length_keys,
    )  # fmt: skip


def prepare_step(step: Step, bound: BoundCall, call: CheckedCall) -> bool:
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
        at_end, repeated = align == "end", None
        if step.any_length and isinstance(ready, RepeatingSteps):
            repeated = ready.repeated_arrays(at_end)
        found = AnyLengthCall(ready, at_end, len(from_lengths), repeated)
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
