"""Scores of heads against a loop over weights in float64, without any library of models."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.inspection.heads import head_scores as module
from qkv.inspection.heads.earlier_tokens import EarlierToken
from qkv.inspection.heads.head_scores import HeadScores, head_scores, kind_of
from qkv.inspection.models.model_record import HeadTable, ModelRecord, load

SHAPE = (2, 4, 13, 8)
BATCH, HEADS, LENGTH, DIM = SHAPE


def arrays(seed: int = 0, width: float = 2.0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    query = rng.standard_normal(SHAPE) * width
    key = rng.standard_normal((BATCH, 2, LENGTH, DIM))
    return query, key, rng.integers(0, 4, (BATCH, LENGTH))


def softmax(query: Any, key: Any, allowed: Any, sinks: Any = None) -> tuple[Any, Any]:
    """Weights (batch, heads, q_len, kv_len) and scores, row by row."""
    key = np.repeat(key, HEADS // key.shape[1], axis=1)
    scores = np.einsum("bhid,bhjd->bhij", query, key) * DIM**-0.5
    scores = np.where(allowed, scores, -np.inf)
    extra = np.zeros(HEADS) if sinks is None else np.exp(sinks)
    weights = np.exp(scores)
    return weights / (weights.sum(-1, keepdims=True) + extra[:, None, None]), scores


def loop(weights: Any, ids: Any, name: str, head: int, segment: Any, real: Any) -> float:
    """The mean of one score, straight from its definition."""
    found: list[float] = []
    for b, i in np.ndindex(weights.shape[0], weights.shape[2]):
        w = weights[b, head, i]
        mine = [j for j in range(len(w)) if segment[b, j] == segment[b, i] and real[b, j]]
        if not real[b, i]:
            continue
        match name:
            case "sink":
                found.append(w[mine[0]] + 1 - w.sum())
            case "previous":
                found += [w[i - 1]] if i - 1 in mine else []
            case "own":
                found.append(w[i])
            case "duplicate":
                keys = [j for j in mine if j < i and ids[b, j] == ids[b, i]]
                found += [w[keys].sum()] if keys else []
            case "induction":
                keys = [j for j in mine if j <= i and j - 1 in mine and ids[b, j - 1] == ids[b, i]]
                found += [w[keys].sum()] if keys else []
            case "distance":
                found.append(sum(w[j] * abs(i - j) for j in mine))
            case "entropy":
                found.append(-sum(x * math.log(x) for x in w if x > 0))
    return math.fsum(found) / len(found)


NAMES = ("sink", "previous", "own", "duplicate", "induction", "distance", "entropy")


def check(scores: HeadScores, weights: Any, ids: Any, segment: Any, real: Any, rel: float) -> None:
    means = scores.means()
    for name in NAMES:
        for head in range(HEADS):
            expected = loop(weights, ids, name, head, segment, real)
            assert means[name][head] == pytest.approx(expected, rel=rel, abs=rel), name


def cases() -> dict[str, Any]:
    every = np.ones((LENGTH, LENGTH), bool)
    causal, one = np.tril(every), np.zeros((BATCH, LENGTH), int)
    halves = np.repeat([[0] * 6 + [1] * 7], BATCH, axis=0)
    real = np.ones((BATCH, LENGTH), bool)
    padded = real.copy()
    padded[0, :4] = padded[1, 10:] = False
    near = causal & ~np.tril(every, -4)
    same = (halves[:, :, None] == halves[:, None])[:, None]
    seen = padded[:, None, None, :]
    holed = padded.copy()
    holed[0, 7] = holed[1, 3:5] = False
    return {
        "causal": ((qkv.Causal(),), causal, one, real),
        "both ways": ((), every, one, real),
        "window": ((qkv.SlidingWindow(3, 0),), near, one, real),
        "packed": ((qkv.Causal(), qkv.Segments(halves)), causal & same, halves, real),
        "padded": ((qkv.Causal(), qkv.Mask(seen)), causal & seen, one, padded),
        "a hole": (
            (qkv.Causal(), qkv.Mask(holed[:, None, None])),
            causal & holed[:, None, None],
            one,
            holed,
        ),
        "padded both ways": ((qkv.Mask(seen),), every & seen, one, padded),
    }


@pytest.mark.slow
@pytest.mark.sampled(("case", "dtype"), list(product(cases(), ["float64", "float32"])), one_in=6)
def test_scores_are_those_of_the_definition(case: str, dtype: str) -> None:
    variants, allowed, segment, real = cases()[case]
    query, key, ids = arrays()
    query, key = (array.astype(dtype) for array in (query, key))
    with np.errstate(invalid="ignore"):
        weights, scores = softmax(query.astype("f8"), key.astype("f8"), allowed)
    found = head_scores(query, key, *variants, tokens=ids, real=real)
    check(found, weights, ids, segment, real, 1e-10 if dtype == "float64" else 2e-5)
    weights = np.where(real[:, None, :, None], weights, 0)
    scores = np.where(real[:, None, :, None], scores, -np.inf)
    expected = scores.max(axis=(0, 2, 3))
    np.testing.assert_allclose(found.means()["max_logit"], expected, rtol=1e-5)
    np.testing.assert_allclose(found.received, weights.sum(axis=2), rtol=2e-5, atol=1e-5)


def test_a_token_whose_only_follower_is_padding_is_no_induction() -> None:
    """Such queries were once counted, with a weight of 0."""
    variants, allowed, segment, real = cases()["a hole"]
    query, key, ids = arrays(2)
    ids = np.where(np.arange(LENGTH) == 8, 9, ids % 2)
    ids[:, [2, 6]] = 9
    with np.errstate(invalid="ignore"):
        weights, _ = softmax(query, key, allowed)
    found = head_scores(query, key, *variants, tokens=ids, real=real)
    check(found, weights, ids, segment, real, 1e-10)


@pytest.mark.parametrize("shapes", [(1, 3), (3, 1)])
def test_one_query_beside_many_keys_is_one_for_each(shapes: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    query, key = (rng.normal(size=(n, 2, 6, 4)) for n in shapes)
    real, ids = np.ones((3, 6), bool), rng.integers(0, 3, (3, 6))
    real[1, :2] = False
    found = head_scores(query, key, qkv.Causal(), tokens=ids, real=real)
    for b in range(3):
        chosen = (slice(b, b + 1),)
        q, k = (array[chosen] if len(array) > 1 else array for array in (query, key))
        alone = head_scores(q, k, qkv.Causal(), tokens=ids[chosen], real=real[chosen])
        for name, rows in alone.rows.items():
            np.testing.assert_allclose(found.rows[name][chosen], rows, atol=1e-12, err_msg=name)
            np.testing.assert_array_equal(found.counted[name][chosen], alone.counted[name])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_padding_on_either_side_of_cross_attention(dtype: str) -> None:
    query, key, _ = arrays(5)
    q_real, kv_real = np.ones((BATCH, LENGTH - 4), bool), np.ones((BATCH, LENGTH), bool)
    q_real[0, 6:] = kv_real[0, :3] = kv_real[1, 11:] = False
    weights, _ = softmax(query[:, :, :-4], key, kv_real[:, None, None])
    found = head_scores(
        query[:, :, :-4].astype(dtype), key.astype(dtype), qkv.Mask(kv_real[:, None, None]),
        real=kv_real, real_queries=q_real, one_sequence=False, top=1,
    )  # fmt: skip
    first = np.stack([weights[0, ..., 3], weights[1, ..., 0]])
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    for name, rows in (("sink", first), ("entropy", entropy)):
        expected = [rows[:, head][q_real].mean() for head in range(HEADS)]
        np.testing.assert_allclose(found.means()[name], expected, rtol=2e-5)
        assert np.isnan(found.rows[name][0, :, 6:]).all()
        np.testing.assert_allclose(found.rows[name][1], rows[1], rtol=2e-5, atol=1e-5)
    seen = np.where(q_real[:, None, :, None], weights, 0)
    np.testing.assert_allclose(found.received, seen.sum(2), rtol=2e-5, atol=1e-5)
    assert (found.top_keys[0, :, 6:] == -1).all()
    with pytest.raises(qkv.ShapeError, match=r"real_queries has shape \(2, 13\).*\(2, 9\) query"):
        head_scores(query[:, :, :-4], key, real_queries=kv_real)


@pytest.mark.parametrize("sinks", [(), (qkv.Sinks([-1.0, 0.0, 1.0, 4.0]),)])
def test_queries_that_may_use_no_key_are_not_counted(sinks: tuple[Any, ...]) -> None:
    query, key, ids = arrays(6)
    before = np.tril(np.ones((LENGTH, LENGTH), bool), -2)
    allowed = np.broadcast_to(before, (BATCH, HEADS, LENGTH, LENGTH)).copy()
    with np.errstate(invalid="ignore"):
        weights, _ = softmax(query, key, allowed, sinks[0].values if sinks else None)
    found = head_scores(query, key, qkv.Mask(allowed), *sinks, tokens=ids)
    some = np.zeros((BATCH, LENGTH), bool)
    some[:, 2:] = True
    assert (found.counted["entropy"] == some).all()
    w = weights[:, :, 2:]
    first = w[..., 0] + (1 - w.sum(-1) if sinks else 0)
    np.testing.assert_allclose(found.means()["sink"], first.mean(axis=(0, 2)), rtol=1e-9)
    entropy = -(w * np.log(np.where(w > 0, w, 1))).sum(-1).mean(axis=(0, 2))
    np.testing.assert_allclose(found.means()["entropy"], entropy, rtol=1e-9)
    assert np.isfinite(found.means()["max_logit"]).all()


def test_a_cache_without_the_first_key_has_no_sink() -> None:
    query, key, _ = arrays(7)
    found = head_scores(query[:, :, :1], key, qkv.Causal(), q_offset=20, kv_offset=8)
    assert not found.rows["sink"].any()
    # Padding that the cache still holds: the first real key is the first of its sequence.
    real = np.ones((BATCH, LENGTH), bool)
    real[0, :2] = False
    mask = qkv.Mask(real[:, None, None])
    found = head_scores(query[:, :, :1], key, mask, real=real, q_offset=20, kv_offset=8)
    weights, _ = softmax(query[:, :, :1], key, real[:, None, None])
    np.testing.assert_allclose(found.rows["sink"][0, :, 0], weights[0, :, 0, 2], rtol=1e-9)
    assert not found.rows["sink"][1].any()


def test_scores_of_padding_are_nan() -> None:
    variants, _, _, real = cases()["padded"]
    query, key, ids = arrays()
    found = head_scores(query, key, *variants, tokens=ids, real=real)
    for name, rows in found.rows.items():
        assert (np.isnan(rows).any(axis=1) == ~real).all(), name


def test_sinks_take_their_share() -> None:
    query, key, ids = arrays(1)
    sinks = np.array([-1.0, 0.0, 1.0, 4.0])
    one, real = np.zeros((BATCH, LENGTH), int), np.ones((BATCH, LENGTH), bool)
    weights, _ = softmax(query, key, np.tril(np.ones((LENGTH, LENGTH), bool)), sinks)
    found = head_scores(query, key, qkv.Causal(), qkv.Sinks(sinks), tokens=ids)
    check(found, weights, ids, one, real, 1e-10)
    np.testing.assert_allclose(
        found.means()["learned_sink"], 1 - weights.sum(-1).mean(axis=(0, 2)), rtol=1e-10
    )
    both = head_scores(query, key, qkv.Sinks(sinks), tokens=ids)
    weights, _ = softmax(query, key, np.ones((LENGTH, LENGTH), bool), sinks)
    check(both, weights, ids, one, real, 1e-10)


def test_large_scores_are_computed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(lse_S - lse) in float32 loses 1e-7 of lse; at 3000 that is 3e-4 of a score."""
    rng = np.random.default_rng(3)
    # Scores of about 3000 that differ by a few units, exactly representable in float32.
    query = np.full((BATCH, HEADS, LENGTH, DIM), 32.0)
    key = np.full((BATCH, 2, LENGTH, DIM), 33.0)
    key[..., 0] += rng.integers(-8, 8, key.shape[:-1]) / 32
    ids = rng.integers(0, 4, (BATCH, LENGTH))
    allowed = np.tril(np.ones((LENGTH, LENGTH), bool))
    scores = np.einsum("bhid,bhjd->bhij", query, np.repeat(key, 2, axis=1)) * DIM**-0.5
    shifted = np.where(allowed, scores - scores.max(), -np.inf)
    weights = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    one, real = np.zeros((BATCH, LENGTH), int), np.ones((BATCH, LENGTH), bool)

    def scored() -> HeadScores:
        return head_scores(query.astype("f4"), key.astype("f4"), qkv.Causal(), tokens=ids)

    check(scored(), weights, ids, one, real, 1e-7)
    monkeypatch.setattr(module, "needs_float64", lambda lse: False)
    with pytest.raises(AssertionError):
        check(scored(), weights, ids, one, real, 1e-7)


