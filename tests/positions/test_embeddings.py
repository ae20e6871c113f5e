"""Positions added at the input, and what attention is without any."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

import qkv


def test_sinusoidal_positions_of_transformers() -> None:
    table = torch.empty(600, 48)
    create_sinusoidal_embeddings(600, 48, table)
    ours = qkv.SinusoidalPositions(48)(np.zeros((600, 48), np.float32))
    np.testing.assert_allclose(ours, table.numpy(), rtol=0, atol=2.0**-23)
    assert ours.dtype == np.float32
    at = np.array([599, 0, 3])
    np.testing.assert_allclose(qkv.SinusoidalPositions(48).encoding(at), table[at], atol=2.0**-23)


def test_a_shift_of_positions_is_a_rotation() -> None:
    """Section 3.5 of the paper: P[p + n] is a linear function of P[p] that n alone decides."""
    found = qkv.SinusoidalPositions(16, base=100.0).encoding(np.arange(50))
    sines, cosines = found[:, ::2], found[:, 1::2]
    angle = 7 * 100.0 ** (-np.arange(8) / 8)
    moved = sines * np.cos(angle) + cosines * np.sin(angle)
    np.testing.assert_allclose(sines[7:], moved[:-7], atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("positions", [None, np.array([[4], [2]]), np.array([5, 0, 1])])
def test_every_library_and_type(dtype, positions) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 8))
    x = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    learned = qkv.LearnedPositions.random(6, 8, seed=1, std=1.0)
    for made in (qkv.SinusoidalPositions(8), learned):
        expected = made(x, positions)
        assert expected.dtype == x.dtype
        tensor = torch.from_numpy(x.astype(np.float64)).to(getattr(torch, dtype))
        got = made(tensor, positions)
        assert got.dtype is tensor.dtype
        np.testing.assert_array_equal(got.double().numpy(), expected.astype(np.float64))
        with jax.enable_x64(dtype == "float64"):
            array = jax.numpy.asarray(x)
            traced = jax.jit(lambda a, made=made: made(a, positions))
            for got in (made(array, positions), traced(array)):
                assert got.dtype == array.dtype
                np.testing.assert_array_equal(np.asarray(got), expected)


def test_learned_positions_are_an_embedding_with_its_gradient() -> None:
    embedding = torch.nn.Embedding(10, 6)
    positions = qkv.LearnedPositions(embedding.weight)
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    at = np.array([[0, 3, 3, 9], [1, 2, 3, 4]])
    expected = x + embedding(torch.from_numpy(at))
    (by_torch,) = torch.autograd.grad(expected.square().sum(), embedding.weight)
    got = positions(x, at)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    (ours,) = torch.autograd.grad(got.square().sum(), embedding.weight)
    torch.testing.assert_close(ours, by_torch)


def self_attention(x, *variants):
    w_q, w_k, w_v = np.random.default_rng(9).normal(size=(3, 16, 16))
    return qkv.attention(x @ w_q, x @ w_k, x @ w_v, *variants)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "uint64", "int32"])
def test_positions_of_every_integer_type_are_rows_of_a_table_of_torch(dtype: str) -> None:
    """torch reads an index of uint8 as a mask, which here has as many rows as the table."""
    embedding, at = torch.nn.Embedding(5, 4), np.array([4, 3, 2, 1, 1])
    x, expected = torch.zeros(5, 4), embedding(torch.from_numpy(at))
    learned = qkv.LearnedPositions(embedding.weight)
    torch.testing.assert_close(learned(x, at.astype(dtype)), expected)
    torch.testing.assert_close(learned(x, torch.from_numpy(at.astype(dtype))), expected)
    with pytest.raises(qkv.DTypeError, match="dtype bool"):
        learned(x, at > 2)


def test_attention_without_positions_is_permutation_equivariant() -> None:
    rng = np.random.default_rng(0)
    x, order = rng.normal(size=(12, 16)), rng.permutation(12)
    np.testing.assert_allclose(
        self_attention(x[order]), self_attention(x)[order], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    "attend",
    [
        lambda x: self_attention(qkv.SinusoidalPositions(16)(x)),
        lambda x: self_attention(qkv.LearnedPositions.random(12, 16, std=1.0)(x)),
        lambda x: self_attention(x, qkv.RoPE()),
        lambda x: self_attention(x, qkv.ALiBi(0.5)),
        lambda x: self_attention(x, qkv.Causal()),
    ],
    ids=["sinusoidal", "learned", "rope", "alibi", "causal"],
)
def test_each_kind_of_position_ends_that(attend) -> None:
    rng = np.random.default_rng(0)
    x, order = rng.normal(size=(12, 16)), rng.permutation(12)
    assert np.abs(attend(x[order]) - attend(x)[order]).max() > 0.1


@pytest.mark.parametrize(
    ("make", "expected", "fact"),
    [
        (lambda: qkv.SinusoidalPositions(7), qkv.ArgumentError, "embed_dim=7"),
        (lambda: qkv.SinusoidalPositions(0), qkv.ArgumentError, "embed_dim=0"),
        (lambda: qkv.SinusoidalPositions(8, base=-1.0), qkv.ArgumentError, "base=-1.0"),
        (lambda: qkv.SinusoidalPositions(8)(np.ones((3, 6))), qkv.ShapeError, "(3, 6)"),
        (lambda: qkv.SinusoidalPositions(8)(np.ones(8)), qkv.ShapeError, "(8,)"),
        (lambda: qkv.SinusoidalPositions(8)(np.ones((3, 8), int)), qkv.DTypeError, "int64"),
        (
            lambda: qkv.SinusoidalPositions(8)(np.ones((3, 8)), np.arange(4)),
            qkv.ShapeError,
            "(4,)",
        ),
        (lambda: qkv.LearnedPositions(np.ones(4)), qkv.ShapeError, "(4,)"),
        (lambda: qkv.LearnedPositions([[1.0]]), qkv.DTypeError, "list"),
        (
            lambda: qkv.LearnedPositions(np.ones((4, 8)))(np.ones((5, 8))),
            qkv.ShapeError,
            "0 to 4",
        ),
        *[
            (
                lambda positions=positions: positions(torch.ones(4, 8).to(torch.float8_e5m2)),
                qkv.DTypeError,
                "float8_e5m2",
            )
            for positions in (qkv.LearnedPositions(np.ones((4, 8))), qkv.SinusoidalPositions(8))
        ],
        (
            lambda: qkv.LearnedPositions(np.ones((4, 8)))(np.ones((1, 8)), [-1]),
            qkv.ShapeError,
            "-1 to -1",
        ),
    ],
)
def test_what_cannot_be(make, expected, fact) -> None:
    with pytest.raises(expected) as caught:
        make()
    assert fact in caught.value.fact
    assert caught.value.action


@pytest.mark.parametrize("positions", [None, [0, None], np.array(["2020-01-01"], "datetime64[D]")])
def test_what_is_no_number_has_no_encoding(positions: Any) -> None:
    """NumPy reads None as NaN, and a date as a number of days."""
    with pytest.raises(qkv.DTypeError, match="not integers"):
        qkv.SinusoidalPositions(4).encoding(positions)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_exports_for_any_length_are_refused_in_the_words_of_torch() -> None:
    """The error spoke of a dtype of positions, which nobody had passed."""
    length = torch.export.Dim("length", max=16)
    for positions in (qkv.SinusoidalPositions(8), qkv.LearnedPositions(torch.ones(16, 8))):

        class Added(torch.nn.Module):
            def forward(self, x: torch.Tensor, positions: Any = positions) -> Any:
                return positions(x)

        with pytest.raises(Exception, match="length as dynamic but your code specialized it"):
            torch.export.export(Added(), (torch.ones(2, 5, 8),), dynamic_shapes=({1: length},))
