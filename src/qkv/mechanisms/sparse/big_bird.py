"""BigBird: a window of blocks, blocks that all see, and random ones."""

from __future__ import annotations

from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError, ShapeError
from qkv.ledger import Count
from qkv.mechanisms.base.loading import named_weights
from qkv.mechanisms.base.mechanism import positive_integers
from qkv.mechanisms.base.projected import Options, ProjectedAttention
from qkv.variants import BlockSparse

__all__ = ["BigBird"]


class BigBird(ProjectedAttention):
    """Blocks of tokens: each sees itself and its neighbours, the first and last, and random ones.

        block b sees block c if |b - c| <= 1, or b or c is the first or the last, or c is one of
        the random blocks of b

    The first and the last block see all. The graph of who sees whom has short paths between any two
    tokens, and its number of edges grows with n.

    Parameters
    ----------
    embed_dim, num_heads : int
    block : int
        Tokens of one block; the last one may be shorter.
    num_random : int
        Random blocks of each block, drawn anew for each head among those it does not see already.
    random_blocks : integer array (num_heads, blocks, r), optional
        Which blocks they are, instead of random ones; for a fixed number of blocks.
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
    About `n block (5 + num_random)` pairs. Source: Zaheer et al., "Big Bird: Transformers for
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

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        block: int,
        num_random: int = 1,
        random_blocks: NDArray[Any] | None = None,
        random_seed: int = 0,
        **options: Unpack[Options],
    ) -> None:
        positive_integers(block=block)
        if num_random < 0:
            raise ArgumentError(
                f"num_random={num_random} is below 0.", action="Pass 0 or more random blocks."
            )
        self.block, self.num_random, self.random_seed = block, num_random, random_seed
        self.random_blocks = random_blocks
        super().__init__(embed_dim, num_heads, **options)

    def block_mask(self, n: int) -> NDArray[np.bool_]:
        """Which blocks of `n` tokens see which, `(num_heads, blocks, blocks)`."""
        blocks = -(-n // self.block)
        b = np.arange(blocks)
        mask = abs(b[:, None] - b) <= 1
        ends = np.isin(b, (0, blocks - 1))
        mask = np.repeat((mask | ends | ends[:, None])[None], self.num_heads, axis=0)
        if self.random_blocks is not None:
            given = np.asarray(self.random_blocks)
            if given.shape[:2] != mask.shape[:2]:
                raise ShapeError(
                    f"random_blocks has shape {given.shape}; there are {self.num_heads} heads and "
                    f"{blocks} blocks.",
                    action="Pass (num_heads, blocks, r).",
                )
            np.put_along_axis(mask, given, True, axis=2)
            return mask
        rng = np.random.default_rng(self.random_seed)
        for rows in mask:
            for row in rows:
                unseen = np.flatnonzero(~row)
                row[rng.permutation(unseen)[: self.num_random]] = True
        return mask

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """The pattern of blocks, after the positions."""
        pattern = BlockSparse(self.block_mask(query.shape[-2]), self.block, self.block)
        return (*super().variants(query, key), pattern)

    def pairs(self, n: int) -> int:
        """Pairs of the pattern among `n` tokens, of one head."""
        rows = np.full(-(-int(n) // self.block), self.block)
        rows[-1] -= -int(n) % self.block
        first = self.block_mask(int(n))[0]
        if self.causal:
            whole = np.repeat(np.repeat(first, rows, axis=0), rows, axis=1)
            return Count(int(np.tril(whole).sum()), "pairs")
        return Count(int(rows @ first @ rows), "pairs")

    @classmethod
    def from_transformers(cls, module: Any, random_blocks: NDArray[Any]) -> Self:
        """The mechanism with the weights of a BigBirdBlockSparseAttention.

        Parameters
        ----------
        module : transformers BigBirdBlockSparseAttention
            Its output projection is a module of its own, so there is none here.
        random_blocks : integer array (num_heads, blocks, r)
            The module draws them at every call in training, and takes block 0 otherwise.
        """
        names = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
        weights = named_weights(module, names)
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
        """Blocks of one token; the only random block is the fourth token for the second."""
        # The others take the first block, which all see anyway.
        return cls.for_example(block=1, random_blocks=np.array([[[0], [3], [0], [0], [0]]]))
