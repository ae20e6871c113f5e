"""torch's own fused kernels, where they mean exactly the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qkv.backends.torch.attention import hides_values, needs_derivatives
from qkv.partial import Partial
from qkv.problem.expressions import TRUE, Op, Var
from qkv.problem.spec import Problem

__all__ = ["attend_fused", "is_fused"]

_CAUSAL = Op("le", "bool", (Var("kv_index"), Var("q_index")))


def is_fused(problem: Problem) -> bool:
    """Whether a fused kernel of torch means the same.

    Without a mask, or with a causal one that hides no NaN. Fused kernels have no second derivative,
    none in forward mode, and no batches.
    """
    spec, given = problem.spec, problem.operands.device_arrays
    query, key, value = given["query"], given["key"], given["value"]
    if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, spec.v_head_dim):
        return False
    if spec.scores or spec.rotation or spec.sinks or spec.dropout:
        return False
    if needs_derivatives(query, key, value):
        return False
    if spec.mask == TRUE:
        return True
    if spec.mask != _CAUSAL or spec.q_len != spec.kv_len or hides_values(query, key, value):
        return False
    return bool(key.isfinite().all()) and bool(value.isfinite().all())


def attend_fused(problem: Problem) -> Partial:
    """The output alone; lse has no values."""
    spec, given = problem.spec, problem.operands.device_arrays
    query, key, value = (
        given[name].expand(*spec.batch_shape, *given[name].shape[-3:])
        for name in ("query", "key", "value")
    )
    out: Any = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=spec.mask != TRUE,
        scale=problem.operands.scale,
        enable_gqa=spec.group_size > 1,
    )
    return Partial(out, np.empty(0))
