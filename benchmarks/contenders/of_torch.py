"""torch: `scaled_dot_product_attention`, and `flex_attention` compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders import Prepared
from benchmarks.problems.reference import Inputs
from benchmarks.problems.rules import Rule
from benchmarks.problems.workloads import Workload
from qkv.errors import UnsupportedError

__all__ = ["prepare", "prepare_flex", "prepare_packed"]

Array = NDArray[Any]


def prepare(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """Prepare a call with the causal flag where that is all, else with a dense mask."""
    import torch

    torch.set_num_threads(threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    query, key, value = map(_tensor, (inputs.query, inputs.key, inputs.value))
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    if workload.rule.name == "causal":
        options["is_causal"] = True
    elif workload.rule.name != "all":
        options["attn_mask"] = _dense(workload).to(query.dtype) if _biased(workload) else (
            _dense(workload)
        )  # fmt: skip
    if inputs.grad_out is not None:
        return _both(attend, (query, key, value), _tensor(inputs.grad_out), options)

    def run() -> Any:
        with torch.no_grad():
            return attend(query, key, value, **options)

    return Prepared(run, lambda out: {"out": _array(out)})


def _both(attend: Callable[..., Any], leaves: tuple[Any, ...], grad: Any, options: Any) -> Prepared:
    import torch

    for leaf in leaves:
        leaf.requires_grad_()

    def run() -> Any:
        out = attend(*leaves, **options)
        return out, torch.autograd.grad(out, leaves, grad)

    def read(result: Any) -> dict[str, Array]:
        out, (query, key, value) = result
        arrays = {"out": out.detach(), "query": query, "key": key, "value": value}
        return {name: _array(tensor) for name, tensor in arrays.items()}

    return Prepared(run, read)


def prepare_packed(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """The heads of a group as rows of one query, so that their keys are read once."""
    import torch

    s = workload.shape
    if workload.rule.name != "all" or s.q_len != 1:
        raise UnsupportedError("heads are packed as rows for one query row without a mask only.")
    torch.set_num_threads(threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    query, key, value = map(_tensor, (inputs.query, inputs.key, inputs.value))
    packed = query.reshape(-1, s.num_kv_heads, s.num_heads // s.num_kv_heads, s.head_dim)

    def run() -> Any:
        with torch.no_grad():
            return attend(packed, key, value)

    return Prepared(run, lambda out: {"out": _array(out.reshape(-1, s.num_heads, 1, s.v_head_dim))})


def prepare_flex(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """The rule as a function; the mask's blocks are found once, outside the time."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.set_num_threads(threads)
    s, rule = workload.shape, workload.rule
    mask = create_block_mask(
        _mask_function(rule), s.batch_shape[0], None, s.q_len, s.kv_len, device="cpu"
    )
    score = _score_function(rule)
    compiled = torch.compile(flex_attention, dynamic=False)
    query, key, value = map(_tensor, (inputs.query, inputs.key, inputs.value))
    grouped = s.num_heads != s.num_kv_heads

    def run() -> Any:
        with torch.no_grad():
            return compiled(query, key, value, score_mod=score, block_mask=mask, enable_gqa=grouped)

    try:
        run()
    except Exception as error:
        raise UnsupportedError(f"flex_attention does not compile here: {error!s:.200}") from error
    return Prepared(run, lambda out: {"out": _array(out)})


def _mask_function(rule: Rule) -> Callable[..., Any]:
    import torch

    if rule.name in ("causal", "alibi causal"):
        return lambda b, h, i, j: j <= i
    if rule.name == "window":
        (width,) = rule.parameters
        return lambda b, h, i, j: (j <= i) & (j > i - width)
    if rule.name == "key lengths":
        lengths = torch.tensor(rule.parameters)
        return lambda b, h, i, j: j < lengths[b]
    if rule.name == "segments":
        ids = torch.repeat_interleave(
            torch.arange(len(rule.parameters)), torch.tensor(rule.parameters)
        )
        return lambda b, h, i, j: ids[i] == ids[j]
    return lambda b, h, i, j: j >= 0


def _score_function(rule: Rule) -> Callable[..., Any] | None:
    import torch

    if rule.slopes is None:
        return None
    slopes = torch.from_numpy(rule.slopes.astype(np.float32))
    return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()


def _biased(workload: Workload) -> bool:
    return workload.rule.slopes is not None


def _dense(workload: Workload) -> Any:
    """The whole mask: boolean, or with a bias floating with -inf."""
    import torch

    s, rule = workload.shape, workload.rule
    rows = np.arange(s.q_len)
    allowed = np.stack([rule.allowed(b, rows, s.kv_len) for b in range(s.batch_shape[0])])[:, None]
    if rule.slopes is None:
        return torch.from_numpy(np.ascontiguousarray(allowed))
    bias = np.stack([rule.bias(h, rows, s.kv_len) for h in range(s.num_heads)])
    return torch.from_numpy(np.where(allowed, bias, -np.inf).astype(np.float32))


def _tensor(array: Array) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _array(tensor: Any) -> Array:
    import torch

    return np.asarray(tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32))
