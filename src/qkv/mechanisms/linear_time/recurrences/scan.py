"""The linear recurrence h[t] = decay[t] * h[t-1] + increment[t], without a loop over all t."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qkv.mechanisms.base.arrays.namespace import array_namespace

__all__ = ["in_segments", "joined_segments", "linear_scan", "segments"]


def linear_scan(
    decay: Sequence[Any],
    increment: Sequence[Any],
    state: Any,
    add: Callable[[Any, Any], Any] = operator.add,
    multiply: Callable[[Any, Any], Any] = operator.mul,
) -> Iterator[Any]:
    """All states of `h[t] = decay[t] * h[t-1] + increment[t]`, in segments side by side.

    A whole segment is a step of the same kind: its decay is the product of its decays, its
    increment is the state after it from a state of zero. So the states between segments are found
    first, and then all segments go on from theirs at once.

    Parameters
    ----------
    decay, increment : sequences of `length` arrays (segments, ...)
        Element i holds the tokens i, length + i, 2 length + i, ...; see `in_segments`. Decays
        within [0, 1] can neither overflow nor lose what other states hold.
    state : array (...)
        Before the first token.
    add, multiply : functions of two arrays
        Of another semiring: with maximum and addition, decays are added and the larger of old
        and new is kept.

    Yields
    ------
    array (segments, ...)
        First the state before each segment, then that after each of its `length` tokens.

    Notes
    -----
    O(n) operations in O(length + segments) calls of the array library.
    Source: Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990, section 1.4.

    Examples
    --------
    >>> import numpy as np
    >>> half, x = np.full(4, 0.5), np.array([8.0, 0.0, 4.0, 0.0])
    >>> states = list(linear_scan(in_segments(half, 2), in_segments(x, 2), np.asarray(0.0)))
    >>> joined_segments(states[1:])
    array([8., 4., 6., 3.])
    """
    starts = [state]
    if len(increment[0]) > 1:
        whole, total = decay[0], increment[0]
        for d, b in zip(decay[1:], increment[1:], strict=True):
            whole, total = multiply(d, whole), add(multiply(d, total), b)
        for k in range(len(total) - 1):
            starts.append(add(multiply(whole[k, ...], starts[-1]), total[k, ...]))
    states = array_namespace(state).stack(starts)
    yield states
    for d, b in zip(decay, increment, strict=True):
        states = add(multiply(d, states), b)
        yield states


def segments(n: int, chunk_size: int) -> Iterator[tuple[slice, int]]:
    """Chunks of about `chunk_size` of n tokens, with the length of their segments.

    A chunk has as many segments as a segment has tokens, or nearly. What is left at the end is
    cut into shorter chunks, so that no token is added.

    Examples
    --------
    >>> list(segments(23, 16))
    [(slice(0, 16, None), 4), (slice(16, 20, None), 4), (slice(20, 23, None), 3)]
    """
    start, root = 0, math.isqrt(chunk_size)
    while start < n:
        length = min(root, n - start)
        tokens = min((n - start) // length, chunk_size // length) * length
        yield slice(start, start + tokens), length
        start += tokens


def in_segments(array: Any, length: int) -> tuple[Any, ...]:
    """`(n, ...)` as `length` arrays `(n / length, ...)`, one for each token of a segment.

    Examples
    --------
    >>> import numpy as np
    >>> [tokens.tolist() for tokens in in_segments(np.arange(6), 3)]
    [[0, 3], [1, 4], [2, 5]]
    """
    xp = array_namespace(array)
    apart = xp.reshape(array, (array.shape[0] // length, length, *array.shape[1:]))
    return tuple(apart[:, token, ...] for token in range(length))


def joined_segments(tokens: Sequence[Any]) -> Any:
    """The inverse of `in_segments`."""
    xp = array_namespace(tokens[0])
    apart = xp.stack(tokens, axis=1)
    return xp.reshape(apart, (apart.shape[0] * apart.shape[1], *apart.shape[2:]))
