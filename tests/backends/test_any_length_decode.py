"""Steps of decoding that are prepared once, for any number of keys."""

import gc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import qkv
from qkv.backends import LONGEST_STEP
from qkv.backends.cpu import CpuBackend
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.rows import rotation
from qkv.call.repeated.numpy_runs import run_on_arrays
from qkv.problem.building.check import check

CPU = CpuBackend()
LENGTHS = (17, 18, 64, 65, 530, 1100, 3)
CACHE = 1200
ATOL = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-3, "bfloat16": 2e-2}


def normal(*shape, seed=0, dtype="float32"):
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def table(heads, seed=0):
    return qkv.RelativeBias(normal(32, heads, seed=seed), False, 128)


VARIANTS = {
    "nothing": (),
    "causal": (qkv.Causal(),),
    "window": (qkv.SlidingWindow(40, 0),),
    "window or prefix": (qkv.SlidingWindow(100, 0) | qkv.Prefix(70),),
    "prefix of each row": (qkv.Causal() | qkv.Prefix([0, 700]),),
    "slopes": (qkv.Softcap(5.0), qkv.ALiBi(), qkv.Causal()),
    "buckets": (table(4), qkv.Causal()),
    "global": (qkv.SlidingWindow(63, 0) | qkv.GlobalTokens([0, 3, 500]),),
    "dilated": (qkv.Causal() & qkv.Strided(3),),
    "function": (qkv.ScoreMod(lambda s, b, h, q, k: np.where(k % 7 == h, -np.inf, s / (1 + b))),),
    "dropped": (qkv.Dropout(0.3, 5), qkv.Causal()),
    "sinks": (qkv.Sinks(np.array([0.5, -1.0, 3.0, 0.0])), qkv.SlidingWindow(50, 0)),
}


def prepared(query, key, value, variants=(), arrays=(), **keywords):
    """What makes steps of NumPy arrays, None if nothing is prepared."""
    made = prepared_by_cpu(query, key, value, variants, arrays, **keywords)
    if made is None:
        return None

    def step(query, key, value, rows, arrays, q_shift):
        return run_on_arrays(made, (query, key, value), arrays, rows=rows, q_shift=q_shift)

    return step


def prepared_by_cpu(query, key, value, variants=(), arrays=(), **keywords):
    return CPU.prepare(
        check(query, key, value, variants, **keywords), "forward", any_length=True, arrays=arrays
    )


def caches(dtype="float32", batch=(2,), heads=2, dim=24):
    return [normal(*batch, heads, CACHE, dim, seed=i + 1, dtype=dtype) for i in range(2)]


def first_call(query, key, value, variants, **keywords):
    return qkv.attention(query, key, value, *variants, return_lse=True, backend="cpu", **keywords)


@pytest.mark.slow
@pytest.mark.sampled("name", list(VARIANTS), one_in=4)
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_step_gives_the_bits_of_a_first_call(name, q_len) -> None:
    """The bits of the first call are right: another backend says the same."""
    variants, (keys, values) = VARIANTS[name], caches()
    query = normal(2, 4, q_len, 24)
    steps = prepared(query, keys[:, :, :20], values[:, :, :20], variants, q_offset="end")
    for seed, length in enumerate(LENGTHS):
        query = normal(2, 4, q_len, 24, seed=seed)
        rows = keys[:, :, :length], values[:, :, :length]
        for key, value in (rows, [np.ascontiguousarray(r) for r in rows]):
            out, lse = steps(query, key, value, True, (), length - q_len)
            expected = first_call(query, key, value, variants, q_offset="end")
            assert out.tobytes() == expected[0].tobytes()
            assert lse.tobytes() == expected[1].tobytes()
            alone, none = steps(query, key, value, False, (), length - q_len)
            assert alone.tobytes() == out.tobytes()
            assert none is None
        right = qkv.attention(query, *rows, *variants, q_offset="end", backend="reference")
        np.testing.assert_allclose(out, right, atol=2e-6, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ATOL)
def test_every_type(dtype) -> None:
    keys, values = caches(dtype)
    # With two queries, vectors of two numbers would not serve: one is a step on every machine.
    query = normal(2, 6, 1, 24, dtype=dtype)
    steps = prepared(query, keys, values, (qkv.SlidingWindow(90, 0),), q_offset="end")
    for length in (30, 601):
        key, value = keys[:, :, :length], values[:, :, :length]
        out, _ = steps(query, key, value, False, (), length - 1)
        assert out.dtype == query.dtype
        keywords = {"q_offset": "end", "backend": "reference"}
        right = qkv.attention(query, key, value, qkv.SlidingWindow(90, 0), **keywords)
        near = ATOL[dtype]
        np.testing.assert_allclose(out.astype(float), right.astype(float), atol=near, rtol=near)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (1, 3, 1)])
