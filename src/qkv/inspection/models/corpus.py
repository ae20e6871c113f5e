"""Scores of heads over many texts, with confidence intervals.

Of each text, sums over its queries are kept, so that texts may be looked into one by one, in any
order and by any process. They are merged in the order of texts, so that bits repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked
from qkv.errors import ArgumentError
from qkv.inspection.heads.head_scores import SCORES, also, kind_of
from qkv.inspection.heads.head_table import HeadTable, frame_or_table
from qkv.inspection.heads.score_rows import require_score
from qkv.inspection.models.model_record import ModelRecord
from qkv.inspection.rendering.counts import counted

__all__ = ["CorpusRecord", "LayerSums", "quantile", "sums_of"]

Array = NDArray[Any]
_LARGEST = SCORES.index("max_logit")
_ANGLES = 2**17
_MANY = 10**5
"""Texts from which Student's distribution is the normal one to 5 digits."""


class LayerSums(NamedTuple):
    """The scores of one layer in one text.

    Attributes
    ----------
    name : str
        Of the layer.
    sums : float64 array (len(SCORES), num_heads)
        Over batch and counted queries; the largest for `max_logit`.
    counts : int64 array (len(SCORES),)
        How many queries count.
    """

    name: str
    sums: Array
    counts: Array


def sums_of(record: ModelRecord) -> tuple[LayerSums, ...]:
    """What is kept of the record of one text."""
    return tuple(LayerSums(layer.name, *layer.scores.sums()) for layer in record)


@dataclass(frozen=True, slots=True, eq=False)
class _LayerMeans:
    """One layer over all texts: `(len(SCORES), num_heads)` each, and texts that count, by score."""

    name: str
    means: Array
    errors: Array
    texts: Array


@checked
class CorpusRecord:
    """The scores of every head of a model over many texts.

        mean = sum_t s_t / sum_t c_t,   se^2 = n / (n - 1) sum_t (s_t - mean c_t)^2 / (sum_t c_t)^2

    for the sum s_t of a score over the c_t counted queries of text t. The confidence interval is
    `mean -+ q se` with the quantile q of Student's distribution of n - 1 degrees of freedom. Texts
    are what was drawn at random, since queries of one text depend on one another.

    Attributes
    ----------
    model : str
    texts : int
        How many.

    Notes
    -----
    Source: Cochran, "Sampling Techniques" (1977), chapter 6, the ratio estimator.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv import ModelRecord
    >>> def text(seed):
    ...     record, x = ModelRecord("one layer"), np.random.default_rng(seed).random((1, 1, 6, 4))
    ...     record.add(x, x, name="layer 0")
    ...     return sums_of(record)
    >>> corpus = CorpusRecord.of("one layer", lambda: map(text, range(5)))
    >>> corpus
    CorpusRecord('one layer', 5 texts, 1 layer, 1 head)
    >>> low, high = corpus.interval("own")[0][:, 0]
    >>> bool(low < corpus.rows()[0]["own"] < high)
    True
    """

    def __init__(self, model: str, texts: int, layers: tuple[_LayerMeans, ...]) -> None:
        self.model = model
        self.texts = texts
        self._layers = layers

    @classmethod
    def of(cls, model: str, texts: Callable[[], Iterable[tuple[LayerSums, ...]]]) -> CorpusRecord:
        """Merge texts.

        Parameters
        ----------
        model : str
            Its name.
        texts : callable
            Gives the sums of all texts, in their order. It is called twice: deviations from the
            means are added up when the means are known.

        Raises
        ------
        ArgumentError
            If texts do not have the same layers and heads.
        """
        sums, counts, names, number = _totals(texts())
        with np.errstate(divide="ignore", invalid="ignore"):
            means = [s / c[:, None] for s, c in zip(sums, counts, strict=True)]
            squares = [np.zeros_like(s) for s in sums]
            used = [np.zeros(len(SCORES), np.int64) for _ in sums]
            for text in texts():
                for layer, mean, square, n in zip(text, means, squares, used, strict=True):
                    deviation = layer.sums - mean * layer.counts[:, None]
                    square += np.where(layer.counts[:, None] > 0, deviation, 0) ** 2
                    n += layer.counts > 0
            layers = []
            for name, s, mean, c, square, n in zip(
                names, sums, means, counts, squares, used, strict=True
            ):
                free = np.where(n > 1, n - 1, np.nan)
                errors = np.sqrt((n / free)[:, None] * square) / c[:, None]
                mean[_LARGEST] = np.where(c[_LARGEST] > 0, s[_LARGEST], np.nan)
                errors[_LARGEST] = np.nan
                layers.append(_LayerMeans(name, mean, errors, n))
        return cls(model, number, tuple(layers))

    def interval(self, score: str, confidence: float = 0.95) -> list[Array]:
        """Lower and upper bounds of the mean of a score, `(2, num_heads)` for each layer.

        NaN for `max_logit`, which is not a mean, and where fewer than two texts count.

        Raises
        ------
        ArgumentError
            If there is no such score, or `confidence` is not between 0 and 1.
        """
        require_score(score)
        at = SCORES.index(score)
        bounds = []
        for layer in self._layers:
            within = quantile(confidence, int(layer.texts[at]) - 1) * layer.errors[at]
            bounds.append(np.stack([layer.means[at] - within, layer.means[at] + within]))
        return bounds

    def heads(self, confidence: float = 0.95) -> Any:
        """One row for each layer and head.

        Returns
        -------
        pandas.DataFrame or HeadTable
            Columns layer, head, kind and also as of `ModelRecord.heads`; each score but `max_logit`
            with half the width of its confidence interval beside it, as `entropy_within`.
        """
        return frame_or_table(self.rows(confidence))

    def rows(self, confidence: float = 0.95) -> HeadTable:
        """The rows of `heads()`, whether pandas is there or not.

        Raises
        ------
        ArgumentError
            If `confidence` is not between 0 and 1.
        """
        table = HeadTable()
        for index, layer in enumerate(self._layers):
            factors = [quantile(confidence, int(n) - 1) for n in layer.texts]
            for head in range(layer.means.shape[1]):
                means = {s: float(layer.means[n, head]) for n, s in enumerate(SCORES)}
                row: dict[str, Any] = {"layer": index, "head": head}
                row |= {"kind": kind_of(means), "also": also(means)}
                for n, score in enumerate(SCORES):
                    row[score] = means[score]
                    if n != _LARGEST:
                        row[f"{score}_within"] = float(factors[n] * layer.errors[n, head])
                table.append(row)
        return table

    def __repr__(self) -> str:
        heads = sum(layer.means.shape[1] for layer in self._layers)
        return (
            f"CorpusRecord({self.model!r}, {counted(self.texts, 'text')}, "
            f"{counted(len(self._layers), 'layer')}, {counted(heads, 'head')})"
        )


