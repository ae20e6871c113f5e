"""Passes over the rows of each head before or after attention: their argument block and loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.compiler.compile import Kernel
from qkv.backends.cpu.emit.argument_block import LIMIT, ArgumentBlock
from qkv.backends.cpu.python_calls.filled_block import FilledBlock, Operand
from qkv.backends.cpu.python_calls.function import has_gil
from qkv.backends.cpu.threads import jobs
from qkv.process.threads import get_num_threads

Array = NDArray[np.int64]

__all__ = ["RowPass", "argument_words"]

_BRIEF = 2**16
"""Number of entries of rows for which Python may stay locked."""
_WORTH_A_THREAD = 2**16
"""Number of entries that makes it worthwhile to wake a thread."""


def argument_words(fields: Sequence[str], values: Mapping[str, int]) -> Array:
    """An argument block: the counter, then the fields in their order, 0 if they have no value."""
    return np.array([*[0] * LIMIT, *[values.get(name, 0) for name in fields]], np.int64)


class RowPass:
    """A kernel of `emit_head_job`, its argument words, and how its heads are shared out.

    Each run brings numbers for the words `places`.
    """

    def __init__(self, kernel: Kernel, words: Array, places: Sequence[int], count: int) -> None:
        self._kernel, self._words, self._places, self._count = kernel, words, places, count
        self._runs_brief, self._has_run = has_gil(), False
        self._brief: FilledBlock | None = None

    def run(self, numbers: Sequence[int], entries: int, keep_alive: Any) -> None:
        """Run the kernel on all heads; `keep_alive` owns what the numbers are addresses of.

        A run of few `entries` keeps to the caller's thread, and holds the GIL.
        """
        most_workers = max(1, min(self._count, entries // _WORTH_A_THREAD))
        is_brief = self._runs_brief and most_workers == 1 and entries <= _BRIEF
        if is_brief and self._brief is not None:
            self._brief.write(*numbers)
            return
        if is_brief and self._has_run:
            operands, job = list(map(Operand, self._places)), {"job": self._kernel.address}
            self._brief = FilledBlock.if_possible(ArgumentBlock(self._words.copy()), operands, job)
        self._has_run = True
        block = ArgumentBlock(self._words.copy(), keep_alive)
        for place, number in zip(self._places, numbers, strict=True):
            block.words[place] = number
        if is_brief:
            self._kernel.brief_job(block.address, 0)
        else:
            workers = 1 if most_workers == 1 else min(get_num_threads(), most_workers)
            jobs.run(self._kernel, block, workers)
