"""What must come out: inputs of a workload, the truth for some of its rows, and how far is too far.

The truth is the definition in float64 on the rounded inputs. The bound is `SLACK` times the error
of the plain computation in the workload's own type, plus one unit in the last place. In float32
that error comes from additions: plain sums are pairwise, a running sum of thousands errs several
times as much without a mistake; another mask, scale, or type of computation errs a thousand times
as much. In 16 bits it comes from rounding, where all have the same. In float64, where the truth is
as plain as anybody's, the bound is that of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems.rules import Rule
from benchmarks.problems.workloads import Workload
from qkv.testing import DTYPES, ulp

Array = NDArray[Any]

__all__ = ["Inputs", "Quantised", "Verdict", "judge", "make_inputs"]

SLACK = {"float32": 16.0, "float16": 3.0, "bfloat16": 3.0}
_HEADS = 3
_ROWS = 24


@dataclass(frozen=True, slots=True)
class Quantised:
    """`values * scales[..., None]`: int8, and one float32 for each row."""

    values: Array
    scales: Array

    @classmethod
    def of(cls, array: Array) -> Quantised:
        scales = (np.abs(array).max(axis=-1) / 127).astype(np.float32)
        return cls(np.rint(array / scales[..., None]).astype(np.int8), scales)

    def restored(self) -> Array:
        return np.asarray(self.values * self.scales[..., None], np.float32)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arrays (batch, heads, length, dim); `grad_out` for workloads that go back.

    `key8` and `value8` are what `key` and `value` were restored from, for int8.
    """

    query: Array
    key: Array
    value: Array
    grad_out: Array | None = None
    key8: Quantised | None = None
    value8: Quantised | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The largest error of one output, and what it may be."""

    output: str
    error: float
    bound: float

    @property
    def right(self) -> bool:
        return self.error <= self.bound


def make_inputs(workload: Workload) -> Inputs:
    """The same numbers in every process."""
    dtype = "float32" if workload.dtype == "int8" else workload.dtype
    built = workload.case.build(dtype)
    if workload.dtype == "int8":
        key8, value8 = Quantised.of(built.key), Quantised.of(built.value)
        return Inputs(built.query, key8.restored(), value8.restored(), None, key8, value8)
    grad_out = None
    if workload.direction == "both":
        s = workload.shape
        rng = np.random.default_rng(crc32(f"{workload.name} grad".encode()))
        grad_out = rng.standard_normal((*s.batch_shape, s.num_heads, s.q_len, s.v_head_dim))
        grad_out = grad_out.astype(DTYPES[dtype])
    return Inputs(built.query, built.key, built.value, grad_out)


def judge(
    workload: Workload, inputs: Inputs, found: Mapping[str, Array], dtype: str | None = None
) -> Verdict:
    """Compare what a contender computed with the truth.

    Parameters
    ----------
    workload, inputs
        What was asked.
    found : mapping of str to array
        "out", and "query", "key" and "value" for gradients, each shaped as what it belongs to.
    dtype : str, optional
        The type that the contender computes in, if it is not that of the workload.
    """
    stored = DTYPES[dtype or ("float32" if workload.dtype == "int8" else workload.dtype)]
    samples = _rows if inputs.grad_out is None else _head
    verdicts = []
    for where, compute in samples(workload, inputs):
        exact, plain = compute(_rounding(DTYPES["float64"])), compute(_rounding(stored))
        for output, index in where.items():
            bound = _bound(exact[output], plain[output], stored)
            seen = np.asarray(found[output][index], np.float64)
            verdicts.append(Verdict(output, _largest(seen - exact[output]), bound))
    return max(verdicts, key=lambda v: np.inf if np.isnan(v.error) else v.error / v.bound)


Rounded: TypeAlias = Callable[[Array], Array]
Where: TypeAlias = dict[str, Any]
Compute: TypeAlias = Callable[[Rounded], dict[str, Array]]


def _rounding(dtype: np.dtype[Any]) -> Rounded:
    """The rounding to a type, and back to the one in which its arithmetic is done."""
    arithmetic = np.float64 if dtype == np.float64 else np.float32

    def rounded(array: Array) -> Array:
        return np.asarray(array).astype(dtype).astype(arithmetic)

    return rounded


def _rows(workload: Workload, inputs: Inputs) -> Iterator[tuple[Where, Compute]]:
    """Some query rows of some heads, the first and the last among them."""
    s, rule = workload.shape, workload.rule
    rng = np.random.default_rng(crc32(f"{workload.name} rows".encode()))
    lead = list(np.ndindex(*s.batch_shape, s.num_heads))
    chosen = sorted({0, len(lead) - 1, *rng.integers(0, len(lead), _HEADS - 2).tolist()})
    for batch, head in (lead[i] for i in chosen):
        rows = np.unique([0, s.q_len - 1, *rng.integers(0, s.q_len, _ROWS - 2)])

        def compute(
            rounded: Rounded, batch: int = batch, head: int = head, rows: Array = rows
        ) -> dict[str, Array]:
            kv_head = head // (s.num_heads // s.num_kv_heads)
            query, key, value = (
                rounded(inputs.query[batch, head, rows]),
                rounded(inputs.key[batch, kv_head]),
                rounded(inputs.value[batch, kv_head]),
            )
            weights = _weights(query, key, rule, batch, head, rows, rounded)
            return {"out": rounded(weights @ value)}

        yield {"out": (batch, head, rows)}, compute


def _head(workload: Workload, inputs: Inputs) -> Iterator[tuple[Where, Compute]]:
    """The last head of the last batch row, whole: gradients of keys come from every query.

    out = W V,  dV = W^T dO,  dS = W * (dO V^T - rowsum(dO * out)),  dQ = scale dS K
    """
    s, rule = workload.shape, workload.rule
    assert s.num_heads == s.num_kv_heads
    batch, head, rows = s.batch_shape[0] - 1, s.num_heads - 1, np.arange(s.q_len)

    def compute(rounded: Rounded) -> dict[str, Array]:
        arrays = (inputs.query, inputs.key, inputs.value, inputs.grad_out)
        query, key, value, grad = (rounded(a[batch, head]) for a in arrays if a is not None)
        weights = _weights(query, key, rule, batch, head, rows, rounded)
        out = rounded(weights @ value)
        change = rounded(grad @ value.T) - rounded((grad * out).sum(axis=1, keepdims=True))
        scores = rounded(weights * change * query.dtype.type(s.head_dim**-0.5))
        return {
            "out": out,
            "query": rounded(scores @ key),
            "key": rounded(scores.T @ query),
            "value": rounded(weights.T @ grad),
        }

    yield dict.fromkeys(("out", "query", "key", "value"), (batch, head)), compute


def _weights(
    query: Array, key: Array, rule: Rule, batch: int, head: int, rows: Array, rounded: Rounded
) -> Array:
    """Softmax of some rows; every row of a workload sees at least one key."""
    scale = query.dtype.type(query.shape[-1] ** -0.5)
    scores = rounded(rounded(query @ key.T) * scale + rule.bias(head, rows, len(key)))
    scores = np.where(rule.allowed(batch, rows, len(key)), scores, -np.inf)
    terms = np.exp(scores - scores.max(axis=1, keepdims=True))
    return rounded(terms / terms.sum(axis=1, keepdims=True))


def _bound(exact: Array, plain: Array, stored: np.dtype[Any]) -> float:
    if stored == np.float64:
        return float(64 * np.finfo(np.float64).eps * max(1.0, _largest(exact)))
    return SLACK[stored.name] * _largest(plain - exact) + ulp(_largest(exact), stored)


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), initial=0.0))
