"""BigBird's random blocks: which sets are drawn, and that nothing but the seed and place counts."""

import numpy as np
import pytest

import qkv


def drawn(length, blocks, heads=1, **keywords):
    """Which keys each query of a plain problem may see."""
    x = np.zeros((heads, length, 4))
    record = qkv.inspect(x, x, x, blocks, **keywords)
    return np.asarray(record.weights[...]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "count"), [(1, 3), (4, 2), (4, 50), (7, 0)])
def test_so_many_different_blocks(size, count, causal) -> None:
    allowed = drawn(30, qkv.RandomBlocks(size, count, 7, causal), heads=3)
    blocks = -(-30 // size)
    for head in allowed:
        for i, row in enumerate(head):
            seen = set(np.flatnonzero(row) // size)
            assert len(seen) == min(count, i // size if causal else blocks)
            assert not causal or max(seen, default=-1) < i // size
            # Blocks are seen as a whole, and by all queries of a block.
            assert row.sum() == sum(min(size, 30 - b * size) for b in seen)
            np.testing.assert_array_equal(row, head[i // size * size])


def test_all_sets_are_equally_likely() -> None:
    """Chi-square over the 56 sets of 3 of 8 blocks, at 1 in 1000; other seeds, other sets."""
    found = qkv.RandomBlocks(1, 3, seed=11).blocks(num_heads=2000, num_blocks=8)
    codes = (found.reshape(-1, 8) << np.arange(8)).sum(1)
    _, counts = np.unique(codes, return_counts=True)
    expected = len(codes) / 56
    assert len(counts) == 56
    assert ((counts - expected) ** 2 / expected).sum() < 93.2
    other = qkv.RandomBlocks(1, 3, seed=12).blocks(2000, 8)
    assert 0.3 < (found == other).mean() < 0.6


def test_draws_of_one_query_block_do_not_predict_those_of_another() -> None:
    found = qkv.RandomBlocks(1, 2, seed=3).blocks(4, 200).astype(float)
    flat = found.reshape(800, 200) - 2 / 200
    correlation = flat @ flat.T / (200 * 2 / 200 * (1 - 2 / 200))
    np.fill_diagonal(correlation, 0)
    # Of independent rows: mean 0 with standard error 1 / sqrt(200 * 320,000).
    assert abs(correlation.mean()) < 5 / np.sqrt(200 * 320_000)


def test_causal_draws_do_not_depend_on_the_length() -> None:
    blocks = qkv.RandomBlocks(4, 2, seed=5, causal=True)
    long = drawn(64, blocks, heads=2)
    for length in (1, 17, 63):
        np.testing.assert_array_equal(drawn(length, blocks, heads=2), long[:, :length, :length])


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
def test_decoding_one_by_one_is_prefill(backend) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 40, 8))
    masks = qkv.Causal() & (qkv.SlidingWindow(3, 0) | qkv.RandomBlocks(4, 2, 5, causal=True))
    whole = qkv.attention(q, k, v, masks, backend=backend)
    for t in range(1, 41):
        step = qkv.attention(
            q[:, t - 1 : t], k[:, :t], v[:, :t], masks, q_offset="end", backend=backend
        )
        np.testing.assert_allclose(step[:, 0], whole[:, t - 1], rtol=1e-12, atol=1e-12)


def test_parts_of_the_keys_merge_into_all() -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 2, 48, 8))
    blocks = qkv.RandomBlocks(4, 3, 9, length=48)
    np.testing.assert_array_equal(
        qkv.attention(q, k, v, blocks), qkv.attention(q, k, v, qkv.RandomBlocks(4, 3, 9))
    )
    parts = [
        qkv.attention(q, k[:, s], v[:, s], blocks, q_offset=0, kv_offset=s.start, return_lse=True)
        for s in (slice(0, 20), slice(20, 48))
    ]
    got, _ = qkv.merge(*parts)
    np.testing.assert_allclose(got, qkv.attention(q, k, v, blocks), rtol=1e-12, atol=1e-12)


def test_positions_outside_have_no_blocks() -> None:
    x = np.zeros((12, 4))
    record = qkv.inspect(x, x, x, qkv.RandomBlocks(4, 2), q_offset=-4)
    assert not np.asarray(record.weights[:4]).any()
    assert np.asarray(record.weights[4:]).any()


def test_only_tiles_with_drawn_blocks_are_read() -> None:
    x = np.zeros((2, 4096, 16), np.float32)
    plan = qkv.plan(x, x, x, qkv.RandomBlocks(256, 2), backend="cpu")
    whole = qkv.plan(x, x, x, backend="cpu")
    drawn = whole.operations * 2 // 16
    # A tile of queries that lies in two blocks reads the keys of both.
    assert drawn <= plan.operations <= drawn * (1 + plan.block_q / 256)
