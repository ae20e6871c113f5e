"""What version 2 of the trace adds, and that files of version 1 still open."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import qkv
from qkv.inspection.model_record import load
from qkv.inspection.trace import Projections, TracedMechanism
from qkv.samples import shared_example

FILES = Path(__file__).parent / "files"
SCHEMA = json.loads(
    resources.files("qkv.inspection").joinpath("trace.schema.json").read_text(encoding="utf-8")
)
RNG = np.random.default_rng(0)
X, W_Q, W_K, W_V = RNG.normal(size=(7, 5)), *RNG.normal(size=(3, 5, 4))


def test_a_trace_of_version_1_follows_the_schema() -> None:
    old = json.loads((FILES / "trace-1.json").read_text(encoding="utf-8"))
    assert old["version"] == 1
    jsonschema.validate(old, SCHEMA)
    example = shared_example()
    trace = qkv.explain(
        example.q, example.k, example.v, qkv.Causal(), tokens=example.tokens, q_index=2
    )
    new = json.loads(trace.to_json())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**old, "version": 2}, SCHEMA)
    row = new["heads"][0]["rows"][0]
    assert row.pop("tiles") is None
    for name in ("mechanism", "projections", "ledger"):
        new.pop(name)
    assert {**new, "version": 1} == old


def test_a_model_record_of_version_1_opens() -> None:
    record = load(FILES / "model-record-1.safetensors")
    assert record.model == "one layer"
    assert record[0].heads()[0]["kind"] == "own"
    assert record[0].rows["entropy"].shape == (1, 2, 3)


@pytest.mark.parametrize("block_kv", [1, 2, 3, 7, 100])
def test_each_tile_is_attention_over_the_keys_so_far(block_kv: int) -> None:
    """A softmax over the keys of all tiles up to each, in plain NumPy."""
    q, k, v = X @ W_Q, X @ W_K, X @ W_V
    trace = qkv.explain(q, k, v, qkv.Causal(), block_kv=block_kv)
    jsonschema.validate(json.loads(trace.to_json()), SCHEMA)
    for i, row in enumerate(trace.heads[0].rows):
        assert row.tiles is not None
        scores = np.where(np.arange(7) <= i, q[i] @ k.T / 2, -np.inf)
        running = -np.inf
        for tile in row.tiles:
            assert tile.stop == min(tile.first + block_kv, 7)
            seen = scores[: tile.stop]
            assert tile.row_max == pytest.approx(seen.max(), rel=1e-14)
            assert tile.rescale == pytest.approx(np.exp(running - seen.max()), abs=1e-15)
            weights = np.exp(seen - seen.max())
            assert tile.row_sum == pytest.approx(weights.sum(), rel=1e-13)
            np.testing.assert_allclose(tile.accumulator, weights @ v[: tile.stop], atol=1e-13)
            running = seen.max()
        np.testing.assert_allclose(tile.accumulator / tile.row_sum, row.output, atol=1e-13)


def test_tiles_end_in_the_output_with_sinks_and_dropout() -> None:
    q, k, v = X @ W_Q, X @ W_K, X @ W_V
    trace = qkv.explain(q, k, v, qkv.Sinks([0.7]), qkv.Dropout(0.3, 5), block_kv=3)
    for row in trace.heads[0].rows:
        assert row.tiles is not None
        last = row.tiles[-1]
        np.testing.assert_allclose(last.accumulator / last.row_sum, row.output, atol=1e-13)


def test_nan_behind_a_mask_reaches_no_tile() -> None:
    q, k, v = X @ W_Q, X @ W_K, X @ W_V
    v[6] = np.nan
    trace = qkv.explain(q, k, v, qkv.Causal(), block_kv=7, q_index=2)
    (tile,) = trace.heads[0].rows[0].tiles or ()
    assert np.isfinite(tile.accumulator).all()


def test_projections_mechanism_and_ledger_are_kept() -> None:
    projections = Projections(X, W_Q, W_K, W_V)
    mechanism = TracedMechanism("causal", "softmax(...) V", "a paper")
    trace = qkv.explain(
        *projections.heads(), qkv.Causal(), projections=projections, mechanism=mechanism
    )
    read = json.loads(trace.to_json())
    jsonschema.validate(read, SCHEMA)
    assert read["projections"]["w_k"] == W_K.tolist()
    assert read["mechanism"]["name"] == "causal"
    np.testing.assert_allclose(trace.heads[0].rows[3].query, X[3] @ W_Q, atol=1e-14)


def test_the_ledger_counts_the_traced_pairs() -> None:
    """The shared example and three tokens of three numbers, as the classical texts count them."""
    goldens = json.loads(
        (Path(__file__).parents[1] / "golden" / "goldens.json").read_text(encoding="utf-8")
    )["operation_ledger"]
    example = shared_example()
    traces = {
        "shared_example": qkv.explain(example.q, example.k, example.v),
        "example_3x3": qkv.explain(np.eye(3), np.eye(3), np.eye(3)),
    }
    for name, trace in traces.items():
        assert {**trace.ledger.counts, "total": trace.ledger.total} == goldens[name]


@pytest.mark.parametrize("block_kv", [0, -1, 2.0, True])
def test_a_tile_without_keys_is_refused(block_kv: object) -> None:
    with pytest.raises(qkv.ArgumentError, match="no number of keys"):
        qkv.explain(X, X, X, block_kv=block_kv)  # type: ignore[arg-type]
