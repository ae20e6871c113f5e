"""The bfloat16 kernel: pairs, tiles, and what they add to the conformance suite."""

import re
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from test_assembly import LINUX, assembly

import qkv
from forced import WITH_BFLOAT16, as_it_runs, runs_here
from on_cpu import require_right, run
from processes import in_a_process
from qkv.backends.cpu.bf16_pairs.score_blocks import BLOCK_RUN
from qkv.backends.cpu.forward.layout import RUN, TASK
from qkv.backends.cpu.machine import arm_features
from qkv.backends.cpu.machine import host as cpu_host
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.machine.processor import processor
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.backends.cpu.plan.schedule import TILE_KV, schedule
from qkv.problem.building.builder import Shape
from qkv.problem.building.check import check
from qkv.problem.tiles import TileGrid, TileKind
from qkv.testing import cases, check_case
from qkv.variants import ALL
from watched import forget_prepared_calls

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CASES = [case for case in cases() if "bfloat16" in case.dtypes]


@pytest.fixture(params=[as_it_runs(isa) for isa in WITH_BFLOAT16])
def isa(request, monkeypatch) -> str:
    monkeypatch.setenv("QKV_ISA", request.param)
    return request.param


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(BFLOAT16)


# Which kernel runs


@pytest.mark.slow
def test_bfloat16_is_multiplied_as_it_is(isa) -> None:
    def product(*arrays, variants=()):
        return ForwardPass(check(*arrays, variants, q_offset=0)).shape.product

    many, one = normal(2, 50, 8), normal(2, 1, 8)
    expected = {"amx": "tiles", "avx512-bf16": "pairs", "neon-bf16": "pairs"}[host().kernels]
    assert product(many, many, many) == expected
    assert product(many, many, many, variants=(qkv.Softcap(3.0),)) == expected
    assert product(one, many, many) == "elements", "one query does not pay for turning V"
    assert product(many, many, many, variants=(qkv.RoPE(),)) == "elements", "rotated: float32"
    assert product(*[many.astype(np.float32)] * 3) == "elements"


def test_tiles_that_the_system_refuses(monkeypatch) -> None:
    """The processor has tiles, and the system refuses them; nothing is compiled for it."""
    features = dict.fromkeys(cpu_host._REQUIRED["amx"], True)
    described = replace(processor(), features=features)
    monkeypatch.setattr(cpu_host, "processor", lambda: described)
    monkeypatch.setattr(cpu_host.platform, "machine", lambda: "x86_64")
    try:
        for allowed, best in ((True, "amx"), (False, "avx512")):
            monkeypatch.setattr(cpu_host, "may_use_tiles", lambda allowed=allowed: allowed)
            monkeypatch.delenv("QKV_ISA", raising=False)
            cpu_host._host.cache_clear()
            assert host().isa == best
        monkeypatch.setenv("QKV_ISA", "amx")
        with pytest.raises(qkv.ArgumentError, match="amx"):
            host()
    finally:
        monkeypatch.undo()
        cpu_host._host.cache_clear()