def test_16_bit_arrays_are_read_as_what_they_are() -> None:
    query, key, ids = arrays(4)
    query, key = (array.astype("f2") for array in (query, key))
    found = head_scores(query, key, qkv.Causal(), tokens=ids).means()
    expected = head_scores(query.astype("f8"), key.astype("f8"), qkv.Causal(), tokens=ids).means()
    for name, means in expected.items():
        np.testing.assert_allclose(found[name], means, rtol=2e-5, atol=2e-5)


def test_queries_among_earlier_keys() -> None:
    """Decoding: the last rows of a longer sequence score as they do within it."""
    query, key, ids = arrays(5)
    whole = head_scores(query, key, qkv.Causal(), tokens=ids)
    tail = head_scores(query[:, :, 9:], key, qkv.Causal(), tokens=ids, q_offset=9)
    for name, rows in whole.rows.items():
        np.testing.assert_allclose(tail.rows[name], rows[:, :, 9:], rtol=1e-10, atol=1e-10)


def test_queries_of_each_batch_row_are_the_last_of_its_own_keys() -> None:
    query, key, ids = arrays()
    ids, lengths = ids + 5, np.array([8, LENGTH])
    real = np.arange(LENGTH) < lengths[:, None]
    variants = qkv.KeyLengths(lengths), qkv.Causal()
    options: dict[str, Any] = {"q_offset": "end"}
    both = head_scores(query[:, :, :3], key, *variants, tokens=ids, real=real, **options)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        own = query[one, :, :3], key[one, :, :length]
        alone = head_scores(*own, qkv.Causal(), tokens=ids[one, :length], **options)
        for name in ("duplicate", "induction", "previous", "own"):
            np.testing.assert_allclose(both.rows[name][row], alone.rows[name][0], atol=1e-12)
            np.testing.assert_array_equal(both.counted[name][row], alone.counted[name][0])


