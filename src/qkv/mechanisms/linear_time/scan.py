"""The linear recurrence h[t] = decay[t] * h[t-1] + increment[t], without a loop over t."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from qkv.mechanisms.base.namespace import array_namespace

__all__ = ["linear_scan"]


def linear_scan(
    decay: Any,
    increment: Any,
    add: Callable[[Any, Any], Any] = operator.add,
    multiply: Callable[[Any, Any], Any] = operator.mul,
) -> Any:
    """All states of `h[t] = decay[t] * h[t-1] + increment[t]` with h[-1] = 0, along axis 0.

    Two steps in a row are one step of the same kind, with decay `d1 * d0` and increment
    `d1 * b0 + b1`. So the states at odd t are a scan of half the length, and each state at even t
    is one step from the state before it.

    Parameters
    ----------
    decay, increment : arrays (n, ...)
        Decays within [0, 1] can neither overflow nor lose what other states hold.
    add, multiply : functions of two arrays
        Of another semiring: with maximum and addition, decays are added and the larger of old
        and new is kept.

    Returns
    -------
    array (n, ...)

    Notes
    -----
    O(n) operations in O(log n) calls of the array library.
    Source: Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990; section 3.3 of
    Gu and Dao, "Mamba", arXiv 2312.00752.

    Examples
    --------
    >>> import numpy as np
    >>> linear_scan(np.array([0.5, 0.5, 0.5]), np.array([8.0, 0.0, 4.0]))
    array([8., 4., 6.])
    """
    n = increment.shape[0]
    if n <= 1:
        return increment
    xp = array_namespace(increment)
    pairs = n // 2
    d0, b0 = decay[: 2 * pairs : 2], increment[: 2 * pairs : 2]
    d1, b1 = decay[1::2], increment[1::2]
    odd = linear_scan(multiply(d1, d0), add(multiply(d1, b0), b1), add, multiply)
    later = add(multiply(decay[2::2], odd[: n - pairs - 1]), increment[2::2])
    even = xp.concat([increment[:1], later])
    both = xp.stack([even[:pairs], odd], axis=1)
    joined = xp.reshape(both, (2 * pairs, *increment.shape[1:]))
    return joined if n == 2 * pairs else xp.concat([joined, even[pairs:]])
