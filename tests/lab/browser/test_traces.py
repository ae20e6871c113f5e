"""What the page says of a trace of Python: its rows have their names."""

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
