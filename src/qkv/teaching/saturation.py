"""Why scores are divided by sqrt(d_k): softmax of dot products, whose variance grows with d_k."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv._dynamo import ends_graph
from qkv.arguments.declarations import Size, Whole, checked, checked_size

__all__ = ["ScalingCurve", "ScalingPoint", "scaling_curve"]

_KEYS = 5
"""Scores in each row; the example of five tokens that mechanisms share has as many keys."""

_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """Means over all draws for one d_k, with the divisor or without.

    Attributes
    ----------
    d_k : int
        Length of a query row.
    scaled : bool
        Whether scores are divided by `sqrt(d_k)`.
    score_variance : float
        Variance of all scores: about d_k, divided about 1.
    max_weight : float
        Largest weight of a row.
    entropy_nats : float
        `-sum w log w` of a row; log(5) = 1.609 for five equal weights.
    jacobian_trace : float
        `sum w (1 - w)`, the trace of the softmax's Jacobian: how much gradient passes at all.
    runner_up_gradient : float
        `w (1 - w)` of the second largest score: how much reaches a key that is nearly chosen.

    Examples
    --------
    >>> import qkv
    >>> plain, scaled = qkv.scaling_curve([4], draws=10).points
    >>> plain.score_variance == 4 * scaled.score_variance
    True
    """

    d_k: int
    scaled: bool
    score_variance: float
    max_weight: float
    entropy_nats: float
    jacobian_trace: float
    runner_up_gradient: float


@checked
@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """The result of `scaling_curve`.

    Attributes
    ----------
    draws, seed : int
        Rows of scores, and their seed.
    points : tuple of ScalingPoint
        For each d_k, first without the divisor, then with it.

    Examples
    --------
    >>> import qkv
    >>> [point.scaled for point in qkv.scaling_curve([2, 4], draws=10).points]
    [False, True, False, True]
    """

    draws: int
    seed: int
    points: tuple[ScalingPoint, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Numbers for JSON."""
        return {
            "draws": self.draws,
            "seed": self.seed,
            "points": [asdict(point) for point in self.points],
        }

    def to_json(self) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curves, with the divisor and without, to a file.

        The path and the errors are those of `qkv.Record.plot`.
        """
        from qkv.inspection.rendering.pictures import save_picture

        save_picture(path, (11, 6), self._draw)

    def _draw(self, figure: Any) -> None:
        shown = {
            "score_variance": "variance of scores",
            "max_weight": "largest weight",
            "entropy_nats": "entropy, nats",
            "jacobian_trace": "trace of the Jacobian",
            "runner_up_gradient": "gradient through the runner-up",
        }
        for axes, (name, title) in zip(figure.subplots(2, 3).flat, shown.items(), strict=False):
            for scaled, label in ((False, "q . k"), (True, "q . k / sqrt(d_k)")):
                some = [point for point in self.points if point.scaled is scaled]
                values = [getattr(point, name) for point in some]
                axes.plot([point.d_k for point in some], values, marker=".", label=label)
            axes.set_xscale("log", base=2)
            axes.set_title(title)
            axes.set_xlabel("d_k")
        figure.axes[0].set_yscale("log", base=2)
        figure.axes[-1].axis("off")
        figure.axes[-1].legend(*figure.axes[0].get_legend_handles_labels(), loc="center")


_MOST_DRAWS = 10**7
"""Draws take 40 bytes each while one d_k is computed."""


@ends_graph
@checked
def scaling_curve(
    d_k: Sequence[Size] = _LENGTHS,
    *,
    draws: Size = 200_000,
    seed: Whole = 0,
) -> ScalingCurve:
    """Softmax statistics of random scores for each d_k, with and without the divisor.

    A row of scores is `q . k_j` for one query and five keys of d_k independent unit-normal numbers.
    Given q, these are five independent normal numbers with standard deviation |q|, and |q|^2 is
    chi-squared with d_k degrees of freedom, so they are drawn as that: five unit-normal numbers,
    the same for every d_k, times |q|. With few numbers |q| varies much, and divided scores are
    small more often than large: their largest weight grows from 0.40 at d_k = 1 to 0.46.

    Parameters
    ----------
    d_k : sequence of int
        Lengths of a query row; 1, 2, 4, ..., 1024 by default.
    draws : int
        Rows of five scores.
    seed : int

    Returns
    -------
    ScalingCurve

    Raises
    ------
    ArgumentError
        If a number is not a positive integer, or more than 10,000,000 draws, or the seed is
        negative.

    Notes
    -----
    Source: Vaswani et al. (2017), section 3.2.1, footnote 4. Cost: `O(draws)` for each d_k.

    Examples
    --------
    >>> import qkv
    >>> plain, scaled = qkv.scaling_curve([64], draws=20_000).points
    >>> round(plain.max_weight, 1), round(scaled.max_weight, 1)
    (0.9, 0.5)
    """
    checked_size("draws", draws, 1, _MOST_DRAWS)
    # Lengths are positive, so that the order of the five stays.
    normal = np.sort(np.random.default_rng(seed).normal(size=(draws, _KEYS)), axis=1).T.copy()
    points = []
    for length in d_k:
        checked_size("d_k", length)
        scores = normal * _query_lengths(length, draws, seed)
        points += [
            ScalingPoint(length, scaled, float(each.var()), *_means(each))
            for scaled, each in ((False, scores), (True, scores / np.sqrt(length)))
        ]
    return ScalingCurve(draws, seed, tuple(points))


def _query_lengths(d_k: int, draws: int, seed: int) -> NDArray[np.float64]:
    """Lengths of rows of d_k unit-normal numbers, without the rows."""
    return np.sqrt(np.random.default_rng([seed, d_k, 1]).chisquare(d_k, draws))


def _means(scores: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """The last four fields of a `ScalingPoint`, of scores `(5, draws)` that rise in each draw."""
    shifted = scores - scores[-1]
    weights = np.exp(shifted)
    row_sum = weights.sum(axis=0)
    weights /= row_sum
    # -sum w log w, with log w = shifted - log(row_sum).
    entropy = np.log(row_sum) - np.einsum("ij,ij->j", weights, shifted)
    gradient = weights * (1 - weights)
    means = weights[-1], entropy, gradient.sum(axis=0), gradient[-2]
    a, b, c, d = (float(each.mean()) for each in means)
    return a, b, c, d
