"""The device backend that docs/add-a-backend.md walks through, held to the cases."""

from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from qkv.backends import DeviceBackend, register, unregister
from qkv.testing import CHECKS, Case, cases, check_case

PAGE = Path(__file__).parents[2] / "docs" / "add-a-backend.md"
TRIPLES = [
    pytest.param(case, dtype, what, id=f"{case.name}-{dtype}-{what}")
    for case in cases()
    for dtype in case.dtypes
    for what in CHECKS
    if what != "inspection"  # the same as of every backend that is not `Inspectable`
]


@pytest.fixture(scope="module")
def toy():
    blocks = PAGE.read_text(encoding="utf-8").split("```python\n")
    source = next(block for block in blocks if "class ToyDevice" in block).split("```")[0]
    known: dict[str, Any] = {}
    exec(source, known)
    unregister("toy")
    return known["ToyDevice"]()


@pytest.mark.slow
@pytest.mark.sampled(("case", "dtype", "what"), TRIPLES, one_in=12)
def test_a_device_backend(toy, case: Case, dtype: str, what: str) -> None:
    assert isinstance(toy, DeviceBackend)
    check_case(toy, case, dtype, what=what)


def test_it_is_given_tensors_and_keeps_gradients(toy) -> None:
    register(toy)
    try:
        x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        bias = torch.zeros(2, 5, 5, dtype=torch.float64, requires_grad=True)
        found = qkv.attention(x, x, x, bias, backend="toy")
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, bias)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(out.square().sum(), bias)[0] for out in (found, expected)]
        torch.testing.assert_close(*gradients)
        assert qkv.plan(x, x, x, backend="toy").backend == "toy"
        with pytest.raises(qkv.UnsupportedError, match="toy"):
            qkv.attention(x.numpy(), x.numpy(), x.numpy(), backend="toy")
    finally:
        unregister("toy")
