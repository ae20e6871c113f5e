"""Steps of decoding are prepared from the step before, and give what a first call gives."""

from itertools import product
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
from qkv.errors import AmbiguityError, ArgumentError, ShapeError, UnsupportedError
from watched import forget_prepared_calls

VARIANTS = {
    "nothing": ((), {}),
    "causal": ((qkv.Causal("end"),), {}),
    "at the end": ((qkv.Causal(),), {"q_offset": "end"}),
    "at the start": ((qkv.Causal(),), {"q_offset": "start"}),
    "window": ((qkv.SlidingWindow(40, 0),), {"q_offset": "end"}),
    "softcap, alibi": ((qkv.Softcap(5.0), qkv.ALiBi()), {"q_offset": "end", "scale": 0.3}),
    "cut off": ((qkv.Causal(),), {"q_offset": "end", "kv_offset": 7}),
}
ATOL = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-3, "bfloat16": 2e-2}


def normal(*shape, seed=0, dtype="float32"):
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


pytestmark = pytest.mark.usefixtures("no_prepared_calls")


def near(found, given, keywords, dtype="float32") -> None:
    expected = qkv.attention(*given, return_lse=True, backend="reference", **keywords)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            one.astype("float64"), other.astype("float64"), atol=ATOL[dtype], rtol=ATOL[dtype]
        )


def may_have_any_number_of_keys(*given, **keywords) -> bool:
    try:
        qkv.prepare(*given, free=("kv_len",), **keywords)
    except UnsupportedError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.sampled(
    ("name", "q_len", "kind"),
    list(
        product(VARIANTS, [1, 5, 16], [*((dtype, "bhld") for dtype in ATOL), ("float32", "blhd")])
    ),
    one_in=15,
)
def test_a_cache_that_grows(watched, name, q_len, kind) -> None:
    """The cache is a buffer, whose strides stay, or made anew each time; what it holds changes."""
    dtype, layout = kind
    variants, keywords = VARIANTS[name]
    for batch, heads, kv_heads in (((2,), 4, 2), ((2, 1), 3, 3)):
        cache = [normal(*batch, kv_heads, 1200, 24, seed=i, dtype=dtype) for i in range(2)]
        for step, length in enumerate((17, 18, 19, 19, 530, 531, 1100, 20, 3)):
            query = normal(*batch, heads, q_len, 24, seed=step, dtype=dtype)
            rows = [c[..., :length, :] for c in cache]
            for key, value in (rows, [np.ascontiguousarray(r) for r in rows]):
                arrays = query, key, value
                if layout == "blhd":
                    arrays = [array.swapaxes(-3, -2) for array in arrays]
                given, asked = (*arrays, *variants), {**keywords, "layout": layout}
                found = qkv.attention(*given, return_lse=True, **asked)
                near(found, given, asked, dtype)
                assert found[0].flags.c_contiguous
                alone = qkv.attention(*given, **asked)
                assert alone.tobytes() == found[0].tobytes()
            cache[0][..., step, :] = 0
    # How many queries a decoding step may have depends on the processor's vectors.
    prepared = watched.prepared("forward", any_length=True)
    is_step = may_have_any_number_of_keys(*arrays, *variants, **asked)
    assert is_step or q_len > 1
    assert prepared == (2 if is_step else 0)


