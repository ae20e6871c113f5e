"""Addresses beyond 32 bits, very long rows, and memory that does not grow."""

import mmap
import subprocess
import sys
import tracemalloc
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import qkv
from qkv.backends.cpu.plan.schedule import schedule
from qkv.problem.building.check import check
from qkv.testing import bounds, truth

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's; known to Python from 3.13 on."""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for memory without backing")


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def far_apart(array: np.ndarray, axis: int, step: int = 2**31 + 40) -> np.ndarray:
    """The same entries, more than 2**31 elements from one another along an axis.

    A negative step has them backwards. Only the pages that are touched take memory.
    """
    rest = np.moveaxis(array, axis, 0)
    entry = rest[0].nbytes
    assert entry < abs(step) * array.itemsize
    size = abs(step) * array.itemsize * (len(rest) - 1) + entry
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    first = abs(step) * array.itemsize * (len(rest) - 1) if step < 0 else 0
    inner = np.empty(rest.shape[1:], array.dtype).strides
    there = np.ndarray(rest.shape, array.dtype, memory.data, first, (step * array.itemsize, *inner))
    there[...] = rest
    return np.moveaxis(there, 0, axis)


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["batch", "head", "row", "element"])
@pytest.mark.sampled(
    ("sign", "dtype", "q_len"),
    list(product([1, -1], [np.float32, ml_dtypes.bfloat16], [3, 40])),
    one_in=4,
)
def test_strides_beyond_two_to_the_31(axis, sign, dtype, q_len) -> None:
    query, key, value = (
        normal(2, 2, length, 3, dtype=dtype, seed=seed) for seed, length in enumerate((q_len, 5, 5))
    )
    bias = normal(2, 2, q_len, 5, seed=4)
    mask = np.random.default_rng(5).random((2, 2, q_len, 5)) < 0.7
    near = query, key, value, bias, mask
    far = [far_apart(a, axis, sign * (2**31 + 40)) for a in near]
    assert all(abs(a.strides[axis]) > 2**31 * a.itemsize for a in far)
    out, lse = qkv.attention(*far, backend="cpu", return_lse=True)
    expected = truth(query, key, value, (bias, mask))
    limits = bounds(expected, dtype)
    seen = ~np.isneginf(expected.lse)
    assert np.abs(out - expected.out).max() <= limits.out
    assert np.abs(lse[seen] - expected.lse[seen]).max() <= limits.lse
    grad_out = normal(*out.shape, dtype=dtype, seed=6)
    apart = far_apart(grad_out, axis, sign * (2**31 + 40))
    found, same = (
        qkv.vjp(*arrays, backend="cpu")[1](cotangent)
        for arrays, cotangent in ((far, apart), (near, grad_out))
    )
    for side in ("query", "key", "value"):
        np.testing.assert_allclose(
            getattr(found, side).astype(float), getattr(same, side).astype(float), rtol=0.01,
            atol=1e-5,
        )  # fmt: skip


