"""Forward mode and double backward beside torch and JAX, which hold the weights of all pairs.

    python -m benchmarks.second_derivatives

Milliseconds on all threads, the least of several turns, causal and float32; the libraries take
turns, and results are compared before anything is timed. torch computes with its `math` kernel:
its fused one has neither. "Double backward" is a forward pass, its gradients, and their gradients.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import qkv.jax
import qkv.torch
from benchmarks.results.tables import Table, markdown
from qkv.errors import ArgumentError

__all__ = ["main"]

Array = NDArray[Any]
Call = Callable[[], Sequence[Any]]

SHAPES = ((1, 8, 64, 64), (16, 8, 64, 64), (1, 8, 512, 64), (1, 8, 2048, 64))
"""Batch, heads, tokens and elements of a head."""
ROUNDS = 5
TOLERANCE = 1e-4
"""The largest difference, as a part of the largest number."""


def _torch_math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch_sdpa(query, key, value, is_causal=True)


def _qkv(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return qkv.torch.scaled_dot_product_attention(query, key, value, is_causal=True)


def _torch_calls(attention: Callable[..., Any], arrays: Sequence[Array]) -> dict[str, Call]:
    tensors = [torch.from_numpy(array) for array in arrays]
    inputs, along = tensors[:3], tensors[3:]

    def forward_mode() -> Sequence[Any]:
        return torch.func.jvp(attention, tuple(inputs), tuple(along))

    def double_backward() -> Sequence[Any]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attention(*leaves)
        first = torch.autograd.grad(out, leaves, along[0], create_graph=True)
        return torch.autograd.grad(first, leaves, along)

    return {"forward mode": forward_mode, "double backward": double_backward}


def _jax_calls(attention: Callable[..., Any], arrays: Sequence[Array]) -> dict[str, Call]:
    """The calls of JAX, whose arrays have tokens before heads."""
    rows = [jax.numpy.asarray(array.swapaxes(1, 2)) for array in arrays]
    inputs, along = tuple(rows[:3]), tuple(rows[3:])

    def attend(*given: Any) -> Any:
        return attention(*given, is_causal=True)

    def forward_mode(given: Any, along: Any) -> Any:
        return jax.jvp(attend, given, along)

    def double_backward(given: Any, along: Any) -> Any:
        def gradients(*given: Any) -> Any:
            return jax.vjp(attend, *given)[1](along[0])

        return jax.vjp(gradients, *given)[1](along)

    def timed(function: Callable[..., Any]) -> Call:
        compiled = jax.jit(function)
        return lambda: [
            np.asarray(array).swapaxes(1, 2)
            for array in jax.block_until_ready(compiled(inputs, along))
        ]

    return {"forward mode": timed(forward_mode), "double backward": timed(double_backward)}


def _calls(arrays: Sequence[Array]) -> dict[str, dict[str, Call]]:
    return {
        "qkv, tensors": _torch_calls(_qkv, arrays),
        "torch": _torch_calls(_torch_math, arrays),
        "qkv, JAX": _jax_calls(qkv.jax.dot_product_attention, arrays),
        "JAX": _jax_calls(jax.nn.dot_product_attention, arrays),
    }


def _milliseconds(calls: dict[str, Call]) -> dict[str, float]:
    """The least time of each, after its result was compared with the first one's."""
    found = {name: [np.asarray(array) for array in call()] for name, call in calls.items()}
    expected = next(iter(found.values()))
    for name, arrays in found.items():
        for mine, theirs in zip(arrays, expected, strict=True):
            difference = float(np.abs(mine - theirs).max() / np.abs(theirs).max())
            if difference > TOLERANCE:
                raise ArgumentError(f"{name} differs by {difference:.1e}.", action="Compare it.")
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - began)
    return {name: 1e3 * seconds for name, seconds in least.items()}


def main() -> int:
    """Print a row for each shape and kind of derivative."""
    rng = np.random.default_rng(0)
    rows = []
    for shape in SHAPES:
        arrays = [rng.standard_normal(shape, np.float32) for _ in range(6)]
        calls = _calls(arrays)
        for kind in ("forward mode", "double backward"):
            times = _milliseconds({name: of[kind] for name, of in calls.items()})
            batch, heads, tokens, _ = shape
            where = f"{batch} x {heads} heads, {tokens} tokens"
            rows.append((kind, where, *(f"{time:.1f}" for time in times.values())))
    header = ("what", "of", *(f">{name}" for name in calls))
    title = f"Milliseconds, the least of {ROUNDS} turns."
    print("\n".join(markdown(Table(title, header, rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
