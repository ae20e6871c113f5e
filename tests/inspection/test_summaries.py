"""What records say of themselves, and what they say of NaN and infinity."""

import contextlib
from html import unescape
from typing import Any, Literal

import numpy as np
import pytest
import torch

import qkv
import qkv.samples
from qkv.cli import main
from qkv.files import write_arrays
from qkv.mechanisms.lookup.scaled_dot_product import ScaledDotProduct

RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(4, 9, 8)).astype(np.float32) for _ in range(3))
TOKENS = [f"t{i}" for i in range(9)]


def of_command_line(tmp_path, capsys, q, k, v, *options: str) -> str:
    write_arrays(tmp_path / "layer.safetensors", q, k, v, TOKENS)
    with contextlib.chdir(tmp_path):
        assert main(["inspect", "layer.safetensors", *options]) == 0
    return capsys.readouterr().out


def body(text: str) -> list[str]:
    """The lines without the title, and without the command to try next."""
    return [line for line in text.rstrip("\n").split("\n")[1:] if not line.startswith("Next:")]


def test_a_record_prints_what_the_command_line_does(tmp_path, capsys) -> None:
    printed = of_command_line(tmp_path, capsys, Q, K, V, "--causal")
    record = qkv.inspect(Q, K, V, qkv.Causal())
    assert body(record.summary(TOKENS)) == body(printed)
    assert str(record) == record.summary()
    assert "\n" not in repr(record)
    assert record._repr_html_().startswith("<pre>")
    assert "t1" not in str(record)


