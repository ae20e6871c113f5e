"""Statistics of `qkv.inspect` against whole matrices from the definition."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.inspection.weights import replay
from qkv.problem.building.builder import Shape
from qkv.testing.oracle import Truth, truth
from qkv.variants import ALL

SHAPES = [
    Shape((2,), 4, 2, 9, 11, 8, 8),
    Shape((), 1, 1, 7, 7, 4, 3),
    Shape((2, 3), 2, 1, 5, 6, 6, 6),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short inputs then cross tile edges as long ones do."""
    monkeypatch.setattr(replay, "BLOCK_Q", 4)
    monkeypatch.setattr(replay, "BLOCK_KV", 5)


def arrays(shape: Shape, rng: np.random.Generator) -> list[np.ndarray]:
    lead, kv = shape.batch_shape, (shape.num_kv_heads, shape.kv_len)
    return [
        rng.normal(size=(*lead, shape.num_heads, shape.q_len, shape.head_dim)),
        rng.normal(size=(*lead, *kv, shape.head_dim)),
        rng.normal(size=(*lead, *kv, shape.v_head_dim)),
    ]


def cases() -> list[tuple[Shape, object]]:
    rng = np.random.default_rng(7)
    return [(s, v) for s in SHAPES for kind in ALL for v in kind.examples(s, rng)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.sampled(("shape", "variant"), cases(), one_in=12, ids=lambda x: repr(x)[:40])
def test_statistics_equal_the_dense_matrix(shape: Shape, variant: object, backend: str) -> None:
    """Compiled in one backend, in NumPy for those that have no statistics of their own."""
    rng = np.random.default_rng(1)
    qkv_arrays = arrays(shape, rng)
    record = qkv.inspect(*qkv_arrays, variant, q_offset="end", backend=backend)
    dense = truth(*qkv_arrays, [variant], q_offset="end")
    w = dense.weights
    close = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(record.output, dense.out, **close)
    np.testing.assert_allclose(record.weights[...], w, **close)
    np.testing.assert_allclose(record.entropy, entropy(w), **close)
    np.testing.assert_allclose(record.max_weight, w.max(-1), **close)
    np.testing.assert_allclose(record.received, w.sum(-2), **close)
    last = shape.kv_len - 1
    np.testing.assert_allclose(record.mass([0, 2, -1, 2]), w[..., [0, 2, last]].sum(-1), **close)
    np.testing.assert_allclose(record.mass(slice(1, None, 2)), w[..., 1::2].sum(-1), **close)
    even = np.arange(shape.kv_len) % 2 == 0
    np.testing.assert_allclose(record.mass(even), w[..., even].sum(-1), **close)
    check_top(record, dense, 3)
    check_top(record, dense, shape.kv_len + 2)


def entropy(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


def check_top(record: qkv.inspection.records.record.Record, dense: Truth, k: int) -> None:
    indices, weights = record.top(k)
    assert indices.shape == weights.shape == (*dense.lse.shape, k)
    for place in np.ndindex(*dense.lse.shape):
        scores = np.round(dense.scores[place], 10)
        allowed = [j for j in range(len(scores)) if not np.isneginf(scores[j])]
        expected = sorted(allowed, key=lambda j: (-scores[j], j))[:k]
        padding = k - len(expected)
        assert indices[place].tolist()[: len(expected)] == expected
        assert indices[place].tolist()[len(expected) :] == [-1] * padding
        np.testing.assert_allclose(
            weights[place], [*dense.weights[place][expected], *[0.0] * padding], atol=1e-12
        )


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_ties_go_to_the_lower_key_across_tiles(backend: str) -> None:
    query, key = np.zeros((3, 2)), np.zeros((23, 2))
    key[20] = 1.0
    query[2] = 1.0
    indices, _ = qkv.inspect(query, key, key, backend=backend).top(4)
    assert indices.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [20, 0, 1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("offset", [-3, -1, 0, 2, 100])
@pytest.mark.parametrize(
    ("q_offset", "kv_offset"), [("end", 0), (4, 2), ([3, -5], [0, 1]), ("start", [7, 0])]
)
def test_mass_at_finds_the_key_by_position(
    offset: int, q_offset: object, kv_offset: object
) -> None:
    rng = np.random.default_rng(2)
    q, k, v = arrays(Shape((2,), 2, 1, 6, 9, 4, 4), rng)
    record = qkv.inspect(q, k, v, q_offset=q_offset, kv_offset=kv_offset)
    starts = np.broadcast_to(3 if q_offset == "end" else 0 if q_offset == "start" else q_offset, 2)
    kv_starts = np.broadcast_to(kv_offset, 2)
    weights = truth(q, k, v, [], q_offset=q_offset, kv_offset=kv_offset).weights
    expected = np.zeros((2, 2, 6))
    for b, h, i, j in np.ndindex(2, 2, 6, 9):
        if kv_starts[b] + j == starts[b] + i + offset:
            expected[b, h, i] += weights[b, h, i, j]
    np.testing.assert_allclose(record.mass_at(offset), expected, atol=1e-12)


def test_mass_at_stays_in_the_segment() -> None:
    rng = np.random.default_rng(3)
    q, k, v = arrays(Shape((), 1, 1, 7, 7, 4, 4), rng)
    ids = np.array([0, 0, 0, 1, 1, 2, 2])
    record = qkv.inspect(q, k, v, qkv.Segments(ids))
    w = truth(q, k, v, [qkv.Segments(ids)]).weights[0]
    expected = [0 if i in (0, 3, 5) else w[i, i - 1] for i in range(7)]
    np.testing.assert_allclose(record.mass_at(-1)[0], expected, atol=1e-12)


@pytest.mark.parametrize("sink", [[], [qkv.Sinks([0.5, -1.0])]])
@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_means_leave_out_queries_without_keys(sink: list[qkv.Sinks], backend: str) -> None:
    q, k, v = arrays(Shape((), 2, 2, 5, 5, 4, 4), np.random.default_rng(5))
    mask = np.tri(5, k=-1, dtype=bool)
    w = truth(q, k, v, [mask, *sink]).weights[:, 1:]
    rows = qkv.inspect(q, k, v, mask, *sink, backend=backend).rows()
    np.testing.assert_allclose([row["entropy"] for row in rows], entropy(w).mean(1), atol=1e-12)
    for name, offset in (("previous", -1), ("own", 0), ("next", 1)):
        there = [[w[h, i - 1, i + offset] for i in range(1, 5) if i + offset < 5] for h in (0, 1)]
        np.testing.assert_allclose([r[name] for r in rows], np.mean(there, axis=1), atol=1e-12)
    np.testing.assert_allclose([row["first"] for row in rows], w[..., 0].mean(1), atol=1e-12)


def test_the_next_key_is_of_the_own_segment() -> None:
    q, k, v = arrays(Shape((), 1, 1, 7, 7, 4, 4), np.random.default_rng(3))
    segments = qkv.Segments(np.array([0, 0, 0, 0, 1, 1, 1]))
    w = truth(q, k, v, [segments]).weights[0]
    (row,) = qkv.inspect(q, k, v, segments).rows()
    assert row["next"] == pytest.approx(np.mean([w[i, i + 1] for i in (0, 1, 2, 4, 5)]))
    assert row["previous"] == pytest.approx(np.mean([w[i, i - 1] for i in (1, 2, 3, 5, 6)]))


def test_rows_add_to_one_less_the_share_of_the_sink() -> None:
    rng = np.random.default_rng(4)
    q, k, v = arrays(Shape((), 2, 2, 5, 9, 4, 4), rng)
    record = qkv.inspect(q, k, v, qkv.Sinks([0.5, -1.0]), q_offset="start")
    sink_share = np.exp(np.array([[0.5], [-1.0]]) - record.lse)
    np.testing.assert_allclose(record.mass(slice(None)), 1 - sink_share, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bias", [-1e9, 1e4, -3e38])
@pytest.mark.parametrize("sink", [None, 0.0, -1e9])
def test_rows_of_large_scores_still_add_to_one(
    dtype: str, bias: float, sink: float | None, backend: str
) -> None:
    q, k, v = (a.astype(dtype) for a in arrays(SHAPES[1], np.random.default_rng(9)))
    variants = [qkv.Bias(np.full((7, 1), bias)), *([] if sink is None else [qkv.Sinks(sink)])]
    record = qkv.inspect(q, k, v, *variants, backend=backend)
    dense = truth(q, k, v, variants).weights
    if bias == -1e9 and dtype != "float64":
        # Float32 keeps nothing of the products beside 1e9: the row is uniform.
        dense = np.full_like(dense, {None: 1 / 7, 0.0: 0.0, -1e9: 1 / 8}[sink])
    if bias != 1e4:  # there scores keep a few bits, and the two dot products differ in them
        np.testing.assert_allclose(record.weights[...], dense, atol=1e-6)
        np.testing.assert_allclose(record.top(1)[1][..., 0], dense.max(-1), atol=1e-6)
        np.testing.assert_allclose(record.max_weight, dense.max(-1), atol=1e-6)
        np.testing.assert_allclose(record.entropy, entropy(dense), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(record.received.sum(-1), dense.sum((-2, -1)), rtol=1e-6)
    np.testing.assert_allclose(record.weights[...].sum(-1), dense.sum(-1), rtol=1e-6)


def test_dropout_does_not_enter_statistics() -> None:
    rng = np.random.default_rng(5)
    q, k, v = arrays(Shape((), 2, 2, 5, 9, 4, 4), rng)
    dropped = qkv.inspect(q, k, v, qkv.Dropout(0.5, 3))
    plain = qkv.inspect(q, k, v)
    assert not np.allclose(dropped.output, plain.output)
    np.testing.assert_array_equal(dropped.entropy, plain.entropy)
    np.testing.assert_array_equal(dropped.lse, plain.lse)


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_lower_precision_gives_float32_statistics(dtype: str, backend: str) -> None:
    rng = np.random.default_rng(6)
    q, k, v = (a.astype(dtype) for a in arrays(Shape((), 2, 1, 40, 40, 16, 16), rng))
    record = qkv.inspect(q, k, v, qkv.Causal(), backend=backend)
    tq, tk = (torch.tensor(a.astype(np.float64)) for a in (q, k))
    s = tq @ tk.mT / 4
    w = torch.softmax(s.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf), -1)
    assert record.entropy.dtype == record.weights.dtype == np.float32
    np.testing.assert_allclose(record.weights[...], w.numpy(), atol=3e-6)
    np.testing.assert_allclose(
        record.entropy, torch.special.entr(w).sum(-1).numpy(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_nothing_to_see_is_not_an_error(backend: str) -> None:
    key = np.zeros((2, 3, 4))
    record = qkv.inspect(np.zeros((2, 0, 4)), key, key, backend=backend)
    assert record.entropy.shape == (2, 0)
    assert record.received.tolist() == [[0.0] * 3] * 2
    key = np.zeros((2, 0, 4))
    record = qkv.inspect(np.zeros((2, 3, 4)), key, key, backend=backend)
    assert record.max_weight.tolist() == [[0.0] * 3] * 2
    assert record.entropy.tolist() == [[0.0] * 3] * 2
    assert record.top(2)[0].tolist() == [[[-1, -1]] * 3] * 2
    assert np.isneginf(record.lse).all()
    assert record.mass([]).tolist() == record.mass_at(0).tolist() == [[0.0] * 3] * 2


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    rng = np.random.default_rng(8)
    q, k, v = arrays(SHAPES[0], rng)

    def tell(done: int, total: int) -> None:
        seen.append((done, total))

    record = qkv.inspect(q, k, v, progress=tell, backend="blocked")
    assert seen == []
    _ = record.entropy
    assert seen == [(i, 24) for i in range(1, 25)]
    record = qkv.inspect(q, k, v, progress=tell, backend="cpu")
    seen.clear()
    _ = record.entropy, record.max_weight
    assert seen == []
    for ask in (lambda: record.received, lambda: record.top(2)):
        seen.clear()
        ask()
        # How many blocks of rows one compiled pass has depends on the machine.
        assert [done == total for done, total in seen] == [True]
        ask()
        assert len(seen) == 1


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fewer_best_keys_come_from_more_with_the_same_bits(backend: str, dtype: str) -> None:
    rng = np.random.default_rng(21)
    q, k, v = (array.astype(dtype) for array in arrays(Shape((2,), 4, 2, 40, 60, 8, 8), rng))
    k[..., 20:30, :] = k[..., :10, :]  # Equal scores.
    seen: list[bool] = []
    record = qkv.inspect(q, k, v, backend=backend)
    told = qkv.inspect(q, k, v, backend=backend, progress=lambda *at: seen.append(at[0] == at[1]))
    told.top(7)
    for count in (7, 5, 1, 3):
        for found, alone in zip(
            told.top(count), qkv.inspect(q, k, v, backend=backend).top(count), strict=True
        ):
            np.testing.assert_array_equal(found, alone)
    assert seen.count(True) == 1
    # A caller who writes into what was returned changes nothing.
    told.top(5)[1][...] = 9
    np.testing.assert_array_equal(told.top(5)[1], record.top(5)[1])
    np.testing.assert_array_equal(told.top(9)[0], record.top(9)[0])


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("k", [2, 6, 9])
def test_a_score_of_nan_spoils_its_row_and_is_no_best_key(backend: str, k: int) -> None:
    q, key, v = arrays(Shape((), 1, 1, 5, 9, 4, 4), np.random.default_rng(10))
    q[0, 1] = np.nan
    key[0, 6] = np.nan
    record = qkv.inspect(q, key, v, qkv.Causal("end"), backend=backend)
    scores = np.where(np.arange(9) <= np.arange(5)[:, None] + 4, q[0] @ key[0].T, -np.inf)
    spoilt = np.isnan(scores).any(1)
    assert spoilt.tolist() == [False, True, True, True, True]
    indices, weights = (found[0] for found in record.top(k))
    for i, row in enumerate(scores):
        numbers = [j for j in range(9) if np.isfinite(row[j])]
        expected = sorted(numbers, key=lambda j, row=row: -row[j])[:k]
        assert indices[i].tolist() == expected + [-1] * (k - len(expected))
        assert (np.isnan(weights[i]) == (spoilt[i] & (indices[i] >= 0))).all()
    np.testing.assert_array_equal(np.isnan(record.entropy[0]), spoilt)
    np.testing.assert_array_equal(np.isnan(record.max_weight[0]), spoilt)
    # Forbidden keys weigh nothing in a spoilt row too: only row 4 may see key 8.
    allowed = np.isfinite(scores) | np.isnan(scores)
    expected_weights = np.where(allowed & spoilt[:, None], np.nan, 0)
    np.testing.assert_array_equal(np.isnan(record.weights[0]), np.isnan(expected_weights))
    assert np.isnan(record.received[0]).all()


def test_the_best_keys_are_the_same_bits_whatever_was_asked_before() -> None:
    """NumPy finds more than 256 keys, and rounds their scores in its own way."""
    query, key = np.random.default_rng(0).normal(size=(2, 2, 300, 16)).astype(np.float32)
    first, then = (qkv.inspect(query, key, key) for _ in range(2))
    expected = first.top(5)
    then.top(300)
    for found, wanted in zip(then.top(5), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_top_refuses_what_is_no_count(k: object) -> None:
    record = qkv.inspect(np.eye(3), np.eye(3), np.eye(3))
    with pytest.raises(qkv.ArgumentError, match=f"k={k} is not a "):
        record.top(k)  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", [[3], [-4], [0.5], [True, False]])
def test_mass_refuses_rows_that_are_not_there(keys: object) -> None:
    record = qkv.inspect(np.eye(3), np.eye(3), np.eye(3))
    with pytest.raises(qkv.ArgumentError, match="rows of the key array"):
        record.mass(keys)


@pytest.mark.parametrize("keys", [slice(None, None, 0), slice("a", None), slice(0, 2.5)])
def test_mass_refuses_slices_without_rows(keys: slice) -> None:
    record = qkv.inspect(np.eye(3), np.eye(3), np.eye(3))
    with pytest.raises(qkv.ArgumentError, match="is not a slice of rows: slice"):
        record.mass(keys)


def test_a_row_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of the weights of the definition, over the queries that have any."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 4, 6, 8)), rng.normal(size=(2, 2, 6, 8))
    q[1, 3, 5] = np.nan
    record = qkv.inspect(torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(k))
    rows = record.rows()
    assert [(row["batch"], row["head"]) for row in rows] == list(np.ndindex(2, 4))
    for row in rows:
        batch, head = row["batch"], row["head"]
        exp = np.exp(q[batch, head] @ k[batch, head // 2].T / 8**0.5)
        w = (exp / exp.sum(axis=1, keepdims=True))[: 5 if (batch, head) == (1, 3) else 6]
        expected = {
            "entropy": -(w * np.log(w)).sum(axis=1).mean(),
            "max_weight": w.max(axis=1).mean(),
            "first": w[:, 0].mean(),
            "previous": np.diagonal(w, -1).mean(),
            "own": np.diagonal(w).mean(),
            "next": np.diagonal(w, 1).mean(),
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert repr(rows).splitlines()[0].split() == list(rows[0])
    (said,) = [line.split() for line in record.summary(batch=1).splitlines() if line[:4] == "   3"]
    assert said[1:6] == [f"{value:.2f}" for name, value in expected.items() if name != "max_weight"]

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(qkv.UnsupportedError, match="needs pandas"):
        record.to_pandas()
    frames = SimpleNamespace(DataFrame=lambda rows: ("a table", rows))
    monkeypatch.setitem(sys.modules, "pandas", frames)
    kind, held = record.to_pandas()
    assert (kind, str(held)) == ("a table", str(list(rows)))

    (one_head,) = qkv.inspect(q[0, 0], k[0, 0], k[0, 0]).rows()
    assert one_head == pytest.approx(rows[0], rel=1e-9)
    assert np.isnan(qkv.inspect(q, k[:, :, :0], k[:, :, :0]).rows()[0]["first"])
    assert np.isnan(qkv.inspect(q[:, :, :0], k, k).rows()[0]["first"])
    assert qkv.inspect(q[:0], k[:0], k[:0]).rows() == []


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint64])
def test_keys_of_mass_may_be_of_any_integer_type(kind: Any) -> None:
    query, key, value = np.random.default_rng(3).normal(size=(3, 300, 8))
    record = qkv.inspect(query, key, value)
    scores = query @ key.T / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for keys in ([0, 1], [100, 127, 100], [-1, -128] if np.iinfo(kind).min < 0 else [5]):
        expected = weights[:, sorted(set(keys))].sum(-1)
        np.testing.assert_allclose(record.mass(np.array(keys, kind)), expected, rtol=1e-9)
