"""Gradients on the compiled backend: what becomes of a problem and its cotangents."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.passes.backward import BackwardPass
from qkv.backends.cpu.passes.backward_arguments import BackwardArguments, Results
from qkv.backends.cpu.passes.delta_correction import RowArrays
from qkv.problem.backward import BackwardInputs, OperandGradients
from qkv.problem.spec import Problem

Array = NDArray[Any]

_MOST_QUERIES = 12
"""Delta is corrected where at most this many queries of a head see a key. With more queries, the
error of one row is seldom the largest."""
_FAINT, _LIFT, _LIFTED = 2.0**-60, 2.0**64, 2.0**100
"""If all cotangents are smaller than the first number, they are multiplied by the second, or by as
much less as keeps their products with operands below the third."""


def backward(problem: Problem, inputs: BackwardInputs) -> OperandGradients:
    """Gradients of query, key, value and of the tables that `inputs` names."""
    spec = problem.spec
    if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len):
        return _zero_gradients(problem, inputs)
    # The correction adds up the keys of the problem, which must be all that lse was taken over.
    corrects_delta = not inputs.of_part and needs_delta_correction(inputs.lse)
    backward_pass = BackwardPass(
        problem,
        corrects_delta=corrects_delta,
        names=inputs.tables,
        out_dtype=inputs.out.dtype,
        inputs=inputs,
    )
    lift = 1.0
    if backward_pass.splits_float32 and is_faint(inputs.grad_out, inputs.grad_lse):
        lift = _lift(problem, inputs)
        up = np.float32(lift)
        inputs = replace(inputs, grad_out=inputs.grad_out * up, grad_lse=inputs.grad_lse * up)
    results = Results(problem, backward_pass)
    rows = RowArrays(problem, inputs, backward_pass.splits if corrects_delta else 0)
    workers = backward_pass.workers()
    arguments = BackwardArguments(problem, inputs, backward_pass, results, rows, workers)
    if corrects_delta:
        backward_pass.launch(backward_pass.delta_correction(), arguments, workers)
        rows.correct(problem, inputs)
    backward_pass.launch(backward_pass.kernel(), arguments, workers)
    gradients = results.finish()
    return gradients if lift == 1 else _times(gradients, np.float32(1 / lift))


def recomputes_lse(problem: Problem) -> bool:
    """Whether the backward pass finds lse by itself, in the order in which it adds up scores."""
    return problem.spec.q_len <= _MOST_QUERIES


def needs_delta_correction(lse: Array) -> bool:
    """Whether few queries see a key, even in the head with the most that do."""
    seeing = ~np.isneginf(lse)
    first = seeing[(0,) * (lse.ndim - 1)]
    if np.count_nonzero(first) > _MOST_QUERIES:
        return False
    return bool(np.count_nonzero(seeing, axis=-1).max() <= _MOST_QUERIES)


def is_faint(grad_out: Array, grad_lse: Array) -> bool:
    """Whether gradients of these cotangents might have subnormal terms, which tiles take for 0."""
    rows = grad_out[..., :1, :], grad_lse, grad_out
    # NaN is not faint, and not at least as large either.
    if not all((np.abs(of) < _FAINT).all() for of in rows):
        return False
    return any(of.any() for of in rows)


def _lift(problem: Problem, inputs: BackwardInputs) -> float:
    """A power of two by which cotangents are multiplied, and gradients, being linear, divided."""
    spec, operands = problem.spec, problem.operands
    query, key, value = map(_largest, (operands.query, operands.key, operands.value))
    cotangent = max(_largest(inputs.grad_out), _largest(inputs.grad_lse))
    of_scores = cotangent * max(1.0, spec.v_head_dim * value)
    product = of_scores * max(1.0, abs(operands.scale) * max(query, key))
    return min(_LIFT, max(1.0, 2.0 ** math.floor(math.log2(_LIFTED / product))))


def _largest(array: Any) -> float:
    """The largest finite magnitude."""
    magnitudes = np.abs(array)
    return float(np.max(magnitudes, where=np.isfinite(magnitudes), initial=0))


def _times(gradients: OperandGradients, factor: np.float32) -> OperandGradients:
    """The gradients times a number."""
    return OperandGradients(
        gradients.query * factor,
        gradients.key * factor,
        gradients.value * factor,
        {name: array * array.dtype.type(factor) for name, array in gradients.tables.items()},
    )


def _zero_gradients(problem: Problem, inputs: BackwardInputs) -> OperandGradients:
    spec, operands = problem.spec, problem.operands
    arrays = operands.query, operands.key, operands.value
    query, key, value = (np.zeros(array.shape, spec.compute_dtype) for array in arrays)
    tables = {name: np.zeros(operands.tables[name].shape) for name in inputs.tables}
    return OperandGradients(query, key, value, tables)