def _totals(
    texts: Iterable[tuple[LayerSums, ...]],
) -> tuple[list[Array], list[Array], list[str], int]:
    """Sums and counts over all texts, names of layers, and the number of texts."""
    sums: list[Array] = []
    counts: list[Array] = []
    names: list[str] = []
    number = 0
    for text in texts:
        if not number:
            names = [layer.name for layer in text]
            sums = [np.zeros(layer.sums.shape) for layer in text]
            counts = [np.zeros(len(SCORES), np.int64) for _ in text]
            for total in sums:
                total[_LARGEST] = -np.inf
        if [layer.name for layer in text] != names or any(
            layer.sums.shape != of.shape for layer, of in zip(text, sums, strict=True)
        ):
            raise ArgumentError(
                f"text {number} ran {counted(len(text), 'layer')}, text 0 {len(names)}, or layers "
                "of other names or heads.",
                action="Call the model in the same way for every text.",
            )
        for layer, total, count in zip(text, sums, counts, strict=True):
            largest = np.fmax(total[_LARGEST], layer.sums[_LARGEST])
            total += layer.sums
            total[_LARGEST] = largest
            count += layer.counts
        number += 1
    return sums, counts, names, number


@lru_cache(maxsize=256)
def quantile(confidence: float, degrees: int) -> float:
    """q with `P(|T| <= q) = confidence` for T of Student's distribution; NaN without degrees.

    With `t = sqrt(f) tan(a)` the density is proportional to `cos(a)**(f - 1)`.

    Raises
    ------
    ArgumentError
        If the confidence is not between 0 and 1.

    Examples
    --------
    >>> round(quantile(0.95, 4), 3)
    2.776
    """
    if not 0 < confidence < 1:
        raise ArgumentError(
            f"confidence={confidence} is not between 0 and 1.", action="Pass 0.95, for example."
        )
    if degrees < 1:
        return math.nan
    free = min(degrees, _MANY)
    angles = np.linspace(0, np.pi / 2, _ANGLES + 1)
    density = np.cos(angles) ** (free - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(confidence, area / area[-1], angles)
    return float(math.sqrt(free) * np.tan(angle))
