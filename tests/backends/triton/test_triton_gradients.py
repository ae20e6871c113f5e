"""Gradients by kernels in Triton, of tables and of gradients, beside formulas in float64."""

import pytest
import torch
from torch.testing import assert_close

import qkv
from devices import DEVICE

HEADS, KV_HEADS, Q_LEN, KV_LEN = 4, 2, 37, 45
SHAPES = {
    "query": (2, HEADS, Q_LEN, 24), "key": (2, KV_HEADS, KV_LEN, 24),
    "value": (2, KV_HEADS, KV_LEN, 20), "bias": (HEADS, Q_LEN, KV_LEN), "slopes": (HEADS,),
    "sinks": (HEADS,),
}  # fmt: skip


def drawn(dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    numbers = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {n: t.to(device, dtype).requires_grad_() for n, t in numbers.items()}


def written_out(query, key, value, bias, slopes, sinks):
    """Causal attention with a bias, slopes and sinks; the last query stands at the last key."""
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
    places = torch.arange(Q_LEN)[:, None] + KV_LEN - Q_LEN
    keys = torch.arange(KV_LEN)
    scores = query @ key.mT * query.shape[-1] ** -0.5 + bias
    scores = scores - slopes[:, None, None] * (places - keys).abs()
    scores = scores.masked_fill(keys > places, -torch.inf)
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., :-1] @ value, scores.logsumexp(-1)


def by_kernels(query, key, value, bias, slopes, sinks):
    variants = qkv.Causal("end"), bias, qkv.ALiBi(slopes), qkv.Sinks(sinks)
    return qkv.attention(query, key, value, *variants, backend="triton", return_lse=True)


def gradients(function, inputs, wanted, *, twice: bool):
    out, lse = function(**inputs)
    along = [inputs[name] for name in wanted]
    found = torch.autograd.grad(out.square().sum() + lse.sin().sum(), along, create_graph=twice)
    if twice:
        found = torch.autograd.grad(sum(g.sin().sum() for g in found), along)
    return (out, lse, *found)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    "wanted",
    [["query", "key", "value", "sinks"], ["key"], list(SHAPES)],
    ids=["operands and sinks", "keys alone", "tables too"],
)
def test_gradients_are_those_of_the_formula(wanted: list[str], twice: bool) -> None:
    own, exact = drawn(torch.float32, DEVICE), drawn(torch.float64)
    for name in set(SHAPES) - set(wanted):
        own[name], exact[name] = own[name].detach(), exact[name].detach()
    found = gradients(by_kernels, own, wanted, twice=twice)
    expected = gradients(written_out, exact, wanted, twice=twice)
    for a, b in zip(found, expected, strict=True):
        assert_close(a.cpu().double(), b, rtol=3e-5, atol=3e-5 * b.abs().max().item())


def test_an_output_without_a_cotangent_has_no_part() -> None:
    own, exact = drawn(torch.float32, DEVICE), drawn(torch.float64)
    names = ["query", "key", "sinks"]
    found = torch.autograd.grad(by_kernels(**own)[1].sum(), [own[n] for n in names])
    expected = torch.autograd.grad(written_out(**exact)[1].sum(), [exact[n] for n in names])
    for a, b in zip(found, expected, strict=True):
        assert_close(a.cpu().double(), b, rtol=3e-5, atol=3e-5)


def test_one_key_has_all_the_weight_whatever_its_score() -> None:
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(1, 2, n, 40, generator=generator) for n in (50, 1, 1)]
    query, key, value = (t.to(DEVICE).requires_grad_() for t in inputs)
    out = qkv.attention(query, key, value, qkv.Softcap(3.0), backend="triton")
    for gradient in torch.autograd.grad(out.sin().sum(), (query, key)):
        assert bool((gradient == 0).all())
