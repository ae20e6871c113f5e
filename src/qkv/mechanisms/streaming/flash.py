"""Flash attention: the softmax as a stream over tiles of keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Size
from qkv.call.binding.options import option_values
from qkv.call.dispatch import checked
from qkv.inspection.traces.streaming import stream
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arguments import one_sequence
from qkv.mechanisms.base.arrays.namespace import values
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Line, Step, number, numbers
from qkv.mechanisms.base.projected import Options, ProjectedAttention
from qkv.problem.scores import Scores

__all__ = ["Flash", "FlashTile"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class FlashTile:
    """The state of one tile of queries after one more tile of keys.

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
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        block_q: Size = 128,
        block_kv: Size = 128,
        **options: Unpack[Options],
    ) -> None:
        self.block_q, self.block_kv = block_q, block_kv
        super().__init__(embed_dim, num_heads, **options)

    def tiles(
        self, x: Rows, key: Rows | None = None, value: Rows | None = None
    ) -> Iterator[FlashTile]:
        """The algorithm tile by tile, in float64, for every head of one sequence.

        Parameters
        ----------
        x : array (n, embed_dim)
        key, value : array (kv_len, kv_dim), optional
            `x` unless given; `value` is `key` unless given.

        Yields
        ------
        FlashTile
            For each tile of queries, one for each tile of keys in which a pair is allowed. With
            sinks, row_max begins as the sink and row_sum as 1.
        """
        given = [values(a, "x").astype(np.float64) for a in self.sequences(x, key, value)]
        one_sequence(*given)
        yield from self._tiles(given, range(0, len(given[0]), self.block_q))

    def _tiles(self, sequences: Sequence[Array], firsts: Sequence[int]) -> Iterator[FlashTile]:
        """The tiles of those blocks of queries, which begin at `firsts`."""
        look = self.detached()
        q, k, v = look.heads(*sequences)
        options = option_values("attention", {"scale": self.scale})
        call = checked(q, k, v, look.variants(q, k), options)
        scores = Scores(call.problem, np.dtype(np.float64))
        for head in range(self.num_heads):
            value = scores.value(0, head, slice(None))
            for first in firsts:
                q_rows = slice(first, min(first + self.block_q, q.shape[-2]))
                tile = scores.tile(0, head, q_rows, slice(0, k.shape[-2]))
                for state in stream(tile, value, self.block_kv, self._sink(head)):
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

    def _sink(self, head: int) -> float | None:
        return float(values(self.weights["sinks"], "sinks")[head]) if self.sinks else None

    def steps(self, token: ExplainedToken) -> list[Step]:
        """One step for each tile of keys, and the division, in each head."""
        row, steps = token.index, list[Step]()
        # Zeros are the output of a head in which the row has no key.
        output = np.zeros((self.num_heads, self.head_dim))
        last: FlashTile | None = None
        i = row % self.block_q
        for tile in self._tiles((token.query, token.key, token.value), [row - i]):
            if last is not None and last.head != tile.head:
                output[last.head] = _divide(last, i, steps)
            sink = self._sink(tile.head)
            if sink is not None and (last is None or last.head != tile.head):
                begin = (Line("m", sink), Line("l", 1.0))
                steps.append(Step(f"Head {tile.head}, begin", "m = sink, l = exp(sink - m)", begin))
            steps.append(_tile_step(tile, i, token.kv_tokens))
            last = tile
        if last is not None:
            output[last.head] = _divide(last, i, steps)
        return steps + self.steps_after(output[:, None], 0)

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of full attention, and one exp and corrections for each row and tile."""
        d, h = symbols(d=self.head_dim, h=self.num_heads)
        each = tokens * Count(-(-int(tokens) // self.block_kv), "tiles")
        if self.causal:
            rows = sum((last - first) * tiles for first, last, tiles in self._causal_tiles(tokens))
            each = Count(rows, "rows of tiles")
        more = step("correction", compare=each, subtract=each, exp=each,
                    multiply=each * (d + 1), add=each * (d + 1))  # fmt: skip
        heads: int = batch * h
        return super().operations(tokens, batch) + more * heads

    def numbers_moved(self, tokens: Count, batch: int, parameters: int) -> tuple[int, int]:
        """Keys and values are read again for each tile of queries that may see them."""
        read, written = super().numbers_moved(tokens, batch, parameters)
        g, d = symbols(g=self.num_kv_heads, d=self.head_dim)
        if self.causal:
            n = int(tokens)
            keys = sum(min(n, tiles * self.block_kv) for _, _, tiles in self._causal_tiles(tokens))
            again = Count(keys - n, "keys read again")
            return read + again * (2 * batch * g * d), written
        again = Count(-(-int(tokens) // self.block_q) - 1, "q_tiles - 1")
        return read + again * (2 * batch * tokens * g * d), written

    def _causal_tiles(self, tokens: Count) -> Iterator[tuple[int, int, int]]:
        """First and last row of each tile of queries, and how many tiles of keys it sees."""
        n = int(tokens)
        for first in range(0, n, self.block_q):
            last = min(first + self.block_q, n)
            yield first, last, -(-last // self.block_kv)

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
