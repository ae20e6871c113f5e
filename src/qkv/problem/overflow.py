"""Outputs whose sum of weighted values overflowed although their mean is finite.

Kernels add `exp(s - m) v` and divide by the sum of `exp(s - m)` afterwards. The first sum may be as
many times larger than the output as there are keys, and more where m is not the maximum, so that
values near the largest number of the type make it infinite. Such calls are rare, and are computed a
second time from smaller values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.partial import Partial
from qkv.problem.spec import Problem

Array = NDArray[Any]

__all__ = ["finite_or_recomputed", "recomputed"]

LARGEST_WEIGHT = 2.0**16
"""The largest `exp(s - m)` of kernels whose m is not the maximum, such as those on matrix tiles."""


def finite_or_recomputed(problem: Problem, run: Callable[[Problem], Partial]) -> Partial:
    """What `run` gives, whose output is computed again where its sums may have overflowed."""
    partial = run(problem)
    if np.isfinite(partial.out).all():
        return partial
    return replace(partial, out=recomputed(problem, partial.out, lambda p: run(p).out))


def recomputed(problem: Problem, out: Array, run: Callable[[Problem], Array]) -> Array:
    """The output, whose entries that are not finite are replaced by those of smaller values.

    Parameters
    ----------
    problem : Problem
    out : array (..., num_heads, q_len, v_head_dim)
        What `run` gave, before sinks take their share.
    run : callable
        Gives the output of a problem without calling this function.

    Returns
    -------
    array
        `out` itself if no sum of these values can overflow: then infinities and NaN come from the
        operands. A power of two is exact, except where it makes a value subnormal; entries that
        were finite keep their bits.
    """
    problem = problem.gathered()
    spec, operands = problem.spec, problem.operands
    wide = np.asarray(operands.value).astype(spec.compute_dtype, copy=False)
    largest = np.max(np.abs(wide), where=np.isfinite(wide), initial=0)
    growth = LARGEST_WEIGHT * spec.kv_len
    if operands.dropout is not None:
        growth /= 1 - operands.dropout.p
    exponent = math.ceil(math.log2(growth)) + 1
    if math.frexp(largest)[1] + exponent < np.finfo(spec.compute_dtype).maxexp:
        return out
    with np.errstate(invalid="ignore", under="ignore"):  # A signalling NaN among the values.
        smaller = np.ldexp(wide, -exponent).astype(operands.value.dtype)
    again = run(replace(problem, operands=replace(operands, value=smaller)))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.ldexp(again.astype(spec.compute_dtype), exponent)
        if operands.dropout is None:
            # Weights add to one but for rounding, which must not make the largest number infinite.
            scaled = np.where(np.isfinite(again), np.clip(scaled, -largest, largest), scaled)
    return np.where(np.isfinite(out), out, scaled.astype(out.dtype))
