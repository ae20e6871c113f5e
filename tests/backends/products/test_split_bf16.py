"""The float32 and float16 kernel of products of parts: what it adds to the conformance suite."""

from itertools import product

import numpy as np
import pytest

import qkv
from forced import as_it_runs
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.backends.cpu.split_bf16 import terms
from qkv.problem.building.check import check
from qkv.testing import Case, bounds, cases, check_case, truth
from qkv.testing.tolerances import ORDERS
from rebuilt import rebuilt_kernels

DTYPES = ("float32", "float16")
PAIRS = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in cases()
    for dtype in case.dtypes
    if dtype in DTYPES
]

pytestmark = pytest.mark.usefixtures("tiles")


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def operands(q_len, kv_len, dim, v_dim=None, heads=(1, 1), dtype="float32"):
    sizes = (heads[0], q_len, dim), (heads[1], kv_len, dim), (heads[1], kv_len, v_dim or dim)
    return [normal(*size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]


def run(*args, **kwargs):
    return qkv.attention(*args, backend="cpu", return_lse=True, **kwargs)


def require_right(arrays, variants=(), **keywords) -> None:
    require_in_parts(arrays, variants, **keywords)
    out, lse = run(*arrays, *variants, **keywords)
    expected = truth(*arrays, variants, **keywords)
    seen = ~np.isneginf(expected.lse)
    assert (np.isneginf(lse) == ~seen).all()
    errors = np.abs(out - expected.out).max(), np.abs(lse[seen] - expected.lse[seen]).max()
    for orders in (1, ORDERS):  # mostly the first is enough
        limit = bounds(expected, arrays[0].dtype, orders)
        if errors[0] <= limit.out and errors[1] <= limit.lse:
            return
    raise AssertionError(f"errors are {errors}, allowed are {limit}")


# Which kernel runs


def parts_of(arrays, variants=(), **keywords) -> int:
    """How many parts an operand is cut into; 1 if it is multiplied as it is."""
    variants = tuple(qkv.Mask(v) if isinstance(v, np.ndarray) else v for v in variants)
    problem = check(*arrays, variants, **{"q_offset": 0, **keywords})
    return ForwardPass(problem).shape.terms


def require_in_parts(arrays, variants=(), **keywords) -> None:
    assert parts_of(arrays, variants, **keywords) > 1, "another kernel runs"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "count"), [("float32", 3), ("float16", 2)])
def test_large_problems_are_multiplied_in_parts(dtype, count, monkeypatch) -> None:
    many, few = operands(300, 300, 64, dtype=dtype), operands(20, 300, 64, dtype=dtype)
    narrow = operands(300, 300, 16, dtype=dtype)
    assert parts_of(many) == parts_of(many, (qkv.Causal(),)) == parts_of(many, (qkv.Softcap(3.0),))
    assert parts_of(many) == parts_of(many, scale=-1024.0) == count
    assert parts_of(few) == 1, "splitting keys does not pay"
    assert parts_of([few[0], few[0], few[0]]) == 1
    assert parts_of(narrow) == 1, "the softmax outweighs the products"
    assert parts_of(many, scale=1025.0) == parts_of(many, scale=-1025.0) == 1
    rotated = {"float32": 3, "float16": 1}[dtype]
    assert parts_of(many, (qkv.RoPE(),)) == rotated, "rotated rows are float32"
    monkeypatch.setenv("QKV_ISA", as_it_runs("avx512"))
    assert parts_of(many) == 1


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_types_have_no_parts(dtype) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else dtype
    assert parts_of(operands(300, 300, 64, dtype=kind)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_runs_what_was_chosen(dtype, monkeypatch) -> None:
    """Kernels add in other orders: bits say which one ran."""
    arrays = operands(300, 300, 64, dtype=dtype)
    found = {}
    for isa in ("amx", "avx512"):
        monkeypatch.setenv("QKV_ISA", as_it_runs(isa))
        out, lse = run(*arrays)
        before_backward, _ = qkv.vjp(*arrays, backend="cpu")
        found[isa] = lse.tobytes(), out.tobytes(), before_backward.tobytes()
    assert found["amx"][0] != found["avx512"][0]
    assert all(out == before_backward for _, out, before_backward in found.values())


# Numbers


@pytest.mark.slow
@pytest.mark.sampled(("case", "dtype"), PAIRS, one_in=40)
@pytest.mark.usefixtures("splits_operands")
def test_conformance(case: Case, dtype: str) -> None:
    assert check_case("cpu", case, dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("splits_operands")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "v_dim", "q_len", "kv_len"),
    [
        (1, 1, 257, 300),
        (2, 65, 70, 513),
        (17, 80, 300, 257),
        (33, 16, 33, 127),
        (80, 33, 129, 129),
        (257, 17, 257, 131),
        (130, 257, 65, 300),
    ],
)
@pytest.mark.one_in(3)
@pytest.mark.slow
def test_sizes_that_fill_no_tile(dtype, dim, v_dim, q_len, kv_len) -> None:
    require_right(operands(q_len, kv_len, dim, v_dim, dtype=dtype))


