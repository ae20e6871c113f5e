"""Calls of tensors on a device that are like an earlier one are not checked again."""

import pytest
import torch
from torch.testing import assert_close

import qkv
import qkv.call.device_call as device_call
from qkv.backends import register, unregister
from qkv.backends.torch import TorchBackend


@pytest.fixture
def checks(monkeypatch) -> list[int]:
    """One entry for each call that is checked."""
    device_call._checked_form.cache_clear()
    checked_problem, seen = device_call.checked_problem, []

    def counted(*args):
        seen.append(1)
        return checked_problem(*args)

    monkeypatch.setattr(device_call, "checked_problem", counted)
    return seen


def drawn(*lengths: int, seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, 3, generator=generator).to(dtype) for n in lengths]


def causal(query, key, value, scale: float = 3**-0.5, first: int = 0) -> torch.Tensor:
    """The formula, with the first query at a position."""
    scores = scale * query @ key.mT
    places = first + torch.arange(query.shape[-2])[:, None]
    scores = scores.masked_fill(torch.arange(key.shape[-2]) > places, -torch.inf)
    return scores.softmax(-1) @ value


def test_calls_of_one_form_are_checked_once_and_read_their_own_tensors(checks) -> None:
    for seed in range(3):
        tensors = drawn(5, 5, 5, seed=seed)
        out = qkv.attention(*tensors, qkv.Causal("start"), backend="torch")
        assert_close(out, causal(*tensors))
    assert len(checks) == 1


def test_what_a_call_means_is_part_of_its_form(checks) -> None:
    tensors = drawn(3, 5, 5, seed=4)
    for _ in range(2):
        for align, first in (("start", 0), ("end", 2)):
            for scale in (0.5, 2.0):
                out = qkv.attention(*tensors, qkv.Causal(align), scale=scale, backend="torch")
                assert_close(out, causal(*tensors, scale, first))
    assert len(checks) == 4
    with pytest.raises(qkv.AmbiguityError):
        qkv.attention(*tensors, qkv.Causal(), backend="torch")
    longer = drawn(4, 6, 6, seed=5)
    out = qkv.attention(*longer, qkv.Causal("end"), scale=2.0, backend="torch")
    assert_close(out, causal(*longer, 2.0, 2))
    single = [t.float() for t in longer]
    out = qkv.attention(*single, qkv.Causal("end"), scale=2.0, backend="torch")
    assert out.dtype == torch.float32


def test_gradients_belong_to_the_tensors_of_their_call(checks) -> None:
    for seed in range(2):
        tensors = [t.requires_grad_() for t in drawn(4, 4, 4, seed=seed)]
        out, _ = qkv.attention(*tensors, qkv.Causal("end"), backend="torch", return_lse=True)
        found = torch.autograd.grad(out.sin().sum(), tensors)
        expected = torch.autograd.grad(causal(*tensors).sin().sum(), tensors)
        assert_close(found, expected)
    assert len(checks) == 1


def test_arrays_of_variants_are_read_each_time(checks) -> None:
    query, key, value = drawn(4, 4, 4, seed=6)
    bias = torch.zeros(4, 4, dtype=torch.float64)
    for _ in range(2):
        out = qkv.attention(query, key, value, bias, backend="torch")
        assert_close(out, (3**-0.5 * query @ key.mT + bias).softmax(-1) @ value)
        bias[:, 1] -= 7.5
    assert len(checks) == 2


def test_another_backend_is_looked_for_when_one_is_registered(checks) -> None:
    class Mine(TorchBackend):
        name = "mine"

        def attend(self, problem, *, lse):
            partial = super().attend(problem, lse=lse)
            partial.out.mul_(2)
            return partial

    tensors = drawn(4, 4, 4, seed=7)
    register(Mine())
    try:
        first = qkv.attention(*tensors, backend="mine")
        assert_close(first, 2 * (3**-0.5 * tensors[0] @ tensors[1].mT).softmax(-1) @ tensors[2])
    finally:
        unregister("mine")
    with pytest.raises(qkv.ArgumentError, match="there is no backend 'mine'"):
        qkv.attention(*tensors, backend="mine")
