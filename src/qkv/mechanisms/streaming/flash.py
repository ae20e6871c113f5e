"""Flash attention: the softmax as a stream over tiles of keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.errors import ArgumentError
from qkv.inspection.explain import selected_indices
from qkv.inspection.streaming import stream
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.attention import one_sequence
from qkv.mechanisms.base.explanation import Explanation, Line, Step, number, numbers
from qkv.mechanisms.base.mechanism import positive_integers, token_names
from qkv.mechanisms.base.namespace import values
from qkv.mechanisms.base.operations import item_bytes
from qkv.mechanisms.base.projected import Options, ProjectedAttention

__all__ = ["Flash", "FlashTile"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class FlashTile:
    """The state of the queries of one tile after it has met one tile of keys.

    Attributes
    ----------
    head : int
        Query head.
    q_rows, kv_rows : slice
        Which queries and which keys.
    scores : array (queries, keys)
        -inf where a mask forbids the pair.
    row_max : array (queries,)
        The largest score so far.
    correction : array (queries,)
        `exp(old row_max - row_max)`: what earlier sums are multiplied by.
    row_sum : array (queries,)
        `sum exp(score - row_max)` so far.
    accumulator : array (queries, head_dim)
        `sum exp(score - row_max) v` so far; divided by row_sum it is the output.
    """

    head: int
    q_rows: slice
    kv_rows: slice
    scores: Array
    row_max: Array
    correction: Array
    row_sum: Array
    accumulator: Array


class Flash(ProjectedAttention):
    """Exact attention that never holds the scores: keys stream by in tiles, sums are corrected.

        m' = max(m, max s),   a = exp(m - m')
        l' = a l + sum exp(s - m'),   o' = a o + exp(s - m') v,   output = o / l

    Algebra makes the result that of the softmax over whole rows; additions come in another order,
    so the last bits may differ. `qkv.attention` computes this way; `tiles` shows how.

    Parameters
    ----------
    embed_dim, num_heads : int
    block_q, block_kv : int
        Rows of a tile in `tiles`, `explain` and `cost`; `qkv.attention` chooses its own.
    **options
        As for `ProjectedAttention`.

    Raises
    ------
    ArgumentError
        If a size is not a positive integer.

    Notes
    -----
    The operations of full attention and a few for each tile; memory beyond the output does not grow
    with n. Keys and values are read once for each tile of queries. Sources: Dao et al.,
    "FlashAttention" (2022), algorithm 1; Milakov and Gimelshein (2018) for the corrected sums.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Flash
    >>> layer, x = Flash(4, block_q=4, block_kv=2, out_proj=False), np.eye(4)
    >>> *_, last = layer.tiles(x)
    >>> bool(np.allclose(last.accumulator / last.row_sum[:, None], layer(x)))
    True
    """

    name = "flash"
    paper = "Dao et al., FlashAttention (2022), algorithm 1"
    formula = "o = a o + exp(s - m) v, l = a l + sum exp(s - m), a = exp(m_old - m), out = o / l"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        block_q: int = 128,
        block_kv: int = 128,
        **options: Unpack[Options],
    ) -> None:
        positive_integers(block_q=block_q, block_kv=block_kv)
        self.block_q, self.block_kv = block_q, block_kv
        super().__init__(embed_dim, num_heads, **options)

    def tiles(self, x: Any) -> Iterator[FlashTile]:
        """The algorithm tile by tile, in float64, for every head of one sequence.

        Parameters
        ----------
        x : array (n, embed_dim)

        Yields
        ------
        Tile
            For each tile of queries, one for each tile of keys in which a pair is allowed.
        """
        look, rows = self.detached(), values(x, "x").astype(np.float64)
        one_sequence(rows)
        q, k, v = look.heads(rows, rows, rows)
        trace = qkv.explain(q, k, v, *look.variants(q, k), scale=self.scale)
        for head in trace.heads:
            scores = np.stack([row.scores for row in head.rows])
            for first in range(0, len(rows), self.block_q):
                yield from self._stream(head.head, scores, head.value, first)

    def _stream(self, head: int, scores: Array, value: Array, first: int) -> Iterator[FlashTile]:
        """One tile of queries against the tiles of keys in which a pair is allowed."""
        q_rows = slice(first, min(first + self.block_q, len(scores)))
        for state in stream(scores[q_rows], value, self.block_kv):
            yield FlashTile(
                head,
                q_rows,
                slice(state.first, state.stop),
                state.scores,
                state.row_max,
                state.rescale,
                state.row_sum,
                state.accumulator,
            )

    def explain(
        self,
        x: Any,
        /,
        tokens: Sequence[str] | None = None,
        index: int = 0,
        *,
        key: Any = None,
        value: Any = None,
        kv_tokens: Sequence[str] | None = None,
    ) -> Explanation:
        """The stream of one token of `x` (n, embed_dim), one step for each tile of keys.

        Parameters
        ----------
        x : array (n, embed_dim)
        tokens : sequence of str (n,), optional
            Names of the rows; their numbers by default.
        index : int
            The token whose output is calculated, the first by default.

        Raises
        ------
        ArgumentError
            If a key or value is given.
        """
        if key is not None or value is not None:
            raise ArgumentError(
                "the tiles are those of one sequence.", action="Pass x alone, or use Cross."
            )
        names = token_names(tokens, len(x))
        row = int(selected_indices(index, len(names), "index", "tokens")[0])
        steps: list[Step] = []
        output: list[float] = []
        last: FlashTile | None = None
        for tile in self.tiles(x):
            if not tile.q_rows.start <= row < tile.q_rows.stop:
                continue
            i = row - tile.q_rows.start
            if last is not None and last.head != tile.head:
                output += _divide(last, i, steps)
            steps.append(_tile_step(tile, i, names))
            last = tile
        if last is not None:
            output += _divide(last, row - last.q_rows.start, steps)
        if self.out_proj:
            look = self.detached()
            out = look.linear("out_proj", np.array([output]))[0].tolist()
            steps.append(Step("Project back", "W_o o", (Line("out", out),)))
        return self.explanation(steps, names[row])

    def cost(self, n: int, batch: int = 1, dtype: str = "float32") -> Ledger:
        """Operations, parameters and bytes for `batch` sequences of `n` tokens.

        To those of full attention come, for each row and tile of keys, one exp and the corrections;
        keys and values are read again for each tile of queries.
        """
        found = super().cost(n, batch, dtype)
        tokens, d, h, g = symbols(n=n, d=self.head_dim, h=self.num_heads, g=self.num_kv_heads)
        b = 1 if batch == 1 else Count(batch, "b")
        tiles = Count(-(-n // self.block_kv), "tiles")
        more = step(
            "correction",
            compare=tokens * tiles,
            subtract=tokens * tiles,
            exp=tokens * tiles,
            multiply=tokens * tiles * (d + 1),
            add=tokens * tiles * (d + 1),
        )
        again = Count(-(-n // self.block_q) - 1, "q_tiles - 1")
        heads: int = b * h
        size = item_bytes(dtype)
        found += more * heads
        return found + Ledger(bytes_read=again * (2 * b * tokens * g * d * size))

    @classmethod
    def example(cls) -> Self:
        """Tiles of two keys, so that the five tokens take three."""
        return cls.for_example(block_q=5, block_kv=2)


def _tile_step(tile: FlashTile, i: int, names: Sequence[str]) -> Step:
    keys = names[tile.kv_rows]
    lines = [Line(f"s of {name}", score) for name, score in zip(keys, tile.scores[i], strict=True)]
    lines += [
        Line("m", tile.row_max[i]),
        Line("a", tile.correction[i]),
        Line("l", tile.row_sum[i]),
        Line("o", tile.accumulator[i].tolist()),
    ]
    title = f"Head {tile.head}, keys {tile.kv_rows.start} to {tile.kv_rows.stop - 1}"
    return Step(title, "m = max(m, s), l = a l + sum exp(s - m), o = a o + exp(s - m) v",
                tuple(lines))  # fmt: skip


def _divide(tile: FlashTile, i: int, steps: list[Step]) -> list[float]:
    """Add the step that divides by the sum, and return the output of the head."""
    row: list[float] = (tile.accumulator[i] / tile.row_sum[i]).tolist()
    work = f"{numbers(tile.accumulator[i])} / {number(float(tile.row_sum[i]))}"
    steps.append(Step(f"Head {tile.head}, divide", "out = o / l", (Line("out", row, work),)))
    return row
