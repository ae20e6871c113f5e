"""|, & and ~ against the same on boolean matrices."""

import numpy as np
import pytest

import qkv

N = 24
ROWS, COLUMNS = np.indices((N, N))
ARRAY = np.random.default_rng(0).random((N, N)) < 0.5
X = np.random.default_rng(1).normal(size=(2, N, 8))

# Each mask, and what it means for positions that restart every `n` rows.
ATOMS = {
    "causal": (qkv.Causal(), lambda q, k: k <= q),
    "window": (qkv.SlidingWindow(3, 2), lambda q, k: (q - k <= 3) & (k - q <= 2)),
    "prefix": (qkv.Prefix(5), lambda q, k: k < 5),
    "global": (qkv.GlobalTokens([1, 7]), lambda q, k: np.isin(q, [1, 7]) | np.isin(k, [1, 7])),
    "strided": (qkv.Strided(4), lambda q, k: (q - k) % 4 == 0),
    "lengths": (qkv.KeyLengths(9), lambda q, k: COLUMNS < 9),
    "segments": (qkv.Segments(np.arange(N) // 6), lambda q, k: ROWS // 6 == COLUMNS // 6),
    "array": (qkv.Mask(ARRAY), lambda q, k: ARRAY),
    "blocks": (
        qkv.BlockSparse(ARRAY[:4, :3], 6, 8),
        lambda q, k: np.repeat(np.repeat(ARRAY[:4, :3], 6, axis=0), 8, axis=1),
    ),
}
PAIRS = [(a, b) for a in ATOMS for b in ATOMS if not a == b == "segments"]


def matrix(name, *others):
    """What the mask allows beside the others."""
    if "segments" in (name, *others):
        return ATOMS[name][1](ROWS % 6, COLUMNS % 6)
    return ATOMS[name][1](ROWS, COLUMNS)


def seen(*variants, backend="blocked"):
    """Which keys have any weight, through values that are the identity."""
    eye = np.broadcast_to(np.eye(N), (2, N, N))
    return qkv.attention(X, X, eye, *variants, backend=backend)[0] > 0


def check_one_mask(name, backend) -> None:
    variant, mask = ATOMS[name][0], matrix(name)
    np.testing.assert_array_equal(seen(variant, backend=backend), mask)
    np.testing.assert_array_equal(seen(~variant, backend=backend), ~mask)
    np.testing.assert_array_equal(seen(~~variant, backend=backend), mask)


def check_two_masks(first, second, backend) -> None:
    a, b = ATOMS[first][0], ATOMS[second][0]
    in_a, in_b = matrix(first, second), matrix(second, first)
    np.testing.assert_array_equal(seen(a & b, backend=backend), in_a & in_b)
    np.testing.assert_array_equal(seen(a | b, backend=backend), in_a | in_b)
    np.testing.assert_array_equal(seen(a, b, backend=backend), in_a & in_b)
    np.testing.assert_array_equal(seen(~(a | b), backend=backend), ~(in_a | in_b))
    np.testing.assert_array_equal(seen(~a & ~b, backend=backend), ~(in_a | in_b))


@pytest.mark.parametrize("name", ATOMS)
def test_a_mask_and_its_negation(name) -> None:
    check_one_mask(name, "blocked")


@pytest.mark.sampled("name", list(ATOMS), one_in=12)
def test_a_compiled_mask_and_its_negation(name) -> None:
    check_one_mask(name, "cpu")


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.one_in(4)
def test_two_masks(first, second) -> None:
    check_two_masks(first, second, "blocked")


@pytest.mark.slow
@pytest.mark.sampled(("first", "second"), PAIRS, one_in=120)
def test_two_compiled_masks(first, second) -> None:
    check_two_masks(first, second, "cpu")


def test_two_masks_that_restart_positions_are_refused() -> None:
    segments = ATOMS["segments"][0]
    with pytest.raises(qkv.AmbiguityError, match="restart positions"):
        seen(segments & segments)


@pytest.mark.parametrize("name", ATOMS)
def test_boolean_arrays_on_either_side(name) -> None:
    variant, mask = ATOMS[name][0], matrix(name)
    for joined in (variant | ARRAY, ARRAY | variant):
        np.testing.assert_array_equal(seen(joined), mask | ARRAY)
    for joined in (variant & ARRAY, ARRAY & variant):
        np.testing.assert_array_equal(seen(joined), mask & ARRAY)


@pytest.mark.parametrize("other", [1, "causal", None, [True]])
def test_other_things_do_not_combine(other) -> None:
    with pytest.raises(qkv.ArgumentError, match="cannot be combined"):
        qkv.Causal() | other


@pytest.mark.parametrize("score", [qkv.ALiBi(), qkv.Softcap(2.0), qkv.Bias(np.zeros((N, N)))])
def test_score_variants_do_not_combine(score) -> None:
    with pytest.raises(qkv.ArgumentError, match="only masks combine"):
        qkv.attention(X, X, X, qkv.Causal() & score)


def test_an_integer_array_does_not_combine() -> None:
    with pytest.raises(qkv.DTypeError):
        qkv.attention(X, X, X, qkv.Causal() & ARRAY.astype(int))


@pytest.mark.parametrize(
    "written",
    [
        lambda a, b: a and b,
        lambda a, b: a or b,
        lambda a, b: not a,
        lambda a, b: a if a else b,
        lambda a, b: (a | b) and ~b,
    ],
)
def test_words_of_python_do_not_drop_a_mask(written) -> None:
    """`a and b` would be b alone, without a word."""
    with pytest.raises(qkv.ArgumentError, match="neither true nor false") as caught:
        written(qkv.Causal(), qkv.Prefix(2))
    assert "Join masks with &, | and ~" in caught.value.action