def test_ten_million_keys_for_many_queries() -> None:
    """One key, ten million times; values of which the mean is known; then only the last of them."""
    length = 10_000_000
    key = np.broadcast_to(normal(1, 1, 2), (1, length, 2))
    value = np.random.default_rng(1).random((1, length, 1), np.float32)
    query = normal(1, 40, 2, seed=2)
    score = query[0].astype(float) @ key[0, 0].astype(float) * 2**-0.5
    out, lse = qkv.attention(query, key, value, backend="cpu", return_lse=True)
    # The sums of blocks of keys are added, and rounded this way and that.
    roundings = np.sqrt(length / 64)
    np.testing.assert_allclose(out[0], value.mean(dtype=float), rtol=roundings * 2.0**-24)
    np.testing.assert_allclose(lse[0], score + np.log(length), rtol=1e-6)
    out, lse = qkv.attention(
        query, key, value, qkv.SlidingWindow(999, 0), q_offset="end", backend="cpu",
        return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(lse[0], score + np.log(1000), rtol=1e-6)
    means = [value[0, length - 40 - 999 + i : length - 39 + i, 0].mean() for i in range(40)]
    np.testing.assert_allclose(out[0, :, 0], means, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_ten_million_keys_in_sixteen_bits(dtype) -> None:
    length = 10_000_000
    key = np.broadcast_to(normal(1, 1, 2, dtype=dtype), (1, length, 2))
    query = normal(1, 40, 2, dtype=dtype, seed=2)
    score = query[0].astype(float) @ key[0, 0].astype(float) * 2**-0.5
    out, lse = qkv.attention(query, key, key, backend="cpu", return_lse=True)
    np.testing.assert_allclose(out.astype(float), key[:, :1].astype(float) + 0 * out.astype(float),
                               rtol=0.01)  # fmt: skip
    np.testing.assert_allclose(lse[0], score + np.log(length), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "call_variants"),
    [
        (np.float32, ()),
        (np.float64, (qkv.Causal("end"),)),
        (np.float16, (qkv.ALiBi(), qkv.Causal("end"))),
        (ml_dtypes.bfloat16, (qkv.Softcap(9.0),)),
        (np.float32, (qkv.Mask(True),)),
    ],
)
def test_sides_of_no_rows_and_of_one(dtype, call_variants) -> None:
    for q_len, kv_len in ((0, 0), (0, 1), (1, 0), (1, 1)):
        query, key = normal(2, 2, q_len, 4, dtype=dtype), normal(2, 1, kv_len, 4, dtype=dtype)
        out, pullback = qkv.vjp(query, key, key, *call_variants, backend="cpu")
        assert out.shape == query.shape
        expected = np.repeat(key, 2, axis=1) if kv_len and q_len else 0 * query
        np.testing.assert_array_equal(out, expected)
        found = pullback(np.ones_like(out))
        assert (found.query == 0).all()
        assert (found.key == 0).all()
        assert (found.value == (2 if q_len else 0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("q_blocks_per_task", [1, 4])
@pytest.mark.parametrize("kind", ["causal", "window", "segments"])
def test_a_schedule_never_holds_all_its_tiles(kind, q_blocks_per_task) -> None:
    """5.6 million of them, some arrays of eight bytes each."""
    length = 131_072
    rows = np.arange(length)
    variant = {
        "causal": qkv.Causal(),
        "window": qkv.SlidingWindow(256, 0),
        "segments": qkv.Segments(rows // 3000, rows // 3000),
    }[kind]
    array = np.broadcast_to(np.float32(0), (1, length, 64))
    problem = check(array, array, array, (variant,))
    tracemalloc.start()
    plan = schedule(problem, 48, q_blocks_per_task=q_blocks_per_task)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plan.tasks) == -(-length // (48 * q_blocks_per_task))
    assert peak < 10 * 2**20


GROWTH = """
import sys
import numpy as np, qkv
import ml_dtypes

def megabytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024

def inputs(length, dtype):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((h, n, dim), np.float32).astype(dtype)
            for h, n in ((heads, length[0]), (1, length[1]), (1, length[1]))]

def said(kind, q_len, kv_len):
    return {
        "plain": lambda: (),
        "causal": lambda: (qkv.Causal("end"),),
        "causal, alibi": lambda: (qkv.Causal("end"), qkv.ALiBi()),
        "window": lambda: (qkv.SlidingWindow(256, 0), qkv.Softcap(20.0)),
        "segments": lambda: (qkv.Segments(np.arange(q_len) // 3000, np.arange(kv_len) // 3000),
                             qkv.KeyLengths(kv_len - 5)),
    }[kind]()

kind, dtype, way = sys.argv[1:4]
heads, q_len, kv_len, dim = map(int, sys.argv[4:])
dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)

def call(arrays, q_len, kv_len):
    variants = said(kind, q_len, kv_len)
    if way == "forward":
        return qkv.attention(*arrays, *variants, q_offset="end", backend="cpu")
    out, pullback = qkv.vjp(*arrays, *variants, q_offset="end", backend="cpu")
    return pullback(out)

few = min(q_len, 200)
call(inputs((few, 300), dtype), few, 300)  # what is compiled and imported stays
arrays = inputs((q_len, kv_len), dtype)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = megabytes("VmRSS")
result = call(arrays, q_len, kv_len)
print(megabytes("VmHWM") - before)
"""


def growth(*arguments: object) -> float:
    """MiB by which a process grows during one call."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, *map(str, arguments)], capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


BEYOND = 16
"""MiB that a call may take beside its input and output."""


@pytest.mark.slow
@LINUX
@pytest.mark.sampled(
    ("kind", "dtype"),
    [
        ("plain", "bfloat16"),
        ("causal, alibi", "float32"),
        ("window", "float16"),
        ("segments", "float32"),
    ],
    one_in=2,
)
def test_sixteen_thousand_tokens_take_sixteen_mebibytes(kind, dtype) -> None:
    length = 16_384
    output = 2 * length * (64 * (4 if dtype == "float32" else 2) + 4) / 2**20
    assert growth(kind, dtype, "forward", 2, length, length, 64) - output < BEYOND


@pytest.mark.slow
@LINUX
@pytest.mark.sampled(
    ("kind", "dtype", "item"),
    [
        ("causal", "float32", 4),
        ("causal", "bfloat16", 2),
        ("window", "float32", 4),
        ("segments", "float16", 2),
    ],
    one_in=4,
)
def test_a_hundred_and_thirty_thousand_tokens_take_sixteen_mebibytes(kind, dtype, item) -> None:
    """The tokens have few dimensions, which what is beside the operands does not depend on."""
    length, dim = 131_072, 4
    output = length * (dim * item + 4) / 2**20
    assert growth(kind, dtype, "forward", 1, length, length, dim) - output < BEYOND


@pytest.mark.slow
@LINUX
@pytest.mark.sampled("kind", ["plain", "window"], one_in=2)
def test_a_step_against_eight_million_keys_takes_sixteen_mebibytes(kind) -> None:
    """An integer for each key would be 61."""
    assert growth(kind, "bfloat16", "forward", 1, 1, 8_000_000, 16) < BEYOND


@pytest.mark.slow
@LINUX
@pytest.mark.sampled("kind", ["window", "segments"], one_in=2)
def test_gradients_of_sixteen_thousand_tokens_take_a_few_arrays(kind) -> None:
    """Memory grows by at most eight arrays like query, as `vjp` says, and sixteen mebibytes."""
    length = 16_384
    arrays = 8 * 2 * length * 64 * 4 / 2**20
    assert growth(kind, "float32", "backward", 2, length, length, 64) < arrays + BEYOND


ROWS = 46_400
"""A number of rows whose square is beyond 2**31."""


def few_keys() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which keys all rows may see, rows, and the output of the first of them."""
    seen = np.random.default_rng(0).random(ROWS) < 0.01
    rows = normal(1, ROWS, 4)
    return seen, rows, truth(rows[:, :64], rows[:, seen], rows[:, seen]).out


@pytest.mark.slow
def test_a_mask_of_more_than_two_to_the_31_entries() -> None:
    """The mask repeats a row, and takes no memory; forward, backward and inspected."""
    seen, rows, expected = few_keys()
    mask = np.lib.stride_tricks.as_strided(seen, (1, ROWS, ROWS), (0, 0, 1))
    assert mask.size > 2**31
    few = rows[:, :64]
    out = qkv.attention(rows, rows, rows, mask, backend="cpu")
    assert np.abs(out[:, :64] - expected).max() < 1e-5
    again = qkv.attention(rows[:, -64:], rows, rows, mask[:, -64:], backend="cpu")
    assert np.abs(out[:, -64:] - again).max() < 1e-5
    _, pullback = qkv.vjp(few, rows, rows, mask[:, :64])
    assert not pullback(np.ones_like(few)).key[:, ~seen].any()
    record = qkv.inspect(few, rows, rows, mask[:, :64])
    assert seen[record.top(3)[0]].all()


@pytest.mark.slow
def test_a_mask_of_many_heads() -> None:
    heads, length = 70_000, 180
    rows = normal(heads, length, 2)
    causal = np.lib.stride_tricks.as_strided(
        np.tri(length, dtype=bool), (heads, length, length), (0, length, 1)
    )
    assert causal.size > 2**31
    out = qkv.attention(rows, rows, rows, causal, backend="cpu")
    assert np.array_equal(out[:, 0], rows[:, 0])
    last = qkv.attention(rows[-2:], rows[-2:], rows[-2:], qkv.Causal(), backend="cpu")
    assert np.abs(out[-2:] - last).max() < 1e-6


@pytest.mark.slow
def test_a_mask_of_more_than_two_to_the_31_bytes() -> None:
    rows = normal(1, ROWS, 4)
    mask = np.zeros((ROWS, ROWS), bool)
    mask[:, ::700] = True
    mask[-2:] = False
    mask[-2, 0] = mask[-1, -1] = True
    out = qkv.attention(rows, rows, rows, mask, backend="cpu")
    assert np.array_equal(out[0, -2:], rows[0, [0, -1]])