@pytest.mark.parametrize(
    ("features", "isa"),
    [
        ({"bf16", "fp16fml"}, "neon-bf16"),
        ({"fp16fml"}, "neon-fhm"),
        ({"bf16"}, "neon"),
        (set(), "neon"),
    ],
)
def test_arm_with_and_without_narrow_products(monkeypatch, features, isa) -> None:
    """What LLVM is told of the processor, whose list of features does not say it."""
    monkeypatch.setattr(cpu_host.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(cpu_host, "arm_features", lambda: frozenset(features))
    monkeypatch.delenv("QKV_ISA", raising=False)
    cpu_host._host.cache_clear()
    try:
        here = host()
        assert here.isa == isa
        told = {name[1:] for name in here.features.split(",") if name.startswith("+")}
        used = {"neon-bf16": {"bf16", "fp16fml"}, "neon-fhm": {"fp16fml"}, "neon": set()}[isa]
        assert told & {"bf16", "fp16fml"} == used
        assert (here.bfloat16_shape is not None) == (isa == "neon-bf16")
        monkeypatch.setenv("QKV_ISA", "neon")
        assert host().bfloat16_shape is None
        assert host() != here or isa == "neon", "kernels are stored by what a host is"
    finally:
        monkeypatch.undo()
        cpu_host._host.cache_clear()


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_what_systems_say_of_an_arm_processor(monkeypatch, system) -> None:
    """The answers of Linux (AT_HWCAP and AT_HWCAP2) and macOS (sysctl)."""

    class Library:
        """Gives these answers."""

        def __init__(self, hwcap: int, hwcap2: int) -> None:
            names = {"FEAT_FHM": hwcap >> 23 & 1, "FEAT_BF16": hwcap2 >> 14 & 1}
            found_by_name = {f"hw.optional.arm.{n}".encode(): on for n, on in names.items()}

            def getauxval(kind):
                return {16: hwcap, 26: hwcap2}.get(kind, 0)

            def sysctlbyname(name, found, size, new, length):
                found._obj.value = found_by_name[name]
                return 0

            self.getauxval, self.sysctlbyname = getauxval, sysctlbyname

    fhm, bf16 = 1 << 23, 1 << 14
    monkeypatch.setattr(arm_features.sys, "platform", system)
    for words, expected in (
        ((fhm, bf16), {"bf16", "fp16fml"}),
        ((fhm, 0), {"fp16fml"}),
        ((0, bf16), {"bf16"}),
        ((~fhm & 2**32 - 1, ~bf16 & 2**32 - 1), set()),
        ((bf16, fhm), set()),
    ):
        monkeypatch.setattr(arm_features.ctypes, "CDLL", lambda _, words=words: Library(*words))
        assert arm_features.arm_features() == (set() if system == "win32" else expected)
    monkeypatch.setattr(arm_features.ctypes, "CDLL", lambda _: object())
    assert arm_features.arm_features() == set()


def test_a_system_that_does_not_know_the_name(monkeypatch) -> None:
    """macOS before a name came: sysctl fails."""
    unknown = type("Library", (), {"sysctlbyname": staticmethod(lambda *_: -1)})
    monkeypatch.setattr(arm_features.sys, "platform", "darwin")
    monkeypatch.setattr(arm_features.ctypes, "CDLL", lambda _: unknown)
    assert arm_features.arm_features() == set()


# Numbers


@pytest.mark.slow
@pytest.mark.sampled(
    ("kernels", "case"),
    [
        pytest.param(as_it_runs(isa), case, id=f"{isa}-{case.name}")
        for isa in (*WITH_BFLOAT16, "avx512")
        for case in CASES
    ],
    one_in=260,
)
def test_conformance_on_each(kernels, case, monkeypatch) -> None:
    monkeypatch.setenv("QKV_ISA", kernels)
    assert host().isa == kernels
    assert check_case("cpu", case, "bfloat16")


@pytest.mark.slow
@pytest.mark.sampled(
    ("dim", "v_dim"),
    [(1, 1), (2, 65), (31, 16), (32, 96), (33, 40), (80, 64), (130, 33)],
    one_in=4,
)
def test_sizes_that_fill_no_tile(isa, dim, v_dim) -> None:
    keys = 300 + dim  # more than one block, odd or even
    require_right(
        (normal(2, 70, dim), normal(1, keys, dim, seed=1), normal(1, keys, v_dim, seed=2))
    )


@pytest.mark.slow
def test_several_tasks_and_a_negative_scale(isa) -> None:
    arrays = normal(1, 600, 64), normal(1, 620, 64, seed=1), normal(1, 620, 64, seed=2)
    require_right(arrays, qkv.Causal(), q_offset="end", scale=-0.2)


def test_strides(isa) -> None:
    """Elements that are not adjacent, rows backwards, heads after rows."""
    query = normal(2, 64, 90, seed=1).swapaxes(-1, -2)
    key = normal(2, 100, 128, seed=2)[:, ::-1, ::2]
    value = normal(100, 2, 40, seed=3).swapaxes(0, 1)
    require_right((query, key, value))


@pytest.mark.slow
def test_weights_are_rounded_to_nearest(isa) -> None:
    """Equal weights times equal values: a rounding that leans would show in every element."""
    query = np.zeros((1, 40, 8), BFLOAT16)
    key = normal(1, 1000, 8)
    bias = np.linspace(-3, 0, 1000, dtype=np.float32)
    value = np.ones((1, 1000, 4), BFLOAT16)
    problem = query, key, value, qkv.Bias(np.broadcast_to(bias, (40, 1000)))
    sinks = qkv.Sinks(np.full(1, -1e30, np.float32))  # so that the output leaves in float32
    found = qkv.backends.cpu.CpuBackend().run(check(*problem[:3], (problem[3], sinks)))
    assert found.out.dtype == np.float32
    assert np.abs(found.out - 1).max() < 2.0**-12


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "keys", "dim", "v_dim"), [(40, 301, 34, 65), (17, 5, 130, 1)])
def test_two_rows_at_once_change_no_bit(
    rows, keys, dim, v_dim, monkeypatch, no_prepared_calls
) -> None:
    """BFMMLA, by two rows of keys and of columns of values, and BFDOT; some values not finite."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("neon-bf16"))
    arrays = normal(2, rows, dim), normal(1, keys, dim, seed=1), normal(1, keys, v_dim, seed=2)
    arrays[2][0, keys // 2] = np.nan
    found = set()
    for _ in with_quads_and_without(monkeypatch):
        results = [run(*arrays, q_offset=0), run(*arrays, qkv.Causal(), q_offset="end")]
        found.add(b"".join(each.tobytes() for pair in results for each in pair))
    assert len(found) == 1


def with_quads_and_without(monkeypatch):
    shape = cpu_host._BFLOAT16_SHAPES["neon-bf16"]
    assert shape.quads
    for quads in (True, False):
        monkeypatch.setitem(cpu_host._BFLOAT16_SHAPES, "neon-bf16", replace(shape, quads=quads))
        forget_prepared_calls()
        yield quads


# What is forbidden, and what is not finite


def test_what_is_not_finite_reaches_only_rows_that_may_see_it(isa) -> None:
    """Some blocks of the task see all of a block of keys, others part of it or none."""
    query, key, value = (normal(1, 700, 40, seed=s) for s in range(3))
    before, lse = run(query, key, value, qkv.Causal(), q_offset=0)
    for poison in (np.nan, np.inf, -np.inf):
        for row in (300, 301, 513):
            key[0, row], value[0, row, ::3] = poison, poison
        value[0, 350, 2] = poison
        after, again = run(query, key, value, qkv.Causal(), q_offset=0)
        assert after[0, :300].tobytes() == before[0, :300].tobytes()
        assert again[0, :300].tobytes() == lse[0, :300].tobytes()
        assert np.isnan(after[0, 513:].astype(np.float32)).all()


def test_an_infinite_value_alone(isa) -> None:
    """Infinity stays infinity without a mask and with one, and two signs make NaN."""
    query, key, value = (normal(1, 80, 16, seed=s) for s in range(3))
    value[0, 10, 3] = np.inf
    value[0, 11, 4], value[0, 12, 4] = np.inf, -np.inf
    for variants in ((), (qkv.Causal(),)):
        out, _ = run(query, key, value, *variants, q_offset=0)
        seen = out[0, 12:].astype(np.float32)
        assert np.isposinf(seen[:, 3]).all()
        assert np.isnan(seen[:, 4]).all()
        assert np.isfinite(np.delete(seen, (3, 4), axis=1)).all()


# Tasks of several blocks


def examples_of(variant):
    """Problems of 150 queries and 333 keys."""
    shape = Shape((2,), 2, 1, 150, 333, 4, 4)
    arrays = normal(2, 2, 150, 4), normal(2, 1, 333, 4), normal(2, 1, 333, 4)
    for example in variant.examples(shape, np.random.default_rng(1)):
        if not isinstance(example, qkv.Bias):  # too dear to bound: every tile meets its mask
            yield check(*arrays, (example,), q_offset="end")


@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.__name__)
def test_runs_say_what_each_block_sees(variant, masks_of_few_pairs_are_read) -> None:
    for problem in examples_of(variant):
        plan = schedule(problem, 16, q_blocks_per_task=4)
        grid = TileGrid(problem.spec.mask, problem.operands.tables, 150, 333, 16, TILE_KV)
        assert len(plan.tasks) == 2 * 2 * 3
        for task in plan.tasks.tolist():
            batch, head, first_row, first_run, last_run = task[: len(TASK)]
            first = first_row // 16
            expected = grid.classify(batch, head)[first : first + 4]
            seen = np.zeros((4, expected.shape[1]), int)
            for start, stop, kinds in plan.runs[first_run:last_run, : len(RUN)].tolist():
                tiles = slice(start // TILE_KV, -(-stop // TILE_KV))
                for block in range(4):
                    seen[block, tiles] = kinds >> 2 * block & 3
            np.testing.assert_array_equal(seen[: len(expected)], expected)
            assert (seen[len(expected) :] == TileKind.EMPTY).all()


@pytest.mark.parametrize("tile_kv", [32, 64])
@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.__name__)
def test_meetings_leave_out_only_what_is_empty(
    variant, tile_kv, masks_of_few_pairs_are_read
) -> None:
    """Quarters from the first to the last hold all that is seen, full blocks nothing else."""
    block_kv = 128
    for problem in examples_of(variant):
        plan = schedule(problem, 16, q_blocks_per_task=4, tile_kv=tile_kv, block_kv=block_kv)
        grid = TileGrid(problem.spec.mask, problem.operands.tables, 150, 333, 16, 32)
        for task in plan.tasks.tolist():
            batch, head, first_row, first_run, last_run = task[: len(TASK)]
            kinds = grid.classify(batch, head)[first_row // 16 : first_row // 16 + 4]
            met = np.zeros_like(kinds)
            for entry in plan.runs[first_run:last_run].tolist():
                start, stop, *words = entry[: len(BLOCK_RUN)]
                assert start % 32 == 0
                ends = set()
                for block, row in enumerate(met):
                    kind, first, last = (word >> 2 * block & 3 for word in words)
                    if kind == TileKind.EMPTY:
                        continue
                    ends |= {first, (last + 1) * 32}
                    for key in range(start, stop, block_kv):
                        quarters = slice(key // 32 + first, key // 32 + last + 1)
                        row[quarters] = kind
                        for edge in (quarters.start, min(quarters.stop, kinds.shape[1]) - 1):
                            tile = edge * 32 // tile_kv * tile_kv // 32
                            seen = kinds[block, tile : tile + tile_kv // 32]
                            assert (seen != TileKind.EMPTY).any(), "more than is needed"
                assert min(ends) == 0, "keys are read that nobody sees, at the beginning"
                last_block = start + (stop - 1 - start) // block_kv * block_kv
                assert max(ends) >= min(stop, 333) - last_block, "and at the end"
            assert (met[kinds != TileKind.EMPTY] != TileKind.EMPTY).all()
            assert (kinds[met == TileKind.FULL] == TileKind.FULL).all()


# The machine


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are set with Linux's mprotect")
@pytest.mark.sampled("kernels", [as_it_runs(isa) for isa in WITH_BFLOAT16], one_in=2)
def test_nothing_outside_the_operands_is_read_or_written(kernels) -> None:
    """Operands end (or begin, with negative strides) at a page that may not be touched."""
    in_a_process(
        """
        import ctypes, mmap
        import ml_dtypes, numpy as np, qkv
        from qkv.testing import bounds, truth
        libc = ctypes.CDLL(None)
        page = mmap.PAGESIZE
        rng = np.random.default_rng(0)
        kept = []

        def guarded(shape, reverse):
            array = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
            pages = -(-array.nbytes // page)
            region = mmap.mmap(-1, (pages + 2) * page)
            address = ctypes.addressof(ctypes.c_char.from_buffer(region))
            for fence in (address, address + (pages + 1) * page):
                assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
            start = page if reverse else (pages + 1) * page - array.nbytes
            view = np.frombuffer(region, array.dtype, array.size, start).reshape(shape)
            kept.append(region)
            if reverse:
                view = view[..., ::-1, :]
            view[...] = array
            return view

        for heads, q_len, kv_len, dim, v_dim in (
            (1, 17, 1, 1, 1), (2, 33, 5, 7, 2), (1, 17, 66, 16, 17), (2, 70, 131, 40, 33),
            (1, 65, 64, 64, 64), (1, 129, 300, 32, 128), (1, 257, 257, 96, 31),
        ):
            for reverse in (False, True):
                shapes = (heads, q_len, dim), (1, kv_len, dim), (1, kv_len, v_dim)
                arrays = [guarded(shape, reverse) for shape in shapes]
                for variants in ((), (qkv.Causal("end"),)):
                    found = qkv.attention(*arrays, *variants, backend="cpu")
                    expected = truth(*arrays, variants)
                    error = abs(found.astype(float) - expected.out).max()
                    assert error <= bounds(expected, found.dtype).out, (q_len, kv_len)
        """,
        QKV_NUM_THREADS="2",
        QKV_ISA=kernels,
    )


@pytest.mark.slow
def test_threads_and_children_have_tiles_of_their_own(isa) -> None:
    in_a_process(
        """
        import os, threading, warnings
        import ml_dtypes, numpy as np, qkv
        warnings.simplefilter("ignore")
        x = np.random.default_rng(0).normal(size=(4, 300, 64)).astype(ml_dtypes.bfloat16)
        run = lambda: qkv.attention(x, x, x, qkv.Causal(), backend="cpu").tobytes()
        before = run()
        qkv.set_num_threads(1)
        assert run() == before
        qkv.set_num_threads(3)
        wrong = []
        callers = [
            threading.Thread(target=lambda: wrong.extend(run() != before for _ in range(5)))
            for _ in range(8)
        ]
        for caller in callers:
            caller.start()
        child = os.fork()
        same = run() == before
        if child == 0:
            os._exit(0 if same else 3)
        for caller in callers:
            caller.join()
        assert same and len(wrong) == 40 and not any(wrong)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        QKV_ISA=isa,
    )


