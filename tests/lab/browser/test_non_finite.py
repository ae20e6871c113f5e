"""Numbers that JSON has not are shown as what they are: those of a trace, and those of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.lab import open_file, to_html

from .conftest import Lab, served_lab

pytestmark = pytest.mark.browser

N = 5


def arrays() -> tuple[Any, Any, Any]:
    """Arrays with NaN in query 2 of head 0 and all of head 1, and infinite scores of key 4."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, N, 3))
    q[0, 2, 0] = q[1] = np.nan
    k[0, 4] = np.inf, 1, 1
    q[0, 3], q[0, 4] = abs(q[0, 3]), -abs(q[0, 4])
    return q, k, v


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trace of these arrays, and the page of a file of them, which computes itself."""
    folder = tmp_path_factory.mktemp("non-finite")
    np.savez(folder / "a.npz", **dict(zip("qkv", arrays(), strict=True)))
    texts = {
        "trace": qkv.explain(*arrays(), qkv.Causal()).to_html(),
        "file": to_html(open_file(folder / "a.npz")),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize("source", ["trace", "file"])
def test_every_panel_shows_the_numbers_of_an_example(
    opened: Any, pages: dict[str, Path], source: str
) -> None:
    lab = opened(pages[source])
    variants = [qkv.Causal()] if source == "trace" else []
    rows = qkv.explain(*arrays(), *variants).heads[0].rows
    view = {} if source == "trace" else {"ex": "file"}
    for stage, wanted in (
        ("raw", [row.raw for row in rows]),
        ("masked", [row.scores for row in rows]),
        ("weights", [row.softmax.weights for row in rows]),
    ):
        lab.open("heatmap", stage=stage, **view)
        np.testing.assert_allclose(lab.grid(f"{stage} matrix"), np.array(wanted), atol=1e-15)
    np.testing.assert_allclose(lab.grid("Output"), [row.output for row in rows], atol=1e-14)
    for name in ("lse", "entropy"):
        wanted = [getattr(row.softmax, name) for row in rows]
        np.testing.assert_allclose(lab.numbers(f'[data-name="{name}"]'), wanted, atol=1e-14)
    shown = lab.page.inner_text('table[aria-label="weights matrix"]')
    assert "NaN" in shown
    assert not {"nan", "inf", "Infinity", "undefined"} & set(shown.split())
    for token in range(N):
        lab.open("start", token=token, **view)
        lab.open("tiles", token=token, block=2, **view)
        np.testing.assert_allclose(
            lab.numbers('[data-name="tiled"]'), rows[token].output, atol=1e-14
        )
        lab.open("pipeline", token=token, step=8, **view)
        for column, each in (("scores", rows[token].scores), ("exp", rows[token].softmax.exp)):
            found = lab.numbers(f'tbody td[data-column="{column}"]')
            np.testing.assert_allclose(found, each, atol=1e-15)
        says_so = "the sum is NaN" in lab.page.inner_text(".explained")
        assert says_so == np.isnan(rows[token].softmax.row_sum)
    lab.page.click(f'table.growing td[data-column="scores"] >> nth={N - 1}')
    assert lab.errors == []


@pytest.fixture
def of_arrays(chromium: Any, tmp_path: Path) -> Iterator[Lab]:
    """The page of `qkv lab FILE --causal`, which asks Python for each weight."""
    np.savez(tmp_path / "a.npz", **dict(zip("qkv", arrays(), strict=True)))
    with served_lab(chromium, str(tmp_path / "a.npz"), "--causal") as lab:
        yield lab


SUMS = """() => Object.fromEntries([...document.querySelectorAll(".mapblock .sums > div")].map(
    (each) => [each.querySelector("dt").textContent, each.querySelector("dd").textContent]))"""
"""What stands behind a weight, by its name, as it is read."""


def test_messages_about_heads_show_their_numbers(of_arrays: Lab) -> None:
    page = of_arrays.open("inspect", head=0)
    rows = qkv.explain(*arrays(), qkv.Causal()).heads[0].rows
    for query, key, raw, score, lse in (
        (2, 0, "NaN", "NaN", "NaN"), (3, 4, "∞", "−∞", None), (4, 4, "−∞", "−∞", None),
        (1, 0, None, None, None),
    ):  # fmt: skip
        of_arrays.open("inspect", head=0, query=query, kkey=key)
        page.wait_for_selector(f'.readout:has-text("query {query}"):has-text("key {key}") data')
        shown = page.evaluate(SUMS)
        steps = rows[query].softmax
        for name, text, number in (
            ("raw", raw, rows[query].raw[key]), ("scaled", raw, rows[query].scaled[key]),
            ("score", score, rows[query].scores[key]), ("lse", lse, steps.lse),
        ):  # fmt: skip
            if text is None:
                assert float(shown[name].replace("−", "-")) == pytest.approx(number, rel=1e-6)
            else:
                assert shown[name] == text
        [weight] = of_arrays.numbers('.readout [data-name="weight"]')
        np.testing.assert_allclose(weight, steps.weights[key], rtol=1e-12)
        page.wait_for_function(
            f"() => document.querySelector('.field input[type=number]').value === '{query}'"
        )
        [entropy] = of_arrays.numbers('[data-name="head-entropy"]')
        np.testing.assert_allclose(entropy, steps.entropy, atol=1e-12)
    said = page.inner_text("main .lead")
    assert "query holds NaN first at head 0, row 2, dim 0" in said
    assert "Means are those of the other rows." in said
    entropies = of_arrays.grid("entropy of each head")[0]
    assert np.isfinite(entropies[0])
    assert np.isnan(entropies[1])
    _, of_head_1 = of_arrays.table("All heads in numbers")
    assert set(of_head_1[2:]) == {"NaN"}
    assert of_arrays.errors == []
