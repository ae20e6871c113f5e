"""The forward kernel for bfloat16 on matrix tiles: shifts of rows, tasks, and its exponential.

Products of parts have the same shifts and tasks, for float32 and float16.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import qkv
from forced import both_ways
from on_cpu import require_right, run
from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter
from qkv.backends.cpu.emit.vector_math import _EXP2_FLOORED, exp2_floored
from qkv.backends.cpu.forward.layout import LAST_PARTIAL
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.backends.cpu.plan.schedule import schedule
from qkv.problem.building.check import check
from qkv.problem.tiles import TileGrid, TileKind
from qkv.testing import truth

Array = np.ndarray[Any, Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ON_TILES = pytest.mark.usefixtures("tiles", "splits_operands")
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("f4")], ids=str)


def normal(*shape: int, seed: int = 0, dtype: np.dtype[Any] = BFLOAT16) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# Shifts


def with_a_late_large_key(
    times: float, dtype: np.dtype[Any] = BFLOAT16
) -> tuple[Array, Array, Array]:
    """Key 150 is along query 3, so that this query's score is far above those of earlier keys."""
    query, key, value = (normal(1, n, 64, seed=n, dtype=dtype) for n in (40, 200, 201))
    key[0, 150] = query[0, 3] * np.array(times, dtype)
    return query, key, value[:, :200]


def gaps(query: Array, key: Array) -> Array:
    """How far the score of key 150 exceeds those of the first group of keys."""
    scores = query[0].astype(float) @ key[0].astype(float).T / 8
    return scores[:, 150] - scores[:, :32].max(axis=-1)


@pytest.mark.slow
@ON_TILES
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("f4"), np.dtype("f2")], ids=str)
@pytest.mark.parametrize("variants", [(), (qkv.Causal("end"),), (qkv.Softcap(900.0),)], ids=str)
@pytest.mark.one_in(3)
def test_scores_far_above_those_of_the_first_keys(
    dtype: np.dtype[Any], variants: tuple[Any, ...]
) -> None:
    """Weights of up to 2^700 have no place in float32: the shift of such rows is raised."""
    arrays = with_a_late_large_key(60.0, dtype)
    assert gaps(*arrays[:2]).max() > 400
    require_right(arrays, *variants)


@ON_TILES
@DTYPES
def test_rows_beside_them_keep_their_bits(dtype: np.dtype[Any]) -> None:
    """A row whose first shift serves has the bits that it has where no shift is raised."""
    query, key, value = with_a_late_large_key(60.0, dtype)
    small = gaps(query, key) < 2
    assert small[:16].sum() > 4
    assert not small[3]
    out, lse = run(query, key, value)
    query[0, ~small] = 0
    again, lse_again = run(query, key, value)
    assert out[0, small].tobytes() == again[0, small].tobytes()
    assert lse[0, small].tobytes() == lse_again[0, small].tobytes()


@ON_TILES
def test_outputs_that_overflow_with_the_first_shift() -> None:
    """A weight of 2^35 times a value of 2^100 has no place in float32, their mean has."""
    query, key, value = with_a_late_large_key(2.5)
    value *= np.array(2.0**100, BFLOAT16)
    gap = gaps(query, key)[3] / np.log(2)
    assert 28 < gap < 40, "not so large that the sum of weights says so"
    require_right((query, key, value))


