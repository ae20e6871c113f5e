"""The replays of the compiled backend: best keys and received weight, and what rows tell."""

from __future__ import annotations

import tracemalloc
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import qkv
from forced import as_it_runs
from qkv.backends import Inspectable, backends
from qkv.backends.cpu.passes import replay as replay_pass
from qkv.backends.cpu.passes import workers
from qkv.backends.cpu.split_bf16 import choice
from qkv.problem.building.builder import Shape
from qkv.problem.building.check import check
from qkv.testing import truth
from qkv.variants import ALL

NARROW = [as_it_runs(isa) for isa in ("avx2", "sse")]
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def arrays(shape: Shape, dtype=np.float32, seed=0) -> list[np.ndarray]:
    rng, lead = np.random.default_rng(seed), shape.batch_shape
    return [
        rng.normal(size=(*lead, *sizes)).astype(dtype)
        for sizes in (
            (shape.num_heads, shape.q_len, shape.head_dim),
            (shape.num_kv_heads, shape.kv_len, shape.head_dim),
            (shape.num_kv_heads, shape.kv_len, shape.v_head_dim),
        )
    ]


def entropy(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


def check_statistics(given: list[np.ndarray], variants: list, k: int = 5, **keywords) -> None:
    """Everything that the backend tells, against whole matrices in float64."""
    record = qkv.inspect(*given, *variants, backend="cpu", **keywords)
    w = truth(*given, variants, **keywords).weights
    exact = given[0].dtype == np.float64
    # A weight is known to the rounding of its score and of lse.
    close = {"rtol": 1e-12, "atol": 1e-13} if exact else {"rtol": 2e-5, "atol": 1e-6}
    np.testing.assert_allclose(record.entropy, entropy(w), **close)
    np.testing.assert_allclose(record.max_weight, w.max(-1), **close)
    np.testing.assert_allclose(record.received, w.sum(-2), **close)
    indices, weights = record.top(k)
    best = np.sort(np.concatenate([w, np.zeros((*w.shape[:-1], k))], -1))[..., ::-1][..., :k]
    np.testing.assert_allclose(weights, best, **close)
    named = np.take_along_axis(w, np.maximum(indices, 0), -1)
    np.testing.assert_allclose(np.where(indices < 0, 0, named), best, **close)
    np.testing.assert_allclose(
        weights, np.where(indices < 0, 0, taken(record.weights[...], indices)), **close
    )
    ordered = np.sort(indices, -1)
    assert ((np.diff(ordered, axis=-1) > 0) | (ordered[..., 1:] == -1)).all(), "a key twice"
    for found in (record.entropy, record.max_weight, record.received, weights):
        assert found.dtype == (np.float64 if exact else np.float32)


def taken(weights: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return np.take_along_axis(weights, np.maximum(indices, 0), -1)


@pytest.fixture(params=["parts", "elements"])
def products(request: pytest.FixtureRequest) -> str:
    """Both products of scores; problems are too small for parts to be chosen."""
    request.getfixturevalue("splits_operands")
    patch = request.getfixturevalue("monkeypatch")
    if request.param == "parts":
        request.getfixturevalue("tiles")
    else:
        patch.setattr(choice, "LEAST_SIZES", {})
    return str(request.param)


BLOCKS = Shape((2,), 4, 2, 70, 150, 20, 5)
"""More than a block of queries and of keys, and neither whole."""


@pytest.mark.slow
@pytest.mark.sampled("variant", ALL, one_in=19, ids=lambda kind: kind.__name__)
def test_every_variant(variant) -> None:
    for example in variant.examples(BLOCKS, np.random.default_rng(3)):
        check_statistics(arrays(BLOCKS), [example], q_offset="end")


def several(shape: Shape) -> list:
    bias = np.random.default_rng(5).normal(size=(shape.num_heads, shape.q_len, shape.kv_len))
    ids = np.arange(shape.kv_len) * 3 // shape.kv_len
    return [
        qkv.Causal("end"), qkv.ALiBi(), qkv.Bias(bias), qkv.Softcap(4.0), qkv.RoPE(),
        qkv.Segments(ids[-shape.q_len :], ids), qkv.Sinks(np.linspace(-1, 3, shape.num_heads)),
        qkv.Dropout(0.4, 7),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(
    ("shape", "dtype"), list(product([BLOCKS, Shape((), 6, 2, 2, 131, 32, 4)], DTYPES)), one_in=6
)
def test_types_and_variants_together(dtype: str, shape: Shape) -> None:
    check_statistics(arrays(shape, DTYPES[dtype]), several(shape))


@pytest.mark.slow
@pytest.mark.parametrize("isa", NARROW)
def test_narrower_vectors(isa, monkeypatch) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    check_statistics(arrays(BLOCKS), several(BLOCKS))


SIZES = list(product([1, 3, 15, 16, 17, 63, 64, 65, 129], [1, 5, 64, 129]))


@pytest.mark.sampled(("q_len", "kv_len"), SIZES, one_in=8)
def test_sizes(q_len: int, kv_len: int) -> None:
    shape = Shape((), 4, 2, q_len, kv_len, 7, 3)
    check_statistics(arrays(shape), [qkv.Causal("start"), qkv.Sinks(0.5)], k=3)
    check_statistics([a[:, ::-1, ::-1] for a in arrays(shape)], [], k=kv_len)


@pytest.mark.slow
@pytest.mark.usefixtures("products")
def test_rows_that_see_little() -> None:
    """Blocks of queries without keys, keys that no query sees, and fewer keys than k."""
    lengths = np.array([0, 3, 150])
    shape = Shape((3,), 2, 1, 70, 150, 8, 8)
    given = arrays(shape)
    mask = np.zeros((70, 150), bool)
    mask[64:, 100:103] = True
    for variants in ([qkv.KeyLengths(lengths)], [qkv.Mask(mask)], [qkv.Mask(mask), qkv.Sinks(1.0)]):
        check_statistics(given, variants)
    record = qkv.inspect(*given, qkv.Mask(mask), backend="cpu")
    assert (record.top(5)[0][:, :, :64] == -1).all()
    assert (record.top(5)[0][:, :, 64:, 3:] == -1).all()
    assert (record.received[..., :100] == 0).all()


# Best keys


@pytest.mark.slow
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("k", [1, 2, 8, 33, 140, 300])
def test_ties_go_to_the_lower_key(k: int) -> None:
    """Few different scores, and zeros of both signs, which are equal."""

    def mod(s, b, h, q, key):
        level = (key * 7 + q * 3) % 4
        zero = np.where(key % 3 == 0, -0.0, 0.0)
        return np.where(level == 3, -np.inf, np.where(level == 1, zero, level * 1.0))

    given = arrays(Shape((), 1, 1, 21, 140, 4, 4))
    indices, _ = qkv.inspect(*given, qkv.ScoreMod(mod), q_offset=0, backend="cpu").top(k)
    keys = np.arange(140)
    for q, row in enumerate(indices[0]):
        level = (keys * 7 + q * 3) % 4
        rank = {2: 0, 1: 1, 0: 1}
        allowed = sorted(keys[level != 3], key=lambda j, level=level: (rank[level[j]], j))
        assert row.tolist() == [*allowed, *[-1] * k][:k]


@pytest.mark.slow
@pytest.mark.usefixtures("products")
def test_scores_in_rising_order_enter_one_by_one() -> None:
    """Each key is the best so far, and then the worst: every place of the list is moved through.

    Weights of neighbours differ by a factor of 1.6 to 22: none of the nine best is zero."""
    query, key, value = arrays(Shape((), 2, 2, 80, 200, 4, 4))
    query /= np.abs(query).sum(-1, keepdims=True)
    key /= np.abs(key).max()
    for slope in (1.0, -1.0):
        bias = 2.5 * slope * np.arange(200.0)
        record = qkv.inspect(query, key, value, qkv.Bias(bias), backend="cpu")
        order = np.argsort(-bias)[:9]
        np.testing.assert_array_equal(record.top(9)[0], np.broadcast_to(order, (2, 80, 9)))


def test_long_lists_are_left_to_numpy() -> None:
    given = arrays(Shape((), 1, 1, 6, 400, 8, 8))
    problem = check(*given, ())
    record = qkv.inspect(*given, backend="cpu")
    most = replay_pass.MOST_TOP_KEYS
    assert replay_pass.top(problem, record.lse, most + 1) is None
    compiled, numpy = record.top(most), record.top(most + 1)
    np.testing.assert_array_equal(compiled[0], numpy[0][..., :most])
    np.testing.assert_allclose(compiled[1], numpy[1][..., :most], rtol=1e-5)
    check_statistics(given, [], k=most)


@pytest.mark.slow
@pytest.mark.usefixtures("products")
def test_nan_is_no_best_key_and_spoils_only_what_it_meets() -> None:
    query, key, value = arrays(Shape((), 1, 1, 70, 150, 8, 8))
    key[0, 130] = np.nan
    query[0, 3] = np.nan
    variants = (qkv.Causal("end"),)
    found = qkv.inspect(query, key, value, *variants, backend="cpu")
    other = qkv.inspect(query, key, value, *variants, backend="blocked")
    for k in (4, 149):
        for one, two in zip(found.top(k), other.top(k), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5)
    for name in ("entropy", "max_weight", "received"):
        one, two = getattr(found, name), getattr(other, name)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(two))
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    # Query 3 is NaN and sees keys 0 to 83; query 50 is the first that sees the NaN of key 130.
    assert np.isnan(found.entropy[0]).nonzero()[0].tolist() == [3, *range(50, 70)]
    hidden = qkv.inspect(query, key, value, *variants, qkv.SlidingWindow(10, 0), backend="cpu")
    spoilt = np.isnan(hidden.received[0]).nonzero()[0]
    assert spoilt.tolist() == [*range(73, 84), *range(120, 141)]


# Sums


@pytest.mark.slow
@pytest.mark.parametrize("bias", [-1e9, 40.0, 3e4])
def test_rows_of_large_lse_are_summed_again(products: str, bias: float, monkeypatch) -> None:
    """The replay sums with its own scores: all rows where tiles give the forward pass others."""
    query, key, value = arrays(Shape((), 2, 2, 200, 90, 8, 8))
    rows = np.zeros((200, 1), np.float32)
    rows[[3, 130]] = bias
    asked = []
    sums = replay_pass._max_and_log_sum
    monkeypatch.setattr(
        replay_pass, "_max_and_log_sum", lambda *of: asked.append(of[1]) or sums(*of)
    )
    for sink in ([], [qkv.Sinks([bias, 0.0])]):
        record = qkv.inspect(query, key, value, qkv.Bias(rows), *sink, backend="cpu")
        total = 1 - np.exp(np.array([[bias], [0.0]]) - record.lse.astype(float)) if sink else 1.0
        received = record.received.astype(float).sum(-1)
        if not sink:
            np.testing.assert_allclose(received, 200, rtol=1e-6)
            summed = [*range(200)] if products == "parts" else [3, 130]
            assert asked[-1].nonzero()[1].tolist() == summed * 2
            np.testing.assert_allclose(record.top(90)[1].sum(-1), total, rtol=2e-6)
        with_keys = truth(query, key, value, [qkv.Bias(rows), *sink]).weights
        if bias != -1e9:  # float32 keeps nothing of the products beside 1e9
            near = {"rtol": 5e-6 if bias == 40 else 5e-3, "atol": 1e-6}
            np.testing.assert_allclose(received, with_keys.sum((-2, -1)), rtol=near["rtol"])
            np.testing.assert_allclose(record.max_weight, with_keys.max(-1), **near)
            np.testing.assert_allclose(record.entropy, entropy(with_keys), **near)
    assert len(asked) >= 3


def test_many_rows_are_added_without_drift() -> None:
    """65,536 weights to a key: a plain float32 sum of them would be off by 1e-5."""
    rng = np.random.default_rng(1)
    query = rng.normal(size=(1, 65_536, 2)).astype(np.float32)
    key = rng.normal(size=(1, 9, 2)).astype(np.float32)
    scores = query[0].astype(float) @ key[0].astype(float).T * 2**-0.5
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    received = qkv.inspect(query, key, key, backend="cpu").received
    np.testing.assert_allclose(received[0], weights.sum(0), rtol=2e-7)


# Products of parts


TASKS = Shape((2,), 2, 1, 300, 333, 40, 24)
"""More queries than one task takes; the last block of keys fills no tile."""


@pytest.mark.slow
@pytest.mark.parametrize("products", ["parts"], indirect=True)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "name", ["plain", "causal", "window and ALiBi", "segments", "several", "lengths"]
)
@pytest.mark.one_in(4)
def test_best_keys_of_several_tasks(products, dtype, name) -> None:
    lengths = np.array([130, 333])
    variants = {
        "plain": [],
        "causal": [qkv.Causal("start")],
        "window and ALiBi": [qkv.SlidingWindow(70, 3), qkv.ALiBi()],
        "segments": [qkv.Segments(np.arange(300) // 90, np.arange(333) // 90)],
        "several": several(TASKS),
        "lengths": [qkv.KeyLengths(lengths)],
    }[name]
    given, keywords = arrays(TASKS, dtype), {} if name == "several" else {"q_offset": 0}
    rotated_halves = name == "several" and dtype == np.float16
    assert (
        replay_pass._splits_operands(check(*given, tuple(variants), **keywords)) != rotated_halves
    )
    check_statistics(given, variants, **keywords)
    if name == "causal":
        check_statistics(given, variants, q_offset=0, scale=-0.3)
        given = [a[..., ::-1, ::-1] for a in given]
        check_statistics(given, variants, q_offset=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scores_are_bit_for_bit_those_of_the_forward_pass(products, dtype) -> None:
    """Where a query sees one key, lse is that score, and the weight is exp(0)."""
    query, key, value = (10 * a for a in arrays(Shape((), 2, 1, 300, 300, 64, 8), dtype))
    each_one = qkv.Mask(np.eye(300, dtype=bool))
    # The largest number of float32 is infinite if it is rounded to bfloat16.
    for small, large in ((1.0, 1.0), (1e-4, 3e4), (1e-37, 3.4028e38))[: 2 + (dtype == np.float32)]:
        query[..., 5], key[:, ::41, 5] = small, large
        record = qkv.inspect(query, key, value, each_one, backend="cpu")
        indices, weights = record.top(2)
        assert np.isfinite(record.lse).all()
        np.testing.assert_array_equal(indices[..., 0], [np.arange(300)] * 2)
        np.testing.assert_array_equal(weights, np.broadcast_to([1.0, 0.0], (2, 300, 2)))


# Threads and memory


@pytest.mark.slow
@pytest.mark.usefixtures("products")
def test_bits_do_not_depend_on_threads(monkeypatch) -> None:
    given = arrays(Shape((), 4, 2, 300, 700, 16, 16))
    rows = np.zeros((300, 1), np.float32)
    rows[::7] = 1e3
    variants = [qkv.Causal("end"), qkv.Bias(rows), qkv.Sinks(0.0)]
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1.0)
    found = set()
    for threads in (1, 2, 3, 4, 5, 2):
        monkeypatch.setattr(workers, "_SLICE_SECONDS", 1e-9 if len(found) else 0.1)
        monkeypatch.setenv("QKV_NUM_THREADS", str(threads))
        record = qkv.inspect(*given, *variants, backend="cpu")
        indices, weights = record.top(7)
        statistics = (indices, weights, record.received, record.entropy, record.max_weight)
        found.add(b"".join(a.tobytes() for a in statistics))
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.large
@pytest.mark.usefixtures("products")
def test_memory_does_not_grow_with_pairs() -> None:
    """16,384 tokens: 1 GiB if a matrix were held."""
    given = arrays(Shape((), 1, 1, 16_384, 16_384, 4, 4))
    variants = [qkv.Causal(), qkv.Bias(np.full((16_384, 1), 50.0, np.float32))]
    record = qkv.inspect(*given, *variants, backend="cpu")
    for ask in (lambda: record.received, lambda: record.top(8)):
        tracemalloc.start()
        ask()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 * 2**20


def test_who_answers() -> None:
    offers = {backend.name: isinstance(backend, Inspectable) for backend in backends()}
    assert offers["cpu"]
    assert not offers["blocked"]
    assert not offers["reference"]
