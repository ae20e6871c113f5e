"""The kernel of a prepared call, and the argument blocks that compiled code fills for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import ResultForm
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.passes.scratch import BriefJob, Pool, scratch_of_brief_jobs
from qkv.backends.cpu.python_calls.filled_block import FilledBlock, Operand, operand_of
from qkv.backends.cpu.python_calls.function import has_gil
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

Array = NDArray[Any]

__all__ = ["Attend", "Kernel", "expected_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """The kernel of a prepared call.

    Attributes
    ----------
    new_block : callable
        Makes an argument block, complete but for what a call brings.
    run : callable (block, kv_len, keep_alive, between_products) -> bool
        Runs a block that was filled; whether the output is finite.
    operands, arrays : sequence of Operand
        What is expected of query, key and value, and of the arrays of variants.
    results : sequence of int
        The words of the addresses of out, lse and further results.
    words : mapping of str to int
        Further words of the call for compiled code.
    is_step : bool
        Whether the number of keys is free.
    job : BriefJob or None
        The same work as one job, if it is brief.
    """

    new_block: Callable[[], ArgumentBlock]
    run: Callable[[ArgumentBlock, int, Any, bool], bool]
    operands: Sequence[Operand]
    arrays: Sequence[Operand]
    results: Sequence[int]
    words: Mapping[str, int]
    is_step: bool = False
    job: BriefJob | None = None


class Attend:
    """Runs a kernel on arrays, or at addresses; a short call is run by the code that fills a block.

    Attributes
    ----------
    brief_keys : int
        See `qkv.backends.Prepared`.
    """

    def __init__(self, kernel: Kernel, results: Sequence[ResultForm]) -> None:
        self._kernel = kernel
        self._out, self._lse, *_ = [form[:2] for form in results]
        self._expected = [*kernel.operands, *map(Operand, kernel.results), *kernel.arrays]
        self._words = {
            **kernel.words, "results": len(kernel.results), "arrays": len(kernel.arrays),
        }  # fmt: skip
        self._pool = Pool(lambda: self._filled(kernel.new_block()))
        self._brief = None
        if kernel.job is not None and has_gil():
            self._brief = self._brief_block(kernel.job)
        self.brief_keys = 0 if self._brief is None or not kernel.job else kernel.job.most_keys

    def run(
        self,
        addresses: Sequence[int],
        keep_alive: Any = (),
        layouts: Sequence[Any] = (),
        q_shift: int = 0,
        in_elements: bool = False,
        between_products: bool = False,
    ) -> bool:
        """See `qkv.backends.Prepared`."""
        brief = self._brief
        if self._kernel.is_step:
            addresses = (q_shift, in_elements, *addresses, *layouts)
            if layouts[2][-2] > self.brief_keys:
                brief = None
        if brief is not None:
            return brief.write(*addresses) < 0
        own = self._pool.take()
        if own is None:
            return False
        kv_len = own.write(*addresses)
        done = kv_len > 0 and self._kernel.run(own.block, kv_len, keep_alive, between_products)
        self._pool.give_back(own)
        return done

    def if_alike(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: bool,
        arrays: Sequence[Array] = (),
        q_shift: int | None = None,
    ) -> Sequence[Any] | None:
        """See `qkv.backends.Prepared`; there are no results but out and lse."""
        out = np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        brief = self._brief
        if brief is not None and brief.read is not None:
            done = brief.read(q_shift, query, key, value, out, lse, *arrays)
            if done <= 0:  # A step over many keys is not brief.
                return (out, lse) if done else None
        own = self._pool.take()
        if own is None:
            return None
        read, is_done = (query, key, value, out, lse, *arrays), False
        if own.read is not None:  # Else compiled code cannot read arrays of this NumPy.
            kv_len = own.read(q_shift, *read)
            is_done = kv_len > 0 and self._kernel.run(own.block, kv_len, read, False)
        self._pool.give_back(own)
        return (out, lse) if is_done else None

    def _filled(self, block: ArgumentBlock) -> FilledBlock | None:
        return FilledBlock.if_possible(
            block, self._expected, self._words, is_step=self._kernel.is_step
        )

    def _brief_block(self, job: BriefJob) -> FilledBlock:
        """A block whose functions run the job. One is enough, because the job holds the GIL."""
        block = self._kernel.new_block()
        scratch = scratch_of_brief_jobs(job.scratch_bytes)
        for word, offset in job.scratch:
            block.words[word] = scratch.address + offset
        block.keep_alive = (scratch,)
        of_job = {"job": job.address, "job_argument": job.argument, "job_keys": job.most_keys}
        words = {**self._words, **of_job}
        return FilledBlock.of(block, self._expected, words, is_step=self._kernel.is_step)


def expected_of(problem: Problem, places: Sequence[int]) -> list[Operand]:
    """Query, key and value of exactly these dtypes, shapes and strides, in these words."""
    operands = problem.operands
    given = operands.query, plain(operands.key), plain(operands.value)
    return list(map(operand_of, places, given))