def holes(q_len, kv_len):
    """Whether each query may see each key; one row sees none, one the last key alone."""
    allowed = np.random.default_rng(7).random((q_len, kv_len)) < 0.6
    allowed[3], allowed[5] = False, False
    allowed[5, -1] = True
    return allowed


VARIANTS = {
    "causal": lambda q, k: (qkv.Causal(),),
    "window": lambda q, k: (qkv.SlidingWindow(90, 3), qkv.ALiBi()),
    "mask": lambda q, k: (qkv.Mask(holes(q, k)),),
    "bias with holes": lambda q, k: (
        qkv.Bias(np.where(holes(q, k), normal(q, k, seed=8), -np.inf).astype(np.float32)),
    ),
    "dropout": lambda q, k: (qkv.Dropout(0.3, 11), qkv.Causal()),
    "softcap": lambda q, k: (qkv.Softcap(2.0),),
    "sinks": lambda q, k: (qkv.Sinks(normal(2, seed=9)), qkv.Causal()),
}


@pytest.mark.slow
@pytest.mark.usefixtures("splits_operands")
@pytest.mark.sampled(("dtype", "name"), list(product(DTYPES, VARIANTS)), one_in=5)
def test_variants_of_several_tasks_and_groups(dtype, name) -> None:
    """More queries than one task has, two heads that share keys, a negative scale."""
    arrays = operands(1060, 140, 48, 56, heads=(2, 1), dtype=dtype)
    require_right(arrays, VARIANTS[name](1060, 140), q_offset="end", scale=-0.21)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype) -> None:
    """Elements that are not adjacent, rows backwards, heads after rows, rows not whole words."""
    query = normal(2, 64, 290, dtype=dtype, seed=1).swapaxes(-1, -2)
    key = normal(2, 300, 128, dtype=dtype, seed=2)[:, ::-1, ::-2]
    value = normal(300, 2, 41, dtype=dtype, seed=3).swapaxes(0, 1)[..., ::-1]
    require_right((query, key, value))
    require_right((key, query, value[:, :290]), (qkv.Causal(),), q_offset="end")


@pytest.mark.slow
@pytest.mark.sampled(("dtype", "variants"), list(product(DTYPES, [(), (qkv.Causal(),)])), one_in=2)
def test_statistics(dtype, variants) -> None:
    arrays = operands(400, 300, 64, heads=(2, 1), dtype=dtype)
    require_in_parts(arrays, variants)
    record = qkv.inspect(*arrays, *variants, q_offset="end", backend="cpu")
    weights = truth(*arrays, variants, q_offset="end").weights
    logs = np.log(np.where(weights > 0, weights, 1.0))
    near = {"rtol": 1e-5, "atol": 1e-5}
    seen = weights.any(axis=-1)
    np.testing.assert_allclose(record.entropy[seen], -(weights * logs).sum(-1)[seen], **near)
    np.testing.assert_allclose(record.max_weight[seen], weights.max(axis=-1)[seen], **near)
    np.testing.assert_array_equal(record.top(1)[0][..., 0][seen], weights.argmax(-1)[seen])


# Parts


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 to nearest bfloat16, ties away from 0."""
    bits = x.view(np.uint32) + np.uint32(0x8000)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def cut(x: np.ndarray) -> np.ndarray:
    """float32 to the bfloat16 between it and 0."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def split(x, count, part):
    found = []
    for _ in range(count):
        found.append(part(x))
        x = x - found[-1]
    return found


