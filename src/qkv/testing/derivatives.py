"""Gradients of query, key and value from the definition, and how far a result may lie from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.dense import Dense
from qkv.testing.oracle import Truth
from qkv.testing.tolerances import ORDERS, modified, ulp

Array = NDArray[Any]

__all__ = ["GradientOracle"]

STEP = 1e-4
"""Half of the distance over which differences of scores are taken."""

DIFFERENCES = 1e-7
"""Error of the differences, beside a largest gradient of 1 or more."""


@dataclass(frozen=True, slots=True)
class GradientOracle:
    """Gradients of `sum(out * grad_out) + sum(lse * grad_lse)` of one call.

        dV = (w f)^T dO,   dS[i, j] = w[i, j] (f[i, j] dO[i] . v[j] - delta[i] + grad_lse[i]) s',
        dQ = scale dS k,   dK = scale dS^T q,   delta[i] = sum_j w[i, j] f[i, j] dO[i] . v[j]

    with factors f of dropout, and s' the derivative of a score by `scale q.k`, from differences of
    the variants' `naive`.

    Attributes
    ----------
    truth : Truth
    grad_out : array (..., num_heads, q_len, v_head_dim)
    grad_lse : array (..., num_heads, q_len)
    shapes : sequence of tuple
        Of query, key and value with heads before rows; leading dimensions may broadcast.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.testing import truth
    >>> x = np.eye(2)[None]
    >>> oracle = GradientOracle(truth(x, x, x), np.ones((1, 2, 2)), np.zeros((1, 2)), [x.shape] * 3)
    >>> oracle.bounds("float64")[0][2].tolist()  # of value
    [[[1.0, 1.0], [1.0, 1.0]]]
    """

    truth: Truth
    grad_out: Array
    grad_lse: Array
    shapes: Sequence[tuple[int, ...]]

    def bounds(self, dtype: Any, orders: int = ORDERS) -> tuple[list[Array], list[float]]:
        """Gradients in float64, and the largest absolute error that each may have in `dtype`.

            bound = 3 max|plain - exact| + 3 ulp(max|exact|) + 1e-7 max(1, max|exact|)

        where plain gradients are computed in `dtype` in a few orders of addition; for float64
        only the last term is left, which is what the differences may be off.

        Examples
        --------
        >>> import numpy as np
        >>> from qkv.testing import truth
        >>> x = np.eye(2)[None]
        >>> oracle = GradientOracle(truth(x, x, x), np.ones((1, 2, 2)), np.zeros((1, 2)), [x.shape] * 3)
        >>> (query, key, value), limits = oracle.bounds("float64")
        >>> value.round(3)
        array([[[1., 1.],
                [1., 1.]]])
        """  # noqa: E501
        dtype = np.dtype(dtype)
        plain = [] if dtype == np.float64 else [(dtype, order) for order in range(orders)]
        exact, *others = self._gradients([(np.dtype(np.float64), 0), *plain])
        limits = []
        for n, gradient in enumerate(exact):
            size = float(np.max(np.abs(gradient), initial=0.0))
            limit = DIFFERENCES * max(1.0, size)
            if others:
                errors = [np.max(np.abs(other[n] - gradient), initial=0.0) for other in others]
                limit += 3 * float(max(errors)) + 3 * ulp(size, dtype)
            limits.append(limit)
        return exact, limits

    def _gradients(self, computed: Sequence[tuple[np.dtype[Any], int]]) -> list[list[Array]]:
        """Gradients of query, key and value, for each dtype and order."""
        lead = self.truth.out.shape[:-3]
        gradients = [[np.zeros((*lead, *s[-3:])) for s in self.shapes] for _ in computed]
        kv_heads = self.shapes[1][-3]
        places = np.ndindex(*self.truth.out.shape[:-2])
        for place, dense in zip(places, self.truth.heads, strict=True):
            kv_place = (*place[:-1], place[-1] // (dense.num_heads // kv_heads))
            rotations = list(_rotation_matrices(dense, self.truth.variants))
            slope = _slope(dense, self.truth.variants)
            cotangents = self.grad_out[place], self.grad_lse[place], slope
            for (dtype, order), sums in zip(computed, gradients, strict=True):
                query, key, value = _head_gradients(
                    dense, self.truth.variants, *cotangents, dtype, order
                )
                for query_rotation, key_rotation in rotations:
                    query, key = (
                        np.einsum("ldr,lr->ld", rotation, rows)
                        for rotation, rows in ((query_rotation, query), (key_rotation, key))
                    )
                sums[0][place] += query
                sums[1][kv_place] += key
                sums[2][kv_place] += value
        return [
            [_summed(g, s) for g, s in zip(sums, self.shapes, strict=True)] for sums in gradients
        ]


def _head_gradients(
    dense: Dense,
    variants: Sequence[Any],
    grad_out: Array,
    grad_lse: Array,
    slope: Array,
    dtype: np.dtype[Any],
    order: int,
) -> tuple[Array, Array, Array]:
    """Gradients of one head's rows of query, key and value, computed plainly in `dtype`."""
    compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def rounded(array: Array) -> Array:
        return np.asarray(array).astype(dtype).astype(compute)

    rng = np.random.default_rng(order)
    dims, rows, keys = (
        rng.permutation(n) if order else np.arange(n)
        for n in (dense.key.shape[1], len(dense.query), len(dense.key))
    )
    with np.errstate(all="ignore"):
        query, key, value = (rounded(a) for a in (dense.query, dense.key, dense.value))
        raw = rounded(rounded(query[:, dims] @ key[:, dims].T) * compute.type(dense.scale))
        scores = rounded(modified(dense, variants, raw.astype(float), None))
        peak = np.maximum(scores.max(axis=1, initial=-np.inf), compute.type(dense.sink))
        shift = np.where(np.isneginf(peak), compute.type(0), peak)
        terms = np.exp(scores - shift[:, None])
        total = terms[:, keys].sum(axis=1) + np.exp(compute.type(dense.sink) - shift)
        weights = rounded(terms / np.where(total == 0, 1, total)[:, None])
        factors, d_out = dense.factors.astype(compute), rounded(grad_out)
        grad_value = rounded(weights * factors)[rows].T @ d_out[rows]
        grad_weights = rounded(d_out @ value.T) * factors
        delta = (weights * grad_weights)[:, keys].sum(axis=1) - grad_lse.astype(compute)
        grad_scores = rounded(weights * (grad_weights - delta[:, None])) * slope.astype(compute)
        grad_scores = rounded(grad_scores * compute.type(dense.scale))
        grad_query = grad_scores[:, keys] @ key[keys]
        grad_key = grad_scores[rows].T @ query[rows]
    return grad_query.astype(float), grad_key.astype(float), grad_value.astype(float)