def test_tiles_are_released(monkeypatch) -> None:
    """The code releases tiles between where they are set up and each return.

    A machine with tiles is also asked which registers are in use (XGETBV 1) after a job.
    """
    shape = replace(Host("sapphirerapids", "", "amx").bfloat16_shape, chunks=2, value_tiles=4)
    text = assembly(LINUX, "sapphirerapids", shape, "bfloat16")
    (uses,) = (part for part in re.split(r"\.Lfunc_end\d+:", text) if "ldtilecfg" in part)
    assert re.findall("ldtilecfg|tilerelease|ret", uses) == ["ldtilecfg", "tilerelease", "ret"]
    if runs_here("amx"):
        require_released(monkeypatch)


def require_released(monkeypatch) -> None:
    from llvmlite import ir

    from qkv.backends.cpu.compiler.compile import Kernel, _compile, linked
    from qkv.backends.cpu.emit.emitter import INT32, INT64, POINTER, Emitter
    from qkv.backends.cpu.products import tile_instructions

    def emit(used: bool) -> str:
        e = Emitter("in_use", 16)
        with e.function("job", [POINTER, INT64], public=True) as (_, (result, _worker)):
            if used:
                tile_instructions.configure(e)
            state = e.machine_intrinsic("llvm.x86.xgetbv", INT64, ir.Constant(INT32, 1))
            e.store(state, result, 8)
            if used:
                tile_instructions.release(e)
        return str(e.module)

    def tiles_in_use(used: bool) -> bool:
        word = np.zeros(1, np.int64)
        probe = Kernel(linked([_compile(emit(used), host())], host(), ("job",)))
        probe._job(word.ctypes.data, 0)
        return bool(word[0] >> 17 & 1)

    monkeypatch.setenv("QKV_ISA", "amx")
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    monkeypatch.setenv("QKV_NUM_THREADS", "1")
    assert tiles_in_use(True)
    x = normal(1, 200, 64)
    run(x, x, x)
    assert not tiles_in_use(False)
