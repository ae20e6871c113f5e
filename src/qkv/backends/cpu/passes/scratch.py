"""Memory that one call at a time uses, kept for later calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.machine.addresses import address_of, page_aligned
from qkv.partial import Partial

Array = NDArray[Any]
Thing = TypeVar("Thing")

NO_RESULTS = Partial(np.empty(0), np.empty(0))
"""In the place of results whose addresses each call brings."""
_MOST_FREE = 4
"""Number of scratch buffers that are kept for later calls."""


class Pool(Generic[Thing]):
    """Things that one call at a time uses, kept for later calls: one for each thread at once."""

    def __init__(self, make: Callable[[], Thing], most: int = 64) -> None:
        self._make, self._most = make, most
        self._free: list[Thing] = []

    def take(self) -> Thing:
        """One that is free, or made if there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, thing: Thing) -> None:
        if len(self._free) < self._most:
            self._free.append(thing)


class Scratch:
    """Memory that one call at a time writes to."""

    def __init__(self, size: int) -> None:
        self.array = page_aligned(size)
        self.size = size
        self.address = address_of(self.array)


class BriefJob(NamedTuple):
    """Work so short that it may hold the global interpreter lock (GIL).

    Attributes
    ----------
    address, argument : int
        Of compiled code `(block, argument)`.
    scratch_bytes : int
        Memory that it needs.
    scratch : sequence of (int, int)
        Words of the block for addresses in this memory, and the bytes at which these lie.
    most_keys : int
        The most keys for which it may be run, if their number is not fixed.
    """

    address: int
    argument: int
    scratch_bytes: int
    scratch: Sequence[tuple[int, int]]
    most_keys: int = 0


def take_scratch(size: int, reserve: int = 0) -> Scratch:
    """Scratch of at least `size` bytes; `reserve` more if it is made for this call."""
    scratch = _scratch.take()
    return scratch if scratch is not None and scratch.size >= size else Scratch(size + reserve)


def scratch_of_brief_jobs(size: int) -> Scratch:
    """Scratch that all brief jobs share, because only one of them at a time holds the GIL."""
    global _of_brief_jobs
    if _of_brief_jobs is None or _of_brief_jobs.size < size:
        _of_brief_jobs = Scratch(size)
    return _of_brief_jobs


_of_brief_jobs: Scratch | None = None


_scratch: Pool[Scratch | None] = Pool(lambda: None, _MOST_FREE)
return_scratch = _scratch.give_back
