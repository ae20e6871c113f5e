"""Passes over the rows of each head before or after attention: their argument block and loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.frame import COUNTER_BYTES, WORD

__all__ = ["Block", "address_of", "each_head", "words_of"]


def each_head(
    e: Emitter, fields: Sequence[str], run: Callable[[Value, dict[str, Value]], None]
) -> None:
    """Emit `job(arguments, worker)`, which takes heads until none is left.

    `run(number, words)` emits the pass over one head of one batch row, numbered through; `words`
    has the words of the argument block by name, of which the first is `limit`.
    """
    with e.function("job", [POINTER, INT64], public=True) as (_, (arguments, _worker)):
        words = {
            name: e.load(e.at(arguments, COUNTER_BYTES + WORD * i), INT64, WORD)
            for i, name in enumerate(fields)
        }
        counter = e.builder.bitcast(arguments, INT64.as_pointer())

        def take() -> tuple[Value, Value]:
            number = e.builder.atomic_rmw("add", counter, e.index(1), "monotonic")
            return number, e.below(number, words["limit"])

        e.take_while(take, lambda number: run(number, words))


def words_of(fields: Sequence[str], values: Mapping[str, int]) -> list[int]:
    """An argument block: the counter, then the fields in their order."""
    return [*[0] * (COUNTER_BYTES // WORD), *[values[name] for name in fields]]


class Block:
    """Argument words of one run; keeps alive what they point to."""

    def __init__(self, words: list[int], kept: Any) -> None:
        self._words = np.array(words, np.int64)
        self._kept = kept
        self.address = address_of(self._words)

    def allow(self, start: int, stop: int) -> None:
        """Let the next run take the heads from `start` to `stop`."""
        self._words[0] = start
        self._words[COUNTER_BYTES // WORD] = stop


def address_of(array: NDArray[Any]) -> int:
    """Where the first element lies."""
    return int(array.__array_interface__["data"][0])
