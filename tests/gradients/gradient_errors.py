"""Errors of gradients beside those of plain autograd in the same type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from formula import TYPES, Dense, ulp

import qkv
from qkv.testing import truth

Array = np.ndarray[Any, Any]

ORDERS = 12


@dataclass(frozen=True)
class Errors:
    """Errors of dQ, dK and dV: our largest, the plain one in each order, and a unit."""

    ours: Array
    plain: Array
    unit: Array

    @property
    def shares(self) -> Array:
        """How much of the bound is used."""
        return self.ours / (3 * self.plain.max(axis=0) + 3 * self.unit)

    @property
    def ratios(self) -> Array:
        """Our errors divided by the plain ones, in an order that is neither lucky nor unlucky."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.ours / np.median(self.plain, axis=0))


def errors(
    arrays: Sequence[Array],
    grad_out: Array,
    dtype: str,
    variants: Sequence[Any] = (),
    grad_lse: Array | None = None,
    orders: int = ORDERS,
) -> Errors:
    """The errors of the gradients that `qkv.vjp` gives, and of the plain ones in so many orders."""
    known = truth(*arrays, variants)
    computed = [("float64", 0), *((dtype, order) for order in range(orders))]
    exact, *plain = (
        Dense(*arrays, known, None, TYPES[kind], order).gradients(grad_out, grad_lse)
        for kind, order in computed
    )
    _, pullback = qkv.vjp(*arrays, *variants, backend="cpu")
    found = pullback(grad_out, grad_lse)

    def largest(gradients: Sequence[Array]) -> list[float]:
        return [float(np.abs(a - b).max()) for a, b in zip(gradients, exact, strict=True)]

    ours = [np.asarray(g, np.float64) for g in (found.query, found.key, found.value)]
    unit = [ulp(float(np.abs(a).max()), dtype) for a in exact]
    if dtype == "float64":  # 64 eps, as a bound of three units
        unit = [64 / 3 * 2.0**-52 * max(1.0, float(np.abs(a).max())) for a in exact]
        plain = [exact]
    return Errors(np.array(largest(ours)), np.array([*map(largest, plain)]), np.array(unit))
