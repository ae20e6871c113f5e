"""A forward pass made ready for arrays of one dtype, shape and strides: all but their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from qkv.backends.cpu.arguments import (
    ForwardArguments,
    address_of,
    page_aligned,
    quick_address,
    word_of,
)
from qkv.backends.cpu.forward_pass import ForwardPass
from qkv.backends.cpu.host import isa_said
from qkv.partial import Partial
from qkv.problem.spec import Problem

if TYPE_CHECKING:
    from qkv.problem.rows import StoredRows

Array = NDArray[Any]

_LIMIT, _SCRATCH, _QUERY, _KEY, _VALUE, _OUT, _LSE, _LSE_REST = map(
    word_of, ("limit", "scratch", "query", "key", "value", "out", "lse", "lse_rest")
)
_address = quick_address()
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


class _Block:
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
    """Takes query, key and value like those of `problem`; `backward` says what will follow."""

    def __init__(self, problem: Problem, *, backward: bool, arrays: tuple[Array, ...] = ()) -> None:
        spec, operands = problem.spec, problem.operands
        read = [
            [name for name, origin in operands.origins.items() if origin.array is array]
            for array in arrays
        ]
        views = {name: _alike(operands.tables[name]) for names in read for name in names}
        operands = replace(
            operands,
            query=_alike(operands.query),
            key=_alike(operands.key),
            value=_alike(operands.value),
            tables={**operands.tables, **views},
            origins={},
        )
        problem = replace(problem, operands=operands)
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._isa = isa_said()
        self._backward = backward
        self._forward = forward = ForwardPass(problem)
        self._alone = forward.most_workers <= 1
        self._brief_job = forward.kernel.brief_job if forward.is_brief else None
        self._count = forward.count
        self._scratch_bytes = forward.scratch_bytes
        self._out = shape, forward.out_dtype
        self._lse = shape[:-1], spec.compute_dtype
        nothing = Partial(np.empty(0), np.empty(0))
        self._template = ForwardArguments(problem, forward, 0, nothing)
        self._read = [list(map(self._template.word_of_table, names)) for names in read]
        self._blocks: list[_Block] = []

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool, arrays: Sequence[Array] = ()
    ) -> tuple[Array, Array | None, Array | None] | None:
        at, out = _address, np.empty(*self._out)
        read = [at(array) for array in arrays]
        if not rows:
            kept = query, key, value, out, arrays
            found = self.run(at(query), at(key), at(value), at(out), 0, 0, kept, read)
            return (out, None, None) if found else None
        lse = np.empty(*self._lse)
        rest = np.empty(*self._lse) if self._backward else None
        places = at(query), at(key), at(value), at(out), at(lse), 0 if rest is None else at(rest)
        found = self.run(*places, (query, key, value, out, lse, rest, arrays), read)
        return (out, lse, rest) if found else None

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
    ) -> bool:
        """Compute what lies at these addresses, of `kept`, into those of out, lse and lse_rest.

        False if the machine is not taken for the same any more.
        """
        if isa_said() != self._isa:
            return False
        try:
            block = self._blocks.pop()
        except IndexError:
            block = _Block(self._template.copy())
        words = block.words
        words[_QUERY] = query
        words[_KEY] = key
        words[_VALUE] = value
        words[_OUT] = out
        words[_LSE] = lse
        words[_LSE_REST] = lse_rest
        for places, address in zip(self._read, arrays, strict=True):
            for place in places:
                words[place] = address
        if self._brief_job is not None:
            # What `launch` does, for one slice of one thread.
            scratch = _take(self._scratch_bytes)
            words[_SCRATCH] = scratch.address
            words[0] = 0
            words[_LIMIT] = self._count
            self._brief_job(block.pointer, _CALLER)
        else:
            workers = 1 if self._alone else self._forward.workers()
            scratch = _take(self._scratch_bytes * workers)
            words[_SCRATCH] = scratch.address
            block.kept = scratch, kept
            self._forward.launch(block, workers)
            block.kept = ()
        self._blocks.append(block)
        if len(_free) < _FREE:
            _free.append(scratch)
        return True


def _alike(array: Array | StoredRows) -> Array:
    """An array with the same dtype, shape and strides that holds one element."""
    assert isinstance(array, np.ndarray)  # stored rows are not recalled
    return as_strided(np.empty(1, array.dtype), array.shape, array.strides, writeable=False)


def _take(size: int) -> _Scratch:
    """Scratch of at least `size` bytes."""
    try:
        found = _free.pop()
    except IndexError:
        return _Scratch(size)
    return found if found.size >= size else _Scratch(size)
