"""Gradients through torch's own fused kernels: those of the formula, to any order, with same bits.

They are asked for on the CPU with `backend="torch"`, and run on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkv

# torch's compiler uses what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KINDS = {"plain": (), "causal": (qkv.Causal(),)}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def operands(device: str, dtype: torch.dtype = torch.float64, rows: int = 7) -> list[torch.Tensor]:
    """Query with two heads for each of key and value, which have another width."""
    shapes = (2, 4, rows, 8), (2, 2, rows, 8), (2, 2, rows, 8)
    return [
        normal(*shape, seed=n, dtype=dtype).to(device).requires_grad_()
        for n, shape in enumerate(shapes)
    ]


def ours(kind: str, **options: Any) -> Callable[..., Any]:
    return lambda *t: qkv.attention(*t, *KINDS[kind], backend="torch", **options)


def written_out(kind: str) -> Callable[..., Any]:
    def function(query: Any, key: Any, value: Any) -> Any:
        key, value = (t.repeat_interleave(2, 1) for t in (key, value))
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if kind == "causal":
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1) @ value

    return function


def runs_kernel(function: Callable[..., Any], *inputs: Any) -> bool:
    """Whether a call runs torch's own attention."""
    function(*inputs)  # A compiler runs it while it traces.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        function(*inputs)
    return any("scaled_dot_product" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_formula(
    device: str, kind: str, layout: str, dtype: torch.dtype
) -> None:
    inputs = operands(device, dtype, rows=70)
    cotangent = normal(2, 4, 70, 8, seed=3, dtype=dtype).to(device)
    given = [t.swapaxes(1, 2).contiguous() if layout == "blhd" else t for t in inputs]
    out = ours(kind, layout=layout)(*given)
    out = out.swapaxes(1, 2) if layout == "blhd" else out
    assert runs_kernel(ours(kind, layout=layout), *given)
    found = torch.autograd.grad(out, inputs, cotangent)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(written_out(kind)(*exact), exact, cotangent.double())
    rounding = 8 * torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert_close(a.double(), b, rtol=rounding, atol=rounding * b.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_derivatives(device: str, kind: str) -> None:
    inputs = operands(device, rows=4)
    assert gradcheck(ours(kind), inputs)
    assert gradgradcheck(ours(kind), inputs, fast_mode=True)
    for n, t in enumerate(inputs):  # Gradients of one operand alone.
        some = [s.detach().requires_grad_(m == n) for m, s in enumerate(inputs)]
        (one,) = torch.autograd.grad(ours(kind)(*some).sin().sum(), some[n])
        (right,) = torch.autograd.grad(written_out(kind)(*inputs).sin().sum(), t)
        assert_close(one, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_every_run(device: str, kind: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = operands(device, dtype, rows=1100)
    runs = [torch.autograd.grad(ours(kind)(*inputs).sin().sum(), inputs) for _ in range(3)]
    assert not torch.are_deterministic_algorithms_enabled()
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spoiled", ["query", "key", "value", "cotangent"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e38], ids=str)
def test_what_is_forbidden_reaches_no_gradient(device: str, spoiled: str, number: float) -> None:
    """Row 3 of a causal call: queries before it, and keys after it, do not meet it."""
    names = ["query", "key", "value", "cotangent"]
    inputs = [
        t.detach().float() for t in (*operands(device), normal(2, 4, 7, 8, seed=3).to(device))
    ]

    def gradients(value: float) -> Any:
        given = [t.clone() for t in inputs]
        given[names.index(spoiled)][:, :, 3] = value
        *leaves, cotangent = given
        leaves = [t.requires_grad_() for t in leaves]
        return torch.autograd.grad(ours("causal")(*leaves), leaves, cotangent)

    with_it, without = gradients(number), gradients(0.0)
    rows = slice(0, 3) if spoiled in ("key", "value") else slice(4, None)
    if spoiled in ("key", "value"):  # Earlier queries see earlier keys alone.
        assert_close(with_it[0][:, :, rows], without[0][:, :, rows])
    else:  # Later keys are seen by later queries alone.
        for n in (1, 2):
            assert_close(with_it[n][:, :, rows], without[n][:, :, rows])


@pytest.mark.parametrize("device", DEVICES)
def test_checkpoints_and_compilers(device: str) -> None:
    inputs = operands(device)
    expected = torch.autograd.grad(written_out("causal")(*inputs).sin().sum(), inputs)
    out = checkpoint(ours("causal"), *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sin().sum(), inputs), expected, strict=True):
        assert_close(a, b)
    torch.compiler.reset()
    compiled = torch.compile(ours("plain"), fullgraph=True, backend="aot_eager")
    assert runs_kernel(compiled, *inputs)
    expected = torch.autograd.grad(written_out("plain")(*inputs).sin().sum(), inputs)
    for a, b in zip(
        torch.autograd.grad(compiled(*inputs).sin().sum(), inputs), expected, strict=True
    ):
        assert_close(a, b)
