"""One tensor in several places of a compiled call, and arrays that change before the backward."""

import numpy as np
import pytest
import torch

import qkv

pytestmark = [
    # Dynamo makes such objects itself.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_one_tensor_as_query_key_and_value_of_compiled_code() -> None:
    """Dynamo takes no tensor twice where gradients are wanted."""
    torch.compiler.reset()
    weights = normal(1, 2, 20, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (qkv.attention(x, x, x) * weights).sum() + qkv.attention(x, 2 * x, x).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (loss, compiled):
        leaf = normal(1, 2, 20, 8).requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", ["mask", "broadcast mask", "bias", "key"])
def test_an_array_that_changes_before_the_backward_pass(kind) -> None:
    """The gradients are those of the arrays as they were; of a tensor, torch notices."""
    rng = np.random.default_rng(0)

    def gradient(change: bool) -> torch.Tensor:
        query = normal(1, 2, 20, 8).requires_grad_()
        array = {
            "mask": np.tril(np.ones((20, 20), bool)), "broadcast mask": np.arange(20)[None] < 9,
            "bias": np.linspace(0, 1, 400, dtype=np.float32).reshape(20, 20),
            "key": np.linspace(0, 1, 320, dtype=np.float32).reshape(1, 2, 20, 8),
        }[kind]  # fmt: skip
        given = np.broadcast_to(array, (20, 20)) if kind == "broadcast mask" else array
        key, variants = (given, ()) if kind == "key" else (query, (given,))
        out = qkv.attention(query, key, query, *variants)
        if change:
            array[...] = rng.random(array.shape) > 0.5
        out.square().sum().backward()
        assert query.grad is not None
        return query.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)
