"""`qkv.prepare`: calls that are made ready once."""

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch

import qkv
from forced import runs_here
from qkv.errors import ArgumentError, DTypeError, QkvError, ShapeError, UnsupportedError

MOST_QUERIES = {"avx512": 12, "avx2": 6, "sse": 3, "neon": 3}
"""Float32 queries of a call whose number of keys is free, by instruction set."""

pytestmark = pytest.mark.usefixtures("no_prepared_calls")


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def operands(q_len=20, kv_len=20, *, seed=0, dtype="float32"):
    lengths = (4, q_len), (2, kv_len), (2, kv_len)
    return [normal(2, h, n, 8, seed=3 * seed + i, dtype=dtype) for i, (h, n) in enumerate(lengths)]


def definition(query, key, value, allowed=True, bias=0.0):
    """The definition in float64: output and lse."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    key, value = (np.repeat(a, query.shape[1] // a.shape[1], axis=1) for a in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]) + bias
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True)
    return weights / total @ value, np.log(total)[..., 0]


LIBRARIES = pytest.mark.parametrize(
    "arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"]
)


@LIBRARIES
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_other_arrays_of_the_form(arrays, dtype, layout, watched) -> None:
    allowed = np.tri(20, dtype=bool)

    def given(seed):
        made = operands(seed=seed, dtype=dtype)
        laid = [a.swapaxes(1, 2).copy() if layout == "blhd" else a for a in made]
        return made, list(map(arrays, laid))

    prepared = qkv.prepare(*given(0)[1], qkv.Causal(), layout=layout)
    computed = watched.computed
    for seed in range(4):
        made, laid = given(seed)
        expected, expected_lse = definition(*made, allowed)
        out, lse = prepared(*laid, return_lse=True)
        assert type(out) is type(laid[0])
        assert out.dtype == laid[0].dtype
        with_lse = np.asarray(out)
        out = with_lse.swapaxes(1, 2) if layout == "blhd" else with_lse
        tolerance = 2e-3 if dtype == "float16" else 3e-6
        np.testing.assert_allclose(out, expected, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(np.asarray(lse), expected_lse, atol=tolerance, rtol=tolerance)
        np.testing.assert_array_equal(np.asarray(prepared(*laid)), with_lse)
    assert watched.computed == computed


@LIBRARIES
@pytest.mark.parametrize("how", ["at the end", "by numbers"])
def test_a_cache_that_grows(arrays, how, watched) -> None:
    query, key, value = operands(1, 60)
    numbers = how == "by numbers"
    place = {"q_offset": 29 if numbers else "end"}
    start = map(arrays, (query, key[:, :, :30], value[:, :, :30]))
    step = qkv.prepare(*start, qkv.SlidingWindow(20, 0), free=("kv_len",), **place)
    assert step.form.key == qkv.ArrayForm("float32", (2, 2, None, 8), None)
    computed = watched.computed
    for length in (30, 31, 32, 60, 2, 45):
        rows = key[:, :, :length], value[:, :, :length]
        seen = np.arange(length) >= length - 21
        given = map(arrays, (query, *rows))
        found = step(*given, **({"q_offset": length - 1} if numbers else {}))
        np.testing.assert_allclose(np.asarray(found), definition(query, *rows, seen)[0], atol=3e-6)
    assert watched.computed == computed


@LIBRARIES
def test_as_many_keys_as_queries_are_checked_and_right(arrays) -> None:
    query, key, value = operands(1, 9)
    step = qkv.prepare(*map(arrays, (query, key, value)), free="kv_len")
    given = query, key[:, :, :1], value[:, :, :1]
    found = step(*map(arrays, given))
    np.testing.assert_allclose(np.asarray(found), definition(*given)[0], atol=3e-6)


@LIBRARIES
def test_arrays_of_variants_are_read_where_they_lie(arrays) -> None:
    bias = normal(20, 20, seed=9)
    given = operands()
    prepared = qkv.prepare(*map(arrays, given), qkv.Bias(arrays(bias)))
    for _ in range(3):
        found = prepared(*map(arrays, given))
        expected, _ = definition(*given, bias=np.asarray(bias, np.float64))
        np.testing.assert_allclose(np.asarray(found), expected, atol=3e-6)
        bias += 1.0 + normal(20, 20, seed=10)


@LIBRARIES
def test_strides_of_one_entry_do_not_matter(arrays) -> None:
    query, key, value = [a[:1] for a in operands()]
    prepared = qkv.prepare(*[arrays(a[0])[None] for a in (query, key, value)])
    found = prepared(*map(arrays, (query, key, value)))
    np.testing.assert_allclose(np.asarray(found), definition(query, key, value)[0], atol=3e-6)


@LIBRARIES
def test_what_does_not_fit_is_named(arrays) -> None:
    query, key, value = given = list(map(arrays, operands()))
    prepared = qkv.prepare(*given)
    wide = torch.Tensor.double if arrays is torch.from_numpy else lambda a: a.astype("float64")
    for others, kind, words in (
        ((wide(query), key, value), DTypeError, "query has another dtype"),
        ((query, key[:, :, :9], value), ShapeError, "key has another shape"),
        ((query, key, value[:, :, :, :4]), ShapeError, "value has another shape"),
        ((query[0], key, value), ShapeError, "query has another shape"),
        ((query, key.swapaxes(0, 1), value), ShapeError, "key has other strides"),
    ):
        with pytest.raises(kind, match=words) as error:
            prepared(*others)
        assert "prepared for" in str(error.value)
    step = qkv.prepare(query[:, :, :1], key, value, free=("kv_len",))
    with pytest.raises(DTypeError, match="key"):
        step(query[:, :, :1], wide(key), value)
    with pytest.raises(ArgumentError, match="q_offset=3"):
        step(query[:, :, :1], key, value, q_offset=3)
    # Sizes of keys and values that differ are an error of attention.
    with pytest.raises(QkvError):
        step(query[:, :, :1], key, value[:, :, :4])


class Undeclared:
    """A mask that does not declare how its fields are read."""

    def lower(self, builder) -> None:
        builder.mask(builder.q_pos >= builder.kv_pos)


@LIBRARIES
@pytest.mark.parametrize("free", [(), ("kv_len",)])
def test_stored_rows_are_refused(arrays, free) -> None:
    """Rows that nobody has written would be read without the masks of their cache."""
    query, key, value = map(arrays, operands(1))
    prepared = qkv.prepare(query, key, value, free=free)
    for make in (qkv.cache.PagedCache, qkv.cache.ContiguousCache):
        for dtype in (None, "int8"):
            rows = make(dtype=dtype).append(key, value)
            if isinstance(rows.key, qkv.Paged | qkv.Quantized):
                with pytest.raises(DTypeError, match=r"key is a qkv.*, not an array"):
                    prepared(query, rows.key, rows.value)
    with warnings.catch_warnings(action="ignore"):
        strided = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    with pytest.raises(DTypeError, match="key is a Tensor that has no shape"):
        prepared(query, strided, value)


def test_what_cannot_be_prepared_is_said() -> None:
    given = operands()
    for variants, keywords, error, words in (
        ((), {"free": ("q_len",)}, ArgumentError, "q_len"),
        ((), {"free": ("kv_len",)}, UnsupportedError, "number of keys cannot be free"),
        ((), {"backward": True}, ArgumentError, "qkv.vjp"),
        ((), {"backend": "reference"}, UnsupportedError, "reference prepares no calls"),
        ((), {"backend": "reference", "free": ("kv_len",)}, UnsupportedError, "backend reference"),
        ((Undeclared(),), {}, UnsupportedError, "does not declare"),
    ):
        with pytest.raises(error, match=words):
            qkv.prepare(*given, *variants, **keywords)
    with pytest.raises(UnsupportedError, match="three dimensions"):
        qkv.prepare(*[array[0, 0] for array in given])
    query, key, value = given
    for empty in ((query, key[..., :0, :], value[..., :0, :]), (query, key, value[..., :0])):
        with pytest.raises(UnsupportedError, match="a size is 0"):
            qkv.prepare(*empty)
    with pytest.raises(QkvError, match="head_dim"):
        qkv.prepare(given[0], given[1][..., 1:], given[2])


@pytest.mark.parametrize(
    ("isa", "most"), [(isa, most) for isa, most in MOST_QUERIES.items() if runs_here(isa)]
)
def test_the_most_queries_with_free_keys(isa: str, most: int, monkeypatch) -> None:
    """The description of `free` has these numbers; it said 16, and errors blamed arrays."""
    monkeypatch.setenv("QKV_ISA", isa)
    for dtype, allowed in ((np.float32, most), (np.float16, most), (np.float64, most // 2)):
        key = np.ones((1, 2, 50, 8), dtype)
        step = qkv.prepare(key[:, :, :allowed], key, key, free=("kv_len",))
        assert (step(key[:, :, :allowed], key[:, :, 9:], key[:, :, 9:]) == 1).all()
        with pytest.raises(UnsupportedError, match="number of keys cannot be free") as raised:
            qkv.prepare(key[:, :, : allowed + 1], key, key, free=("kv_len",))
        assert f"{allowed + 1} of {np.dtype(dtype)}" in str(raised.value)


@pytest.mark.parametrize("name", ["attention", "another form of it"])
def test_gradients_of_tensors(name) -> None:
    def tensors(seed):
        return [torch.from_numpy(a).requires_grad_() for a in operands(seed=seed)]

    prepared = qkv.prepare(*tensors(0), qkv.Causal(), backward=name == "attention")
    for seed in range(4):
        given = tensors(seed)
        exact = [tensor.detach().double().requires_grad_() for tensor in given]
        right = torch.nn.functional.scaled_dot_product_attention(
            *exact, is_causal=True, enable_gqa=True
        )
        found = prepared(*given)
        grad = torch.from_numpy(normal(*right.shape, seed=7))
        gradients = torch.autograd.grad(found, given, grad)
        expected = torch.autograd.grad(right, exact, grad.double())
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)


def test_torch_sees_what_it_observes() -> None:
    given = list(map(torch.from_numpy, operands()))
    prepared = qkv.prepare(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prepared(*given).dtype is torch.bfloat16
    doubled = torch.func.vmap(lambda q: prepared(q, *given[1:]))(torch.stack([given[0]] * 2))
    torch.testing.assert_close(doubled[1], prepared(*given))


def test_sums_that_overflow_are_found() -> None:
    query, key, value = operands()
    prepared = qkv.prepare(query, key, value)
    value[:] = 3e38
    np.testing.assert_allclose(prepared(query, key, value), 3e38, rtol=1e-5)


@LIBRARIES
def test_another_machine_is_seen(arrays, monkeypatch) -> None:
    given = list(map(arrays, operands()))
    prepared = qkv.prepare(*given)
    before = np.asarray(prepared(*given))
    with monkeypatch.context() as changed:
        changed.setenv("QKV_ISA", "no such thing")
        with pytest.raises(QkvError, match="no such thing"):
            prepared(*given)
    np.testing.assert_array_equal(np.asarray(prepared(*given)), before)


@pytest.mark.parametrize(
    "variants", [(), (qkv.RoPE(),), (qkv.RoPE(), qkv.Sinks([0.5, -1.0, 0.0, 1.0]))]
)
@pytest.mark.parametrize("free", [(), ("kv_len",)])
@LIBRARIES
def test_operands_are_not_kept_alive(arrays, free, variants) -> None:
    given = [arrays(array) for array in operands(q_len=1 if free else 20)]
    options = {"free": free, "q_offset": "end"} if free else {}
    prepared = qkv.prepare(*given, *variants, **options)
    prepared(*given)
    gone = [weakref.ref(array) for array in given]
    del given
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    assert prepared.plan.backend == "cpu"


@pytest.mark.parametrize("given", [2.9, "7", True, "end", np.array([1, 2])])
def test_positions_that_are_no_number_are_refused(given) -> None:
    step = qkv.prepare(*operands(), qkv.Causal(), q_offset=2)
    with pytest.raises(ArgumentError, match="is not a whole number"):
        step(*operands(), q_offset=given)
    with pytest.raises(ArgumentError, match="reaches beyond"):
        step(*operands(), q_offset=2**70)
    with pytest.raises(ArgumentError, match="return_lse"):
        step(*operands(), return_lse="no")


def test_a_number_of_numpy_is_a_position_to_prepare_for() -> None:
    step = qkv.prepare(*operands(), qkv.Causal(), q_offset=np.int64(2))
    found = step(*operands(), q_offset=np.int32(3))
    np.testing.assert_array_equal(found, qkv.attention(*operands(), qkv.Causal(), q_offset=3))
    step = qkv.prepare(*operands(), qkv.Causal(), q_offset=np.array([2, 3]))
    with pytest.raises(ArgumentError, match="prepared with q_offset=an array"):
        step(*operands(), q_offset=3)
