"""Scores of the heads of one layer, query by query, and their means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError
from qkv.inspection.heads.kept_inputs import KeptInputs
from qkv.inspection.weights.lazy_weights import LazyWeights

__all__ = ["SCORES", "HeadScores", "require_score"]

Array = NDArray[Any]

SCORES = (
    "entropy",
    "sink",
    "learned_sink",
    "previous",
    "own",
    "duplicate",
    "induction",
    "distance",
    "max_logit",
)


def require_score(score: str) -> None:
    """Refuse what is none of `SCORES`.

    Raises
    ------
    ArgumentError
        With their names.
    """
    if score not in SCORES:
        raise ArgumentError(
            f"there is no score {shown(score)}.",
            [("scores", ", ".join(SCORES))],
            "Choose one of these.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeadScores:
    """The scores of the heads of one layer; nobody can write to its arrays.

    Attributes
    ----------
    rows : dict of str to array (batch, num_heads, q_len)
        Each of `SCORES`, query by query; NaN where it does not apply (the query is padding, no
        tokens are known, or keys are of another sequence than the queries).
    counted : dict of str to boolean array (batch, q_len)
        The queries that `means` averages over: no padding, and none that no head may use a key of;
        for previous, own, duplicate and induction only queries that have such a key.
    received : array (batch, num_heads, kv_len)
        Weight that each key takes in all, from queries that are not padding.
    top_keys, top_weights : array (batch, num_heads, q_len, top)
        The rows of the key array with the largest weights, falling; padded with -1 and 0. Where a
        cache has dropped keys, row 0 is the oldest that it holds.
    weights : LazyWeights (batch, num_heads, q_len, kv_len) or None
        Holds query and key; rows of padding are 0.
    inputs : KeptInputs or None
        What the weights come from, as it can be kept in a file.
    """

    rows: dict[str, Array]
    counted: dict[str, Array]
    received: Array
    top_keys: Array
    top_weights: Array
    weights: LazyWeights | None
    inputs: KeptInputs | None = None

    def __post_init__(self) -> None:
        for array in (
            *self.rows.values(), *self.counted.values(),
            self.received, self.top_keys, self.top_weights,
        ):  # fmt: skip
            array.setflags(write=False)

    def means(self) -> dict[str, Array]:
        """Each score, `(num_heads,)`: the mean over batch and counted queries.

        The largest for `max_logit`; NaN where no query counts.
        """
        sums, counts = self.sums()
        with np.errstate(divide="ignore", invalid="ignore"):
            means = dict(zip(SCORES, sums / counts[:, None], strict=True))
        at = SCORES.index("max_logit")
        means["max_logit"] = sums[at] if counts[at] else np.full(sums.shape[1], np.nan)
        return means

    def sums(self) -> tuple[Array, Array]:
        """What means over several texts are made of.

        Returns
        -------
        (float64 array (len(SCORES), num_heads), int64 array (len(SCORES),))
            Each score, added up over batch and counted queries (the largest for `max_logit`, -inf
            where no query counts), and how many queries count.
        """
        sums, counts = [], []
        for name in SCORES:
            chosen = np.swapaxes(self.rows[name], 0, 1)[:, self.counted[name]].astype(np.float64)
            largest = name == "max_logit"
            sums.append(chosen.max(axis=1, initial=-np.inf) if largest else chosen.sum(axis=1))
            counts.append(chosen.shape[1])
        return np.stack(sums), np.array(counts)
