"""The best keys of the queries that a page shows, and how little is computed for a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cli import main
from qkv.inspection.weights.replay import BLOCK_KV, BLOCK_Q
from qkv.lab.session import Session
from qkv.lab.sources import heads
from qkv.lab.sources.heads import best_keys
from qkv.lab.sources.source import source_of
from qkv.problem.scores import Scores

LENGTH = 2 * BLOCK_KV + 100
QUERIES = (3, BLOCK_Q - 1, BLOCK_Q, 700)
SINK = 0.5


def arrays(seed: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(size=(3, 2, LENGTH, 4)).astype(np.float32))


def by_definition(
    q: np.ndarray, k: np.ndarray, allowed: np.ndarray, sink: float
) -> tuple[np.ndarray, np.ndarray]:
    """The four largest weights of each row, in float64; -1 and 0 where there are fewer."""
    with np.errstate(all="ignore"):
        scores = np.where(allowed, q.astype(float) @ k.astype(float).T / 2, -np.inf)
        exp = np.exp(scores)
        weights = exp / (exp.sum(axis=1, keepdims=True) + np.exp(sink))
    weights = np.nan_to_num(weights)
    order = np.argsort(-weights, axis=1, kind="stable")[:, :4]
    best = np.take_along_axis(weights, order, axis=1)
    return np.where(best > 0, order, -1), best


@pytest.mark.parametrize("most_exact", [0, 1 << 13], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["all", "causal", "window", "later", "sinks", "nan"])
def test_best_keys_are_those_of_the_definition(
    name: str, most_exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "EXACT_KEYS", most_exact)
    monkeypatch.setattr(heads, "_ROWS", 300 * LENGTH)
    q, k, v = arrays(1)
    i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    variants: list[Any] = [qkv.Causal()] if name in ("causal", "sinks", "nan") else []
    allowed, sink = np.ones((LENGTH, LENGTH), bool) if name == "all" else i >= j, -np.inf
    if name == "window":
        # The first queries see fewer than four keys.
        variants, allowed = [qkv.SlidingWindow(1, 0)], (i >= j) & (i - 1 <= j)
    if name == "later":
        # Many queries see no key at all.
        mask = qkv.Mask(j > i + 2 * BLOCK_KV)
        variants, allowed = [mask], j > i + 2 * BLOCK_KV
    if name == "sinks":
        variants, sink = [*variants, qkv.Sinks(np.full(2, SINK, np.float32))], SINK
    if name == "nan":
        q[1, 600] = np.nan
    record = qkv.inspect(q, k, v, *variants)
    keys, weights = best_keys(record.weights.replay, 1, 2, 900)
    expected_keys, expected = by_definition(q[1, 2:900], k[1], allowed[2:900], sink)
    np.testing.assert_allclose(weights, expected, rtol=2e-6, atol=1e-12)
    clear = np.diff(expected, axis=1, append=0) < -1e-6
    np.testing.assert_array_equal(keys[clear], expected_keys[clear])
    np.testing.assert_array_equal(keys < 0, expected_keys < 0)


def test_of_equal_weights_the_lower_key_comes_first() -> None:
    zeros = np.zeros((1, 2000, 4), np.float32)
    record = qkv.inspect(zeros, zeros, zeros, qkv.Causal())
    keys, weights = best_keys(record.weights.replay, 0, 1500, 1501)
    assert keys.tolist() == [[0, 1, 2, 3]]
    np.testing.assert_allclose(weights, 1 / 1501, rtol=1e-6)


def test_keys_that_a_mask_hides_from_all_queries_are_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = []
    tile = Scores.tile

    def counted(self: Scores, batch: int, head: int, q_rows: Any, kv_rows: Any, *kind: Any) -> Any:
        scores = tile(self, batch, head, q_rows, kv_rows, *kind)
        pairs.append(scores.size)
        return scores

    record = qkv.inspect(*arrays(2), qkv.Causal())
    monkeypatch.setattr(Scores, "tile", counted)
    session = Session(source_of(record))
    session.answer("head", {"layer": 0, "head": 1, "first": 0, "count": 512})
    assert sum(pairs) == 512 * BLOCK_KV


def test_a_page_of_arrays_takes_one_pass_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text and the page show one record, whose output and best keys are computed once."""
    from qkv.backends.cpu import CpuBackend

    seen: list[str] = []

    def count(name: str) -> None:
        method = getattr(CpuBackend, name)

        def counted(self: Any, problem: Any, *rest: Any, **options: Any) -> Any:
            seen.append(name) if problem.spec.q_len == LENGTH else None
            return method(self, problem, *rest, **options)

        monkeypatch.setattr(CpuBackend, name, counted)

    count("run_with_statistics")
    count("top")
    q, k, v = arrays(3)
    np.savez(tmp_path / "a.npz", q=q, k=k, v=v)
    command = ["inspect", str(tmp_path / "a.npz"), "--causal", "--html", str(tmp_path / "a.html")]
    assert main(command) == 0
    assert "Written" in capsys.readouterr().out
    assert seen == ["run_with_statistics", "top"]
