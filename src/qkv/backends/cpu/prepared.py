"""Passes made ready for arrays of one dtype, shape and strides: all but their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from qkv.backends.cpu.addresses import address_of, page_aligned, quick_address_of
from qkv.backends.cpu.arguments import ForwardArguments, word_of
from qkv.backends.cpu.forward_pass import ForwardPass
from qkv.backends.cpu.host import isa_said
from qkv.partial import Partial, RowStatistics
from qkv.problem.spec import Problem

if TYPE_CHECKING:
    from qkv.problem.rows import StoredRows

Array = NDArray[Any]

_LIMIT = word_of("limit")
_WORDS = tuple([word_of(n) for n in ("scratch", "query", "key", "value", "out", "lse", "lse_rest")])
_STATISTICS = tuple([word_of(name) for name in ("entropy", "max_score", "max_weight")])
"""In the order of `RowStatistics`."""
NOTHING = Partial(np.empty(0), np.empty(0))
"""In the place of results whose addresses calls bring."""
_CALLER = ctypes.c_int64(0)
"""The number of the worker that is the calling thread."""
_FREE = 4
"""Buffers of scratch that are kept for later calls."""
_free: list[_Scratch] = []


class _Scratch:
    """Memory that one call at a time writes to."""

    def __init__(self, size: int) -> None:
        self.array = page_aligned(size)
        self.size = size
        self.address = address_of(self.array)


class Block:
    """Argument words that one call at a time fills in; keeps alive what they point to meanwhile."""

    def __init__(self, words: Array) -> None:
        self.words = memoryview(words.data)
        self.address = address_of(words)
        self.pointer = ctypes.c_void_p(self.address)
        self.kept: tuple[Any, ...] = ()

    def allow(self, start: int, stop: int) -> None:
        self.words[0] = start
        self.words[_LIMIT] = stop


class PreparedForward:
    """The forward pass of many queries; `backward` says what will follow.

    With `statistics` those of the rows take the place of lse_rest among the results.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        backward: bool,
        arrays: tuple[Array, ...] = (),
        statistics: bool = False,
    ) -> None:
        problem, read = without_values(problem, arrays)
        spec, forward = problem.spec, ForwardPass(problem, statistics=statistics)
        self._isa = isa_said()
        self._pass = forward
        self._count = forward.count
        self._alone = forward.most_workers <= 1
        self._brief_job = forward.kernel.brief_job if forward.is_brief else None
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._out = shape, forward.out_dtype
        self._lse = shape[:-1], spec.compute_dtype
        self._rest = backward
        self._statistics = statistics
        self._scratch_bytes = forward.scratch_bytes
        self._template = template = ForwardArguments(problem, forward, 0, NOTHING)
        self._read = [list(map(template.word_of_table, tables)) for tables in read]
        self._blocks: list[Block] = []

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool, arrays: Sequence[Array] = ()
    ) -> tuple[Array, Array | None, Any] | None:
        at, out = quick_address_of, np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        rest = np.empty(*self._lse) if rows and self._rest else None
        statistics = [np.empty(*self._lse) for _ in _STATISTICS] if self._statistics else ()
        found = self.run(
            at(query),
            at(key),
            at(value),
            at(out),
            0 if lse is None else at(lse),
            0 if rest is None else at(rest),
            (query, key, value, out, lse, rest, arrays, statistics),
            [at(array) for array in arrays],
            [at(array) for array in statistics],
        )
        if not found:
            return None
        return out, lse, RowStatistics(*statistics) if statistics else rest

    def run(
        self,
        query: int,
        key: int,
        value: int,
        out: int,
        lse: int,
        lse_rest: int,
        kept: Any,
        arrays: Sequence[int] = (),
        statistics: Sequence[int] = (),
    ) -> bool:
        """Compute what lies at these addresses, of `kept`, into those of out, lse and lse_rest.

        False if the machine is not taken for the same any more.
        """
        if isa_said() != self._isa:
            return False
        try:
            block = self._blocks.pop()
        except IndexError:
            block = Block(self._template.copy())
        words = block.words
        at_scratch, at_query, at_key, at_value, at_out, at_lse, at_rest = _WORDS
        words[at_query] = query
        words[at_key] = key
        words[at_value] = value
        words[at_out] = out
        words[at_lse] = lse
        words[at_rest] = lse_rest
        if arrays:
            for places, address in zip(self._read, arrays, strict=True):
                for place in places:
                    words[place] = address
        for place, address in zip(_STATISTICS, statistics, strict=False):
            words[place] = address
        workers = 1 if self._alone else self._pass.workers()
        scratch = take(self._scratch_bytes * workers)
        words[at_scratch] = scratch.address
        if self._brief_job is not None:
            # What `launch` does, for one slice of one thread.
            words[0] = 0
            words[_LIMIT] = self._count
            self._brief_job(block.pointer, _CALLER)
        else:
            block.kept = scratch, kept
            self._pass.launch(block, workers)
            block.kept = ()
        self._blocks.append(block)
        give_back(scratch)
        return True


def tables_of(problem: Problem, arrays: tuple[Array, ...]) -> list[list[str]]:
    """The names of the tables that are views of each array; both are in the order of variants."""
    origins = iter(problem.operands.origins.items())
    return [
        next(([name] for name, origin in origins if origin.array is array), []) for array in arrays
    ]


def without_values(problem: Problem, arrays: tuple[Array, ...]) -> tuple[Problem, list[list[str]]]:
    """The problem of arrays like its own that hold one element, and the tables of each array."""
    operands, read = problem.operands, tables_of(problem, arrays)
    views = {name: alike(operands.tables[name]) for names in read for name in names}
    # What was compared by value may change afterwards.
    kept = {name: array.copy() for name, array in operands.tables.items() if name not in views}
    operands = replace(
        operands,
        query=alike(operands.query),
        key=alike(operands.key),
        value=alike(operands.value),
        tables={**kept, **views},
        origins={},
    )
    return replace(problem, operands=operands), read


def alike(array: Array | StoredRows) -> Array:
    """An array with the same dtype, shape and strides that holds one element."""
    assert isinstance(array, np.ndarray)  # stored rows are not recalled
    return as_strided(np.empty(1, array.dtype), array.shape, array.strides, writeable=False)


def take(size: int) -> _Scratch:
    """Scratch of at least `size` bytes."""
    try:
        found = _free.pop()
    except IndexError:
        return _Scratch(size)
    return found if found.size >= size else _Scratch(size)


def give_back(scratch: _Scratch) -> None:
    if len(_free) < _FREE:
        _free.append(scratch)
