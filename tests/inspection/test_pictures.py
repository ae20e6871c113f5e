"""Pictures show the numbers that they are of, and are the same file each time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

matplotlib = pytest.importorskip("matplotlib", reason="the extra plot is not installed")
from matplotlib.figure import Figure  # noqa: E402

import qkv  # noqa: E402
from qkv.inspection.models.model_record import ModelRecord  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 50, 8))
STARTS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arrays of all images that are drawn."""
    found: list[Any] = []
    save = Figure.savefig

    def keep(self: Any, *args: Any, **keywords: Any) -> None:
        found.append(np.ma.filled(self.axes[0].images[0].get_array(), np.nan))
        save(self, *args, **keywords)

    monkeypatch.setattr(Figure, "savefig", keep)
    return found


def dense(q: Any, k: Any, mask: Any) -> Any:
    scores = np.where(mask, q @ k.T / np.sqrt(q.shape[-1]), -np.inf)
    exp = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def test_weights_of_one_head(images: list[Any], tmp_path: Path) -> None:
    record = qkv.inspect(X, X, X, qkv.Causal())
    record.plot(tmp_path / "a.png", head=1)
    np.testing.assert_allclose(images[0], dense(X[1], X[1], np.tri(50, dtype=bool)), atol=1e-12)


def test_long_rows_show_the_largest_of_blocks(
    images: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.inspection.records.record_pictures.LONGEST", 16)
    qkv.inspect(X[0], X[0], X[0]).plot(tmp_path / "a.png")
    exact = dense(X[0], X[0], True)
    blocks = [[exact[i : i + 4, j : j + 4].max() for j in range(0, 50, 4)] for i in range(0, 50, 4)]
    np.testing.assert_allclose(images[0], blocks, atol=1e-6)


def test_progress_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told to the caller, or drawn in a terminal; once it is whole."""
    monkeypatch.setattr("qkv.inspection.weights.weight_blocks.PAIRS", 32)
    told: list[tuple[int, int]] = []
    record = qkv.inspect(X, X, X, qkv.Causal(), progress=lambda *share: told.append(share))
    alone = qkv.inspect(X, X, X, qkv.Causal())
    axes = [Figure().subplots() for _ in range(2)]
    record.plot(ax=axes[0], head=1)
    # 50 queries and keys, at most 1 x 32 pairs at a time.
    assert told == [(done, 100) for done in range(1, 101)]

    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80)
    monkeypatch.setattr("qkv.inspection.rendering.progress_bar.BAR_AFTER", 0.0)
    monkeypatch.setattr("qkv.inspection.rendering.progress_bar.Console", lambda stderr: console)
    alone.plot(ax=axes[1], head=1)
    assert "reading the weights" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    first, second = (ax.images[0].get_array() for ax in axes)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, dense(X[1], X[1], np.tri(50, dtype=bool)), atol=1e-6)


@pytest.mark.parametrize("count", [6, 106])
def test_a_picture_in_axes_of_the_caller(count: int) -> None:
    """No file is written; some of many names are shown, and the axis says of how many."""
    from matplotlib.figure import Figure

    x = RNG.normal(size=(count, 4))
    ax = Figure().subplots()
    tokens = [f"token {i}" for i in range(count)]
    assert qkv.inspect(x, x, x).plot(tokens=tokens, ax=ax) is ax
    np.testing.assert_allclose(ax.images[0].get_array(), dense(x, x, True), atol=1e-12)
    names = [label.get_text() for label in ax.get_xticklabels()]
    shown = {int(place): name for place, name in zip(ax.get_xticks(), names, strict=True)}
    assert all(shown[place] == tokens[place] for place in shown)
    label = "key" if count == 6 else "key (36 of 106 are named)"
    assert (len(shown), ax.get_xlabel()) == (min(count, 36), label)
    assert ax.images[0].cmap(1.0)[:3] == pytest.approx((22 / 255, 73 / 255, 138 / 255))
    with pytest.raises(qkv.ArgumentError, match="and both are given"):
        qkv.inspect(x, x, x).plot("a.png", ax=ax)


def test_a_picture_of_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot.switch_backend("agg")
    record = ModelRecord("one layer")
    record.add(X[None], X[None], qkv.Causal(), name="0")
    axes = record.plot(score="sink")
    assert pyplot.fignum_exists(axes.figure.number)
    assert axes.get_title() == "one layer"
    assert axes.images[0].cmap(1.0)[:3] == pytest.approx((22 / 255, 73 / 255, 138 / 255))
    pyplot.close(axes.figure)


def test_scores_of_every_head(images: list[Any], tmp_path: Path) -> None:
    record = ModelRecord("a $model$ of two layers")
    record.add(X[None], X[None], qkv.Causal(), name="0")
    record.add(X[None, :1], X[None, :1], qkv.Causal(), name="1")
    record.plot(tmp_path / "a.svg", "sink")
    exact = [[dense(x, x, np.tri(50, dtype=bool))[:, 0].mean() for x in X]]
    np.testing.assert_allclose(images[0], [exact[0], [exact[0][0], np.nan]], rtol=1e-6)
    with pytest.raises(qkv.ArgumentError, match="no score 'x'"):
        record.plot(tmp_path / "b.svg", "x")


def test_the_tiles_of_a_causal_window(images: list[Any], tmp_path: Path) -> None:
    x = RNG.normal(size=(700, 8)).astype(np.float32)
    variants = qkv.Causal(), qkv.SlidingWindow(390, 0)
    record = qkv.inspect(x, x, x, *variants, backend="blocked")
    plan = qkv.plan(x, x, x, *variants, backend="blocked")
    block_q, block_kv = plan.block_q, plan.block_kv
    record.plot_tiles(tmp_path / "a.svg")
    i, j = np.arange(700)[:, None], np.arange(700)
    mask = (j <= i) & (j >= i - 390)
    parts = [
        [mask[a : a + block_q, b : b + block_kv] for b in range(0, 700, block_kv)]
        for a in range(0, 700, block_q)
    ]
    expected = [[2 if p.all() else 1 if p.any() else 0 for p in line] for line in parts]
    np.testing.assert_array_equal(images[0], expected)


@pytest.mark.parametrize("count", [0, 2, 9])
def test_tokens_that_are_not_one_for_each_key_are_refused(count: int, tmp_path: Path) -> None:
    """A picture named the first keys alone, or keys that are not there; so did a page."""
    x = np.eye(6)
    record, tokens = qkv.inspect(x, x, x), ["word"] * count
    path = tmp_path / "picture.svg"
    for use in (record.to_html, record.summary, lambda names: record.plot(path, tokens=names)):
        with pytest.raises(qkv.ArgumentError, match=f"there are {count} tokens for 6 keys"):
            use(tokens)
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", STARTS)
def test_the_same_picture_is_the_same_file(ending: str, tmp_path: Path) -> None:
    record = qkv.inspect(X[:, :6], X[:, :6], X[:, :6])
    hostile = ["$x$", "\x1b[31m", "<b>", "\\frac", "x" * 100, "é"]
    for name in ("a", "b"):
        record.plot(tmp_path / f"{name}.{ending}", tokens=hostile)
    data = (tmp_path / f"a.{ending}").read_bytes()
    assert data == (tmp_path / f"b.{ending}").read_bytes()
    assert data.startswith(STARTS[ending])


def test_pictures_that_cannot_be(tmp_path: Path) -> None:
    record = qkv.inspect(X, X, X)
    with pytest.raises(qkv.ArgumentError, match=r"does not end in \.pdf, \.png, \.svg"):
        record.plot(tmp_path / "a.txt")
    for head, batch in ((2, 0), (0, 1), (-1, 0)):
        with pytest.raises(qkv.ArgumentError, match="nothing to draw"):
            record.plot(tmp_path / "a.png", head, batch)
    assert list(tmp_path.iterdir()) == []
