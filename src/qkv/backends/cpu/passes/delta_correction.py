"""What the backward pass reads of each row, and lse and delta from sums over its keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.backward.layout import ROW_SUMS
from qkv.partial import rest_of
from qkv.problem.backward import BackwardInputs
from qkv.problem.spec import Problem

Array = NDArray[Any]

_LEAST_CORRECTION = 2.0**-50
"""The least correction, relative to delta: float64 loses smaller ones, so they are left out."""


class RowArrays:
    """Arrays with numbers of each row that kernels read, and the `sums` that the delta correction
    writes for each range of keys.

    `delta_rest` is what delta lacks.
    """

    def __init__(self, problem: Problem, inputs: BackwardInputs, ranges: int) -> None:
        lse, rest, dtype = inputs.lse, inputs.lse_rest, problem.spec.compute_dtype
        # Kernels read rows that are dense; NumPy would keep the order of what it is given.
        self.lse = np.where(np.isneginf(lse), 0, lse).astype(dtype, order="C")
        rest = np.zeros(lse.shape, dtype) if rest is None else np.array(rest, dtype, order="C")
        self.lse_rest = rest
        self.grad_lse = np.ascontiguousarray(inputs.grad_lse, dtype)
        self.delta_rest = np.zeros(lse.shape, dtype)
        self.sums = np.zeros((ranges, len(ROW_SUMS), *lse.shape), dtype)
        self.sums[:, 0] = -np.inf

    def correct(self, problem: Problem, inputs: BackwardInputs) -> None:
        """Compute lse, and what delta lacks, from the sums over each range of keys."""
        sums = self.sums.astype(np.float64)
        with np.errstate(all="ignore"):
            products = inputs.out.astype(np.float64) * inputs.grad_out.astype(np.float64)
            delta = products.sum(axis=-1) - self.grad_lse
            if problem.operands.sinks is not None:
                # A sink acts as one more key of every query, whose value vector is 0.
                sink = np.broadcast_to(problem.operands.sinks[:, None], delta.shape)
                sums = np.concatenate([sums, np.stack([sink, np.ones(delta.shape), -delta])[None]])
            row_max = sums[:, 0].max(axis=0)
            shares = np.exp(sums[:, 0] - np.where(np.isneginf(row_max), 0, row_max))
            # A sink of infinity takes all; infinity less infinity would be NaN.
            shares = np.where(np.isposinf(row_max), np.isposinf(sums[:, 0]), shares)
            row_sum, residual = (shares[:, None] * sums[:, 1:]).sum(axis=0)
            log_sum = np.log(row_sum)
            lacking = residual / row_sum - self.grad_lse
            negligible = (row_sum == 0) | (np.abs(lacking) <= _LEAST_CORRECTION * np.abs(delta))
        self.lse[...] = np.where(row_sum == 0, 0, row_max + log_sum)
        self.lse_rest[...] = np.where(row_sum == 0, 0, rest_of(row_max, log_sum, self.lse))
        self.delta_rest[...] = np.where(negligible, 0, lacking)
