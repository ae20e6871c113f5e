"""Keys and values in pages, or quantised, in tensors: read in place, and never differentiated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import qkv

GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(1, 2, 4, 8, generator=GENERATOR)
PAGES = torch.randn(3, 2, 2, 8, generator=GENERATOR)
TABLE = torch.tensor([[2, 0]])


def stored(kind: str, pages: Any) -> Any:
    if kind == "paged":
        return qkv.Paged(pages, TABLE)
    scales = pages[:1].abs().amax(-1) / 127
    values = (pages[:1] / scales[..., None]).round().to(torch.int8)
    return qkv.Quantized(values, scales)


@pytest.mark.parametrize("kind", ["paged", "quantised"])
def test_stored_rows_are_computed_with(kind: str) -> None:
    rows = stored(kind, PAGES)
    whole = torch.cat([PAGES[2], PAGES[0]], 1)[None] if kind == "paged" else PAGES[:1]
    found = qkv.attention(QUERY, rows, rows)
    assert isinstance(found, torch.Tensor)
    error = 1e-6 if kind == "paged" else 0.05
    assert_close(found, qkv.attention(QUERY, whole, whole), rtol=0, atol=error)
    with torch.no_grad():
        assert torch.equal(found, qkv.attention(QUERY.clone().requires_grad_(), rows, rows))


@pytest.mark.parametrize("followed", ["query", "rows", "value"])
@pytest.mark.parametrize("kind", ["paged", "quantised"])
def test_gradients_are_refused(kind: str, followed: str) -> None:
    """An error is better than an output that requires no gradient."""
    query, pages = QUERY.clone(), PAGES.clone()
    rows = stored(kind, pages.requires_grad_(followed == "rows"))
    query.requires_grad_(followed == "query")
    value = rows
    if followed == "value":
        value = torch.zeros(1, 2, 4 if kind == "paged" else 2, 8, requires_grad=True)
    with pytest.raises(qkv.UnsupportedError, match=r"no gradient(.|\n)*torch.no_grad"):
        qkv.attention(query, rows, value)
    if followed == "query":
        with pytest.raises(qkv.UnsupportedError, match="no gradient"):
            torch.func.grad(lambda q: qkv.attention(q, rows, rows).sum())(query.detach())