def test_html_has_no_codes_of_terminals(monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    record = qkv.inspect(8 * Q, K, V, qkv.Causal())
    assert "\x1b" in record.summary()
    assert "\x1b" not in record._repr_html_()


def test_a_notebook_shows_what_print_does() -> None:
    """What stands last in a cell, with what others wrote as text."""
    model = qkv.samples.tiny_model()
    tokens = ["<b>x</b>", "\u0645\u0631\u062d\u0628\u0627", "&amp;"]
    shown = [
        qkv.plan(Q, K, V, qkv.Causal()),
        qkv.explain(Q[0, :3], K[0, :3], V[0, :3], tokens=tokens),
        model.inspect("the cat. the cat.").compare(model.inspect("<i>the</i> dog")),
        ScaledDotProduct.example().explain(np.eye(5, 4), tokens=["a", *tokens, "b"], index=1),
    ]
    for each in shown:
        html = each._repr_html_()
        assert unescape(html.removeprefix("<pre>").removesuffix("</pre>")) == str(each)
        assert html.count("<") == 2
    many = qkv.explain(Q[0], K[0], V[0]), qkv.explain(*(np.tile(x[0], (3, 1)) for x in (Q, K, V)))
    sizes = [len(trace._repr_html_()) for trace in many]
    assert sizes[0] > 1000
    assert sizes[1] < 100


def test_the_numbers_of_a_summary_are_the_weights_s() -> None:
    dense = torch.softmax(torch.from_numpy(Q @ K.swapaxes(1, 2) / 8**0.5), -1).numpy()
    lines = str(qkv.inspect(Q, K, V)).split("\n")
    for head in range(4):
        (line,) = [x for x in lines if x.split()[:1] == [str(head)]]
        w = dense[head]
        entropy = -(w * np.log(w)).sum(-1).mean()
        assert line.split()[1:3] == [f"{entropy:.2f}", f"{w[:, 0].mean():.2f}"]


def test_batches_tensors_and_empty_records() -> None:
    q, k, v = (torch.from_numpy(np.stack([a, a[:, ::-1]])) for a in (Q, K, V))
    record = qkv.inspect(q, k, v, qkv.Causal())
    assert record.summary(batch=1) != record.summary()
    assert "batch 1 of 0..1" in record.summary(batch=1)
    with pytest.raises(qkv.ArgumentError, match="batch row 2"):
        record.summary(batch=2)
    with pytest.raises(qkv.ArgumentError, match="3 tokens for 9 keys"):
        record.summary(["a", "b", "c"])
    assert "nothing to look at" in str(qkv.inspect(Q[:, :0], K, V))


def test_a_model_record_prints_what_the_command_line_does() -> None:
    record = qkv.ModelRecord("one layer")
    x = 4 * np.eye(9)[None]
    record.add(np.roll(x, -1, axis=2), x, qkv.Causal(), name="layer 0")
    assert "layer 0  P" in str(record)
    assert "the token before" in record.summary()
    assert record._repr_html_().startswith("<pre>")


def test_unknown_scores_list_those_that_are_known() -> None:
    record = qkv.ModelRecord("none")
    with pytest.raises(qkv.ArgumentError) as caught:
        record.best("foo")
    assert "induction" in dict(caught.value.seen)["scores"].split(", ")


def with_number(array: np.ndarray, place: tuple[int, ...], number: float) -> np.ndarray:
    changed = array.copy()
    changed[place] = number
    return changed


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_query_row_that_is_not_finite_is_named(number, tmp_path, capsys) -> None:
    q = with_number(Q, (2, 5, 3), number)
    record = qkv.inspect(q, K, V)
    assert np.argwhere(record.non_finite.rows).tolist() == [[2, 5]]
    (reason,) = record.non_finite.reasons
    word = "NaN" if np.isnan(number) else "infinity"
    assert reason.startswith(f"query holds {word} first at head 2, row 5, dim 3: query row 5")
    assert reason in str(record).replace("\n", " ")
    assert "nan" not in str(record)
    for options in ((), ("--head", "2"), ("--head", "2", "--query", "5")):
        printed = of_command_line(tmp_path, capsys, q, K, V, *options)
        assert reason in printed.replace("\n", " ")
    # The other rows of the head have their mean.
    rest = np.delete(qkv.inspect(Q, K, V).entropy[2], 5).mean()
    assert f"   2     {rest:.2f}" in str(record)


def test_a_key_a_value_and_a_bias_that_are_not_finite() -> None:
    record = qkv.inspect(Q, with_number(K, (1, 4, 0), np.nan), V, qkv.Causal())
    assert np.argwhere(record.non_finite.rows).tolist() == [[1, i] for i in range(4, 9)]
    (reason,) = record.non_finite.reasons
    assert reason.startswith("key holds NaN first at head 1, row 4, dim 0: 5 query rows")
    record = qkv.inspect(Q, K, with_number(V, (1, 4, 0), np.inf))
    assert not np.any(record.non_finite.rows)
    assert "value holds infinity first at head 1, row 4, dim 0" in str(record)
    bias = with_number(np.zeros((9, 9), np.float32), (3, 3), np.nan)
    assert "bias holds NaN or plus infinity" in str(qkv.inspect(Q, K, V, qkv.Bias(bias)))


@pytest.mark.slow
def test_what_a_mask_hides_is_no_reason() -> None:
    dirty = with_number(K, (0, 8, 0), np.nan)
    assert not qkv.inspect(Q, dirty, V, qkv.KeyLengths(8)).non_finite
    assert not qkv.inspect(Q, K, V).non_finite


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_what_a_mask_hides_is_no_reason_beside_a_wrong_query(
    layout: Literal["bhld", "blhd"],
) -> None:
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 4, 6, 4)).astype(np.float32)
    query[1, 2, 5, 3] = key[:, :, 5] = value[:, :, 5] = np.nan
    arrays = [a if layout == "bhld" else a.swapaxes(1, 2) for a in (query, key, value)]
    record = qkv.inspect(*arrays, qkv.KeyLengths(5), layout=layout)
    assert np.argwhere(record.non_finite.rows).tolist() == [[1, 2, 5]]
    (reason,) = record.non_finite.reasons
    assert reason.startswith("query holds NaN first at batch 1, head 2, row 5, dim 3")
    value[0, 3, 4, 2] = np.nan
    seen = qkv.inspect(*arrays, qkv.KeyLengths(5), layout=layout)
    assert [of.partition(" ")[0] for of in seen.non_finite.reasons] == ["query", "value"]


