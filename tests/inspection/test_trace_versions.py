"""What version 2 of the trace adds, and that files of version 1 still open."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import qkv
from qkv.inspection.models.model_record import load
from qkv.inspection.traces.trace_fields import Projections, TracedMechanism
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


def everything(seed: int) -> qkv.Trace:
    """A trace with every optional part, -inf, NaN and infinities."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, 4, 6, 4))
    k, v = rng.normal(size=(2, 2, 2, 6, 4))
    v[1, 0, 5] = np.nan
    k[0, 1, 0] = np.inf
    return qkv.explain(
        q, k, v, qkv.Causal(), qkv.ALiBi(), qkv.RoPE(), qkv.Sinks([0.1, 0.2, 0.3, 0.4]),
        qkv.Dropout(0.25, 3), tokens=list("abcdef"), grad=True, block_kv=4, q_index=5,
        mechanism=TracedMechanism("causal", "softmax(...) V", "a paper"),
        projections=Projections(X, W_Q, W_K, W_V),
    )  # fmt: skip


def test_a_trace_is_read_back() -> None:
    for trace in (everything(0), qkv.explain(np.eye(3), np.eye(3), np.eye(3))):
        text = trace.to_json()
        again = qkv.Trace.from_json(text)
        assert again.to_json() == text
        assert str(again) == str(trace)
        assert repr(again) == repr(trace)
        for head, wanted in zip(again.heads, trace.heads, strict=True):
            assert head.kv_pos.dtype == wanted.kv_pos.dtype
            for row, other in zip(head.rows, wanted.rows, strict=True):
                np.testing.assert_array_equal(row.softmax.weights, other.softmax.weights)
                np.testing.assert_array_equal(row.scores, other.scores)
                assert row.allowed.dtype == bool
                assert row.output.shape == (trace.problem.v_head_dim,)
        if trace.gradient is not None and again.gradient is not None:
            np.testing.assert_array_equal(again.gradient.d_key, trace.gradient.d_key)
    assert qkv.Trace.from_json(text.encode()).to_html().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("shapes", "layout"),
    [
        (((3, 4), (0, 4), (0, 5)), "bhld"),
        (((0, 4), (3, 4), (3, 5)), "bhld"),
        (((2, 4, 3, 5), (1, 2, 0, 5), (1, 2, 0, 6)), "bhld"),
        (((2, 3, 4, 5), (2, 0, 2, 5), (2, 0, 2, 6)), "blhd"),
        (((2, 4, 0, 5), (2, 2, 0, 5), (2, 2, 0, 6)), "bhld"),
    ],
)
def test_what_has_no_numbers_keeps_its_shape(shapes: Any, layout: Any) -> None:
    """A list of no keys does not say how long a key would be, and came back as an array (0,)."""
    trace = qkv.explain(*map(np.zeros, shapes), layout=layout, grad=True, block_kv=2)
    again = qkv.Trace.from_json(trace.to_json())
    pairs = list(zip(again.heads, trace.heads, strict=True))
    for head, wanted in pairs:
        assert (head.key.shape, head.value.shape) == (wanted.key.shape, wanted.value.shape)
        for row, other in zip(head.rows, wanted.rows, strict=True):
            assert row.contributions.shape == other.contributions.shape
            assert row.back is not None
            assert other.back is not None
            assert row.back.jacobian.shape == other.back.jacobian.shape
    assert again.gradient is not None
    found = [again.gradient.d_query.shape, again.gradient.d_key.shape, again.gradient.d_value.shape]
    assert found == list(shapes)
    assert str(again) == str(trace)


@pytest.mark.parametrize(
    ("place", "name", "fact"),
    [
        (("heads", 0, "rows", 0), "raw", r"raw has shape \(2,\), and the problem says \(3,\)"),
        (("heads", 0, "rows", 0, "softmax"), "weights", r"weights has shape \(2,\)"),
        (("heads", 0, "rows", 0, "back"), "jacobian", r"jacobian has shape \(2, 3\)"),
        (
            ("heads", 0, "rows", 0, "tiles", 0),
            "exp",
            r"exp has shape \(1,\), and the problem says \(2,\)",
        ),
        (("heads", 0), "key", r"key has shape \(2, 4\), and the problem says \(3, 4\)"),
        ((), "tokens", "tokens has 2 entries, and the problem 3 rows"),
        (("gradient",), "d_key", r"the gradients have shapes .*\(2, 4\)"),
    ],
)
def test_lengths_that_contradict_each_other(place: Any, name: str, fact: str) -> None:
    """Such a trace was read, and its text was an IndexError."""
    trace = qkv.explain(*np.ones((3, 3, 4)), tokens=list("abc"), grad=True, block_kv=2)
    data = json.loads(trace.to_json())
    of: Any = data
    for key in place:
        of = of[key]
    of[name] = of[name][:-1]
    with pytest.raises(qkv.ArgumentError, match=f"this is not a trace: .*{fact}"):
        qkv.Trace.from_dict(data)


def test_a_row_that_the_problem_lacks() -> None:
    data = json.loads(qkv.explain(*np.ones((3, 3, 4))).to_json())
    data["heads"][0]["rows"][0]["q_index"] = 3
    with pytest.raises(qkv.ArgumentError, match="q_index is 3, and the problem has 3 rows"):
        qkv.Trace.from_dict(data)


def test_numbers_that_another_program_wrote_whole() -> None:
    """JavaScript writes 1 where Python writes 1.0."""
    trace = qkv.explain(np.eye(2), np.eye(2), np.eye(2))
    whole = json.loads(trace.to_json().replace("1.0,", "1,").replace("0.0]", "0]"))
    assert qkv.Trace.from_dict(whole).to_json() == trace.to_json()


def test_a_trace_of_version_1_is_read() -> None:
    trace = qkv.Trace.from_json((FILES / "trace-1.json").read_text(encoding="utf-8"))
    example = shared_example()
    anew = qkv.explain(
        example.q, example.k, example.v, qkv.Causal(), tokens=example.tokens, q_index=2
    )
    assert trace.to_json() == anew.to_json()


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda data: [], "is not a Mapping"),
        (lambda data: {**data, "version": 3}, "version 3"),
        (lambda data: {**data, "schema": "other"}, "'other'"),
        (lambda data: {**data, "more": 1}, "has an unknown more"),
        (lambda data: {key: data[key] for key in data if key != "heads"}, "lacks heads"),
        (lambda data: {**data, "heads": {}}, "heads is not a list"),
        (lambda data: {**data, "tokens": [1]}, "tokens is not of type str"),
        (
            lambda data: {**data, "problem": {**data["problem"], "q_len": 2.5}},
            "q_len is not of type int",
        ),
        (lambda data: {**data, "heads": [{**data["heads"][0], "key": [[1.0], [1.0, 2.0]]}]}, "key"),
        (lambda data: {**data, "heads": [{**data["heads"][0], "key": [["x"]]}]}, "key holds"),
    ],
)
def test_what_is_no_trace_is_refused(change: Any, fact: str) -> None:
    data = json.loads(qkv.explain(np.eye(2), np.eye(2), np.eye(2)).to_json())
    with pytest.raises(qkv.ArgumentError, match=fact):
        qkv.Trace.from_dict(change(data))
    with pytest.raises(qkv.ArgumentError, match="is not JSON"):
        qkv.Trace.from_json("[" * 100_000)


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


def test_json_holds_projections_mechanism_and_ledger() -> None:
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
    with pytest.raises(qkv.ArgumentError, match=r"block_kv=.* is not a positive integer"):
        qkv.explain(X, X, X, block_kv=block_kv)  # type: ignore[arg-type]
