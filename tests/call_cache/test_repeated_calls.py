"""Calls like an earlier one skip the checks: what they give must not change."""

import gc
import weakref
from itertools import product

import numpy as np
import pytest

import qkv
from qkv.call.repeated.cache import CALLS
from qkv.errors import ArgumentError, QkvError, ShapeError
from watched import forget_prepared_calls


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


pytestmark = pytest.mark.usefixtures("no_prepared_calls")


def dense(query, key, value, allowed=None):
    """The definition in float64, one head after the other."""
    query, key, value = (a.astype(np.float64) for a in (query, key, value))
    key, value = (np.repeat(a, query.shape[-3] // a.shape[-3], axis=-3) for a in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_remembered_call_reads_its_own_arrays(watched, dtype) -> None:
    for seed in range(6):
        arrays = [normal(2, heads, 21, 9, seed=seed, dtype=dtype) for heads in (4, 2, 2)]
        found, lse = qkv.attention(*arrays, qkv.Causal(), return_lse=True, backend="cpu")
        again = qkv.attention(*arrays, qkv.Causal(), backend="cpu")
        expected = dense(*arrays, np.tri(21, dtype=bool))
        np.testing.assert_allclose(found, expected, atol=2e-3 if dtype == np.float16 else 2e-6)
        assert again.tobytes() == found.tobytes()
        assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert watched.prepared("forward", any_length=False) == 1


def test_what_is_different_is_not_alike() -> None:
    query = normal(1, 2, 8, 4)
    _alike(query)
    key = normal(1, 2, 9, 4)
    for seed in range(3):
        _alike(query + seed)
    assert qkv.attention(query, key, key, qkv.Causal("end")).shape == query.shape
    with pytest.raises(ArgumentError):
        qkv.attention(query, query, query, q_offset=0.0)
    with pytest.raises(ArgumentError):
        qkv.attention(query, query, query, kv_offset=False + 0.0)
    with pytest.raises(TypeError):
        qkv.attention(query, query, query, unknown=1)
    for scale in (0.1, 0.9):
        np.testing.assert_allclose(
            qkv.attention(query, query, query, scale=scale),
            dense(query * np.float32(scale * 2), query, query),
            atol=1e-6,
        )


def _alike(query) -> None:
    np.testing.assert_allclose(
        qkv.attention(query, query, query), dense(query, query, query), atol=1e-6
    )


def test_arrays_in_variants_are_read_each_time(watched) -> None:
    query = normal(1, 2, 16, 4)
    mask = np.tri(16, dtype=bool)
    for allowed in (mask, np.ones((16, 16), bool), mask):
        np.testing.assert_allclose(
            qkv.attention(query, query, query, qkv.Mask(allowed)),
            dense(query, query, query, allowed),
            atol=1e-6,
        )
    mask[:] = True
    for _ in range(3):
        found = qkv.attention(query, query, query, mask)
        np.testing.assert_allclose(found, dense(query, query, query), atol=1e-6)
        mask = mask.copy()
    assert watched.prepared("forward", any_length=False) == 2  # a Mask and a bare array


def _views(full):
    """Arrays of one shape that broadcast to the scores, by how they lie in memory."""
    copies = {
        "whole": full,
        "one head": full[..., :1, :, :],
        "one row": full[..., :1, :],
        "no batch": full[(0,) * (full.ndim - 3)],
        "backwards": full[..., ::-1, ::-1],
        "expanded": np.broadcast_to(full[..., :1, :, :1], full.shape),
        "columns": full.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    }
    return copies.items()


@pytest.mark.slow
@pytest.mark.sampled(
    ("kind", "batch", "length"),
    list(product([qkv.Mask, qkv.Bias], [(), (2,), (2, 3)], [16, 40])),
    one_in=12,
)
def test_masks_and_biases_may_have_other_values(watched, kind, batch, length) -> None:
    """Empty rows among them, and NaN behind what is masked everywhere."""
    random = np.random.default_rng(3)
    query, key, value = (normal(*batch, 4, length, 24, seed=i) for i in range(3))
    value[..., [0, -1], :] = np.nan
    shape = *batch, 4, length, length
    for name, _ in _views(np.zeros(shape)):
        for density in (0.7, 0.0, 1.0, 0.3):
            allowed = random.random(shape) < density
            allowed[..., [0, -1]] = False
            added = np.where(allowed, random.normal(size=shape), -np.inf)
            array = dict(_views(allowed if kind is qkv.Mask else added.astype(np.float32)))[name]
            given = query, key, value, kind(array)
            found = qkv.attention(*given, return_lse=True)
            expected = qkv.attention(*given, return_lse=True, backend="reference")
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=2e-6)
            assert np.isfinite(found[0]).all()
    assert watched.prepared("forward", any_length=False) == (
        len(dict(_views(allowed))) if batch else 6
    )


def test_the_first_call_and_a_recalled_one_agree_in_every_bit(watched) -> None:
    query = normal(2, 4, 100, 16)
    random = np.random.default_rng(1)
    for n, density in enumerate((0.0, 0.01, 0.5, 1.0), start=1):
        forget_prepared_calls()
        mask = random.random((2, 1, 100, 100)) < density
        mask[:, :, :, 40:70] = False
        mask[0, :, 64:] = True
        bias = np.where(mask, normal(2, 1, 100, 100), -np.inf)
        given = qkv.Causal(), qkv.Mask(mask), qkv.Bias(bias)
        first, *others = (
            qkv.attention(query, query, query, *given, return_lse=True) for _ in range(4)
        )
        assert watched.prepared("forward", any_length=False) == n
        for other in others:
            for one, another in zip(first, other, strict=True):
                assert one.tobytes() == another.tobytes()


def test_both_layouts_give_the_same(watched) -> None:
    query, key = normal(2, 20, 4, 8), normal(2, 30, 2, 8, seed=1)
    mask = np.random.default_rng(0).random((2, 1, 20, 30)) < 0.5
    for variant in (qkv.Mask(mask), qkv.Causal("end")):
        for query_now in (query, -query, query, -query):
            given = query_now, key, key
            heads_first = [array.swapaxes(1, 2) for array in given]
            found = qkv.attention(*given, variant, layout="blhd", return_lse=True)
            other = qkv.attention(*heads_first, variant, return_lse=True)
            expected = qkv.attention(*heads_first, variant, return_lse=True, backend="reference")
            assert found[0].tobytes() == other[0].swapaxes(1, 2).tobytes()
            assert found[0].flags.c_contiguous
            assert found[1].tobytes() == other[1].tobytes()
            for one, exact in zip(other, expected, strict=True):
                np.testing.assert_allclose(one, exact, atol=2e-6)
    assert watched.prepared("forward", any_length=False) == 4
    flat = normal(20, 8)
    for _ in range(3):
        np.testing.assert_allclose(
            qkv.attention(flat, flat, flat, layout="blhd"), dense(*[flat[None]] * 3)[0], atol=1e-6
        )


def test_large_masks_are_read_for_what_they_spare(watched) -> None:
    query = normal(1, 8, 512, 64)
    mask = np.tri(512, dtype=bool)
    for _ in range(3):
        qkv.attention(query, query, query, qkv.Mask(mask))
    assert not watched.prepared("forward", any_length=False)


def test_prepared_calls_keep_no_array_alive(watched) -> None:
    query, mask = normal(1, 2, 16, 4), np.tri(16, dtype=bool)
    gone = []
    for _ in range(3):
        own = mask.copy()
        gone.append(weakref.ref(own))
        qkv.attention(query, query, query, qkv.Mask(own))
    del own
    gc.collect()
    assert watched.prepared("forward", any_length=False)
    assert [reference() for reference in gone] == [None] * 3


@pytest.mark.parametrize(
    ("variant", "source"),
    [
        (qkv.ScoreMod, "lambda score, b, h, i, j: score - rate * abs(i - j)"),
        (qkv.Mask, "lambda b, h, i, j: i - j < 40 * rate"),
    ],
)
def test_prepared_calls_keep_nothing_alive_that_their_function_does_not_read(
    variant, source, watched
) -> None:
    class Model:
        pass

    query, scope = normal(1, 2, 16, 4), {"rate": 0.1, "model": Model()}
    for _ in range(3):
        given = variant(eval(source, scope))
        qkv.attention(query, query, query, given)
        qkv.vjp(query, query, query, given)[1](query)
    gone = weakref.ref(scope.pop("model"))
    gc.collect()
    assert watched.prepared("forward", any_length=False)
    assert gone() is None


def test_functions_that_look_globals_up_by_name_find_them() -> None:
    query = normal(1, 2, 16, 4)
    scope = {"rate": 0.5}
    found = [
        qkv.attention(query, query, query, qkv.ScoreMod(eval(source, scope)))
        for source in (
            "lambda score, b, h, i, j: score - rate * abs(i - j)",
            "lambda score, b, h, i, j: score - globals()['rate'] * abs(i - j)",
            "lambda score, b, h, i, j: score - eval('rate') * abs(i - j)",
        )
    ]
    np.testing.assert_allclose(found[1:], found[:1] * 2, atol=1e-6)


def test_an_array_for_two_variants_and_then_two_arrays(watched) -> None:
    query = normal(2, 2, 16, 4)
    random = np.random.default_rng(0)
    masks = [random.random((16, 16)) < 0.7 for _ in range(4)]
    for one, other in ((0, 0), (1, 1), (0, 0), (0, 1), (1, 0), (2, 3)):
        given = query, query, query, qkv.Mask(masks[one]), qkv.Mask(masks[other])
        found = qkv.attention(*given)
        expected = qkv.attention(*given, backend="reference")
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert watched.prepared("forward", any_length=False) == 1


FEW_NUMBERS = {
    "KeyLengths": (qkv.KeyLengths, [[3, 16], [16, 1], [0, 5]]),
    "KeyLengths, Causal": (qkv.KeyLengths, [[3, 16], [16, 1], [0, 5]]),
    "one length": (lambda n: qkv.KeyLengths(int(n)), [3, 16, 0]),
    "Prefix": (qkv.Prefix, [[0, 5], [16, 2], [7, 7]]),
    "Segments": (qkv.Segments, [[0] * 16, [0] * 9 + [1] * 7, [3] * 2 + [-1] * 14]),
    "GlobalTokens": (qkv.GlobalTokens, [[0, 3], [2, 5], [15, 1]]),
    "ALiBi": (qkv.ALiBi, [[0.1, 0.2], [0.0, 0.0], [0.2, 0.1]]),
}


@pytest.mark.sampled(
    ("name", "q_len"),
    [
        (name, q_len)
        for name in FEW_NUMBERS
        for q_len in (2, 16)
        if (name, q_len) != ("Segments", 2)
    ],
    one_in=4,
)
def test_few_numbers_are_compared(watched, name, q_len) -> None:
    """Numbers in the same array may change, even while a call is remembered."""
    kind, numbers = FEW_NUMBERS[name]
    key = normal(2, 2, 16, 4)
    query = key[:, :, :q_len]
    held = np.array(numbers[0])
    offset = None if name in ("KeyLengths", "one length", "Segments") else "end"
    also = (qkv.Causal(),) if name == "KeyLengths, Causal" else ()
    for n in (0, 0, 0, 1, 0, 1, 1, 2, 0, 2, 2):
        held[...] = numbers[n]
        given = query, key, key, kind(held), *also
        for _ in range(2):
            found = qkv.attention(*given, q_offset=offset, return_lse=True)
        held[...] = numbers[2]
        again = kind(np.array(numbers[n]))
        given = query, key, key, again, *also
        alike = qkv.attention(*given, q_offset=offset, return_lse=True)
        expected = qkv.attention(*given, q_offset=offset, return_lse=True, backend="reference")
        for one, other, exact in zip(found, alike, expected, strict=True):
            np.testing.assert_allclose(one, exact, atol=1e-6)
            np.testing.assert_allclose(other, exact, atol=1e-6)
    # Few queries read the lengths anew, and are prepared for once.
    read_anew = "KeyLengths" in name and q_len == 2
    assert watched.prepared("forward") == (1 if read_anew else 3)
    if "Lengths" in name:
        held[...] = 17
        for _ in range(3):
            with pytest.raises(ShapeError):
                qkv.attention(query, key, key, kind(held), *also, q_offset=offset)


def test_many_numbers_are_read_each_time(watched) -> None:
    query = normal(1, 1, 600, 4)
    ids = np.zeros(600, int)
    for n in range(4):
        ids[: 100 * n] = n
        given = query, query, query, qkv.Segments(ids)
        found = qkv.attention(*given)
        np.testing.assert_allclose(found, qkv.attention(*given, backend="reference"), atol=1e-6)
    assert not watched.prepared("forward", any_length=False)


def test_strides_are_part_of_it() -> None:
    wide = normal(2, 2, 16, 8)
    for view in (wide, wide[:, :, ::2], wide[:, :, ::-1], wide[..., ::2], wide[:, ::-1]):
        for _ in range(3):
            _alike(view)
    broadcast = np.broadcast_to(normal(1, 2, 16, 8), (3, 2, 16, 8))
    for _ in range(3):
        _alike(broadcast)


def test_calls_that_were_used_least_recently_are_forgotten_first(watched, monkeypatch) -> None:
    """However they are found when they are used."""
    monkeypatch.setattr(CALLS, "capacity", 100)
    key, count = normal(1, 1, 1200, 2), 110
    query = key[:, :, :17]

    def prepared(length, *variants, times=2) -> int:
        """How many problems are made ready while a call is made so many times."""
        before, part = watched.prepared("forward"), key[:, :, :length]
        for _ in range(times):
            found = qkv.attention(query, part, part, *variants)
        np.testing.assert_allclose(found, dense(query, part, part), atol=2e-6)
        return watched.prepared("forward") - before

    # Of the same structure, of one whose latest call it is, and one that reads another array.
    used = (), (qkv.Softcap(1e6),), (qkv.Mask(np.ones((17, 1150), bool)),)
    assert [prepared(1150, *variants) for variants in used] == [1, 1, 1]
    for length in range(1, count + 1):
        assert prepared(length) == 1
        assert [prepared(1150, *variants, times=1) for variants in used] == [0, 0, 0]
    assert [prepared(length) for length in (count, count - 50, count - 90)] == [0, 0, 0]
    assert [prepared(length) for length in (1, 2, 5)] == [1, 1, 1]
    assert [prepared(length) for length in (count, 1150)] == [0, 0]


def test_a_registered_backend_is_seen() -> None:
    from qkv.backends import register, unregister
    from qkv.backends.reference import ReferenceBackend

    class Loud(ReferenceBackend):
        name = "loud"
        priority = 1000
        calls = 0

        def run(self, problem):
            Loud.calls += 1
            return super().run(problem)

    query = normal(1, 2, 8, 4)
    for _ in range(3):
        _alike(query)
    register(Loud())
    try:
        _alike(query)
    finally:
        unregister("loud")
    assert Loud.calls == 1


def test_another_machine_is_seen(monkeypatch) -> None:
    query = normal(1, 2, 8, 4)
    for _ in range(3):
        _alike(query)
    monkeypatch.setenv("QKV_ISA", "no such thing")
    for keywords in ({"backend": "cpu"}, {}):
        with pytest.raises(QkvError, match="no such thing"):
            qkv.attention(query, query, query, **keywords)


def _curve(score, batch, head, q_pos, kv_pos):
    return score + np.tanh(np.clip(q_pos - kv_pos, -3.0, 3.0)) * np.exp(-np.abs(score))


def test_a_score_mod_that_uses_numpy_is_prepared(watched) -> None:
    """The module has attributes that arrays have too."""
    query = normal(1, 2, 24, 8)
    first = qkv.attention(query, query, query, qkv.ScoreMod(_curve), backend="cpu")
    for _ in range(2):
        again = qkv.attention(query, query, query, qkv.ScoreMod(_curve), backend="cpu")
    assert watched.prepared("forward", any_length=False) == 1
    assert again.tobytes() == first.tobytes()
    expected = qkv.attention(query, query, query, qkv.ScoreMod(_curve), backend="reference")
    np.testing.assert_allclose(first, expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["causal", "sinks", "rotated", "rotated, sinks", "mask", "relative", "mod"]
)
def test_inspection_is_prepared(watched, name) -> None:
    """What is inspected again has the bits of the first time, and the statistics of the truth."""
    draw = np.random.default_rng(5)
    table = draw.normal(size=(32, 2)).astype(np.float32)
    variants = {
        "causal": (qkv.Causal(),),
        "sinks": (qkv.Sinks([0.5, -1.0]),),
        "rotated": (qkv.RoPE(),),
        "rotated, sinks": (qkv.RoPE(), qkv.Sinks([0.5, -1.0]), qkv.Causal()),
        "mask": (draw.random((1, 2, 24, 24)) < 0.8,),
        "relative": (qkv.RelativeBias(table),),
        "mod": (qkv.ScoreMod(_curve),),
    }[name]
    query = normal(1, 2, 24, 8)
    records = [qkv.inspect(query, query, query, *variants, backend="cpu") for _ in range(3)]
    assert watched.prepared("statistics") == 1
    first, *others = records
    for other in others:
        for field in ("output", "lse", "entropy", "max_weight"):
            assert getattr(other, field).tobytes() == getattr(first, field).tobytes()
    exact = query.astype(np.float64)
    weights = np.asarray(qkv.inspect(exact, exact, exact, *variants, backend="reference").weights)
    terms = np.where(weights > 0, -weights * np.log(np.where(weights > 0, weights, 1)), 0)
    np.testing.assert_allclose(first.entropy, terms.sum(-1), atol=1e-5)
    np.testing.assert_allclose(first.max_weight, weights.max(-1), atol=1e-6)


def test_another_thread_may_drop_what_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [normal(1, 2, 9, 8, seed=n) for n in range(3)]
    for _ in range(3):
        qkv.attention(*arrays)
    entry, *_ = [e for e in CALLS._entries.values() if e.first_of_arrays is not None]

    class DroppedAfterReading:
        def __init__(self) -> None:
            self.calls, self.first_of_tensors = entry.calls, None
            self.answers = iter([entry.first_of_arrays])

        @property
        def first_of_arrays(self):
            return next(self.answers, None)

        @first_of_arrays.setter
        def first_of_arrays(self, call) -> None:
            pass

    monkeypatch.setattr(type(CALLS), "entry", lambda self, structure: DroppedAfterReading())
    np.testing.assert_allclose(qkv.attention(*arrays), dense(*arrays), atol=2e-6)