@pytest.mark.parametrize(("part", "apart"), [(rounded, 2.0**-8), (cut, 2.0**-7)])
def test_three_parts_are_the_whole(part, apart) -> None:
    """Any mantissa, any exponent that tiles are given; each part is small beside the one before."""
    rng = np.random.default_rng(0)
    mantissa = rng.integers(0, 2**23, 200_000, np.uint32)
    mantissa[:300] = [2**b + d & 2**23 - 1 for b in range(1, 24) for d in range(-6, 7)] + [0]
    exponent = rng.integers(127 - 100, 127 + 60, mantissa.size, np.uint32)
    sign = rng.integers(0, 2, mantissa.size, np.uint32)
    x = (sign << 31 | exponent << 23 | mantissa).view(np.float32)
    first, second, third = split(x, 3, part)
    assert (first.astype(float) + second + third == x).all()
    assert (np.abs(second) <= apart * np.abs(first)).all()
    assert (np.abs(third) <= apart * np.abs(second)).all()


def test_two_parts_are_a_float16() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = every[np.isfinite(every)].astype(np.float32)
    first, second = split(x, 2, rounded)
    assert (first + second == x).all()


STEPS = {"float32": 1 + 2.0**-9 + 2.0**-18, "float16": 1 + 2.0**-9}
"""Numbers that are sums of as many parts as the type has, each 2**-9 of the one before."""


def score_error(dtype) -> float:
    """The relative error of 64 equal products, all of whose parts have the same sign.

    No product of parts cancels another, so that a missing one shows.
    """
    x, keys = np.full((1, 300, 64), STEPS[dtype], dtype), 20
    key = x[:, :keys]
    require_in_parts((x, key, key), scale=1.0)
    lse = qkv.backends.cpu.CpuBackend().run(check(x, key, key, (), scale=1.0)).lse
    return float(np.abs((lse - np.log(keys)) / (64 * STEPS[dtype] ** 2) - 1).max())


def value_error(dtype) -> float:
    """The relative error of weights `STEPS`, but for a factor, times values `STEPS`."""
    value = np.full((1, 300, 64), STEPS[dtype], dtype)
    value[:, 0] = 0
    query = np.zeros_like(value)
    bias = np.full((300, 300), np.log(STEPS[dtype] / 2), np.float32)
    bias[:, 0] = 0
    sinks = qkv.Sinks(np.full(1, -1e30, np.float32))  # so that the output leaves in float32
    problem = check(query, query, value, (qkv.Bias(bias), sinks))
    out = qkv.backends.cpu.CpuBackend().run(problem).out
    assert out.dtype == np.float32
    expected = truth(query, query, value, (qkv.Bias(bias), sinks)).out
    return float(np.abs(out / expected - 1).max())


TERMS = {"float32": 3, "float16": 2}
ERRORS = {"_PRODUCTS": score_error, "_WEIGHT_PRODUCTS": value_error}
WHOLE = {
    ("_PRODUCTS", "float32"): 2.0**-21, ("_WEIGHT_PRODUCTS", "float32"): 2.0**-20,
    ("_PRODUCTS", "float16"): 2.0**-21, ("_WEIGHT_PRODUCTS", "float16"): 2.0**-15,
}  # fmt: skip
"""The largest errors of kernels in which no product is missing."""


@pytest.mark.slow
@pytest.mark.usefixtures("splits_operands")
@pytest.mark.parametrize(("table", "dtype"), WHOLE)
def test_no_product_of_parts_is_left_out(table, dtype) -> None:
    """The smallest of them would be 2**-18 of the sum."""
    assert ERRORS[table](dtype) <= WHOLE[table, dtype]


MISSING = [
    (table, dtype, number)
    for table in ERRORS
    for dtype, count in TERMS.items()
    for number in range(len(getattr(terms, table)[count]))
]


