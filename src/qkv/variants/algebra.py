"""Masks joined with `|`, `&` and `~`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np

from qkv.errors import ArgumentError
from qkv.problem.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import MaskVariant
from qkv.variants.dense_mask import Mask


def as_mask(value: Any) -> Any:
    """A mask variant, or a boolean array as `Mask`."""
    if isinstance(value, np.ndarray):
        return Mask(value)
    if hasattr(value, "lower") and not isinstance(value, str | bytes | type):
        return value
    raise ArgumentError(
        f"a mask cannot be combined with {type(value).__name__}.",
        action="Combine masks with masks or boolean arrays.",
    )


def _allowed_alone(mask: Any, dense: Dense) -> np.ndarray[Any, Any]:
    before = dense.allowed
    dense.allowed = np.ones_like(before)
    mask.naive(dense)
    alone, dense.allowed = dense.allowed, before
    return alone


class _Joined(MaskVariant):
    masks: tuple[Any, ...]

    def naive_rows(self, dense: Dense) -> None:
        for mask in self.masks:
            mask.naive_rows(dense)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[MaskVariant]:
        from qkv.variants.causal import Causal
        from qkv.variants.global_tokens import GlobalTokens
        from qkv.variants.prefix import Prefix
        from qkv.variants.sliding_window import SlidingWindow

        if cls is AnyOf:
            return (
                Causal() | Prefix(min(3, shape.kv_len)),
                SlidingWindow(2, 2) | GlobalTokens([0]),
            )
        return (Causal() & SlidingWindow(3, None),)


@dataclass(frozen=True, repr=False)
class AnyOf(_Joined):
    """Allowed where any of the masks allows."""

    masks: tuple[Any, ...]

    def __repr__(self) -> str:
        return "(" + " | ".join(map(repr, self.masks)) + ")"

    def lower(self, builder: Builder) -> None:
        builder.mask(reduce(or_, [builder.condition(mask) for mask in self.masks]))

    def naive(self, dense: Dense) -> None:
        dense.allowed &= reduce(or_, [_allowed_alone(mask, dense) for mask in self.masks])


@dataclass(frozen=True, repr=False)
class AllOf(_Joined):
    """Allowed where all of the masks allow."""

    masks: tuple[Any, ...]

    def __repr__(self) -> str:
        return "(" + " & ".join(map(repr, self.masks)) + ")"

    def lower(self, builder: Builder) -> None:
        builder.mask(reduce(and_, [builder.condition(mask) for mask in self.masks]))

    def naive(self, dense: Dense) -> None:
        for mask in self.masks:
            mask.naive(dense)


@dataclass(frozen=True, repr=False)
class Not(MaskVariant):
    """Allowed where the mask forbids."""

    mask: Any

    def __repr__(self) -> str:
        return f"~{self.mask!r}"

    def lower(self, builder: Builder) -> None:
        builder.mask(~builder.condition(self.mask))

    def naive_rows(self, dense: Dense) -> None:
        self.mask.naive_rows(dense)

    def naive(self, dense: Dense) -> None:
        dense.allowed &= ~_allowed_alone(self.mask, dense)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[MaskVariant]:
        from qkv.variants.sliding_window import SlidingWindow

        return (~SlidingWindow(1, 1),)