def _slope(dense: Dense, variants: Sequence[Any]) -> Array:
    """The derivative of each score by `scale q.k`; 0 for a forbidden pair."""
    with np.errstate(all="ignore"):
        raw = dense.products()
        above, below = (modified(dense, variants, raw + h, None) for h in (STEP, -STEP))
        slope = (above - below) / (2 * STEP)
    return np.where(np.isfinite(slope), slope, 0.0)


def _rotation_matrices(dense: Dense, variants: Sequence[Any]) -> Iterator[tuple[Array, Array]]:
    """The rotation matrices of each query and key row, for each rotation, the last first.

    Entry `[l, d]` is what row l would be if it were 1 in dimension d, and 0 elsewhere.
    """
    for variant in reversed([v for v in variants if type(v).__name__ == "RoPE"]):
        dim = dense.query.shape[1]
        rotated = copy(dense)
        gradients = np.zeros((len(dense.query), dim, dim)), np.zeros((len(dense.key), dim, dim))
        for d, unit in enumerate(np.eye(dim)):
            rotated.query = np.tile(unit, (len(dense.query), 1))
            rotated.key = np.tile(unit, (len(dense.key), 1))
            variant.naive_rows(rotated)
            gradients[0][:, d], gradients[1][:, d] = rotated.query, rotated.key
        yield gradients


def _summed(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Summed over leading dimensions that were broadcast."""
    padded = (1,) * (gradient.ndim - len(shape)) + tuple(shape)
    axes = tuple(n for n, size in enumerate(padded) if size == 1 != gradient.shape[n])
    return np.asarray(gradient.sum(axis=axes, keepdims=True)).reshape(shape)
