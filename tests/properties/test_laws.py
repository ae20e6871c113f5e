"""Laws of attention that hold whatever the numbers are."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qkv
from qkv.partial import Partial, finish, identity, merge
from qkv.testing import truth

# "auto" is the compiled backend wherever it accepts the problem.
BACKENDS = pytest.mark.parametrize(
    "backend", ["auto", "auto, masks read", "blocked", "reference"], indirect=True
)


@dataclass
class Drawn:
    """Random arrays and what else a law needs."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    rng: np.random.Generator
    tolerance: float

    @property
    def arrays(self):
        return self.query, self.key, self.value

    @property
    def score_shape(self):
        return (*self.query.shape[:-1], self.key.shape[-2])

    def mask(self, share=0.6):
        """A mask in which every row sees a key."""
        mask = self.rng.random(self.score_shape) < share
        mask[..., 0] |= ~mask.any(axis=-1)
        return mask


@st.composite
def drawn(draw, square=False, shortest=1):
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    q = draw(st.integers(shortest, 40))
    k = q if square else draw(st.integers(1, 40))
    dim, v_dim = draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 5, 16]))
    spread = draw(st.sampled_from([0.01, 1.0, 4.0]))

    def normal(*shape):
        return (spread * rng.normal(size=shape)).astype(dtype)

    return Drawn(
        normal(batch, heads, q, dim),
        normal(batch, kv_heads, k, dim),
        normal(batch, kv_heads, k, v_dim),
        rng,
        {np.float32: 2e-5, np.float64: 1e-12}[dtype] * max(spread, 1.0),
    )


def same(a, b, drawn):
    np.testing.assert_allclose(a, b, rtol=drawn.tolerance, atol=drawn.tolerance)


def bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def identity_value(d):
    """Values with which the output is the weights."""
    eye = np.eye(d.key.shape[-2], dtype=d.key.dtype)
    return np.broadcast_to(eye, (*d.key.shape[:-1], d.key.shape[-2]))


@pytest.mark.slow
@BACKENDS
@given(d=drawn(), shift=st.floats(-20, 20))
def test_adding_a_constant_to_all_scores_moves_lse_alone(backend, d, shift):
    # An array is an operand; a number would be compiled anew for each example.
    constant = np.array([shift])
    shifted = qkv.ScoreMod(lambda score, b, h, q, k: score + constant[0 * k])
    out, lse = qkv.attention(*d.arrays, backend=backend, return_lse=True)
    moved, moved_lse = qkv.attention(*d.arrays, shifted, backend=backend, return_lse=True)
    same(out, moved, d)
    same(lse + shift, moved_lse, d)


@pytest.mark.slow
@BACKENDS
@given(d=drawn())
@pytest.mark.one_in(2)
def test_the_order_of_keys_does_not_matter(backend, d):
    order = d.rng.permutation(d.key.shape[-2])
    mask, bias = d.mask(), d.rng.normal(size=d.score_shape)
    out = qkv.attention(*d.arrays, mask, bias, backend=backend)
    permuted = qkv.attention(
        d.query,
        d.key[..., order, :],
        d.value[..., order, :],
        mask[..., order],
        bias[..., order],
        backend=backend,
    )
    same(out, permuted, d)


@pytest.mark.slow
@BACKENDS
@given(d=drawn())
@pytest.mark.one_in(2)
def test_permuting_queries_permutes_rows(backend, d):
    order = d.rng.permutation(d.query.shape[-2])
    mask = d.mask()
    out = qkv.attention(*d.arrays, mask, backend=backend)
    permuted = qkv.attention(
        d.query[..., order, :], d.key, d.value, mask[..., order, :], backend=backend
    )
    same(out[..., order, :], permuted, d)


@pytest.mark.slow
@BACKENDS
@given(d=drawn())
def test_output_lies_between_the_smallest_and_largest_value(backend, d):
    out = qkv.attention(*d.arrays, qkv.Mask(d.mask()), backend=backend)
    group = out.shape[1] // d.value.shape[1]
    low = np.repeat(d.value.min(axis=-2, keepdims=True), group, axis=1)
    high = np.repeat(d.value.max(axis=-2, keepdims=True), group, axis=1)
    slack = 8 * np.finfo(out.dtype).eps * np.abs(d.value).max()
    assert (out >= low - slack).all()
    assert (out <= high + slack).all()


@BACKENDS
@given(d=drawn(), sink=st.floats(-3, 3))
def test_weights_of_a_row_add_up(backend, d, sink):
    """Weights add up to one; to one minus the sink's share; to zero when the row is empty."""
    mask = d.rng.random(d.score_shape) < 0.5
    empty = ~mask.any(axis=-1)
    plain = qkv.attention(d.query, d.key, identity_value(d), mask, backend=backend)
    same(plain.sum(axis=-1), np.where(empty, 0.0, 1.0), d)
    weights, lse = qkv.attention(
        d.query, d.key, identity_value(d), mask, qkv.Sinks(sink), backend=backend, return_lse=True
    )
    same(weights.sum(axis=-1), 1 - np.exp(sink - lse), d)
    same(lse[empty], np.full(empty.sum(), sink), d)
    dense = truth(*d.arrays, [qkv.Mask(mask), qkv.Sinks(sink)])
    same(dense.weights.sum(axis=-1), 1 - np.exp(sink - dense.lse), d)
    same(weights, dense.weights, d)


