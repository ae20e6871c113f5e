"""The latest call of a structure is tried first; compiled code asks whether arrays are like its."""

import gc
import sys
import threading
import weakref
from functools import partial
from itertools import product

import numpy as np
import pytest

import qkv
from qkv.backends.cpu.prepared import kernel as prepared_kernel
from qkv.backends.cpu.python_calls import filled_block
from qkv.errors import QkvError
from watched import python_calls

pytestmark = pytest.mark.usefixtures("no_prepared_calls")


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def dense(query, key, value, causal=False):
    """The definition in float64; positions are aligned at the start."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    key, value = (np.repeat(a, query.shape[-3] // a.shape[-3], axis=-3) for a in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    return weights / total @ value, (largest + np.log(total))[..., 0]


def near(arrays, *variants, **keywords) -> None:
    """A call gives the definition, with lse and without."""
    expected, expected_lse = dense(*arrays, causal=bool(variants))
    out, lse = qkv.attention(*arrays, *variants, return_lse=True, **keywords)
    again = qkv.attention(*arrays, *variants, **keywords)
    tolerance = 2e-3 if out.dtype == np.float16 else 3e-6
    np.testing.assert_allclose(out, expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=tolerance, rtol=tolerance)
    assert again.tobytes() == out.tobytes()


def arrays_of(q_len, kv_len, *, seed=0, batch=(2,), heads=(4, 2), dims=(9, 7), dtype="float32"):
    lengths = (q_len, heads[0], dims[0]), (kv_len, heads[1], dims[0]), (kv_len, heads[1], dims[1])
    return [
        normal(*batch, h, n, d, seed=3 * seed + i, dtype=dtype)
        for i, (n, h, d) in enumerate(lengths)
    ]


LENGTHS = [(1, 1), (1, 100), (3, 700), (16, 16), (16, 40), (64, 64), (200, 30)]
"""Steps and whole passes, brief and not."""


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variants", [(), (qkv.Causal("start"),)])
def test_a_repeated_call_looks_nothing_up(watched, lengths, variants) -> None:
    """A call after one of another type is looked up, which takes 20 functions more."""
    for seed in range(4):
        near(arrays_of(*lengths, seed=seed), *variants)
    one, other = arrays_of(*lengths), arrays_of(*lengths, dtype="float64")
    for arrays in (other, one) * 3 + (other,):
        qkv.attention(*arrays, *variants)
    done = watched.computed, watched.prepared("forward")
    looked_up, *repeated = (python_calls(lambda: qkv.attention(*one, *variants)) for _ in range(4))
    assert max(repeated) + 15 < looked_up
    for seed in range(4, 8):
        near(arrays_of(*lengths, seed=seed), *variants)
    assert (watched.computed, watched.prepared("forward")) == done


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_calls_take_turns(dtype, layout) -> None:
    """Calls of one structure share one place, whatever their lengths, dtypes and strides."""
    for seed, lengths, kind in product(range(4), LENGTHS[:5], [dtype, "float32"]):
        arrays = arrays_of(*lengths, seed=seed, dtype=kind)
        if layout == "bhld":
            near(arrays, scale=9**-0.5)
            near([a[..., ::-1, :].copy()[..., ::-1, :] for a in arrays], scale=9**-0.5)
            near([np.asfortranarray(a) for a in arrays], scale=9**-0.5)
            continue
        expected, _ = dense(*arrays)
        swapped = [np.ascontiguousarray(a.swapaxes(-3, -2)) for a in arrays]
        found = qkv.attention(*swapped, layout="blhd").swapaxes(-3, -2)
        np.testing.assert_allclose(found, expected, atol=2e-3 if kind == "float16" else 3e-6)


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
def test_keys_that_grow(batch) -> None:
    for kv_len in [*range(2, 9), 60, 61, 700, 701, 62, 5000, 3]:
        near(arrays_of(1, kv_len, seed=kv_len, batch=batch))
        query, key, value = arrays_of(1, kv_len + 50, seed=kv_len, batch=batch)
        near([query, key[..., :kv_len, :], value[..., :kv_len, :]])
        expected, _ = dense(query, key, value)
        found = qkv.attention(query, key, value, qkv.Causal("end"))
        np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.parametrize("q_offset", [0, 3, "start"])
def test_steps_whose_queries_stand_elsewhere(q_offset) -> None:
    """Steps of other sizes are looked up, which takes 10 functions more."""
    first = 0 if q_offset == "start" else q_offset
    counts = []
    for kv_len in range(30, 45):
        one, other = (arrays_of(1, kv_len, seed=kv_len, heads=(heads, 2)) for heads in (4, 6))
        call = partial(qkv.attention, *one, qkv.Causal(), q_offset=q_offset)
        counts.append(python_calls(call))
        query, key, value = one
        seen = [query, key[..., : first + 1, :], value[..., : first + 1, :]]
        np.testing.assert_allclose(call(), dense(*seen)[0], atol=3e-6)
        if kv_len > 36:
            qkv.attention(*other, qkv.Causal(), q_offset=q_offset)
    assert min(counts[10:]) > max(counts[4:7]) + 10


def test_as_many_queries_as_keys_are_no_step() -> None:
    """A causal mask needs no alignment for them, and is an error for other lengths."""
    for length in range(2, 6):
        near(arrays_of(length, length), qkv.Causal())
        with pytest.raises(QkvError):
            qkv.attention(*arrays_of(1, length), qkv.Causal())


@pytest.mark.parametrize("lengths", [(1, 100), (3, 700), (16, 16), (64, 64)])
def test_arrays_of_variants_are_those_of_each_call(watched, lengths) -> None:
    """Two of the same shape, whose order matters: softmax(tanh(s + first) + second)."""
    for seed in range(8):
        if seed == 4:
            computed = watched.computed
        query, key, value = arrays_of(*lengths, seed=seed)
        first, second = (normal(4, *lengths, seed=40 + 2 * seed + n) for n in (0, 1))
        variants = qkv.Bias(first), qkv.Softcap(1.0), qkv.Bias(second)
        found = qkv.attention(query, key, value, *variants)
        query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
        key, value = np.repeat(key, 2, axis=-3), np.repeat(value, 2, axis=-3)
        scores = np.tanh(query @ key.swapaxes(-1, -2) / 3.0 + first) + second
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ value
        np.testing.assert_allclose(found, expected, atol=3e-6)
    assert watched.computed == computed


@pytest.mark.parametrize("lengths", LENGTHS[:5])
def test_what_does_not_fit_is_refused(lengths) -> None:
    query, key, value = arrays_of(*lengths)
    for _ in range(4):
        near([query, key, value])
    for others in (
        (query, key, value[..., 1:, :]),
        (query, key[..., 1:], value),
        (query[0], key, value[:, :1]),
        (query, key, value.astype(np.float64)),
        (query, key.astype(np.int32), value),
        (query, key, None),
        (query, key, value.tolist()),
    ):
        with pytest.raises(QkvError):
            qkv.attention(*others)
    near([query, key, value])


@pytest.mark.parametrize("lengths", [(1, 100), (2, 100), (16, 16), (64, 64)])
def test_sums_that_overflow_are_found(lengths) -> None:
    """The output of a checked call is then computed again, in float64."""
    arrays = arrays_of(*lengths)
    for _ in range(3):
        near(arrays)
    arrays[2][:] = 3e38
    for _ in range(2):
        np.testing.assert_allclose(qkv.attention(*arrays), 3e38, rtol=1e-5)
    near(arrays_of(*lengths))


@pytest.fixture(params=["no reading of arrays", "no lock"])
def what_makes_it_quick_is_missing(request, monkeypatch, no_prepared_calls) -> None:
    """Run without compiled code that reads NumPy's arrays, or without Python's global lock.

    No setting takes these away, and no interpreter that lacks them runs all tests.
    """
    if request.param == "no lock":
        monkeypatch.setattr(prepared_kernel, "has_gil", lambda: False)
    else:
        monkeypatch.setattr(filled_block, "_can_read", lambda: False)


@pytest.mark.usefixtures("what_makes_it_quick_is_missing")
@pytest.mark.parametrize("lengths", LENGTHS[:5])
def test_without_what_makes_it_quick(lengths, monkeypatch) -> None:
    for seed in range(6):
        near(arrays_of(*lengths, seed=seed))
    make, made = filled_block.python_function, []
    monkeypatch.setattr(
        filled_block, "python_function", lambda *given: made.append(given) or make(*given)
    )
    for seed in range(3):
        near(arrays_of(*lengths, seed=seed))
    assert not made, "functions of earlier calls were made again"


def test_another_machine_is_seen(monkeypatch) -> None:
    for lengths in LENGTHS[:5]:
        for seed in range(3):
            near(arrays_of(*lengths, seed=seed))
    monkeypatch.setenv("QKV_ISA", "no such thing")
    for lengths in LENGTHS[:5]:
        with pytest.raises(QkvError, match="no such thing"):
            qkv.attention(*arrays_of(*lengths))


def test_threads_share_what_is_prepared() -> None:
    errors = []

    def call(seed) -> None:
        try:
            for turn in range(40):
                near(arrays_of(*LENGTHS[(seed + turn) % 5], seed=seed))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS[:5])
def test_nothing_is_kept_alive_or_lost(lengths) -> None:
    arrays = arrays_of(*lengths)
    for _ in range(4):
        qkv.attention(*arrays)
    before = [*map(sys.getrefcount, arrays), sys.getrefcount(arrays[0].dtype)]
    for _ in range(300):
        out = qkv.attention(*arrays)
    after = [*map(sys.getrefcount, arrays), sys.getrefcount(arrays[0].dtype)]
    assert after[:3] == before[:3]
    assert abs(after[3] - before[3]) < 20
    assert sys.getrefcount(out) == 2
    dead = [weakref.ref(array) for array in (*arrays, out)]
    del arrays, out
    gc.collect()
    assert not any(ref() is not None for ref in dead)


def test_arrays_of_derived_classes_are_read_as_arrays() -> None:
    class Own(np.ndarray):
        pass

    for seed in range(4):
        arrays = arrays_of(1, 100, seed=seed)
        near(arrays)
        np.testing.assert_array_equal(
            qkv.attention(*[a.view(Own) for a in arrays]), qkv.attention(*arrays)
        )


def rotated(array):
    """Rows turned by their positions: entries i and i + half by position / 10000 ** (2 i / dim)."""
    half, length = array.shape[-1] // 2, array.shape[-2]
    angle = np.arange(length)[:, None] / 10000.0 ** (np.arange(half) / half)
    low, high = np.asarray(array[..., :half], np.float64), np.asarray(array[..., half:], np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


@pytest.mark.parametrize("lengths", [(16, 16), (64, 64), (200, 200), (20, 300)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rotation_and_sinks_around_a_repeated_call(watched, lengths, dtype) -> None:
    """A call whose sinks have other values is another call."""
    sinks = [normal(4, seed=n) for n in range(2)]

    def check(seed, values) -> None:
        query, key, value = arrays_of(*lengths, seed=seed, dims=(8, 7), dtype=dtype)
        out, lse = dense(rotated(query), rotated(key), value)
        total = np.logaddexp(lse, values[:, None])
        variants = qkv.RoPE(), qkv.Sinks(values)
        place = {"q_offset": "start"}
        found, found_lse = qkv.attention(query, key, value, *variants, return_lse=True, **place)
        tolerance = 2e-3 if dtype == "float16" else 3e-6
        expected = out * np.exp(lse - total)[..., None]
        np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(found_lse, total, atol=tolerance, rtol=tolerance)
        assert qkv.attention(query, key, value, *variants, **place).tobytes() == found.tobytes()
        turned = qkv.attention(query, key, value, qkv.RoPE(), **place)
        np.testing.assert_allclose(turned, out, atol=tolerance, rtol=tolerance)

    for seed in range(4):
        check(seed, sinks[seed % 2])

    computed = watched.computed
    for seed in range(4, 7):
        check(seed, sinks[seed % 2])
    assert watched.computed == computed
    sinks[0] += 1.0
    for seed in range(3):
        check(seed, sinks[seed % 2])
