"""Errors name the array that cannot be read, and advise code that can be written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import qkv

X = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
ALLOWED = torch.ones(4, 4, dtype=torch.bool)

KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[1, :2]]),
}
PLACES: dict[str, tuple[torch.Tensor, Callable[[Any], tuple[Any, ...]]]] = {
    "mask": (ALLOWED, lambda t: (t,)),
    "bias": (ROWS, lambda t: (t,)),
    "an array of Mask": (ALLOWED, lambda t: (qkv.Mask(t),)),
    "an array of Bias": (ROWS, lambda t: (qkv.Bias(t),)),
    "an array of Sinks": (ROWS[:2], lambda t: (qkv.Sinks(t),)),
    "an array of BlockSparse": (ALLOWED, lambda t: (qkv.BlockSparse(t, 2, 2),)),
}
DOORS: dict[str, Callable[..., Any]] = {
    "attention": lambda *v: qkv.attention(X, X, X, *v),
    "attention with gradients": lambda *v: qkv.attention(X.clone().requires_grad_(), X, X, *v),
    "attention of arrays": lambda *v: qkv.attention(*[X.numpy()] * 3, *v),
    "inspect": lambda *v: qkv.inspect(X, X, X, *v),
    "explain": lambda *v: qkv.explain(X, X, X, *v),
    "plan": lambda *v: qkv.plan(X, X, X, *v),
    "prepare": lambda *v: qkv.prepare(X, X, X, *v),
    "vjp": lambda *v: qkv.vjp(X, X, X, *v),
}


def require_code(message: str) -> None:
    """No code in a message is of words that are not a name."""
    assert not re.search(r"\b(an?|the|of|bare) \w+\.\w+\(|\(an? ", message), message


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", PLACES)
@pytest.mark.parametrize("door", DOORS)
def test_arrays_of_variants(door: str, role: str, kind: str) -> None:
    of, variants = PLACES[role]
    given = variants(KINDS[kind](of))
    with pytest.raises(qkv.QkvError) as found:
        DOORS[door](*given)
    assert found.value.fact.startswith(f"{role} is ")
    require_code(str(found.value))


@pytest.mark.parametrize("role", ["bias", "an array of Bias", "an array of Sinks"])
@pytest.mark.parametrize("door", DOORS)
def test_arrays_of_a_type_that_numpy_lacks(door: str, role: str) -> None:
    of, variants = PLACES[role]
    with pytest.raises(qkv.DTypeError, match=f"^{role} has dtype torch.float8") as found:
        DOORS[door](*variants(of.to(torch.float8_e4m3fn)))
    require_code(str(found.value))


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:.* is not implemented in __torch_dispatch__")
@pytest.mark.parametrize("door", ["attention", "attention with gradients"])
def test_a_masked_tensor_has_a_type_that_numpy_has(door: str) -> None:
    """The advice was to convert it to the type that it has."""
    with pytest.raises(qkv.DTypeError, match="bias is a MaskedTensor whose memory cannot be read"):
        DOORS[door](torch.masked.masked_tensor(ROWS, ALLOWED))


@pytest.mark.parametrize("kind", ["meta", "sparse"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("door", [qkv.inspect, qkv.vjp, qkv.explain])
def test_operands(door: Callable[..., Any], place: int, kind: str) -> None:
    given = [X, X, X]
    given[place] = KINDS[kind](X)
    with pytest.raises(qkv.QkvError) as found:
        door(*given)
    require_code(str(found.value))
    assert "cpu()" not in str(found.value)  # Of tensors without values it is an error.


def test_masks_among_masks() -> None:
    with pytest.raises(qkv.UnsupportedError, match="mask is on meta, where tensors have no values"):
        qkv.attention(X, X, X, qkv.Causal() | ALLOWED.to("meta"))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_sparse_or_quantised_gets_one_thing_to_do() -> None:
    quantised = torch.quantize_per_tensor(ROWS, 0.1, 0, torch.qint8)
    for array, action in (
        (ROWS.to_sparse(), "Pass bias.to_dense()."),
        (quantised, "Pass variant.dequantize()."),
    ):
        with pytest.raises(qkv.DTypeError) as found:
            qkv.attention(X, X, X, array)
        assert found.value.action == action


def test_masked_arrays_of_numpy() -> None:
    hidden = np.ma.masked_array(ROWS.numpy(), ROWS.numpy() > 0)
    for query in (X, X.numpy()):
        with pytest.raises(qkv.DTypeError) as found:
            qkv.attention(query, query, query, qkv.Bias(hidden))
        assert "an array of Bias is a masked array" in str(found.value)
        assert "Pass array.data" in str(found.value)
