"""Passes made ready for arrays of one dtype, shape and strides: all but their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Addresses, Passes
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.passes.arguments import word_index
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.backends.cpu.passes.forward_arguments import ForwardArguments
from qkv.backends.cpu.passes.scratch import (
    NO_RESULTS,
    ArgumentBlock,
    BriefJob,
    return_scratch,
    take_scratch,
)
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.backends.cpu.prepared.repeated import RepeatedCall
from qkv.backends.cpu.python_calls.filled_block import Operand, operand_of
from qkv.partial import RowStatistics
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

Array = NDArray[Any]

_LIMIT, _SCRATCH, _NOT_FINITE = map(word_index, ("limit", "scratch", "not_finite"))
_QUERY, _KEY, _VALUE = map(word_index, ("query", "key", "value"))
_OUT, _LSE, _LSE_REST = map(word_index, ("out", "lse", "lse_rest"))
_UNROUNDED = word_index("unrounded")
_STATISTICS = tuple([word_index(name) for name in ("entropy", "max_score", "max_weight")])
"""Words for the statistics, in the order of the fields of `RowStatistics`."""
_CALLER = ctypes.c_int64(0)
"""The worker number of the thread that calls."""


class PreparedForward:
    """The forward pass of many queries.

    Statistics of the rows, if they are asked for, take the place of lse_rest among the results.
    """

    def __init__(
        self,
        problem: Problem,
        passes: Passes = "forward",
        *,
        arrays: tuple[Array, ...] = (),
    ) -> None:
        backward, statistics = passes == "residuals", passes == "statistics"
        problem, read = without_values(problem, arrays)
        spec, forward = problem.spec, ForwardPass(problem, statistics=statistics)
        self._pass = forward
        self._count = forward.count
        self._runs_alone = forward.most_workers <= 1
        self._brief_job = forward.kernel.brief_job if forward.is_brief else None
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._out = shape, forward.out_dtype
        self._lse = shape[:-1], spec.compute_dtype
        self._has_rest = backward
        self._rounds = backward and forward.out_dtype != spec.compute_dtype
        self._statistics = statistics
        self._scratch_bytes = forward.scratch_bytes
        self._template = template = ForwardArguments(problem, forward, 0, NO_RESULTS)
        self._read = [list(map(template.word_of_table, tables)) for tables in read]
        self._blocks: list[ArgumentBlock] = []
        self._operands: list[Operand] = []
        if not (backward or statistics or arrays):
            operands = problem.operands
            given = operands.query, plain(operands.key), plain(operands.value)
            self._operands = list(map(operand_of, (_QUERY, _KEY, _VALUE), given))

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool, arrays: Sequence[Array] = ()
    ) -> tuple[Array, Array | None, Any, Array | None] | None:
        at, out = quick_address_of, np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        rest = np.empty(*self._lse) if rows and self._has_rest else None
        unrounded = np.empty(out.shape, self._lse[1]) if rows and self._rounds else None
        statistics = [np.empty(*self._lse) for _ in _STATISTICS] if self._statistics else ()
        found = self.run(
            (
                at(query), at(key), at(value), at(out),
                0 if lse is None else at(lse), 0 if rest is None else at(rest),
                [at(array) for array in arrays],
            ),
            (query, key, value, out, lse, rest, arrays, statistics, unrounded),
            [at(array) for array in statistics],
            0 if unrounded is None else at(unrounded),
        )  # fmt: skip
        if not found:
            return None
        return out, lse, RowStatistics(*statistics) if statistics else rest, unrounded

    def run(
        self,
        addresses: Addresses,
        keep_alive: Any,
        statistics: Sequence[int] = (),
        unrounded: int = 0,
    ) -> bool:
        """Read operands, and write results and statistics, at these addresses.

        `keep_alive` are the objects that own the memory.

        False if an output is not finite: the caller then makes a checked call.
        """
        try:
            block = self._blocks.pop()
        except IndexError:
            block = self._new_block()
        words = block.words
        (words[_QUERY], words[_KEY], words[_VALUE],
         words[_OUT], words[_LSE], words[_LSE_REST], arrays) = addresses  # fmt: skip
        if arrays:
            for places, address in zip(self._read, arrays, strict=True):
                for place in places:
                    words[place] = address
        for place, address in zip(_STATISTICS, statistics, strict=False):
            words[place] = address
        if self._rounds:
            words[_UNROUNDED] = unrounded
        is_finite = self._run_block(block, 0, keep_alive)
        self._blocks.append(block)
        return is_finite

    def repeated(self, at_end: bool = False) -> RepeatedCall | None:
        """See `qkv.backends.RepeatingCall`."""
        if not self._operands:
            return None
        job = None
        if self._brief_job is not None:
            address = self._pass.kernel.address
            job = BriefJob(address, 0, self._scratch_bytes, [(_SCRATCH, 0)])
        expected = self._operands, {"out": _OUT, "lse": _LSE, "not_finite": _NOT_FINITE}
        return RepeatedCall(self._new_block, *expected, self._out, self._lse, job, self._run_block)

    def _new_block(self) -> ArgumentBlock:
        block = ArgumentBlock(self._template.copy())
        block.words[_LIMIT] = self._count
        return block

    def _run_block(self, block: ArgumentBlock, _: int, keep_alive: Any) -> bool:
        """Run a block that was filled; whether the output is finite."""
        words = block.words
        workers = 1 if self._runs_alone else self._pass.workers()
        scratch = take_scratch(self._scratch_bytes * workers)
        words[_SCRATCH] = scratch.address
        # For one slice of one thread this is what `launch` does.
        if self._brief_job is not None:
            words[0] = 0
            self._brief_job(block.pointer, _CALLER)
        elif self._runs_alone:
            words[0] = 0
            self._pass.kernel.run(block, 0)
        else:
            block.keep_alive = scratch, keep_alive
            self._pass.launch(block, workers)
            block.keep_alive = ()
        is_finite = not words[_NOT_FINITE]
        words[_NOT_FINITE] = 0
        return_scratch(scratch)
        return is_finite
