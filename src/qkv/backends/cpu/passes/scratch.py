"""Memory that one call at a time uses, kept for later calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import address_of, page_aligned
from qkv.partial import Partial

Array = NDArray[Any]
Thing = TypeVar("Thing")

NO_RESULTS = Partial(np.empty(0), np.empty(0))
"""Empty arrays in place of results whose addresses each call brings."""
_MOST_FREE = 4
"""Number of scratch buffers that are kept for later calls."""


class Pool(Generic[Thing]):
    """Things that one call at a time uses, kept for later calls: one for each thread at once."""

    def __init__(self, make: Callable[[], Thing]) -> None:
        self._make = make
        self._free: list[Thing] = []
        self.give_back: Callable[[Thing], None] = self._free.append

    def take(self) -> Thing:
        """A thing that is free, or a new one if there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()


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
    try:
        scratch = _free.pop()
    except IndexError:
        return Scratch(size + reserve)
    return scratch if scratch.size >= size else Scratch(size + reserve)


def return_scratch(scratch: Scratch) -> None:
    """Keep it for a later call, unless enough is kept."""
    if len(_free) < _MOST_FREE:
        _free.append(scratch)


def scratch_of_brief_jobs(size: int) -> Scratch:
    """Scratch that all brief jobs share, because only one of them at a time holds the GIL."""
    global _of_brief_jobs
    if _of_brief_jobs is None or _of_brief_jobs.size < size:
        _of_brief_jobs = Scratch(size)
    return _of_brief_jobs


_of_brief_jobs: Scratch | None = None

_free: list[Scratch] = []
