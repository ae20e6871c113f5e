"""Errors for wrong arguments: the class, the fact, the values given, and one thing to do."""

import math
import pickle
import re
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
from qkv import (
    AmbiguityError,
    ArgumentError,
    DTypeError,
    KernelBuildError,
    QkvError,
    ShapeError,
    UnsupportedError,
)

X = np.random.default_rng(0).normal(size=(2, 4, 6, 8)).astype(np.float32)
FLAT = X[0, 0]


def raises(expected, *arguments, function="attention", **keywords):
    """The error of a call; numpy's warnings are errors already (see pyproject.toml)."""
    with pytest.raises(QkvError) as caught:
        getattr(qkv, function)(*arguments, **keywords)
    error = caught.value
    assert type(error) is expected, error
    assert error.fact.endswith((".", "?")), error.fact
    assert error.action, "every error says what to do"
    assert str(error).startswith(error.fact)
    assert str(error).endswith(error.action)
    assert all(isinstance(part, str) for row in error.seen for part in row)
    return error


SHAPES = {
    "a vector": ((FLAT[0], FLAT, FLAT), "query has 1 dimension;"),
    "a number": ((FLAT, np.float32(1.0)[...], FLAT), "key has 0 dimensions"),
    "head_dim": ((X, X[..., :5], X), r"head_dim=8 and key has head_dim=5"),
    "no head_dim": ((X[..., :0], X[..., :0], X), "head_dim=0"),
    "kv_len": ((X, X[..., :3, :], X), "kv_len=3 and value has kv_len=6"),
    "kv heads": ((X, X[:, :2], X), "key has 2 heads and value has 4"),
    "groups": ((X, X[:, :3], X[:, :3]), "num_heads=4 is not a multiple of num_kv_heads=3"),
    "more kv heads": ((X[:, :2], X, X), "num_heads=2 is not a multiple of num_kv_heads=4"),
    "no kv heads": ((X, X[:, :0], X[:, :0]), "num_heads=4 is not a multiple of num_kv_heads=0"),
    "batch": ((X, np.repeat(X, 2, 0)[:3], X), r"do not broadcast"),
}


