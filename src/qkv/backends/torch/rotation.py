"""Rows of query and key rotated by their positions (RoPE), as operations of torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qkv.arrays.torch_arrays import TorchArrays
from qkv.problem.spec import Problem

__all__ = ["rotated"]


def rotated(problem: Problem, rows: Tensor, side: str) -> Tensor:
    """Rows `(batch, heads, length, head_dim)` of one side, "q" or "kv", in their own type."""
    rotation, angles = problem.spec.rotation, problem.operands.angles
    if rotation is None or angles is None:
        return rows
    cos_sin = [angles.cos_sin(side, b) for b in range(angles.rows(side))]
    cos, sin = (
        TorchArrays().restore(np.stack(part)).to(rows.device).to(rows.dtype)[:, None]
        for part in zip(*cos_sin, strict=True)
    )
    n = rotation.rotary_dim
    leading, rest = rows[..., :n], rows[..., n:]
    if rotation.layout == "half_split":
        a, b = leading.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)
    a, b = leading[..., ::2], leading[..., 1::2]
    pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([pairs, rest], -1)
