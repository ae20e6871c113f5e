"""How far results may be off: the error bound of docs/semantics.md, for each draw.

    outputs:    2 max|plain - exact| + 1 ulp(max|exact|),   float64: 64 eps max(1, max|exact|)
    gradients:  3 max|plain - exact| + 3 ulp(max|exact|),   float64 alike

The plain error is the largest of a few orders of addition. It is computed only where units alone
are exceeded, and in more orders only where fewer do not suffice: that can only make it smaller.

Of a million draws some have few orders, one or two where there are two keys or a head_dim of 2, and
are lucky in all of them. Their plain error is then the largest of neighbouring problems, whose
numbers differ by some hundredths (docs/adr/0008-error-bound.md); they are counted in `LUCKY`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .oracle import Oracle
from .problem import DTYPES, Problem, Variant

Array = NDArray[Any]

ORDERS = (1, 12, 100)
NEIGHBOURS = 40
LUCKY: Counter[str] = Counter()
"""Draws that needed neighbours, by what was off."""


class Result(NamedTuple):
    """Results of all draws, how they are computed plainly, and whether they are gradients.

    `plain(oracle, dtype, order)` is exact for float64.
    """

    what: str
    found: Array
    plain: Callable[[Oracle, Any, int], Array]
    dtype: Any
    is_gradient: bool = False


def require(condition: Any, fact: str) -> None:
    """Raise AssertionError with the fact unless the condition holds."""
    if not condition:
        raise AssertionError(fact)


def largest(array: Array) -> Array:
    """The largest magnitude of each draw; infinity if any is NaN."""
    found = np.max(np.abs(array.reshape(len(array), -1)), axis=1, initial=0.0)
    return np.where(np.isnan(found), np.inf, found)


def ulp(magnitude: Array, dtype: Any) -> Array:
    """The unit in the last place of numbers of these magnitudes."""
    info = ml_dtypes.finfo(np.dtype(dtype))
    smallest = float(info.smallest_normal)
    return float(info.eps) * 2.0 ** np.floor(np.log2(np.maximum(magnitude, smallest)))


def near(oracle: Oracle, result: Result) -> None:
    """Require that each draw is within its bound."""
    exact = result.plain(oracle, np.float64, 0)
    found = np.asarray(result.found, np.float64)
    require(found.shape == exact.shape, f"{result.what} has shape {found.shape}, not {exact.shape}")
    if not found.size:
        return
    error, size = largest(found - exact), largest(exact)
    share, units = (3, 3) if result.is_gradient else (2, 1)
    unit = units * ulp(size, result.dtype)
    if oracle.problem.dtype == "float64":
        limit = np.maximum(unit, 64 * 2.0**-52 * np.maximum(1, size))
    else:
        limit = unit
        if (error > limit).any():
            limit = unit + share * _plain_errors(oracle, result, exact, (error - unit) / share)
    wrong = np.flatnonzero(error > limit)
    for n in wrong:
        if np.isfinite(error[n]) and oracle.problem.dtype != "float64":
            errors = _errors_of_neighbours(oracle.problem.only([n]), n, result)
            limit[n] = unit[n] + share * errors
        require(
            error[n] <= limit[n],
            f"{result.what} of draw {n} is {error[n]:.3g} off, allowed is {limit[n]:.3g}",
        )
        LUCKY[result.what] += 1


def _plain_errors(oracle: Oracle, result: Result, exact: Array, enough: Array) -> Array:
    """The largest plain error of each draw, over as many orders as are enough for all."""
    worst, done = np.zeros(len(exact)), 0
    for orders in ORDERS:
        for order in range(done, orders):
            plain = result.plain(oracle, DTYPES[oracle.problem.dtype], order)
            worst = np.maximum(worst, largest(plain - exact))
        done = orders
        if (worst >= enough).all():
            break
    return worst


def neighbour(problem: Problem, number: int) -> Problem:
    """A problem whose operands, biases, tables and sinks differ by some hundredths."""
    rng = np.random.default_rng(number)

    def moved(array: Any) -> Array:
        factors = rng.uniform(1 - 2**-5, 1 + 2**-5, np.shape(array))
        return (np.asarray(array, np.float64) * factors).astype(np.asarray(array).dtype)

    variants = [
        Variant(
            v.name,
            {
                name: moved(field)
                if name in ("array", "table", "values") and np.asarray(field).dtype != bool
                else field
                for name, field in v.fields.items()
            },
            v.varies,
        )
        for v in problem.variants
    ]
    return replace(
        problem,
        query=moved(problem.query),
        key=moved(problem.key),
        value=moved(problem.value),
        variants=tuple(variants),
    )


def _errors_of_neighbours(problem: Problem, draw: int, result: Result) -> float:
    """The largest plain error of problems beside one draw."""
    worst = 0.0
    for number in range(NEIGHBOURS):
        oracle = Oracle(neighbour(problem, number), draw)
        right = result.plain(oracle, np.float64, 0)
        plain = result.plain(oracle, DTYPES[problem.dtype], number)
        worst = max(worst, float(largest(plain - right)[0]))
    return worst
