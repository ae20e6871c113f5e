"""Unusual numbers and formulas are computed right, or refused with an error."""

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
from qkv.errors import ArgumentError, DTypeError

X = np.random.default_rng(0).normal(size=(1, 1, 20, 8)).astype(np.float32)


@pytest.mark.parametrize("length", [np.uint64(2**64 - 1), np.int64(2**63 - 1), np.int8(100), 2**40])
def test_a_prefix_longer_than_anything_is_everything(length) -> None:
    np.testing.assert_array_equal(
        qkv.attention(X, X, X, qkv.Prefix(length)), qkv.attention(X, X, X)
    )


@pytest.mark.parametrize(
    "formula",
    [
        lambda s, b, h, q, k: s @ s,
        lambda s, b, h, q, k: s + (k << 3),
        lambda s, b, h, q, k: s.mean(),
        lambda s, b, h, q, k: divmod(s, 2)[0],
        lambda s, b, h, q, k: round(s),
    ],
)
def test_what_the_language_lacks_is_refused_in_words(formula) -> None:
    with pytest.raises(ArgumentError, match="not part of the expression language"):
        qkv.attention(X, X, X, qkv.ScoreMod(formula))


@pytest.mark.parametrize("p", ["a", None, [0.1, 0.2], 1.0, -0.1, float("nan")])
def test_what_is_no_probability(p) -> None:
    with pytest.raises(ArgumentError, match="not a probability"):
        qkv.Dropout(p, 1)


@pytest.mark.parametrize("values", ["x", [None], [1j], [[1], [1, 2]], np.array(["2026"], "M8")])
@pytest.mark.parametrize("variant", [qkv.ALiBi, qkv.Sinks])
def test_what_are_no_numbers_of_heads(variant, values) -> None:
    with pytest.raises(DTypeError, match="are not real numbers"):
        qkv.attention(X, X, X, variant(values))


@pytest.mark.parametrize("cap", ["x", None, [1.0, 2.0], 0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_cap(cap) -> None:
    with pytest.raises(ArgumentError, match="not a positive number"):
        qkv.Softcap(cap)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16, np.longdouble, np.int16])
def test_a_base_of_any_type_of_number(kind) -> None:
    out = qkv.attention(X, X, X, qkv.RoPE(base=kind(128)))
    np.testing.assert_array_equal(out, qkv.attention(X, X, X, qkv.RoPE(base=128.0)))


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (np.array(128.0), r"array\(128.\) is an array, not a number"),
        (ml_dtypes.bfloat16(-1), "not a positive number"),
        (np.void(b"abcd"), "not a positive number"),
        (np.True_, "not a positive number"),
        (np.complex64(3), "not a positive number"),
        (10**400, "not a positive number"),
    ],
)
def test_what_is_no_base(base, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        qkv.RoPE(base=base)


@pytest.mark.parametrize("seed", [1.7, -1, 2**64, np.array([0, 1], np.uint32), [], "1"])
def test_what_is_no_seed(seed) -> None:
    with pytest.raises(ArgumentError, match="not a whole number of 64 bits"):
        qkv.Dropout(0.5, seed)


@pytest.mark.parametrize("positions", [[-(2**63)], [2**63 - 1], [-(2**31), 0]])
def test_global_tokens_beyond_any_row(positions) -> None:
    with pytest.raises(ArgumentError, match="GlobalTokens spans"):
        qkv.GlobalTokens(np.array(positions))


def in_a_process(code: str, **settings: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 1
    return done.stderr


def test_an_unknown_instruction_set_is_not_answered_by_another_backend() -> None:
    output = in_a_process(
        "import numpy as np, qkv; x = np.ones((1, 9, 8)); qkv.attention(x, x, x)",
        QKV_ISA="avx-512",
    )
    assert "QKV_ISA='avx-512' is not an instruction set" in output


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 2, 64, 8)], ids=["one task", "many"])
def test_a_wrong_number_of_threads_is_an_error_of_the_first_call(shape: tuple[int, ...]) -> None:
    """A call that a single thread computes never asks for their number, and refuses it too."""
    x = f"x = np.ones({shape}, np.float32)"
    output = in_a_process(
        f"import numpy as np, qkv; {x}; qkv.attention(x, x, x)", QKV_NUM_THREADS="abc"
    )
    assert "QKV_NUM_THREADS='abc' is not a number of threads" in output


def test_a_number_of_threads_with_thousands_of_digits() -> None:
    output = in_a_process("import qkv; qkv.get_num_threads()", QKV_NUM_THREADS="9" * 5000)
    assert "is not a number of threads" in output


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_numbers_of_types_that_numpy_does_not_know(library) -> None:
    """1.0 and 0.125 have the same bits in two types of 8 bits."""
    query, key, value = np.random.default_rng(4).normal(size=(3, 6, 8)).astype(np.float32)
    operands = [library(array) for array in (query, key, value)]
    scores = query.astype(np.float64) @ key.T
    of_equal_bits = np.uint8(56).view(ml_dtypes.float8_e4m3fn), np.uint8(56).view("float8_e5m2")
    for number in (ml_dtypes.bfloat16(0.5), *of_equal_bits) * 4:
        x = float(number)
        for variants, keywords, changed in (
            ((), {"scale": number}, scores * x),
            ((qkv.Softcap(number),), {}, x * np.tanh(scores / 8**0.5 / x)),
        ):
            weights = np.exp(changed)
            expected = weights / weights.sum(-1, keepdims=True) @ value
            found = np.asarray(qkv.attention(*operands, *variants, **keywords))
            np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("seed", [np.array([3]), np.array([[3]]), torch.tensor([3]), np.uint8(3)])
def test_arrays_of_one_number_are_seeds(seed: Any) -> None:
    x = np.ones((4, 1))
    found = qkv.attention(x, x, x, qkv.Dropout(0.5, seed))
    np.testing.assert_array_equal(found, qkv.attention(x, x, x, qkv.Dropout(0.5, 3)))


def test_positions_beyond_64_bits_are_too_large() -> None:
    x = np.ones((4, 1))
    with pytest.raises(ArgumentError, match="reaches beyond"):
        qkv.attention(x, x, x, qkv.Causal(), q_offset=2**70)