@pytest.mark.slow
@pytest.mark.usefixtures("splits_operands")
@pytest.mark.sampled(("table", "dtype", "number"), MISSING, one_in=5)
def test_a_missing_product_is_found(table, dtype, number, monkeypatch) -> None:
    """The product is missing in the kernel that was built without it, and in no other."""
    count = TERMS[dtype]
    products = getattr(terms, table)[count]
    monkeypatch.setitem(getattr(terms, table), count, products[:number] + products[number + 1 :])
    with rebuilt_kernels() as built:
        error = ERRORS[table](dtype)
    assert {(e.name, key.shape.terms) for e, key in built} == {("emit_split_forward", count)}
    assert error > max(2.0**-19, 2 * WHOLE[table, dtype])


# What has no parts

ODD = {
    "float32": (np.inf, -np.inf, np.nan, 1e30, 3e38, 1e-35, 1e-42, 0.0),
    "float16": (np.inf, -np.inf, np.nan, -6e4, 6e-8, 0.0),
}
NOT_FINITE = (np.inf, -np.inf, np.nan)
PLACES = {
    "an element": (0, 37, 5),
    "a row": (0, 37),
    "several rows": (slice(None), slice(30, 200, 17)),
}
Q_LEN, KV_LEN = 300, 290


def plain_error(arrays, variants) -> tuple[float, float]:
    limit = bounds(truth(*arrays, variants), arrays[0].dtype, orders=3)
    return limit.out, limit.lse


def require_like_the_definition(arrays, variants, limits) -> None:
    """Near the truth, in units of its size, where that is finite; elsewhere what float32 makes.

    Scores of 3e38 are infinite in float32.
    """
    found = run(*arrays, *variants)
    with np.errstate(all="ignore"):
        expected = truth(*arrays, variants)
        plain = qkv.attention(*arrays, *variants, backend="blocked", return_lse=True)
    for ours, exact, theirs, limit in zip(
        found, (expected.out, expected.lse), plain, limits, strict=True
    ):
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(kind(ours), kind(theirs))
        finite = np.isfinite(exact) & np.isfinite(theirs)
        error = np.abs(ours[finite].astype(float) - exact[finite])
        assert (error <= limit * np.maximum(1.0, np.abs(exact[finite]))).all()


def try_each_odd_number(arrays, variants, place) -> None:
    """Put each odd number at a place of one operand after the other, which are written to.

    Bounds are those of the problem before; large scores, of which the rounding shows, have others.
    """
    require_in_parts(arrays, variants)
    before = plain_error(arrays, variants)
    for array in arrays:
        kept = array[place].copy()
        for number in ODD[array.dtype.name]:
            if number == 3e38 and kept.size > 1:
                continue  # whether sums of such products are finite is a matter of their order
            array[place] = number
            large = np.isfinite(number) and abs(number) > 1 and array is not arrays[2]
            limits = plain_error(arrays, variants) if large and kept.size > 1 else before
            require_like_the_definition(arrays, variants, limits)
        array[place] = kept


SEEN_BY = {
    "all": (),
    "causal": (qkv.Causal("start"),),
    "some": (qkv.Mask(np.random.default_rng(3).random((Q_LEN, KV_LEN)) < 0.7),),
}


