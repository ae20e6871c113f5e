"""What the compiled backend adds to the conformance suite: code generation, threads, memory."""

import sys

import ml_dtypes
import numpy as np
import pytest

import qkv
from forced import as_it_runs
from processes import in_a_process
from qkv.backends import backends
from qkv.backends.cpu import CpuBackend, describe_host
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.passes import forward as forward_pass
from qkv.backends.cpu.plan.kernel_spec import integer_bits
from qkv.backends.cpu.plan.schedule import TILE_KV, schedule
from qkv.errors import ArgumentError
from qkv.problem.building.builder import Shape
from qkv.problem.building.check import check
from qkv.problem.language.expressions import OPERATIONS, Op, walk
from qkv.problem.tiles import TileGrid
from qkv.testing import Case, bounds, cases, check_case, truth
from qkv.variants import ALL

FLOAT32 = [case for case in cases() if "float32" in case.dtypes]
NARROW = [as_it_runs(isa) for isa in ("avx2", "sse")]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(*args, **kwargs):
    return qkv.attention(*args, backend="cpu", return_lse=True, **kwargs)


def test_it_is_the_first_choice_for_float32() -> None:
    assert backends()[0].name == "cpu"
    query = normal(2, 5, 8)
    assert qkv.plan(query, query, query).backend == "cpu"


# Narrower machines


@pytest.mark.slow
@pytest.mark.parametrize("isa", NARROW)
@pytest.mark.sampled("case", FLOAT32, one_in=150, ids=lambda case: case.name)
def test_narrower_vectors(isa, case, monkeypatch) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    assert host().isa == isa
    assert check_case("cpu", case, "float32")


def test_an_instruction_set_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setenv("QKV_ISA", "sse9")
    spec = check(normal(1, 2, 3), normal(1, 2, 3), normal(1, 2, 3), ()).spec
    for asked in (host, lambda: CpuBackend().refusals(spec)):
        with pytest.raises(ArgumentError, match="sse9"):
            asked()


# Expressions

INDEX = np.arange(40) * 3 % 11


def whole(x):
    """An integer, for symbols and for the numbers of the oracle."""
    down = np.floor(x)
    return down.astype(int) if isinstance(down, np.ndarray | np.generic) else down


