"""`merge` of tensors: attention over all keys, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import qkv


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def written_out(query, key, value, layout):
    """torch's formula, over all keys; with lse."""
    if layout == "blhd":
        query, key, value = (t.transpose(-3, -2) for t in (query, key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    out = scores.softmax(-1) @ value
    return (out.transpose(-3, -2) if layout == "blhd" else out), scores.logsumexp(-1)


def joined(query, key, value, layout, backend="auto"):
    """Attention in three parts of keys, one of which is empty, merged."""
    axis = -2 if layout == "bhld" else -3
    sizes = [4, 0, key.shape[axis] - 4]
    parts = zip(key.split(sizes, axis), value.split(sizes, axis), strict=True)
    asked = {"layout": layout, "backend": backend, "return_lse": True}
    return qkv.merge(*(qkv.attention(query, k, v, **asked) for k, v in parts), layout=layout)


def operands(layout, dtype=torch.float64):
    arrays = [normal(2, 3, n, 8, seed=i, dtype=dtype) for i, n in enumerate((5, 11, 11))]
    if layout == "blhd":
        arrays = [t.transpose(-3, -2).contiguous() for t in arrays]
    return [t.requires_grad_() for t in arrays]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_gradients_are_those_over_all_keys(layout: str, backend: str) -> None:
    inputs = operands(layout)
    found, expected = joined(*inputs, layout, backend), written_out(*inputs, layout)
    assert_close(found, expected)
    cotangents = [normal(*t.shape, seed=9) for t in found]
    assert_close(
        torch.autograd.grad(found, inputs, cotangents),
        torch.autograd.grad(expected, inputs, cotangents),
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_float16(layout: str) -> None:
    """Parts are rounded to float16, and so are the results: two units of a number up to 4."""
    inputs = operands(layout, torch.float16)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    found, expected = joined(*inputs, layout), written_out(*wide, layout)
    assert found[0].dtype is torch.float16
    assert found[1].dtype is torch.float32
    unit = 2.0**-9
    assert_close(found[0].double(), expected[0], atol=2 * unit, rtol=0)
    assert_close(found[1].double(), expected[1], atol=1e-5, rtol=0)
    along = torch.ones_like(expected[0])
    gradients = torch.autograd.grad(found[0], inputs, along.half())
    for ours, theirs in zip(gradients, torch.autograd.grad(expected[0], wide, along), strict=True):
        assert ours.dtype is torch.float16
        assert_close(ours.double(), theirs, atol=4 * unit, rtol=0)


def test_rows_without_keys_have_gradient_0() -> None:
    inputs = operands("bhld")
    asked = {"return_lse": True}
    part = qkv.attention(*inputs, qkv.Mask(torch.zeros(5, 11, dtype=torch.bool)), **asked)
    out, lse = qkv.merge(part, part)
    assert torch.isneginf(lse).all()
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("hidden", [torch.nan, torch.inf])
def test_an_allowed_value_that_is_not_finite_is_kept(hidden: float) -> None:
    """The value's share underflows to 0, and 0 times NaN is NaN, as in attention over both keys."""
    seen = torch.ones(1, 1), torch.tensor([1000.0])
    odd = torch.full((1, 1), hidden), torch.tensor([-1000.0])
    for parts in ((seen, odd), (odd, seen)):
        tracked = [tuple(of.clone().requires_grad_() for of in part) for part in parts]
        as_arrays = [tuple(of.numpy() for of in part) for part in parts]
        compiled = torch.compile(qkv.merge, backend="eager", fullgraph=True)
        for merged in (qkv.merge(*tracked), qkv.merge(*as_arrays), compiled(*parts)):
            assert merged[0] != merged[0]


def test_a_part_without_keys_leaves_gradients_finite() -> None:
    given = [
        torch.ones(1, 1),
        torch.ones(1),
        torch.full((1, 1), torch.nan),
        torch.full((1,), -torch.inf),
    ]
    out1, lse1, out2, lse2 = inputs = [of.requires_grad_() for of in given]
    out, lse = qkv.merge((out1, lse1), (out2, lse2))
    gradients = torch.autograd.grad(out.sum() + lse.sum(), inputs)
    assert [of.item() for of in gradients] == [1, 1, 0, 0]


def test_means_of_the_largest_number_are_finite_and_have_gradients() -> None:
    largest = torch.finfo(torch.float32).max
    lses = [3 * normal(300, seed=n, dtype=torch.float32) for n in range(3)]
    outs = [torch.full((300, 1), largest, requires_grad=True) for _ in lses]
    merged, _ = qkv.merge(*zip(outs, lses, strict=True))
    assert merged.isfinite().all()
    shares = torch.stack(lses).double().softmax(0).float()
    gradients = torch.autograd.grad(merged, outs, torch.ones(300, 1))
    assert_close(torch.stack(gradients)[..., 0], shares)


class Joined(torch.nn.Module):
    def forward(self, *inputs: torch.Tensor) -> Any:
        return joined(*inputs, "bhld")


WAYS: dict[str, Callable[..., Any]] = {
    "jit": lambda *t: torch.jit.trace(Joined(), t, check_trace=False),
    "real": lambda *t: make_fx(Joined())(*t),
    "fake": lambda *t: make_fx(Joined(), tracing_mode="fake")(*t),
    "symbolic": lambda *t: make_fx(Joined(), tracing_mode="symbolic")(*t),
    "exported": lambda *t: torch.export.export(Joined(), t, strict=False).module(),
    "strict": lambda *t: torch.export.export(Joined(), t, strict=True).module(),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_graphs_hold_what_is_computed(way: str) -> None:
    """Results were constants of traces with real tensors, and an error of those with others."""
    inputs = [t.detach() for t in operands("bhld")]
    graph = WAYS[way](*inputs)
    others = [t.cos() for t in inputs]
    assert_close(tuple(graph(*others)), written_out(*others, "bhld"))


def test_tensors_without_values() -> None:
    with FakeTensorMode():
        out, lse = joined(*[torch.empty(2, 3, n, 8) for n in (5, 11, 11)], "bhld")
    assert (out.shape, lse.shape) == ((2, 3, 5, 8), (2, 3, 5))
    real = qkv.attention(*[torch.ones(2, 3, 5, 8)] * 3, return_lse=True)
    with pytest.raises(qkv.UnsupportedError, match="fake tensors, which have no values"):
        qkv.merge((out, lse), real)


def test_a_first_part_that_would_lose_a_gradient_is_refused() -> None:
    """The result was an array of NumPy, without an error."""
    inputs = operands("bhld")
    part = qkv.attention(*inputs, return_lse=True)
    of_numpy = tuple([t.detach().numpy() for t in part])
    with pytest.raises(qkv.UnsupportedError, match="torch differentiates or traces out of a part"):
        qkv.merge(of_numpy, part)
    out, _ = qkv.merge(part, of_numpy)
    found = torch.autograd.grad(out.sum(), inputs[2])
    right = torch.autograd.grad(written_out(*inputs, "bhld")[0].sum() / 2, inputs[2])
    assert_close(found, right)


def test_tensors_beside_what_jax_differentiates() -> None:
    jax = pytest.importorskip("jax", reason="its arrays stand beside tensors: pip install jax")
    inputs = [t.detach().float() for t in operands("bhld")]
    part = qkv.attention(*inputs, return_lse=True)
    query, key, value = (jax.numpy.asarray(t.numpy()) for t in inputs)

    def sum_of_merged(value: Any) -> Any:
        return qkv.merge(qkv.attention(query, key, value, return_lse=True), part)[0].sum()

    leaf = inputs[2].requires_grad_()
    right = torch.autograd.grad(written_out(*inputs, "bhld")[0].sum() / 2, leaf)
    np.testing.assert_allclose(jax.grad(sum_of_merged)(value), right[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lse", [None, 3.0, [1.0]], ids=str)
@pytest.mark.parametrize("wanted", [False, True])
def test_an_lse_that_is_no_array_is_named(lse: object, wanted: bool) -> None:
    out = torch.ones(2, 3, 5, 8).requires_grad_(wanted)
    with pytest.raises(qkv.DTypeError, match=r"lse is .*, not an array"):
        qkv.merge((out, lse), (out, out[..., 0]))
