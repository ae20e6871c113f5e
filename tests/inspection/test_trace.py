"""The trace equals the definition, step by step, and its written form is strict."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import numpy as np
import pytest

import qkv
from qkv.inspection.traces.trace import Trace
from qkv.inspection.traces.trace_fields import TracedRow
from qkv.testing import Case, cases

SCHEMA = json.loads(
    resources.files("qkv.inspection").joinpath("trace.schema.json").read_text(encoding="utf-8")
)
SMALL = [case for case in cases() if max(case.shape.q_len, case.shape.kv_len) <= 40]
LONG = [case for case in cases() if max(case.shape.q_len, case.shape.kv_len) > 40][::9]
TOLERANCE = 1e-12


def explain(case: Case, dtype: str = "float64", **chosen: Any) -> Trace:
    call = case.build(dtype)
    return qkv.explain(*call.arrays, *call.variants, **call.keywords, **chosen)


def rows(trace: Trace) -> list[TracedRow]:
    return [row for head in trace.heads for row in head.rows]


def only(trace: Trace) -> TracedRow:
    (row,) = rows(trace)
    return row


def checked(trace: Trace) -> dict[str, Any]:
    """The JSON of a trace, held against the schema, read back strictly."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(trace.to_json(), parse_constant=refuse)
    jsonschema.validate(read, SCHEMA)
    assert read == trace.to_dict()
    return read


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL + LONG, ids=lambda case: case.name)
@pytest.mark.one_in(4)
def test_every_case(case: Case) -> None:
    truth = case.truth("float64")
    chosen = {} if case in SMALL else {"q_index": -1}
    trace = explain(case, **chosen)
    traced = iter(rows(trace))
    q_rows = range(case.shape.q_len)[-1:] if chosen else range(case.shape.q_len)
    for head in range(len(truth.heads)):
        dense = truth.heads[head]
        index = np.unravel_index(head, truth.lse.shape[:-1]) if truth.lse.size else ()
        for i in q_rows:
            row, place = next(traced), (*index, i)
            assert row.q_index == i
            assert row.q_pos == dense.q_pos[i]
            np.testing.assert_allclose(row.raw, row.products.sum(axis=1), atol=TOLERANCE)
            np.testing.assert_allclose(row.scaled, row.raw * dense.scale, atol=TOLERANCE)
            scores = np.where(dense.allowed[i], truth.scores[place], -np.inf)
            np.testing.assert_allclose(row.scores, scores, atol=1e-9, rtol=TOLERANCE)
            np.testing.assert_array_equal(row.allowed, ~np.isneginf(scores))
            np.testing.assert_allclose(row.softmax.weights, truth.weights[place], atol=1e-9)
            np.testing.assert_allclose(row.softmax.lse, truth.lse[place], rtol=TOLERANCE, atol=1e-9)
            factors = np.ones_like(scores) if row.factors is None else row.factors
            np.testing.assert_array_equal(factors, dense.factors[i])
            np.testing.assert_allclose(row.output, row.contributions.sum(axis=0), atol=TOLERANCE)
            np.testing.assert_allclose(row.output, truth.out[place], atol=1e-9)
            if row.stages:
                last = row.stages[-1].scores[row.allowed]
                np.testing.assert_array_equal(last, row.scores[row.allowed])
            for mask in row.masks:
                assert mask.allowed[row.allowed].all()
    assert next(traced, None) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_low_precision_input_is_traced_in_float64(dtype: str) -> None:
    case = next(c for c in cases() if c.name == "causal, alibi")
    output = [row.output for row in rows(explain(case, dtype))]
    np.testing.assert_allclose(
        np.reshape(output, case.truth(dtype).out.shape), case.truth(dtype).out, atol=1e-12
    )


def test_stages_masks_and_products_by_hand() -> None:
    q, k, v = np.array([[1.0, 2.0]]), np.array([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]]), np.eye(3)
    mask = np.array([[True, False, True]])
    row = only(qkv.explain(q, k, v, qkv.ALiBi(0.5), qkv.Softcap(4.0), mask, scale=0.1,
                           q_offset=2))  # fmt: skip
    np.testing.assert_array_equal(row.products, [[3, 8], [5, 12], [0, 2]])
    np.testing.assert_array_equal(row.raw, [11, 17, 2])
    np.testing.assert_allclose(row.scaled, [1.1, 1.7, 0.2])
    labels = [stage.label for stage in row.stages]
    assert labels == ["ALiBi(slopes=0.5)", "Softcap(4.0)"]
    np.testing.assert_allclose(row.stages[0].scores, [0.1, 1.2, 0.2])
    np.testing.assert_allclose(row.stages[1].scores, 4 * np.tanh(np.array([0.1, 1.2, 0.2]) / 4))
    np.testing.assert_array_equal(row.masks[0].allowed, mask[0])
    np.testing.assert_array_equal(row.allowed, mask[0])
    assert row.q_pos == 2
    assert row.scores[1] == row.softmax.shifted[1] == -np.inf
    assert row.softmax.exp[1] == row.softmax.weights[1] == 0
    assert row.softmax.row_max == row.scores[2]


