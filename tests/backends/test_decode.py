"""The decode kernel: few query rows, lanes along head_dim, keys in chunks."""

import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import qkv
from forced import as_it_runs, both_ways
from processes import in_a_process
from qkv.arrays.addresses import address_of, page_aligned
from qkv.backends.cpu.decode import layout
from qkv.backends.cpu.decode.layout import (
    BLOCK_KV,
    CHUNK,
    FIELDS,
    GROUP,
    STRETCH_KV,
    TASK,
    chunk_of,
    panel_of,
    record_bytes,
    shared_bytes,
)
from qkv.backends.cpu.emit.argument_block import ArgumentBlock, word_index
from qkv.backends.cpu.machine import host as cpu_host
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.passes import decode as streaming
from qkv.backends.cpu.passes import workers
from qkv.backends.cpu.passes.decode import DecodeArguments, DecodePass
from qkv.backends.cpu.plan import kernel_choice
from qkv.backends.cpu.prepared.forward import NO_RESULTS
from qkv.problem.building.builder import Shape
from qkv.problem.building.check import check
from qkv.problem.scores import Scores
from qkv.testing import DTYPES, Case, bounds, cases, check_case, truth
from qkv.variants import ALL
from watched import forget_prepared_calls

from test_cpu import MODS  # isort: skip


NARROW = [as_it_runs(isa) for isa in ("avx2", "sse", "neon-bf16")]
SUITE = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in cases()
    for dtype in case.dtypes
]


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def run(*args, **kwargs):
    return qkv.attention(*args, backend="cpu", return_lse=True, **kwargs)


@pytest.fixture
def always(monkeypatch):
    """The decode kernel, whatever the number of queries."""
    monkeypatch.setattr(kernel_choice, "_MOST_QUERIES", float("inf"))


@pytest.mark.slow
@pytest.mark.sampled(("case", "dtype"), SUITE, one_in=150)
@pytest.mark.usefixtures("always")
def test_the_whole_suite(case, dtype) -> None:
    """Every variant, type and layout in memory."""
    assert check_case("cpu", case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("isa", NARROW)
@pytest.mark.sampled(("case", "dtype"), SUITE, one_in=150)
@pytest.mark.usefixtures("always")
def test_narrower_vectors(isa, case, dtype, monkeypatch) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    assert check_case("cpu", case, dtype)


@pytest.mark.sampled("name", list(MODS), one_in=9)
def test_operations(name) -> None:
    mod = qkv.ScoreMod(MODS[name])
    shape = Shape((2,), 2, 1, 3, 37, 8, 8)
    case = Case(f"decode mod {name}", shape, lambda s, r: (mod,), q_offset=20)
    assert check_case("cpu", case, "float32")


@pytest.mark.slow
@pytest.mark.sampled("group_size", [1, 2, 3, 4, 5, 7, 8, 13], one_in=8)
@pytest.mark.parametrize("q_len", [1, 2, 3])
@pytest.mark.parametrize("panel", [3, 128])
def test_any_number_of_rows(group_size, q_len, panel, monkeypatch) -> None:
    """Heads and queries of a group are rows of one matrix, in panels, in tiles of 4, 2 and 1."""
    monkeypatch.setattr(layout, "_PANEL", panel)

    def variants(shape, rng):
        bias = rng.normal(size=shape.scores)
        return bias, qkv.ALiBi(), qkv.Causal("end"), qkv.Dropout(0.3, 5)

    shape = Shape((2,), 2 * group_size, 2, q_len, 131, 20, 9)
    assert check_case("cpu", Case(f"decode group {group_size} {q_len}", shape, variants), "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group_size", "q_len", "panel"),
    [(1, 1, 1), (16, 8, 128), (16, 11, 88), (129, 1, 65), (107, 12, 117)],
)
def test_many_rows_go_in_panels(group_size, q_len, panel) -> None:
    shape = Shape((), group_size, 1, q_len, STRETCH_KV + 150, 9, 5)
    variants = (qkv.SlidingWindow(600, 3), qkv.ALiBi())
    case = Case(f"decode panel {panel}", shape, lambda s, r: variants, q_offset=STRETCH_KV)
    assert panel_of(SimpleNamespace(group_size=group_size, q_len=q_len)) == panel
    assert check_case("cpu", case, "float32")