MODS = {
    "arithmetic": lambda s, b, h, q, k: (s + 2.0) * 0.5 - s / 3.0 + -s,
    "integers": lambda s, b, h, q, k: s + (abs(q - k) * 3 - q + b * h) / 7,
    "negated integer": lambda s, b, h, q, k: s + 0.1 * -abs(k - q),
    "floordiv": lambda s, b, h, q, k: s + 0.1 * ((k - q) // 3) + 0.2 * (q // 4),
    "mod": lambda s, b, h, q, k: s + 0.1 * ((k - q) % 5) + 0.2 * ((q - 30) % (h + 2)),
    "minimum": lambda s, b, h, q, k: np.minimum(s, 0.3) + 0.1 * np.minimum(q, k),
    "maximum": lambda s, b, h, q, k: np.maximum(s, 0.3) + 0.1 * np.maximum(q, 2 * k),
    "abs": lambda s, b, h, q, k: abs(s) + abs(0.1 * q - 1.0),
    "lt": lambda s, b, h, q, k: np.where(s < 0.1, s, s + (q < k) * 0.5),
    "le": lambda s, b, h, q, k: np.where(s <= 0.1, 0.5 * s, np.where(q >= k, s, -s)),
    "eq": lambda s, b, h, q, k: np.where(q == k, 2.0, s) + np.where(s == 0.0, 1.0, 0.0),
    "ne": lambda s, b, h, q, k: np.where(q != k, s, 2.0) + np.where(s != 0.0, 1.0, 0.0),
    "and": lambda s, b, h, q, k: np.where((q > k) & (s > 0), s + 1, s),
    "or": lambda s, b, h, q, k: np.where((q > k) | (s > 0), s + 1, s),
    "not": lambda s, b, h, q, k: np.where(np.logical_not(q > k), s + 1, s),
    "exp": lambda s, b, h, q, k: np.exp(s / 2.0) + np.exp(-k),
    "log": lambda s, b, h, q, k: np.log(abs(s) + 0.5) + np.log(q + 1),
    "sqrt": lambda s, b, h, q, k: np.sqrt(abs(s)) - np.sqrt(abs(q - k)),
    "tanh": lambda s, b, h, q, k: 3.0 * np.tanh(s / 3.0) + np.tanh(0.1 * h),
    "floor": lambda s, b, h, q, k: s + 0.5 * np.floor(k / 3) + 0.1 * np.floor(0.37 + q * 0.5),
    "lookup": lambda s, b, h, q, k: s + 0.1 * INDEX[np.clip(q - k + 20, 0, 39)] + 0.1 * INDEX[k],
    "lookup by score": lambda s, b, h, q, k: s + INDEX[np.clip(whole(9 * s), 0, 39)] / 9,
    "beyond 32 bits": lambda s, b, h, q, k: s + ((q + 70000) * (k + 70000)) % 7,
    "a number": lambda s, b, h, q, k: 0.25,
    "an integer": lambda s, b, h, q, k: q - k,
    "infinite for some": lambda s, b, h, q, k: np.where((q + k) % 3 == 0, -np.inf, s),
}


def test_every_operation_has_a_mod() -> None:
    query = normal(1, 2, 2)
    used = set()
    for fn in MODS.values():
        spec = check(query, query, query, (qkv.ScoreMod(fn),)).spec
        used |= {node.name for node in walk(spec.score) if isinstance(node, Op)}
    assert used == set(OPERATIONS)


@pytest.mark.sampled("name", list(MODS), one_in=9)
def test_operations(name) -> None:
    mod = qkv.ScoreMod(MODS[name])
    case = Case(f"mod {name}", Shape((2,), 2, 1, 35, 19, 8, 8), lambda s, r: (mod,), q_offset=0)
    assert check_case("cpu", case, "float32")


@pytest.mark.sampled(
    "dtype",
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
     "float16", "bfloat16", "float32", "float64"],
    one_in=9,
)  # fmt: skip
def test_tables_of_every_type(dtype) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(3)
    numbers = rng.integers(-3, 4, (19, 6)) if dtype[0] != "u" else rng.integers(0, 4, (19, 6))
    table = (numbers / 2 if "float" in dtype else numbers).astype(kind)[::-1, ::2]
    shift = np.array(1, kind)

    def mod(s, b, h, q, k):
        column = table[k % 10, h] * 1.0 if dtype != "bool" else np.where(table[k % 10, h], 1.0, 0.0)
        row = table[q % 7, k % 3]
        scalar = np.asarray(shift)[()]
        return (
            s + column + np.where(row, 0.5, 0.0) if dtype == "bool" else s + column + row * scalar
        )

    case = Case(f"table {dtype}", Shape((), 2, 1, 21, 23, 8, 8), lambda s, r: (qkv.ScoreMod(mod),),
                q_offset=0)  # fmt: skip
    assert check_case("cpu", case, "float32")


def test_special_halves() -> None:
    """Subnormal, infinite and NaN float16 entries mean what NumPy says."""
    halves = np.array([6e-8, -6e-5, 65504, -np.inf, 0.0, 1.0], np.float16)
    query, key = normal(1, 2, 4), normal(1, 6, 4)
    bias = np.broadcast_to(halves, (2, 6))
    found, lse = run(query, key, np.eye(6, dtype=np.float32)[None], bias)
    expected = truth(query, key, np.eye(6)[None], (qkv.Bias(bias),))
    np.testing.assert_allclose(found, expected.out, atol=1e-6)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-6)
    halves = np.array([0, 0, np.nan, 0, 0, 0], np.float16)
    assert np.isnan(run(query, key, normal(1, 6, 2), np.broadcast_to(halves, (2, 6)))[0]).all()