def test_dropout_is_left_out() -> None:
    query, key, ids = arrays(6)
    found = head_scores(query, key, qkv.Causal(), qkv.Dropout(0.5, 1), tokens=ids)
    plain = head_scores(query, key, qkv.Causal(), tokens=ids)
    np.testing.assert_array_equal(found.rows["distance"], plain.rows["distance"])


def test_what_does_not_apply_is_nan() -> None:
    query, key, _ = arrays(7)
    without = head_scores(query, key).means()
    assert np.isnan(without["induction"]).all()
    assert np.isfinite(without["previous"]).all()
    cross = head_scores(query[:, :, :5], key, q_offset=0, one_sequence=False).means()
    assert {name for name, mean in cross.items() if np.isnan(mean).all()} == {
        "previous", "own", "duplicate", "induction", "distance",
    }  # fmt: skip


def test_no_row_without_padding() -> None:
    query, key, ids = arrays(8)
    real = np.zeros((BATCH, LENGTH), bool)
    scores = head_scores(query, key, qkv.Causal(), tokens=ids, real=real)
    assert np.isnan(scores.means()["entropy"]).all()
    assert (scores.received == 0).all()


def test_weights_that_are_not_there_take_no_memory() -> None:
    """No array as large as the weights is allocated, not even for one head."""
    import tracemalloc

    length = 3000
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, 2, length, 16)).astype("f4")
    ids = rng.integers(0, 50, (1, length))
    head_scores(query[:, :, :300], query[:, :, :300], qkv.Causal(), tokens=ids[:, :300])
    tracemalloc.start()
    head_scores(query, query, qkv.Causal(), tokens=ids)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < length * length * 4 / 2