@BACKENDS
@given(d=drawn())
def test_a_constant_value_returns_itself(backend, d):
    value = np.full_like(d.value, 3.25)
    out = qkv.attention(d.query, d.key, value, qkv.Mask(d.mask()), backend=backend)
    np.testing.assert_allclose(out, 3.25, rtol=16 * np.finfo(out.dtype).eps)


@BACKENDS
@given(d=drawn(shortest=0), cut=st.floats(0, 1))
@pytest.mark.one_in(2)
def test_keys_split_anywhere_merge_into_the_whole(backend, d, cut):
    kv_len = d.key.shape[-2]
    at = round(cut * kv_len)
    mask = d.rng.random(d.score_shape) < 0.7
    whole = qkv.attention(*d.arrays, mask, backend=backend, return_lse=True)
    parts = [
        qkv.attention(
            d.query,
            d.key[..., rows, :],
            d.value[..., rows, :],
            mask[..., rows],
            backend=backend,
            return_lse=True,
        )
        for rows in (slice(0, at), slice(at, kv_len))
    ]
    joined = qkv.merge(*parts)
    same(joined[0], whole[0], d)
    same(joined[1], whole[1], d)


@st.composite
def partials(draw, count):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, dim = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    made = []
    for _ in range(count):
        lse = 30 * rng.normal(size=rows)
        empty = rng.random(rows) < 0.3
        lse[empty] = -np.inf
        out = rng.normal(size=(rows, dim))
        out[empty] = 0
        made.append(Partial(out, lse))
    return made


def close(a: Partial, b: Partial) -> None:
    np.testing.assert_allclose(a.lse, b.lse, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(a.out, b.out, rtol=1e-13, atol=1e-13)


@given(parts=partials(3))
def test_partials_are_a_commutative_monoid(parts):
    a, b, c = parts
    nothing = identity(a.out.shape, a.out.dtype)
    bits(merge([a, nothing]).out, a.out)
    bits(merge([nothing, a]).lse, a.lse)
    close(merge([a, b]), merge([b, a]))
    close(merge([merge([a, b]), c]), merge([a, merge([b, c])]))
    close(merge([a, b, c]), merge([merge([a, b]), c]))
    bits(merge([nothing, nothing]).out, nothing.out)


@given(parts=partials(2), sink=st.floats(-10, 10))
def test_a_sink_is_a_partial_with_nothing_in_it(parts, sink):
    a, _ = parts
    rows = Partial(a.out[None], a.lse[None])
    sinks = np.array([sink])
    alone = Partial(np.zeros_like(rows.out), np.full_like(rows.lse, sink))
    close(finish(rows, sinks), merge([rows, alone]))


@pytest.mark.slow
@BACKENDS
@given(d=drawn())
def test_a_window_without_bounds_is_none(backend, d):
    plain = qkv.attention(*d.arrays, backend=backend)
    bits(plain, qkv.attention(*d.arrays, qkv.SlidingWindow(None, None), backend=backend))
    wide = qkv.SlidingWindow(10**12, 10**12)
    bits(plain, qkv.attention(*d.arrays, wide, q_offset="start", backend=backend))


@BACKENDS
@given(d=drawn(square=True), cut=st.floats(0, 1))
def test_causal_rows_do_not_know_what_follows(backend, d, cut):
    n = round(cut * d.query.shape[-2])
    whole = qkv.attention(*d.arrays, qkv.Causal(), backend=backend)
    prefix = qkv.attention(*(a[..., :n, :] for a in d.arrays), qkv.Causal(), backend=backend)
    same(whole[..., :n, :], prefix, d)


@BACKENDS
@given(d=drawn())
def test_grouped_heads_are_repeated_heads(backend, d):
    group = d.query.shape[1] // d.key.shape[1]
    repeated = (np.repeat(a, group, axis=1) for a in (d.key, d.value))
    same(
        qkv.attention(*d.arrays, qkv.ALiBi(), q_offset=0, backend=backend),
        qkv.attention(d.query, *repeated, qkv.ALiBi(), q_offset=0, backend=backend),
        d,
    )


@pytest.mark.slow
@BACKENDS
@given(d=drawn(square=True))
@pytest.mark.one_in(2)
def test_layouts_differ_in_strides_alone(backend, d):
    swapped = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in d.arrays]
    mask = d.mask()
    out, lse = qkv.attention(*d.arrays, mask, qkv.Causal(), backend=backend, return_lse=True)
    other = qkv.attention(
        *swapped, mask, qkv.Causal(), layout="blhd", backend=backend, return_lse=True
    )
    bits(out, np.ascontiguousarray(other[0].swapaxes(1, 2)))
    bits(lse, other[1])


