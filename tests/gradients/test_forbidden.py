"""What is forbidden reaches no gradient, and what is allowed does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import qkv
from qkv.testing import Case, cases
from qkv.testing.case import Inputs

BACKENDS = ("cpu", "blocked")


def hides(case: Case) -> bool:
    """Whether some pairs are forbidden; rows that share their memory cannot be poisoned."""
    if "float32" not in case.dtypes or case.memory in ("broadcast", "repeated"):
        return False
    allowed = case.truth("float32").allowed
    return bool(allowed.any() and not allowed.all()) and case.query_batch is case.kv_batch is None


HIDING = [case for case in cases() if hides(case)]


def gradients(case: Case, inputs: Inputs, grad_out, backend: str) -> list[np.ndarray]:
    """The gradients in the order (..., heads, length, dim)."""
    _, pullback = qkv.vjp(*inputs.arrays, *inputs.variants, backend=backend, **inputs.keywords)
    found = pullback(case.arrange(grad_out))
    return [case.plain_order(g) for g in (found.query, found.key, found.value)]


def by_kv_head(case: Case, allowed: np.ndarray) -> np.ndarray:
    """(..., kv heads, group, queries, keys)."""
    s = case.shape
    return allowed.reshape(*s.batch_shape, s.num_kv_heads, -1, s.q_len, s.kv_len)


def unchanged(before: np.ndarray, after: np.ndarray, rows: np.ndarray) -> None:
    assert before[rows].tobytes() == after[rows].tobytes()


@pytest.mark.slow
@pytest.mark.usefixtures("masks_unread_and_read")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled("case", HIDING, one_in=36, ids=lambda case: case.name)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_forbidden_keys_and_values(case: Case, backend: str, poison: float) -> None:
    inputs, truth = case.build("float32"), case.truth("float32")
    rng = np.random.default_rng(3)
    grad_out = rng.normal(size=truth.out.shape).astype(np.float32)
    before = gradients(case, inputs, grad_out, backend)
    allowed = truth.allowed
    blind = np.argwhere(~allowed.all(axis=-1))
    hidden = np.flatnonzero(~allowed[tuple(rng.choice(blind))])
    key, value = (case.plain_order(a).copy() for a in (inputs.key, inputs.value))
    key[..., hidden, :], value[..., hidden[::2], :] = poison, -poison
    changed = Inputs(
        inputs.query, case.arrange(key), case.arrange(value), inputs.variants, inputs.keywords
    )
    after = gradients(case, changed, grad_out, backend)
    sees = allowed[..., hidden].any(axis=-1)
    unchanged(before[0], after[0], ~sees)
    # A key feels what happens to the rows that attend to it, and no other.
    felt = by_kv_head(case, allowed & sees[..., None]).any(axis=(-3, -2))
    spared = ~felt
    spared[..., hidden] = False
    for old, new in zip(before[1:], after[1:], strict=True):
        unchanged(old, new, spared)
    if np.isnan(poison) and truth.factors.all() and case.scale != 0:
        constant = any(isinstance(v, qkv.ScoreMod) for v in truth.variants)
        assert constant or np.isnan(after[0][sees]).all(), "NaN did not reach the rows that see it"


@pytest.mark.usefixtures("masks_unread_and_read")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled("case", HIDING, one_in=36, ids=lambda case: case.name)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_queries_that_may_not_see_a_key(case: Case, backend: str, poison: float) -> None:
    inputs, truth = case.build("float32"), case.truth("float32")
    rng = np.random.default_rng(4)
    grad_out = rng.normal(size=truth.out.shape).astype(np.float32)
    before = gradients(case, inputs, grad_out, backend)
    blind = np.argwhere(~truth.allowed.all(axis=-1))
    row = tuple(rng.choice(blind))
    # A case may have made the memory of its arrays read-only.
    query, grad_out = case.plain_order(inputs.query).copy(), grad_out.copy()
    query[row], grad_out[row] = poison, -poison
    changed = Inputs(
        case.arrange(query), inputs.key, inputs.value, inputs.variants, inputs.keywords
    )
    after = gradients(case, changed, grad_out, backend)
    others = np.ones(truth.out.shape[:-1], bool)
    others[row] = False
    unchanged(before[0], after[0], others)
    felt = by_kv_head(case, truth.allowed & ~others[..., None]).any(axis=(-3, -2))
    for old, new in zip(before[1:], after[1:], strict=True):
        unchanged(old, new, ~felt)
    assert np.isnan(after[2][felt]).all() or not truth.factors.all() or np.isinf(poison)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_keys_have_no_gradient(backend: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 40, 8)).astype(np.float32) for _ in range(3))
    mask = rng.random((40, 40)) < 0.5
    mask[[3, 17]] = False
    mask[:, 5] = False
    for sinks in ((), (qkv.Sinks(0.5),)):
        out, pullback = qkv.vjp(q, k, v, mask, *sinks, backend=backend)
        found = pullback(np.ones_like(out), np.ones(out.shape[:-1], np.float32))
        assert not found.query[:, [3, 17]].any()
        assert not found.key[:, 5].any()
        assert not found.value[:, 5].any()
        assert all(np.isfinite(g).all() for g in (found.query, found.key, found.value))


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sink_that_takes_no_share(backend: str, dtype: type) -> None:
    """The gradient of a sink of -inf is 0, in the first row as well, which sees no key."""
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(dtype)
    sinks = qkv.Sinks(np.array([-np.inf, 0.5], dtype))
    out, pullback = qkv.vjp(x, x, x, np.tri(6, k=-1, dtype=bool), sinks, backend=backend)
    gradients = pullback(np.ones_like(out), wrt=[sinks])
    tensor = torch.from_numpy(x).double()
    value = torch.tensor([-torch.inf, 0.5], dtype=torch.float64, requires_grad=True)
    scores = (tensor @ tensor.mT / 2).masked_fill(torch.ones(6, 6).triu(0).bool(), -torch.inf)
    scores = torch.cat([scores, value[:, None, None].expand(2, 6, 1)], -1)
    scores = scores[:, 1:]  # The first row has no weights to differentiate.
    (torch.softmax(scores, -1)[..., :-1] @ tensor).sum().backward()
    assert gradients.of(sinks)[0] == 0
    np.testing.assert_allclose(gradients.of(sinks), value.grad.numpy(), rtol=1e-5)
    assert all(np.isfinite(g).all() for g in (gradients.query, gradients.key, gradients.value))


def test_second_derivatives_of_a_sink_that_takes_no_share() -> None:
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = x.requires_grad_(), torch.tensor([-torch.inf, 0.5]).double().requires_grad_()
    mask = torch.ones(6, 6).tril(-1).bool()
    out = qkv.attention(x, x, x, mask, qkv.Sinks(inputs[1]))
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(of.square().sum() for of in first), inputs)
    assert all(of.isfinite().all() for of in (*first, *second))
    assert [of[1][0].item() for of in (first, second)] == [0, 0]
