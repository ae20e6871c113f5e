"""What the page says of a trace: its arithmetic comes out, and its rows have their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv

from .conftest import Lab

pytestmark = pytest.mark.browser

N = 5
SINKS = {"a small one": -0.5, "the largest": 3.0}


@pytest.fixture
def traced(opened: Any, tmp_path: Path) -> Callable[..., Lab]:
    """Opens the page of a trace."""

    def make(*arrays: Any, **others: Any) -> Lab:
        path = tmp_path / "trace.html"
        path.write_text(qkv.explain(*arrays, **others).to_html(), encoding="utf-8")
        page: Lab = opened(path)
        return page

    return make


def arrays() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(3, N, 4))


def parts(lab: Lab, name: str) -> list[float]:
    """The numbers of one line of the arithmetic, in their order."""
    found = lab.page.eval_on_selector_all(
        ".arithmetic dl.sums > div",
        """(all, name) => [...all.find((each) => each.querySelector("dt").innerText === name)
            .querySelectorAll("data.num")].map((each) => each.value)""",
        name,
    )
    return [float(text) for text in found]


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
def test_a_sink_is_in_every_sum(traced: Any, sink: float) -> None:
    """The sums are those of e^score and e^sink, added one by one."""
    q, k, v = arrays()
    lab = traced(q, k, v, qkv.Sinks(np.array([sink])), qkv.Causal())
    for i in (0, 3):
        exps = [np.exp(float(q[i] @ k[j]) / 2) for j in range(i + 1)]
        weights = np.array(exps) / (sum(exps) + np.exp(sink))
        wanted = weights @ v[: i + 1]
        lab.open("heatmap", token=i, key=0)
        *terms, total = parts(lab, "row sum")
        np.testing.assert_allclose(sum(terms), total, rtol=1e-12)
        exp, total, weight = parts(lab, "weight")
        np.testing.assert_allclose([exp / total, weight], weights[0], rtol=1e-12)
        lab.open("tiles", token=i, block=2)
        np.testing.assert_allclose(lab.numbers('[data-name="tiled"]'), wanted, rtol=1e-11)
        np.testing.assert_allclose(lab.numbers('[data-name="whole"]'), wanted, rtol=1e-11)
        lab.open("pipeline", token=i, step=8)
        share = lab.numbers(".explained")[0]
        np.testing.assert_allclose(share + weights.sum(), 1, rtol=1e-12)
    assert lab.errors == []


def test_dropout_is_in_the_share_of_the_output(traced: Any) -> None:
    q, k, v = arrays()
    lab = traced(q, k, v, qkv.Dropout(0.4, seed=3))
    shares = []
    for j in range(N):
        lab.open("heatmap", token=1, key=j)
        weight, factor, *numbers = parts(lab, "share of the output")
        assert factor in (0, 1 / 0.6)
        np.testing.assert_allclose(numbers[:4], v[j], rtol=1e-12)
        np.testing.assert_allclose(numbers[4:], weight * factor * v[j], rtol=1e-12)
        shares.append(numbers[4:])
    wanted = np.sum(shares, axis=0)
    np.testing.assert_allclose(parts(lab, "output"), wanted, rtol=1e-12)
    lab.open("tiles", token=1, block=2)
    np.testing.assert_allclose(lab.numbers('[data-name="tiled"]'), wanted, rtol=1e-11)


def test_queries_have_their_own_names(traced: Any) -> None:
    """The tokens of the keys may be others, and may have no names."""
    q, k, v = arrays()
    names, keys = ["first", "second"], [f"key {j}" for j in range(N)]
    for kv_tokens, wanted in ((keys, keys), (None, [str(j) for j in range(N)])):
        lab = traced(q[:2], k, v, tokens=names, kv_tokens=kv_tokens)
        lab.open("heatmap", token=1, key=1)
        head, *rows = lab.page.eval_on_selector_all(
            'table[aria-label="weights matrix"] tr',
            "rows => rows.map((row) => [...row.querySelectorAll('th')].map((x) => x.innerText))",
        )
        assert (head, rows) == (wanted, [[name] for name in names])
        assert f"“second” reads “{wanted[1]}”" in lab.page.inner_text(".arithmetic h3")


def test_it_says_that_other_heads_are_not_shown(traced: Any) -> None:
    q, k, v = np.random.default_rng(3).normal(size=(3, 2, N, 4))
    lab = traced(q, k, v)
    lab.open("heatmap")
    assert "Of its 2 heads the first is shown." in lab.page.inner_text(".examplebar")


@pytest.mark.parametrize(("digits", "longest"), [(4, 7), (12, 15)])
def test_products_of_the_pipeline_are_written_with_as_many_digits_as_all(
    traced: Any, digits: int, longest: int
) -> None:
    q, k, v = arrays()
    lab = traced(q, k, v)
    lab.open("pipeline", step=3, token=1, digits=digits)
    numbers = lab.page.locator('td[data-column="products"] data')
    assert max(map(len, numbers.all_inner_texts())) <= longest
    found = lab.numbers('td[data-column="products"]')
    pairs = np.array(found).reshape(N, 4, 2)
    np.testing.assert_array_equal(pairs[..., 0], np.tile(q[1], (N, 1)))
    np.testing.assert_array_equal(pairs[..., 1], k)


@pytest.mark.parametrize("rate", [0, 0.4])
def test_the_last_column_of_the_pipeline_is_what_the_output_adds(traced: Any, rate: float) -> None:
    q, k, v = arrays()
    lab = traced(q, k, v, *([qkv.Dropout(rate, seed=3)] if rate else []))
    lab.open("pipeline", step=9, token=1)
    rows = np.array(lab.numbers('tbody td[data-column="output"]')).reshape(N, -1)
    exps = np.exp(k @ q[1] / 2)
    weights = exps / exps.sum()
    factors = rows[:, 0] if rate else np.ones(N)
    np.testing.assert_allclose(rows[:, -4:], (weights * factors)[:, None] * v, rtol=1e-12)
    assert set(factors) <= {0, 1 / (1 - rate)}