ODD_PLACES = [
    ("an element", "all"), ("an element", "causal"), ("an element", "some"),
    ("a row", "all"), ("several rows", "causal"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(
    ("dtype", "place", "seen"), [(d, *p) for d in DTYPES for p in ODD_PLACES], one_in=5
)
def test_odd_elements(dtype, place, seen) -> None:
    arrays = operands(Q_LEN, KV_LEN, 64, heads=(2, 1), dtype=dtype)
    try_each_odd_number(arrays, SEEN_BY[seen], PLACES[place])


@pytest.mark.slow
@pytest.mark.sampled("dtype", DTYPES, one_in=2)
def test_odd_elements_of_strided_rows(dtype) -> None:
    """Backwards, and elements farther apart than rows."""
    arrays = [
        np.flip(np.ascontiguousarray(np.flip(array).swapaxes(-1, -2)).swapaxes(-1, -2))
        for array in operands(Q_LEN, KV_LEN, 64, heads=(2, 1), dtype=dtype)
    ]
    assert all(a.strides[-1] < a.strides[-2] < 0 for a in arrays)
    try_each_odd_number(arrays, (), PLACES["an element"])


@pytest.mark.slow
@pytest.mark.sampled(
    ("dtype", "masked"), list(product(DTYPES, ["mask", "causal", "bias"])), one_in=3
)
def test_rows_do_not_notice_what_they_may_not_see(dtype, masked) -> None:
    """Bit for bit, whatever is hidden: other blocks of the same task see it."""
    arrays = operands(900, 423, 64, heads=(2, 1), dtype=dtype)
    hidden, blind = slice(133, 423, 9), slice(0, 133)
    allowed = np.ones((900, 423), bool)
    allowed[blind, hidden] = False
    bias = np.where(allowed, normal(900, 423, seed=5), -np.inf).astype(np.float32)
    variants = {
        "mask": (qkv.Mask(allowed),),
        "causal": (qkv.Causal("start"),),
        "bias": (qkv.Bias(bias),),
    }[masked]
    require_in_parts(arrays, variants)
    before = [array[:, blind].tobytes() for array in run(*arrays, *variants)]
    for number in ODD[dtype]:
        for sides in ((1,), (2,), (1, 2)):
            changed = [array.copy() for array in arrays]
            for side in sides:
                changed[side][:, hidden, ::3] = number
            out, lse = run(*changed, *variants)
            assert [array[:, blind].tobytes() for array in (out, lse)] == before, (number, sides)
            if number in NOT_FINITE and 2 in sides:
                assert not np.isfinite(out[:, 300:, ::3]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_do_not_notice_each_other(dtype) -> None:
    """Odd numbers in a query change no other, in its vector, its block or elsewhere."""
    arrays = operands(300, 300, 64, dtype=dtype)
    odd_rows = [0, 3, 17, 18, 40, 299]
    others = np.delete(np.arange(300), odd_rows)
    before = [array[:, others].tobytes() for array in run(*arrays)]
    for number in ODD[dtype]:
        query = arrays[0].copy()
        query[:, odd_rows, 7] = number
        found = run(query, *arrays[1:])
        assert [array[:, others].tobytes() for array in found] == before, number


@pytest.mark.slow
@pytest.mark.parametrize("size", [2.0**-99, 2.0**-101, 1e-33, 2.0**-60, 2.0**59, 2.0**61, 1e30])
def test_values_of_any_size(size) -> None:
    """Output scales as values do, down to where their parts would be subnormal and beyond."""
    query, key, value = operands(300, 300, 64)
    value *= np.float32(size)
    out, _ = run(query, key, value)
    expected = truth(query, key, value).out
    limit = bounds(truth(query, key, (value / np.float32(size)).astype(np.float32)), np.float32)
    assert np.abs(out - expected).max() <= limit.out * size


@pytest.mark.parametrize(("of_query", "of_key"), [(2.0**59, 2.0**-59), (2.0**61, 2.0**-61)])
def test_rows_of_any_size(of_query, of_key) -> None:
    """Large queries and small keys: scores are those of neither."""
    query, key, value = operands(300, 300, 64)
    calm = bounds(truth(query, key, value), np.float32)
    expected = truth(query, key, value)
    for large, small in ((query, key), (key, query)):
        large *= np.float32(of_query)
        small *= np.float32(of_key)
        out, lse = run(query, key, value)
        assert np.abs(out - expected.out).max() <= calm.out
        assert np.abs(lse - expected.lse).max() <= calm.lse
        large *= np.float32(of_key)
        small *= np.float32(of_query)


@pytest.mark.parametrize("dim", [48, 61])
def test_one_column_beyond_what_has_parts(dim) -> None:
    """Every row is then multiplied without tiles, wherever its elements lie, all of them."""
    query, key, value = operands(300, 300, dim, 64)
    calm = bounds(truth(query, key, value), np.float32)
    expected = truth(query, key, value)
    for sizes in ((2.0**61, 2.0**-61), (2.0**-61, 2.0**61)):
        for column in (0, dim - 1):
            arrays = [query.copy(), key.copy(), value]
            for array, size in zip(arrays, sizes, strict=False):
                array[..., column] *= np.float32(size)
            out, lse = run(*arrays)
            assert np.abs(out - expected.out).max() <= calm.out
            assert np.abs(lse - expected.lse).max() <= calm.lse
            which = int(column == 0)
            arrays[which] = np.repeat(arrays[which], 2, axis=-1)[..., ::2]
            assert [found.tobytes() for found in run(*arrays)] == [out.tobytes(), lse.tobytes()]
