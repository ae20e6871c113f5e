"""A variant in a user's file: a plain object, unknown to qkv, on every backend."""

import math

import numpy as np
import pytest

import qkv
from host_backends import HOST_BACKENDS


class Rings:
    """Keys in the query's ring of `size` positions, weighted down by how far they are around it.

    It is not a subclass of anything, has no `naive` and no `examples`.
    """

    def __init__(self, size, decay):
        self.size = size
        self.decay = decay

    def lower(self, builder):
        size = builder.scalar(self.size, "ring size")
        builder.mask(builder.q_pos // size == builder.kv_pos // size)
        decay = builder.per_head(self.decay, "decay")
        around = (builder.q_pos - builder.kv_pos) % size
        near = builder.table(np.array([0.5, 0.25]), "near")
        builder.mod(
            builder.score * np.exp(-decay * around) + near[np.minimum(around, 1)] * builder.head
        )


def by_hand(query, key, value, size, decay, q_offset):
    """The same from its description, one pair at a time."""
    heads, q_len, dim = query.shape
    out, lse = np.zeros((heads, q_len, value.shape[-1])), np.full((heads, q_len), -np.inf)
    for h in range(heads):
        for i in range(q_len):
            scores = {}
            for j in range(key.shape[1]):
                if math.floor((i + q_offset) / size) != math.floor(j / size):
                    continue
                dot = sum(float(query[h, i, d]) * float(key[h // 2, j, d]) for d in range(dim))
                around = (i + q_offset - j) % size
                near = (0.5, 0.25)[min(around, 1)]
                scores[j] = dot / math.sqrt(dim) * math.exp(-decay[h] * around) + near * h
            if not scores:
                continue
            total = sum(math.exp(s) for s in scores.values())
            lse[h, i] = math.log(total)
            for j, s in scores.items():
                out[h, i] += math.exp(s) / total * value[h // 2, j].astype(np.float64)
    return out, lse


@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize("q_offset", [0, -4, 9])
def test_a_variant_of_the_user_runs_on_every_backend(backend, q_offset) -> None:
    rng = np.random.default_rng(0)
    query = rng.normal(size=(4, 14, 8)).astype(np.float32)
    key = rng.normal(size=(2, 20, 8)).astype(np.float32)
    value = rng.normal(size=(2, 20, 6)).astype(np.float32)
    decay = np.array([0.0, 0.1, 0.5, 2.0])
    out, lse = qkv.attention(
        query, key, value, Rings(5, decay), q_offset=q_offset, backend=backend, return_lse=True
    )
    expected = by_hand(query, key, value, 5, decay, q_offset)
    np.testing.assert_allclose(out, expected[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=2e-6, atol=2e-6)
    assert np.isneginf(lse).any() == (q_offset != 0), "rows outside all rings are empty"


@pytest.mark.slow
def test_a_variant_of_the_user_composes() -> None:
    rng = np.random.default_rng(1)
    query, key, value = (rng.normal(size=(4, 10, 8)) for _ in range(3))
    rings = Rings(4, np.zeros(4))
    both = qkv.attention(query, key, value, rings, qkv.Causal())
    mask = np.tril(np.ones((10, 10), bool))
    np.testing.assert_allclose(both, qkv.attention(query, key, value, rings, mask))
    plan = qkv.plan(query, key, value, rings)
    assert plan.tiles.total >= 1
    record = qkv.inspect(query, key, value, rings)
    np.testing.assert_allclose(record.output, qkv.attention(query, key, value, rings))


class RingMask:
    """Joins with |, & and ~ through the masks of qkv."""

    def lower(self, builder):
        builder.mask(builder.q_pos // 4 == builder.kv_pos // 4)


def test_a_mask_of_the_user_joins_masks_of_qkv() -> None:
    x = np.random.default_rng(2).normal(size=(10, 8))
    rows, columns = np.indices((10, 10))
    ring = rows // 4 == columns // 4
    causal = columns <= rows
    for variant, mask in (
        (qkv.Causal() & RingMask(), causal & ring),
        (qkv.Causal() | RingMask(), causal | ring),
        (RingMask() | qkv.Causal(), causal | ring),
        (~qkv.Causal() | RingMask(), ~causal | ring),
    ):
        np.testing.assert_array_equal(qkv.attention(x, x, x, variant), qkv.attention(x, x, x, mask))
