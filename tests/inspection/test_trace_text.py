"""What a reader sees: the trace as text, the classical printout, and tokens made safe."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qkv
from qkv.inspection.rendering.tokens import LONGEST, columns, printable
from qkv.inspection.traces.trace_text import bar
from qkv.samples import shared_example
from qkv.testing import Case, cases

EXAMPLE = shared_example()

THE = """\
Attention: no variants
1 head, 5 queries, 5 keys, head_dim 4, v_head_dim 4, float64

=== 'The' (row 0) ===
q = [1, 0, 1, 0]

1. Dot products: q . k
   The  1*0 + 0*1 + 1*0 + 0*1     = 0.0000
   cat  1*1 + 0*0 + 1*1 + 0*0     = 2.0000
   sat  1*1 + 0*1 + 1*0 + 0*0     = 1.0000
   on   1*0 + 0*0 + 1*1 + 0*1     = 1.0000
   mat  1*1 + 0*0 + 1*0.5 + 0*0.5 = 1.5000

2. Scale: times 0.5 = 1 / sqrt(4)
   The  0.0000
   cat  1.0000
   sat  0.5000
   on   0.5000
   mat  0.7500

3. Softmax: subtract the largest, 1.0000; take exp; divide by the sum, 3.3597
         score  shifted     exp  weight
   The  0.0000  -1.0000  0.3679  0.1095  |####                                    |
   cat  1.0000   0.0000  1.0000  0.2976  |###########                             |
   sat  0.5000  -0.5000  0.6065  0.1805  |#######                                 |
   on   0.5000  -0.5000  0.6065  0.1805  |#######                                 |
   mat  0.7500  -0.2500  0.7788  0.2318  |#########                               |
   weights add to 1.000000   lse = 1.0000 + log 3.3597 = 2.2119   entropy = 1.5598 nats

4. Output: the values, weighted and added
   The  0.1095 * [1, 0, 0, 0]
   cat  0.2976 * [0, 1, 0, 0]
   sat  0.1805 * [0, 0, 1, 0]
   on   0.1805 * [0, 0, 0, 1]
   mat  0.2318 * [0.5, 0.5, 0.5, 0.5]
   o = [0.2254, 0.4135, 0.2964, 0.2964]"""

CLASSICAL = """\
=== Attention trace for 'The' (row 0) ===
Q[0] = [1. 0. 1. 0.]
Step 1 - Raw dot products (Q @ K^T):
  Q[The] . K[The] = 0.0000
  Q[The] . K[cat] = 2.0000
  Q[The] . K[sat] = 1.0000
  Q[The] . K[on] = 1.0000
  Q[The] . K[mat] = 1.5000
Step 2 - Scaled (/ sqrt(4) = / 2.0):
  S[The,The] = 0.0000
  S[The,cat] = 1.0000
  S[The,sat] = 0.5000
  S[The,on] = 0.5000
  S[The,mat] = 0.7500
Step 3 - Softmax weights:
  A[The,The] = 0.1095 |####|
  A[The,cat] = 0.2976 |###########|
  A[The,sat] = 0.1805 |#######|
  A[The,on] = 0.1805 |#######|
  A[The,mat] = 0.2318 |#########|
Step 4 - Output (weighted sum of V):
  O[The] = [0.2254 0.4135 0.2964 0.2964]
  Sum of weights = 1.000000
