"""What a workload says between q.k and the softmax, in the two forms that a benchmark needs.

qkv is told with its variants; the reference and the libraries that have no name for a rule are told
which pairs are allowed, and what is added to the score of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems.moved import Shape
from qkv.variants import ALiBi, Causal, KeyLengths, Segments, SlidingWindow

Array = NDArray[Any]

__all__ = ["Rule", "alibi_causal", "causal", "everything", "key_lengths", "segments", "window"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A mask and a bias.

    Attributes
    ----------
    name : str
        The kind, by which a contender knows whether it has a way to say it.
    variants : tuple
        As qkv is told.
    allows : callable (batch, rows, keys) -> bool array
        Which pairs may meet; `rows` is a column of query rows, `keys` a row of key rows.
    slopes : array (num_heads,), optional
        `-slope * |row - key|` is added to the scores of a head.
    parameters : tuple of int
        The window, or the lengths of rows or segments.
    """

    name: str
    variants: tuple[Any, ...]
    allows: Callable[[int, Array, Array], Array]
    slopes: Array | None = None
    parameters: tuple[int, ...] = ()

    def allowed(self, batch: int, rows: Array, kv_len: int) -> Array:
        """Which keys each of some query rows may see, `(len(rows), kv_len)`."""
        keys = np.arange(kv_len)
        pairs = self.allows(batch, rows[:, None], keys[None, :])
        return np.broadcast_to(pairs, (len(rows), kv_len))

    def bias(self, head: int, rows: Array, kv_len: int) -> Array | float:
        """What is added to the scores of some query rows of a head."""
        if self.slopes is None:
            return 0.0
        return np.asarray(-self.slopes[head] * np.abs(rows[:, None] - np.arange(kv_len)[None, :]))

    def pairs(self, shape: Shape) -> int:
        """Pairs of a query and a key that are allowed, over all batch rows and heads."""
        count = 0
        for batch in range(math.prod(shape.batch_shape)):
            for start in range(0, shape.q_len, _ROWS):
                rows = np.arange(start, min(start + _ROWS, shape.q_len))
                count += int(np.count_nonzero(self.allowed(batch, rows, shape.kv_len)))
        return count * shape.num_heads


_ROWS = 512
"""Query rows that are counted at once."""


def everything() -> Rule:
    """Every query sees every key."""
    return Rule("all", (), lambda batch, i, j: np.ones((1, 1), bool))


def causal() -> Rule:
    """No query sees a later key."""
    return Rule("causal", (Causal(),), lambda batch, i, j: j <= i)


def window(width: int) -> Rule:
    """A query sees its own key and the `width - 1` before it."""
    variants = (SlidingWindow(width - 1, 0),)
    return Rule("window", variants, lambda batch, i, j: (j <= i) & (j > i - width), None, (width,))


def alibi_causal(num_heads: int) -> Rule:
    """Causal with the slopes of Press et al. (2022) for a power of two heads."""
    slopes = 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)
    variants = (ALiBi(slopes), Causal())
    return Rule("alibi causal", variants, lambda batch, i, j: j <= i, slopes)


def key_lengths(lengths: Sequence[int]) -> Rule:
    """A padded batch: row b has `lengths[b]` real keys."""
    variants = (KeyLengths(np.asarray(lengths)),)
    return Rule(
        "key lengths", variants, lambda batch, i, j: j < lengths[batch], None, tuple(lengths)
    )


def segments(lengths: Sequence[int]) -> Rule:
    """Examples packed into one row, each of which sees itself alone."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    variants = (Segments(ids),)
    return Rule("segments", variants, lambda batch, i, j: ids[i] == ids[j], None, tuple(lengths))
