"""What the compiled backward pass adds to its cases: threads, ranges of keys, tables, memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
import tracemalloc

import numpy as np
import pytest

import qkv
from forced import as_it_runs
from qkv.backends.cpu.passes import backward as backward_pass
from qkv.backends.cpu.passes import tangents as tangent_pass
from qkv.backends.cpu.passes import workers
from qkv.backends.cpu.plan import table_gradients as summed_tables
from qkv.backends.cpu.plan.schedule import schedule
from qkv.problem.backward import reads
from qkv.problem.building.check import check
from qkv.problem.language.evaluate import evaluate

NARROW = [as_it_runs(isa) for isa in ("avx2", "sse")]


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def problem(q_len=150, kv_len=300, heads=4, kv_heads=2, dim=24, v_dim=16, dtype=np.float32):
    q = normal(2, heads, q_len, dim, seed=1, dtype=dtype)
    k = normal(2, kv_heads, kv_len, dim, seed=2, dtype=dtype)
    v = normal(2, kv_heads, kv_len, v_dim, seed=3, dtype=dtype)
    return q, k, v, normal(2, heads, q_len, v_dim, seed=4, dtype=dtype)


def gradients(q, k, v, grad_out, *variants, wrt=(), backend="cpu", **keywords):
    _, pullback = qkv.vjp(q, k, v, *variants, backend=backend, **keywords)
    found = pullback(grad_out, wrt=wrt)
    return [found.query, found.key, found.value, *map(found.of, wrt)]


def assert_equals_blocked(*args, limit=1e-12, **keywords):
    for got, right in zip(
        gradients(*args, **keywords), gradients(*args, backend="blocked", **keywords), strict=True
    ):
        np.testing.assert_allclose(got, right, rtol=limit, atol=limit)


BIAS = qkv.Bias(normal(150, 300, seed=5, dtype=np.float64))
SLOPES = qkv.ALiBi(normal(4, seed=6, dtype=np.float64) / 50)
TABLE = qkv.RelativeBias(normal(32, 4, seed=7, dtype=np.float64))
BY_KEY = qkv.Bias(normal(2, 1, 1, 300, seed=8, dtype=np.float64))
BY_QUERY = qkv.Bias(normal(1, 4, 150, 1, seed=9, dtype=np.float64))
OWN = (BIAS, SLOPES, TABLE, BY_KEY, BY_QUERY, qkv.Softcap(5.0))


@pytest.fixture
def many_ranges(monkeypatch):
    """Keys in ranges of 128."""
    monkeypatch.setattr(backward_pass, "_TASK_KEYS", 1)
    monkeypatch.setattr(backward_pass, "_TASK_KEYS_WITH_TILES", 1)


# Threads


def test_bits_do_not_depend_on_threads(monkeypatch, many_ranges) -> None:
    arrays = problem()
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1.0)
    found = set()

    def run() -> None:
        results = gradients(*arrays, qkv.Causal("end"), BIAS, SLOPES, wrt=[BIAS, SLOPES])
        found.add(b"".join(a.tobytes() for a in results))

    for threads in (1, 2, 3, 7, 2, 2, 2, 2):
        monkeypatch.setenv("QKV_NUM_THREADS", str(threads))
        run()
    monkeypatch.setattr(workers, "_SLICE_SECONDS", 1e-9)
    run()
    assert len(found) == 1


# Ranges of keys, parts of dQ, and tables that tasks share


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_ranges_of_keys(many_ranges, dtype) -> None:
    q, k, v, grad_out = problem(dtype=np.float64)
    assert len(backward_pass._key_ranges(qkv_spec(q, k, v))) == 3
    rounded = [a.astype(dtype) for a in (q, k, v, grad_out)]
    limit = 1e-12 if dtype == np.float64 else 4e-3
    got = gradients(*rounded, qkv.Causal("end"))
    right = gradients(
        *(a.astype(np.float64) for a in rounded), qkv.Causal("end"), backend="blocked"
    )
    for a, b in zip(got, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=limit, atol=limit)


def qkv_spec(q, k, v):
    return check(q, k, v, ()).spec


def test_the_number_of_ranges_depends_on_the_shape_alone(monkeypatch) -> None:
    spec = qkv_spec(*problem(8, 4096, 1, 1)[:3])
    counts = set()
    for threads in ("1", "16"):
        monkeypatch.setenv("QKV_NUM_THREADS", threads)
        counts.add(len(backward_pass._key_ranges(spec)))
    assert counts == {8}
    spec = qkv_spec(*problem(8, 100_000, 1, 1, dim=1, v_dim=1)[:3])
    assert len(backward_pass._key_ranges(spec)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("copies", [2**24, 0], ids=["copies", "one after the other"])
def test_tables_that_tasks_share(monkeypatch, many_ranges, copies) -> None:
    monkeypatch.setattr(summed_tables, "_COPIES_BYTES", copies)
    arrays = problem(dtype=np.float64)
    assert_equals_blocked(*arrays, *OWN, qkv.Causal("end"), wrt=OWN, limit=1e-11)


@pytest.mark.parametrize("along", ["kv_index", "q_index"])
@pytest.mark.parametrize("copies", [2**24, 0], ids=["copies", "one after the other"])
def test_tasks_of_one_launch_never_add_to_the_same_entry(
    monkeypatch, many_ranges, copies, along
) -> None:
    """Tasks of gradients are ranges of keys, those of second derivatives ranges of queries."""
    monkeypatch.setattr(summed_tables, "_COPIES_BYTES", copies)
    values = np.zeros(400)
    mod = qkv.ScoreMod(lambda s, b, h, q, k: s * values[k] + values[399 - q])
    problem_ = check(*problem(dtype=np.float64)[:3], (*OWN, mod), q_offset=0)
    spec, arrays = problem_.spec, problem_.operands.tables
    names = [t.name for t in spec.tables if reads(spec, frozenset({t.name})) and t.kind == "float"]
    rows = 1 if along == "kv_index" else 17
    if along == "kv_index":
        ranges = backward_pass._key_ranges(spec)
    else:
        ranges = [(0, 8), (8, 16), (16, 24)]
    tables = [summed_tables.summed_table(problem_, name, len(ranges), along) for name in names]
    assert {table.wide for table in tables} == {copies > 0}
    if along == "kv_index":
        plan = schedule(problem_, 64).ordered()
        tasks, launches = backward_pass._task_rows(spec, plan, ranges, tables)
    else:
        tasks, launches = tangent_pass._task_rows(spec, ranges, tables)
    assert sum(last - first for first, last in launches) == len(tasks) == 2 * 2 * 3
    lengths = {"q_index": spec.q_len, "kv_index": spec.kv_len}
    for first, last in launches:
        words = len((backward_pass if along == "kv_index" else tangent_pass).TASK)
        for column, name in enumerate(names, start=words):
            taken: set[tuple[int, int]] = set()
            for task in tasks[first:last]:
                batch, kv_head, start, stop = task[:4]
                own = set()
                for load in reads(spec, frozenset({name})):
                    for head in range(kv_head * 2, kv_head * 2 + 2):
                        where = {name: np.arange(n) for name, n in lengths.items()}
                        where[along] = where[along][start * rows : stop * rows]
                        where["q_index"] = where["q_index"][:, None]
                        where |= {"batch": batch, "head": head}
                        entry = [evaluate(i, where, arrays, np.dtype(float)) for i in load.indices]
                        if entry:
                            shape = arrays[name].shape
                            flat = np.ravel_multi_index(np.broadcast_arrays(*entry), shape)
                            own |= set(np.unique(flat).tolist())
                        else:
                            own.add(0)
                marked = {(int(task[column]), entry) for entry in own}
                assert not marked & taken, f"{name}: two tasks of a launch meet"
                taken |= marked


def test_one_table_read_at_two_places(monkeypatch, many_ranges) -> None:
    monkeypatch.setattr(summed_tables, "_COPIES_BYTES", 0)
    values = normal(400, seed=3, dtype=np.float64)
    mod = qkv.ScoreMod(lambda s, b, h, q, k: s * values[k] + values[399 - q] + values[h])
    assert_equals_blocked(*problem(dtype=np.float64), mod, wrt=[mod], q_offset=0, limit=1e-11)


@pytest.mark.slow
def test_no_table_is_copied_for_each_task() -> None:
    """A bias of all pairs that heads share: one array, not one for each head."""
    n = 2048
    q, k, v, grad_out = problem(n, n, 8, 8, 8, 8)
    bias = qkv.Bias(np.zeros((n, n), np.float32))
    _, pullback = qkv.vjp(q, k, v, bias, backend="cpu")
    tracemalloc.start()
    pullback(grad_out, wrt=[bias])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3.5 * bias.array.nbytes


# Machines


@pytest.mark.slow
@pytest.mark.parametrize("isa", NARROW)
@pytest.mark.sampled("dtype", [np.float64, np.float32], one_in=2)
def test_narrower_vectors(isa, dtype, monkeypatch) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    q, k, v, grad_out = problem(70, 90, dim=21, v_dim=19, dtype=np.float64)
    rounded = [a.astype(dtype) for a in (q, k, v, grad_out)]
    variants = qkv.Causal("end"), qkv.Softcap(3.0), qkv.Dropout(0.2, 5)
    got = gradients(*rounded, *variants)
    right = gradients(*(a.astype(np.float64) for a in rounded), *variants, backend="blocked")
    for a, b in zip(got, right, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12 if dtype == np.float64 else 3e-5)


# Memory


def test_memory_grows_with_the_length() -> None:
    peaks = []
    for n in (4096, 8192):
        q, k, v, grad_out = (normal(1, n, 16, seed=s) for s in range(4))
        _, pullback = qkv.vjp(q, k, v, qkv.SlidingWindow(64, 0), backend="cpu")
        pullback(grad_out)
        tracemalloc.start()
        pullback(grad_out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 32 * 8192 * 16 * 4  # the matrix of weights would take 16 times as much


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is of POSIX")
@pytest.mark.parametrize("dim", [5, 16, 33])
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64])
def test_nothing_is_read_beyond_the_operands(dim, kind) -> None:
    q, k, v, grad_out = (guarded(a) for a in problem(37, 130, 2, 1, dim, dim + 2, np.dtype(kind)))
    bias = qkv.Bias(guarded(normal(37, 130, seed=5)))
    right = gradients(*(np.array(a) for a in (q, k, v, grad_out)), qkv.Bias(np.array(bias.array)))
    got = gradients(q, k, v, grad_out, bias)
    for a, b in zip(got, right, strict=True):
        np.testing.assert_array_equal(a, b)


_KEPT = []


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy that ends where a page begins that nobody may touch."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    view = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    view[...] = array
    _KEPT.append(memory)
    return view


# Numbers


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_a_row_of_huge_scores_attends_uniformly_backwards_too(backend) -> None:
    """lse = -1e9 + log(130) is -1e9 in float32: weights must not come out as 1."""
    q, k, v, grad_out = problem(20, 130, 1, 1)
    bias = np.zeros((20, 130), np.float32)
    bias[3] = -1e9
    bias[4] = np.finfo(np.float32).min
    alone = np.zeros_like(grad_out)
    alone[:, :, 3:5] = grad_out[:, :, 3:5]
    d_query, _, d_value = gradients(q, k, v, alone, bias, backend=backend)
    share = alone.sum(axis=2, keepdims=True) / 130
    np.testing.assert_allclose(d_value, np.broadcast_to(share, v.shape), rtol=1e-5, atol=1e-6)
    assert np.isfinite(d_query).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kernels"),
    [
        (((13, 19, 3), (40, 200, 16), (130, 33, 40)), 1),
        # The rows of few queries, or of few that see a key, are summed again.
        (((1, 9, 3), (5, 200, 16), (12, 33, 40), (13, 9, 3)), 2),
    ],
)
def test_no_kernel_is_built_for_another_length(sizes, kernels, monkeypatch) -> None:
    built = []

    def count(*args, build=backward_pass.build, **options):
        built.append(args)
        return build(*args, **options)

    monkeypatch.setattr(backward_pass, "build", count)
    backward_pass._kernel.cache_clear()
    for q_len, kv_len, dim in sizes:
        arrays = problem(q_len, kv_len, dim=dim, v_dim=dim)
        gradients(*arrays, qkv.Causal("end"), qkv.Softcap(float(dim)))
    assert len(built) == kernels
    backward_pass._kernel.cache_clear()
