"""BigBird's pattern of blocks, and its pairs counted without a matrix."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.cost import mechanism_cost
from qkv.errors import ArgumentError
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
