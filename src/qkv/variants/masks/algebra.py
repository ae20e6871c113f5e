"""Masks, and how they are joined with `|`, `&` and `~`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import ReadFunction, Role, Variant, short_repr


class MaskVariant(Variant):
    """A variant that only forbids pairs; combines with `|`, `&` and `~`.

    The other side of `|` and `&` is a mask or a boolean array. torch's compiler reads no `~` of any
    object: write `~mask` outside of a function that is compiled with `fullgraph=True`.

    Raises
    ------
    ArgumentError
        If the other side of `|` or `&` is neither a mask nor an array, or if `and`, `or`, `not` or
        `if` asks for the truth of a mask, which would silently drop one of two.

    Examples
    --------
    >>> import qkv
    >>> qkv.Causal() & ~qkv.SlidingWindow(1, 0)
    (Causal() & ~SlidingWindow(1, 0))
    """

    def __or__(self, other: Any) -> MaskVariant:
        return AnyOf((self, _checked_mask(other)))

    def __and__(self, other: Any) -> MaskVariant:
        return AllOf((self, _checked_mask(other)))

    def __invert__(self) -> MaskVariant:
        return Not(self)

    def __bool__(self) -> bool:
        raise ArgumentError(
            "a mask is neither true nor false, which `and`, `or`, `not` and `if` ask for.",
            [("mask", repr(self))],
            "Join masks with &, | and ~; for one that may be None write `mask is not None`.",
        )

    __ror__ = __or__
    __rand__ = __and__
    __array_ufunc__ = None


def _checked_mask(mask: Any) -> Any:
    if hasattr(mask, "dtype") and hasattr(mask, "ndim"):
        return mask  # The array may be of any library.
    if hasattr(mask, "lower") and not isinstance(mask, str | bytes | type):
        return mask
    raise ArgumentError(
        f"a mask cannot be combined with {type(mask).__name__}.",
        action="Combine masks with masks or boolean arrays.",
    )


def _with_functions(mask: Any, read: ReadFunction) -> Any:
    """A mask with what was read in the place of functions; None if one of them cannot be read."""
    return mask.with_functions(read) if hasattr(type(mask), "with_functions") else mask


class _Joined(MaskVariant):
    masks: tuple[Any, ...]

    sign: ClassVar[Literal["|", "&"]]
    roles: ClassVar[Mapping[str, Role]] = {"masks": "in_place"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.masks, tuple | list) or not self.masks:
            raise ArgumentError(
                f"{type(self).__name__} joins a tuple of masks, of which there is none.",
                action="Write mask | mask, or mask & mask.",
            )

    def with_functions(self, read: ReadFunction) -> Any:
        """See `qkv.variants.base.ReadFunction`."""
        masks = tuple([_with_functions(mask, read) for mask in self.masks])
        kind: Any = type(self)
        return None if any(mask is None for mask in masks) else kind(masks)

    def naive_rows(self, dense: Dense) -> None:
        for mask in self.masks:
            if not isinstance(mask, np.ndarray):
                mask.naive_rows(dense)

    def __repr__(self) -> str:
        return "(" + f" {self.sign} ".join(map(short_repr, self.masks)) + ")"

    def lower(self, builder: Builder) -> None:
        # A key limit of one side of `|` is not a limit of the whole mask.
        is_all = self.sign == "&"
        builder.mask(
            self._joined([builder.condition(mask, limits_whole=is_all) for mask in self.masks])
        )

    def naive(self, dense: Dense) -> None:
        dense.allowed &= self._joined([_allowed_by(mask, dense) for mask in self.masks])

    def _joined(self, conditions: list[Any]) -> Any:
        return reduce(or_ if self.sign == "|" else and_, conditions)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Self]:
        made: Any = cls
        return (made((rng.random(shape.scores) < 0.5, rng.random((shape.q_len, 1)) < 0.7)),)


@dataclass(frozen=True, eq=False, repr=False)
class AnyOf(_Joined):
    """Allowed where any of the masks allows.

    Examples
    --------
    >>> import qkv
    >>> qkv.Causal() | qkv.Prefix(3)
    (Causal() | Prefix(3))
    """

    masks: tuple[Any, ...]

    sign = "|"


@dataclass(frozen=True, eq=False, repr=False)
class AllOf(_Joined):
    """Allowed where all of the masks allow.

    Examples
    --------
    >>> import qkv
    >>> qkv.Causal() & qkv.Prefix(3)
    (Causal() & Prefix(3))
    """

    masks: tuple[Any, ...]

    sign = "&"


@dataclass(frozen=True, eq=False, repr=False)
class Not(MaskVariant):
    """Allowed where the mask forbids.

    Examples
    --------
    >>> import qkv
    >>> ~qkv.Prefix(3)
    ~Prefix(3)
    """

    mask: Any

    roles: ClassVar[Mapping[str, Role]] = {"mask": "in_place"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"~{short_repr(self.mask)}"

    def with_functions(self, read: ReadFunction) -> Any:
        """See `qkv.variants.base.ReadFunction`."""
        mask = _with_functions(self.mask, read)
        return None if mask is None else Not(mask)

    def lower(self, builder: Builder) -> None:
        builder.mask(~builder.condition(self.mask))

    def naive_rows(self, dense: Dense) -> None:
        if not isinstance(self.mask, np.ndarray):
            self.mask.naive_rows(dense)

    def naive(self, dense: Dense) -> None:
        dense.allowed &= ~_allowed_by(self.mask, dense)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Not]:
        return (cls(rng.random(shape.scores) < 0.5),)


def _allowed_by(mask: Any, dense: Dense) -> NDArray[np.bool_]:
    before = dense.allowed
    dense.allowed = np.ones_like(before)
    if isinstance(mask, np.ndarray):
        dense.allowed &= np.broadcast_to(dense.head_matrix(mask), before.shape)
    else:
        mask.naive(dense)
    allowed, dense.allowed = dense.allowed, before
    return allowed
