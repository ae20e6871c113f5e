"""Gradients of arrays of users' own variants, against torch's autograd of the same scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkv
from arrays_of_variants import EXAMPLES, Computed, Example, expected, operands

of_examples = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
of_backends = pytest.mark.parametrize("backend", ["auto", "blocked", "torch"])
COMPUTED = r"Computed.lower computes the array(.|\n)*2 \* builder.per_head"


@of_examples
@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_gradients_of_numpy_arrays(example: Example, backend: str) -> None:
    variant = example.kind(example.array)
    out, pullback = qkv.vjp(*operands(), variant, backend=backend)
    gradients = pullback(2 * out, wrt=[variant])
    found = gradients.of(variant, example.array)
    np.testing.assert_allclose(out, expected(example)[0], rtol=1e-12)
    np.testing.assert_allclose(found, expected(example)[1], rtol=1e-11)
    assert found.shape == np.shape(example.array)


@of_examples
def test_directional_derivatives_of_numpy_arrays(example: Example) -> None:
    """The sum of squares changes by the product of a direction and the gradient."""
    variant = example.kind(example.array)
    along = np.random.default_rng(7).normal(size=np.shape(example.array))
    tangents = qkv.Tangents(of_variants=[(variant, example.array, along)])
    out, change = qkv.jvp(*operands(), variant, tangents=tangents)
    right = np.vdot(along, expected(example)[1])
    np.testing.assert_allclose(np.vdot(2 * out, change), right, rtol=1e-11)


@of_examples
@of_backends
def test_gradients_of_tensors(example: Example, backend: str) -> None:
    array = torch.tensor(example.array, requires_grad=True)
    out = qkv.attention(*map(torch.tensor, operands()), example.kind(array), backend=backend)
    (found,) = torch.autograd.grad(out.square().sum(), array)
    np.testing.assert_allclose(out.detach(), expected(example)[0], rtol=1e-12)
    np.testing.assert_allclose(found, expected(example)[1], rtol=1e-11)


@of_backends
def test_what_lower_computes_is_read_and_has_no_gradient(backend: str) -> None:
    """The gradient of a computed array was taken for that of the array it was computed from, and on
    a device that array was read in its place."""
    doubled = Example(Computed, np.array([0.3, 0.7]), lambda a, s, d: 2 * a[:, None, None] * s)
    tensors = list(map(torch.tensor, operands()))
    array = torch.tensor(doubled.array)
    out = qkv.attention(*tensors, Computed(array), backend=backend)
    np.testing.assert_allclose(out, expected(doubled)[0], rtol=1e-12)
    learned = Computed(array.requires_grad_())
    with pytest.raises(qkv.UnsupportedError, match=COMPUTED):
        qkv.attention(*tensors, learned, backend=backend).sum().backward()


def test_what_lower_computes_has_no_gradient_in_numpy() -> None:
    variant = Computed(np.array([0.3, 0.7]))
    out, pullback = qkv.vjp(*operands(), variant)
    gradients = pullback(out, wrt=[variant])
    for names in ((variant,), (variant, variant.array)):
        with pytest.raises(qkv.UnsupportedError, match=COMPUTED):
            gradients.of(*names)
    for own in ((variant, None, variant.array), (variant, variant.array, variant.array)):
        with pytest.raises(qkv.UnsupportedError, match=COMPUTED):
            qkv.jvp(*operands(), variant, tangents=qkv.Tangents(of_variants=[own]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_slopes_of_alibi_have_gradients_of_their_own_type(dtype: str) -> None:
    alibi: Any = qkv.ALiBi(np.array([0.5, 0.25], dtype))
    out, pullback = qkv.vjp(*operands(), alibi)
    found = pullback(2 * out, wrt=[alibi]).of(alibi)
    scores = Example(qkv.ALiBi, np.array([0.5, 0.25]), lambda a, s, d: s - a[:, None, None] * d)
    np.testing.assert_allclose(found, expected(scores)[1], rtol=1e-3)
    assert found.dtype == dtype
