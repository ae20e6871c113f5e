"""Error bounds of the tests, derived from the error of the plain computation.

For float32, float16 and bfloat16 the bound is twice the error of the plain computation in the same
type (matrix product, softmax, matrix product) on the same inputs, plus one unit in the last place.
Twice the plain error leaves room for another order of additions, but not for mistakes. The plain
computation may be lucky in one order of additions, so its error is the largest of several orders,
and the bound does not depend on the BLAS. For float64 the bound is 64 eps times the
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

__all__ = ["Bounds", "bounds", "largest", "plain", "ulp"]


ORDERS = 12
"""Orders of head_dim and keys in which the plain computation adds."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest absolute errors `max|result - truth|` that a backend may make on one case.

    Attributes
    ----------
    out, lse : float
        Of the output, and of lse where it is finite.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.testing import bounds, truth
    >>> x = np.eye(2)[None]
    >>> bounds(truth(x, x, x), "float32").out < 1e-6
    True
    """

    out: float
    lse: float


def bounds(truth: Truth, dtype: Any, orders: int = ORDERS, *, stepwise: bool = False) -> Bounds:
    """The bounds for a case whose inputs were rounded to `dtype` before `truth` read them.

        bound = 2 max|plain - truth| + ulp(max|truth|),   float64: 64 eps max(1, max|truth|)

    lse is held to the type of computation: float32 for 16-bit input. The plain error is the largest
    of some `orders`; fewer of them can only make the bounds smaller. `stepwise` is that of `plain`.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.testing import truth
    >>> x = np.eye(2)[None]
    >>> limits = bounds(truth(x, x, x), "float64")
    >>> limits.out == 64 * 2.0**-52
    True
    """
    dtype = np.dtype(dtype)
    lse = np.where(np.isneginf(truth.lse), 0.0, truth.lse)
    if dtype == np.float64:
        limits = (64 * 2.0**-52 * max(1.0, largest(a)) for a in (truth.out, lse))
        return Bounds(*limits)
    compute = np.dtype(np.float32)
    out_error = lse_error = 0.0
    flat_out = truth.out.reshape(len(truth.heads), *truth.out.shape[-2:])
    flat_lse = lse.reshape(len(truth.heads), lse.shape[-1])
    for dense, exact_out, exact_lse in zip(truth.heads, flat_out, flat_lse, strict=True):
        for order in range(orders):
            out, rows = plain(dense, truth.variants, dtype, order, stepwise=stepwise)
            if dtype != compute:
                rows = plain(dense, truth.variants, compute, order, stepwise=stepwise)[1]
            rows = np.where(np.isneginf(rows), 0.0, rows)
            out_error = max(out_error, largest(out - exact_out))
            lse_error = max(lse_error, largest(rows - exact_lse))
    return Bounds(
        2 * out_error + ulp(largest(truth.out), dtype),
        2 * lse_error + ulp(largest(lse), compute),
    )


def plain(
    dense: Dense, variants: Sequence[Any], dtype: Any, order: int = 0, *, stepwise: bool = False
) -> tuple[Array, Array]:
    """Output and lse of one head, computed plainly in `dtype`.

    `dense` is the head as the oracle leaves it, `variants` are those of its call.

    1. scores: `query @ key.T` rounded, times `scale` rounded. Rotated rows are rounded first.
    2. The variants' `naive` in float64 on these scores, rounded once; a forbidden pair is -inf.
    3. weights: softmax, rounded.
    4. output: `weights @ value`, rounded.

    Inside a step, 16-bit types are computed in float32, as hardware and torch do. With `order`
    0 it adds as the arrays lie; other numbers shuffle head_dim and keys. With `stepwise`, variants
    are given scores of the type of computation, what each adds is rounded to it, and so is the sum:
    as whoever computes in that type has to, and what shows where one large term cancels another.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.testing import truth
    >>> x = np.eye(2)[None]
    >>> exact = truth(x, x, x)
    >>> out, lse = plain(exact.heads[0], exact.variants, "float16")
    >>> bool(abs(out - exact.out[0]).max() < 1e-3)
    True
    """
    dtype = np.dtype(dtype)
    compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def rounded(array: Array) -> Array:
        return np.asarray(array).astype(dtype).astype(compute)

    rng = np.random.default_rng(order)
    dims, keys = (rng.permutation(n) if order else np.arange(n) for n in dense.key.shape[::-1])
    with np.errstate(all="ignore"):
        query, key = rounded(dense.query[:, dims]), rounded(dense.key[:, dims])
        raw = rounded(rounded(_product(query, key.T)) * compute.type(dense.scale)).astype(float)
        scores = rounded(modified(dense, variants, raw, compute if stepwise else None))[:, keys]
        sink = compute.type(dense.sink)
        peak = np.maximum(scores.max(axis=1, initial=-np.inf), sink)
        shift = np.where(np.isneginf(peak), compute.type(0), peak)
        terms = np.exp(scores - shift[:, None])
        total = terms.sum(axis=1) + np.exp(sink - shift)
        weights = rounded(terms / np.where(np.isneginf(peak), 1, total)[:, None])
        weights = rounded(weights * dense.factors[:, keys])
        out = rounded(_product(weights, rounded(dense.value[keys])))
        lse = np.where(np.isneginf(peak), peak, shift + np.log(total))
    return out, lse


def _product(a: Array, b: Array) -> Array:
    """`a @ b`, added in its own type: of a single number, BLAS may add in a wider one."""
    if len(a) == b.shape[1] == 1:
        return np.asarray(np.sum(a * b.T, axis=1, keepdims=True))
    return np.asarray(a @ b)


def modified(
    dense: Dense, variants: Sequence[Any], raw: Array, step: np.dtype[Any] | None
) -> Array:
    """The scores after the variants. Most variants only forbid pairs, which `dense` has already."""
    if not np.array_equal(dense.scores, dense.products()):
        dense = replace(dense)
        dense.scores = raw
        for variant in variants:
            before = dense.scores
            dense.scores = before.astype(step or np.float64)
            variant.naive(dense)
            if step is not None:
                change = (dense.scores - before).astype(step).astype(np.float64)
                dense.scores = (before + change).astype(step).astype(np.float64)
        raw = dense.scores
    return np.where(dense.allowed, raw, -np.inf)


def ulp(magnitude: float, dtype: Any) -> float:
    """The unit in the last place of a number of this magnitude in `dtype`.

    Examples
    --------
    >>> ulp(1.0, "float32") == 2.0**-23
    True
    """
    # ml_dtypes has no type annotations.
    info: Any = ml_dtypes.finfo(np.dtype(dtype))  # type: ignore[no-untyped-call]
    exponent = np.floor(np.log2(max(magnitude, float(info.smallest_normal))))
    return float(info.eps) * float(2.0**exponent)


def largest(array: Array) -> float:
    """The largest magnitude, 0 for an empty array."""
    return float(np.max(np.abs(array), initial=0.0))
