"""Where queries stand among keys: each statement against a list of positions, and each clash."""

import numpy as np
import pytest

import qkv

N_HEADS, DIM = 2, 4


def seen(q_len, kv_len, *variants, batch=(), **keywords):
    """Which keys each query sees, through values that are the identity."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(*batch, N_HEADS, q_len, DIM))
    key = rng.normal(size=(*batch, N_HEADS, kv_len, DIM))
    value = np.broadcast_to(np.eye(kv_len), (*batch, N_HEADS, kv_len, kv_len))
    return qkv.attention(query, key, value, *variants, **keywords)[..., 0, :, :] > 0


def causal(q_pos, kv_pos):
    return np.asarray(kv_pos)[None, :] <= np.asarray(q_pos)[:, None]


SAID = [
    ("start", range(3)),
    ("end", range(2, 5)),
    (0, range(3)),
    (7, range(7, 10)),
    (-2, range(-2, 1)),
    (np.int32(1), range(1, 4)),
    (np.array(1), range(1, 4)),
]


@pytest.mark.parametrize(("q_offset", "q_pos"), SAID)
def test_q_offset(q_offset, q_pos) -> None:
    np.testing.assert_array_equal(
        seen(3, 5, qkv.Causal(), q_offset=q_offset), causal(q_pos, range(5))
    )


@pytest.mark.parametrize(("align", "q_pos"), [("start", range(3)), ("end", range(2, 5))])
def test_causal_align_holds_for_the_whole_problem(align, q_pos) -> None:
    window = qkv.SlidingWindow(1, 5)
    rows, keys = np.array(q_pos)[:, None], np.arange(5)[None, :]
    expected = causal(q_pos, range(5)) & (rows - keys <= 1)
    for variants in ((qkv.Causal(align=align), window), (window & qkv.Causal(align=align),)):
        np.testing.assert_array_equal(seen(3, 5, *variants), expected)


def test_more_queries_than_keys_at_the_end() -> None:
    """The first rows stand before all keys and see none."""
    got = seen(5, 3, qkv.Causal(align="end"))
    np.testing.assert_array_equal(got, causal(range(-2, 3), range(3)))
    assert not got[:2].any()


def test_offsets_of_each_batch_row() -> None:
    got = seen(3, 5, qkv.Causal(), batch=(2,), q_offset=np.array([-1, 4]), kv_offset=[2, 0])
    np.testing.assert_array_equal(got[0], causal(range(-1, 2), range(2, 7)))
    np.testing.assert_array_equal(got[1], causal(range(4, 7), range(5)))


def test_offsets_broadcast_over_leading_axes() -> None:
    got = seen(3, 5, qkv.Causal(), batch=(2, 3), q_offset=np.array([[0], [9]]))
    for b in range(3):
        np.testing.assert_array_equal(got[0, b], causal(range(3), range(5)))
        assert got[1, b].all()


@pytest.mark.slow
def test_end_counts_from_the_real_keys_of_each_row() -> None:
    lens = np.array([5, 3])
    for variants in ((qkv.KeyLengths(lens), qkv.Causal(align="end")),
                 (qkv.Causal(align="end"), qkv.KeyLengths(lens)),
                 (qkv.KeyLengths(lens) & qkv.Causal(align="end"),)):  # fmt: skip
        got = seen(2, 5, *variants, batch=(2,))
        np.testing.assert_array_equal(got[0], causal([3, 4], range(5)))
        np.testing.assert_array_equal(got[1], causal([1, 2], range(5)))
    got = seen(2, 5, qkv.KeyLengths(lens), qkv.Causal(), batch=(2,), q_offset="end")
    np.testing.assert_array_equal(got[1], causal([1, 2], range(5)))


def test_positions_restart_in_each_segment() -> None:
    ids = np.array([4, 4, 4, 9, 9])
    same = ids[:, None] == ids[None, :]
    place = np.array([0, 1, 2, 0, 1])
    got = seen(5, 5, qkv.Segments(ids), qkv.Causal())
    np.testing.assert_array_equal(got, same & causal(place, place))
    prefix = seen(5, 5, qkv.Segments(ids), qkv.Prefix(1))
    np.testing.assert_array_equal(prefix, same & (place < 1)[None, :])


@pytest.mark.parametrize(("requested", "q_pos"), [("start", [0, 1, 0, 1]), ("end", [1, 2, 0, 1])])
def test_start_and_end_hold_in_each_segment(requested, q_pos) -> None:
    """Two queries and three keys in the first, two and two in the second."""
    q_ids, kv_ids = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1, 1])
    same = q_ids[:, None] == kv_ids[None, :]
    expected = same & causal(q_pos, [0, 1, 2, 0, 1])
    segments = qkv.Segments(q_ids, kv_ids)
    np.testing.assert_array_equal(seen(4, 5, segments, qkv.Causal(), q_offset=requested), expected)
    np.testing.assert_array_equal(seen(4, 5, segments, qkv.Causal(align=requested)), expected)
    packed = qkv.Segments.from_cu_seqlens([0, 2, 4], [0, 3, 5])
    np.testing.assert_array_equal(seen(4, 5, packed, qkv.Causal(align=requested)), expected)


def test_segments_of_equal_lengths_need_no_statement_although_the_whole_is_unequal() -> None:
    """What counts is the lengths in a segment."""
    q_ids, kv_ids = np.array([0, 0, 1]), np.array([0, 0, 1, 7, 7])
    got = seen(3, 5, qkv.Segments(q_ids, kv_ids), qkv.Causal())
    same = q_ids[:, None] == kv_ids[None, :]
    np.testing.assert_array_equal(got, same & causal([0, 1, 0], [0, 1, 0, 0, 1]))


def test_arrays_of_the_caller_are_indexed_by_row() -> None:
    mask = np.random.default_rng(1).random((3, 5)) < 0.5
    for q_offset, kv_offset in ((0, 0), (100, -7), ("end", 3)):
        got = seen(3, 5, mask, q_offset=q_offset, kv_offset=kv_offset)
        np.testing.assert_array_equal(got, mask)


READERS = [
    qkv.Causal(),
    qkv.SlidingWindow(1, 1),
    qkv.Strided(2),
    qkv.ALiBi(),
    qkv.RelativeBias(np.zeros((8, N_HEADS))),
    qkv.RoPE(),
    qkv.GlobalTokens([0]),
    qkv.ScoreMod(lambda s, b, h, q, k: s - abs(q - k)),
    qkv.Causal() | qkv.Prefix(2),
    ~qkv.Causal(),
]


@pytest.mark.sampled("variant", READERS, one_in=3, ids=repr)
def test_unequal_lengths_without_an_offset_are_ambiguous(variant) -> None:
    with pytest.raises(qkv.AmbiguityError) as caught:
        seen(3, 5, variant)
    error = caught.value
    assert "q_len=3" in error.fact
    assert "kv_len=5" in error.fact
    assert [word for word, _ in error.seen] == ["start", "end"]
    assert 'q_offset="end"' in error.action
    seen(3, 5, variant, q_offset="end")
    seen(3, 5, variant, q_offset=0)
    seen(4, 4, variant)


@pytest.mark.parametrize(
    "variant",
    [
        qkv.Prefix(2),
        qkv.KeyLengths(3),
        qkv.Mask(np.ones((3, 5), bool)),
        qkv.Softcap(2.0),
        qkv.Sinks(0.0),
        qkv.ScoreMod(lambda s, b, h, q, k: s - 0.1 * k),
        qkv.BlockSparse(np.ones((1, 1), bool), 8, 8),
        qkv.Segments([0, 0, 1], [0, 0, 1, 1, 1]),
    ],
    ids=repr,
)
@pytest.mark.one_in(4)
def test_what_does_not_compare_positions_needs_no_statement(variant) -> None:
    seen(3, 5, variant)


def test_unequal_segments_without_an_offset_are_ambiguous() -> None:
    """Even where the whole arrays are of one length."""
    segments = qkv.Segments([0, 0, 1, 1], [0, 0, 0, 1])
    with pytest.raises(qkv.AmbiguityError, match="in a segment"):
        seen(4, 4, segments, qkv.Causal())
    seen(4, 4, segments)


def test_key_lengths_leave_the_question_open() -> None:
    with pytest.raises(qkv.AmbiguityError):
        seen(3, 5, qkv.KeyLengths(3), qkv.Causal())


@pytest.mark.parametrize(
    ("variants", "q_offset"),
    [
        ((qkv.Causal(align="start"),), "end"),
        ((qkv.Causal(align="end"),), "start"),
        ((qkv.Causal(align="end"),), 0),
        ((qkv.Causal(align="start"),), 1),
        ((qkv.Causal(align="start"), qkv.Causal(align="end")), None),
        ((qkv.Causal(align="end"), qkv.KeyLengths(4)), 2),
        ((qkv.Causal(align="end") | qkv.Prefix(1),), "start"),
    ],
)
def test_two_statements_that_differ_are_ambiguous(variants, q_offset) -> None:
    with pytest.raises(qkv.AmbiguityError, match="different positions") as caught:
        seen(3, 5, *variants, q_offset=q_offset)
    assert len(caught.value.seen) == 2


@pytest.mark.parametrize(
    ("variants", "q_offset"),
    [
        ((qkv.Causal(align="end"),), "end"),
        ((qkv.Causal(align="end"),), 2),
        ((qkv.Causal(align="start"),), 0),
        ((qkv.Causal(align="end"), qkv.Causal(align="end")), None),
        ((qkv.Causal(align="end"), qkv.KeyLengths(4)), 1),
    ],
)
@pytest.mark.one_in(3)
def test_saying_the_same_twice_is_not_ambiguous(variants, q_offset) -> None:
    np.testing.assert_array_equal(
        seen(3, 5, *variants, q_offset=q_offset),
        seen(3, 5, *variants),
    )


def test_equal_lengths_may_still_be_moved() -> None:
    np.testing.assert_array_equal(
        seen(4, 4, qkv.Causal(), q_offset=-1), causal(range(-1, 3), range(4))
    )


def test_a_score_mod_sees_positions_not_rows() -> None:
    mod = qkv.ScoreMod(lambda s, b, h, q, k: np.where(q == k, s, -np.inf))
    got = seen(3, 5, mod, q_offset=4, kv_offset=3)
    np.testing.assert_array_equal(got, np.arange(4, 7)[:, None] == np.arange(3, 8)[None, :])


@pytest.mark.parametrize("function", ["attention", "inspect", "explain", "plan"])
def test_every_function_reads_offsets_alike(function) -> None:
    x = np.eye(5)
    with pytest.raises(qkv.AmbiguityError):
        getattr(qkv, function)(x[:3], x, x, qkv.Causal())
    getattr(qkv, function)(x[:3], x, x, qkv.Causal(), q_offset="end", kv_offset=1)
