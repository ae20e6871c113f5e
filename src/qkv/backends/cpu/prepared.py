"""Passes made ready for arrays of one dtype, shape and strides: all but their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from qkv.backends.cpu.arguments import (
    Arguments,
    ForwardArguments,
    address_of,
    page_aligned,
    quick_address,
    word_of,
)
from qkv.backends.cpu.decode import FIELDS as DECODE_FIELDS
from qkv.backends.cpu.forward import FIELDS as FORWARD_FIELDS
from qkv.backends.cpu.forward_pass import ForwardPass, Pass
from qkv.backends.cpu.frame import WORD
from qkv.backends.cpu.host import isa_said
from qkv.backends.cpu.streaming import DecodeArguments, DecodePass
from qkv.partial import Partial
from qkv.problem.spec import Problem, Spec

if TYPE_CHECKING:
    from qkv.problem.rows import StoredRows

Array = NDArray[Any]

_LIMIT, _LSE_REST = word_of("limit"), word_of("lse_rest")
_RECORDS, _COUNTERS, _DECODE_LSE = (
    word_of(name, DECODE_FIELDS) for name in ("records", "counters", "lse")
)
_NOTHING = Partial(np.empty(0), np.empty(0))
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


class PreparedPass:
    """Takes arrays like those of one problem: what both passes have in common.

    `read` are for each array that calls bring the tables that are views of it, `fields` those of
    the kernel's argument block. Scratch is `scratch_bytes` for each worker, then `shared_bytes`.
    """

    def __init__(
        self,
        spec: Spec,
        prepared: Pass,
        template: Arguments,
        fields: tuple[str, ...],
        read: list[list[str]],
        *,
        out_dtype: np.dtype[Any],
        scratch_bytes: int,
        shared_bytes: int = 0,
        rest: bool = False,
    ) -> None:
        self._isa = isa_said()
        self._pass = prepared
        self._count = prepared.count
        self._alone = prepared.most_workers <= 1
        self._brief_job = prepared.kernel.brief_job if prepared.is_brief else None
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._out = shape, out_dtype
        self._lse = shape[:-1], spec.compute_dtype
        self._rest = rest
        self._scratch_bytes, self._shared_bytes = scratch_bytes, shared_bytes
        self._template = template
        names = ("scratch", "query", "key", "value", "out", "lse")
        self._words = tuple([word_of(name, fields) for name in names])
        self._read = [list(map(template.word_of_table, tables)) for tables in read]
        self._blocks: list[Block] = []

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool, arrays: Sequence[Array] = ()
    ) -> tuple[Array, Array | None, Array | None] | None:
        at, out = _address, np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        rest = np.empty(*self._lse) if rows and self._rest else None
        found = self.run(
            at(query),
            at(key),
            at(value),
            at(out),
            0 if lse is None else at(lse),
            0 if rest is None else at(rest),
            (query, key, value, out, lse, rest, arrays),
            [at(array) for array in arrays],
        )
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
            block = Block(self._template.copy())
        words = block.words
        at_scratch, at_query, at_key, at_value, at_out, at_lse = self._words
        words[at_query] = query
        words[at_key] = key
        words[at_value] = value
        words[at_out] = out
        words[at_lse] = lse
        if arrays:
            for places, address in zip(self._read, arrays, strict=True):
                for place in places:
                    words[place] = address
        workers = 1 if self._alone else self._pass.workers()
        size = self._scratch_bytes * workers
        scratch = take(size + self._shared_bytes)
        words[at_scratch] = scratch.address
        self._say_more(words, scratch.address + size, lse, lse_rest)
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

    def _say_more(self, words: memoryview, shared: int, lse: int, lse_rest: int) -> None:
        """Write what one kind of pass reads, of which `shared` is the address of shared scratch."""
        raise NotImplementedError


class PreparedForward(PreparedPass):
    """The forward pass of many queries; `backward` says what will follow."""

    def __init__(self, problem: Problem, *, backward: bool, arrays: tuple[Array, ...] = ()) -> None:
        problem, read = without_values(problem, arrays)
        forward = ForwardPass(problem)
        super().__init__(
            problem.spec,
            forward,
            ForwardArguments(problem, forward, 0, _NOTHING),
            FORWARD_FIELDS,
            read,
            out_dtype=forward.out_dtype,
            scratch_bytes=forward.scratch_bytes,
            rest=backward,
        )

    def _say_more(self, words: memoryview, shared: int, lse: int, lse_rest: int) -> None:
        words[_LSE_REST] = lse_rest


class PreparedDecode(PreparedPass):
    """The pass of few queries, which leaves no lse_rest.

    Shared are what tasks leave, their counters, and lse if nobody wants it.
    """

    def __init__(self, problem: Problem, *, arrays: tuple[Array, ...] = ()) -> None:
        problem, read = without_values(problem, arrays)
        spec, decode = problem.spec, DecodePass(problem)
        self._record_bytes = decode.record_bytes
        self._counter_bytes = spec.batch_size * spec.num_kv_heads * WORD
        lse_bytes = spec.batch_size * spec.num_heads * spec.q_len * WORD
        super().__init__(
            spec,
            decode,
            DecodeArguments(problem, decode, 0, _NOTHING),
            DECODE_FIELDS,
            read,
            out_dtype=decode.out_dtype,
            scratch_bytes=decode.scratch_bytes,
            shared_bytes=self._record_bytes + self._counter_bytes + lse_bytes,
        )

    def _say_more(self, words: memoryview, shared: int, lse: int, lse_rest: int) -> None:
        counters = shared + self._record_bytes
        ctypes.memset(counters, 0, self._counter_bytes)
        words[_RECORDS] = shared
        words[_COUNTERS] = counters
        words[_DECODE_LSE] = lse or counters + self._counter_bytes


class GrowingDecode:
    """The pass of few queries for any number of keys: only the latest number is prepared for.

    Layers of a model follow one another with the same number, steps with one more.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, _ = without_values(problem, ())
        self._shifts = [
            table.name
            for table in problem.spec.tables
            if problem.operands.origins[table.name].variant is None and table.label == "q_offset"
        ]
        self._latest: tuple[Any, PreparedDecode] | None = None

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool, q_shift: int
    ) -> tuple[Array, Array | None, Array | None] | None:
        like = key.shape[-2], q_shift, query.strides, key.strides, value.strides
        latest = self._latest
        if latest is None or latest[0] != like:
            prepared = PreparedDecode(self._grown(query, key, value, q_shift))
            latest = self._latest = like, prepared
        found = latest[1](query, key, value, rows)
        if found is None:
            self._latest = None
        return found

    def _grown(self, query: Array, key: Array, value: Array, q_shift: int) -> Problem:
        spec, operands = self._problem.spec, self._problem.operands
        shifts = dict.fromkeys(self._shifts, np.asarray(q_shift, np.int64))
        positions = replace(
            operands.positions, kv_rank=key.shape[-2], q_shift=np.array([q_shift], np.int64)
        )
        return Problem(
            replace(spec, kv_len=key.shape[-2]),
            replace(
                operands,
                query=query,
                key=key,
                value=value,
                tables={**operands.tables, **shifts},
                positions=positions,
            ),
        )


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
