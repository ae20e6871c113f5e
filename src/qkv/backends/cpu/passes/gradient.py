"""Gradients on the compiled backend: what becomes of a problem and its cotangents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.passes.backward import BackwardPass
from qkv.backends.cpu.passes.backward_arguments import BackwardArguments, Results
from qkv.backends.cpu.passes.delta_correction import Rows
from qkv.problem.backward import BackwardInputs, OperandGradients
from qkv.problem.spec import Problem

Array = NDArray[Any]

_MOST_QUERIES = 12
"""Up to this many queries of a head that see any key, sums over keys are computed again. With more
queries, the error of one row is seldom the largest."""
_FAINT, _LIFT = 2.0**-60, 2.0**64
"""If all cotangents are smaller than the first number, they are multiplied by the second."""


def backward(problem: Problem, inputs: BackwardInputs) -> OperandGradients:
    """Gradients of query, key, value and of the tables that `inputs` names."""
    spec = problem.spec
    if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len):
        return _nothing(problem, inputs)
    corrects_delta = needs_delta_correction(inputs.lse)
    passed = BackwardPass(
        problem,
        corrects_delta=corrects_delta,
        names=inputs.tables,
        out_dtype=inputs.out.dtype,
        inputs=inputs,
    )
    if passed.splits_float32 and is_faint(inputs.grad_out, inputs.grad_lse):
        return _lifted(problem, inputs)
    results = Results(problem, passed)
    rows = Rows(problem, inputs, passed.splits if corrects_delta else 0)
    workers = passed.workers()
    arguments = BackwardArguments(problem, inputs, passed, results, rows, workers)
    if corrects_delta:
        passed.launch(passed.delta_correction(), arguments, workers)
        rows.join(problem, inputs)
    passed.launch(passed.kernel(), arguments, workers)
    return results.finish()


def recomputes_lse(problem: Problem) -> bool:
    """Whether the backward pass finds lse by itself, in the order in which it adds up scores."""
    return problem.spec.q_len <= _MOST_QUERIES


def needs_delta_correction(lse: Array) -> bool:
    """Whether few queries see a key, also in the head where most of them do."""
    seeing = ~np.isneginf(lse)
    first = seeing[(0,) * (lse.ndim - 1)]
    if np.count_nonzero(first) > _MOST_QUERIES:
        return False
    return bool(np.count_nonzero(seeing, axis=-1).max() <= _MOST_QUERIES)


def is_faint(grad_out: Array, grad_lse: Array) -> bool:
    """Whether parts of what follows from these cotangents might be subnormal."""
    rows = grad_out[..., :1, :], grad_lse, grad_out
    if any((np.abs(of) >= _FAINT).any() for of in rows):
        return False
    return any(of.any() for of in rows)


def _lifted(problem: Problem, inputs: BackwardInputs) -> OperandGradients:
    """Gradients are linear in the cotangents: a power of two goes through them unrounded."""
    up, down = np.float32(_LIFT), np.float32(1 / _LIFT)
    found = backward(
        problem, replace(inputs, grad_out=inputs.grad_out * up, grad_lse=inputs.grad_lse * up)
    )
    return OperandGradients(
        found.query * down,
        found.key * down,
        found.value * down,
        {name: array * array.dtype.type(down) for name, array in found.tables.items()},
    )


def _nothing(problem: Problem, inputs: BackwardInputs) -> OperandGradients:
    spec, operands = problem.spec, problem.operands
    arrays = operands.query, operands.key, operands.value
    query, key, value = (np.zeros(array.shape, spec.compute_dtype) for array in arrays)
    tables = {name: np.zeros(operands.tables[name].shape) for name in inputs.tables}
    return OperandGradients(query, key, value, tables)
