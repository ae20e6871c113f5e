"""What is computed after a call is of its arrays as they were, whoever changes them later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qkv

RNG = np.random.default_rng(0)


def softmax(scores: Any) -> Any:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def arrays(dtype: str = "float64") -> tuple[Any, Any, Any]:
    query, key = RNG.normal(size=(2, 2, 5, 4)).astype(dtype)
    return query, key, RNG.normal(size=(5, 5)).astype(dtype)


class OwnBias:
    """A variant that declares no fields, so that its array is seen by nobody else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def lower(self, builder: Any) -> None:
        table = builder.table(self.array)
        builder.mod(builder.score + table[builder.q_index, builder.kv_index])


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "a bare array": lambda bias: bias,
    "Bias": qkv.Bias,
    "ScoreMod": lambda bias: qkv.ScoreMod(lambda s, b, h, i, j: s + bias[i, j]),
    "a variant of the user's": OwnBias,
}


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_of_a_record(variant: str, calls: int) -> None:
    """Also of calls that are prepared, as those are that repeat one another."""
    for _ in range(calls):
        query, key, bias = arrays()
        expected = softmax(query @ key.swapaxes(1, 2) / 2 + bias)
        record = qkv.inspect(query, key, key, VARIANTS[variant](bias), q_offset="start")
        for array in (query, key, bias):
            array *= 3
    np.testing.assert_allclose(record.weights[...], expected, atol=1e-12)
    np.testing.assert_allclose(record.received, expected.sum(1), atol=1e-12)
    np.testing.assert_allclose(record.top(1)[1][..., 0], expected.max(-1), atol=1e-12)
    np.testing.assert_allclose(record.mass([0]), expected[..., 0], atol=1e-12)


def test_weights_of_tensors() -> None:
    torch = pytest.importorskip("torch", reason="pip install torch")
    query, key, _ = (torch.from_numpy(array) for array in arrays())
    expected = torch.softmax(query @ key.mT / 2, -1)
    record = qkv.inspect(query, key, key)
    key.mul_(3)
    np.testing.assert_allclose(record.weights[...], expected.numpy(), atol=1e-12)


def test_layers_that_a_model_record_keeps() -> None:
    query, key, bias = arrays()
    expected = softmax(query @ key.swapaxes(1, 2) / 2 + bias)
    record = qkv.ModelRecord("one layer", keep="weights")
    layer = record.add(query, key, qkv.Bias(bias), name="layer 0")
    for array in (query, key, bias):
        array *= 3
    np.testing.assert_allclose(layer.weights[0], expected, atol=1e-12)


def test_a_trace() -> None:
    query, key, _ = arrays()
    cotangent = np.ones_like(query)
    trace = qkv.explain(query, key, key, grad=True, cotangent=cotangent)
    before = trace.to_json()
    for array in (query, key, cotangent):
        array *= 3
    assert trace.to_json() == before


def test_a_repeated_array_is_kept_once() -> None:
    """A key that is broadcast over the batch is not written out for each of its rows."""
    key = np.broadcast_to(RNG.normal(size=(1, 1, 5, 4)), (1000, 1, 5, 4))
    record = qkv.inspect(key[:, :, :1], key, key)
    assert record.problem.operands.key.strides[0] == 0


def test_sparse_tensors_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch", reason="pip install torch")
    sparse = torch.eye(4)[None].to_sparse()
    with pytest.raises(qkv.QkvError):
        qkv.inspect(sparse, sparse, sparse)
