"""The argument block of a kernel: words that it reads, and that one call at a time fills in.

It begins with the counter of tasks, alone in its cache lines. One 64-bit word for each field
follows, then the tables of the expressions: the address of each, and the size and byte stride of
each dimension.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from qkv.arrays.addresses import quick_address_of

__all__ = [
    "COMMON_FIELDS", "COUNTER_BYTES", "LIMIT", "WORD", "ArgumentBlock", "operand_fields",
    "word_index",
]  # fmt: skip

WORD = 8

COUNTER_BYTES = 128

COMMON_FIELDS = (
    "limit", "tasks", "scratch", "scratch_bytes",
    "num_heads", "group_size", "q_len", "kv_len", "head_dim", "v_head_dim", "scale",
    "dropout_seed", "dropout_threshold", "dropout_factor",
)  # fmt: skip
"""The first words of every argument block. `limit` is the number of the first task that a run
leaves alone."""


def operand_fields(*names: str) -> tuple[str, ...]:
    """Words for each operand: address, byte offsets of batch rows, and three byte strides."""
    parts = ("", "_batches", "_head", "_row", "_element")
    return tuple(f"{name}{part}" for name in names for part in parts)


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
