"""The checks of `qkv.testing.check_case` beyond the forward pass."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv._api import attention, inspect
from qkv.call.binding.bound import bind
from qkv.call.binding.options import option_values
from qkv.call.derivatives.vjp import vjp
from qkv.call.repeated.cache import CALLS
from qkv.errors import QkvError
from qkv.testing.case import DTYPES, Case, Inputs, Variants
from qkv.testing.derivatives import GradientOracle
from qkv.testing.oracle import Truth
from qkv.testing.run import CaseRun
from qkv.testing.tolerances import bounds, largest

Array = NDArray[Any]

__all__ = ["decoding", "gradients", "inspection", "prepared", "tensors"]


# Calls like an earlier one


def prepared(run: CaseRun) -> bool:
    """Calls like an earlier one give its bits, whatever arrays hold that are read in place."""
    inputs = run.case.build(run.dtype)
    if run.refusals(inputs):
        return False
    CALLS.clear()
    first = run.attention(inputs)
    for _ in range(2):
        run.same(run.attention(inputs), first, "a call like an earlier one gave other bits")
    others = _with_other_values(inputs)
    later = run.attention(others)
    CALLS.clear()
    run.same(later, run.attention(others), "a call with other values is not like a first call")
    return True


def _with_other_values(inputs: Inputs) -> Inputs:
    """The same call, with other values in all arrays that are read in place."""
    bound = bind(*inputs.arrays, inputs.variants, option_values("attention", inputs.keywords))
    by_value = bound.structure.by_value
    leaves = [a if n in by_value else _reversed(a) for n, a in enumerate(bound.leaves)]
    call = bound._replace(leaves=leaves).unflatten()
    return Inputs(call.query, call.key, call.value, call.variants, inputs.keywords)


def _reversed(array: Any) -> Any:
    """An array with the same layout and the same values, in another order."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array.ravel()[::-1]).reshape(array.shape)


def tensors(run: CaseRun) -> bool:
    """Torch tensors give what NumPy arrays give, three times."""
    inputs = run.case.build(run.dtype)
    if run.refusals(inputs):
        return False
    if run.is_device:
        out, lse = run.attention(inputs)
        run.form(out, lse)
        run.values(out, lse)
        return True
    query, key, value = map(np.array, inputs.arrays)
    dense = Inputs(query, key, value, inputs.variants, inputs.keywords)
    expected = run.attention(dense)
    for _ in range(3):
        run.same(run.attention(dense, tensors=True), expected, "tensors gave other bits")
    return True


_OPERANDS = ("query", "key", "value")


# Gradients


def gradients(run: CaseRun) -> bool:
    """Gradients of query, key and value within their bounds, and prepared ones with their bits."""
    inputs, case = run.case.build(run.dtype), run.case
    if run.refusals(inputs, backward=not run.is_device):
        return False
    truth = case.truth(run.dtype)
    rng = np.random.default_rng(7)
    compute = np.float64 if run.dtype == "float64" else np.float32
    grad_out = rng.normal(size=truth.out.shape).astype(DTYPES[run.dtype])
    grad_lse = rng.normal(size=truth.lse.shape).astype(compute)
    given = replace(case, memory="contiguous").arrange(grad_out)
    rows = grad_lse if case.head_axis else grad_lse[0]
    CALLS.clear()
    computed = _pulled_back(run, inputs, given, rows)
    for _ in range(2):
        again = _pulled_back(run, inputs, given, rows)
        run.same(again, computed, "gradients of a call like an earlier one have other bits")
    shapes = [case.plain_order(a).shape for a in inputs.arrays]
    oracle = GradientOracle(truth, grad_out, grad_lse, shapes)
    for orders in case.orders:
        exact, limits = oracle.bounds(DTYPES[run.dtype], orders)
        errors = [
            largest(case.plain_order(ours).astype(float) - right)
            for ours, right in zip(computed, exact, strict=True)
        ]
        if all(e <= limit for e, limit in zip(errors, limits, strict=True)):
            break
    for name, ours, array, error, limit in zip(
        _OPERANDS, computed, inputs.arrays, errors, limits, strict=True
    ):
        run.require(ours.shape == array.shape, f"the gradient of {name} has shape {ours.shape}")
        run.require(ours.dtype == array.dtype, f"the gradient of {name} has dtype {ours.dtype}")
        fact = f"the gradient of {name} is {error:.3g} off, allowed is {limit:.3g}"
        run.require(error <= limit, fact)
    return True


def _pulled_back(run: CaseRun, inputs: Inputs, grad_out: Array, grad_lse: Array) -> list[Array]:
    keywords = {**inputs.keywords, "backend": run.backend}
    if not run.is_device:
        _, pullback = vjp(*inputs.arrays, *inputs.variants, **keywords)
        operand_gradients = pullback(grad_out, grad_lse)
        return [operand_gradients.query, operand_gradients.key, operand_gradients.value]
    import torch

    leaves = [run.tensor(a).requires_grad_() for a in inputs.arrays]
    results = attention(*leaves, *inputs.variants, return_lse=True, **keywords)
    cotangents = run.tensor(grad_out), run.tensor(grad_lse)
    # torch tracks no gradient through rows without keys.
    differentiable = [n for n, result in enumerate(results) if result.requires_grad]
    along = torch.autograd.grad(
        [results[n] for n in differentiable],
        leaves,
        [cotangents[n] for n in differentiable],
        materialize_grads=True,
    )
    return [run.array(gradient, "a gradient") for gradient in along]


# Inspection


