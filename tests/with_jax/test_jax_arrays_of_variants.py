"""Gradients of arrays of users' own variants in JAX, against autograd of the same scores."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

import jax
import jax.numpy as jnp

import qkv
from arrays_of_variants import EXAMPLES, Computed, Example, NumberBesideArray, expected, operands


def squares(variant: Any) -> Any:
    return jnp.square(qkv.attention(*map(jnp.asarray, operands()), variant)).sum()


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_gradients_of_arrays(example: Example) -> None:
    with jax.enable_x64(True):
        array = jnp.asarray(example.array)
        found = jax.grad(lambda own: squares(example.kind(own)))(array)
    np.testing.assert_allclose(found, expected(example)[1], rtol=1e-11)


def test_what_lower_computes_has_no_gradient() -> None:
    with pytest.raises(Exception, match=r"Computed.lower computes the array"):
        jax.grad(lambda own: squares(Computed(own)))(jnp.ones(2))


class Undeclared:
    """A weight for each head, which the class says nothing of."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def lower(self, builder: Any) -> None:
        builder.mod(builder.score * builder.per_head(self.weight, "weight"))


@pytest.mark.parametrize("transform", [jax.grad, jax.jit, lambda f: jax.jit(jax.grad(f))])
def test_traced_arrays_of_a_class_that_declares_nothing_are_refused(transform: Any) -> None:
    with pytest.raises(qkv.UnsupportedError, match=r"weight of Undeclared is differentiated or tr"):
        transform(lambda own: squares(Undeclared(own)))(jnp.ones(2))


class Constant(NumberBesideArray):
    constant_fields: ClassVar = {"number": "learn it in a ScoreMod"}


def test_a_constant_beside_an_array_that_is_learned() -> None:
    """Every gradient of such a variant was refused, in the name of the constant."""
    example = EXAMPLES["a number beside an array"]
    with jax.enable_x64(True):
        found = jax.grad(lambda own: squares(Constant(own)))(jnp.asarray(example.array))
    np.testing.assert_allclose(found, expected(example)[1], rtol=1e-11)
    with pytest.raises(qkv.UnsupportedError, match=r"number of Constant(.|\n)*in a ScoreMod"):
        jax.grad(lambda number: squares(Constant(jnp.ones(2), number)))(1.5)


def test_a_soft_cap_may_be_traced_and_has_no_gradient() -> None:
    query, key, value = (array.astype(np.float32) for array in operands())

    def capped(cap: Any) -> Any:
        return qkv.attention(*map(jnp.asarray, (query, key, value)), qkv.Softcap(cap))

    for cap in (0.5, 2.0):
        np.testing.assert_array_equal(
            jax.jit(capped)(cap), qkv.attention(query, key, value, qkv.Softcap(cap))
        )
    with pytest.raises(qkv.UnsupportedError, match=r"cap of Softcap(.|\n)*ScoreMod"):
        jax.grad(lambda cap: capped(cap).sum())(2.0)
