"""How far a result may lie from the truth: a rule, not a number that someone chose.

For float32, float16 and bfloat16 the bound is twice the error of the plain computation in the same
type (matrix product, softmax, matrix product) on the same inputs, plus one unit in the last place.
Whoever computes attention in that type without a thought makes the plain error; twice that leaves
room for another order of additions, and for no mistake. For float64 the bound is 64 eps times the
largest reference, or times 1 if that is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qkv.problem.dense import Dense
from qkv.testing.oracle import Truth

Array = NDArray[Any]

__all__ = ["Bounds", "bounds", "plain", "ulp"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest absolute errors of output and lse that a backend may make on one case."""

    out: float
    lse: float


def bounds(truth: Truth, dtype: Any) -> Bounds:
    """The bounds for a case whose inputs were rounded to `dtype` before `truth` read them.

        bound = 2 max|plain - truth| + ulp(max|truth|),   float64: 64 eps max(1, max|truth|)

    lse is held to the type of computation: float32 for 16-bit input.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.testing import truth
    >>> x = np.eye(2)[None]
    >>> bounds(truth(x, x, x), "float64").out == 64 * np.finfo(np.float64).eps
    True
    """
    dtype = np.dtype(dtype)
    lse = np.where(np.isneginf(truth.lse), 0.0, truth.lse)
    if dtype == np.float64:
        limits = (64 * np.finfo(dtype).eps * max(1.0, _largest(a)) for a in (truth.out, lse))
        return Bounds(*limits)
    out_error = lse_error = 0.0
    flat_out = truth.out.reshape(len(truth.heads), *truth.out.shape[-2:])
    flat_lse = lse.reshape(len(truth.heads), lse.shape[-1])
    for dense, out_row, lse_row in zip(truth.heads, flat_out, flat_lse, strict=True):
        out_error = max(out_error, _largest(plain(dense, truth.variants, dtype)[0] - out_row))
        rows = plain(dense, truth.variants, np.float32)[1]
        lse_error = max(lse_error, _largest(np.where(np.isneginf(rows), 0.0, rows) - lse_row))
    return Bounds(
        2 * out_error + ulp(_largest(truth.out), dtype),
        2 * lse_error + ulp(_largest(lse), np.float32),
    )


def plain(dense: Dense, variants: Sequence[Any], dtype: Any) -> tuple[Array, Array]:
    """Output and lse of one head, computed plainly in `dtype`.

    1. scores: `query @ key.T` rounded, times `scale` rounded. Rotated rows are rounded first.
    2. The variants' `naive` in float64 on these scores, rounded once; a forbidden pair is -inf.
    3. weights: softmax, rounded.
    4. output: `weights @ value`, rounded.

    Inside a step, 16-bit types are computed in float32, as hardware and torch do.
    """
    dtype = np.dtype(dtype)
    compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def rounded(array: Array) -> Array:
        return np.asarray(array).astype(dtype).astype(compute)

    with np.errstate(all="ignore"):
        query, key, value = (rounded(a) for a in (dense.query, dense.key, dense.value))
        dense = replace(dense)
        dense.scores = rounded(rounded(query @ key.T) * compute.type(dense.scale)).astype(float)
        for variant in variants:
            variant.naive(dense)
        scores = rounded(np.where(dense.allowed, dense.scores, -np.inf))
        sink = compute.type(dense.sink)
        peak = np.maximum(scores.max(axis=1, initial=-np.inf), sink)
        shift = np.where(np.isneginf(peak), compute.type(0), peak)
        terms = np.exp(scores - shift[:, None])
        total = terms.sum(axis=1) + np.exp(sink - shift)
        weights = rounded(terms / np.where(np.isneginf(peak), 1, total)[:, None])
        out = rounded(rounded(weights * dense.factors) @ value)
        lse = np.where(np.isneginf(peak), peak, shift + np.log(total))
    return out, lse


def ulp(magnitude: float, dtype: Any) -> float:
    """The unit in the last place of a number of this size in `dtype`.

    Examples
    --------
    >>> ulp(1.0, "float32") == 2.0**-23
    True
    """
    info: Any = ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
    exponent = np.floor(np.log2(max(magnitude, float(info.smallest_normal))))
    return float(info.eps) * float(2.0**exponent)


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), initial=0.0))