ROTATED = {
    "rotated": (qkv.RoPE(),),
    "interleaved, in part": (qkv.RoPE(layout="interleaved", rotary_dim=18),),
    "sinks": (qkv.Sinks(np.array([0.5, -1.0, 2.0, 0.0])),),
    "both": (qkv.RoPE(), qkv.Sinks(np.array([0.5, -1.0, 2.0, 0.0]))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", [qkv.Causal(), qkv.SlidingWindow(40, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("name", ROTATED)
def test_rows_are_rotated_and_sinks_take_their_share_in_each_step(name, mask, dtype) -> None:
    """Whether their positions are given, or follow from their number, and where keys lie."""
    variants = *ROTATED[name], mask
    cache = [normal(2, 2, 700, 24, seed=i, dtype=dtype) for i in range(2)]
    for step, length in enumerate((17, 18, 19, 19, 20, 530, 531, 3, 21)):
        query = normal(2, 4, 2, 24, seed=step, dtype=dtype)
        rows = [c[..., :length, :] for c in cache]
        for key, value in (rows, [np.ascontiguousarray(r) for r in rows]):
            given = query, key, value, *variants
            for q_offset in ("end", "start", 5):
                found = qkv.attention(*given, return_lse=True, q_offset=q_offset)
                near(found, given, {"q_offset": q_offset}, dtype)
                alone = qkv.attention(*given, q_offset=q_offset)
                assert alone.tobytes() == found[0].tobytes()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_gives_what_a_first_call_gives(watched, name) -> None:
    variants, keywords = VARIANTS[name]
    cache = normal(2, 2, 700, 64)
    query = normal(2, 8, 1, 64, seed=1)
    lengths = (300, 301, 640, 642, 17)

    def step(length):
        rows = cache[:, :, :length]
        return qkv.attention(query, rows, rows, *variants, return_lse=True, **keywords)

    found = [step(length) for length in lengths]
    assert watched.prepared("forward", any_length=True) == 1
    assert watched.computed == 2
    for length, results in zip(lengths, found, strict=True):
        forget_prepared_calls()
        for one, other in zip(results, step(length), strict=True):
            assert one.tobytes() == other.tobytes()
    assert watched.computed == 2 + len(lengths)


def test_offsets_that_grow(watched) -> None:
    """A model says where its query is, whether all keys are there or a window of them."""
    cache = normal(1, 2, 200, 16)
    query = normal(1, 2, 1, 16, seed=1)
    for place in (99, 100, 101, 5, 101, 190, 0, 2**31 - 1, -3):
        for window in (qkv.SlidingWindow(20, 0), qkv.Causal()):
            for length in (place + 1, 50):
                if not 1 < length <= 200:
                    continue
                given = query, cache[:, :, :length], cache[:, :, :length], window
                for keywords in (
                    {"q_offset": place, "kv_offset": 0}, {"q_offset": place, "kv_offset": -9},
                ):  # fmt: skip
                    near(qkv.attention(*given, return_lse=True, **keywords), given, keywords)
    # Each is prepared again after the place beyond those that steps are prepared for.
    assert watched.prepared("forward", any_length=True) == 8
    for place in (2**31, -(2**31), 10**30):
        with pytest.raises(ArgumentError):
            qkv.attention(*given, q_offset=place)


def test_keys_of_each_batch_row_stand_somewhere_else() -> None:
    """The third step once rotated the keys of all batch rows from where the first stood."""
    cache = normal(3, 2, 20, 16)
    for length in range(12, 20):
        query = normal(3, 2, 2, 16, seed=length)
        given = query, cache[:, :, :length], cache[:, :, :length], qkv.RoPE()
        keywords = {"q_offset": "end", "kv_offset": np.array([0, 5, -3])}
        near(qkv.attention(*given, return_lse=True, **keywords), given, keywords)


def test_what_is_no_step_like_the_last_is_seen(watched) -> None:
    cache = normal(1, 2, 40, 16)
    query = normal(1, 4, 2, 16)
    key = cache[:, :, :30]
    for variants in ((), (qkv.Causal("end"),)):
        for length in (30, 31, 32):
            qkv.attention(query, cache[:, :, :length], cache[:, :, :length], *variants)
        with pytest.raises(ShapeError):
            qkv.attention(query, key, cache[:, :, :29], *variants)
        with pytest.raises(ShapeError):
            qkv.attention(query, cache[:, :1], cache, *variants)
        with pytest.raises(qkv.errors.DTypeError):
            qkv.attention(query, key, key.astype("float64"), *variants)
        assert not qkv.attention(query, key[:, :, :0], key[:, :, :0], *variants).any()
    assert watched.prepared("forward", any_length=True) == 2
    for length in (2, 2, 2, 30, 31, 2, 33):
        row = cache[:, :, :length]
        if length == 2:
            near(qkv.attention(query, row, row, qkv.Causal(), return_lse=True),
                 (query, row, row, qkv.Causal()), {})  # fmt: skip
        else:
            with pytest.raises(AmbiguityError):
                qkv.attention(query, row, row, qkv.Causal())
        with pytest.raises(AmbiguityError):
            qkv.attention(query, row, row, qkv.Causal("end"), q_offset=7)
    for lens in (20, 21, 19, 30):
        given = query, key, key, qkv.KeyLengths(lens)
        near(qkv.attention(*given, return_lse=True), given, {})


def test_few_queries_with_masks_that_change(watched) -> None:
    random = np.random.default_rng(0)
    query, key = normal(2, 4, 3, 16), normal(2, 2, 50, 16, seed=1)
    for _ in range(5):
        mask = random.random((2, 1, 3, 50)) < 0.5
        mask[0, :, 1] = False
        bias = np.where(mask, random.normal(size=(2, 1, 3, 50)), -np.inf).astype("float32")
        for variant in (qkv.Mask(mask), qkv.Bias(bias), qkv.Mask(mask[:1]), mask[:, :, :1]):
            given = query, key, key, variant
            near(qkv.attention(*given, return_lse=True), given, {})
    assert watched.prepared("forward") == 4


def test_a_machine_that_changes_is_seen(monkeypatch) -> None:
    cache = normal(1, 2, 40, 16)
    query = normal(1, 2, 1, 16)

    def step(length):
        given = query, cache[:, :, :length], cache[:, :, :length]
        return qkv.attention(*given, return_lse=True), given

    for length in (30, 31, 32):
        step(length)
    monkeypatch.setenv("QKV_ISA", "no such thing")
    for length in (32, 33):
        with pytest.raises(ArgumentError, match="no such thing"):
            step(length)
    monkeypatch.delenv("QKV_ISA")
    for length in (32, 33, 34):
        near(*step(length), {})


def test_slopes_are_compared(watched) -> None:
    """Slopes in the same array may change between steps."""
    cache = normal(1, 2, 60, 16)
    query = normal(1, 2, 1, 16)
    held = np.zeros(2)
    for length, slopes in ((40, 0.1), (41, 0.1), (42, 0.1), (43, 0.5), (44, 0.5), (45, 0.1)):
        held[:] = slopes, 2 * slopes
        given = query, cache[:, :, :length], cache[:, :, :length], qkv.ALiBi(held)
        found = qkv.attention(*given, q_offset="end", return_lse=True)
        near(found, given, {"q_offset": "end"})
    assert watched.prepared("forward", any_length=True) == 2


VARIANTS_OF_RAGGED_STEPS = {
    "alone": lambda: (),
    "causal": lambda: (qkv.Causal(),),
    "window": lambda: (qkv.SlidingWindow(9, 0),),
    "alibi, sinks": lambda: (qkv.ALiBi(), qkv.Sinks(0.3)),
    "rotated": lambda: (qkv.RoPE(),),
    "masked": lambda: (np.random.default_rng(3).random((2, 1, 1, 60)) < 0.9,),
}


@pytest.mark.slow
@pytest.mark.sampled(
    ("name", "q_offset", "batch"),
    list(product(VARIANTS_OF_RAGGED_STEPS, ["end", "start", 31], [1, 2])),
    one_in=6,
)
def test_key_lengths_of_each_step(watched, name, q_offset, batch) -> None:
    """Sequences of different lengths in one cache: the lengths are read anew in every step."""
    query, cache = normal(batch, 4, 1, 16), normal(batch, 2, 60, 16, seed=1)
    for step in range(5):
        lens = np.array([40, 31])[:batch] + step
        variants = [
            v[:batch] if type(v) is np.ndarray else v for v in VARIANTS_OF_RAGGED_STEPS[name]()
        ]
        given = query, cache, cache, qkv.KeyLengths(lens), *variants
        near(
            qkv.attention(*given, q_offset=q_offset, return_lse=True),
            given,
            {"q_offset": q_offset},
        )
    expected = 0 if name == "rotated" and batch == 2 and q_offset == "end" else 1
    assert watched.prepared("forward", any_length=True) == expected
    with pytest.raises(ShapeError, match="61"):
        qkv.attention(query, cache, cache, qkv.KeyLengths(lens * 0 + 61), q_offset=q_offset)


def test_a_length_that_is_a_number_stays() -> None:
    """The length is part of the structure: queries stand at its end, however many keys come."""
    query, cache = normal(1, 2, 1, 16), normal(1, 2, 60, 16, seed=1)
    for kv_len in (30, 31, 32, 40):
        given = (
            query,
            cache[:, :, :kv_len],
            cache[:, :, :kv_len],
            qkv.KeyLengths(30),
            qkv.ALiBi(),
        )
        near(
            qkv.attention(*given, q_offset="end", return_lse=True),
            given,
            {"q_offset": "end"},
        )


def _sorted_ids(draw, *shape):
    return np.sort(draw.integers(0, 3, shape), axis=-1)


PER_STEP = {
    "segments": lambda draw, n: qkv.Segments(np.array([1]), _sorted_ids(draw, n)),
    "segments of each row": lambda draw, n: qkv.Segments(
        np.array([[0], [2]]), _sorted_ids(draw, 2, n).astype(np.int32)
    ),
    "blocks": lambda draw, n: qkv.BlockSparse(draw.random((4, 1, -(-n // 8))) < 0.6, 4, 8),
    "both": lambda draw, n: (
        qkv.Segments(np.array([1]), _sorted_ids(draw, n))
        & qkv.BlockSparse(draw.random((1, -(-n // 5))) < 0.6, 4, 5)
    ),
}


@pytest.mark.parametrize("name", PER_STEP)
@pytest.mark.one_in(2)
def test_arrays_that_each_step_has_its_own_of(watched, name) -> None:
    """Segment ids and block masks have other values in each step, also at a length seen before."""
    draw = np.random.default_rng(0)
    for n in (17, 18, 18, 23, 24, 25, 640, 3, 1100):
        query, cache = normal(2, 4, 1, 24, seed=n), normal(2, 2, n, 24, seed=n + 1)
        given = query, cache, cache, PER_STEP[name](draw, n)
        near(qkv.attention(*given, return_lse=True, q_offset="end"), given, {"q_offset": "end"})
    assert watched.prepared("forward", any_length=True) == 1
    assert watched.prepared("forward", any_length=False) == 0


@pytest.mark.parametrize("arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("causal", [False, True])
def test_steps_whose_blocks_are_drawn_from_as_many_share_what_is_prepared(
    watched, arrays, causal
) -> None:
    """Blocks are drawn anew where a block of keys is added."""
    blocks = qkv.SlidingWindow(2, 0) | qkv.RandomBlocks(4, 2, 5, causal)
    for n in (17, 18, 19, 20, 21, 22, 23, 18, 24, 20, 21):
        query, cache = normal(2, 4, 1, 24, seed=n), normal(2, 2, n, 24, seed=n + 1)
        given = query, cache, cache, blocks
        found = qkv.attention(*map(arrays, given[:3]), blocks, return_lse=True, q_offset="end")
        near(tuple(map(np.asarray, found)), given, {"q_offset": "end"})
    assert watched.prepared("forward", any_length=True) == 2  # Of 5 blocks, and of 6.
    assert watched.prepared("forward", any_length=False) == 0


def test_steps_of_a_length_that_was_given_are_all_alike(watched) -> None:
    blocks = qkv.RandomBlocks(4, 2, 5, causal=True, length=48)
    for n in (17, 18, 24, 25, 40, 18):
        query, cache = normal(2, 4, 1, 24, seed=n), normal(2, 2, n, 24, seed=n + 1)
        given = query, cache, cache, blocks
        near(qkv.attention(*given, return_lse=True, q_offset="end"), given, {"q_offset": "end"})
    assert watched.prepared("forward", any_length=True) == 1


class ReadsOn(qkv.Variant):
    """Reads an array five entries behind the key."""

    roles: ClassVar = {"values": "in_place"}
    positions_only = True

    def __init__(self, values):
        self.values = values

    def lower(self, builder):
        builder.mod(builder.score + builder.table(self.values)[builder.kv_index + 5])

    def naive(self, dense):
        raise NotImplementedError

    @classmethod
    def examples(cls, shape, rng):
        return ()


def test_no_step_reads_behind_an_array() -> None:
    """A step that is prepared for any number of keys must not read an array of one length."""
    variant = ReadsOn(np.zeros(30, np.float32))
    query = normal(1, 2, 1, 16)
    for n in (10, 11, 12, 25):
        given = query, normal(1, 2, n, 16, seed=n), normal(1, 2, n, 16, seed=n), variant
        near(qkv.attention(*given, return_lse=True, q_offset="end"), given, {"q_offset": "end"})
    longer = normal(1, 2, 26, 16)
    with pytest.raises(ShapeError, match="may reach 5 to 30; it has 30 entries"):
        qkv.attention(query, longer, longer, variant, q_offset="end")
