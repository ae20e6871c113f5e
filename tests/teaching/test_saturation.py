"""The curve of the divisor against the goldens, torch's autograd and the variance of theory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import qkv
from qkv import ArgumentError, FileError, UnsupportedError

GOLDEN = json.loads(
    Path(__file__).parents[1].joinpath("golden", "goldens.json").read_text(encoding="utf-8")
)["saturation"]


def test_saturation_of_the_goldens() -> None:
    curve = qkv.scaling_curve()
    assert [point.d_k for point in curve.points[::2]] == [2**power for power in range(11)]
    plain = {point.d_k: point for point in curve.points if not point.scaled}
    # The goldens are of normal numbers times sqrt(d_k), which dot products of longer rows are.
    wanted = [(plain[int(d_k)], row) for d_k, row in GOLDEN["unscaled"].items() if int(d_k) >= 64]
    scaled = [point for point in curve.points if point.scaled and point.d_k >= 64]
    wanted += [(point, GOLDEN["scaled_any_d_k"]) for point in scaled]
    assert len(wanted) == 4 + 5
    for point, row in wanted:
        assert point.max_weight == pytest.approx(row["max_weight"], abs=0.003)
        assert point.entropy_nats == pytest.approx(row["entropy_nats"], abs=0.003)
        assert point.jacobian_trace == pytest.approx(row["gradient_trace"], abs=0.003)
    for point in curve.points:
        # Five standard deviations of a variance estimated from 200,000 rows of five scores. Short
        # rows have the heaviest tails, and scores of one row share the length of its query.
        expected = 1 if point.scaled else point.d_k
        spread = ((2 + 14 / point.d_k) / 1_000_000) ** 0.5
        assert point.score_variance == pytest.approx(expected, rel=5 * spread)


@pytest.mark.parametrize("d_k", [1, 2, 4, 16])
def test_scores_are_dot_products_of_normal_vectors(d_k: int) -> None:
    generator = torch.Generator().manual_seed(d_k)
    query = torch.randn(200_000, d_k, 1, generator=generator)
    products = (torch.randn(200_000, 5, d_k, generator=generator) @ query)[..., 0]
    for point in qkv.scaling_curve([d_k]).points:
        divisor = d_k**0.5 if point.scaled else 1
        weights = (products / divisor).softmax(-1).double()
        entropy = torch.special.entr(weights).sum(-1).mean()
        trace = (weights * (1 - weights)).sum(-1).mean()
        # Standard errors are 0.0006 at most.
        assert point.score_variance == pytest.approx(float((products / divisor).var()), rel=0.03)
        assert point.max_weight == pytest.approx(float(weights.amax(-1).mean()), abs=0.003)
        assert point.entropy_nats == pytest.approx(float(entropy), abs=0.005)
        assert point.jacobian_trace == pytest.approx(float(trace), abs=0.003)


def test_gradients_are_those_of_autograd() -> None:
    import numpy as np

    draws, d_k, seed = 40, 16, 3
    plain, _ = qkv.scaling_curve([d_k], draws=draws, seed=seed).points
    normal = np.random.default_rng(seed).normal(size=(draws, 5))
    lengths = np.random.default_rng([seed, d_k, 1]).chisquare(d_k, draws) ** 0.5
    traces, runners = [], []
    for row in torch.from_numpy(normal * lengths[:, None]):
        jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(0), row).diagonal()
        traces.append(jacobian.sum())
        runners.append(jacobian[row.argsort()[-2]])
    assert plain.jacobian_trace == pytest.approx(float(sum(traces)) / draws, rel=1e-10)
    assert plain.runner_up_gradient == pytest.approx(float(sum(runners)) / draws, rel=1e-10)


def test_a_seed_gives_the_same_curve() -> None:
    few = {"draws": 1000, "seed": 7}
    assert qkv.scaling_curve([8], **few) == qkv.scaling_curve([8], **few)
    assert qkv.scaling_curve([8], **few) != qkv.scaling_curve([8], draws=1000, seed=8)
    json.loads(qkv.scaling_curve([8], **few).to_json())


@pytest.mark.sampled("ending", ["svg", "png", "pdf"], one_in=3)
def test_a_picture(ending: str, tmp_path: Path) -> None:
    curve = qkv.scaling_curve([1, 64], draws=100)
    curve.plot(tmp_path / f"curve.{ending}")
    data = (tmp_path / f"curve.{ending}").read_bytes()
    assert {"svg": b"<svg", "png": b"PNG", "pdf": b"%PDF"}[ending] in data
    if ending == "svg":
        curve.plot(tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_bytes() == data


def test_pictures_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = qkv.scaling_curve([1], draws=10)
    with pytest.raises(ArgumentError, match=r"does not end in \.pdf, \.png, \.svg"):
        curve.plot(tmp_path / "curve.txt")
    with pytest.raises(FileError, match="cannot be written"):
        curve.plot(tmp_path / "nowhere" / "curve.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="matplotlib, which is not installed"):
        curve.plot(tmp_path / "curve.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"d_k": [0]}, r"d_k\[0\]=0 is not a positive integer"),
        ({"d_k": [4.5]}, r"d_k\[0\]=4.5 is not a positive integer"),
        ({"d_k": [True]}, r"d_k\[0\]=True is not a positive integer"),
        ({"draws": 0}, "draws=0 is not a positive integer"),
        ({"draws": 10**9}, "draws=1000000000 is not at most 10000000"),
        ({"seed": -1}, "seed=-1 is not a whole number of 0 or more"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        qkv.scaling_curve(**{"draws": 10, **arguments})
