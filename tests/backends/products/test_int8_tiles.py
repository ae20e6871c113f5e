"""Decoding with rows of int8 on matrix tiles, real where the machine has them, and emulated."""

import sys
from itertools import product

import numpy as np
import pytest

import qkv
from forced import as_it_runs, both_ways
from processes import in_a_process
from qkv.backends.cpu.compiler.compile import build
from qkv.backends.cpu.decode import layout
from qkv.backends.cpu.decode.layout import shared_modules
from qkv.backends.cpu.passes import decode as streaming
from qkv.testing import bounds, truth


@pytest.fixture(params=both_ways("amx"))
def isa(request, monkeypatch) -> str:
    monkeypatch.setenv("QKV_ISA", request.param)
    return request.param


@pytest.fixture
def tiles(monkeypatch) -> None:
    monkeypatch.setenv("QKV_ISA", as_it_runs("amx"))


def query_of(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows_of(*shape, seed=1):
    """Rows of int8, and the float32 numbers that they are exactly."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-128, 128, shape).astype(np.int8)
    scales = (rng.integers(1, 2**12, shape[:-1]) * 2.0**-17).astype(np.float32)
    return qkv.Quantized(values, scales), values * scales[..., None]


def run(*args, **kwargs):
    return qkv.attention(*args, backend="cpu", return_lse=True, **kwargs)


def check(query, key, value, *variants, **kwargs):
    (narrow_key, key), (narrow_value, value) = key, value
    found, lse = run(query, narrow_key, narrow_value, *variants, **kwargs)
    expected = truth(query, key, value, variants, **kwargs)
    limit = bounds(expected, np.float32)
    assert np.abs(found - expected.out).max() <= limit.out
    seen = np.isfinite(expected.lse)
    np.testing.assert_array_equal(np.isfinite(lse), seen)
    assert np.abs(lse[seen] - expected.lse[seen]).max(initial=0) <= limit.lse
    return found.tobytes() + lse.tobytes()


def test_the_kernel_multiplies_tiles(tiles, monkeypatch) -> None:
    made = []

    def keep(emit, arguments, *rest):
        made.append(arguments[0])
        return build(emit, arguments, *rest)

    monkeypatch.setattr(streaming, "build", keep)
    streaming._kernel.cache_clear()
    rows = rows_of(1, 3, 64)[0]
    run(query_of(1, 1, 64), rows, rows)
    (key,) = made
    text = "".join(module.emit(*module.arguments) for module in shared_modules(key))
    assert ("multiply_add_byte_tiles" if key.shape.emulated else "tdpbssd") in text
    streaming._kernel.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (192, 192)])
@pytest.mark.parametrize(("group_size", "q_len"), [(1, 1), (3, 1), (4, 2), (5, 1)])
def test_any_number_of_rows(isa, dims, group_size, q_len) -> None:
    query = query_of(2 * group_size, q_len, dims[0])
    key, value = rows_of(2, 333, dims[0]), rows_of(2, 333, dims[1], seed=2)
    check(query, key, value, qkv.ALiBi(), q_offset="end")


@pytest.mark.parametrize("kv_len", [1, 2, 15, 17, 63, 129, 1000])
def test_any_length(tiles, kv_len) -> None:
    check(query_of(4, 1, 64), rows_of(1, kv_len, 64), rows_of(1, kv_len, 64, seed=2))


def test_emulated_tiles_give_the_same_bits(monkeypatch) -> None:
    """Whole numbers are added without rounding, so that nothing depends on the order."""
    found = set()
    for isa in both_ways("amx"):
        monkeypatch.setenv("QKV_ISA", isa)
        query, variants = query_of(6, 2, 128), (qkv.SlidingWindow(300, 0), qkv.Softcap(9.0))
        found.add(
            check(query, rows_of(2, 700, 128), rows_of(2, 700, 64), *variants, q_offset="end")
        )
    assert len(found) == 1


@pytest.mark.parametrize("name", ["key", "value"])
def test_only_one_of_them_is_int8(tiles, name) -> None:
    narrow, wide = rows_of(1, 200, 64), query_of(1, 200, 64, seed=3)
    rows = {"key": (wide, wide), "value": (wide, wide), name: narrow}
    check(query_of(4, 1, 64), rows["key"], rows["value"])


def test_pages_strides_and_panels_change_no_bit(tiles, monkeypatch) -> None:
    key, value = rows_of(1, 2, 480, 64), rows_of(1, 2, 480, 128, seed=2)
    query, lens, found = query_of(1, 10, 1, 64), qkv.KeyLengths(471), set()
    for size, panel in product((1, 3, 5, 16, 32, 48, 160, 480), (1, 3, 128)):
        if panel != 128 and size not in (3, 16):
            continue
        monkeypatch.setattr(layout, "_PANEL", panel)
        forms = []
        for rows, _ in (key, value):
            parts = []
            for part in (rows.values[0], rows.scales[0]):
                pages = part.reshape(2, 480 // size, size, *part.shape[2:])
                parts.append(np.ascontiguousarray(pages.swapaxes(0, 1)))
            forms.append(qkv.Paged(qkv.Quantized(*parts), np.arange(480 // size)[None]))
        out, lse = run(query, *forms, lens)
        found.add(out.tobytes() + lse.tobytes())
    for order in ("columns", "backwards", "apart"):
        forms = []
        for rows, _ in (key, value):
            values = rows.values
            if order == "columns":
                values = np.asfortranarray(values)
            elif order == "backwards":
                values = np.ascontiguousarray(values[:, :, ::-1])[:, :, ::-1]
            else:
                values = np.repeat(values, 2, axis=-1)[..., ::2]
            forms.append(qkv.Quantized(values, rows.scales))
        out, lse = run(query, *forms, lens)
        found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1


def test_no_bit_of_a_row_depends_on_how_many_there_are(tiles) -> None:
    key, value = rows_of(1, 700, 64)[0], rows_of(1, 700, 64, seed=2)[0]
    query = query_of(7, 1, 64)
    query[2, 0, 5], query[4] = np.inf, 0  # The first of them has no unit.
    alone = [run(query[[head]], key, value) for head in range(7)]
    for found, *rows in zip(run(query, key, value), *alone, strict=True):
        assert found.tobytes() == np.concatenate(rows).tobytes()
    assert np.isnan(run(query, key, value)[1][2]).all()


@pytest.mark.parametrize("size", [2.0**-120, 2.0**-97, 2.0**-50, 2.0**50, 2.0**100])
def test_large_and_small_numbers(tiles, size) -> None:
    """Elements without a unit of their own are multiplied by vectors."""
    query = query_of(5, 1, 64) * np.float32(size)
    key, value = rows_of(1, 200, 64), rows_of(1, 200, 64, seed=2)
    check(query, key, value, scale=0.125 / size)
    scales = value[0].scales * np.float32(min(size, 2.0**80))
    value = qkv.Quantized(value[0].values, scales), value[0].values * scales[..., None]
    check(query_of(5, 1, 64), key, value)


def test_one_element_far_larger_than_the_others(tiles) -> None:
    """What is left out is 2^-29 of it; the keys have nothing where it is."""
    query, key = query_of(4, 1, 64), rows_of(1, 300, 64)
    query[:, :, 7], key[0].values[..., 7], key[1][..., 7] = 64, 0, 0
    check(query, key, rows_of(1, 300, 64, seed=2))


def test_what_is_not_finite(tiles) -> None:
    query = query_of(4, 2, 64)
    key, value = rows_of(1, 300, 64)[0], rows_of(1, 300, 64, seed=2)[0]
    mask = np.ones((2, 300), bool)
    mask[0, 40:60], mask[1, 200:] = False, False
    clean, lse = run(query, key, value, mask)
    for poison in (np.nan, np.inf):
        for place in (50, 250):
            row = 0 if place == 50 else 1
            bad = {}
            for name, rows in (("key", key), ("value", value)):
                scales = rows.scales.copy()
                scales[:, place] = poison
                bad[name] = qkv.Quantized(rows.values, scales)
            for pair in ((bad["key"], value), (key, bad["value"])):
                found, again = run(query, *pair, mask)
                assert found[:, row].tobytes() == clean[:, row].tobytes(), "forbidden"
                assert again[:, row].tobytes() == lse[:, row].tobytes()
                assert not np.isfinite(found[:, 1 - row]).all(), "allowed"
                assert np.isnan(found[:, 1 - row]).any() or poison == np.inf


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are set with Linux's mprotect")
def test_nothing_outside_the_operands_is_read() -> None:
    """Operands end, or begin, at a page that may not be touched."""
    in_a_process(
        """
        import ctypes, itertools, mmap
        import numpy as np, qkv
        from qkv.testing import truth
        libc, page, kept = ctypes.CDLL(None), mmap.PAGESIZE, []
        rng = np.random.default_rng(0)

        def guarded(array, first):
            pages = -(-array.nbytes // page)
            region = mmap.mmap(-1, (pages + 2) * page)
            address = ctypes.addressof(ctypes.c_char.from_buffer(region))
            for fence in (address, address + (pages + 1) * page):
                assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
            start = page if first else (pages + 1) * page - array.nbytes
            view = np.frombuffer(region, np.uint8, array.nbytes, start).view(array.dtype)
            kept.append(region)
            view = view.reshape(array.shape)
            view[...] = array
            return view

        for kv_len, heads, first in itertools.product((2, 66, 131), (1, 5), (False, True)):
            query = guarded(rng.normal(size=(heads, 1, 64)).astype("f"), first)
            rows, exact = [], []
            for _ in range(2):
                values = guarded(rng.integers(-9, 9, (1, kv_len, 64)).astype(np.int8), first)
                scales = guarded(rng.random((1, kv_len)).astype("f"), first)
                rows.append(qkv.Quantized(values, scales))
                exact.append(values * scales[..., None].astype(float))
            found = qkv.attention(query, *rows, backend="cpu")
            assert np.abs(found - truth(query, *exact).out).max() < 1e-5
        """,
        QKV_ISA=as_it_runs("amx"),
    )