@BACKENDS
@given(d=drawn(), poison=st.sampled_from([np.nan, np.inf, -np.inf, 1e30, 0.0]))
def test_what_is_forbidden_changes_no_bit(backend, d, poison):
    hidden = d.rng.random(d.key.shape[-2]) < 0.5
    mask = d.mask() & ~hidden
    key, value = d.key.copy(), d.value.copy()
    key[..., hidden, :] = poison
    value[..., hidden, :] = poison
    before = qkv.attention(*d.arrays, mask, backend=backend, return_lse=True)
    after = qkv.attention(d.query, key, value, mask, backend=backend, return_lse=True)
    bits(before[0], after[0])
    bits(before[1], after[1])


@BACKENDS
@given(d=drawn(), where=st.floats(0, 1, exclude_max=True), in_key=st.booleans())
def test_nan_reaches_exactly_the_rows_that_see_it(backend, d, where, in_key):
    j = int(where * d.key.shape[-2])
    mask = d.rng.random(d.score_shape) < 0.5
    key, value = d.key.copy(), d.value.copy()
    (key if in_key else value)[..., j, :] = np.nan
    out = qkv.attention(d.query, key, value, mask, backend=backend)
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), mask[..., j])
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), mask[..., j])


@pytest.mark.slow
@BACKENDS
@given(d=drawn(), offsets=st.lists(st.integers(-50, 50), min_size=2, max_size=2))
@pytest.mark.one_in(2)
def test_an_array_of_offsets_is_one_call_for_each_row(backend, d, offsets):
    batch = d.query.shape[0]
    variants = (qkv.Causal(), qkv.ALiBi(0.25))
    together = qkv.attention(
        *d.arrays, *variants, q_offset=np.array(offsets[:batch]), backend=backend
    )
    for b in range(batch):
        alone = qkv.attention(
            *(a[b] for a in d.arrays), *variants, q_offset=offsets[b], backend=backend
        )
        bits(together[b], alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lengths", "blocks"])
@pytest.mark.parametrize("batch", [3, 70])
def test_a_row_of_a_batch_is_the_row_alone(kind, batch):
    """Both are the same bits, in a small batch, and in one whose arrays say which tiles to skip."""
    rng = np.random.default_rng(7)
    arrays = [rng.normal(size=(batch, 2, n, 32)).astype(np.float32) for n in (33, 120, 120)]
    lengths, blocks = rng.integers(0, 121, batch), rng.random((5, 8)) < 0.4

    def mask(rows):
        return (
            qkv.KeyLengths(lengths[rows]) if kind == "lengths" else qkv.BlockSparse(blocks, 8, 16)
        )

    together = qkv.attention(*arrays, mask(slice(None)))
    for b in range(0, batch, 2):
        row = slice(b, b + 1)
        bits(together[row], qkv.attention(*(a[row] for a in arrays), mask(row)))


@pytest.mark.slow
@BACKENDS
@given(d=drawn(square=True), shift=st.integers(-1000, 1000))
@pytest.mark.one_in(2)
def test_moving_queries_and_keys_together_changes_nothing(backend, d, shift):
    variants = (qkv.Causal(), qkv.SlidingWindow(5, 0), qkv.ALiBi(0.5))
    still = qkv.attention(*d.arrays, *variants, backend=backend)
    moved = qkv.attention(*d.arrays, *variants, q_offset=shift, kv_offset=shift, backend=backend)
    bits(still, moved)


@pytest.mark.slow
@BACKENDS
@given(d=drawn())
@pytest.mark.one_in(2)
def test_a_mask_and_a_bias_of_minus_infinity_are_the_same(backend, d):
    mask = d.rng.random(d.score_shape) < 0.5
    bias = np.where(mask, 0.0, -np.inf)
    masked = qkv.attention(*d.arrays, mask, backend=backend, return_lse=True)
    biased = qkv.attention(*d.arrays, bias, backend=backend, return_lse=True)
    same(masked[0], biased[0], d)
    same(masked[1], biased[1], d)


@BACKENDS
@given(d=drawn(), factor=st.sampled_from([0.25, 2.0, 8.0]))
def test_scale_moves_between_query_and_scale(backend, d, factor):
    """Both are exactly the same for powers of two."""
    factored = (d.query * d.query.dtype.type(factor), d.key, d.value)
    bits(
        qkv.attention(*factored, scale=0.5 / factor, backend=backend),
        qkv.attention(*d.arrays, scale=0.5, backend=backend),
    )


@pytest.mark.slow
@given(d=drawn())
def test_entropy_is_at_most_the_logarithm_of_the_keys_seen(d):
    mask = d.rng.random(d.score_shape) < 0.5
    record = qkv.inspect(*d.arrays, mask)
    seen = mask.sum(axis=-1)
    most = np.log(np.maximum(seen, 1))
    assert (record.entropy >= -d.tolerance).all()
    assert (record.entropy <= most + d.tolerance).all()
    assert (record.entropy[seen == 0] == 0).all()


def test_entropy_of_equal_scores_is_the_logarithm_of_their_number():
    key = np.zeros((11, 4), np.float32)
    record = qkv.inspect(np.ones((3, 4), np.float32), key, key)
    np.testing.assert_allclose(record.entropy, np.log(11), rtol=1e-6)
