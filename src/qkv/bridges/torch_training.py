"""Repeated calls of tensors whose gradients are wanted: no pass is looked up or checked again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.backends import generation
from qkv.bridges import torch_functions as functions
from qkv.bridges.torch_guards import Guard, gradient_guard
from qkv.bridges.torch_passes import PreparedPasses
from qkv.bridges.torch_prepared import are_dense, gradients_wanted, keep, leaf_values, read_in_place
from qkv.call.bound import BoundCall

__all__ = ["prepare_training"]


class _TrainingCall(NamedTuple):
    """One of `qkv.bridges.torch_prepared.PreparedTensors`.

    `by_value` are copies of the leaves that are compared by value, as tensors.
    """

    fits: Guard
    values: tuple[bytes, ...]
    generation: int
    by_value: Mapping[int, Tensor]
    passes: PreparedPasses

    def compute(self, bound: BoundCall, read: Sequence[Any], rows: bool) -> Any:
        """See `qkv.bridges.torch_prepared.PreparedTensors`."""
        if not torch.is_grad_enabled():
            return None
        structure, tensors = bound
        if self.by_value:  # In the call these may be arrays of another library.
            tensors = [self.by_value.get(n, leaf) for n, leaf in enumerate(tensors)]
        out, lse = functions.attend_prepared(tensors, structure, self.passes)
        return (out, lse) if rows else out


def prepare_training(bound: BoundCall, tensors: Sequence[Tensor]) -> None:
    """Keep a call if its forward pass was prepared for as one of NumPy arrays.

    `tensors` are all its leaves as tensors.
    """
    read, values = read_in_place(bound), leaf_values(bound)
    if values is None or not are_dense(*read) or not gradients_wanted(read):
        return
    passes = PreparedPasses.of(bound.structure, tensors)
    if passes is not None:
        by_value = {n: tensors[n].detach().clone() for n in bound.structure.by_value}
        known = _TrainingCall(gradient_guard(*read), values, generation(), by_value, passes)
        keep(bound, read, values, known)
