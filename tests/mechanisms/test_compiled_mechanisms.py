"""Mechanisms inside of a graph of torch's compiler."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from qkv import mechanisms

KINDS = (
    mechanisms.Linear, mechanisms.Mamba, mechanisms.GatedDelta, mechanisms.KVCacheDecoding,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache")
def test_a_graph_has_the_output_and_gradient_of_the_mechanism(kind) -> None:
    mechanism = kind(4)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: mechanism(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(compiled(x), mechanism(x))
    x.requires_grad_()
    (found,) = torch.autograd.grad(compiled(x).sin().sum(), x)
    (expected,) = torch.autograd.grad(mechanism(x).sin().sum(), x)
    assert_close(found, expected)