def test_the_sink_enters_maximum_and_sum() -> None:
    x = np.zeros((1, 1))
    for sink in (-3.0, 0.0, 5.0, 1000.0):
        s = only(qkv.explain(x, x, x, qkv.Sinks(sink))).softmax
        assert s.row_max == max(0.0, sink)
        assert s.sink == sink
        np.testing.assert_allclose(s.lse, np.logaddexp(0.0, sink))
        np.testing.assert_allclose(s.weights, 1 / (1 + np.exp(min(sink, 700))), atol=1e-300)


def test_rotated_rows_are_given_beside_the_plain_ones() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4, 6))
    trace = qkv.explain(q, k, v, qkv.RoPE(rotary_dim=4))
    (head,) = trace.heads
    np.testing.assert_array_equal(head.key, k)
    np.testing.assert_array_equal(head.value, v)
    for i, row in enumerate(head.rows):
        np.testing.assert_array_equal(row.query, q[i])
        a, b = q[i, 0], q[i, 2]
        np.testing.assert_allclose(row.rotated_query[0], a * np.cos(i) - b * np.sin(i))
        np.testing.assert_array_equal(row.rotated_query[4:], q[i, 4:])
    np.testing.assert_allclose(head.rotated_key[1, 2], k[1, 0] * np.sin(1) + k[1, 2] * np.cos(1))
    assert explain(SMALL[0]).heads[0].rotated_key is None


def test_a_row_without_keys() -> None:
    q, k, v = np.ones((3, 2, 2))
    k[:], v[:] = np.nan, np.inf
    trace = qkv.explain(q, k, v, np.zeros((2, 2), bool), grad=True)
    for row in rows(trace):
        assert row.softmax.row_max == row.softmax.lse == -np.inf
        assert row.softmax.entropy == 0
        for zero in (row.softmax.weights, row.output, row.contributions, row.back.d_query):
            assert not zero.any()
    read = checked(trace)["heads"][0]["rows"][0]
    assert read["softmax"]["row_max"] is read["softmax"]["lse"] is None
    assert read["softmax"]["weights"] == [0, 0]
    assert read["products"][0] == ["nan", "nan"]


def test_what_is_masked_does_not_reach_the_output() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 5, 4))
    clean = qkv.explain(q, k, v, qkv.Causal())
    for poison in (np.nan, np.inf, -np.inf):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[3:], bad_v[3:] = poison, poison
        trace = qkv.explain(q, bad_k, bad_v, qkv.Causal())
        for row, same in list(zip(rows(trace), rows(clean), strict=True))[:3]:
            np.testing.assert_array_equal(row.output, same.output)
            np.testing.assert_array_equal(row.softmax.weights, same.softmax.weights)
        assert np.isnan(rows(trace)[3].output).all() or np.isinf(poison)
        checked(trace)


def test_numbers_that_are_not_finite_survive_json() -> None:
    q, k, v = np.array([[1.0]]), np.array([[np.inf], [np.nan], [1.0]]), np.ones((3, 1))
    read = checked(qkv.explain(q, k, v, np.array([False, False, True])))
    assert read["heads"][0]["key"] == [["inf"], ["nan"], [1.0]]
    assert read["heads"][0]["rows"][0]["scores"] == [None, None, 1.0]
    assert checked(qkv.explain(q, k, v))["heads"][0]["rows"][0]["output"] == ["nan"]
    assert checked(qkv.explain(q, -k, v))["heads"][0]["rows"][0]["raw"] == [None, "nan", -1.0]


@pytest.mark.slow
@pytest.mark.sampled("case", SMALL, one_in=24, ids=lambda case: case.name)
def test_json_follows_the_schema(case: Case) -> None:
    last = {"q_index": -1} if case.shape.q_len else {}
    if case.shape.num_heads * case.shape.q_len * len(case.shape.batch_shape) > 100:
        last |= {"head": -1, "batch": -1}
    checked(explain(case, **last))
    checked(explain(case, **last, grad=True))


@pytest.mark.slow
def test_the_schema_says_something() -> None:
    good = explain(SMALL[0], q_index=0, head=0, batch=0).to_dict()
    for path, wrong in (
        (["version"], 3),
        (["ledger", "total"], 1.5),
        (["problem", "scale"], "0.5"),
        (["heads", 0, "rows", 0, "raw", 0], "inf "),
        (["heads", 0, "rows", 0, "softmax", "weights"], [[1.0]]),
        (["heads", 0, "rows", 0, "unknown"], 1),
    ):
        bad = json.loads(json.dumps(good))
        *front, last = path
        place = bad
        for step in front:
            place = place[step]
        place[last] = wrong
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, SCHEMA)