@pytest.mark.parametrize("function", ["attention", "inspect", "explain", "plan"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, function) -> None:
    arrays, fact = SHAPES[name]
    error = raises(ShapeError, *arrays, function=function)
    assert isinstance(error, ValueError)
    assert re.search(fact, error.fact)
    assert [row[0] for row in error.seen] == ["query", "key", "value"]
    for (_, text), array in zip(error.seen, arrays, strict=True):
        assert str(array.shape) in text


def test_a_shape_error_suggests_the_other_layout() -> None:
    """(batch, length, heads, dim) read as bhld."""
    query, key = np.zeros((1, 128, 8, 64), np.float32), np.zeros((1, 512, 8, 64), np.float32)
    error = raises(ShapeError, query, key, key)
    assert 'layout="blhd"' in error.action
    qkv.attention(query, key, key, layout="blhd")


DTYPES = {
    "int64": np.int64,
    "int32": np.int32,
    "uint8": np.uint8,
    "bool": bool,
    "complex": np.complex64,
    "object": object,
    "longdouble": np.longdouble,
    "text": "U3",
    "dates": "M8[s]",
    "big-endian": ">f4" if np.little_endian else "<f4",
    "float8": ml_dtypes.float8_e4m3fn,
    "int4": ml_dtypes.int4,
    "records": [("a", np.float32)],
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_dtypes(name, place) -> None:
    arrays = [FLAT, FLAT, FLAT]
    arrays[place] = np.zeros(FLAT.shape, DTYPES[name])
    error = raises(DTypeError, *arrays)
    assert isinstance(error, TypeError)
    role = ("query", "key", "value")[place]
    assert error.fact.startswith(f"{role} has dtype")
    assert "float32" in error.action


def test_mixed_dtypes() -> None:
    error = raises(DTypeError, FLAT, FLAT.astype(np.float64), FLAT)
    assert error.fact == "query, key and value have different dtypes."
    assert [text.split()[0] for _, text in error.seen] == ["float32", "float64", "float32"]
    assert "astype" in error.action


FUNCTIONS = ["attention", "inspect", "explain", "plan", "vjp"]
ROLES = ["query", "key", "value"]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("thing", "kind", "action"),
    [
        ([[1, 2], [3, 4]], "list", "Pass numpy.asarray({}, dtype='float32')."),
        (((1.0,),), "tuple", "Pass numpy.asarray({}, dtype='float32')."),
        (1.0, "float", "Pass numpy.asarray({}, dtype='float32')."),
        (memoryview(b""), "memoryview", "Pass numpy.asarray({}, dtype='float32')."),
        (None, "None", "Pass an array as {}."),
        ([[1, 2], [3]], "list whose rows differ in length", "Pad the rows to one length"),
        ("abc", "str", "Pass an array of NumPy, torch or JAX."),
        ({}, "dict", "Pass an array of NumPy, torch or JAX."),
    ],
    ids=["lists", "tuples", "number", "memoryview", "None", "ragged", "text", "dict"],
)
def test_what_is_no_array(thing, kind, action, place, function) -> None:
    arrays = [FLAT, FLAT, FLAT]
    arrays[place] = thing
    error = raises(DTypeError, *arrays, function=function)
    assert re.match(rf"{ROLES[place]} is (a )?{kind}, not an array", error.fact), error.fact
    assert error.action.startswith(action.format(ROLES[place]))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("thing", [None, [[1.0]], [[1.0], [1.0, 2.0]], 2.0], ids=repr)
@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_what_is_no_array_beside_those_of_another_library(library, thing, place, function) -> None:
    import jax.numpy as jnp

    arrays = [torch.from_numpy(FLAT) if library == "torch" else jnp.asarray(FLAT)] * 3
    arrays[place] = thing
    error = raises(DTypeError, *arrays, function=function)
    assert error.fact.startswith(ROLES[place])
    if place and isinstance(thing, float):
        assert library in error.action


def runs_as_it_is_written(action: str, **names) -> None:
    """The expression that an action names is one of the caller's library."""
    (written,) = re.findall(r"\b\w+\.(?:astype|to)\([^()]*\)", action)
    converted = eval(written, {"np": np, "torch": torch, **names})
    assert type(converted) is type(next(iter(names.values())))


@pytest.mark.parametrize("make", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_advice_is_in_the_words_of_the_library(make, function) -> None:
    import jax.numpy as jnp

    convert = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[make]
    x, half = convert(X), convert(X.astype(np.float16))
    error = raises(DTypeError, x, half, x, function=function)
    runs_as_it_is_written(error.action, query=x, key=half)
    if make == "torch":
        error = raises(DTypeError, x.clone().requires_grad_(), half, x, function=function)
        runs_as_it_is_written(error.action, query=x, key=half)
    whole = convert(X.astype(np.int32))
    error = raises(DTypeError, whole, whole, whole, function=function)
    runs_as_it_is_written(error.action, query=whole)
    lengths = convert(np.ones(2, np.float32))
    error = raises(DTypeError, x, x, x, qkv.KeyLengths(lengths), function=function)
    runs_as_it_is_written(error.action, kv_lens=lengths)


def test_no_advice_names_an_argument_that_the_function_lacks() -> None:
    import jax.numpy as jnp

    query, key = torch.zeros(1, 128, 8, 64), torch.zeros(1, 512, 8, 64)
    with pytest.raises(ShapeError) as caught:
        qkv.torch.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert "layout" not in str(caught.value)
    assert "transpose" in caught.value.action
    query, key = jnp.zeros((1, 8, 128, 64)), jnp.zeros((1, 8, 512, 64))
    with pytest.raises(ShapeError) as caught:
        qkv.jax.dot_product_attention(query, key, key)
    assert "layout" not in str(caught.value)
    assert "swapaxes" in caught.value.action


def test_the_other_layout_is_advised_only_where_it_helps() -> None:
    error = raises(ShapeError, X, X, X[..., :5, :])
    assert "layout" not in str(error)
    assert error.action == "Give one row of value for each row of key."


def test_a_masked_array_says_where_its_mask_goes() -> None:
    error = raises(DTypeError, FLAT, np.ma.masked_invalid(FLAT), FLAT)
    assert "its mask would be ignored" in error.fact
    assert "key.data" in error.action


def test_a_subclass_of_ndarray_is_taken_as_it_is() -> None:
    matrix = FLAT.view(type("Named", (np.ndarray,), {}))
    out = qkv.attention(matrix, matrix, matrix)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, qkv.attention(FLAT, FLAT, FLAT))


def test_tensors_that_are_not_on_the_cpu() -> None:
    tensor = torch.zeros(3, 4, device="meta")
    error = raises(UnsupportedError, tensor, tensor, tensor, function="inspect")
    assert isinstance(error, NotImplementedError)
    assert "meta" in error.fact
    error = raises(DTypeError, torch.zeros(3, 4).to_sparse(), *(torch.zeros(3, 4),) * 2)
    assert "to_dense" in error.action


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_an_integer_mask_names_both_fixes(dtype) -> None:
    error = raises(DTypeError, FLAT, FLAT, FLAT, np.ones((6, 6), dtype))
    assert np.dtype(dtype).name in error.fact
    assert "astype(np.float32)" in error.action
    assert "qkv.Mask(array.astype(bool))" in error.action
    error = raises(DTypeError, FLAT, FLAT, FLAT, qkv.Mask(np.ones((6, 6), dtype)))
    assert "astype(bool)" in error.action
    assert "Bias" in error.action


@pytest.mark.parametrize(
    "dtype",
    [np.complex64, object, "U3", ml_dtypes.float8_e5m2, np.longdouble, DTYPES["big-endian"]],
)
def test_other_extra_arrays(dtype) -> None:
    raises(DTypeError, FLAT, FLAT, FLAT, np.zeros((6, 6), dtype))


@pytest.mark.parametrize("shape", [(5,), (7, 6), (3, 6, 6), (2, 2, 4, 6, 6), (6, 1, 1), (0,)])
@pytest.mark.parametrize("kind", [bool, np.float32])
def test_masks_and_biases_that_do_not_broadcast(shape, kind) -> None:
    error = raises(ShapeError, X, X, X, np.ones(shape, kind))
    assert str(shape) in error.fact
    assert "(2, 4, 6, 6)" in error.fact
    assert "size 1" in error.action


@pytest.mark.parametrize("thing", [0.5, "causal", b"causal", None, [True], {}, len])
def test_what_is_no_variant(thing) -> None:
    error = raises(ArgumentError, FLAT, FLAT, FLAT, thing)
    assert "is not a variant" in error.fact
    assert dict(error.seen)["type"] == type(thing).__name__


@pytest.mark.parametrize(
    ("thing", "action"),
    [
        (None, "Leave it out"),
        ([[True, False]], "Pass an array: True may attend"),
        ((qkv.Causal(), qkv.ALiBi()), "each as an argument of its own: *variants."),
        ([np.tri(6, dtype=bool)], "each as an argument of its own: *variants."),
        ([None, qkv.Causal()], "each as an argument of its own: *variants."),
        ((), "Leave it out"),
        (lambda score: score, "Pass qkv.ScoreMod(fn)."),
        (len, "Pass qkv.ScoreMod(len)."),
        (0.5, "other arguments have names, as scale=0.5."),
    ],
    ids=[
        "nothing",
        "a list",
        "variants",
        "arrays",
        "some variants",
        "no variants",
        "a lambda",
        "a function",
        "a number",
    ],
)
def test_what_to_pass_as_a_variant(thing, action) -> None:
    error = raises(ArgumentError, FLAT, FLAT, FLAT, thing)
    assert action in error.action
    assert "0x" not in error.fact


def test_a_class_instead_of_a_variant() -> None:
    error = raises(ArgumentError, FLAT, FLAT, FLAT, qkv.Causal)
    assert "Causal(...)" in error.action


KEYWORDS = [
    ({"layout": "lbhd"}, "layout='lbhd'"),
    ({"layout": None}, "layout=None"),
    ({"backend": "cuda"}, "no backend 'cuda'"),
    ({"backend": None}, "no backend None"),
    ({"scale": math.nan}, "scale=nan"),
    ({"scale": math.inf}, "scale=inf"),
    ({"scale": "big"}, "scale='big'"),
    ({"scale": 1j}, "scale=1j"),
    ({"scale": np.ones(3)}, "scale="),
    ({"scale": True}, "scale=True"),
    ({"scale": np.array(True)}, "scale=array(True)"),
    ({"q_offset": "middle"}, "q_offset='middle'"),
    ({"q_offset": 0.5}, "q_offset=0.5"),
    ({"q_offset": True}, "q_offset=True"),
    ({"q_offset": np.zeros(2)}, "q_offset="),
    ({"q_offset": 2**40}, "q_offset"),
    ({"kv_offset": "end"}, "kv_offset='end'"),
    ({"kv_offset": None}, "kv_offset=None"),
    ({"kv_offset": -(2**31)}, "kv_offset"),
    ({"kv_offset": np.uint64(2**63)}, "kv_offset"),
]


@pytest.mark.parametrize(("keyword", "fact"), KEYWORDS, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("function", ["attention", "inspect", "explain", "plan"])
def test_keywords(function, keyword, fact) -> None:
    error = raises(ArgumentError, FLAT, FLAT, FLAT, function=function, **keyword)
    assert fact in error.fact


@pytest.mark.parametrize("name", ["q_offset", "kv_offset"])
def test_offsets_that_do_not_fit_the_batch(name) -> None:
    error = raises(ShapeError, X, X, X, **{name: np.zeros(3, int)})
    assert "(3,)" in error.fact
    assert "(2,)" in error.fact
    assert dict(error.seen) == {name: "int64 (3,)", "batch": "(2,)"}


VARIANTS = [
    (lambda: qkv.SlidingWindow(-1, 0), ArgumentError),
    (lambda: qkv.SlidingWindow(1.5, 0), ArgumentError),
    (lambda: qkv.SlidingWindow(True, 0), ArgumentError),
    (lambda: qkv.Softcap(0.0), ArgumentError),
    (lambda: qkv.Softcap(-1.0), ArgumentError),
    (lambda: qkv.Softcap(math.inf), ArgumentError),
    (lambda: qkv.Softcap(math.nan), ArgumentError),
    (lambda: qkv.Softcap(True), ArgumentError),
    (lambda: qkv.Strided(0), ArgumentError),
    (lambda: qkv.Strided(2.0), ArgumentError),
    (lambda: qkv.Prefix(-1), ArgumentError),
    (lambda: qkv.Prefix(1.0), ArgumentError),
    (lambda: qkv.GlobalTokens(3), ArgumentError),
    (lambda: qkv.GlobalTokens([0.5]), ArgumentError),
    (lambda: qkv.GlobalTokens([0, 2**40]), ArgumentError),
    (lambda: qkv.BlockSparse(np.ones((1, 1), bool), 0, 4), ArgumentError),
    (lambda: qkv.RandomBlocks(0, 3), ArgumentError),
    (lambda: qkv.RandomBlocks(64, -1), ArgumentError),
    (lambda: qkv.RandomBlocks(64, 3, seed=-1), ArgumentError),
    (lambda: qkv.RandomBlocks(64, 3, length=2.5), ArgumentError),
    (lambda: qkv.Dropout(1.0, 0), ArgumentError),
    (lambda: qkv.Dropout(-0.1, 0), ArgumentError),
    (lambda: qkv.Dropout(False, 0), ArgumentError),
    (lambda: qkv.Dropout(0.1, -1), ArgumentError),
    (lambda: qkv.Dropout(0.1, 2**64), ArgumentError),
    (lambda: qkv.RoPE(layout="pairs"), ArgumentError),
    (lambda: qkv.RoPE(base=0.0), ArgumentError),
    (lambda: qkv.RoPE(rotary_dim=3), ArgumentError),
    (lambda: qkv.RoPE(attention_factor=0.0), ArgumentError),
    (lambda: qkv.RoPE.linear(7, 2.0), ArgumentError),
    (lambda: qkv.RoPE.linear(8, -2.0), ArgumentError),
    (lambda: qkv.RoPE.ntk_aware(2, 2.0), ArgumentError),
    (lambda: qkv.RoPE.dynamic_ntk(8, 2.0, 0, 5), ArgumentError),
    (lambda: qkv.RoPE.yarn(8, 2.0, 32, base=1.0), ArgumentError),
    (lambda: qkv.RoPE.llama3(8, 8.0, 4.0, 1.0), ArgumentError),
    (lambda: qkv.RoPE.longrope(8, [1.0] * 4, [1.0] * 3, 32, 5), ArgumentError),
    (lambda: qkv.RoPE.longrope(8, [1.0] * 4, [0.0] * 4, 32, 5), ArgumentError),
    (lambda: qkv.RelativeBias(np.zeros(8)), ShapeError),
    (lambda: qkv.RelativeBias(np.zeros((8, 4)), max_distance=1), ArgumentError),
    (lambda: qkv.ScoreMod(3), ArgumentError),
    (lambda: qkv.ScoreMod(lambda s, b, h, q: s), ArgumentError),
    (lambda: qkv.ScoreMod(lambda s, b, h, q, k, extra: s), ArgumentError),
    (lambda: qkv.Segments.from_cu_seqlens([1, 2]), ShapeError),
    (lambda: qkv.Segments.from_cu_seqlens([0, 3, 2]), ShapeError),
    (lambda: qkv.Segments.from_cu_seqlens([0.0, 3.0]), ShapeError),
    (lambda: qkv.Segments.from_cu_seqlens([]), ShapeError),
]


@pytest.mark.parametrize(("make", "expected"), VARIANTS)
def test_variants_that_cannot_be(make, expected) -> None:
    with pytest.raises(QkvError) as caught:
        make()
    assert type(caught.value) is expected
    assert caught.value.fact
    assert caught.value.action


DO_NOT_FIT = [
    (qkv.KeyLengths(7), ShapeError, "kv_len=6"),
    (qkv.KeyLengths(-1), ShapeError, "-1"),
    (qkv.KeyLengths([1, 2, 3]), ShapeError, "(3,)"),
    (qkv.KeyLengths([1.0, 2.0]), DTypeError, "float64"),
    (qkv.KeyLengths(np.ones(6, bool)), DTypeError, "bool"),
    (qkv.Prefix([1, 2, 3]), ShapeError, "(3,)"),
    (qkv.Segments([0, 1]), ShapeError, "q_len=6"),
    (qkv.Segments(np.zeros(6)), DTypeError, "float64"),
    (qkv.Segments(np.zeros(6, int), np.zeros(5, int)), ShapeError, "kv_len=6"),
    (qkv.BlockSparse(np.ones((2, 2), bool), 2, 2), ShapeError, "(3, 3)"),
    (qkv.BlockSparse(np.ones((3, 3)), 2, 2), DTypeError, "float64"),
    (qkv.BlockSparse(np.ones((3, 3, 3), bool), 2, 2), ShapeError, "(3, 3, 3)"),
    (qkv.ALiBi([0.5, 0.25]), ShapeError, "4 query heads"),
    (qkv.Sinks([0.5, 0.25]), ShapeError, "4 query heads"),
    (qkv.Sinks([True, False, True, False]), DTypeError, "sinks are not real numbers"),
    (qkv.ALiBi([True, False, True, False]), DTypeError, "slopes are not real numbers"),
    (qkv.RelativeBias(np.zeros((8, 2))), ShapeError, "num_heads=4"),
    (qkv.RoPE(rotary_dim=10), ShapeError, "head_dim=8"),
    (qkv.RoPE(inv_freq=np.ones((2, 2))), ArgumentError, "(2, 2)"),
    (qkv.RoPE(inv_freq=[np.inf, 0, 0, 0]), ArgumentError, "not finite"),
    (qkv.RoPE(inv_freq=[np.nan, 1, 1, 1]), ArgumentError, "not finite"),
    (qkv.Causal(align="middle"), ArgumentError, "align='middle'"),
]


@pytest.mark.parametrize(("variant", "expected", "fact"), DO_NOT_FIT, ids=lambda v: str(v)[:40])
def test_variants_that_do_not_fit(variant, expected, fact) -> None:
    error = raises(expected, X, X, X, variant)
    assert fact in error.fact


@pytest.mark.parametrize("variant", [qkv.RoPE(), qkv.Sinks(0.0), qkv.Dropout(0.1, 0)], ids=repr)
def test_two_of_a_kind_that_cannot_be_combined(variant) -> None:
    error = raises(AmbiguityError, X, X, X, variant, variant)
    assert isinstance(error, ValueError)
    assert "two variants" in error.fact


@pytest.mark.parametrize("dtype", ["i4", "f8"])
def test_a_table_in_the_other_byte_order(dtype) -> None:
    """Compiled code would read it backwards."""
    table = np.arange(6).astype((">" if np.little_endian else "<") + dtype)
    raises(DTypeError, FLAT, FLAT, FLAT, qkv.ScoreMod(lambda s, b, h, q, k: s + table[k]))


TABLE = np.arange(6.0)


def branches(score, batch, head, q_pos, kv_pos):
    return score if q_pos >= kv_pos else -np.inf


def uses_and(score, batch, head, q_pos, kv_pos):
    return np.where(q_pos > 1 and kv_pos > 1, score, 0.0)


def uses_math(score, batch, head, q_pos, kv_pos):
    return math.tanh(score)


def uses_range(score, batch, head, q_pos, kv_pos):
    return sum(score for _ in range(head))


def returns_none(score, batch, head, q_pos, kv_pos):
    score + 1


def returns_a_pair(score, batch, head, q_pos, kv_pos):
    return score, score


def returns_a_condition(score, batch, head, q_pos, kv_pos):
    return q_pos >= kv_pos


def uses_arctan(score, batch, head, q_pos, kv_pos):
    return np.arctan(score)


def floors_a_float(score, batch, head, q_pos, kv_pos):
    return score // 2


def indexes_with_a_float(score, batch, head, q_pos, kv_pos):
    return TABLE[score]


def divides_by_what_may_be_zero(score, batch, head, q_pos, kv_pos):
    return score * (q_pos // kv_pos)


@pytest.mark.parametrize(
    "function",
    [
        branches, uses_and, uses_math, uses_range, returns_none, returns_a_pair,
        returns_a_condition, uses_arctan, floors_a_float, indexes_with_a_float,
        divides_by_what_may_be_zero,
    ],
)  # fmt: skip
def test_score_mods_that_cannot_be_traced(function) -> None:
    raises(ArgumentError, FLAT, FLAT, FLAT, qkv.ScoreMod(function))


def reads_too_far(score, batch, head, q_pos, kv_pos):
    return score + TABLE[kv_pos + 1]


def reads_before(score, batch, head, q_pos, kv_pos):
    return score + TABLE[q_pos - kv_pos]


def reads_by_score(score, batch, head, q_pos, kv_pos):
    return score + TABLE[np.floor(score)]


@pytest.mark.parametrize("function", [reads_too_far, reads_before, reads_by_score])
def test_score_mods_that_may_read_outside_a_table(function) -> None:
    error = raises(ShapeError, FLAT, FLAT, FLAT, qkv.ScoreMod(function))
    assert "may reach" in error.fact
    assert "np.clip" in error.action


def test_a_table_is_proved_for_the_offsets_of_the_call() -> None:
    mod = qkv.ScoreMod(lambda s, b, h, q, k: s + TABLE[k])
    qkv.attention(FLAT, FLAT, FLAT, mod)
    raises(ShapeError, FLAT, FLAT, FLAT, mod, kv_offset=1)
    raises(ShapeError, FLAT, FLAT, FLAT, mod, kv_offset=-1)


def test_unsupported_gives_every_backend_and_its_reason(monkeypatch) -> None:
    """A table: the problem, then one row for each backend."""
    from qkv import backends as module
    from qkv.backends import Refusal, backends
    from qkv.backends.blocked import BlockedBackend
    from qkv.backends.cpu import CpuBackend

    monkeypatch.setattr(
        BlockedBackend, "refusals", lambda self, spec: (Refusal("it is Monday", "Tuesday"),)
    )
    monkeypatch.setattr(
        CpuBackend, "refusals", lambda self, spec: (Refusal("it is raining", "sunshine"),)
    )
    reference = next(b for b in backends() if b.name == "reference")
    monkeypatch.setattr(sys.modules[type(reference).__module__], "DENSE_LIMIT", 0)
    x = FLAT.astype(np.float64)
    error = raises(UnsupportedError, x, x, x)
    rows = dict(error.seen)
    assert list(rows) == ["problem", *(b.name for b in module.backends())]
    assert "float64" in rows["problem"]
    assert rows["blocked"] == "it is Monday (accepts Tuesday)"
    assert "would hold" in rows["reference"]
    error = raises(UnsupportedError, x, x, x, backend="blocked")
    assert list(dict(error.seen)) == ["problem", "blocked"]
    assert "auto" in error.action


def test_the_reference_refuses_what_it_cannot_hold() -> None:
    long = np.broadcast_to(np.zeros((1, 8), np.float32), (40_000, 8))
    error = raises(UnsupportedError, long, long, long, backend="reference")
    assert "37.3 GiB" in dict(error.seen)["reference"]


ERRORS = [QkvError, ShapeError, DTypeError, AmbiguityError, ArgumentError, qkv.FileError,
          qkv.KeywordError, UnsupportedError, KernelBuildError]  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_survive_pickling(kind) -> None:
    error = kind("8 is not 6.", [("query", "(8,)"), ("key", "(6,)")], "Pass one of them.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.fact, copy.seen, copy.action) == (error.fact, error.seen, error.action)
    assert (
        str(copy)
        == str(error)
        == ("8 is not 6.\n\n  query  (8,)\n  key    (6,)\n\nPass one of them.")
    )


def test_the_tree_of_errors() -> None:
    parents = {
        ShapeError: ValueError,
        DTypeError: TypeError,
        AmbiguityError: ValueError,
        ArgumentError: ValueError,
        qkv.FileError: ValueError,
        UnsupportedError: NotImplementedError,
        qkv.KeywordError: TypeError,
        KernelBuildError: RuntimeError,
    }
    for kind, builtin in parents.items():
        assert issubclass(kind, QkvError)
        assert issubclass(kind, builtin)


BAD_PARTS = [
    ((), ArgumentError),
    (((FLAT, FLAT),), ShapeError),
    (((FLAT, FLAT[:, 0]), (FLAT[:3], FLAT[:3, 0])), ShapeError),
    (((FLAT.tolist(), FLAT[:, 0]),), DTypeError),
    (((FLAT.astype(int), FLAT[:, 0]), (FLAT, FLAT[:, 0])), DTypeError),
    (((FLAT, FLAT[:, 0]), (FLAT, FLAT[:, 0] > 0)), DTypeError),
    (((FLAT.astype(complex), FLAT[:, 0]),), DTypeError),
    (((torch.ones(2, 3, dtype=torch.int64), torch.zeros(2)),), DTypeError),
]


@pytest.mark.parametrize(("parts", "expected"), BAD_PARTS)
def test_merge(parts, expected) -> None:
    with pytest.raises(expected):
        qkv.merge(*parts)


def test_the_layout_of_merge_is_checked_like_that_of_a_call() -> None:
    for layout in ("lbhd", None, ["bhld"]):
        errors = [
            raises(ArgumentError, FLAT, FLAT, FLAT, layout=layout),
            raises(ArgumentError, (FLAT, FLAT[:, 0]), function="merge", layout=layout),
        ]
        assert len(set(map(str, errors))) == 1


def test_bad_input_leaves_the_arrays_alone() -> None:
    arrays = [X.copy() for _ in range(3)]
    raises(ShapeError, *arrays, np.ones((5, 5), bool))
    raises(AmbiguityError, arrays[0][..., :3, :], *arrays[1:], qkv.Causal())
    for array in arrays:
        np.testing.assert_array_equal(array, X)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
@pytest.mark.one_in(4)
def test_what_is_not_finite_behind_a_mask_stays_there(value, dtype) -> None:
    """Numbers behind a mask change no output, and raise no warning."""
    clean = FLAT.astype(dtype)
    dirty = clean.copy()
    dirty[4:] = value
    for call_variants in (qkv.KeyLengths(4), np.arange(6)[None, :] < 4):
        np.testing.assert_array_equal(
            qkv.attention(clean, dirty, dirty, call_variants),
            qkv.attention(clean, clean, clean, call_variants),
        )
    assert np.isnan(qkv.attention(clean, clean, dirty).astype(float)).any() or np.isinf(value)
