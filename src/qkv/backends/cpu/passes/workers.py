"""How many threads share the tasks of a kernel, and how these are run, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qkv.backends import Progress
from qkv.backends.cpu.compiler.compile import Kernel, Runnable
from qkv.backends.cpu.threads import jobs
from qkv.process.threads import get_num_threads

_SLICE_SECONDS = 0.1
"""Seconds for which compiled code may keep Ctrl-C waiting."""
_OPERATIONS_PER_SECOND = {"elements": 5e10, "pairs": 5e10, "tiles": 1e11}
"""Rough number of operations per second and thread, by what one instruction multiplies."""
_OTHERS_PER_SECOND = 5e10
_WORTH_A_THREAD = 4e6
"""Number of operations that make it worthwhile to wake a thread."""
_BRIEF = 1e6
"""Number of operations, about 20 microseconds, for which Python may stay locked."""


def alone_operations() -> tuple[float, float, float]:
    """Limits in operations: of a pass during which Python stays locked, of one that a single thread
    runs, and of one slice."""
    return _BRIEF, 2 * _WORTH_A_THREAD, _SLICE_SECONDS * _OPERATIONS_PER_SECOND["elements"]


def is_brief(operations: float) -> bool:
    """Whether work is so short that no second thread pays and Ctrl-C can wait for it."""
    return operations <= _BRIEF


def _seconds_of(operations: float, others: float, product: str = "elements") -> float:
    """Rough time of one thread, as `Workload` counts operations."""
    return operations / _OPERATIONS_PER_SECOND[product] + others / _OTHERS_PER_SECOND


def most_in_a_slice(count: int, operations: float, others: float) -> int:
    """How many of `count` equal parts of this work one thread does in one slice, at least 1."""
    return max(1, int(count * _SLICE_SECONDS / max(_seconds_of(operations, others), 1e-9)))


class Workload:
    """The tasks of one pass over a problem.

    `operations` are those of matrix products; `product` says what one instruction multiplies.
    `others` are all other operations.
    """

    def __init__(
        self, count: int, operations: float, product: str = "elements", others: float = 0.0
    ) -> None:
        self.count = count
        """Number of tasks."""
        self._operations = operations
        self.is_brief = is_brief(operations)
        self._seconds = _seconds_of(operations, others, product)

    @property
    def most_workers(self) -> int:
        """Threads that pay."""
        return min(int(self._operations / _WORTH_A_THREAD), self.count)

    def workers(self, threads: int | None = None) -> int:
        """Threads that pay, at most as many as may run."""
        return max(1, min(self.most_workers, threads or get_num_threads()))

    def run(
        self,
        kernel: Kernel,
        arguments: Runnable,
        workers: int,
        ranges: Sequence[tuple[int, int]] = (),
        progress: Progress | None = None,
    ) -> None:
        """Run all tasks; tasks of different `ranges` never run at the same time."""
        seconds = self._seconds / workers
        slices = max(1, math.ceil(seconds / _SLICE_SECONDS))
        # Workers get equally many tasks of a slice, so that none waits for another.
        step = workers * max(1, -(-self.count // (workers * slices)))
        share = seconds * step / max(self.count, 1)
        for first, last in ranges or [(0, self.count)]:
            for start in range(first, last, step):
                stop = min(start + step, last)
                arguments.allow_tasks(start, stop)
                jobs.run(kernel, arguments, workers, share)
                if progress is not None:
                    progress(stop, self.count)
