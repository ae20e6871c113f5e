"""Slicing the lazy weights equals slicing the dense matrix, in NumPy's own terms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import qkv
from qkv.backends import reference
from qkv.inspection.weights import lazy_weights as lazy
from qkv.inspection.weights import weight_reductions
from qkv.testing.oracle import truth

RNG = np.random.default_rng(0)
SHAPES = {2: (5, 7), 3: (3, 5, 7), 4: (2, 3, 5, 7), 5: (2, 2, 3, 5, 7)}


def both(ndim: int) -> tuple[lazy.LazyWeights, np.ndarray]:
    *lead, q_len, kv_len = SHAPES[ndim]
    rng = np.random.default_rng(ndim)
    q = rng.normal(size=(*lead, q_len, 4))
    k = rng.normal(size=(*lead, kv_len, 4))
    dense = truth(*(a if lead else a[None] for a in (q, k, k)), [qkv.Causal()], q_offset=1)
    record = qkv.inspect(q, k, k, qkv.Causal(), q_offset=1)
    return record.weights, dense.weights if lead else dense.weights[0]


PAIRS = {ndim: both(ndim) for ndim in SHAPES}


@pytest.mark.parametrize("ndim", SHAPES)
def test_it_looks_like_an_array(ndim: int) -> None:
    weights, dense = PAIRS[ndim]
    assert weights.shape == dense.shape
    assert (weights.ndim, weights.size, len(weights)) == (dense.ndim, dense.size, len(dense))
    assert weights.dtype == np.float64
    assert weights.nbytes == dense.nbytes
    for whole in (weights[...], weights.numpy(), np.asarray(weights)):
        np.testing.assert_allclose(whole, dense, atol=1e-13)
    assert np.asarray(weights, np.float32).dtype == np.float32
    assert str(dense.shape) in repr(weights)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_basic_slicing(data: st.DataObject) -> None:
    weights, dense = PAIRS[data.draw(st.sampled_from(sorted(SHAPES)))]
    index = data.draw(hnp.basic_indices(dense.shape, allow_newaxis=True, allow_ellipsis=True))
    expected = dense[index]
    found = weights[index]
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, atol=1e-13)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_integer_arrays_on_any_axes(data: st.DataObject) -> None:
    weights, dense = PAIRS[data.draw(st.sampled_from(sorted(SHAPES)))]
    shape = data.draw(hnp.array_shapes(max_dims=2, max_side=4))
    index = []
    for size in dense.shape:
        kind = data.draw(st.sampled_from(["slice", "array", "int"]))
        if kind == "slice":
            index.append(data.draw(st.slices(size)))
        elif kind == "int":
            index.append(data.draw(st.integers(-size, size - 1)))
        else:
            index.append(
                data.draw(hnp.arrays(np.int64, shape, elements=st.integers(-size, size - 1)))
            )
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), ...)
    expected = dense[tuple(index)]
    found = weights[tuple(index)]
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, atol=1e-13)


@pytest.mark.parametrize("ndim", SHAPES)
def test_an_ellipsis_separates_arrays_even_if_it_stands_for_no_axis(ndim: int) -> None:
    """The axes of the arrays come first then, as in NumPy; the result was transposed."""
    weights, dense = PAIRS[ndim]
    rows, columns = np.array([4, 3]), np.array([4, 1])
    before = (slice(0, 2),) * (ndim - 2)
    for index in ((*before, rows, ..., columns), (*before, rows, ..., 1), (..., 0, columns)):
        np.testing.assert_allclose(weights[index], dense[index], atol=1e-13, strict=True)


def test_one_weight_beside_an_ellipsis_is_an_array_as_in_numpy() -> None:
    weights, dense = PAIRS[4]
    for index in ((..., 1, 0, 2, 3), (1, ..., 0, 2, 3), (1, 0, 2, 3, ...)):
        assert type(weights[index]) is type(dense[index]) is np.ndarray
        assert weights[index].shape == ()


def test_one_weight_is_a_number() -> None:
    weights, dense = PAIRS[2]
    assert type(weights[1, 2]) is type(dense[1, 2])


@pytest.mark.parametrize("ndim", SHAPES)
def test_boolean_arrays(ndim: int) -> None:
    weights, dense = PAIRS[ndim]
    rows, columns = RNG.random(5) < 0.5, RNG.random(7) < 0.5
    matrix, everything = RNG.random((5, 7)) < 0.4, RNG.random(dense.shape) < 0.3
    for index in [(..., columns), (..., rows, slice(None)), (..., rows, 2), (..., matrix)]:
        np.testing.assert_allclose(weights[index], dense[index], atol=1e-13)
    np.testing.assert_allclose(weights[everything], dense[everything], atol=1e-13)
    np.testing.assert_allclose(weights[dense > 0.5], dense[dense > 0.5], atol=1e-13)


@pytest.mark.parametrize(
    "index",
    [
        (0, 0, 0),
        (..., ..., 0),
        5,
        (0, 7),
        -6,
        1.5,
        "x",
        True,
        np.array(True),
        np.ones(4, bool),
        np.ones(0),
        ([0, 9],),
    ],
    ids=repr,
)
def test_wrong_indices_are_index_errors_as_in_numpy(index: object) -> None:
    weights, _ = PAIRS[2]
    with pytest.raises(IndexError):
        weights[index]


def test_the_whole_of_a_long_matrix_is_refused_with_its_size() -> None:
    x = np.zeros((100_000, 4), np.float32)
    record = qkv.inspect(x[:2], x, x)
    assert record.weights[0, :3].shape == (3,)
    long = lazy.LazyWeights(record.weights.replay, (100_000, 100_000))
    with pytest.raises(qkv.UnsupportedError, match=r"37\.3 GiB \(limit 2\.0 GiB\)"):
        long[...]
    with pytest.raises(qkv.UnsupportedError, match=r"37\.3 GiB"):
        np.asarray(long)


def test_single_pairs_of_a_long_matrix_need_no_rectangle(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 3000
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, 4))
    monkeypatch.setattr(lazy, "DENSE_LIMIT", 8 * n)
    diagonal = qkv.inspect(x, x, x).weights[np.arange(n), np.arange(n)]
    scores = np.exp(x @ x.T / 2)
    np.testing.assert_allclose(diagonal, np.diag(scores) / scores.sum(1), rtol=1e-10)
    assert reference.DENSE_LIMIT == 2 * 2**30


AXES = [None, -1, -2, 0, (-2, -1), (0, -1)]


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("ndim", SHAPES)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "argmax"])
def test_reductions_equal_those_of_the_dense_matrix(name, ndim, axis, monkeypatch) -> None:
    """Reductions go over tiles smaller than the matrix, and through NumPy's own functions."""
    if name == "argmax" and isinstance(axis, tuple):
        return
    monkeypatch.setattr(weight_reductions, "TILE", 20)
    weights, dense = PAIRS[ndim]
    expected = getattr(dense, name)(axis=axis)
    for found in (getattr(weights, name)(axis=axis), getattr(np, name)(weights, axis=axis)):
        assert np.shape(found) == expected.shape
        assert np.asarray(found).dtype == expected.dtype
        np.testing.assert_allclose(found, expected, atol=1e-13)
    kept = getattr(weights, name)(axis=axis, keepdims=True)
    assert kept.shape == getattr(dense, name)(axis=axis, keepdims=True).shape