def test_integers_get_the_width_they_need() -> None:
    query = normal(1, 9, 4)

    def bits(*variants, **keywords):
        return integer_bits(check(query, query, query, variants, **keywords))

    assert bits() == 32
    assert bits(qkv.Causal(), qkv.ALiBi()) == 32
    assert bits(qkv.Causal(), q_offset=2**30, kv_offset=-(2**30)) == 32
    assert bits(qkv.ALiBi(), q_offset=2**31 - 10, kv_offset=-(2**31) + 10) == 64
    assert bits(qkv.ScoreMod(MODS["beyond 32 bits"])) == 64


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [1, 80])
@pytest.mark.parametrize("below", [False, True])
def test_a_slope_times_a_distance_is_not_rounded_before_it_is_added(
    q_len, below, monkeypatch
) -> None:
    """Scores that cancel it but for its rounding, which is then magnified."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("avx2"))  # SSE has no multiply-add
    slope, places = np.float32(0.7), np.arange(64, dtype=np.float32)
    query, key = np.ones((q_len, 1), np.float32), -(slope * places)[:, None]
    value = np.eye(64, dtype=np.float32)

    def magnified(score, b, h, i, j):
        rest = -(slope * j - -score) if below else score + slope * j
        return rest * 2.0**20

    rest = key[:, 0].astype(float) + float(slope) * places.astype(float)
    weights = np.exp(rest * 2.0**20 * (-1 if below else 1))
    mod = qkv.ScoreMod(magnified)
    found = qkv.attention(query, key, value, mod, scale=1.0, backend="cpu")
    expected = np.broadcast_to(weights / weights.sum(), found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# The softmax at its edges


def test_a_huge_finite_bias_is_arithmetic() -> None:
    lowest = np.finfo(np.float32).min
    query, key, value = normal(1, 3, 4), normal(1, 70, 4), normal(1, 70, 5)
    bias = np.full((3, 70), lowest, np.float32)
    bias[1, 2] = lowest / 2
    found, lse = run(query, key, value, bias)
    np.testing.assert_allclose(found[0, 0], value[0].mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(found[0, 1], value[0, 2])
    assert np.isfinite(lse).all()


def test_what_is_below_the_normal_numbers_weighs_nothing() -> None:
    query, key = np.zeros((1, 1, 4), np.float32), np.zeros((1, 2, 4), np.float32)
    value = np.array([[[1.0], [3e38]]], np.float32)
    for bias in (-88.0, -95.0, -1e4):
        found, _ = run(query, key, value, np.array([[0.0, bias]], np.float32))
        assert found[0, 0, 0] == 1.0


def test_an_infinite_score_gives_nan() -> None:
    query, key, value = normal(1, 4, 4), normal(1, 5, 4), normal(1, 5, 2)
    bias = np.zeros((4, 5), np.float32)
    bias[2, 3] = np.inf
    found, lse = run(query, key, value, bias)
    assert np.isnan(found[0, 2]).all()
    assert np.isnan(lse[0, 2])
    assert np.isfinite(found[0, [0, 1, 3]]).all()


def test_scores_of_minus_infinity_are_forbidden() -> None:
    """A mod's -inf keeps NaN out, in tiles that no mask touches."""
    query, key, value = normal(1, 70, 8), normal(1, 130, 8), normal(1, 130, 8)
    mod = qkv.ScoreMod(lambda s, b, h, q, k: np.where(k == 100, -np.inf, s))
    kept, lse = run(query, key, value, mod, q_offset=0)
    for poison in (np.nan, np.inf, -np.inf):
        key[0, 100], value[0, 100] = poison, poison
        found, again = run(query, key, value, mod, q_offset=0)
        assert found.tobytes() == kept.tobytes()
        assert again.tobytes() == lse.tobytes()


def test_rows_of_nan_alone_are_not_empty_rows() -> None:
    query, key, value = normal(1, 3, 4), normal(1, 5, 4), normal(1, 5, 2)
    query[0, 1] = np.nan
    found, lse = run(query, key, value)
    assert np.isnan(found[0, 1]).all()
    assert np.isnan(lse[0, 1])
    assert np.isfinite(found[0, [0, 2]]).all()


# Schedules