@pytest.mark.parametrize("causal", [(), (qkv.Causal(),)], ids=["all", "causal"])
def test_distances_far_from_the_first_position(causal: tuple[Any, ...]) -> None:
    """A window that a cache of a long text holds: its distances are small, its positions not."""
    query, key, ids = arrays(5)
    offsets = {"q_offset": 8_000_000, "kv_offset": 8_000_000}
    scores = head_scores(query.astype("f4"), key.astype("f4"), *causal, **offsets)
    allowed = np.tri(LENGTH, dtype=bool) if causal else np.ones((LENGTH, LENGTH), bool)
    weights, _ = softmax(query, key, allowed)
    whole = np.ones(ids.shape, bool)
    for head, mean in enumerate(scores.means()["distance"]):
        expected = loop(weights, ids, "distance", head, np.zeros_like(ids), whole)
        assert mean == pytest.approx(expected, rel=1e-5)


def test_many_packed_sequences_take_no_more_memory() -> None:
    """A position comes once in each, and each has a first key: as many pairs as rows times both."""
    import tracemalloc

    sequences, each = 1024, 4
    length = sequences * each
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, 1, length, 8)).astype("f4")
    packed = qkv.Segments(np.repeat(np.arange(sequences), each)), qkv.Causal()
    head_scores(query[:, :, :300], key[:, :, :300], qkv.Causal())
    tracemalloc.start()
    scores = head_scores(query, key, *packed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < length * length * 4 / 2
    q, k = (rows.reshape(sequences, each, 8).astype(np.float64) for rows in (query, key))
    raw = np.where(np.tri(each, dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(8), -np.inf)
    weights = np.exp(raw) / np.exp(raw).sum(axis=2, keepdims=True)
    previous = np.pad(weights.diagonal(-1, 1, 2), ((0, 0), (1, 0)))
    expected = {
        "previous": previous, "own": weights.diagonal(0, 1, 2), "sink": weights[:, :, 0]
    }  # fmt: skip
    for name, rows in expected.items():
        np.testing.assert_allclose(scores.rows[name].reshape(sequences, each), rows, atol=3e-6)


@pytest.mark.parametrize("at_least", [0, 1])
def test_the_mask_of_earlier_tokens(at_least: int) -> None:
    query, key, ids = (array[:1] for array in arrays(9))
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    allowed = (ids[0][:, None] == ids[0]) & (behind >= at_least)
    found = qkv.attention(query, key, key, EarlierToken(ids, ids, at_least))
    np.testing.assert_allclose(found, qkv.attention(query, key, key, allowed), atol=1e-12)


def test_kinds() -> None:
    none = dict.fromkeys(module.KINDS, 0.1)
    assert kind_of(none) is None
    assert kind_of({**none, "sink": 0.4}) == "sink"
    assert kind_of({**none, "sink": 0.5, "previous": 0.6}) == "previous"
    assert kind_of({**none, "induction": math.nan, "own": 0.9}) == "own"
    assert kind_of({**none, "induction": 0.8, "previous": 0.8}) == "induction"


# --- records of models ---------------------------------------------------------------------------


def record_of_two_layers(**options: Any) -> ModelRecord:
    record = ModelRecord("two layers", **options)
    for layer in range(2):
        query, key, ids = arrays(layer)
        record.add(query, key, qkv.Causal(), name=f"layers.{layer}", tokens=ids)
    record.tokens, record.texts = ids, [f"t{i}" for i in range(LENGTH)]
    return record


def test_a_table_of_all_heads() -> None:
    record = record_of_two_layers()
    assert len(record) == 2
    rows = record.rows()
    assert [(row["layer"], row["head"]) for row in rows] == [
        (x, h) for x in (0, 1) for h in range(4)
    ]
    assert list(rows[0])[3:] == ["also", *module.SCORES]
    lines = repr(rows).splitlines()
    assert len(lines) == 9
    assert len({len(line) for line in lines}) == 1
    assert repr(HeadTable()) == "HeadTable([])"
    best = record.best("previous")
    assert best is not None
    assert best["previous"] == max(row["previous"] for row in rows)


def test_the_table_is_of_pandas_where_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    record = record_of_two_layers()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("df", rows)))
    kind, rows = record.heads()
    assert kind == "df"
    assert rows == list(record.rows())
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert record.heads() == record.rows()


