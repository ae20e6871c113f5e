"""Decoding steps of caches in compiled functions: the graph ends there, they run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import qkv

GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randn(2, 2, 16, 8, generator=GENERATOR, dtype=torch.float64)
CACHES: dict[str, Callable[[], Any]] = {
    "contiguous": qkv.cache.ContiguousCache,
    "rolling": lambda: qkv.cache.RollingCache(16),
    "paged": lambda: qkv.cache.PagedCache(page_size=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("variants", [(), (qkv.Causal(),)], ids=["plain", "causal"])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.one_in(2)
def test_steps_are_those_of_the_whole(name: str, variants: tuple[Any, ...]) -> None:
    """Steps once failed at the eleventh token, and with pages at the first."""
    torch.compiler.reset()
    cache = CACHES[name]()
    step = torch.compile(
        lambda x: cache.append(x, x).attention(2 * x, *variants) + 1, backend="eager"
    )
    steps = [step(TOKENS[:, :, n : n + 1]) for n in range(TOKENS.shape[2])]
    right = torch.nn.functional.scaled_dot_product_attention(
        2 * TOKENS, TOKENS, TOKENS, is_causal=True
    )
    assert_close(torch.cat(steps, 2), right + 1)


def test_in_one_graph_an_error_says_so() -> None:
    torch.compiler.reset()
    cache = qkv.cache.ContiguousCache()
    step = torch.compile(lambda x: cache.append(x, x).attention(x), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(TOKENS[:, :, :1])
