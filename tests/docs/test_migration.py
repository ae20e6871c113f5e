"""Each pair of calls of the migration page gives the same numbers."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flax", reason="the page has a section on Flax")

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
BLOCK = re.compile(r"```python( compare)?\n(.*?)```", re.DOTALL)


def softmax_attention(q, k, v, allowed, bias=0.0, softcap=0.0):
    """Attention by its definition, in float64; `(heads, length, dim)`."""
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v.double()).to(q.dtype)


def distance(q_len: int, kv_len: int, end: bool) -> torch.Tensor:
    """`q_pos - kv_pos`, counted from the end as flash-attn does, or from the start."""
    shift = kv_len - q_len if end else 0
    return torch.arange(q_len)[:, None] + shift - torch.arange(kv_len)


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """`(batch, length, heads, dim)`; what flash-attn's docstring says."""
    d = distance(q.shape[1], k.shape[1], end=True)
    left, right = window_size
    allowed = torch.ones_like(d, dtype=torch.bool)
    allowed &= (d <= left) if left >= 0 else True
    allowed &= (d >= -right) if right >= 0 else True
    allowed &= (d >= 0) if causal else True
    bias = 0.0 if alibi_slopes is None else -alibi_slopes[:, None, None] * d.abs()
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    return softmax_attention(*rows, allowed, bias, softcap).transpose(1, 2)


def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=False):
    assert max_q >= int(cu_q.diff().max())
    assert max_k >= int(cu_k.diff().max())
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], causal)[0]
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
    ]
    return torch.cat(parts)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, causal=False):
    rows = [
        flash_attn_func(q[b : b + 1], k_cache[b : b + 1, :n], v_cache[b : b + 1, :n], causal)
        for b, n in enumerate(cache_seqlens.tolist())
    ]
    return torch.cat(rows)


class LowerTriangularMask:
    def allowed(self, q_len: int, kv_len: int) -> torch.Tensor:
        return distance(q_len, kv_len, end=False) >= 0


class BlockDiagonalMask:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    @classmethod
    def from_seqlens(cls, lengths: list[int]) -> BlockDiagonalMask:
        return cls(lengths)

    def allowed(self, q_len: int, kv_len: int) -> torch.Tensor:
        return torch.block_diag(*(torch.ones(n, n) for n in self.lengths)).bool()


def memory_efficient_attention(q, k, v, attn_bias):
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    return softmax_attention(*rows, attn_bias.allowed(q.shape[1], k.shape[1])).transpose(1, 2)


STAND_INS: dict[str, dict[str, Any]] = {
    "flash_attn": {
        f.__name__: f for f in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    },
    "xformers": {},
    "xformers.ops": {
        "LowerTriangularMask": LowerTriangularMask,
        "memory_efficient_attention": memory_efficient_attention,
    },
    "xformers.ops.fmha": {},
    "xformers.ops.fmha.attn_bias": {"BlockDiagonalMask": BlockDiagonalMask},
}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stand-ins that follow their documentation replace libraries that are not installed."""
    missing = {n for n in ("flash_attn", "xformers") if importlib.util.find_spec(n) is None}
    for name, members in STAND_INS.items():
        if name.partition(".")[0] in missing:
            module = types.ModuleType(name)
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
def test_each_pair_of_calls_agrees() -> None:
    text = PAGE.read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    compared = 0
    for compare, code in BLOCK.findall(text):
        with warnings.catch_warnings():
            # flex_attention would rather be compiled.
            warnings.filterwarnings("ignore", message="flex_attention called without")
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
            exec(compile(code, f"{PAGE.name}: {code[:60]!r}", "exec"), scope)
        if compare:
            theirs, ours = (np.asarray(scope[name]) for name in ("theirs", "ours"))
            assert theirs.shape == ours.shape, code
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5, err_msg=code)
            compared += 1
    assert compared == text.count("```python compare") > 15


def test_every_section_has_its_calls() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    names = [section.splitlines()[0] for section in sections]
    assert [n.split()[0].strip(":") for n in names] == [
        "torch", "torch", "flash-attn", "xformers", "JAX", "Flax", "Hugging"
    ]  # fmt: skip
    assert all("```" in section for section in sections)
