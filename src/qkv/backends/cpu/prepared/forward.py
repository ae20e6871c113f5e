"""The kernel of many queries, for arrays of one dtype, shape and strides: all but addresses."""

from __future__ import annotations

import ctypes
from typing import Any

from numpy.typing import NDArray

from qkv.backends import Passes
from qkv.backends.cpu.emit.argument_block import LIMIT, ArgumentBlock, word_index
from qkv.backends.cpu.forward.layout import FIELDS
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.backends.cpu.passes.forward_arguments import ForwardArguments
from qkv.backends.cpu.passes.scratch import NO_RESULTS, BriefJob, return_scratch, take_scratch
from qkv.backends.cpu.plan.kernel_spec import integer_bits
from qkv.backends.cpu.prepared.kernel import Kernel, expected_of
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.backends.cpu.python_calls.filled_block import operand_of
from qkv.problem.spec import Problem

Array = NDArray[Any]

__all__ = ["forward_kernel"]


def _words(*names: str) -> tuple[int, ...]:
    return tuple([word_index(name, FIELDS) for name in names])


_SCRATCH, _NOT_FINITE = _words("scratch", "not_finite")
_OPERANDS = _words("query", "key", "value")
_RESULTS = _words("out", "lse")
_LSE_REST, _UNROUNDED = _words("lse_rest", "unrounded")
_STATISTICS = _words("entropy", "max_score", "max_weight")
"""Words for the statistics, in the order of the fields of `RowStatistics`."""
_CALLER = ctypes.c_int64(0)
"""The worker number of the thread that calls."""


def forward_kernel(problem: Problem, passes: Passes, arrays: tuple[Array, ...]) -> Kernel:
    """The kernel of calls like this problem, with `arrays` that each call brings."""
    form, read = without_values(problem, arrays)
    forward = ForwardPass(
        problem, statistics=passes == "statistics", int_bits=integer_bits(problem, read)
    )
    template = ForwardArguments(form, forward, 0, NO_RESULTS)
    runs_alone, count, size = forward.most_workers <= 1, forward.count, forward.scratch_bytes
    brief_job = forward.kernel.brief_job if forward.is_brief else None
    results = list(_RESULTS)
    if passes == "statistics":
        results += _STATISTICS
    elif passes == "residuals":
        results.append(_LSE_REST)
        if forward.out_dtype != problem.spec.compute_dtype:
            results.append(_UNROUNDED)
    words_of_arrays = [template.word_of_table(name) for (name,) in read]

    def new_block() -> ArgumentBlock:
        block = ArgumentBlock(template.copy())
        block.words[LIMIT] = count
        return block

    def run(block: ArgumentBlock, _: int, keep_alive: Any, between_products: bool) -> bool:
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
        kv_len, scratch = problem.spec.kv_len, [(_SCRATCH, 0)]
        job = BriefJob(forward.kernel.address, 0, size, scratch, kv_len)
    return Kernel(
        new_block,
        run,
        expected_of(problem, _OPERANDS),
        list(map(operand_of, words_of_arrays, arrays)),
        results,
        {"not_finite": _NOT_FINITE},
        job=job,
    )
