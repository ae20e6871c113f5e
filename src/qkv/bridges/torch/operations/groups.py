"""The groups in which torch's functions take their tensors; see `functions`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "RESULTS", "along_of", "numbers", "of_inputs", "parted", "results_first", "zeros_for_none",
]  # fmt: skip

RESULTS = 3
"""How many tensors the group `results` has."""


def numbers(needed: Sequence[bool]) -> tuple[int, ...]:
    """The arrays that need gradients."""
    return tuple([n for n, need in enumerate(needed) if need])


def of_inputs(
    gradients: Sequence[Tensor], wanted: Sequence[int], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of query, key, value and the wanted arrays in the places of all inputs."""
    places: list[Tensor | None] = [*gradients[:3], *([None] * (len(inputs) - 3))]
    for n, gradient in zip(wanted, gradients[3:], strict=True):
        places[3 + n] = gradient
    return places


def along_of(
    changes: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[tuple[int, ...], list[Tensor]]:
    """The arrays with tangents, and the tangents of query, key, value and these arrays."""
    directions = tuple(
        n
        for n, (change, array) in enumerate(zip(changes[3:], inputs[3:], strict=True))
        if change is not None and array.is_floating_point()
    )
    of_operands = zeros_for_none(changes[:3], inputs[:3])
    return directions, [*of_operands, *(c for n in directions if (c := changes[3 + n]) is not None)]


def zeros_for_none(given: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with zeros where there is none."""
    return [
        torch.zeros_like(other) if t is None else t for t, other in zip(given, like, strict=True)
    ]


def results_first(saved: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The group `results` and the rest; what is saved may be read but once."""
    return saved[:RESULTS], saved[RESULTS:]


def parted(
    tensors: Sequence[Tensor], directions: Sequence[int]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The groups `along` and `inputs`."""
    count = 3 + len(directions)
    return tensors[:count], tensors[count:]