@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.__name__)
def test_tasks_cover_what_the_tiles_say(variant) -> None:
    shape = Shape((2,), 2, 1, 150, 333, 64, 64)
    arrays = normal(2, 2, 150, 64), normal(2, 1, 333, 64), normal(2, 1, 333, 64)
    for example in variant.examples(shape, np.random.default_rng(1)):
        problem = check(*arrays, (example,), q_offset="end")
        plan = schedule(problem, 48)
        grid = TileGrid(problem.spec.mask, problem.operands.tables, 150, 333, 48, TILE_KV)
        seen = set()
        for batch, head, start, first, last in plan.tasks.tolist():
            seen.add((batch, head, start))
            kinds = grid.classify(batch, head, start // 48, start // 48 + 1)[0]
            runs = [tuple(run) for run in plan.runs[first:last].tolist()]
            if isinstance(example, qkv.Bias):  # too dear to bound: every tile meets its mask
                assert runs == [(0, 333, example.array.ndim > 1)]
                continue
            assert runs == [(r.start, r.stop, r.kind == 1) for r in grid.runs(kinds)]
        assert len(seen) == len(plan.tasks) == 2 * 2 * 4


def test_no_kernel_is_built_for_another_length(monkeypatch) -> None:
    built = []

    def count(*args, build=forward_pass.build, **options):
        built.append(args)
        return build(*args, **options)

    monkeypatch.setattr(forward_pass, "build", count)
    forward_pass._kernel.cache_clear()
    for kv_len in range(5, 140, 33):
        for dim in (3, 16):
            query, key = normal(2, 20, dim), normal(1, kv_len, dim)
            run(query, key, key, qkv.Causal("end"), qkv.Softcap(float(kv_len)))
    assert len(built) == 1
    forward_pass._kernel.cache_clear()


# Processes


def test_importing_qkv_imports_no_compiler() -> None:
    in_a_process(
        """
        import sys, qkv
        from qkv.backends import backends
        backends()
        assert not any(name.split(".")[0] == "llvmlite" for name in sys.modules)
        """
    )


# Memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are set with Linux's mprotect")
def test_nothing_outside_the_operands_is_read_or_written() -> None:
    """Operands end (or begin, with negative strides) at a page that may not be touched."""
    in_a_process(
        """
        import ctypes, mmap
        import numpy as np, qkv
        from qkv.testing import truth
        libc = ctypes.CDLL(None)
        page = mmap.PAGESIZE
        rng = np.random.default_rng(0)
        kept = []

        def guarded(array, reverse):
            pages = -(-array.nbytes // page)
            region = mmap.mmap(-1, (pages + 2) * page)
            address = ctypes.addressof(ctypes.c_char.from_buffer(region))
            for fence in (address, address + (pages + 1) * page):
                assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
            start = page if reverse else (pages + 1) * page - array.nbytes
            view = np.frombuffer(region, array.dtype, array.size, start).reshape(array.shape)
            kept.append(region)
            if reverse:
                view = view[..., ::-1, ::-1]
            view[...] = array
            return view

        for heads, q_len, kv_len, dim, v_dim in (
            (1, 1, 1, 1, 1), (2, 3, 5, 7, 2), (1, 17, 66, 16, 17), (2, 70, 131, 40, 33),
            (1, 65, 64, 64, 64), (1, 129, 200, 20, 128),
        ):
            for reverse in (False, True):
                arrays = [
                    guarded(rng.normal(size=shape).astype("f"), reverse)
                    for shape in ((heads, q_len, dim), (1, kv_len, dim), (1, kv_len, v_dim))
                ]
                bias = guarded(rng.normal(size=(heads, q_len, kv_len)), reverse)
                mask = guarded(rng.random((q_len, kv_len)) < 0.7, reverse)
                half = guarded(rng.normal(size=kv_len).astype(np.float16)[None], False)
                for variants in ((), (bias, mask), (qkv.Bias(half), qkv.Causal("end"))):
                    found = qkv.attention(*arrays, *variants, backend="cpu")
                    named = [qkv.Mask(v) if v is mask else qkv.Bias(v) if v is bias else v
                             for v in variants]
                    expected = truth(*arrays, named)
                    assert np.allclose(found, expected.out, atol=3e-6), (q_len, kv_len)
        """,
        QKV_NUM_THREADS="2",
    )


# Without it


def test_without_llvmlite_another_backend_runs() -> None:
    output = in_a_process(
        """
        import sys
        sys.modules["llvmlite"] = None
        import numpy as np, qkv
        x = np.eye(3, dtype=np.float32)
        plan = qkv.plan(x, x, x)
        print(plan.backend)
        print(qkv.attention(x, x, x).shape)
        from qkv.backends.cpu import CpuBackend
        from qkv.problem.building.check import check
        print(CpuBackend().refusals(check(x, x, x, ()).spec)[0].fact)
        """
    )
    assert output.splitlines()[:2] == ["blocked", "(3, 3)"]
    assert "llvmlite cannot be loaded" in output


def test_describe_host(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("qkv.process.threads._num_threads", None)
    monkeypatch.setenv("QKV_NUM_THREADS", "3")
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "none yet"))
    told = describe_host()
    assert told["threads"] == "3"
    emulated = ", for tests" if host().isa.endswith("emulated") else ""
    assert told["instruction set"] == host().isa + emulated
    monkeypatch.setenv("QKV_ISA", "amx-emulated")
    assert describe_host()["instruction set"] == "amx-emulated, for tests"
    assert str(tmp_path) in told["kernel cache"]
    assert all(isinstance(text, str) for text in told.values())


def test_bounds_are_those_of_plain_arithmetic() -> None:
    """Long rows: errors must not grow with the number of keys more than plain ones do."""
    query, key, value = normal(1, 20, 64), normal(1, 3000, 64), normal(1, 3000, 16)
    expected = truth(query, key, value, ())
    limit = bounds(expected, np.float32)
    found, lse = run(query, key, value)
    assert np.abs(found - expected.out).max() <= limit.out
    assert np.abs(lse - expected.lse).max() <= limit.lse