def test_strides_may_change_with_each_step(batch) -> None:
    """Views of a buffer, arrays of their own, heads and rows exchanged, and one row for all."""
    keys, values = caches(batch=batch)
    query = normal(*batch, 4, 1, 24)
    steps = prepared(query, keys, values)
    for length in (5, 70):
        views = keys[..., :length, :], values[..., :length, :]
        turned = [np.ascontiguousarray(v.swapaxes(-3, -2)).swapaxes(-3, -2) for v in views]
        backwards = [v[..., ::-1, :, ::-1] for v in views]
        same = [np.broadcast_to(v.reshape(-1, *v.shape[-3:])[0], v.shape) for v in views]
        doubled = np.repeat(query, 2, axis=-1)[..., ::2]
        for key, value in (views, turned, backwards, same, (views[0], same[1])):
            for asked in (query, doubled, np.ascontiguousarray(query[..., ::-1])[..., ::-1]):
                out, lse = steps(asked, key, value, True, (), 0)
                expected = first_call(query, key, value, ())
                assert out.tobytes() == expected[0].tobytes()
                assert lse.tobytes() == expected[1].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4, 1, 0), (2, 1, 1, 0), (1, 1, 1, 0), (1, 4, 1, 0)])
def test_arrays_along_the_keys_are_read_where_they_lie(shape) -> None:
    rng = np.random.default_rng(0)
    keys, values = caches()
    query = normal(2, 4, 1, 24)

    def drawn(length):
        full = (*shape[:-1], length)
        mask = rng.random(full) < 0.5
        mask[..., : length // 2] = False
        bias = rng.normal(size=full).astype("float32")
        return mask, np.where(rng.random(full) < 0.1, -np.inf, bias)

    mask, bias = drawn(40)
    variants = qkv.Mask(mask), qkv.Bias(bias), qkv.Causal()
    steps = prepared(
        query, keys[:, :, :40], values[:, :, :40], variants, (mask, bias), q_offset="end"
    )
    for length in LENGTHS:
        key, value = keys[:, :, :length], values[:, :, :length]
        mask, bias = drawn(length)
        for m, b in ((mask, bias), (mask[..., ::-1], np.repeat(bias, 3, axis=-1)[..., ::3])):
            out, lse = steps(query, key, value, True, (m, b), length - 1)
            variants = qkv.Mask(m), qkv.Bias(b), qkv.Causal()
            expected = first_call(query, key, value, variants, q_offset="end")
            assert out.tobytes() == expected[0].tobytes()
            assert lse.tobytes() == expected[1].tobytes()
            right = qkv.attention(query, key, value, *variants, q_offset="end", backend="reference")
            np.testing.assert_allclose(out, right, atol=2e-6)


def test_what_a_mask_forbids_does_not_leak() -> None:
    """NaN in blocks that are skipped, and in blocks that are partly forbidden."""
    (key, value), query = caches(), normal(2, 4, 1, 24)
    mask = np.ones((2, 1, 1, CACHE), bool)
    mask[0, ..., 70:400] = mask[1, ..., 5:] = False
    steps = prepared(query, key, value, (qkv.Mask(mask),), (mask,))
    clean = steps(query, key, value, True, (mask,), 0)
    for array in (key, value):
        array[0, :, 70:400] = np.nan
        array[1, :, 5:] = np.inf
    again = steps(query, key, value, True, (mask,), 0)
    assert [a.tobytes() for a in clean[:2]] == [a.tobytes() for a in again[:2]]
    nothing = np.zeros_like(mask)
    out, lse = steps(query, key, value, True, (nothing,), 0)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_arrays_of_another_form_are_not_taken() -> None:
    (keys, values), query = caches(), normal(2, 4, 1, 24)
    mask = np.ones((2, 1, 1, 50), bool)
    rows = keys[:, :, :50], values[:, :, :50]
    steps = prepared(query, *rows, (qkv.Mask(mask),), (mask,))
    assert steps(query, *rows, False, (mask,), 0) is not None
    for other in (mask[:1], mask[..., :49], mask[0], np.ones((2, 4, 1, 50), bool)):
        assert steps(query, *rows, False, (other,), 0) is None
    assert steps(query, *rows, False, (), 0) is None
    assert steps(query, *rows, False, (mask, mask), 0) is None
    # A dimension that is the same for all may be long if its stride is 0.
    same = np.broadcast_to(mask, (2, 4, 1, 50))
    out, _ = steps(query, *rows, False, (same,), 0)
    assert out.tobytes() == steps(query, *rows, False, (mask,), 0)[0].tobytes()


def test_what_holds_one_length_is_not_prepared() -> None:
    query, key = normal(2, 4, 1, 24), normal(2, 2, 50, 24)
    ids = np.zeros(50, int)
    for variant in (
        qkv.Mask(np.ones((2, 1, 1, 50), bool)),
        qkv.Bias(np.zeros((1, 50), "float32")),
        qkv.Segments(ids[:1], ids),
        qkv.BlockSparse(np.ones((1, 4), bool), 1, 16),
    ):
        assert prepared(query, key, key, (variant,)) is None
    # Each batch row has an offset of its own, which no single number moves.
    assert prepared(query, key, key, (qkv.Causal(),), q_offset=[30, 40]) is None


def test_lengths_and_shifts_beyond_what_was_prepared_for() -> None:
    query, key = normal(1, 2, 1, 16), normal(1, 2, 50, 16)
    steps = prepared(query, key, key, (qkv.Causal(),), q_offset="end")
    for shift in (LONGEST_STEP + 1, -LONGEST_STEP - 1):
        assert steps(query, key, key, False, (), shift) is None
    assert steps(query, key[:, :, :0], key[:, :, :0], False, (), 0) is None
    whole = prepared(query, key, key)(query, key, key, False, (), 0)[0]
    assert steps(query, key, key, False, (), LONGEST_STEP)[0].tobytes() == whole.tobytes()
    out, lse = steps(query, key, key, True, (), -LONGEST_STEP)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_a_step_that_is_not_taken_gives_its_memory_back() -> None:
    query, key = normal(1, 2, 1, 16), normal(1, 2, 50, 16)
    steps = prepared(query, key, key)

    def blocks() -> int:
        return sum(type(each) is ArgumentBlock for each in gc.get_objects())

    assert steps(query, key, key, False, (), 0) is not None
    gc.collect()  # Garbage of other tests might go between the two counts.
    before = blocks()
    assert steps(query, key[:, :, :0], key[:, :, :0], False, (), 0) is None
    assert blocks() == before


@pytest.mark.parametrize("name", ["window", "sinks"])
def test_steps_by_address(name) -> None:
    variants, (keys, values) = VARIANTS[name], caches()
    query = normal(2, 4, 1, 24)
    run = prepared_by_cpu(query, keys, values, variants, q_offset="end").run
    for length in LENGTHS:
        arrays = query, keys[:, :, :length], values[:, :, :length]
        out, lse = np.full((2, 4, 1, 24), np.nan, "float32"), np.full((2, 4, 1), np.nan, "float32")
        *read, at_out, at_lse = [array.ctypes.data for array in (*arrays, out, lse)]
        layouts = []
        for array in arrays:
            layouts += array.shape, tuple([stride // array.itemsize for stride in array.strides])
        assert run((*read, at_out, at_lse), arrays, layouts, length - 1, True)
        expected = first_call(*arrays, variants, q_offset="end")
        assert out.tobytes() == expected[0].tobytes()
        assert lse.tobytes() == expected[1].tobytes()
        out[:] = np.nan
        assert run((*read, at_out, 0), arrays, layouts, length - 1, True)
        assert out.tobytes() == expected[0].tobytes()


def test_many_threads_take_steps_at_once() -> None:
    """Each has a block of words of its own, with its own shift."""
    (keys, values), query = caches(), normal(2, 4, 1, 24)
    steps = prepared(query, keys, values, (qkv.SlidingWindow(30, 0),), q_offset="end")

    def step(length):
        key, value = keys[:, :, :length], values[:, :, :length]
        return steps(query, key, value, False, (), length - 1)[0].tobytes()

    lengths = [*range(1, CACHE, 29)] * 8
    alone = [step(length) for length in lengths]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(step, lengths)) == alone


@pytest.mark.parametrize("first", [0, 900])
def test_angles_are_computed_for_several_steps_ahead(monkeypatch, first) -> None:
    """A table of any size has room for the positions that come next."""
    inv_freq = 1 / 10000 ** (np.arange(4) / 4)
    monkeypatch.setattr(rotation, "_BYTES_AHEAD", 16 * len(inv_freq) * 20)
    table, computed = rotation.AngleTable(inv_freq, 0.5), []
    compute = table._compute
    monkeypatch.setattr(table, "_compute", lambda *of: computed.append(of) or compute(*of))
    for count in range(1000, 1100):
        found = table.rows(first, count)
        last = (first + count - 1) * inv_freq
        np.testing.assert_array_equal(found.cosines[:, -1], 0.5 * np.cos(last)[None])
        np.testing.assert_array_equal(found.sines[:, -1], 0.5 * np.sin(last)[None])
        assert found.cosines.shape == (1, count, 4)
    assert len(computed) == 5
