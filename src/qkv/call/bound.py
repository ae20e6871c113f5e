"""A bound call: a structure without arrays, and the arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qkv.arrays import has_shape
from qkv.call.flatten import (
    Leaves,
    ReadInPlace,
    Tree,
    dumps,
    flatten,
    is_known,
    is_portable,
    loads,
    unflatten,
    uses_batch_index,
)
from qkv.call.options import DEFAULTS, OptionValues

__all__ = ["BoundCall", "Structure", "bind"]


class Structure(NamedTuple):
    """Everything of a call except its arrays; hashable.

    Attributes
    ----------
    operands : tuple of Tree
        Of query, key and value.
    variants : tuple of Tree
    options : tuple of Tree
        In the order of `OptionValues`.
    by_value : tuple of int
        Which leaves are compared by value.
    lengths : tuple of int
        Which of these are numbers of keys, which decoding steps read anew each time.
    per_step : tuple of int
        Which others decoding steps read anew each time.
    """

    operands: tuple[Tree, ...]
    variants: tuple[Tree, ...]
    options: tuple[Tree, ...]
    by_value: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    per_step: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether query, key and value are arrays, none of them in storage of its own."""
        return self.operands is _PLAIN or self.operands == _PLAIN

    @property
    def is_known(self) -> bool:
        """Whether two calls of this structure mean the same."""
        return all(map(is_known, self.variants)) and all(map(is_known, self.options))

    @property
    def is_portable(self) -> bool:
        """Whether `text` means the same in another process."""
        return all(map(is_portable, self.variants))

    @property
    def uses_batch_index(self) -> bool:
        """Whether a variant may tell batch rows apart by their flat index."""
        return any(map(uses_batch_index, self.variants))

    @property
    def layout(self) -> Any:
        """ "bhld" or "blhd"."""
        return self.options[1]

    @property
    def text(self) -> str:
        """The structure as JSON, for compilers that take constants as text."""
        # Tuples of trees are written as sequences.
        return dumps((tuple, *[(tuple, *group) for group in self]))

    @classmethod
    def from_text(cls, text: str) -> Structure:
        """The structure of which `text` was made."""
        _, *groups = loads(text)
        return cls(*[tuple(group[1:]) for group in groups])


class BoundCall(NamedTuple):
    """A call of a front door; made once, where it comes in.

    Attributes
    ----------
    structure : Structure
    leaves : sequence of arrays
        Of any library, in the order of the structure: query, key, value, then what variants and
        options hold.
    """

    structure: Structure
    leaves: Sequence[Any]

    def unflatten(self) -> UnboundCall:
        """Operands, variants and options again, made of these leaves."""
        taken: list[Any] = []
        following = iter(self.leaves)

        def next_array() -> Any:
            taken.append(next(following))
            return taken[-1]

        query, key, value = (unflatten(tree, next_array) for tree in self.structure.operands)
        owners: list[Any] = [None] * len(taken)
        variants = []
        for tree in self.structure.variants:
            variants.append(unflatten(tree, next_array))
            owners += [variants[-1]] * (len(taken) - len(owners))
        options = OptionValues(*[unflatten(tree, next_array) for tree in self.structure.options])
        owners += [None] * (len(taken) - len(owners))
        return UnboundCall(query, key, value, tuple(variants), options, tuple(owners))


class UnboundCall(NamedTuple):
    """A call as its caller wrote it.

    `owners` has the variant that holds each leaf, None for an operand or an option.
    """

    query: Any
    key: Any
    value: Any
    variants: tuple[Any, ...]
    options: OptionValues
    owners: tuple[Any, ...]


_PLAIN: tuple[Tree, ...] = (ReadInPlace, ReadInPlace, ReadInPlace)
_DEFAULT_OPTIONS = tuple([flatten(option, Leaves.none()) for option in DEFAULTS])


def bind(
    query: Any,
    key: Any,
    value: Any,
    variants: Sequence[Any],
    options: OptionValues = DEFAULTS,
    whole: Callable[[Any], int] | None = None,
) -> BoundCall:
    """Take a call apart.

    Parameters
    ----------
    query, key, value, variants, options
        As the front door was given them.
    whole : callable, optional
        As for `flatten`.
    """
    if not variants and options is DEFAULTS and _are_plain(query, key, value):
        return BoundCall(_PLAIN_CALL, [query, key, value])
    leaves = Leaves.none()
    operands = _PLAIN
    leaves.arrays.append(query)
    if _are_plain(query, key, value):
        leaves.arrays.extend((key, value))
    else:
        operands = (ReadInPlace, _operand(key, leaves), _operand(value, leaves))
    trees = tuple([flatten(variant, leaves, "in_place", whole) for variant in variants])
    option_trees = _DEFAULT_OPTIONS
    if options is not DEFAULTS:
        option_trees = tuple([flatten(option, leaves, "value", whole) for option in options])
    structure = Structure(
        operands,
        trees,
        option_trees,
        *map(tuple, (leaves.by_value, leaves.lengths, leaves.per_step)),
    )
    return BoundCall(structure, leaves.arrays)


_PLAIN_CALL = Structure(_PLAIN, (), _DEFAULT_OPTIONS)


def _are_plain(query: Any, key: Any, value: Any) -> bool:
    """Whether the operands are arrays, none of them in storage of its own."""
    return has_shape(query) and has_shape(key) and has_shape(value)


def _operand(operand: Any, leaves: Leaves) -> Tree:
    """The tree of an operand. Objects that are no arrays are refused later, when they are read."""
    if has_shape(operand) or not hasattr(operand, "ndim"):
        leaves.arrays.append(operand)
        return ReadInPlace
    return flatten(operand, leaves, "in_place")
