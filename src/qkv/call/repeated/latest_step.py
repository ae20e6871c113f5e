"""The latest decoding step of a structure, which is tried first.

Compiled code asks whether the arrays of another step are laid out as those of the latest, which
takes less time than working a form out. What it does not ask is asked here: lengths, entries of
page tables, and what the arrays beside the rows are like.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.call.binding.bound import BoundCall
from qkv.call.binding.flatten import Tree
from qkv.call.checked import views_of
from qkv.call.repeated.cache import CALLS, PreparedCall
from qkv.call.repeated.decoding import read_by_step
from qkv.call.repeated.forms import leaves_of_step
from qkv.errors import QkvError
from qkv.problem.building.builder import INDEX_LIMIT
from qkv.problem.stored_rows import Paged

__all__ = ["LatestStep", "are_pages"]

Array = NDArray[Any]


class _Places(NamedTuple):
    """Which leaf of a call is what part of its keys or values; None if there is no such part."""

    rows: int
    scales: int | None
    offset: int | None
    table: int | None


class LatestStep(NamedTuple):
    """A prepared step that is tried before the form of another one is worked out.

    Attributes
    ----------
    known : PreparedCall
    other_arrays : tuple
        Values, types and sizes of the arrays that compiled code does not look at.
    """

    known: PreparedCall
    other_arrays: tuple[Hashable, ...]

    @classmethod
    def of(cls, known: PreparedCall, bound: BoundCall, kv_len: int) -> LatestStep | None:
        """The step of this call; None if compiled code asks too little to tell what is like it."""
        step, others = known.step, _other_arrays(bound, kv_len)
        if others is None or step is None or bound.structure.layout != "bhld":
            return None
        reads_all = known.prepared.if_alike is not None and known.prepared.gathered_dtype is None
        asks = reads_all and step.every_length and not step.rotates_per_batch_row
        return cls(known, others) if asks else None

    def results(self, bound: BoundCall, rows: bool) -> tuple[Any, Any] | None:
        """Output and lse as arrays of the query's library; None if a step is not like this one."""
        known, structure = self.known, bound.structure
        key, value = _places(structure.operands)
        position = structure.options.q_offset
        if type(position) is int and abs(position) > INDEX_LIMIT:
            return None
        try:
            library, leaves = views_of(bound)
            bound, query, keys = BoundCall(structure, leaves), leaves[0], leaves[key.rows]
            kv_len = keys.shape[-2]
            if key.table is not None:
                kv_len *= leaves[key.table].shape[-1]
            if _other_arrays(bound, kv_len) != self.other_arrays or query.ndim < 3:
                return None
        except (QkvError, AttributeError, IndexError, TypeError, ValueError):
            return None  # The checked call has the error.
        assert known.step is not None
        offset = None if key.offset is None else leaves[key.offset]
        read = read_by_step(known.step, bound, query, kv_len, offset)
        if read is None:
            return None
        q_shift, arrays = read[0], [*read[1]]
        for part in (key, value):
            if part.table is not None:
                # Kernels read the table in C order.
                table = np.ascontiguousarray(leaves[part.table], np.int64)
                if not are_pages(table, len(leaves[part.rows])):
                    return None
                arrays.append(table)
            if part.scales is not None:
                arrays.append(leaves[part.scales])
        if_alike: Any = known.prepared.if_alike
        results = if_alike(query, keys, leaves[value.rows], rows, arrays, q_shift)
        if results is None:
            return None
        known.used = CALLS.clock
        out, lse = results
        return library.restore(out), None if lse is None else library.restore(lse)


@lru_cache(maxsize=64)
def _places(operands: tuple[Tree, ...]) -> tuple[_Places, _Places]:
    """Where the parts of keys and values are among the leaves of a call."""
    following = iter(range(1, 9))

    def of_operand(tree: Tree) -> _Places:
        if type(tree) is not tuple:
            return _Places(next(following), None, None, None)
        kind, *parts = tree
        if kind is Paged:
            rows = of_operand(parts[0])
            return rows._replace(table=next(following))
        values, scales = next(following), next(following)
        return _Places(values, scales, None if parts[-1] is None else next(following), None)

    key, value = (of_operand(tree) for tree in operands[1:])
    return key, value


def _other_arrays(bound: BoundCall, kv_len: int) -> tuple[Hashable, ...] | None:
    """Values, types and sizes of the arrays of variants, and of the offset of quantised keys.

    None if they are too large to be compared.
    """
    structure, leaves = bound
    values: tuple[Hashable, ...] = ()
    layouts: list[Hashable] = []
    if len(leaves) > structure.operand_leaves:
        found = leaves_of_step(bound, kv_len)
        if found is None:
            return None
        values, layouts = found
    offset = _places(structure.operands)[0].offset
    if offset is not None:
        layouts += leaves[offset].dtype, leaves[offset].shape
    return (*values, *layouts)


def are_pages(table: Array, count: int) -> bool:
    """Whether every entry of a table is one of so many pages."""
    # Negative entries are large without a sign.
    entries = table.view(np.uint64)
    return bool(entries.size and np.maximum.reduce(entries, axis=None) < count)
