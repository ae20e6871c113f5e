"""The kernel of many queries, for arrays of one dtype, shape and strides: all but addresses."""

from __future__ import annotations

import ctypes
from typing import Any

from numpy.typing import NDArray

from qkv.backends import Passes
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.passes.arguments import word_index
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.backends.cpu.passes.forward_arguments import ForwardArguments
from qkv.backends.cpu.passes.scratch import (
    NO_RESULTS,
    BriefJob,
    return_scratch,
    take_scratch,
)
from qkv.backends.cpu.prepared.call import Kernel, expected_of
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.problem.spec import Problem

Array = NDArray[Any]

__all__ = ["forward_kernel"]

_LIMIT, _SCRATCH, _NOT_FINITE = map(word_index, ("limit", "scratch", "not_finite"))
_OPERANDS = tuple(map(word_index, ("query", "key", "value")))
_WORDS = {name: word_index(name) for name in ("out", "lse", "not_finite")}
_LSE_REST, _UNROUNDED = map(word_index, ("lse_rest", "unrounded"))
_STATISTICS = tuple(map(word_index, ("entropy", "max_score", "max_weight")))
"""Words for the statistics, in the order of the fields of `RowStatistics`."""
_CALLER = ctypes.c_int64(0)
"""The worker number of the thread that calls."""


def forward_kernel(problem: Problem, passes: Passes, arrays: tuple[Array, ...]) -> Kernel:
    """The kernel of calls like this problem, with `arrays` that each call brings."""
    problem, read = without_values(problem, arrays)
    forward = ForwardPass(problem, statistics=passes == "statistics")
    template = ForwardArguments(problem, forward, 0, NO_RESULTS)
    runs_alone, count, size = forward.most_workers <= 1, forward.count, forward.scratch_bytes
    brief_job = forward.kernel.brief_job if forward.is_brief else None
    more: list[int] = []
    if passes == "statistics":
        more += _STATISTICS
    elif passes == "residuals":
        more.append(_LSE_REST)
        if forward.out_dtype != problem.spec.compute_dtype:
            more.append(_UNROUNDED)
    more += [template.word_of_table(name) for (name,) in read]

    def new_block() -> ArgumentBlock:
        block = ArgumentBlock(template.copy())
        block.words[_LIMIT] = count
        return block

    def run(block: ArgumentBlock, _: int, keep_alive: Any) -> bool:
        words = block.words
        workers = 1 if runs_alone else forward.workers()
        scratch = take_scratch(size * workers)
        words[_SCRATCH] = scratch.address
        # For one slice of one thread this is what `launch` does.
        if brief_job is not None:
            words[0] = 0
            brief_job(block.pointer, _CALLER)
        elif runs_alone:
            words[0] = 0
            forward.kernel.run(block, 0)
        else:
            block.keep_alive = scratch, keep_alive
            forward.launch(block, workers)
            block.keep_alive = ()
        is_finite = not words[_NOT_FINITE]
        words[_NOT_FINITE] = 0
        return_scratch(scratch)
        return is_finite

    job = None
    if brief_job is not None:
        job = BriefJob(forward.kernel.address, 0, size, [(_SCRATCH, 0)])
    return Kernel(new_block, run, expected_of(problem, _OPERANDS), _WORDS, more, job)