"""


def test_the_shared_example() -> None:
    trace = qkv.explain(EXAMPLE.q, EXAMPLE.k, EXAMPLE.v, tokens=EXAMPLE.tokens, q_index=0)
    assert str(trace) == trace.text() == THE


def test_classical_printout(capsys: pytest.CaptureFixture[str]) -> None:
    layer = qkv.ScaledDotProductAttention(4)
    arrays = EXAMPLE.q, EXAMPLE.k, EXAMPLE.v
    assert layer.explain(*arrays, EXAMPLE.tokens) is None
    assert capsys.readouterr().out == CLASSICAL
    layer.explain(*(a.tolist() for a in arrays), list(EXAMPLE.tokens), query_idx=4)
    assert "=== Attention trace for 'mat' (row 4) ===" in capsys.readouterr().out


def test_a_window_is_one_mask() -> None:
    x = EXAMPLE
    trace = qkv.explain(x.q, x.k, x.v, qkv.SlidingWindow(1, 1), q_index=2, tokens=x.tokens)
    (mask,) = trace.heads[0].rows[0].masks
    assert mask.allowed.tolist() == [False, True, True, True, False]
    assert "Mask: SlidingWindow(1, 1)\n" in trace.text()
    assert "   The  masked by SlidingWindow(1, 1)\n" in trace.text()


def test_masks_stages_sink_and_dropout_are_in_the_text() -> None:
    text = qkv.explain(
        EXAMPLE.q, EXAMPLE.k, EXAMPLE.v, qkv.Causal(), qkv.ALiBi(0.5), qkv.RoPE(), qkv.Sinks(0.0),
        qkv.Dropout(0.3, 1), tokens=EXAMPLE.tokens, q_index=2, grad=True,
    ).text()  # fmt: skip
    titles = re.findall(r"^(\d+)\. ([\w ]+)", text, re.MULTILINE)
    assert titles == [
        ("1", "Dot products"), ("2", "Scale"), ("3", "Score"), ("4", "Mask"), ("5", "Softmax"),
        ("6", "Dropout"), ("7", "Output"), ("8", "The step back"),
    ]  # fmt: skip
    for line in (
        "R q = [-1.325, 0.9998, 0.4932, 0.02]  turned by RoPE()",
        "   The   0.5099  -0.4901",
        "   on   masked by Causal()",
        "   on    masked                   0.0000  |" + " " * 40 + "|",
        "   The sink, 0.0000, adds exp 0.3679 to the sum and takes weight 0.1862",
        "   weights add to 0.813849   lse = 1.0000 + log 1.9762 = 1.6812   entropy = 0.9103 nats",
        "   dq = [0.1029, 0.0827, -0.0078, 0.0149]",
        "dV[4] = [0.5706, 0.5706, 0.5706, 0.5706]",
    ):
        assert line in text.splitlines()


def test_a_row_without_keys_says_so() -> None:
    x = np.eye(2)
    text = qkv.explain(x, x, x, np.zeros((2, 2), bool), q_index=0).text()
    assert "no key is allowed, so every weight is 0\n   lse = -inf   entropy = 0.0000 nats" in text
    assert "key 1  masked by Mask(" in text
    assert text.endswith("o = [0.0000, 0.0000]")


def test_a_score_of_minus_infinity_says_so() -> None:
    x = np.eye(2)
    mod = qkv.ScoreMod(lambda s, b, h, q, k: np.where(k > 0, -np.inf, s))
    assert "key 1  masked by a score of -inf" in qkv.explain(x, x, x, mod, q_index=0).text()


@pytest.mark.slow
@pytest.mark.sampled(
    "case",
    [c for c in cases() if max(c.shape.q_len, c.shape.kv_len) <= 40],
    one_in=4,
    ids=lambda case: case.name,
)
def test_every_case_can_be_read(case: Case) -> None:
    call = case.build("float64")
    trace = qkv.explain(*call.arrays, *call.variants, **call.keywords, grad=True)
    lines = trace.text(width=90).splitlines()
    folded = [line for line in lines if re.match(r"(q|R q|   \S+ \d+) .*\*", line)]
    assert all(len(line) <= 95 for line in folded)
    assert not any(line != line.rstrip() for line in lines)


def test_every_product_is_shown() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4, 50))
    text = qkv.explain(q, k, v, q_index=1).text()
    shown = re.findall(r"(\S+)\*(\S+)", text[: text.index("2. Scale")])
    assert shown == [(f"{a:.4g}", f"{b:.4g}") for row in k for a, b in zip(q[1], row, strict=True)]
    assert max(map(len, text.splitlines())) <= 102


def test_bars_are_truncated() -> None:
    assert [len(bar(w)) for w in (0.0, 0.0249, 0.025, 0.2, 0.999, 1.0)] == [0, 0, 1, 8, 39, 40]
    assert bar(0.3 - 1e-16) == "#" * 12
    assert bar(float("nan")) == ""


HOSTILE = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\r\n\x00\x9b2J\u202egnp"


def test_tokens_are_made_safe_in_all_texts(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.eye(2)
    trace = qkv.explain(x, x, x, tokens=[HOSTILE, "\x1bc" + "a" * 99], q_index=0)
    qkv.ScaledDotProductAttention(2).explain(x, x, x, [HOSTILE, "\x1bP..."])
    for text in (trace.text(), capsys.readouterr().out):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert r"redlink\r\n\x00\u202egnp" in text
        assert "title" not in text
    assert "aaa..." in trace.text()
    assert trace.tokens[0] == HOSTILE


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("Ġcat", "Ġcat"), (" the", " the"), ("猫", "猫"), ("\t", r"\t"), ("\x7f", r"\x7f"),
        ("\x1b", ""), ("\x1b[", ""), ("\x1b[1;3", ""), ("\x1b(B!", "!"), ("a\x9dlost", "a"),
        ("\ud800", r"\ud800"), ("a\u00a0b", r"a\xa0b"), ("", ""), ("x" * 24, "x" * 24),
        ("x" * 25, "x" * 21 + "..."), ("\x1b[0m" * 50 + "end", "end"),
    ],
)  # fmt: skip
def test_printable(token: str, shown: str) -> None:
    assert printable(token) == shown


@given(st.text(alphabet=st.characters(), max_size=40))
def test_printable_is_safe_and_short(token: str) -> None:
    shown = printable(token)
    assert shown.isprintable()
    assert len(shown) <= LONGEST
    assert printable(shown) == shown


def test_columns() -> None:
    assert [columns(t) for t in ("", "cat", "猫", "e\u0301")] == [0, 3, 2, 1]


def test_scaled_dot_product_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, n, d)) for n, d in ((4, 8), (6, 8), (6, 5)))
    layer = qkv.ScaledDotProductAttention(8)
    assert (layer.d_k, layer.scale) == (8, np.sqrt(8))
    weights, output = layer.forward(q, k, v)
    np.testing.assert_allclose(output, qkv.attention(q, k, v), atol=1e-14)
    np.testing.assert_allclose(weights.sum(axis=-1), 1)
    for index in np.ndindex(2, 3, 4, 6):
        score = sum(q[index[:-1]] * k[(*index[:2], index[3])])
        assert layer.compute_scores(q, k)[index] == pytest.approx(score)
    np.testing.assert_array_equal(layer.scale_scores([[4.0]]), [[4.0 / np.sqrt(8)]])
    np.testing.assert_allclose(
        layer.compute_output([[0.25, 0.75]], [[1, 0], [0, 1]]), [[0.25, 0.75]]
    )
    np.testing.assert_array_equal(
        layer.compute_weights([[-np.inf, 0.0], [-np.inf, -np.inf], [1e4, 0.0]]),
        [[0, 1], [0, 0], [1, 0]],
    )
    assert layer(q, k, v)[1].dtype == np.float64
    assert repr(layer) == "ScaledDotProductAttention(d_k=8)"


@pytest.mark.parametrize("d_k", [0, -1, 2.0, True, "4", None])
def test_wrong_d_k(d_k: object) -> None:
    with pytest.raises(qkv.ArgumentError, match="d_k="):
        qkv.ScaledDotProductAttention(d_k)


def test_wrong_arguments_of_the_class() -> None:
    layer, x = qkv.ScaledDotProductAttention(2), np.eye(2)
    with pytest.raises(qkv.ShapeError, match="Q has rows of length 3; d_k=2"):
        layer.forward(np.eye(3), x, x)
    with pytest.raises(qkv.ShapeError, match="K has rows of length 3; d_k=2"):
        layer.compute_scores(x, np.eye(3))
    with pytest.raises(qkv.ShapeError, match=r"weights \(2, 2\) and V \(3, 3\)"):
        layer.forward(x, x, np.eye(3))
    with pytest.raises(qkv.ShapeError, match="1 dimensions"):
        layer.forward([1, 0], x, x)
    with pytest.raises(qkv.ShapeError, match="rows differ in length"):
        layer.forward([[1, 0], [1]], x, x)
    with pytest.raises(qkv.DTypeError, match="bool"):
        layer.forward(x > 0, x, x)
    with pytest.raises(qkv.DTypeError, match=r"Q is a .*str"):
        layer.forward("ab", x, x)
    with pytest.raises(qkv.ShapeError, match="leading dimensions"):
        layer.explain(x[None], x, x, ["a", "b"])
    with pytest.raises(qkv.ArgumentError, match="tokens must be 2 strings"):
        layer.explain(x, x, x, ["a"])
    with pytest.raises(qkv.ArgumentError, match="query_idx=2 is not one of the 2"):
        layer.explain(x, x, x, ["a", "b"], query_idx=2)


def test_weights_that_are_no_numbers_are_said_to_be_none() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 40, 4))
    q[3, 1] = np.nan
    text = qkv.explain(q, k, v, q_index=3).text(80, 12)
    assert "Of 40 keys, 12 are shown." in text
    assert "have nan of it" not in text
    assert "Its weights are not numbers" in text
    assert "no numbers" not in qkv.explain(q, k, v, q_index=2).text(80, 12)
    large = qkv.explain(np.full((2, 4), 1e200), np.full((2, 4), 1e200), np.ones((2, 4))).text()
    assert "a score or a sink is NaN or plus infinity" in large  # Query and key are finite.


def test_of_many_keys_print_and_notebooks_show_those_with_most_weight() -> None:
    x = np.zeros((33, 4))
    x[7] = 9
    trace = qkv.explain(x, x, x, q_index=7)
    for short in (str(trace), trace._repr_html_()):
        assert "Of 33 keys, the 12 with most weight are shown" in short
        assert "key 7" in short
        assert "key 30" not in short
    assert "key 30" in trace.text()
    assert str(qkv.explain(x[:32], x[:32], x[:32], q_index=7)).count("key 30") > 0


@pytest.mark.parametrize("width", [80, 60, 44])
def test_the_bars_of_weights_fit_the_terminal(width: int) -> None:
    lines = qkv.explain(*np.random.default_rng(0).normal(size=(3, 5, 4))).text(width).splitlines()
    start = next(i for i, line in enumerate(lines) if "Softmax" in line)
    table = lines[start + 1 : start + 10]
    assert "weight" in table[0]
    assert max(map(len, table)) <= width
    assert any("|#" in line for line in table) == (width > 44)
