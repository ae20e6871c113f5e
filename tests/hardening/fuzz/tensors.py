"""Problems as torch tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import qkv

from .calls import calls, keywords
from .problem import Problem

Array = NDArray[Any]


def through_torch(
    problem: Problem, along: tuple[Sequence[Array], Sequence[Array]], own: Mapping[str, int]
) -> tuple[list[tuple[Array, Array]], list[dict[str, Array]]]:
    """Outputs with lse, and gradients of operands and of some variants, of every draw."""
    import torch

    outs, found = [], []
    for draw, call in enumerate(calls(problem)):
        leaves = {
            name: tensor(array).requires_grad_()
            for name, array in zip(("query", "key", "value"), call.arguments[:3], strict=True)
        }
        variants = list(call.variants)
        for name, n in own.items():
            leaves[name] = tensor(np.array(variants[n].array)).requires_grad_()
            variants[n] = qkv.Bias(leaves[name])
        results = qkv.attention(
            *list(leaves.values())[:3], *variants, return_lse=True,
            **{**keywords(problem), "backend": "auto"},
        )  # fmt: skip
        pairs = [
            (result, tensor(cotangent))
            for result, cotangent in zip(results, (along[0][draw], along[1][draw]), strict=True)
            if result.requires_grad
        ]
        gradients = torch.autograd.grad(
            [r for r, _ in pairs], list(leaves.values()), [c for _, c in pairs],
            materialize_grads=True,
        )  # fmt: skip
        out, lse = (array(result.detach()) for result in results)
        outs.append((out, lse))
        found.append(dict(zip(leaves, map(array, gradients), strict=True)))
    return outs, found


def tensor(array: Array) -> Any:
    """A tensor in the array's memory."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return tensor(array.view(np.int16)).view(torch.bfloat16)
    with warnings.catch_warnings():
        # torch warns of arrays that repeat their entries, which may not be written to.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def array(tensor: Any) -> Array:
    """The array of a tensor."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(tensor.numpy())
