"""The form of decoding steps of any length: proved once from the expressions of a problem.

Bounds of integers, and with them how wide code must compute them, are those of all lengths and
shifts up to `LONGEST_STEP`. Each array that calls bring has an entry for each key, for each block
of keys, or of a fixed number; `ArrayWords` writes where it lies into an argument block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.backends import LONGEST_STEP
from qkv.backends.cpu.passes.decode import DecodeArguments
from qkv.backends.cpu.passes.scratch import NO_RESULTS
from qkv.backends.cpu.plan.kernel_spec import (
    any_values,
    bits_of,
    bounds_of_any,
    index_bounds,
    with_indices,
    with_reads,
)
from qkv.backends.cpu.prepared.placeholders import tables_of
from qkv.backends.cpu.python_calls.filled_block import Axis, Operand
from qkv.errors import ArgumentError, ShapeError
from qkv.problem.language.bounds import check_table_reads
from qkv.problem.language.expressions import Const, Load, Node, Op, Var, walk
from qkv.problem.language.intervals import Interval
from qkv.problem.spec import Problem

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ArrayWords:
    """Where the words of an array that each call brings stand in a block, and its expected form.

    The size of an axis stands before its stride. `sizes` are 1 for an axis that is not indexed;
    where `keys` is not 0, the axis has an entry for so many keys instead, the last perhaps for
    fewer.
    """

    address: int
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def operand(self) -> Operand:
        """The same for compiled code."""
        axes = zip(self.sizes, self.strides, self.keys, strict=True)
        return Operand(
            self.address, self.dtype, [Axis(size, 0, place, keys) for size, place, keys in axes]
        )


class AnyLengthForm(NamedTuple):
    """How wide integers are, and where the tables of the arrays of calls stand in a block."""

    int_bits: int
    words: list[ArrayWords]


def any_length_form(problem: Problem, arrays: tuple[Array, ...]) -> AnyLengthForm | None:
    """What steps like this problem need; None if something depends on how many keys there are.

    Tables that are not views of `arrays` must serve any number of keys.
    """
    read = tables_of(problem, arrays)
    if any(len(names) != 1 for names in read):
        return None
    from_calls = {name for names in read for name in names}
    # Offsets of each batch entry are made from the number of keys, unless calls bring them.
    if any(
        problem.operands.tables[n].ndim and n not in from_calls for n in _offset_tables(problem)
    ):
        return None
    spec, operands = problem.spec, problem.operands
    shifts = set(shift_tables(problem)) | _length_tables(problem, from_calls)
    known = any_values(spec, from_calls) | dict.fromkeys(shifts, Var("q_pos"))
    places = {
        **index_bounds(spec),
        "kv_index": Interval.of(0, LONGEST_STEP - 1),
        "q_pos": Interval.of(-LONGEST_STEP, LONGEST_STEP),
        **bounds_of_any(spec, from_calls - shifts),
    }
    roots = [with_reads(node, known) for node in (spec.score, spec.mask)]
    loads = [
        n for n in walk(spec.score, spec.mask) if isinstance(n, Load) and n.table in from_calls
    ]
    reads = [_read_with_variables(load, known) for load in loads]
    try:
        check_table_reads([*roots, *reads], places, operands.tables)
    except (ShapeError, ArgumentError):
        return None
    template = DecodeArguments(problem, NO_RESULTS)
    words = []
    for array, (name,) in zip(arrays, read, strict=True):
        words_of_array = _array_words(problem, name, array, template.word_of_table(name))
        if words_of_array is None:
            return None
        words.append(words_of_array)
    return AnyLengthForm(bits_of(with_indices(spec, known), places, operands.tables), words)


def _offset_tables(problem: Problem) -> list[str]:
    """Names of the tables of the positions of queries."""
    origins = problem.operands.origins
    return [
        table.name
        for table in problem.spec.tables
        if table.label == "q_offset" and origins[table.name].variant is None
    ]


def _length_tables(problem: Problem, from_calls: set[str]) -> set[str]:
    """Names of tables that each step has of its own: numbers of keys, and offsets from these."""
    of_lengths = {t.name for t in problem.spec.tables if t.label in ("kv_lens", "q_offset")}
    return {
        name
        for name in of_lengths & from_calls
        if "lengths" in getattr(problem.operands.origins[name].variant, "roles", {}).values()
        or problem.operands.origins[name].variant is None
    }


def shift_tables(problem: Problem) -> list[str]:
    """Names of offset tables that are one number, which is new in each step."""
    return [name for name in _offset_tables(problem) if not problem.operands.tables[name].ndim]


def _read_with_variables(load: Load, known: Mapping[str, Node]) -> Load:
    """A read of an array that calls bring, with index 0 for axes that are as long as keys ask."""
    indices = [
        Const("int", 0) if _keys_per_entry(index) else with_reads(index, known)
        for index in load.indices
    ]
    return Load(load.table, load.kind, tuple(indices))


def _array_words(problem: Problem, name: str, array: Array, word: int) -> ArrayWords | None:
    """Where the words of the table `name` stand.

    None if one axis is read along keys in two ways, so that its length follows from neither.
    """
    table = problem.operands.tables[name]
    roots = problem.spec.score, problem.spec.mask
    loads = {n for n in walk(*roots) if isinstance(n, Load) and n.table == name}
    axes = range(table.ndim - array.ndim, table.ndim)
    keys = []
    for axis in axes:
        indices = {load.indices[axis] for load in loads}
        per_entry = {_keys_per_entry(index) for index in indices}
        if len(per_entry) > 1:
            return None
        keys.append(per_entry.pop() if per_entry else 0)
    # The words of a table are its address, then the size and stride of each axis.
    strides = tuple(word + 2 + 2 * axis for axis in axes)
    return ArrayWords(
        word, array.dtype, strides, tuple(table.shape[axis] for axis in axes), tuple(keys)
    )


def _keys_per_entry(index: Node) -> int:
    """How many keys share an entry of an axis with this index; 0 if it does not go along keys."""
    match index:
        case Var(name="kv_index"):
            return 1
        case Op(name="floordiv", args=(Var(name="kv_index"), Const(value=int(keys)))):
            return keys
    return 0
