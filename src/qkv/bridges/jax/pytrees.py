"""Variants as pytrees of JAX: arguments and results of what it transforms.

The arrays of a variant are its leaves. Everything else, such as numbers and functions, is part of
the structure: another number is another program. JAX is not imported here, since this is for its
own import.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, cast

import numpy as np

from qkv.arrays import is_array
from qkv.call.binding.flatten import Leaves, flatten, unflatten, with_places

__all__ = ["register", "with_constants"]


class Unfilled:
    """A variant with numbers, None or the like in the places of its arrays.

    JAX, or `jax.tree.map`, makes such trees to say something of each leaf.

    Attributes
    ----------
    structure : tuple
        That of the variant; hashable.
    leaves : sequence of object
        What stands where its arrays would.
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, structure: tuple[Any, ...], leaves: Sequence[Any]) -> None:
        self.structure, self.leaves = structure, leaves

    def __repr__(self) -> str:
        return f"{self.structure[0].__name__} without arrays"


def register(tree_util: Any, kinds: Sequence[type]) -> None:
    """Tell JAX, by its module `jax.tree_util`, how variants are taken apart and put together."""
    for kind in kinds:
        tree_util.register_pytree_node(kind, _taken_apart, _put_together)
    tree_util.register_pytree_node(Unfilled, lambda u: (u.leaves, u.structure), _put_together)


def _taken_apart(variant: Any) -> tuple[list[Any], Hashable]:
    found = Leaves.none()
    structure = flatten(with_constants(variant), found, "in_place")
    leaves: list[Any] = []
    return leaves, with_places(structure, iter(found.arrays), leaves)


def _put_together(structure: Any, leaves: Sequence[Any]) -> Any:
    following = iter(leaves)
    made = unflatten(structure, lambda: next(following))
    # With a number, None or a list in a field, the variant would have another structure, and with
    # an object in a function, too.
    if all(map(is_array, leaves)) or _taken_apart(made)[1] == structure:
        return made
    return Unfilled(structure, leaves)


def with_constants(variant: Any) -> Any:
    """A variant whose float64 arrays that have no gradient are numbers.

    JAX would round these arrays to float32, as frequencies of RoPE, whose error is multiplied by
    positions.
    """
    if not is_dataclass(variant):
        return variant
    fields = {name: getattr(variant, name) for name in getattr(variant, "constant_fields", ())}
    wide = {
        name: tuple(field.tolist())
        for name, field in fields.items()
        if type(field) is np.ndarray and field.dtype == np.float64 and field.ndim == 1
    }
    return replace(cast(Any, variant), **wide) if wide else variant
