"""BigBird: a window of blocks, blocks that all see, and random ones."""

from __future__ import annotations

from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Size, Whole
from qkv.arguments.readable_checks import as_array
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.ledger import Count
from qkv.mechanisms.base.arrays.rows import MOST_RANDOM
from qkv.mechanisms.base.modules.loading import (
    named_weights,
    reads_module,
    refuse_other_attributes,
    refuse_other_parameters,
    require_attributes,
)
from qkv.mechanisms.base.projected import Options, ProjectedAttention
from qkv.variants import BlockSparse, RandomBlocks

__all__ = ["BigBird"]

_KNOWN = (
    "max_seqlen", "seed", "num_attention_heads", "num_random_blocks", "block_size",
    "attention_head_size", "all_head_size",
)  # fmt: skip
"""Attributes of a BigBirdBlockSparseAttention, of which the blocks are given by the caller."""


class BigBird(ProjectedAttention):
    """Blocks of tokens: each sees itself and its neighbours, the first and last, and random ones.

        M[i, j] = 0 if |b - c| <= 1, or b or c is the first or the last block, or c is one of the
        random blocks of b, else -inf;   b and c are the blocks of tokens i and j

    The first and the last block see all. The graph of who sees whom has short paths between any two
    tokens, and its number of edges grows with n.

    Parameters
    ----------
    embed_dim, num_heads : int
    block : int
        Tokens of one block; the last one may be shorter.
    num_random : int
        Random blocks of each block and head, drawn as by `qkv.RandomBlocks`. A block that is seen
        anyway may be among them.
    random_blocks : integer array (num_heads, blocks, r), optional
        Which blocks they are, instead of random ones, and -1 for none; for a fixed number of
        blocks.
    random_seed : int
        Seed of the random blocks.
    **options
        As for `ProjectedAttention`.

    Raises
    ------
    ArgumentError, ShapeError
        A size is out of range, or random_blocks do not fit the heads and blocks.

    Notes
    -----
    About `n block (7 + num_random)` pairs: 3 blocks of the window, 2 that all see and 2 that see
    all. The masks are `BlockSparse(near) | RandomBlocks(...)`: the window is one of blocks, not of
    tokens as that of `qkv.SlidingWindow` is. Source: Zaheer et al., "Big Bird: Transformers for
    Longer Sequences" (2020), section 2.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import BigBird
    >>> BigBird(4, block=1, num_random=0).block_mask(6)[0].astype(int)
    array([[1, 1, 1, 1, 1, 1],
           [1, 1, 1, 0, 0, 1],
           [1, 1, 1, 1, 0, 1],
           [1, 0, 1, 1, 1, 1],
           [1, 0, 0, 1, 1, 1],
           [1, 1, 1, 1, 1, 1]])
    """

    name = "big-bird"
    paper = "Zaheer et al., Big Bird: Transformers for Longer Sequences (2020), section 2"
    formula = "softmax(Q K^T / sqrt(d) + M) V, M = 0 in window, first, last and random blocks"
    compares_positions = True

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        block: Size,
        num_random: Whole = 1,
        random_blocks: NDArray[Any] | None = None,
        random_seed: Whole = 0,
        **options: Unpack[Options],
    ) -> None:
        self.block, self.num_random, self.random_seed = block, num_random, random_seed
        self.random_blocks = random_blocks
        super().__init__(embed_dim, num_heads, **options)

    def block_mask(self, n: Size) -> NDArray[np.bool_]:
        """Whether each block of `n` tokens attends to each other, `(num_heads, blocks, blocks)`.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            random_blocks were given, for another number of blocks, or are not blocks.
        """
        blocks = -(-n // self.block)
        if self.num_heads * blocks**2 > MOST_RANDOM:
            raise ArgumentError(
                f"the mask of {self.num_heads} heads and {blocks} x {blocks} blocks would take "
                f"{self.num_heads * blocks**2} bytes; at most {MOST_RANDOM} are taken.",
                action="Ask for fewer tokens, or choose larger blocks.",
            )
        # The last column receives the entries -1 of blocks with fewer draws.
        mask = np.pad(np.repeat(_near(blocks)[None], self.num_heads, 0), ((0, 0), (0, 0), (0, 1)))
        np.put_along_axis(mask, self._drawn(blocks), True, axis=2)
        return mask[..., :-1]

    def _random(self) -> RandomBlocks:
        return RandomBlocks(self.block, self.num_random, self.random_seed, self.causal)

    def _drawn(self, blocks: int) -> NDArray[Any]:
        """Random blocks `(num_heads, blocks, r)`; -1 for none."""
        if self.random_blocks is None:
            return self._random().draws(self.num_heads, blocks)
        given = as_array("random_blocks", self.random_blocks)
        if given.dtype.kind not in "iu":
            raise DTypeError(
                f"random_blocks has dtype {given.dtype}, not an integer type.",
                action="Pass the numbers of blocks.",
            )
        if given.ndim != 3 or given.shape[:2] != (self.num_heads, blocks):
            raise ShapeError(
                f"random_blocks has shape {given.shape}; there are {self.num_heads} heads and "
                f"{blocks} blocks.",
                action="Pass (num_heads, blocks, r).",
            )
        strange = given[(given < -1) | (given >= blocks)]
        if strange.size:
            raise ArgumentError(
                f"random_blocks hold {strange[0]}, and there are {blocks} blocks.",
                action=f"Pass numbers from 0 to {blocks - 1}, or -1 for none.",
            )
        return given

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """The pattern of blocks, after the positions."""
        n = query.shape[-2]
        if self.random_blocks is None:
            near = BlockSparse(_near(-(-n // self.block)), self.block, self.block)
            return (*super().variants(query, key), near | self._random())
        pattern = BlockSparse(self.block_mask(n), self.block, self.block)
        return (*super().variants(query, key), pattern)

    def pairs(self, n: int) -> int:
        """Pairs of the pattern among `n` tokens, of the first head."""
        return self.pairs_of_heads(n)[0][0]

    def pairs_of_heads(self, n: int) -> tuple[tuple[int, int], ...]:
        """Pairs of each head, whose random blocks differ; in time and memory that grow with `n`.

        Raises
        ------
        ArgumentError
            The pattern has more than 2**28 entries, which would take gigabytes.
        """
        n = int(n)
        blocks = -(-n // self.block)
        if blocks * (self.num_random + 5) > MOST_RANDOM:
            raise ArgumentError(
                f"the pattern of {n} tokens has {blocks} blocks, each with {self.num_random + 5} "
                f"others; at most {MOST_RANDOM} in all are counted.",
                action="Ask for fewer tokens, or choose larger blocks.",
            )
        b, last = np.arange(blocks), blocks - 1
        rows = np.minimum(self.block, n - b * self.block)
        ends = np.zeros_like(b)
        near = np.stack([(b - 1).clip(0), b, (b + 1).clip(0, last), ends, ends + last], 1)
        pairs = []
        for drawn in self._drawn(blocks):
            # Every block attends to block 0 anyway, so -1 may become 0.
            seen = np.sort(np.concatenate([near, drawn.clip(0)], 1), 1)
            counted = np.where(np.diff(seen, prepend=-1) > 0, rows[seen], 0)
            if self.causal:
                counted[seen > b[:, None]] = 0
            keys = counted.sum(1)
            for end in (0, last):
                keys[end] = rows[: end + 1].sum() if self.causal else n
            above = (rows * (rows - 1) // 2).sum() if self.causal else 0
            pairs.append((Count(int(rows @ keys - above), "pairs"), 1))
        return tuple(pairs)

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any, random_blocks: NDArray[Any]) -> Self:
        """The mechanism with the weights of a BigBirdBlockSparseAttention.

        Parameters
        ----------
        module : transformers BigBirdBlockSparseAttention
            Its output projection is a module of its own, so there is none here.
        random_blocks : integer array (num_heads, blocks, r)
            The module draws them at every call in training, and takes block 0 otherwise.

        Raises
        ------
        UnsupportedError
            The module is another, as its weights or attributes show.
        """
        require_attributes(module, ("num_attention_heads", "block_size"))
        names = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
        weights = named_weights(module, names)
        refuse_other_parameters(module, names.values(), cls.name)
        refuse_other_attributes(module, _KNOWN)
        return cls(
            module.query.in_features,
            module.num_attention_heads,
            block=module.block_size,
            random_blocks=random_blocks,
            bias="q_proj.bias" in weights,
            out_proj=False,
            weights=weights,
        )

    @classmethod
    def example(cls) -> Self:
        """Blocks of one token; a seed with which "cat" also sees "on", its only unseen token."""
        return cls.for_example(block=1, random_seed=9)


def _near(blocks: int) -> NDArray[np.bool_]:
    """Whether each block attends to each other block, without the random ones."""
    b = np.arange(blocks)
    ends = np.isin(b, (0, blocks - 1))
    return np.asarray((abs(b[:, None] - b) <= 1) | ends | ends[:, None])
