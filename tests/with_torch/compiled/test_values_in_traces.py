"""What reads values is refused where torch keeps values in its traces, not made a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import qkv
from qkv.cache import ContiguousCache

READERS: dict[str, Callable[..., Any]] = {
    "vjp": lambda q, k, v: qkv.vjp(q, k, v)[0],
    "jvp": lambda q, k, v: qkv.jvp(q, k, v, tangents=qkv.Tangents(query=q, key=k, value=v)),
    "inspect": lambda q, k, v: qkv.inspect(q, k, v).output,
    "append": lambda q, k, v: ContiguousCache().append(k, v).attention(q),
}
TRACES: dict[str, Callable[..., Any]] = {
    "make_fx": lambda f, t: make_fx(f)(*t),
    "make_fx before dispatch": lambda f, t: make_fx(f, pre_dispatch=True)(*t),
    "jit.trace": lambda f, t: torch.jit.trace(f, t, check_trace=False),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("reader", READERS)
def test_values_are_not_read_into_a_trace(reader: str, trace: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = tuple(torch.randn(1, 2, 5, 8, generator=generator) for _ in range(3))
    with pytest.raises(qkv.errors.UnsupportedError, match="a constant of the trace"):
        TRACES[trace](READERS[reader], tensors)
    READERS[reader](*tensors)