def test_layers_by_number() -> None:
    record = record_of_two_layers(keep=[1])
    assert record.layer(-1) is record[1]
    assert record[1].weights.shape == (2, 4, LENGTH, LENGTH)
    with pytest.raises(qkv.ArgumentError, match=r"from 0 to 1"):
        record.layer(2)
    with pytest.raises(IndexError):
        record[2]
    with pytest.raises(qkv.ArgumentError, match="kept no query and key"):
        record[0].weights  # noqa: B018
    with pytest.raises(qkv.ArgumentError, match="keep='all'"):
        ModelRecord("m", keep="all")  # type: ignore[arg-type]


def test_saved_and_read_again(tmp_path: Path) -> None:
    record = record_of_two_layers()
    record.save(tmp_path / "r.safetensors")
    again = load(tmp_path / "r.safetensors")
    assert repr(again.rows()) == repr(record.rows())
    assert again.rows() == record.rows()
    assert again.texts == record.texts
    np.testing.assert_array_equal(again.tokens, record.tokens)
    for one, two in zip(again, record, strict=True):
        np.testing.assert_array_equal(one.received, two.received)
        np.testing.assert_array_equal(one.top[0], two.top[0])


@pytest.mark.parametrize(
    "hostile", ["missing", "empty", "noise", "arrays", "cut", "shapes", "json"]
)
def test_other_files_are_refused(tmp_path: Path, hostile: str) -> None:
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "r.safetensors"
    about = '{"schema": "qkv-model-record", "version": 1, "model": "m", "texts": null, "layers": 3}'
    record_of_two_layers().save(path)
    match hostile:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "noise":
            path.write_bytes(b"\xff" * 100)
        case "arrays":
            save_file({"q": np.eye(2)}, path)
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "shapes":
            arrays = load_file(path)
            arrays["layers.1.received"] = arrays["layers.1.received"][:1]
            names = about.replace("3}", '["a", "b"]}')
            save_file(arrays, path, {"qkv": names})
        case "json":
            save_file({"q": np.eye(2)}, path, {"qkv": about})
    with pytest.raises(qkv.FileError):
        load(path)