def inspection(run: CaseRun) -> bool:
    """Weights and their statistics are those of the truth."""
    inputs, case = run.case.build(run.dtype), run.case
    if run.refusals(inputs):
        return False
    arrays: Any = [run.tensor(a) for a in inputs.arrays] if run.is_device else inputs.arrays
    record = inspect(*arrays, *inputs.variants, backend=run.backend, **inputs.keywords)
    truth = case.truth(run.dtype)
    out, lse = run.array(record.output, "out"), run.array(record.lse, "lse")
    run.form(out, lse)
    run.values(out, lse)
    weights = truth.weights if case.head_axis else truth.weights[0]
    limit = _bound_of_weights(truth, run.dtype)
    with np.errstate(all="ignore"):
        logs = np.where(weights > 0, np.log(weights), 0.0)
    allowed = truth.allowed if case.head_axis else truth.allowed[0]
    # What an error of `limit` in each weight does to `sum w log w`.
    of_entropy = limit * (np.sum(np.where(allowed, 1 - logs, 0), axis=-1) + 1)
    for name, statistic, right, allowance in (
        ("weights", record.weights[...], weights, limit),
        ("entropy", record.entropy, -(weights * logs).sum(axis=-1), of_entropy),
        ("max_weight", record.max_weight, weights.max(axis=-1, initial=0.0), limit),
        ("received", record.received, weights.sum(axis=-2), limit * max(1, case.shape.q_len)),
    ):
        seen = run.array(statistic, name)
        run.require(seen.shape == right.shape, f"{name} has shape {seen.shape}")
        most = np.max(allowance, initial=0.0)
        fact = f"{name} is {largest(seen - right):.3g} off, allowed is {most:.3g}"
        run.require(bool(np.all(np.abs(seen - right) <= allowance)), fact)
    if case.shape.kv_len:
        _best_keys(run, record.top(3), weights, allowed, limit)
    return True


def _best_keys(run: CaseRun, best: Any, weights: Array, allowed: Array, limit: float) -> None:
    indices, values = (run.array(a, "top") for a in best)
    missing = indices < 0
    few = np.minimum(allowed.sum(axis=-1), 3)
    run.require((missing.sum(axis=-1) == 3 - few).all(), "top(3) has a wrong number of keys")
    fallen = -np.sort(-weights, axis=-1)[..., :3]
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, 3 - fallen.shape[-1])]
    fallen = np.where(missing, 0.0, np.pad(fallen, padding))
    run.require((np.abs(values - fallen) <= limit).all(), "top(3) has wrong weights")
    theirs = np.take_along_axis(weights, np.maximum(indices, 0), axis=-1)
    theirs = np.where(missing, 0.0, theirs)
    run.require((np.abs(theirs - fallen) <= 2 * limit).all(), "top(3) names wrong keys")


def _bound_of_weights(truth: Truth, dtype: str) -> float:
    """The bound of an output whose values are the unit vectors, and of lse.

    Such an output is the weights; as `exp(s - lse)` they have the error of lse too.
    """
    heads = []
    for dense in truth.heads:
        head = copy(dense)
        head.value, head.factors = np.eye(len(dense.key)), np.ones_like(dense.factors)
        heads.append(head)
    compute = "float64" if dtype == "float64" else "float32"
    limits = bounds(replace(truth, out=truth.weights, heads=tuple(heads)), compute)
    return limits.out + limits.lse


# Decoding


STEPS = ((1, (9, 10, 11, 40, 11)), (3, (9, 10, 12, 30, 12)))
"""Numbers of queries, and of keys one after the other: new ones, one far on, and one seen."""
CAPACITY = 48


@dataclass(frozen=True, eq=False)
class _Step(Case):
    """A step of decoding: rows of keys lie in a buffer of one size."""

    def place(self, array: Array, role: str) -> Array:
        if role == "query":
            return np.ascontiguousarray(array)
        axis = array.ndim - (3 if self.layout == "blhd" and self.head_axis else 2)
        shape = list(array.shape)
        shape[axis] = CAPACITY
        buffer = np.full(shape, np.nan, array.dtype)
        rows: Array = np.moveaxis(np.moveaxis(buffer, axis, 0)[: array.shape[axis]], 0, axis)
        rows[...] = array
        return rows


def decoding(run: CaseRun) -> bool:
    """Steps over a number of keys that grows are right; a case may have no steps of some size."""
    case, ran = run.case, False
    if 0 in (case.shape.num_heads, *case.shape.batch_shape):
        return False
    CALLS.clear()
    for q_len, lengths in STEPS:
        for kv_len in lengths:
            step = _step(case, q_len, kv_len)
            this = CaseRun(run.backend, step, run.dtype, run.device)
            try:
                inputs = step.build(run.dtype)
                refused = this.refusals(inputs)
            except (QkvError, IndexError, ValueError):
                break  # the case's variants are for its own lengths
            if refused:
                break
            out, lse = this.attention(inputs)
            this.form(out, lse)
            this.values(out, lse)
            ran = True
    return ran


def _step(case: Case, q_len: int, kv_len: int) -> _Step:
    variants: Variants = lambda s, r: case.variants(s, np.random.default_rng(0))  # noqa: E731
    return _Step(
        f"{case.name}, {q_len} of {kv_len}",
        replace(case.shape, q_len=q_len, kv_len=kv_len),
        variants,
        scale=case.scale,
        q_offset="end" if case.q_offset is None else case.q_offset,
        kv_offset=case.kv_offset,
        layout=case.layout,
        query_batch=case.query_batch,
        kv_batch=case.kv_batch,
        head_axis=case.head_axis,
        magnitude=case.magnitude,
    )
