"""What is computed after a call is of its arrays as they were, whoever changes them later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
    """Calls that repeat one another are prepared, and their weights stay as well."""
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


def test_a_file_of_layers_has_positions_and_scale_as_they_were(tmp_path: Path) -> None:
    """The file had the positions and the scale of the moment in which it was written."""
    query, key, _ = arrays()
    q_offset, kv_offset, scale = np.array(1), np.array(2), np.array(0.3)
    distance = np.arange(5)[:, None] + 1 - (np.arange(5) + 2)
    scores = np.where(distance >= 0, 0.3 * query @ key.swapaxes(1, 2), -np.inf)[:, 1:]
    record = qkv.ModelRecord("one layer", keep="weights")
    options = {"q_offset": q_offset, "kv_offset": kv_offset, "scale": scale}
    layer = record.add(query, key, qkv.Causal(), name="layer 0", **options)
    for array in options.values():
        array *= 3
    record.save(tmp_path / "record.safetensors")
    loaded = qkv.ModelRecord.load(tmp_path / "record.safetensors")
    for found in (layer, loaded[0]):
        np.testing.assert_allclose(found.weights[0, :, 1:], softmax(scores), atol=1e-12)


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


ARRAYS: dict[str, Callable[[qkv.Record], Any]] = {
    "output": lambda record: record.output,
    "lse": lambda record: record.lse,
    "entropy": lambda record: record.entropy,
    "max_weight": lambda record: record.max_weight,
    "received": lambda record: record.received,
    "top": lambda record: record.top(2)[1],
    "top indices": lambda record: record.top(2)[0],
    "non_finite": lambda record: record.non_finite.rows,
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_a_record_hands_out_is_the_callers(library: str, backend: str, tmp_path: Path) -> None:
    """A caller may write `e = record.entropy; e /= np.log(2)`: the file once held bits then."""
    x: Any = arrays()[0]
    if library == "torch":
        x = pytest.importorskip("torch", reason="pip install torch").from_numpy(x)
    record = qkv.inspect(x, x, x, q_offset="start", backend=backend)
    before = {name: np.asarray(of(record)).copy() for name, of in ARRAYS.items()}
    rows = record.rows()
    for of in ARRAYS.values():
        of(record)[...] = 1
    record.save(tmp_path / "record.safetensors")
    loaded = qkv.Record.load(tmp_path / "record.safetensors")
    assert record.rows() == loaded.rows() == rows
    for name, of in ARRAYS.items():
        np.testing.assert_array_equal(np.asarray(of(record)), before[name], err_msg=name)
        np.testing.assert_array_equal(np.asarray(of(loaded)), before[name], err_msg=name)


def test_what_a_layer_hands_out_is_the_callers() -> None:
    query, key, _ = arrays()
    record = qkv.ModelRecord("one layer")
    layer = record.add(query, key, name="layer 0", tokens=np.arange(5), q_offset="start")
    before, received, top = str(record.rows()), layer.received.copy(), layer.top[1].copy()
    for array in (*layer.rows.values(), layer.received, *layer.top):
        array[...] = 7
    assert str(record.rows()) == before
    np.testing.assert_array_equal(layer.received, received)
    np.testing.assert_array_equal(layer.top[1], top)
    for array in (*layer.scores.rows.values(), layer.scores.received, layer.scores.top_keys):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7


def test_tokens_that_a_model_record_hands_out_are_the_callers() -> None:
    query, key, _ = arrays()
    record = qkv.ModelRecord("one layer", keep="weights")
    layer = record.add(query, key, name="layer 0", tokens=np.arange(5), q_offset="start")
    assert record.tokens is not None
    record.tokens[...] = 3
    np.testing.assert_array_equal(record.tokens, [np.arange(5)])
    ids = np.ones((1, 5), np.int64)
    record.tokens = ids
    ids[...] = 2
    np.testing.assert_array_equal(record.tokens, np.ones((1, 5)))
    record.tokens = None
    assert record.tokens is None
    assert layer.scores.inputs is not None
    for array in (layer.scores.inputs.query, layer.scores.inputs.key):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7


@pytest.mark.parametrize("keys", ["array", "Quantized"])
def test_nobody_writes_to_the_problem_of_a_record(keys: str) -> None:
    query, key, bias = arrays("float32")
    rows: Any = key
    if keys == "Quantized":
        scales = np.abs(key).max(-1) / 127
        rows = qkv.Quantized(np.rint(key / scales[..., None]).astype(np.int8), scales)
    variants = qkv.RoPE(), qkv.Bias(bias), qkv.Sinks(np.ones(2, np.float32))
    record = qkv.inspect(query, rows, rows, *variants, q_offset="start")
    before = record.weights[...].copy()
    operands: Any = record.problem.operands
    stored = operands.key if keys == "array" else operands.key.values
    held = [operands.query, stored, operands.sinks, operands.angles.inv_freq]
    held += [operands.positions.q_shift, *operands.tables.values()]
    for array in held:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7
    np.testing.assert_array_equal(record.weights[...], before)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_variants_of_a_record_are_those_that_it_is_of(library: str, tmp_path: Path) -> None:
    """The caller may have changed an array since, or change one that was handed out."""
    x, _, bias = arrays()
    expected = softmax(x @ x.swapaxes(1, 2) / 2 + bias)
    given: list[Any] = [x, bias]
    if library == "torch":
        torch = pytest.importorskip("torch", reason="pip install torch")
        given = [torch.from_numpy(x), torch.from_numpy(bias.copy())]
    kind = type(given[1])
    for _ in range(4):  # Calls that repeat one another are prepared.
        record = qkv.inspect(given[0], given[0], given[0], qkv.Bias(given[1]), q_offset="start")
    given[1][...] = 0
    record.save(tmp_path / "record.safetensors")
    loaded = qkv.Record.load(tmp_path / "record.safetensors")
    record.variants[0].array[...] = 3
    loaded.variants[0].array[...] = 3
    for of, array in ((record, kind), (loaded, np.ndarray)):
        (variant,) = of.variants
        assert type(variant) is qkv.Bias
        assert type(variant.array) is array
        again = qkv.inspect(given[0], given[0], given[0], variant, q_offset="start")
        for one in (of, again):
            np.testing.assert_allclose(np.asarray(one.weights[...]), expected, atol=1e-12)


def test_nobody_writes_to_a_trace() -> None:
    """The arrays of a trace lie in one another: the cotangent of a row in that of the problem."""
    x = RNG.normal(size=(3, 3))
    projections = qkv.Projections(x, x + 1, x - 1, 2 * x)
    trace = qkv.explain(*projections.heads(), grad=True, projections=projections)
    before = trace.to_json()
    x *= 2
    assert trace.to_json() == before
    for one in (trace, qkv.Trace.from_json(before)):
        assert one.gradient is not None
        row = one.heads[0].rows[0]
        for array in (one.gradient.cotangent, row.scores, row.softmax.weights, one.heads[0].key):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 7
