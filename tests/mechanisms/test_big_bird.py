"""BigBird's pattern of blocks, and its pairs counted without a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qkv.cost import mechanism_cost
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.mechanisms import BigBird


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 24, 41])
@pytest.mark.sampled(("block", "num_random"), [(1, 0), (1, 2), (3, 1), (8, 3)], one_in=4)
def test_pairs_are_counted_as_a_loop_does(
    n: int, block: int, num_random: int, causal: bool
) -> None:
    layer = BigBird(4, 2, block=block, num_random=num_random, random_seed=5, causal=causal)
    mask = layer.block_mask(n)
    weights = layer.token_mixing(np.ones((n, 4)))
    for head, (pairs, heads) in enumerate(layer.pairs_of_heads(n)):
        seen = [
            (i, j)
            for i in range(n)
            for j in range(i + 1 if causal else n)
            if mask[head, i // block, j // block]
        ]
        assert heads == 1
        assert int(pairs) == len(seen)
        assert [tuple(pair) for pair in np.argwhere(weights[head])] == seen


def test_the_pattern_has_a_window_ends_and_random_blocks() -> None:
    mask = BigBird(6, 3, block=2, num_random=2).block_mask(60)
    blocks = np.arange(30)
    for of_head in mask:
        near = abs(blocks[:, None] - blocks) <= 1
        assert of_head[near].all()
        assert of_head[[0, -1]].all()
        assert of_head[:, [0, -1]].all()
        random = (of_head & ~near)[1:-1, 1:-1].sum(1)
        assert random.max() <= 2
        assert random.sum() > 28
    assert (mask[0] != mask[1]).any()


def test_the_example_costs_something_at_any_length() -> None:
    for n in (1, 5, 6, 1000):
        found = int(mechanism_cost("big-bird", n).ledger["softmax_exp"])
        assert found <= min(n * n, 8 * n)
    large = int(mechanism_cost("big-bird", 100_000).ledger["softmax_exp"])
    assert 100_000 * 5 < large < 100_000 * 8
    output = BigBird.example().token_mixing(*BigBird.example_arguments())[0]
    assert (output > 0).astype(int).tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
        [1, 0, 1, 1, 1],
        [1, 1, 1, 1, 1],
    ]


def test_more_blocks_than_memory_holds_are_refused() -> None:
    with pytest.raises(ArgumentError, match="has 536870912 blocks"):
        BigBird(8, 2, block=4).cost(2**31)


def drawn(entry: Any, shape: tuple[int, ...] = (1, 5, 2)) -> np.ndarray[Any, Any]:
    """Blocks without random ones, but for one entry."""
    blocks = np.full(shape, -1, np.float64 if isinstance(entry, float) else np.int64)
    blocks.flat[-2] = entry
    return blocks


@pytest.mark.parametrize("ask", ["call", "block_mask", "pairs", "token_mixing", "explain"])
@pytest.mark.parametrize("entry", [-2, 5, 6, 2**40])
def test_blocks_that_do_not_exist_are_refused(ask: str, entry: int) -> None:
    layer: Any = BigBird(4, block=2, random_blocks=drawn(entry))
    asked = layer if ask == "call" else getattr(layer, ask)
    with pytest.raises(ArgumentError, match=f"random_blocks hold {entry}.*5 blocks"):
        asked(9 if ask in ("block_mask", "pairs") else np.ones((9, 4)))


def test_given_blocks_are_seen_and_counted() -> None:
    """A loop sees the same: every entry from -1, which is none, to the last block."""
    blocks = np.array([[[2, 3], [3, -1], [-1, 0], [4, 4], [1, -1]]])
    for causal in (False, True):
        layer = BigBird(4, block=2, random_blocks=blocks, causal=causal)
        expected = np.array(
            [
                [
                    (abs(i // 2 - j // 2) <= 1 or {i // 2, j // 2} & {0, 4}
                     or j // 2 in blocks[0, i // 2]) and (j <= i or not causal)
                    for j in range(9)
                ]
                for i in range(9)
            ]
        )  # fmt: skip
        np.testing.assert_array_equal(layer.token_mixing(np.ones((9, 4)))[0] > 0, expected > 0)
        assert int(layer.pairs(9)) == np.count_nonzero(expected)


def test_random_blocks_are_whole_numbers_of_every_head_and_block() -> None:
    with pytest.raises(DTypeError, match=r"random_blocks .*float64"):
        BigBird(4, block=2, random_blocks=drawn(1.5)).pairs(9)
    with pytest.raises(ShapeError, match=r"random_blocks .*\(1, 4, 2\)"):
        BigBird(4, block=2, random_blocks=drawn(1, (1, 4, 2))).pairs(9)
    none = BigBird(4, block=2, random_blocks=np.zeros((1, 5, 0), np.int64))
    assert int(none.pairs(9)) == int(BigBird(4, block=2, num_random=0).pairs(9))
    with pytest.raises(ShapeError, match=r"random_blocks .*\(1, 5\)"):
        BigBird(4, block=2, random_blocks=drawn(1, (1, 5))).pairs(9)


def test_the_pairs_that_the_notes_state_are_those_of_long_texts() -> None:
    """Random blocks that are seen anyway take a few from 7 + num_random blocks a row."""
    n, block, num_random = 32_768, 16, 3
    pairs = int(BigBird(8, block=block, num_random=num_random).pairs(n))
    assert 0.99 < pairs / (n * block * (7 + num_random)) < 1
    assert "n block (7 + num_random)" in (BigBird.__doc__ or "")
