"""Repeated calls: compiled code fills the argument block, and runs short jobs at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Addresses
from qkv.backends.cpu.passes.scratch import ArgumentBlock, BriefJob, scratch_of_brief_jobs
from qkv.backends.cpu.python_calls.filled_block import FilledBlock, Operand
from qkv.backends.cpu.python_calls.function import has_gil

Array = NDArray[Any]

__all__ = ["RepeatedCall", "brief_block"]


class RepeatedCall:
    """Calls whose arrays have the dtypes, shapes and strides that are expected.

    Parameters
    ----------
    new_block : callable
        Makes an argument block, complete but for what `FilledBlock` writes.
    operands : sequence of Operand
        Query, key and value.
    words : mapping of str to int
        What `FilledBlock` is told of the call.
    out, lse : (shape, dtype)
        The results.
    job : BriefJob or None
    run : callable (block, kv_len, keep_alive)
        Runs a block that was filled, if there is no brief job; whether the output is finite.
    """

    def __init__(
        self,
        new_block: Callable[[], ArgumentBlock],
        operands: Sequence[Operand],
        words: Mapping[str, int],
        out: tuple[tuple[int, ...], np.dtype[Any]],
        lse: tuple[tuple[int, ...], np.dtype[Any]],
        job: BriefJob | None,
        run: Callable[[ArgumentBlock, int, Any], bool],
    ) -> None:
        self._new_block = new_block
        results = (Operand(words[name]) for name in ("out", "lse"))
        self._operands, self._words = [*operands, *results], dict(words)
        self._out, self._lse, self._run = out, lse, run
        self._free: list[FilledBlock] = []
        self._brief = None
        if job is not None and has_gil():
            self._brief = brief_block(job, new_block(), self._operands, words)

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool
    ) -> tuple[Array, Array | None, None, None] | None:
        """See `qkv.backends.RepeatedCall`."""
        out = np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        arguments = (query, key, value, out) if lse is None else (query, key, value, out, lse)
        done = 1
        if self._brief is not None and self._brief.read is not None:
            done = self._brief.read(*arguments)
        if done > 0:
            done = self._compute(arguments, ())
        return (out, lse, None, None) if done else None

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """See `qkv.backends.AddressedCall`."""
        if self._brief is None:
            return self._compute(addresses[:5], keep_alive)
        return self._run_brief(*addresses[:5])

    def brief(self) -> Callable[[int, int, int, int, int], bool] | None:
        """See `qkv.backends.RepeatedCall`."""
        return None if self._brief is None else self._run_brief

    def _run_brief(self, query: int, key: int, value: int, out: int, lse: int) -> bool:
        brief: Any = self._brief
        done: bool = brief.write(query, key, value, out, lse) < 0
        return done

    def _compute(self, arguments: tuple[Any, ...], keep_alive: Any) -> bool:
        """Fill a block and run it; whether all is as expected, and the output finite."""
        try:
            own = self._free.pop()
        except IndexError:
            made = FilledBlock.later(self._new_block(), self._operands, self._words)
            if made is None:
                return False
            own = made
        fill = own.write if type(arguments[0]) is int else own.read
        kv_len = fill is not None and fill(*arguments)
        done = kv_len and self._run(own.block, kv_len, (arguments, keep_alive))
        self._free.append(own)
        return bool(done)


def brief_block(
    job: BriefJob, block: ArgumentBlock, operands: Sequence[Operand], words: Mapping[str, int]
) -> FilledBlock:
    """A block whose functions run the job. One is enough, because the job holds the GIL."""
    scratch = scratch_of_brief_jobs(job.scratch_bytes)
    for word, offset in job.scratch:
        block.words[word] = scratch.address + offset
    block.keep_alive = (scratch,)
    of_job = {"job": job.address, "job_argument": job.argument, "job_keys": job.most_keys}
    return FilledBlock.of(block, operands, {**words, **of_job})
