"""The argument block of a kernel: words that it reads, and that one call at a time fills in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from qkv.arrays.addresses import quick_address_of
from qkv.backends.cpu.emit.frame import COUNTER_BYTES, WORD

__all__ = ["LIMIT", "ArgumentBlock", "word_index"]

LIMIT = COUNTER_BYTES // WORD
"""The word of `limit`: the first after the counter, in the block of every kernel."""


def word_index(name: str, fields: Sequence[str]) -> int:
    """Which word of an argument block with these fields one of them is."""
    return LIMIT + fields.index(name)


class ArgumentBlock:
    """Argument words, and whatever they point to, which is kept alive meanwhile."""

    def __init__(self, words: NDArray[Any], keep_alive: Any = ()) -> None:
        self.words = memoryview(words.data)
        self.address = quick_address_of(words)
        self.pointer = ctypes.c_void_p(self.address)
        self.keep_alive = keep_alive

    def allow_tasks(self, start: int, stop: int) -> None:
        """Let the next run take the tasks from `start` to `stop`."""
        self.words[0] = start
        self.words[LIMIT] = stop