def test_json_has_the_numbers() -> None:
    trace = explain(SMALL[0], q_index=2, head=1, batch=1, grad=True)
    read, row = checked(trace), only(trace)
    assert (read["schema"], read["version"]) == ("qkv-trace", 2)
    head = read["heads"][0]
    assert (head["batch"], head["head"], head["kv_head"]) == (1, 1, 0)
    assert head["rows"][0]["products"] == row.products.tolist()
    assert head["rows"][0]["back"]["jacobian"] == row.back.jacobian.tolist()
    assert read["gradient"]["d_key"] == trace.gradient.d_key.tolist()


def test_rows_heads_and_batches_are_chosen() -> None:
    case = next(c for c in cases() if c.name == "grouped heads")
    whole = explain(case)
    assert [(h.batch, h.head, h.kv_head) for h in whole.heads] == [
        (b, h, h // 3) for b in range(2) for h in range(6)
    ]
    for chosen in ({"batch": 1, "head": 4, "q_index": 3}, {"batch": -1, "head": -2, "q_index": -7}):
        trace = explain(case, **chosen)
        assert (trace.heads[0].batch, trace.heads[0].head) == (1, 4)
        np.testing.assert_array_equal(only(trace).output, whole.heads[10].rows[3].output)
    assert len(rows(explain(case, head=2))) == 2 * 10


def test_tokens_name_queries_and_keys() -> None:
    x = np.eye(3)
    trace = qkv.explain(x, x, x, tokens=["a", "b", "c"])
    assert trace.tokens == trace.kv_tokens == ("a", "b", "c")
    trace = qkv.explain(x[:1], x, x, tokens=["c"], kv_tokens=["a", "b", "c"])
    assert (trace.tokens, trace.kv_tokens) == (("c",), ("a", "b", "c"))
    assert qkv.explain(x[:1], x, x, tokens=["c"]).kv_tokens is None


@pytest.mark.parametrize(
    ("wrong", "error", "fact"),
    [
        ({"q_index": 3}, qkv.ArgumentError, "q_index=3 is not one of the 3"),
        ({"head": 1}, qkv.ArgumentError, "head=1"),
        ({"batch": -2}, qkv.ArgumentError, "batch=-2"),
        ({"q_index": True}, qkv.ArgumentError, "q_index=True"),
        ({"q_index": 1.0}, qkv.ArgumentError, "q_index=1.0"),
        ({"tokens": ["a"]}, qkv.ArgumentError, "tokens must be 3 strings"),
        ({"tokens": "abc"}, qkv.ArgumentError, "tokens must be 3 strings"),
        ({"kv_tokens": [1, 2, 3]}, qkv.ArgumentError, "kv_tokens must be 3 strings"),
        ({"cotangent": np.ones((3, 3))}, qkv.ArgumentError, "grad is False"),
        ({"cotangent": np.ones((3, 2)), "grad": True}, qkv.ShapeError, r"\(3, 2\).*\(3, 3\)"),
        ({"cotangent": np.ones((3, 3), int), "grad": True}, qkv.DTypeError, "int64"),
        ({"projections": (np.eye(3),) * 4}, qkv.ArgumentError, "is a tuple, not a Projections"),
        ({"mechanism": "causal"}, qkv.ArgumentError, "is a str, not a TracedMechanism"),
        ({"backend": "none"}, qkv.ArgumentError, "no backend 'none'"),
        ({"layout": "lbhd"}, qkv.ArgumentError, "layout"),
        ({"scale": np.nan}, qkv.ArgumentError, "scale"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], fact: str) -> None:
    x = np.eye(3)
    with pytest.raises(error, match=fact):
        qkv.explain(x, x, x, **wrong)


def test_an_index_into_nothing() -> None:
    x = np.zeros((0, 3))
    with pytest.raises(qkv.ArgumentError, match="q_index=0 is not one of the 0"):
        qkv.explain(x, x, x, q_index=0)
    assert qkv.explain(x, x, x).heads[0].rows == ()


def test_a_trace_beyond_the_limit_is_refused_with_its_size() -> None:
    x = np.zeros((1025, 4))
    with pytest.raises(qkv.UnsupportedError, match=r"8405000 numbers .limit 4194304") as raised:
        qkv.explain(x, x, x)
    assert "q_index=" in raised.value.action
    assert len(rows(qkv.explain(x, x, x, q_index=0))) == 1
    with pytest.raises(qkv.UnsupportedError, match="of 4 rows would hold 4210700 numbers"):
        qkv.explain(x[:4, :1], x[:1025, :1], x[:1025, :1], q_offset="end", grad=True)


def test_repr_is_short() -> None:
    assert repr(explain(SMALL[0], head=0, batch=0)) == "Trace(9 rows of 1 head, kv_len=9)"
