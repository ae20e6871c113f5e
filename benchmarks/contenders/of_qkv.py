"""qkv itself, always through its compiled backend: a fallback would be timed in silence."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import qkv
from benchmarks.contenders import Prepared
from benchmarks.problems.moved import OptionValues
from benchmarks.problems.reference import Inputs
from benchmarks.problems.workloads import Workload
from qkv.call.checked import CheckedCall
from qkv.call.dispatch import checked
from qkv.errors import UnsupportedError

__all__ = [
    "prepare",
    "prepare_bfloat16",
    "prepare_int8",
    "prepare_kernel",
    "prepare_kernel_statistics",
    "prepare_statistics",
    "prepare_top",
    "prepare_torch",
]

_BACKEND = "cpu"


def prepare(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """`qkv.attention`, or `qkv.vjp` and its pullback."""
    variants = workload.rule.variants
    arrays = inputs.query, inputs.key, inputs.value
    if workload.direction == "both":
        return _both(variants, inputs)

    def run() -> Any:
        return qkv.attention(*arrays, *variants, backend=_BACKEND)

    return Prepared(run, lambda out: {"out": out})


def _both(variants: tuple[Any, ...], inputs: Inputs) -> Prepared:
    vjp = _of_this_version("vjp")

    def run() -> Any:
        out, pullback = vjp(inputs.query, inputs.key, inputs.value, *variants, backend=_BACKEND)
        return out, pullback(inputs.grad_out)

    def read(result: Any) -> dict[str, Any]:
        out, grad = result
        return {"out": out, "query": grad.query, "key": grad.key, "value": grad.value}

    return Prepared(run, read)


def prepare_torch(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """`qkv.attention` of torch tensors."""
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(array) for array in _arrays(inputs)]

    def run() -> Any:
        return qkv.attention(*tensors, *workload.rule.variants, backend=_BACKEND)

    return Prepared(run, lambda out: {"out": out.numpy()})


def prepare_kernel(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """The backend alone: arguments are checked, and what it prepares is made, outside the time."""
    call, arrays = _bound(workload, inputs), _arrays(inputs)
    prepare = getattr(call.choice.backend, "prepare", None)
    made = prepare(call.problem, "forward") if prepare else None
    if_alike = getattr(made, "if_alike", None)  # Some versions have none.

    def run() -> Any:
        return if_alike(*arrays, False) if if_alike else call.choice.backend.run(call.problem)

    return Prepared(run, lambda found: {"out": found[0] if if_alike else found.out})


def prepare_kernel_statistics(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """The backend alone, asked for lse, entropy and the largest score of every row as well."""
    call = _bound(workload, inputs)
    run = getattr(call.choice.backend, "run_with_statistics", None)
    if run is None:
        raise UnsupportedError("this version has no statistics in the same pass.")
    return Prepared(lambda: run(call.problem), lambda result: {"out": result[0].out})


def _bound(workload: Workload, inputs: Inputs) -> CheckedCall:
    arrays = inputs.query, inputs.key, inputs.value
    return checked(*arrays, workload.rule.variants, OptionValues(backend=_BACKEND))


def prepare_bfloat16(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """The same arrays rounded to bfloat16."""
    query, key, value = (np.asarray(a).astype(ml_dtypes.bfloat16) for a in _arrays(inputs))
    prepared = prepare(workload, Inputs(query, key, value), threads)
    return Prepared(prepared.run, prepared.read, "bfloat16")


def prepare_int8(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """Keys and values of one byte, with a scale for each row."""
    quantised = _of_this_version("Quantized")
    assert inputs.key8 is not None
    assert inputs.value8 is not None
    key, value = (quantised(a.values, a.scales) for a in (inputs.key8, inputs.value8))

    def run() -> Any:
        return qkv.attention(inputs.query, key, value, *workload.rule.variants, backend=_BACKEND)

    return Prepared(run, lambda out: {"out": out})


def prepare_statistics(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """Output, lse, entropy and largest weight of every row."""

    def run() -> Any:
        record = qkv.inspect(*_arrays(inputs), *workload.rule.variants, backend=_BACKEND)
        return record.output, record.lse, record.entropy, record.max_weight

    return Prepared(run, lambda result: {"out": result[0]})


def prepare_top(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """Output, and the eight strongest keys of every row."""

    def run() -> Any:
        record = qkv.inspect(*_arrays(inputs), *workload.rule.variants, backend=_BACKEND)
        return record.output, record.top(8)

    return Prepared(run, lambda result: {"out": result[0]})


def _arrays(inputs: Inputs) -> tuple[Any, Any, Any]:
    return inputs.query, inputs.key, inputs.value


def _of_this_version(name: str) -> Any:
    if not hasattr(qkv, name):
        raise UnsupportedError(f"this version has no qkv.{name}.")
    return getattr(qkv, name)