def test_argmax_of_equal_weights_and_of_nan_is_numpy_s() -> None:
    x = np.zeros((9, 4), np.float32)
    weights = qkv.inspect(x, x, x, qkv.Causal()).weights
    assert (weights.argmax(-1) == 0).all()
    x[3] = np.nan
    weights = qkv.inspect(x, x, x).weights
    np.testing.assert_array_equal(weights.argmax(-1), weights[...].argmax(-1))
    np.testing.assert_array_equal(weights.max(-1), weights[...].max(-1))


@pytest.mark.parametrize("lengths", [(5, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("axis", [None, 0, -2, -1])
def test_argmax_of_no_weights_is_an_error_where_it_is_numpy_s(lengths, axis) -> None:
    q, k = (np.zeros((2, length, 4)) for length in lengths)
    weights = qkv.inspect(q, k, k).weights
    try:
        expected = weights[...].argmax(axis)
    except ValueError:
        with pytest.raises(qkv.ArgumentError, match="argmax of no weights"):
            weights.argmax(axis)
    else:
        np.testing.assert_array_equal(weights.argmax(axis), expected)


@pytest.mark.parametrize("lengths", [(5, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("axis", [None, 0, -2, -1, (0, -1), (-2, -1)])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_of_no_weights_are_an_error_where_they_are_numpy_s(name, lengths, axis) -> None:
    """Maxima of no weights were 0, minima infinite."""
    q, k = (np.zeros((2, length, 4)) for length in lengths)
    weights = qkv.inspect(q, k, k).weights
    try:
        expected = getattr(weights[...], name)(axis)
    except ValueError:
        with pytest.raises(qkv.ArgumentError, match=f"{name} of no weights"):
            getattr(weights, name)(axis)
    else:
        np.testing.assert_array_equal(getattr(weights, name)(axis), expected)


def test_reductions_of_weights_too_large_for_memory(monkeypatch) -> None:
    """Reductions need no more than their result, which is known, since the weights are uniform."""
    x = np.zeros((3000, 4), np.float32)
    weights = qkv.inspect(x, x, x).weights
    monkeypatch.setattr(lazy, "DENSE_LIMIT", 100_000)
    np.testing.assert_allclose(weights.sum(-1), np.ones(3000), rtol=1e-5)
    np.testing.assert_allclose(weights.sum(-2), np.ones(3000), rtol=1e-5)
    np.testing.assert_allclose(weights.max(-2), np.full(3000, 1 / 3000), rtol=1e-5)
    for refused in (lambda: weights > 0.5, lambda: weights + weights, lambda: np.exp(weights)):
        with pytest.raises(qkv.UnsupportedError, match=r"34\.3 MiB") as caught:
            refused()
        assert ".sum" in caught.value.action


OPERATIONS = [
    lambda w: w > 0.3, lambda w: w * 2, lambda w: 1 - w, lambda w: -w, lambda w: w == w,
    lambda w: w != 0, lambda w: w + w, lambda w: np.exp(w), lambda w: w @ np.ones((7, 2)),
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("ndim", SHAPES)
def test_operators_are_numpy_s(operation, ndim) -> None:
    weights, dense = PAIRS[ndim]
    np.testing.assert_allclose(operation(weights), operation(dense), atol=1e-13)


def test_whether_a_number_is_among_them_is_numpy_s() -> None:
    """Python compared row by row, and could not say whether a row is true."""
    weights, _ = PAIRS[3]
    assert weights[...][1, 2, 3] in weights
    assert 5.0 not in weights


def test_changing_them_in_place_says_that_they_are_computed() -> None:
    """NumPy was handed the weights to write to, and called them again without end."""
    weights, _ = PAIRS[2]
    changed, copy = weights, weights[...]
    with pytest.raises(qkv.ArgumentError, match="add was to change them in place"):
        changed += 1
    with pytest.raises(qkv.ArgumentError, match="multiply was to change"):
        np.multiply(weights, 2, out=weights)
    copy += weights
    np.testing.assert_allclose(copy, 2 * weights)


def test_an_axis_that_is_named_twice_is_an_error_as_in_numpy() -> None:
    weights, dense = PAIRS[3]
    for axis in ((0, 0), (0, -3)):
        for array in (weights, dense):
            with pytest.raises(ValueError, match=r"axis"):
                array.sum(axis=axis)


def test_what_it_lacks_of_an_array_says_what_to_do() -> None:
    weights, _ = PAIRS[4]
    with pytest.raises(AttributeError, match=r"weights\[\.\.\.\] is the whole .* KiB"):
        weights.std()
    with pytest.raises(AttributeError, match=r"has no attribute 'foo'$"):
        _ = weights.foo
    with pytest.raises(np.exceptions.AxisError):
        weights.sum(axis=4)
    with pytest.raises(qkv.ArgumentError, match="new array"):
        weights.sum(out=np.zeros(()))