def test_what_a_mask_hides_is_no_reason_beside_scores_that_overflow() -> None:
    """Rows 0 and 1 overflow at key 0, row 4 sees key 4, and none sees key 2."""
    q, k = np.zeros_like(Q), K.copy()
    q[1, :2] = k[1, 0] = 1e30
    k[1, 2, 3] = k[1, 4, 2] = np.nan
    allowed = np.tri(9, dtype=bool)
    allowed[:, 2] = allowed[5:, 4] = False
    record = qkv.inspect(q, k, V, qkv.Mask(allowed))
    assert np.argwhere(record.non_finite.rows).tolist() == [[1, 0], [1, 1], [1, 4]]
    by_key, by_scores = record.non_finite.reasons
    assert by_key.startswith("key holds NaN first at head 1, row 4, dim 2: query row 4 of head 1")
    assert by_scores.startswith("Scores overflow float32")
    assert "2 query rows (of head 1: 0, 1) have" in by_scores


@pytest.mark.parametrize(
    ("variant", "factor", "words"),
    [
        (qkv.Sinks(np.nan), 1.0, "The sinks hold NaN"),
        (qkv.Sinks(np.inf), 1.0, "The sinks hold NaN"),
        (qkv.ScoreMod(lambda score, b, h, i, j: score + np.sqrt(-1.0 - j)), 1.0, "Mend the score"),
        (qkv.ScoreMod(lambda score, b, h, i, j: score + np.exp(999.0 + j)), 1.0, "Mend the score"),
        (qkv.Causal(), 1e160, "Divide query or scale."),
    ],
)
def test_scores_that_float64_does_not_save(variant: Any, factor: float, words: str) -> None:
    """The advice to inspect them as float64 would help none of these."""
    q, k, v = (array.astype(np.float64) for array in (Q, K, V))
    (reason,) = qkv.inspect(abs(q) * factor, abs(k) * factor, v, variant).non_finite.reasons
    assert words in reason
    assert "overflow" not in reason


def test_rows_with_an_infinite_score_are_in_no_mean() -> None:
    """The score of row 3 for key 2 is infinite, which leaves weights of 0 to its other keys."""
    q, k = (array.astype(np.float64) for array in (Q, K))
    q[0, 3], k[0, 2] = 1e200, 1e200
    q[0, 2], q[0, 4:] = 0.0, 0.0
    q[0, :2] = -1e-200
    record = qkv.inspect(q, k, V.astype(np.float64), qkv.Causal())
    assert np.argwhere(record.non_finite.rows).tolist() == [[0, 3]]
    for name, rows in record.rows_by_query().items():
        assert np.isnan(rows[0, 3]), name
    # Rows 1, 2 and 4 to 8 have a token before them, and weights of 1 / (row + 1).
    weights = 1 / (1 + np.array([1, 2, 4, 5, 6, 7, 8]))
    np.testing.assert_allclose(record.rows()[0]["previous"], weights.mean(), rtol=1e-6)


def test_queries_that_see_no_key() -> None:
    record = qkv.inspect(Q, K, V, qkv.GlobalTokens([99]))
    assert "No query sees a key" in str(record)
    assert "No query sees" not in str(qkv.inspect(Q, K, V, qkv.KeyLengths(1)))


def test_scores_that_overflow_say_that_explain_does_not() -> None:
    record = qkv.inspect(Q * np.float32(1e20), K * np.float32(1e20), V)
    (reason,) = record.non_finite.reasons
    assert reason.startswith("Scores overflow float32")
    assert "float64" in reason
    trace = qkv.explain(Q * np.float32(1e20), K * np.float32(1e20), V, head=0, q_index=0)
    assert np.isfinite(trace.heads[0].rows[0].softmax.weights).all()
    assert "head  entropy" not in str(record)
    double = qkv.inspect(*(a.astype(np.float64) for a in (Q * 1e20, K * 1e20, V)))
    assert not double.non_finite
