"""BigBird's random blocks of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import is_integer, shown
from qkv.arguments.readable_checks import checked_flag
from qkv.errors import ArgumentError
from qkv.problem.building.builder import INDEX_LIMIT, Builder, Shape
from qkv.problem.dense import Dense
from qkv.problem.philox import philox
from qkv.variants.base import Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, repr=False)
class RandomBlocks(MaskVariant):
    """Allowed where the key's block is one of `num_random_blocks` drawn for the query's block.

        q_block = q_pos // block_size,   kv_block = kv_pos // block_size
        draw i of r, i = 0 ... r - 1:   j = M - r + i,   t = word_i * (j + 1) // 2**32,
                                        block t, or block j if t is among earlier draws

    BigBird is `SlidingWindow(w, w) | GlobalTokens(positions) | RandomBlocks(64, 3)`.

    Parameters
    ----------
    block_size : int
        Positions of one block.
    num_random_blocks : int
        Blocks drawn for each head and block of queries, r; if there are not so many, all of them.
    seed : int
        64-bit seed.
    causal : bool
        Draw among the blocks before the query's own, M = q_block: the same at any length, so that
        a decoding step sees what it would see in a longer text. Otherwise among all, M = N.
    length : int, optional
        Positions in all, counted from 0: N is `ceil(length / block_size)`. kv_len by default; say
        it if the keys of a call are a part. Positions outside have no random blocks.

    Raises
    ------
    ArgumentError
        If a number is not an integer of its range.

    Notes
    -----
    `word_i` is word 0 of Philox4x32-10 with counter (i, q_block, query head, 0) and key (low, high
    half of the seed), so that nothing but these numbers matters; the draws are those of Floyd's
    algorithm, r different blocks of which all sets are equally likely. Work is proportional to
    `q_len * r * block_size`; a boolean is held for each head and pair of blocks. Sources: Zaheer et
    al., "Big Bird" (2020), section 2; Bentley and Floyd, "A Sample of Brilliance" (1987); Salmon et
    al. (2011).

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((64, 4))
    >>> record = qkv.inspect(x, x, x, qkv.RandomBlocks(8, 2, seed=1))
    >>> np.flatnonzero(record.weights[20]) // 8
    array([6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7])
    """

    roles: ClassVar[Mapping[str, Role]] = {
        "block_size": "static",
        "num_random_blocks": "static",
        "seed": "static",
        "causal": "static",
        "length": "static",
    }
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    block_size: int
    num_random_blocks: int
    seed: int = 0
    causal: bool = False
    length: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "block_size": (1, INDEX_LIMIT),
            "num_random_blocks": (0, INDEX_LIMIT),
            "seed": (0, 2**64 - 1),
            "length": (0, INDEX_LIMIT),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if name == "length" and value is None:
                continue
            if not is_integer(value) or not least <= value <= most:
                raise ArgumentError(
                    f"RandomBlocks {name}={shown(value)} is not an integer from {least} to {most}.",
                    action="Pass BigBird's numbers, as in RandomBlocks(64, 3, seed=0).",
                )

        checked_flag("RandomBlocks causal", self.causal)

    def length_key(self, kv_len: int) -> int:
        """Number of blocks, N, all that is drawn from."""
        return -(-(kv_len if self.length is None else int(self.length)) // int(self.block_size))

    def draws(self, num_heads: int, num_blocks: int) -> NDArray[np.int64]:
        """The blocks that are drawn for `[head, q_block]`.

        Parameters
        ----------
        num_heads, num_blocks : int
            Query heads, and N.

        Returns
        -------
        int64 array (num_heads, num_blocks, r)
            -1 at the end of rows that have fewer to draw from.
        """
        heads, rows = np.indices((num_heads, num_blocks))
        choices = rows if self.causal else np.full_like(rows, num_blocks)
        count = min(int(self.num_random_blocks), num_blocks)
        draws = np.minimum(count, choices)
        drawn = np.full((num_heads, num_blocks, count), -1, np.int64)
        for i in range(count):
            last = choices - draws + i
            words = philox((i, rows, heads, 0), int(self.seed))[0].astype(np.int64)
            block = words * (last + 1) >> 32
            taken = (drawn[..., :i] == block[..., None]).any(-1)
            drawn[..., i] = np.where(i < draws, np.where(taken, last, block), -1)
        return drawn

    def blocks(self, num_heads: int, num_blocks: int) -> NDArray[np.bool_]:
        """Whether `[head, q_block, kv_block]` is drawn.

        Parameters
        ----------
        num_heads, num_blocks : int
            Query heads, and N.

        Returns
        -------
        boolean array (num_heads, num_blocks, num_blocks)
        """
        is_drawn = np.zeros((num_heads, num_blocks, num_blocks + 1), bool)
        np.put_along_axis(is_drawn, self.draws(num_heads, num_blocks), True, axis=2)
        return is_drawn[..., :-1]

    def lower(self, builder: Builder) -> None:
        shape, size = builder.shape, int(self.block_size)
        count = self.length_key(shape.kv_len)
        # One more block on each side, which is never drawn, stands for positions outside.
        drawn = np.pad(self.blocks(shape.num_heads, count), ((0, 0), (1, 1), (1, 1)))
        member = builder.table(drawn, "random blocks")
        last = builder.scalar(count + 1, "number of blocks")
        q_block, kv_block = (
            (position // size + 1).clip(0, last) for position in (builder.q_pos, builder.kv_pos)
        )
        builder.mask(member[builder.head, q_block, kv_block])

    def naive(self, dense: Dense) -> None:
        count = self.length_key(dense.allowed.shape[1])
        for i, q_pos in enumerate(dense.q_pos):
            chosen = self._draw_blocks(int(q_pos) // self.block_size, dense.head, count)
            for j, kv_pos in enumerate(dense.kv_pos):
                if int(kv_pos) // self.block_size not in chosen:
                    dense.allowed[i, j] = False

    def _draw_blocks(self, q_block: int, head: int, count: int) -> set[int]:
        chosen: set[int] = set()
        if not 0 <= q_block < count:
            return chosen
        choices = q_block if self.causal else count
        draws = min(self.num_random_blocks, choices)
        for i in range(draws):
            j = choices - draws + i
            word = int(philox((i, q_block, head, 0), int(self.seed))[0])
            t = word * (j + 1) // 2**32
            chosen.add(j if t in chosen else t)
        return chosen

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[RandomBlocks]:
        return (cls(2, 2), cls(16, 3, 2**40 + 1, True), cls(3, 1, 5, False, shape.kv_len // 2))