@pytest.mark.parametrize("heads", [2, 7, 128, 129, 300])
def test_no_bit_of_a_row_depends_on_how_many_there_are(heads) -> None:
    key, value = normal(1, 1500, 24), normal(1, 1500, 20, seed=1)
    query = normal(heads, 1, 24, seed=2)
    alone = [run(query[[head]], key, value) for head in range(heads)]
    for found, *rows in zip(run(query, key, value), *alone, strict=True):
        assert found.tobytes() == np.concatenate(rows).tobytes()


@pytest.mark.sampled(
    ("head_dim", "dtype"),
    list(product([1, 2, 15, 16, 17, 31, 33, 48, 72, 128, 256, 300], DTYPES)),
    one_in=6,
)
def test_any_head_dim(head_dim, dtype) -> None:
    shape = Shape((), 4, 1, 1, 75, head_dim, 301 - head_dim)
    assert check_case("cpu", Case(f"decode dim {head_dim}", shape), dtype)


@pytest.mark.parametrize("head_dim", [17, 31, 128])
@pytest.mark.parametrize("size", [1.0, 2.0**-90, 2.0**90])
@pytest.mark.parametrize("isa", ["avx512-bf16", "neon-bf16"])
def test_scores_of_bfloat16_pairs(isa, head_dim, size, monkeypatch) -> None:
    """An instruction and its emulation give the same bits, in pages and in tiles of 4, 2 and 1."""
    shapes = (1, 7, 1, head_dim), (1, 1, 60, head_dim), (1, 1, 60, 40)
    query, key, value = (
        normal(*shape, seed=n).astype(ml_dtypes.bfloat16) for n, shape in enumerate(shapes)
    )
    query, key = query * ml_dtypes.bfloat16(size), key / ml_dtypes.bfloat16(size)
    expected = truth(query, key, value)
    limit, found = bounds(expected, ml_dtypes.bfloat16), set()
    forms = [(key, value)]
    forms += [
        [
            qkv.Paged(each.reshape(60 // size, 1, size, -1), np.arange(60 // size)[None])
            for each in (key, value)
        ]
        for size in (1, 3, 20)
    ]
    for kernels in both_ways(isa):
        monkeypatch.setenv("QKV_ISA", kernels)
        for rows in forms:
            out, lse = run(query, *rows)
            assert np.abs(out.astype(float) - expected.out).max() <= limit.out
            assert np.abs(lse - expected.lse).max() <= limit.lse
            found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        ("float64", {"row_products": 0}),
        ("float32", {"row_products": 0}),
        ("float16", {"row_products": 0}),
        ("float16", {"narrow_rows": ()}),
    ],
)
def test_what_changes_no_bit_on_arm(dtype, way, monkeypatch, no_prepared_calls) -> None:
    """16 products at once or 4; float16 multiplied as it is or converted before, some of it
    subnormal."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("neon-bf16"))
    before = cpu_host._SHAPES["neon-bf16"]
    kind, found = DTYPES[dtype], set()
    for shape in (before, replace(before, **way)):
        monkeypatch.setitem(cpu_host._SHAPES, "neon-bf16", shape)
        forget_prepared_calls()
        all_bytes = b""
        for keys, head_dim, size in ((3, 40, 1.0), (700, 33, 2.0**-17), (90, 2, 4.0)):
            query = normal(7, 1, head_dim, dtype=kind)
            key = (size * normal(1, keys, head_dim)).astype(kind)
            for result in run(query, key, normal(1, keys, 75, seed=1, dtype=kind), scale=1 / size):
                all_bytes += result.tobytes()
        found.add(all_bytes)
    assert shape != before
    assert len(found) == 1


def test_long_rows_are_as_good_as_plain_ones() -> None:
    query, key, value = normal(2, 1, 64), normal(1, 20_000, 64), normal(1, 20_000, 16)
    expected = truth(query, key, value)
    limit = bounds(expected, np.float32)
    found, lse = run(query, key, value)
    assert np.abs(found - expected.out).max() <= limit.out
    assert np.abs(lse - expected.lse).max() <= limit.lse


@pytest.mark.parametrize("sign", [1, -1])
def test_chunks_whose_scores_are_far_apart(sign) -> None:
    """Records are merged relative to the largest of all, whichever chunk has it."""
    bias = sign * np.linspace(-2000, 2000, 4 * CHUNK)[None]
    query, key, value = normal(3, 1, 8), normal(1, 4 * CHUNK, 8), normal(1, 4 * CHUNK, 5)
    expected = truth(query, key, value, (bias,))
    limit = bounds(expected, np.float32)
    found, lse = run(query, key, value, bias)
    assert np.abs(found - expected.out).max() <= limit.out
    assert np.abs(lse - expected.lse).max() <= limit.lse


# What is forbidden


@pytest.mark.sampled("dtype", list(DTYPES), one_in=4)
def test_nothing_forbidden_leaks(dtype) -> None:
    shape = {"query": (4, 2, 12), "key": (2, 700, 12), "value": (2, 700, 9)}
    arrays = {n: normal(*s, dtype=DTYPES[dtype], seed=i) for i, (n, s) in enumerate(shape.items())}
    hidden = np.random.default_rng(5).random(700) < 0.3
    mask = np.broadcast_to(~hidden, (2, 700))
    mod = qkv.ScoreMod(lambda s, b, h, q, k: np.where(hidden[k], -np.inf, s))
    for variant in (mask, mod):
        clean, lse = run(*arrays.values(), variant, q_offset=0)
        for poison in (np.nan, np.inf, -np.inf):
            arrays["key"][:, hidden] = arrays["value"][:, hidden] = poison
            found, again = run(*arrays.values(), variant, q_offset=0)
            assert found.tobytes() == clean.tobytes()
            assert again.tobytes() == lse.tobytes()
        for name in ("key", "value"):
            arrays[name][:, hidden] = 0
    # In an allowed one it shows, in the rows that may see it.
    causal = np.ones((2, 700), bool)
    causal[0, 600:] = False
    arrays["value"][:, 650] = np.nan
    found, _ = run(*arrays.values(), causal)
    assert np.isfinite(found[:, 0].astype(float)).all()
    assert np.isnan(found[:, 1].astype(float)).all()


def test_a_row_without_keys_beside_one_with() -> None:
    mask = np.zeros((3, 900), bool)
    mask[1, 899] = True
    key, value = normal(1, 900, 8), normal(1, 900, 5)
    found, lse = run(normal(2, 3, 8), key, value, mask)
    np.testing.assert_array_equal(found[:, [0, 2]], 0)
    assert np.isneginf(lse[:, [0, 2]]).all()
    np.testing.assert_allclose(found[:, 1], np.broadcast_to(value[0, 899], (2, 5)))


# Statistics


@pytest.mark.parametrize("variants", [(), (qkv.Softcap(3.0), qkv.Causal("end"))])
def test_statistics_come_from_the_same_pass(variants) -> None:
    query, key, value = 3 * normal(2, 4, 2, 16), normal(2, 2, 1500, 16), normal(2, 2, 1500, 8)
    expected = truth(query, key, value, variants)
    problem = check(query, key, value, variants)
    out, rows = qkv.backends.backends()[0].run_with_statistics(problem)
    weights = expected.weights
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    np.testing.assert_allclose(rows.entropy, entropy, atol=2e-6 * 7)
    np.testing.assert_allclose(rows.max_score, expected.scores.max(-1), rtol=3e-6)
    assert out.out.tobytes() == run(query, key, value, *variants)[0].tobytes()


# Chunks


def planned(problem):
    """Keys that all tasks have, and the rows of `TASK` and `GROUP`, as the kernel writes them."""
    spec, arguments = problem.spec, DecodeArguments(problem, NO_RESULTS)
    block = ArgumentBlock(arguments.copy())
    groups = spec.batch_size * spec.num_kv_heads
    record = record_bytes(spec, host().shape_of(spec.compute_dtype))
    shared = page_aligned(shared_bytes(groups, spec.kv_len, record))
    words = shared[: shared.size // 8 * 8].view(np.int64)
    block.words[word_index("shared", FIELDS)] = address_of(shared)
    keys = DecodePass(problem).kernel.step(block.pointer, -1)
    at = groups * len(GROUP)
    count = block.words[word_index("limit", FIELDS)]
    tasks = words[at : at + count * len(TASK)].reshape(-1, len(TASK))
    return keys, tasks, words[:at].reshape(-1, len(GROUP))


@pytest.mark.sampled("variant", ALL, one_in=9, ids=lambda v: v.__name__)
def test_tasks_hold_what_is_allowed(variant) -> None:
    shape = Shape((3,), 4, 2, 2, 2 * CHUNK + 75, 4, 4)
    arrays = normal(3, 4, 2, 4), normal(3, 2, shape.kv_len, 4), normal(3, 2, shape.kv_len, 4)
    for example in variant.examples(shape, np.random.default_rng(1)):
        problem = check(*arrays, (example,), q_offset="end")
        keys, tasks, groups = planned(problem)
        masked = replace(problem, spec=replace(problem.spec, scores=()))
        scores = Scores(masked, np.dtype(float))
        assert keys == groups[:, GROUP.index("keys")].sum()
        for number, (done, first, count, own) in enumerate(groups.tolist()):
            batch, kv_head = divmod(number, 2)
            allowed = np.zeros((4, shape.kv_len), bool)
            for row, head in enumerate((2 * kv_head, 2 * kv_head + 1)):
                tile = scores.tile(batch, head, slice(0, 2), slice(0, shape.kv_len))
                allowed[2 * row : 2 * row + 2] = ~np.isneginf(tile)
            met = np.zeros(shape.kv_len, bool)
            assert done == 0
            assert (tasks[:, 0] == number).sum() == count
            for group, start, stop, full in tasks[first : first + count].tolist():
                assert group == number
                assert start % CHUNK == 0
                assert not stop or stop == min(start + CHUNK, shape.kv_len)
                assert not met[start:stop].any()
                met[start:stop] = True
                assert allowed[:, start:stop].all() or not full
            assert not allowed[:, ~met].any(), "every allowed pair is met"
            assert own <= met.sum()


def test_work_is_proportional_to_the_pairs() -> None:
    query, key = normal(2, 8, 1, 4), normal(2, 2, 40_000, 4)
    window = check(query, key, key, (qkv.SlidingWindow(255, 0),), q_offset="end")
    keys, tasks, _ = planned(window)
    assert keys <= 2 * 2 * (256 + 2 * BLOCK_KV)
    assert len(tasks) <= 2 * 2 * 2
    lens = check(query, key, key, (qkv.KeyLengths([10, 40_000]),))
    assert planned(lens)[0] == 2 * (BLOCK_KV + 40_000)
    nothing = check(query, key, key, (qkv.KeyLengths(0),))
    keys, tasks, _ = planned(nothing)
    assert keys == 0
    assert len(tasks) == 4


def test_chunks_follow_from_the_length_alone() -> None:
    assert chunk_of(1) == chunk_of(131_072) == CHUNK
    assert chunk_of(131_073) == 2 * CHUNK
    assert 10_000_000 / chunk_of(10_000_000) <= 256


# Threads, code and memory


def test_bits_do_not_depend_on_threads(monkeypatch) -> None:
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1.0)
    query, key, value = normal(3, 8, 1, 40), normal(3, 2, 9000, 40), normal(3, 2, 9000, 24)
    found = set()
    before = qkv.get_num_threads()
    try:
        for threads in (1, 2, 3, 7, 2):
            qkv.set_num_threads(threads)
            for _ in range(50):
                out, lse = run(query, key, value, qkv.KeyLengths([9000, 5000, 77]))
                found.add(out.tobytes() + lse.tobytes())
        monkeypatch.setattr(workers, "_SLICE_SECONDS", 1e-9)
        out, lse = run(query, key, value, qkv.KeyLengths([9000, 5000, 77]))
        found.add(out.tobytes() + lse.tobytes())
    finally:
        qkv.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [False, True])
def test_pages_and_panels_change_no_bit(quantised, monkeypatch) -> None:
    """Whatever their size: a page more or less adds in the same order; rows are by themselves."""
    key, value = normal(1, 2, 960, 24), normal(1, 2, 960, 10)
    query, found = normal(1, 6, 1, 24), set()
    for size in (1, 3, 5, 16, 64, 96, 960):
        forms = []
        for array in (key, value):
            pages = array[0].reshape(2, 960 // size, size, -1).swapaxes(0, 1)
            rows = pages
            if quantised:
                rows = qkv.Quantized((20 * pages).astype(np.int8), np.abs(pages[..., 0]) + 0.1)
            forms.append(qkv.Paged(rows, np.arange(960 // size)[None]))
        for panel in (1, 2, 128):
            monkeypatch.setattr(layout, "_PANEL", panel)
            found.add(run(query, *forms, qkv.KeyLengths(951))[0].tobytes())
    if not quantised:
        found.add(run(query, key, value, qkv.KeyLengths(951))[0].tobytes())
    assert len(found) == 1


def test_the_next_step_compiles_nothing(monkeypatch) -> None:
    built = []

    def count(*args, build=streaming.build):
        built.append(args)
        return build(*args)

    monkeypatch.setattr(streaming, "build", count)
    streaming._kernel.cache_clear()
    for step in range(5, 2000, 333):
        for dim in (3, 16):
            for heads in (1, 4):
                slots = -(-step // 16)
                pages = normal(slots + 2, 1, 16, dim)
                key = qkv.Paged(pages, np.arange(slots)[None])
                run(normal(1, heads, 1, dim), key, key, qkv.KeyLengths([step]), qkv.Causal("end"))
    assert len(built) == 1
    streaming._kernel.cache_clear()


def additions(kv_len):
    """How many roundings a sum over so many equal terms goes through: block, chunk, merge."""
    return BLOCK_KV + chunk_of(kv_len) / BLOCK_KV + kv_len / chunk_of(kv_len)


def test_ten_million_keys() -> None:
    """One page, 156,250 times: 5 GB of keys and as many of values."""
    slots, key, value = 10_000_000 // 64, normal(1, 1, 64, 128), normal(1, 1, 64, 128, seed=1)
    table = np.zeros((1, slots), int)
    query = normal(1, 1, 1, 128)
    found, lse = run(query, qkv.Paged(key, table), qkv.Paged(value, table))
    expected = truth(query, key, value)
    limit = additions(10_000_000) * 2.0**-24 * np.abs(value).max()
    assert np.abs(found - expected.out).max() < limit
    np.testing.assert_allclose(lse, expected.lse + np.log(slots), rtol=1e-6)


def test_ten_million_keys_of_an_expanded_view() -> None:
    key, value = (np.broadcast_to(normal(1, 1, 8, seed=i), (1, 10_000_000, 8)) for i in (0, 1))
    query = normal(4, 1, 8)
    found, lse = run(query, key, value, qkv.KeyLengths(9_999_999))
    limit = additions(10_000_000) * 2.0**-24
    np.testing.assert_allclose(found[:, 0], np.repeat(value[:, 0], 4, axis=0), rtol=limit)
    score = query[:, 0].astype(float) @ key[0, 0].astype(float) * 8**-0.5
    np.testing.assert_allclose(lse[:, 0], score + np.log(9_999_999), rtol=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="the file must be allowed to have holes")
def test_strides_beyond_32_bits(tmp_path) -> None:
    """Rows more than 2**31 elements apart, in a file that is mostly holes."""
    step, count = 2**31 + 24, 3
    path = tmp_path / "rows"
    with open(path, "wb") as file:
        file.truncate(2 * step * count)
    memory = np.memmap(path, np.float16, "r+", shape=(1, count, step))
    rows = memory[:, :, :24]
    rows[...] = normal(1, count, 24)
    query = normal(1, 2, 24, dtype=np.float16)
    expected = truth(query, rows, rows)
    limit = bounds(expected, "float16")
    assert np.abs(run(query, rows, rows)[0] - expected.out).max() <= limit.out
    heads = rows.swapaxes(0, 1)  # the same between heads, and between pages
    found = run(np.repeat(query, 3, axis=0), heads, heads)[0]
    np.testing.assert_array_equal(found, np.repeat(rows.swapaxes(0, 1), 2, axis=1))
    pages = qkv.Paged(rows[0][:, None, None], np.arange(3)[None])
    assert np.abs(run(query[None], pages, pages)[0] - expected.out).max() <= limit.out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are set with Linux's mprotect")
@pytest.mark.sampled("dtype", ["np.float32", "ml_dtypes.bfloat16"], one_in=2)
def test_nothing_outside_the_operands_is_read_or_written(dtype) -> None:
    """Operands end, or begin, at a page that may not be touched."""
    in_a_process(
        """
        import ctypes, itertools, mmap, os
        import ml_dtypes, numpy as np, qkv
        from qkv.testing import truth
        libc = ctypes.CDLL(None)
        page = mmap.PAGESIZE
        rng = np.random.default_rng(0)
        dtype = eval(os.environ["DTYPE"])
        kept = []

        def guarded(array, reverse):
            pages = -(-array.nbytes // page)
            region = mmap.mmap(-1, (pages + 2) * page)
            address = ctypes.addressof(ctypes.c_char.from_buffer(region))
            for fence in (address, address + (pages + 1) * page):
                assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
            start = page if reverse else (pages + 1) * page - array.nbytes
            raw = np.frombuffer(region, np.uint8, array.nbytes, start)
            view = raw.view(array.dtype).reshape(array.shape)
            kept.append(region)
            if reverse:
                view = view[..., ::-1, ::-1]
            view[...] = array
            return view

        shapes = [(1, 1, 1, 1, 1), (3, 1, 5, 7, 2), (2, 2, 66, 16, 17), (4, 1, 131, 40, 33),
                  (8, 1, 64, 64, 64)]
        for shape, reverse in itertools.product(shapes, (False, True)):
            heads, q_len, kv_len, dim, v_dim = shape
            query, key, value = (
                guarded(rng.normal(size=s).astype(dtype), reverse)
                for s in ((1, heads, q_len, dim), (1, 1, kv_len, dim), (1, 1, kv_len, v_dim))
            )
            bias = guarded(rng.normal(size=(heads, q_len, kv_len)).astype("f"), reverse)
            expected = truth(query, key, value, (bias,)).out
            forms = [(key, value)]
            for size in (1, 16):
                slots = -(-kv_len // size)
                paged = []
                for array in (key, value):
                    pages = np.zeros((slots * size, array.shape[-1]), dtype)
                    pages[:kv_len] = array[0, 0]
                    pages = guarded(pages.reshape(slots, 1, size, -1), False)
                    paged.append(qkv.Paged(pages, guarded(np.arange(slots)[None], False)))
                if slots * size == kv_len:
                    forms.append(tuple(paged))
            for k, v in forms:
                found = qkv.attention(query, k, v, bias, backend="cpu")
                off = np.abs(found.astype(float) - expected).max()
                assert off < {8: 1e-12, 4: 3e-6, 2: 3e-2}[np.dtype(dtype).itemsize], (shape, dtype)
            few, scales = (
                guarded(rng.integers(-9, 9, (1, 1, kv_len, dim)).astype(np.int8), reverse),
                guarded(rng.random((1, 1, kv_len)).astype("f"), reverse),
            )
            narrow = qkv.Quantized(few, scales)
            exact = few * scales[..., None].astype(float)
            expected = truth(query, exact, value, (bias,)).out
            found = qkv.attention(query, narrow, value, bias, backend="cpu").astype(float)
            assert np.abs(found - expected).max() < 3e-2
        """,
        QKV_NUM_THREADS="2",
        DTYPE=dtype,
    )
