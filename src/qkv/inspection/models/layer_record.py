"""The scores of the heads of one layer, as a record of a model holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from qkv.errors import ArgumentError
from qkv.inspection.heads.head_scores import SCORES, HeadScores, also, kind_of
from qkv.inspection.rendering.counts import counted
from qkv.inspection.weights.lazy_weights import LazyWeights

__all__ = ["LayerRecord"]

Array = NDArray[Any]
Sequences = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecord:
    """One call of one attention layer; its arrays are copies.

    Attributes
    ----------
    index : int
        Place in the order of calls.
    name : str
        Name of the module in its model.
    scores : HeadScores
        Query by query; see there.
    sequences : tuple (str or None, str or None)
        The inputs of the model that queries and keys are: "input_ids", "decoder_input_ids", or None
        for rows that are not tokens.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> record, x = qkv.ModelRecord("one layer"), np.eye(4)[None]
    >>> layer = record.add(x, x, qkv.Causal(), name="layer 0")
    >>> layer, layer.rows["entropy"][0, 0, 0]
    (LayerRecord(0, 'layer 0', 1 head, 1 x 4 queries, 4 keys), np.float64(0.0))
    """

    index: int
    name: str
    scores: HeadScores
    sequences: Sequences = ("input_ids", "input_ids")

    @property
    def num_heads(self) -> int:
        """Query heads of the layer."""
        return int(self.scores.received.shape[1])

    @property
    def rows(self) -> dict[str, Array]:
        """Each score, query by query: `(batch, num_heads, q_len)`.

        NaN for padding. 0 where a query has no such key, as the first token has no previous one;
        the means of `heads()` leave these queries out.
        """
        return {name: row.copy() for name, row in self.scores.rows.items()}

    @property
    def received(self) -> Array:
        """`sum_i w[i, j]`, `(batch, num_heads, kv_len)`, over queries that are not padding."""
        return self.scores.received.copy()

    @property
    def top(self) -> tuple[Array, Array]:
        """Indices and weights of the best keys of each query, `(batch, num_heads, q_len, k)`."""
        return self.scores.top_keys.copy(), self.scores.top_weights.copy()

    @property
    def weights(self) -> LazyWeights:
        """The weights `(batch, num_heads, q_len, kv_len)`, computed where they are sliced.

        Raises
        ------
        ArgumentError
            If the record did not keep this layer's query and key.
        """
        if self.scores.weights is None:
            raise ArgumentError(
                f"layer {self.index} ({self.name}) kept no query and key to compute weights from.",
                action=f'Inspect with keep="weights", or keep=[{self.index}].',
            )
        return self.scores.weights

    def heads(self) -> list[dict[str, Any]]:
        """One row for each head: layer, head, kind, and the mean of each score."""
        means = self.scores.means()
        rows = [{name: float(means[name][h]) for name in SCORES} for h in range(self.num_heads)]
        return [
            {"layer": self.index, "head": h, "kind": kind_of(row), "also": also(row), **row}
            for h, row in enumerate(rows)
        ]

    def __repr__(self) -> str:
        batch, num_heads, q_len = self.scores.rows["entropy"].shape
        kv_len = self.scores.received.shape[-1]
        return (
            f"LayerRecord({self.index}, {self.name!r}, {counted(num_heads, 'head')}, "
            f"{batch} x {counted(q_len, 'query', 'queries')}, {counted(kv_len, 'key')})"
        )