@ON_TILES
@pytest.mark.parametrize(("dtype", "near"), [(BFLOAT16, 3e-5), (np.dtype("f4"), 3e-6)], ids=str)
def test_statistics_are_those_of_the_largest_score(dtype: np.dtype[Any], near: float) -> None:
    arrays = with_a_late_large_key(2.0, dtype)
    found = qkv.inspect(*arrays, backend="cpu")
    expected = truth(*arrays, ()).weights[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(expected > 0, expected * np.log(expected), 0).sum(axis=-1)
    np.testing.assert_allclose(found.max_weight[0], expected.max(axis=-1), rtol=near)
    np.testing.assert_allclose(found.entropy[0], entropy, atol=near)


@ON_TILES
@DTYPES
def test_rows_that_see_their_first_key_late(dtype: np.dtype[Any]) -> None:
    """Rows begin in the first, the second and the third group of 32 of one block of keys."""
    allowed = np.zeros((48, 130), bool)
    for row in range(48):
        allowed[row, 5 * (row % 24) : 5 * (row % 24) + 9] = True
    arrays = tuple(normal(1, n, 64, seed=n, dtype=dtype) for n in (48, 130, 130))
    require_right(arrays, qkv.Mask(allowed))


@ON_TILES
def test_a_scale_of_zero() -> None:
    """Weights are equal, and keys that are hidden or do not exist have none."""
    query, key, value = (normal(1, n, 32, seed=n) for n in (40, 50, 50))
    for variants in ((), (qkv.Causal("end"),)):
        out, lse = run(query, key, value, *variants, scale=0.0)
        seen = np.tri(40, 50, 10) if variants else np.ones((40, 50))
        np.testing.assert_allclose(lse[0], np.log(seen.sum(axis=-1)), atol=1e-6)
        mean = seen / seen.sum(axis=-1, keepdims=True) @ value[0].astype(float)
        np.testing.assert_allclose(out[0].astype(float), mean, atol=0.01)


# Tasks


@pytest.mark.slow
@ON_TILES
@DTYPES
@pytest.mark.parametrize("head_dim", [24, 80])
def test_bits_do_not_depend_on_what_one_task_holds(head_dim: int, dtype: np.dtype[Any]) -> None:
    """Each number of threads has tasks of another size, and so has a call of one head."""
    query, key, value = (normal(4, 600, head_dim, seed=n, dtype=dtype) for n in range(3))
    found, sizes = [], set()
    try:
        for threads in (1, 2, 5):
            qkv.set_num_threads(threads)
            found.append(run(query, key, value, qkv.Causal()))
            shape = ForwardPass(check(query, key, value, (qkv.Causal(),))).shape
            sizes.add(shape.q_blocks_per_task)
    finally:
        qkv.set_num_threads(None)
    alone = run(query[2:3], key[2:3], value[2:3], qkv.Causal())
    assert len(sizes) > 1
    for out, lse in found:
        assert out.tobytes() == found[0][0].tobytes()
        assert lse.tobytes() == found[0][1].tobytes()
        assert out[2].tobytes() == alone[0].tobytes()


def test_blocks_of_which_the_last_quarter_alone_needs_a_mask() -> None:
    arrays = [np.zeros((1, 300, 8), BFLOAT16)] * 3
    problem = check(*arrays, (qkv.Causal(),))
    plan = schedule(problem, 32, q_blocks_per_task=4, tile_kv=32, block_kv=128)
    grid = TileGrid(problem.spec.mask, problem.operands.tables, 300, 300, 32, 32)
    kinds, seen = grid.classify(0, 0), 0
    for _, _, first_row, first_run, last_run in plan.tasks.tolist():
        for start, _, *words in plan.runs[first_run:last_run].tolist():
            for block in range(4):
                kind, first, last = (word >> 2 * block & 3 for word in words)
                if kind == LAST_PARTIAL:
                    tiles_seen = kinds[first_row // 32 + block, start // 32 :][first : last + 1]
                    assert set(tiles_seen[:-1]) == {TileKind.FULL}
                    assert tiles_seen[-1] == TileKind.PARTIAL
                    seen += 1
    assert seen == 7, "of ten blocks of queries, all but those whose first quarter is the last"


# The exponential


def emit_exp2(emulated: bool) -> str:
    """A function of the addresses of 16 numbers, which become their exponentials."""
    e = Emitter("exp2", 16, emulated=emulated)
    with e.function("job", [POINTER, INT64], public=True) as (_, (place, _worker)):
        e.store_vector(exp2_floored(e, e.load_vector(place)), place)
    return str(e.module)


def exp2_of(numbers: Array) -> Array:
    kernel = Kernel(
        build(EmitFunction(__name__, "emit_exp2"), (host().emulated_on is not None,), host())
    )
    memory = np.zeros(32, np.float32)
    memory = memory[-memory.ctypes.data % 64 // 4 :][:16]
    found = []
    for chunk in numbers.reshape(-1, 16):
        memory[:] = chunk
        kernel._job(memory.ctypes.data, 0)
        found.append(memory.copy())
    return np.concatenate(found)


SPECIAL = np.array(
    [0, -0.0, 1, -1, 0.5, -1e-30, 127, 127.99999, 128, 1e30, np.inf, -np.inf, np.nan, -126,
     -126.5, -149, -149.5, -150.5, -1e30, 3, -64, 1e-30, 2, -2, 100, -100, -125.5, -130.25, 7, 8,
     -1e-7, 1 - 2**-24], np.float32,
)  # fmt: skip


@pytest.mark.parametrize("isa", both_ways("amx"))
def test_powers_of_two(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    some = np.random.default_rng(0).uniform(-140, 130, 4096).astype(np.float32)
    numbers = np.concatenate([SPECIAL, some])
    found = exp2_of(numbers).astype(float)
    with np.errstate(over="ignore"):
        expected = np.exp2(numbers.astype(float))
    expected[expected >= 2.0**128] = np.inf
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    normal_ones = np.isfinite(expected)
    error = np.abs(found[normal_ones] - expected[normal_ones])
    assert (error <= 2.0**-22.5 * expected[normal_ones] + 2.0**-149).all()
    assert (found[np.isposinf(expected)] == np.inf).all()
    assert (found[: len(SPECIAL)][SPECIAL == 0] == 1).all(), "exactly"


def defined(numbers: Array) -> Array:
    """What the two instructions and the multiply-adds between them are defined to give."""
    floor = np.floor(numbers)
    with np.errstate(invalid="ignore"):
        rest = numbers - floor
    rest = np.where(rest + floor > numbers, np.nextafter(rest, np.float32(0)), rest)
    rest = np.where(np.isinf(numbers), np.float32(0), rest)
    power = np.full_like(numbers, _EXP2_FLOORED[-1])
    for c in _EXP2_FLOORED[-2::-1]:
        exact = power.astype(np.longdouble) * rest + np.longdouble(np.float32(c))
        power = exact.astype(np.float32)
    places = np.nan_to_num(np.clip(floor, -300, 300)).astype(int)
    with np.errstate(over="ignore"):
        return np.ldexp(power.astype(float), places).astype(np.float32)


@pytest.mark.parametrize("isa", both_ways("amx"))
def test_powers_of_two_have_the_bits_of_the_instructions(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    rng = np.random.default_rng(1)
    some = (rng.uniform(low, high, 2048) for low, high in ((-150, 130), (-0.5, 0)))
    numbers = np.concatenate([SPECIAL, *some]).astype(np.float32)
    np.testing.assert_array_equal(exp2_of(numbers), defined(numbers))
