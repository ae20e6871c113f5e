"""Keys and values in pages, quantised, or both: the same attention, and errors beforehand."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import qkv
from host_backends import HOST_BACKENDS
from qkv.backends import Refusal, choose, register, unregister
from qkv.backends.blocked import BlockedBackend
from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from qkv.problem.building.check import check
from qkv.testing import DTYPES, bounds, truth

NAMES = HOST_BACKENDS
BATCH, HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 3, 4, 2, 12, 7


class Made:
    """Stored rows of random numbers, and the float64 array that they stand for."""

    def __init__(self, dim, dtype, *, slots, page_size, lens=None, quantised=False, seed=0):
        rng = np.random.default_rng(seed)
        self.num_pages = BATCH * slots + 2
        table = rng.permutation(self.num_pages)[: BATCH * slots].reshape(BATCH, slots)
        table[0, 0] = table[1, 0]  # pages may be shared
        shape = (self.num_pages, KV_HEADS, page_size, dim)
        if quantised:
            self.values = rng.integers(-128, 128, shape).astype(np.int8)
            self.scales = rng.uniform(0.001, 0.02, shape[:-1]).astype(np.float32)
            exact = self.values.astype(float) * self.scales.astype(float)[..., None]
            self.pages = qkv.Quantized(self.values, self.scales)
        else:
            self.pages = rng.normal(size=shape).astype(DTYPES[dtype])
            exact = self.pages.astype(float)
        gathered = exact[table].swapaxes(1, 2)
        self.exact = gathered.reshape(BATCH, KV_HEADS, slots * page_size, dim)
        self.table = table.copy()
        if lens is not None:
            for row, length in zip(self.table, lens, strict=True):
                row[-(-length // page_size) :] = rng.choice([-1, 10**9])
        self.rows = qkv.Paged(self.pages, self.table)


def query_of(q_len, dtype, seed=9):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(BATCH, HEADS, q_len, HEAD_DIM)).astype(DTYPES[dtype])


FORMS = list(itertools.product((1, 3, 20), (1, 5, 16), ("float32", "bfloat16"), (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.sampled(("q_len", "page_size", "dtype", "quantised"), FORMS, one_in=6)
def test_paged_rows_give_what_dense_rows_give(backend, q_len, page_size, dtype, quantised) -> None:
    slots = -(-90 // page_size)
    lens = [slots * page_size, 23, 64]
    form = {"slots": slots, "page_size": page_size, "lens": lens, "quantised": quantised}
    key, value = Made(HEAD_DIM, dtype, **form), Made(V_HEAD_DIM, dtype, **form, seed=1)
    query = query_of(q_len, dtype)
    variants = (qkv.KeyLengths(lens), qkv.Causal("end"), qkv.ALiBi())
    expected = truth(query, key.exact, value.exact, variants)
    limits = bounds(expected, dtype)
    out, lse = qkv.attention(
        query, key.rows, value.rows, *variants, return_lse=True, backend=backend
    )
    assert out.dtype == query.dtype
    assert np.abs(out.astype(float) - expected.out).max() <= limits.out
    seen = np.isfinite(expected.lse)
    assert np.abs(lse - expected.lse)[seen].max() <= limits.lse


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.sampled(("dtype", "q_len"), list(itertools.product(DTYPES, [2, 40])), one_in=4)
def test_quantised_rows_without_pages(backend, dtype, q_len) -> None:
    rng = np.random.default_rng(3)
    query = query_of(q_len, dtype)
    key, value = (
        qkv.Quantized(
            rng.integers(-128, 128, (1, KV_HEADS, 70, dim)).astype(np.int8),
            rng.uniform(0.001, 0.02, (1, KV_HEADS, 70)).astype(np.float32),
        )
        for dim in (HEAD_DIM, V_HEAD_DIM)
    )
    exact = [rows.values * rows.scales.astype(float)[..., None] for rows in (key, value)]
    expected = truth(query, *exact)
    found = qkv.attention(query, key, value, backend=backend).astype(float)
    assert np.abs(found - expected.out).max() <= bounds(expected, dtype).out


def test_one_of_the_two_may_be_an_array() -> None:
    query, value = query_of(2, "float32"), Made(V_HEAD_DIM, "float32", slots=4, page_size=8)
    key = np.random.default_rng(4).normal(size=(BATCH, KV_HEADS, 32, HEAD_DIM)).astype(np.float32)
    expected = truth(query, key, value.exact)
    for backend in NAMES:
        found = qkv.attention(query, key, value.rows, backend=backend)
        assert np.abs(found - expected.out).max() <= bounds(expected, "float32").out


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("q_len", [1, 20])
def test_the_other_layout(quantised, q_len) -> None:
    form = {"slots": 4, "page_size": 8, "quantised": quantised}
    key, value = Made(HEAD_DIM, "float32", **form), Made(V_HEAD_DIM, "float32", **form, seed=1)
    query = query_of(q_len, "float32")

    def turned(made):
        if not quantised:
            return qkv.Paged(np.ascontiguousarray(made.pages.swapaxes(1, 2)), made.table)
        parts = made.values, made.scales
        return qkv.Paged(
            qkv.Quantized(*(np.ascontiguousarray(a.swapaxes(1, 2)) for a in parts)), made.table
        )

    expected = qkv.attention(query, key.rows, value.rows)
    found = qkv.attention(query.swapaxes(1, 2), turned(key), turned(value), layout="blhd")
    np.testing.assert_array_equal(found.swapaxes(1, 2), expected)


def test_rotation_and_dropout_go_with_pages() -> None:
    form = {"slots": 4, "page_size": 8}
    key, value = Made(HEAD_DIM, "float32", **form), Made(V_HEAD_DIM, "float32", **form, seed=1)
    query = query_of(3, "float32")
    variants = (qkv.RoPE(), qkv.Dropout(0.2, 3), qkv.Sinks(0.5))
    expected = truth(query, key.exact, value.exact, variants, q_offset="end")
    for backend in NAMES:
        found = qkv.attention(
            query, key.rows, value.rows, *variants, q_offset="end", backend=backend
        )
        assert np.abs(found - expected.out).max() <= bounds(expected, "float32").out


def test_nothing_leaks_from_behind_the_lengths() -> None:
    """NaN in a shared page, behind the length of one row and inside that of another."""
    query = query_of(1, "float32")
    key, value = (Made(d, "float32", slots=3, page_size=8) for d in (HEAD_DIM, V_HEAD_DIM))
    lens = np.array([10, 24, 9])
    clean = qkv.attention(query, key.rows, value.rows, qkv.KeyLengths(lens))
    for made in (key, value):
        made.pages[made.table[0, 1], :, 2:] = np.nan
        made.pages[made.table[2, 2]] = np.inf
    found = qkv.attention(query, key.rows, value.rows, qkv.KeyLengths(lens))
    assert found[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


# Looking at them


def test_inspection_reads_pages() -> None:
    lens = [20, 24, 5]
    form = {"slots": 3, "page_size": 8, "lens": lens, "quantised": True}
    key, value = Made(HEAD_DIM, "float32", **form), Made(V_HEAD_DIM, "float32", **form, seed=1)
    query = query_of(4, "float32")
    expected = truth(query, key.exact, value.exact, (qkv.KeyLengths(lens),))
    record = qkv.inspect(query, key.rows, value.rows, qkv.KeyLengths(lens))
    np.testing.assert_allclose(record.weights[...], expected.weights, atol=1e-6)
    logs = np.log(np.where(expected.weights > 0, expected.weights, 1))
    np.testing.assert_allclose(record.entropy, -(expected.weights * logs).sum(-1), atol=1e-5)
    trace = qkv.explain(
        query, key.rows, value.rows, qkv.KeyLengths(lens), batch=1, head=3, q_index=2
    )
    np.testing.assert_allclose(trace.heads[0].rows[0].output, expected.out[1, 3, 2], atol=1e-5)


def test_the_plan_says_how_keys_lie_and_what_gathering_takes() -> None:
    form = {"slots": 40, "page_size": 32}
    key, value = Made(HEAD_DIM, "float32", **form), Made(V_HEAD_DIM, "float32", **form, seed=1)
    query = query_of(200, "float32")
    paged = qkv.plan(query, key.rows, value.rows, backend="cpu")
    plain = qkv.plan(query, *(m.exact.astype(np.float32) for m in (key, value)), backend="cpu")
    gathered = BATCH * KV_HEADS * 1280 * (HEAD_DIM + V_HEAD_DIM) * 4
    assert paged.scratch_bytes == plain.scratch_bytes + gathered
    assert "key is pages of float32" in str(paged)


def test_a_backend_that_knows_arrays_only_refuses() -> None:
    class Plain(BlockedBackend):
        name = "plain"
        priority = 1000
        stored_rows = False

    made = Made(HEAD_DIM, "float32", slots=2, page_size=8, quantised=True)
    query = query_of(1, "float32")
    register(Plain())
    try:
        plan = qkv.plan(query, made.rows, made.rows)
        assert plan.backend != "plain"
        fact = "key is pages of int8 and value is pages of int8"
        assert plan.refusals["plain"] == (Refusal(fact, "arrays of the query's dtype"),)
        spec = check(query, made.rows, made.rows, ()).spec
        with pytest.raises(UnsupportedError, match="pages of int8"):
            choose(spec, "plain")
    finally:
        unregister("plain")


# What is wrong is said before anything is read


def refused(error, match, key, *variants, query=None):
    query = query_of(1, "float32") if query is None else query
    with pytest.raises(error, match=match) as caught:
        qkv.attention(query, key, key, *variants)
    assert caught.value.action


@pytest.mark.parametrize("number", [-1, 11, 2**40, -(2**63)])
def test_page_numbers_are_checked_up_to_the_lengths(number) -> None:
    made = Made(HEAD_DIM, "float32", slots=3, page_size=8)
    made.table[1, 2] = number
    refused(
        ShapeError,
        rf"entry 2 of row 1 of the page_table of key is {number}; there are 11",
        made.rows,
    )
    refused(ShapeError, "entry 2 of row 1", made.rows, qkv.KeyLengths([24, 17, 24]))
    qkv.attention(query_of(1, "float32"), made.rows, made.rows, qkv.KeyLengths([24, 16, 24]))


def test_lengths_inside_a_union_limit_nothing() -> None:
    """The other side of | may allow what they forbid."""
    made = Made(HEAD_DIM, "float32", slots=3, page_size=8)
    made.table[1, 2] = -1
    lens = qkv.KeyLengths([24, 16, 24])
    refused(ShapeError, "entry 2 of row 1", made.rows, lens | qkv.Prefix(24))
    refused(ShapeError, "entry 2 of row 1", made.rows, ~lens)
    refused(ShapeError, "entry 2 of row 1", made.rows, (lens & qkv.Prefix(3)) | qkv.Prefix(24))


def test_lengths_inside_an_intersection_limit_as_by_themselves() -> None:
    made = Made(HEAD_DIM, "float32", slots=3, page_size=8)
    made.table[1, 2] = -1
    query, lens, last = query_of(1, "float32"), qkv.KeyLengths([24, 16, 24]), qkv.Causal("end")
    apart = qkv.attention(query, made.rows, made.rows, lens, last)
    joined = qkv.attention(query, made.rows, made.rows, last & (lens & qkv.Prefix(24)))
    np.testing.assert_array_equal(joined, apart)


def test_the_checked_table_is_a_copy() -> None:
    made = Made(HEAD_DIM, "float32", slots=3, page_size=8)
    problem = check(query_of(1, "float32"), made.rows, made.rows, ())
    before = made.table.copy()
    made.table[...] = 10**6
    np.testing.assert_array_equal(problem.operands.key.page_table, before)


def test_wrong_forms() -> None:
    pages = np.zeros((4, KV_HEADS, 8, HEAD_DIM), np.float32)
    table = np.zeros((BATCH, 2), int)
    scales = np.ones((4, KV_HEADS, 8), np.float32)
    refused(ShapeError, "3 dimensions, not 4", qkv.Paged(pages[0], table))
    refused(DTypeError, "float64, not an integer type", qkv.Paged(pages, table * 1.0))
    refused(ShapeError, "is one number", qkv.Paged(pages, table[0, 0, ...]))
    refused(ArgumentError, "are Paged themselves", qkv.Paged(qkv.Paged(pages, table), table))
    refused(DTypeError, "different dtypes", qkv.Paged(pages.astype(np.float64), table))
    refused(DTypeError, "int8 values and float32 scales", qkv.Quantized(pages, scales))
    small = pages.astype(np.int8)
    refused(DTypeError, "float32 scales", qkv.Quantized(small, scales.astype(float)))
    refused(ShapeError, "Pass values", qkv.Quantized(small, scales[:, :1]))
    refused(
        DTypeError,
        "offset of key pages is a list",
        qkv.Paged(qkv.Quantized(small, scales, [0.0]), table),
    )
    refused(ShapeError, "there are 0 pages", qkv.Paged(pages[:0], table))
    refused(DTypeError, "int8; attention takes", small)
    refused(ShapeError, "does not|do not broadcast", qkv.Paged(pages, table[:2]))
    with pytest.raises(DTypeError, match=r"query is a .*Paged, not an array"):
        qkv.attention(qkv.Paged(pages, table), pages, pages)


def test_no_slots_are_no_keys() -> None:
    pages = np.zeros((0, KV_HEADS, 8, HEAD_DIM), np.float32)
    rows = qkv.Paged(pages, np.zeros((BATCH, 0), int))
    out, lse = qkv.attention(query_of(1, "float32"), rows, rows, return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_bfloat16_pages_of_another_library_type() -> None:
    made = Made(HEAD_DIM, "bfloat16", slots=2, page_size=8)
    assert made.pages.dtype == ml_dtypes.bfloat16
    assert qkv.attention(query_of(1, "bfloat16"), made.rows, made.rows).dtype == made.pages.dtype
